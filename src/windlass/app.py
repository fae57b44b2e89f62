"""Composition root: what an application defines, and what it runs and asks for."""

import asyncio
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Never, ParamSpec, Self, TypeVar, Unpack
from uuid import UUID

from windlass.assembly import Place, Wishes, make_worker
from windlass.breaker import Breaker
from windlass.client import (
    Call,
    CancelOptions,
    CancelReport,
    Client,
    DeadFilters,
    DeadLetters,
    Handle,
    Options,
    QueueOptions,
    Queues,
    Schedules,
    Task,
    TaskFilters,
    TaskSet,
    Types,
    Values,
    Workers,
    checked_calls,
    checked_cancellation,
    checked_schedule,
    enqueue_options,
    lane_rule,
    replay_rule,
    task_filter,
)
from windlass.database import Database
from windlass.failures.classifier import Classifier
from windlass.model.dead import ReplayRule
from windlass.model.errors import ConfigurationError, TaskNotFound
from windlass.model.limits import shown
from windlass.model.rule import RuleScope
from windlass.model.schedule import Schedule
from windlass.model.task import Enqueued, TaskRecord, TypeDefaults
from windlass.policy.breaker import COUNTED, Mode
from windlass.portal import Portal
from windlass.registry import (
    Middleware,
    Registry,
    breaker_settings,
    check_callback,
    checked_flag,
)
from windlass.runtime.health import starting
from windlass.runtime.monitor import Monitor
from windlass.runtime.options import OwnProcess
from windlass.runtime.serving import checked_serving
from windlass.runtime.worker import Worker
from windlass.service import cancelled_by, check_no_event_loop, run_now
from windlass.settings import Settings
from windlass.store.memory import MemoryStore
from windlass.store.port import Store
from windlass.store.postgres.schema import Schema
from windlass.store.postgres.url import checked_url

if TYPE_CHECKING:
    from windlass.model.examination import Finding

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
MiddlewareT = TypeVar("MiddlewareT", bound=Middleware)
HookT = TypeVar("HookT", bound=Callable[[], Any])
DeadHookT = TypeVar("DeadHookT", bound=Callable[[TaskRecord], Any])

_WORKER_OPTIONS = ("queues", "concurrency", "queue_concurrency", "shutdown_timeout")


class App(TaskSet):
    """An application: its tasks, and the store that holds them."""

    def __init__(self, url: str | None = None, **settings: Any) -> None:
        super().__init__()
        self.settings = Settings.load(settings)
        if self.settings.direct_url is not None:
            checked_url("direct_url", self.settings.direct_url)
        self.registry = Registry(Classifier(self.settings.error_rules))
        self._portal = Portal(at_exit=self.close)
        self._database = self._new_database(url)
        self.dead = DeadLetters(self)
        self.queues = Queues(self)
        self.types = Types(self)
        self.values = Values(self)
        self.workers = Workers(self)
        self.schedules = Schedules(self)
        self._on_startup: list[Callable[[], Any]] = []
        self._on_shutdown: list[Callable[[], Any]] = []
        self._on_dead: list[Callable[[TaskRecord], Any]] = []
        self._replay_rules: list[ReplayRule] = []
        self._schedules: dict[str, Schedule] = {}
        self._has_worker = False

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

    def error_rule(
        self,
        error_class: str,
        *,
        type: type[BaseException] | str | Sequence[type[BaseException] | str] = (),  # noqa: A002 - as in the file
        status: int | str | Sequence[int | str] = (),
        sqlstate: str | Sequence[str] = (),
        attribute: Mapping[str, Any] | None = None,
        message: str | None = None,
        name: str = "",
    ) -> None:
        """Say which class an error is of; tried before the rules of a file and those built in."""
        given = {
            "type": _type_names(type),
            "status": status,
            "sqlstate": sqlstate,
            "attribute": attribute,
            "message": message,
            "name": name,
        }
        asked = {key: value for key, value in given.items() if value not in (None, (), "")}
        self.registry.classifier.add({"class": error_class, **asked})

    def breaker(
        self,
        name: str,
        *,
        failures: int = 5,
        within: float | timedelta = 60,
        recovery: float | timedelta = 30,
        trials: int = 1,
        mode: Mode = "consecutive",
        rate: float = 0.5,
        minimum: int = 10,
        counts: Sequence[str] = COUNTED,
        timeout: float | timedelta | None = None,
        fallback: Callable[..., Any] | None = None,
        shared: bool = False,
    ) -> Breaker:
        """Make a circuit breaker for a dependency, or return the one of this name that is alike."""
        options = {
            "failures": failures,
            "within": within,
            "recovery": recovery,
            "trials": trials,
            "mode": mode,
            "rate": rate,
            "minimum": minimum,
            "counts": counts,
            "timeout": timeout,
            "shared": shared,
        }
        settings = breaker_settings(name, options)
        if fallback is not None and not callable(fallback):
            raise ConfigurationError(
                f"breaker '{name}': fallback {shown(fallback)}: give a function"
            )
        return self.registry.add_breaker(settings, fallback)

    def queue(self, name: str, **options: Unpack[QueueOptions]) -> None:
        """Declare what holds for a queue across all workers, from the next start of one on.

        `concurrency`, `rate` ("100/s") and `burst` limit its tasks, `ageing` is in seconds for each point of
        priority, or "strict". What an operator sets instead (`app.queues.change`) stands until it is reset.
        """
        self.registry.add_queue(lane_rule(RuleScope.QUEUE, name, options))

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

    def on_dead(self, function: DeadHookT) -> DeadHookT:
        """Run this with each task that failed for good, in the worker that ended it, after the fact."""
        check_callback("hook for dead tasks", function, "task")
        self._on_dead.append(function)
        return function

    def replay_dead(
        self,
        *,
        error_class: str | None = None,
        error: str | None = None,
        type: str | None = None,  # noqa: A002 - as it is called everywhere
        queue: str | None = None,
        after: float | timedelta = 600.0,
        times: int = 1,
        within: float | timedelta = 86_400.0,
    ) -> None:
        """Let the leader replay such dead letters by itself, so long after their end.

        `times` counts along the lineage: what is itself such a replay is not replayed again. Letters
        that were due for longer than `within` are left alone.
        """
        filters: DeadFilters = {
            "error_class": error_class,
            "error": error,
            "type": type,
            "queue": queue,
        }
        self._replay_rules.append(replay_rule(filters, after=after, times=times, within=within))

    def schedule(
        self,
        call: Call,
        *,
        cron: str | None = None,
        every: float | timedelta | None = None,
        timezone: str | None = None,
        name: str | None = None,
        overlap: str | None = None,
        catch_up: int | str = "one",
        jitter: float | timedelta = 0,
    ) -> None:
        """Let the leader enqueue this call at the times of a cron expression, or every so often.

        Workers make it known when they start. `name` is that of the task if it is left out, `overlap` is "skip", or
        "queue" where `catch_up` is more than one.
        """
        if self._has_worker:
            raise ConfigurationError(
                "app.schedule() was called after a worker had started, which knows nothing of it; "
                "call it where the tasks are defined"
            )
        schedule = checked_schedule(
            call,
            cron=cron,
            every=every,
            timezone=timezone,
            name=name,
            overlap=overlap,
            catch_up=catch_up,
            jitter=jitter,
            max_payload_bytes=self.settings.max_payload_bytes,
        )
        if schedule.name in self._schedules:
            raise ConfigurationError(
                f"schedule '{schedule.name}' is defined twice; give one of them another name="
            )
        self._schedules[schedule.name] = schedule

    def _add(self, task: Task[..., Any]) -> Task[..., Any]:
        self.registry.add(task.definition)
        task.outlet = self
        return super()._add(task)

    # Enqueueing

    async def enqueue(
        self, name: str, payload: dict[str, Any] | None = None, **options: Unpack[Options]
    ) -> Handle:
        """Enqueue by name, without the code; options as for `task.options(...)`."""
        checked = enqueue_options(options)
        async with self.using() as client:
            guest = client.checked_guest(checked.connection, is_async=True)
            defaults = await client.defaults(name)
            still_open = await self.client()  # somebody may have closed the app meanwhile
            enqueued = await still_open.enqueue_named(defaults, payload, checked, guest)
        return Handle(self, enqueued.id, enqueued.created)

    async def enqueue_many(self, calls: Iterable[Call], *, connection: Any = None) -> list[Handle]:
        """Enqueue all calls or none."""
        return await self.send(checked_calls(calls, connection))

    def enqueue_sync(
        self, name: str, payload: dict[str, Any] | None = None, **options: Unpack[Options]
    ) -> Handle:
        """`enqueue` for synchronous code."""
        checked = enqueue_options(options)
        if checked.connection is None:
            return self.run_sync("enqueue", lambda: self.enqueue(name, payload, **options))

        async def known() -> tuple[Client, TypeDefaults]:
            async with self.using() as client:
                client.checked_guest(checked.connection, is_async=False)
                return client, await client.defaults(name)

        client, defaults = self.run_sync("enqueue", known)
        guest = client.checked_guest(checked.connection, is_async=False)
        enqueued = run_now(client.enqueue_named(defaults, payload, checked, guest))
        return Handle(self, enqueued.id, enqueued.created)

    def enqueue_many_sync(self, calls: Iterable[Call], *, connection: Any = None) -> list[Handle]:
        """`enqueue_many` for synchronous code."""
        return self.send_sync("enqueue_many", checked_calls(calls, connection))

    async def send(self, calls: Sequence[Call]) -> list[Handle]:
        """Enqueue calls, all or none."""
        async with self._database.using() as opened:
            client = opened.client
            guest = client.guest(calls, is_async=True)
            return self._handles(await client.enqueue(calls, guest))

    def send_sync(self, name: str, calls: Sequence[Call]) -> list[Handle]:
        """`send` for synchronous code; on a connection of the caller it writes from its thread."""
        if all(call.options.connection is None for call in calls):
            return self.run_sync(name, lambda: self.send(calls))
        client = self.run_sync(name, self.client)
        guest = client.guest(calls, is_async=False)
        return self._handles(run_now(client.enqueue(calls, guest)))

    def _handles(self, enqueued: Iterable[Enqueued]) -> list[Handle]:
        return [Handle(self, one.id, one.created) for one in enqueued]

    def handle(self, task_id: str | UUID) -> Handle:
        """Return a handle of a task by its id."""
        try:
            return Handle(self, task_id if isinstance(task_id, UUID) else UUID(task_id))
        except (ValueError, AttributeError, TypeError):
            raise TaskNotFound(f"{shown(task_id)} is not the id of a task; ids are UUIDs") from None

    # Operating

    async def cancel_tasks(
        self,
        reason: str = "cancelled on request",
        *,
        by: str | None = None,
        dry_run: bool = False,
        everything: bool = False,
        **filters: Unpack[TaskFilters],
    ) -> CancelReport:
        """Cancel the tasks of a filter: waiting ones at once, others by asking their worker.

        Without `status` those that can be cancelled; without any filter only with `everything`.
        """
        cancellation = checked_cancellation(reason, by)
        wanted = task_filter(filters, everything=everything)
        checked_flag("dry_run", dry_run)
        report = CancelReport()
        async with self.using() as client:
            async for answer in client.cancel_all(wanted, cancellation, dry_run=dry_run):
                report.add(*answer)
        return report

    def cancel_tasks_sync(
        self, reason: str = "cancelled on request", **options: Unpack[CancelOptions]
    ) -> CancelReport:
        """`cancel_tasks` for synchronous code."""
        return self.run_sync("cancel_tasks", lambda: self.cancel_tasks(reason, **options))

    async def stop_retries(self, name: str, reason: str = "stopped on request") -> int:
        """Stop trying failed tasks of a type again: from now on, and those that wait for it.

        They are dead, until somebody retries them. Return how many waited.
        """
        async with self.using() as client:
            return await client.stop_retries(name, reason)

    async def allow_retries(self, name: str) -> bool:
        """Try failed tasks of a type again from now on; return whether that was stopped."""
        async with self.using() as client:
            return await client.allow_retries(name)

    def stop_retries_sync(self, name: str, reason: str = "stopped on request") -> int:
        """`stop_retries` for synchronous code."""
        return self.run_sync("stop_retries", lambda: self.stop_retries(name, reason))

    def allow_retries_sync(self, name: str) -> bool:
        """`allow_retries` for synchronous code."""
        return self.run_sync("allow_retries", lambda: self.allow_retries(name))

    # Running

    @asynccontextmanager
    async def worker(self, **options: Any) -> AsyncIterator[Worker]:
        """Run a worker beside the block, and drain it at the end.

        A worker that fails cancels the block and raises its error from there.
        """
        _check_worker_options(options)
        with self.monitor() as monitor:
            async with self:
                worker = await self.new_worker(monitor=monitor, **options)
                async with _running(worker):
                    yield worker

    async def run_worker(self, *, until_idle: bool = False, **options: Any) -> None:
        """Run a worker until it is cancelled, or until nothing is ready and nothing runs."""
        _check_worker_options(options)
        checked_flag("until_idle", until_idle)
        with self.monitor() as monitor:
            async with self:
                worker = await self.new_worker(monitor=monitor, **options)
                running = asyncio.create_task(
                    worker.run(until_idle=until_idle), name="windlass-worker"
                )
                try:
                    await asyncio.shield(running)
                except asyncio.CancelledError:
                    worker.stop()  # or its handlers would go on
                    await running
                    raise

    @contextmanager
    def monitor(self) -> Iterator[Monitor | None]:
        """Answer probes while the block lasts, if there is a port for it.

        Of a worker that starts, until one runs: it may have to wait for its database.
        """
        settings = self.settings
        if not settings.health_port:
            yield None
            return
        monitor = Monitor(settings.health_host, settings.health_port, starting())
        monitor.start()
        try:
            yield monitor
        finally:
            monitor.stop()

    async def new_worker(
        self,
        *,
        queues: Sequence[str] | None = None,
        concurrency: int | None = None,
        queue_concurrency: Mapping[str, int] | None = None,
        shutdown_timeout: float | timedelta | None = None,
        monitor: Monitor | None = None,
        process: OwnProcess | None = None,
    ) -> Worker:
        """Make a worker that is not running yet, for whoever handles signals, and may give it a process of its own."""
        self.registry.check_breakers()
        self._has_worker = True
        settings = self.settings
        if concurrency is not None:
            settings = replace(settings, concurrency=concurrency)
        if isinstance(shutdown_timeout, timedelta):
            shutdown_timeout = shutdown_timeout.total_seconds()
        if shutdown_timeout is not None:
            settings = replace(settings, shutdown_timeout=shutdown_timeout)
        return make_worker(
            await self.store(),
            self.registry,
            settings,
            serving=checked_serving(queues, queue_concurrency),
            place=Place(self, self.url),
            wishes=Wishes(
                on_startup=self._on_startup,
                on_shutdown=self._on_shutdown,
                on_dead=self._on_dead,
                replay_rules=tuple(self._replay_rules),
                schedules=tuple(self._schedules.values()),
                # What is in memory alone would go with the process.
                process=None if self.url == "memory:" else process,
            ),
            monitor=monitor,
        )

    # Not built yet

    def workflow(self, *_: Any, **__: Any) -> Never:
        """Not built yet."""
        raise ConfigurationError("app.workflow() is not built yet")

    def saga(self, *_: Any, **__: Any) -> Never:
        """Not built yet."""
        raise ConfigurationError("app.saga() is not built yet")

    # For tests

    @property
    def memory(self) -> MemoryStore | None:
        """The store, if it is in memory."""
        return self._database.memory

    @contextmanager
    def kept_at(self, url: str, *, memory: MemoryStore | None = None) -> Iterator[None]:
        """Use another database, or this memory, while the block lasts, and answer no probes.

        Tests run beside each other, and the port is one.
        """
        outside, settings = self._database, self.settings
        self.settings = replace(settings, health_port=0)
        self._database = self._new_database(url, memory)
        try:
            yield
        finally:
            inside, self._database, self.settings = self._database, outside, settings
            inside.close_portal()

    # Opening and closing

    def _new_database(self, url: str | None, memory: MemoryStore | None = None) -> Database:
        return Database(
            url, settings=self.settings, registry=self.registry, portal=self._portal, memory=memory
        )

    @property
    def url(self) -> str:
        """The database that holds the tasks."""
        return self._database.url

    async def __aenter__(self) -> Self:
        await self._database.enter()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._database.leave()

    async def close(self) -> None:
        """Give back what this event loop holds; a later call opens it again."""
        await self._database.close()

    def __enter__(self) -> Self:
        check_no_event_loop("with app:", instead="async with app:")
        self._database.enter_sync()
        return self

    def __exit__(self, *_: object) -> None:
        self._database.leave_sync()

    def close_sync(self) -> None:
        """Give back what synchronous calls hold, once none is under way in any thread."""
        self._database.close_sync()

    def run_sync(self, name: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine for a caller that has no event loop."""
        return self._database.run_sync(name, call)

    async def client(self) -> Client:
        """Return the client of the running event loop, opening it if need be."""
        return (await self._database.opened()).client

    @asynccontextmanager
    async def using(self) -> AsyncIterator[Client]:
        """Yield the client of the running event loop, which stays open while the block lasts."""
        async with self._database.using() as opened:
            yield opened.client

    @asynccontextmanager
    async def storing(self) -> AsyncIterator[Store]:
        """Yield the store of the running event loop, which stays open while the block lasts."""
        async with self._database.using() as opened:
            yield opened.store

    async def store(self) -> Store:
        """Return the store of the running event loop, opening it if need be."""
        return (await self._database.opened()).store

    async def schema(self) -> Schema:
        """Return the schema of a database that need not be migrated."""
        return await self._database.schema()

    async def diagnosis(self) -> "list[Finding]":
        """Look at the database without opening or migrating it; return what is found."""
        return await self._database.diagnosis()


@asynccontextmanager
async def _running(worker: Worker) -> AsyncIterator[None]:
    """Let it run while the block lasts; one that fails cancels the block."""
    started = asyncio.Event()
    running = asyncio.create_task(worker.run(started=started.set), name="windlass-worker")
    beginning = asyncio.create_task(started.wait())
    try:
        await asyncio.wait([running, beginning], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        async with cancelled_by(running):
            yield
    finally:
        beginning.cancel()
        worker.stop()
        await running


def _type_names(given: Any) -> list[Any]:
    """The names of exception types, given as classes or by name, one or several."""
    several = given if isinstance(given, list | tuple | set | frozenset) else [given]
    return [
        f"{one.__module__}.{one.__qualname__}" if isinstance(one, type) else one for one in several
    ]


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
