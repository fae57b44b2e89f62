"""LISTEN on a connection of its own: tells fetchers to look before they would poll."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn
from uuid import UUID, uuid4

import asyncpg
from asyncpg.pgproto.pgproto import UUID as DriverUUID  # noqa: N811 - its name is taken

from windlass.model.errors import ConfigurationError, StoreUnavailable
from windlass.service import LONGEST_BACKOFF, backoff, first_of, stop_task
from windlass.store.port import Wake
from windlass.store.postgres.connection import connect, translated
from windlass.store.postgres.dial import Route
from windlass.store.postgres.statements import Statements
from windlass.store.postgres.url import address
from windlass.store.sqlfiles import SqlFiles
from windlass.telemetry import emit

START_WITHIN = 1.0  # seconds that a worker waits for the first connection before it polls
CONNECT_WITHIN = 5.0  # seconds
ECHO_WITHIN = 5.0  # seconds for a notification to arrive
PROBE_EVERY = 3.8  # seconds
PROBED_WITHIN = 1.2  # seconds for the answer to a probe; a dead connection is known after both
LONGEST_UNTIL_MENDED = 30.0  # seconds before it is tried again after what others have to mend

ENDED = "the session that listened was ended"
_NAMED = re.compile(r"(-?[0-9]{1,19})(?: ([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}))?", re.ASCII)
_ORDER = re.compile(r"order ([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})", re.ASCII)
SCHEDULES = "schedules"
DEAF = (
    "wake-ups are off and new work is found by polling, since {}; set direct_url to a URL of this "
    "database on the server itself, with no pooler in transaction mode before it"
)


class Listener:
    """Keeps one connection listening, and repairs it; polling covers what is missed meanwhile."""

    def __init__(
        self,
        route: Route,
        sql: SqlFiles,
        run: Statements,
        ordered: Callable[[UUID], None] | None = None,
        scheduled: Callable[[], None] | None = None,
    ) -> None:
        self._route = route
        self._sql = sql
        self._run = run
        self._ordered = ordered  # told of the worker of whom something was asked
        self._scheduled = scheduled  # told that there is another schedule
        self._wake_channel = sql.in_schema("windlass.wake")
        self._echo_channel = sql.in_schema("windlass.echo")
        self._tried = asyncio.Event()
        self._entered = False
        self._told: set[str] = set()  # of this outage
        self._failures = 0
        self._trouble = ""

    @property
    def trouble(self) -> str:
        """Why nothing is heard; not if only somebody can mend it, for polling does meanwhile."""
        return self._trouble

    @asynccontextmanager
    async def listening(self, wake: Wake) -> AsyncIterator["Listener"]:
        """Call `wake` on every notification until the context is left."""
        keeping = asyncio.create_task(self._keep(wake), name="windlass-listener")
        try:
            # Not until it listens: a worker can do without.
            await first_of(self._tried.wait(), asyncio.sleep(START_WITHIN))
            self._entered = True
            yield self
        finally:
            await stop_task(keeping)

    async def _keep(self, wake: Wake) -> None:
        while True:
            try:
                await self._listen(wake)
            except Exception as error:  # noqa: BLE001 - whatever it was, the next one may listen
                needs_mending = isinstance(error, ConfigurationError)
                self._tell("listener.deaf" if needs_mending else "listener.lost", error)
                self._trouble = "" if needs_mending else str(error)
                self._tried.set()
                self._failures += 1
                longest = LONGEST_UNTIL_MENDED if needs_mending else LONGEST_BACKOFF
                await asyncio.sleep(backoff(self._failures, longest=longest))

    def _tell(self, event: str, error: Exception) -> None:
        """Say each once in an outage: that it began, and that somebody has to mend something."""
        if event not in self._told:
            self._told.add(event)
            emit(event, error=error)

    async def _listen(self, wake: Wake) -> NoReturn:
        """Listen until the connection is dead, and raise what it died of."""
        ended = asyncio.Event()

        def notified(_connection: Any, _process: int, _channel: str, said: str) -> None:
            order = _ORDER.fullmatch(said)
            if said == SCHEDULES:
                if self._scheduled is not None:
                    self._scheduled()
            elif order is None:
                wake(*_named(said))
            elif self._ordered is not None:
                self._ordered(UUID(order[1]))

        connection = await self._connect()
        try:
            connection.add_termination_listener(lambda _: ended.set())
            with translated(self._route.url):
                async with asyncio.timeout(CONNECT_WITHIN + ECHO_WITHIN):
                    await self._hear_echo(connection, ended)
                    await connection.add_listener(self._wake_channel, notified)
            self._trouble = ""
            if self._told:
                self._told.clear()
                emit("listener.repaired")
            self._tried.set()
            if self._entered:
                wake()  # something may have been missed
            with translated(self._route.url):
                await self._watch(connection, ended)
        finally:
            connection.terminate()

    async def _connect(self) -> asyncpg.Connection:
        with translated(self._route.url):
            async with asyncio.timeout(CONNECT_WITHIN):
                return await connect(self._route)

    async def _hear_echo(self, connection: asyncpg.Connection, ended: asyncio.Event) -> None:
        """Raise unless what another session says arrives here while this one does nothing.

        A pooler in transaction mode takes a LISTEN and delivers nothing. It is tried on a channel
        of its own, since that LISTEN stays in a session of somebody else.
        """
        word, heard = uuid4().hex, asyncio.Event()

        def echoed(_connection: Any, _process: int, _channel: str, said: str) -> None:
            if said == word:
                heard.set()

        await connection.add_listener(self._echo_channel, echoed)
        await self._run.execute("echo", word)
        await first_of(heard.wait(), ended.wait(), asyncio.sleep(ECHO_WITHIN))
        await connection.remove_listener(self._echo_channel, echoed)
        if ended.is_set():
            raise StoreUnavailable(ENDED)
        if not heard.is_set():
            raise ConfigurationError(
                DEAF.format(f"notifications do not arrive from {address(self._route.url)}")
            )

    async def _watch(self, connection: asyncpg.Connection, ended: asyncio.Event) -> NoReturn:
        """Look after the connection until it is dead, and raise what it died of."""
        session = None
        while not ended.is_set():
            row = await connection.fetchrow(self._sql.statement("probe"), timeout=PROBED_WITHIN)
            session = session or row["session"]
            if row["session"] != session or not row["listens"]:
                raise StoreUnavailable("the connection has lost the session that listened")
            await first_of(ended.wait(), asyncio.sleep(PROBE_EVERY))
            self._failures = 0  # it has held for a while
        raise StoreUnavailable(ENDED)


def _named(said: str) -> tuple[int | None, UUID | None]:
    """The lane and the task that a notification names, if it does: anybody may send one."""
    words = _NAMED.fullmatch(said)
    if words is None:
        return None, None
    lane = int(words[1])
    if not -(1 << 63) <= lane < 1 << 63:
        return None, None
    return lane, None if words[2] is None else DriverUUID(words[2])
