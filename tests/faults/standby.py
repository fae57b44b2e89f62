"""A primary and its standby, to promote and to kill."""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import asyncpg

from faults.processes import until
from windlass.store.postgres import embedded_start
from windlass.store.postgres.embedded import EmbeddedServer
from windlass.store.postgres.embedded_start import Place

SETTINGS = {"fsync": "off"}


class Node:
    """One of the two servers."""

    def __init__(self, directory: Path) -> None:
        self.place = Place(directory)
        self._server: EmbeddedServer | None = None

    def start(self) -> None:
        self._server = EmbeddedServer.acquire(self.place.directory, settings=SETTINGS)

    @property
    def url(self) -> str:
        assert self._server is not None
        return self._server.url

    @property
    def host(self) -> Path:
        return self.place.socket_folder

    def kill(self) -> None:
        process_id = self.place.serving_process()
        assert process_id is not None
        os.kill(process_id, signal.SIGKILL)
        until(lambda: self.place.serving_process() is None)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Let it accept connections and answer nothing, as a host that lost its network."""
        process_id = self.place.serving_process()
        assert process_id is not None
        os.kill(process_id, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(process_id, signal.SIGCONT)

    async def run(self, statement: str) -> Any:
        connection = await asyncpg.connect(self.url)
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    async def set(self, name: str, value: str) -> None:
        """Change a setting for all sessions; those that are open hear of it before new ones do."""
        await self.run(f"ALTER SYSTEM SET {name} = '{value}'")
        await self.run("SELECT pg_reload_conf()")
        while await self.run(f"SHOW {name}") != value:
            await asyncio.sleep(0.01)

    def stop(self) -> None:
        if self._server is not None:
            self._server.release()


class Pair:
    """A primary, and a standby to which it ships its changes before it acknowledges them."""

    def __init__(self, folder: Path, with_data: Callable[[Path], Path]) -> None:
        self.primary = Node(with_data(folder / "primary"))
        self.standby = Node(folder / "standby")
        self.address = folder / "address"

    def start(self) -> None:
        with (self.primary.place.data / "pg_hba.conf").open("a") as rules:
            rules.write("local replication all trust\n")
        self.primary.start()
        self._copy()
        self.standby.start()
        asyncio.run(self._replicate())
        self.move_address(self.primary)

    def _copy(self) -> None:
        place = self.standby.place
        place.prepare()
        os.close(place.open_file("server.lock"))
        identity, _ = embedded_start._choose_identity(place)
        place.data.mkdir(mode=0o700)
        identity.give(place.data)
        source = ["-h", str(self.primary.host), "-p", "5432", "-U", "windlass"]
        how = ["-D", str(place.data), "-R", "-X", "stream", "--checkpoint=fast", "--no-sync"]
        embedded_start._must_run(place, identity, "pg_basebackup", *source, *how)

    async def _replicate(self) -> None:
        await self.primary.set("synchronous_commit", "remote_apply")
        await self.primary.set("synchronous_standby_names", "*")
        caught_up = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
        while not await self.primary.run(caught_up):
            await asyncio.sleep(0.01)

    def url(self, *hosts: Path, **parameters: str) -> str:
        """The URL of these hosts, in this order."""
        named = quote(",".join(map(str, hosts)), safe="")
        ports = quote(",".join("5432" for _ in hosts), safe="")
        more = "".join(f"&{name}={value}" for name, value in parameters.items())
        return f"postgresql://windlass@/windlass?host={named}&port={ports}{more}"

    def move_address(self, node: Node) -> None:
        """Let the address, which stays the same, lead to this server."""
        new = self.address.with_suffix(".new")
        new.symlink_to(node.host)
        new.rename(self.address)

    async def promote(self) -> None:
        assert await self.standby.run("SELECT pg_promote()")

    def stop(self) -> None:
        self.standby.stop()
        self.primary.stop()


@contextmanager
def pair(with_data: Callable[[Path], Path]) -> Iterator[Pair]:
    """In a folder with a short name: a socket's must be, and its folder is linked to."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        pair = Pair(folder, with_data)
        try:
            pair.start()
            yield pair
        finally:
            pair.stop()
    finally:
        shutil.rmtree(folder)
