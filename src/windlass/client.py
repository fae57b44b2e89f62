"""What a caller may ask: enqueue, look, wait, cancel, change, retry."""

import asyncio
import os
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload
from uuid import UUID

from windlass.codec import check_plain, decode_json
from windlass.context import Context, current_fence
from windlass.model.errors import (
    ConfigurationError,
    IdempotencyConflict,
    PayloadError,
    TaskCancelled,
    TaskFailed,
    TaskNotFound,
    WindlassError,
)
from windlass.model.limits import shown
from windlass.model.task import (
    CancelAnswer,
    Change,
    Ended,
    Enqueued,
    Fence,
    NewTask,
    TaskRecord,
    TaskState,
    TypeDefaults,
)
from windlass.registry import (
    Registry,
    TaskDefinition,
    TaskOptions,
    checked_flag,
    checked_name,
    checked_names,
    checked_priority,
    checked_seconds,
    define,
)
from windlass.store.port import EnqueueStore, OperateStore, ReadStore

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

FIRST_LOOK = 0.02  # seconds until the first look for a result; the pause grows from there
LONGEST_LOOK = 0.25
LONGEST_REASON = 2000  # characters
NOT_BUILT = ("expires", "ordering_key", "on_dead", "connection")


_UNSTORABLE = re.compile(r"[\x00\ud800-\udfff]")  # what PostgreSQL holds in no text


class ClientStore(EnqueueStore, OperateStore, ReadStore, Protocol):
    """The part of a store that applications use."""


class Outlet(Protocol):
    """Where calls go: an open application."""

    async def send(self, calls: Sequence["Call"]) -> list["Handle"]:
        """Enqueue calls, all or none."""

    def run_sync(self, name: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine for a caller that has no event loop."""


def new_task_id() -> UUID:
    """Make a UUID of version 7: ordered by time, so that keys made together lie together."""
    milliseconds = time.time_ns() // 1_000_000
    tail = int.from_bytes(os.urandom(10), "big")
    value = (milliseconds & (1 << 48) - 1) << 80 | tail
    value = value & ~(0xF << 76) | 7 << 76
    value = value & ~(0x3 << 62) | 2 << 62
    return UUID(int=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnqueueOptions:
    """What `options(...)` takes; None leaves the default of the type."""

    queue: str | None = None
    priority: int | str | None = None
    delay: float | timedelta | None = None
    at: datetime | None = None
    idempotency_key: str | None = None
    max_attempts: int | None = None
    tags: Sequence[str] | None = None
    detached: bool = False
    expires: Any = None
    ordering_key: Any = None
    on_dead: Any = None
    connection: Any = None

    def new_task(self, defaults: TypeDefaults, payload: str) -> NewTask:
        """Check the options and build the task they describe."""
        for name in NOT_BUILT:
            if getattr(self, name) is not None:
                raise ConfigurationError(f"option '{name}' is not built yet")
        if self.delay is not None and self.at is not None:
            raise ConfigurationError("options 'delay' and 'at' exclude each other; give one")
        attempts = self.max_attempts
        if attempts is not None and (type(attempts) is not int or not 1 <= attempts <= 30_000):
            raise ConfigurationError(
                f"max_attempts {shown(attempts)}: use an integer from 1 to 30000"
            )
        key = self.idempotency_key
        return NewTask(
            id=new_task_id(),
            type=defaults.name,
            payload=payload,
            queue=defaults.queue if self.queue is None else checked_name("queue", self.queue),
            priority=defaults.priority
            if self.priority is None
            else checked_priority(self.priority),
            max_attempts=defaults.max_attempts if attempts is None else attempts,
            delay=0.0 if self.delay is None else checked_seconds("delay", self.delay),
            at=None if self.at is None else checked_time("at", self.at),
            idempotency_key=None if key is None else checked_name("idempotency_key", key),
            tags=() if self.tags is None else checked_names("tags", "tag", self.tags),
            retention=defaults.retention,
        )


def checked_time(what: str, value: Any) -> datetime:
    """Return an aware datetime or raise."""
    if not isinstance(value, datetime):
        raise ConfigurationError(f"{what} {shown(value)}: use a datetime with a time zone")
    if value.tzinfo is None or value.utcoffset() is None:
        raise ConfigurationError(f"{what} {value!r} has no time zone; use an aware datetime")
    try:
        return value.astimezone(UTC)
    except OverflowError:
        # In UTC the first and the last hours of the calendar may lie in the years 0 and 10000.
        if value.year == 1:
            return datetime.min.replace(tzinfo=UTC)
        raise ConfigurationError(
            f"{what} {value!r} is after the year 9999; use an earlier time"
        ) from None


def checked_change(*, priority: Any, queue: Any, at: Any, delay: Any) -> Change:
    """Return what is to be changed of a task, or raise."""
    if at is not None and delay is not None:
        raise ConfigurationError("options 'delay' and 'at' exclude each other; give one")
    if priority is None and queue is None and at is None and delay is None:
        raise ConfigurationError("nothing to change; give priority, queue, at or delay")
    return Change(
        priority=None if priority is None else checked_priority(priority),
        queue=None if queue is None else checked_name("queue", queue),
        at=None if at is None else checked_time("at", at),
        delay=None if delay is None else checked_seconds("delay", delay),
    )


def checked_reason(value: Any) -> str:
    """Return a text that says why, or raise."""
    if not isinstance(value, str):
        raise ConfigurationError(f"reason {shown(value)} must be a string")
    if len(value) > LONGEST_REASON:
        raise ConfigurationError(
            f"reason {shown(value)} has {len(value)} characters; use at most {LONGEST_REASON}"
        )
    if _UNSTORABLE.search(value):
        raise ConfigurationError(
            f"reason {shown(value)} holds a NUL character or half of a surrogate pair; remove it"
        )
    return value


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a task, ready to be enqueued."""

    definition: TaskDefinition
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: EnqueueOptions

    def new_task(self, max_payload_bytes: int) -> NewTask:
        """Check and encode the call."""
        payload = self.definition.codec.encode(self.args, self.kwargs, max_bytes=max_payload_bytes)
        return self.options.new_task(self.definition.defaults, payload)


class Task(Generic[P, R]):
    """A task type: call it to run the function, enqueue it to have a worker do so."""

    def __init__(self, definition: TaskDefinition) -> None:
        self.definition = definition
        self.outlet: Outlet | None = None
        self.__name__ = definition.name
        self.__doc__ = definition.function.__doc__
        self.__wrapped__ = definition.function

    @property
    def name(self) -> str:
        """The name of the type."""
        return self.definition.name

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Simply run the function."""
        result: R = self.definition.function(*args, **kwargs)
        return result

    def __repr__(self) -> str:
        return f"<Task {self.name!r}>"

    def options(self, **options: Any) -> "TaskWithOptions[P, R]":
        """Set options for the calls that follow."""
        return TaskWithOptions(self, enqueue_options(options))

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call:
        """Describe a call, for `enqueue_many`."""
        return Call(self.definition, args, kwargs, EnqueueOptions())

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> "Handle":
        """Hand the call to the workers."""
        return (await self._bound().send([self.call(*args, **kwargs)]))[0]

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> "Handle":
        """Hand the call to the workers, from synchronous code."""
        call = self.call(*args, **kwargs)
        outlet = self._bound()
        return outlet.run_sync("enqueue", lambda: outlet.send([call]))[0]

    def _bound(self) -> Outlet:
        if self.outlet is None:
            raise ConfigurationError(
                f"task '{self.name}' belongs to no app yet; call app.include(...) first"
            )
        return self.outlet


class TaskWithOptions(Generic[P, R]):
    """A task with options set for its next calls."""

    def __init__(self, task: Task[P, R], options: EnqueueOptions) -> None:
        self._task = task
        self._options = options

    def options(self, **options: Any) -> "TaskWithOptions[P, R]":
        """Set further options."""
        enqueue_options(options)
        return TaskWithOptions(self._task, replace(self._options, **options))

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call:
        """Describe a call, for `enqueue_many`."""
        return Call(self._task.definition, args, kwargs, self._options)

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> "Handle":
        """Hand the call to the workers."""
        return (await self._task._bound().send([self.call(*args, **kwargs)]))[0]  # noqa: SLF001

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> "Handle":
        """Hand the call to the workers, from synchronous code."""
        call = self.call(*args, **kwargs)
        outlet = self._task._bound()  # noqa: SLF001
        return outlet.run_sync("enqueue", lambda: outlet.send([call]))[0]


def enqueue_options(options: dict[str, Any]) -> EnqueueOptions:
    """Check the names of what a call was given."""
    try:
        return EnqueueOptions(**options)
    except TypeError:
        known = EnqueueOptions.__dataclass_fields__
        unknown = ", ".join(f"'{name}'" for name in options if name not in known)
        raise ConfigurationError(
            f"option {unknown} is not known; options are: {', '.join(known)}"
        ) from None


class TaskDecorator(Protocol):
    """What `@app.task(...)` with options returns."""

    @overload
    def __call__(self, function: Callable[Concatenate[Context, P], R], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...


class TaskSet:
    """Tasks of a library, for an application to include."""

    def __init__(self) -> None:
        self.tasks: list[Task[..., Any]] = []

    @overload
    def task(self, function: Callable[Concatenate[Context, P], R], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(self, function: None = None, /, **options: Any) -> TaskDecorator: ...

    def task(self, function: Any = None, /, **options: Any) -> Any:
        """Define a task; used as `@tasks.task` or `@tasks.task(...)`."""
        checked = task_options(options)
        if function is None:
            return lambda decorated: self._add(Task(define(decorated, checked)))
        return self._add(Task(define(function, checked)))

    def _add(self, task: Task[..., Any]) -> Task[..., Any]:
        """Take in a task; an application also registers it."""
        self.tasks.append(task)
        return task


def task_options(options: dict[str, Any]) -> TaskOptions:
    """Check the names of what a task was defined with."""
    if "limit" in options:
        raise ConfigurationError("task option 'limit' is not built yet")
    try:
        return TaskOptions(**options)
    except TypeError:
        known = TaskOptions.__dataclass_fields__
        unknown = ", ".join(f"'{name}'" for name in options if name not in known)
        raise ConfigurationError(
            f"task option {unknown} is not known; options are: {', '.join(known)}"
        ) from None


class Client:
    """The verbs of a caller, on a store that is open."""

    def __init__(self, *, store: ClientStore, registry: Registry, max_payload_bytes: int) -> None:
        self._store = store
        self._registry = registry
        self._max_payload_bytes = max_payload_bytes
        self._waiter = ResultWaiter(store)

    async def enqueue(self, calls: Sequence[Call]) -> list[Enqueued]:
        """Enqueue calls, all or none; a bad one among many is named by its index."""
        tasks = []
        for index, call in enumerate(calls):
            try:
                tasks.append(call.new_task(self._max_payload_bytes))
            except (ConfigurationError, PayloadError) as error:
                if len(calls) == 1:
                    raise
                raise type(error)(f"item {index}: {error}") from error
        if not tasks:
            return []
        detached = {checked_flag("detached", call.options.detached) for call in calls}
        fence = None if detached == {True} else self._fence()
        try:
            return await self._store.enqueue(tasks, fence=fence)
        except IdempotencyConflict as conflict:
            if len(calls) == 1:
                raise
            raise IdempotencyConflict(f"item {conflict.index}: {conflict}") from conflict

    async def enqueue_named(
        self, name: str, payload: dict[str, Any], options: EnqueueOptions
    ) -> Enqueued:
        """Enqueue by name, with the defaults that a worker registered or this app defines."""
        checked_name("task name", name)
        limit = self._max_payload_bytes
        definition = self._registry.find(name)
        if definition is not None:
            defaults = definition.defaults
            text = definition.codec.encode_named(payload, max_bytes=limit)
        else:
            defaults = await self._store.type_defaults(name) or TypeDefaults(name)
            text = check_plain(name, payload, max_bytes=limit)
        fence = None if checked_flag("detached", options.detached) else self._fence()
        return (await self._store.enqueue([options.new_task(defaults, text)], fence=fence))[0]

    def _fence(self) -> Fence | None:
        """The fence of the handler that calls, if it is one of this application's."""
        owner, fence = current_fence.get() or (None, None)
        return fence if owner is self._registry else None

    async def get(self, task_id: UUID) -> TaskRecord:
        """Return the whole task."""
        return await self._store.get(task_id)

    async def result(self, task_id: UUID, limit: float | timedelta | None) -> Any:
        """Wait for the end of a task and return what its handler returned."""
        async with asyncio.timeout(None if limit is None else checked_seconds("timeout", limit)):
            ended = await self._waiter.wait(task_id)
        match ended.status:
            case TaskState.COMPLETED:
                return None if ended.result is None else decode_json(ended.result)
            case TaskState.CANCELLED:
                raise TaskCancelled(f"task {task_id} was cancelled: {ended.last_error}")
            case _:
                raise TaskFailed(f"task {task_id} is {ended.status}: {ended.last_error}")

    async def cancel(self, task_id: UUID, reason: str) -> CancelAnswer:
        """Cancel a task that waits, or ask the worker of one that runs."""
        return await self._store.cancel(task_id, checked_reason(reason))

    async def change(self, task_id: UUID, change: Change) -> None:
        """Change a task that waits."""
        await self._store.change(task_id, change)

    async def retry(self, task_id: UUID) -> None:
        """Reopen an ended, unsuccessful task."""
        await self._store.retry(task_id)

    async def close(self) -> None:
        """Stop waiting for results."""
        await self._waiter.close()


class Access(Protocol):
    """How a handle reaches a client, whatever event loop it is used from."""

    async def client(self) -> Client:
        """Return the client of the running event loop."""

    def run_sync(self, name: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine for a caller that has no event loop."""


class Handle:
    """A task that was enqueued."""

    def __init__(self, access: Access, task_id: UUID, *, created: bool = True) -> None:
        self._access = access
        self._id = task_id
        self.created = created  # False: an idempotency key led to an earlier task

    @property
    def id(self) -> str:
        """The id of the task."""
        return str(self._id)

    def __repr__(self) -> str:
        return f"<Handle {self._id}>"

    async def get(self) -> TaskRecord:
        """Return the whole task: status, times, attempts, errors, result."""
        return await (await self._access.client()).get(self._id)

    async def result(self, timeout: float | timedelta | None = None) -> Any:  # noqa: ASYNC109 - public name
        """Wait for the return value; raise `TaskFailed`, `TaskCancelled` or `TimeoutError`."""
        return await (await self._access.client()).result(self._id, timeout)

    async def cancel(self, reason: str = "cancelled on request") -> bool:
        """Cancel: at once if it waits, else by asking its worker. False if it had ended."""
        answer = await (await self._access.client()).cancel(self._id, reason)
        return answer is not CancelAnswer.ENDED

    async def change(
        self,
        *,
        priority: int | str | None = None,
        queue: str | None = None,
        at: datetime | None = None,
        delay: float | timedelta | None = None,
    ) -> None:
        """Change a task that is scheduled, blocked or pending."""
        change = checked_change(priority=priority, queue=queue, at=at, delay=delay)
        await (await self._access.client()).change(self._id, change)

    async def retry(self) -> None:
        """Reopen it after an unsuccessful end: same id, new generation, fresh attempts."""
        await (await self._access.client()).retry(self._id)

    async def explain(self) -> None:
        """Not built yet."""
        raise ConfigurationError("handle.explain() is not built yet")

    def get_sync(self) -> TaskRecord:
        """`get` for synchronous code."""
        return self._access.run_sync("get", self.get)

    def result_sync(self, timeout: float | timedelta | None = None) -> Any:
        """`result` for synchronous code."""
        return self._access.run_sync("result", lambda: self.result(timeout))

    def cancel_sync(self, reason: str = "cancelled on request") -> bool:
        """`cancel` for synchronous code."""
        return self._access.run_sync("cancel", lambda: self.cancel(reason))

    def change_sync(self, **change: Any) -> None:
        """`change` for synchronous code."""
        self._access.run_sync("change", lambda: self.change(**change))

    def retry_sync(self) -> None:
        """`retry` for synchronous code."""
        self._access.run_sync("retry", self.retry)

    def explain_sync(self) -> None:
        """Not built yet."""
        raise ConfigurationError("handle.explain_sync() is not built yet")


class ResultWaiter:
    """One look for all the results that are waited for, at a pause that grows.

    A newcomer is looked for at once, by itself: its task may have ended long ago.
    """

    def __init__(self, store: ReadStore) -> None:
        self._store = store
        self._waiting: dict[UUID, list[asyncio.Future[Ended]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._pause = FIRST_LOOK
        self._new: set[UUID] = set()
        self._came = asyncio.Event()

    async def wait(self, task_id: UUID) -> Ended:
        """Wait for the end of a task."""
        future: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(task_id, []).append(future)
        self._pause = FIRST_LOOK
        self._new.add(task_id)
        self._came.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look(), name="windlass-results")
        try:
            return await future
        finally:
            futures = self._waiting.get(task_id, [])
            if future in futures:
                futures.remove(future)
            if not futures:
                self._waiting.pop(task_id, None)

    async def close(self) -> None:
        """Stop looking; whoever still waits is told so."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._fail(ConfigurationError("the app was closed while a result was waited for"))

    async def _look(self) -> None:
        clock = asyncio.get_running_loop().time
        due = clock()
        while self._waiting:
            everything = clock() >= due
            asked = list(self._waiting if everything else self._new)
            self._new.clear()
            self._came.clear()
            try:
                ended, unknown = await self._store.ended(asked)
            except WindlassError as error:
                self._fail(error)
                return
            for one in ended:
                self._resolve(one.id, one)
            for task_id in unknown:
                self._resolve(
                    task_id,
                    TaskNotFound(f"task {task_id} is not known, or its retention is over"),
                )
            if everything:
                due = clock() + self._pause
                self._pause = min(self._pause * 1.5, LONGEST_LOOK)
            else:
                due = min(due, clock() + self._pause)  # newcomers began with a short one again
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._came.wait()

    def _resolve(self, task_id: UUID, answer: Ended | WindlassError) -> None:
        for future in self._waiting.pop(task_id, []):
            if future.done():
                continue
            if isinstance(answer, Ended):
                future.set_result(answer)
            else:
                future.set_exception(answer)

    def _fail(self, error: WindlassError) -> None:
        for task_id in list(self._waiting):
            self._resolve(task_id, error)
