"""A proxy before PostgreSQL that cuts, delays, stalls or half-opens a connection at a named point."""

import asyncio
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from faults.carrying import CHUNK, Connection
from faults.messages import Message, When
from faults.rules import Effect, Point, Recording, Rule, after, before, reply

__all__ = ["Effect", "Point", "Proxy", "Rule", "When", "after", "before", "reply"]

PORT = 6543  # only the name of a socket in a folder of our own


class Proxy:
    """Listens on a socket of its own and passes everything on, but for what rules and calls undo."""

    def __init__(self, server_url: str, *, pass_cancellations: bool = True) -> None:
        self.pass_cancellations = pass_cancellations
        self.refusing = False  # new connections are closed at once
        self.connections: set[Connection] = set()
        self.accepted = 0
        self._upstream = _address(server_url)
        self._folder = Path()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: list[BaseException] = []
        self._rules: list[Rule] = []
        self._recordings: list[Recording] = []
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def __aenter__(self) -> Self:
        # The path of a socket may have a hundred characters, so it does not go where TMPDIR says.
        self._folder = Path(tempfile.mkdtemp(prefix="cut-", dir="/tmp"))
        path = self._folder / f".s.PGSQL.{PORT}"
        self._server = await asyncio.start_unix_server(self._accept, path, limit=CHUNK)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self.refusing = True
        self._server.close()
        tasks = list(self._tasks)
        self.cut_all()
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()
        shutil.rmtree(self._folder)
        for end in [*self._failed, *ends]:
            if isinstance(end, Exception):
                raise end

    def url(self, database_url: str) -> str:
        """The same database, through the proxy."""
        parts = urlsplit(database_url)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        query |= {"host": str(self._folder), "port": str(PORT)}
        owner, at, _ = parts.netloc.rpartition("@")
        return f"postgresql://{owner}{at}{parts.path}?{urlencode(query)}"

    # At named points

    def at(
        self,
        point: Point,
        effect: Effect = Effect.CUT,
        *,
        text: str = "",
        times: int | None = 1,
        delay: float = 0.0,
    ) -> Rule:
        """Let something happen at a point, on statements whose text holds `text`.

        From the n-th message on it happens so many times; None: always.
        """
        rule = Rule(point, effect, text=text, times=times, delay=delay)
        self._rules.append(rule)
        return rule

    def drop(self, rule: Rule) -> None:
        """Forget a rule, and let go what it holds up."""
        rule.release()
        self._rules.remove(rule)

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Keep what passes meanwhile."""
        recording = Recording()
        self._recordings.append(recording)
        try:
            yield recording
        finally:
            self._recordings.remove(recording)

    # At any moment

    def cut_one(self, chance: random.Random) -> bool:
        """Cut a connection drawn by chance; false if there is none."""
        alive = sorted(self.connections, key=lambda connection: connection.number)
        if alive:
            chance.choice(alive).cut()
        return bool(alive)

    def cut_all(self) -> int:
        """Cut every connection; return how many there were."""
        alive = list(self.connections)
        for connection in alive:
            connection.cut()
        return len(alive)

    def half_open_all(self) -> int:
        """Let nothing pass any more on the connections there are; new ones are as ever."""
        alive = list(self.connections)
        for connection in alive:
            connection.half_open()
        return len(alive)

    def pause(self) -> None:
        """Hold up everything, new connections too, until resumed."""
        self._flowing.clear()

    def resume(self) -> None:
        """Go on where everything was held up."""
        self._flowing.set()

    # For its connections

    async def flowing(self) -> None:
        """Wait while everything is paused."""
        await self._flowing.wait()

    def met(self, when: When, message: Message) -> Rule | None:
        """Note a message and return the rule that befalls it."""
        for recording in self._recordings:
            if when is not When.AFTER:
                recording.seen.append((when, message))
        befallen = [rule for rule in self._rules if rule.befalls(when, message)]
        if not befallen:
            return None
        befallen[0].take()
        return befallen[0]

    def forget(self, connection: Connection) -> None:
        """Take note that a connection is over."""
        self.connections.discard(connection)

    async def connect_upstream(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection to the server."""
        if isinstance(self._upstream, str):
            return await asyncio.open_unix_connection(self._upstream, limit=CHUNK)
        return await asyncio.open_connection(*self._upstream, limit=CHUNK)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            writer.transport.abort()
            return
        self.accepted += 1
        connection = Connection(self, self.accepted, (reader, writer))
        self.connections.add(connection)
        task = asyncio.create_task(connection.run(), name=f"proxy-{connection.number}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed.append(error)


def _address(url: str) -> str | tuple[str, int]:
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    host = query.get("host") or unquote(parts.hostname or "") or "127.0.0.1"
    port = int(query.get("port") or parts.port or 5432)
    return f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, port)
