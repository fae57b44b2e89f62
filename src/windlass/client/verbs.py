"""What is done with tasks, and the handle that a caller keeps of one."""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol, TypedDict, TypeVar, Unpack
from uuid import UUID

import msgspec

from windlass.client.asking import (
    Call,
    EnqueueOptions,
    checked_cancellation,
    checked_change,
    checked_reason,
    distinct_options,
    new_tasks,
)
from windlass.client.bulk import Answers, Chosen, act_on, changing, retrying
from windlass.client.cancelling import cancelling
from windlass.client.dead import DeadClient
from windlass.client.gathering import Gatherer
from windlass.client.results import ResultWaiter, Waiting
from windlass.client.workers import FleetClient
from windlass.codec import check_plain
from windlass.context import Fenced, current_job
from windlass.encoding import decode_json
from windlass.model.cancellation import Cancellation
from windlass.model.errors import (
    ConfigurationError,
    IdempotencyConflict,
    StoreBusy,
    StoreUnavailable,
    TaskCancelled,
    TaskFailed,
)
from windlass.model.explanation import Explanation
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
from windlass.policy.explaining import explained
from windlass.registry import Registry, checked_flag, checked_name, checked_seconds
from windlass.service import backoff
from windlass.store.port import (
    ClockStore,
    DeadStore,
    EnqueueStore,
    GateStore,
    Guest,
    NewTasks,
    OperateStore,
    ReadStore,
    TaskColumns,
)
from windlass.telemetry import tell

T = TypeVar("T")

FIRST_ANSWER_WITHIN = 1.0  # seconds, of the store that is asked for a result
MADE_AT_ONCE = 1000  # tasks of a call; those of a larger one are made while the first are written
MADE_WITHIN = 0.2  # seconds for so many, or all are made first
BURIED_AT_ONCE = 1000  # tasks that wait for a retry which will not be
CALLS_ANSWERED = 1000  # of gates, before it is said why a task waits
WAITING = frozenset({TaskState.SCHEDULED, TaskState.BLOCKED, TaskState.PENDING})
REPEAT_AT_MOST = 3  # times, an enqueue whose connection broke
REPEAT_WITHIN = 2.0  # seconds; a store that is away for longer is told to the caller


class ClientStore(
    EnqueueStore, OperateStore, ReadStore, DeadStore, GateStore, ClockStore, Protocol
):
    """The part of a store that applications use."""


class Added(NamedTuple):
    """What was to be enqueued, and what the store said of each."""

    tasks: Sequence[NewTask]
    answers: Sequence[Enqueued]


class Client:
    """The verbs of a caller, on a store that is open."""

    def __init__(
        self,
        *,
        store: ClientStore,
        registry: Registry,
        max_payload_bytes: int,
        ageing: timedelta,
    ) -> None:
        self._store = store
        self._registry = registry
        self._max_payload_bytes = max_payload_bytes
        self._ageing = ageing
        self._waiter = ResultWaiter(store)
        self._gatherer = Gatherer(self._write)
        self.fleet = FleetClient(store)
        self.dead = DeadClient(store=store, registry=registry, max_payload_bytes=max_payload_bytes)

    def guest(self, calls: Sequence[Call], *, is_async: bool) -> Guest | None:
        """Return the connection that all calls bring, if they do; it has to fit the caller."""
        if len(calls) == 1:
            return self.checked_guest(calls[0].options.connection, is_async=is_async)
        given = {id(options.connection): options.connection for options in distinct_options(calls)}
        if len(given) > 1:
            raise ConfigurationError(
                "option 'connection' differs between the calls of one enqueue; give all the same"
            )
        for connection in given.values():
            return self.checked_guest(connection, is_async=is_async)
        return None

    def checked_guest(self, connection: Any, *, is_async: bool) -> Guest | None:
        """Return a connection of the caller, if there is one, or raise `TypeError`."""
        return None if connection is None else self._store.guest(connection, is_async=is_async)

    async def enqueue(self, calls: Sequence[Call], guest: Guest | None = None) -> list[Enqueued]:
        """Enqueue calls, all or none; a bad one among many is named by its index."""
        if not calls:
            return []
        if len(calls) == 1:
            call = calls[0]
            payload = call.encode(self._max_payload_bytes)
            return await self._add_one(call.definition.defaults, payload, call.options, guest)
        options = distinct_options(calls)
        tasks = self._new_tasks(calls, options, guest)
        detached = {checked_flag("detached", one.detached) for one in options}
        fence = None if detached == {True} else self._fence()
        try:
            return await self._add(tasks, fence, guest)
        except IdempotencyConflict as conflict:
            raise IdempotencyConflict(f"item {conflict.index}: {conflict}") from conflict

    def _new_tasks(
        self, calls: Sequence[Call], options: Collection[EnqueueOptions], guest: Guest | None
    ) -> Sequence[NewTask]:
        """Check and encode calls: of very many the first ones, and the others as they are written."""
        limit = self._max_payload_bytes

        def made(first: int, last: int) -> TaskColumns:
            return new_tasks(calls[first:last], max_payload_bytes=limit, first=first)

        if guest is not None:
            return list(made(0, len(calls)))  # each is read several times
        if len(calls) <= MADE_AT_ONCE:
            return made(0, len(calls))
        if any(one.waits_for_others for one in options):
            return made(0, len(calls))  # a key is taken before anything is written
        tasks = NewTasks(len(calls), made)
        began = time.monotonic()
        tasks[:MADE_AT_ONCE]  # most mistakes are found here, before anything is written
        if time.monotonic() - began > MADE_WITHIN:
            tasks[:]  # no transaction is to wait for tasks that take so long
        return tasks

    async def defaults(self, name: str) -> TypeDefaults:
        """Return what this app defines for a type, or else what a worker registered."""
        checked_name("task name", name)
        definition = self._registry.find(name)
        if definition is not None:
            return definition.defaults
        return await self._store.type_defaults(name) or TypeDefaults(name)

    async def enqueue_named(
        self,
        defaults: TypeDefaults,
        payload: dict[str, Any] | None,
        options: EnqueueOptions,
        guest: Guest | None = None,
    ) -> Enqueued:
        """Enqueue a task of a type with these defaults."""
        name, limit = defaults.name, self._max_payload_bytes
        payload = {} if payload is None else payload
        definition = self._registry.find(name)
        if definition is not None:
            text = definition.codec.encode_named(payload, max_bytes=limit)
        else:
            text = check_plain(name, payload, max_bytes=limit)
        return (await self._add_one(defaults, text, options, guest))[0]

    def _add_one(
        self, defaults: TypeDefaults, payload: str, options: EnqueueOptions, guest: Guest | None
    ) -> Coroutine[Any, Any, list[Enqueued]]:
        task = options.new_task(defaults, payload)
        fence = None if checked_flag("detached", options.detached) else self._fence()
        return self._add([task], fence, guest)

    async def _add(
        self, tasks: Sequence[NewTask], fence: Fence | None, guest: Guest | None
    ) -> list[Enqueued]:
        if guest is not None:
            answers = await self._store.enqueue_within(guest, tasks, fence=fence)
            tell("enqueued", Added(tasks, answers))
            return answers
        # With others goes only what waits for nobody, and fails for itself alone.
        if fence is None and len(tasks) == 1 and _goes_with_others(tasks[0]):
            return [await self._gatherer.add(tasks[0])]
        return await self._write(tasks, fence)

    async def _write(
        self, tasks: Sequence[NewTask], fence: Fence | None = None, *, repeated: bool = False
    ) -> list[Enqueued]:
        """Write tasks; if the connection broke, again: by their ids none is written twice."""
        repeat_until = time.monotonic() + REPEAT_WITHIN
        failures = 0
        while True:
            try:
                answers = await self._store.enqueue(
                    tasks, fence=fence, repeated=repeated or failures > 0
                )
            except StoreBusy:
                raise
            except StoreUnavailable:
                failures += 1
                if failures > REPEAT_AT_MOST or time.monotonic() > repeat_until:
                    raise
                await asyncio.sleep(backoff(failures, longest=REPEAT_WITHIN))
            else:
                tell("enqueued", Added(tasks, answers))
                return answers

    def _fence(self) -> Fence | None:
        """The fence of the handler that calls."""
        job = self._job()
        return None if job is None else job.fence

    def _job(self) -> Fenced | None:
        """What runs the handler that calls, if it is one of this application's."""
        owner, job = current_job.get() or (None, None)
        return job if owner is self._registry else None

    async def get(self, task_id: UUID) -> TaskRecord:
        """Return the whole task."""
        return await self._store.get(task_id)

    async def explain(self, task_id: UUID) -> Explanation:
        """Say why a task is not running."""
        if (await self._store.get(task_id)).status in WAITING:
            # As a claim does first. Who may only look sees what that would do as a reason.
            await self._store.open_gates(CALLS_ANSWERED, if_allowed=True)
        return explained(await self._store.situation(task_id, ageing=self._ageing))

    async def result(self, task_id: UUID, limit: float | timedelta | None) -> Any:
        """Wait for the end of a task and return what its handler returned."""
        seconds = None if limit is None else checked_seconds("timeout", limit)
        try:
            ended = await self._end(task_id, seconds)
        except TimeoutError as error:
            raise TimeoutError(f"task {task_id} has not ended within {seconds:g} s") from error
        match ended.status:
            case TaskState.COMPLETED:
                return None if ended.result is None else decode_json(ended.result)
            case TaskState.CANCELLED:
                raise _cancelled(task_id, ended.last_error or "")
            case _:
                kind = f" ({ended.error_class})" if ended.error_class else ""
                failure = TaskFailed(f"task {task_id} is {ended.status}{kind}: {ended.last_error}")
                failure.error_class = ended.error_class
                raise failure

    async def _end(self, task_id: UUID, seconds: float | None) -> Ended:
        if seconds is not None and seconds < FIRST_ANSWER_WITHIN:
            # It might be over before the first look, and nobody asks without wanting one.
            with suppress(StoreUnavailable):  # which is waited for as long as asked
                async with asyncio.timeout(FIRST_ANSWER_WITHIN):
                    if (ended := await self._waiter.look_once(task_id)) is not None:
                        return ended
        job = self._job()
        waiting: Waiting = nullcontext
        if job is not None:
            waiting = partial(job.awaiting, task_id, is_bounded=seconds is not None)
        async with asyncio.timeout(seconds):
            return await self._waiter.wait(task_id, waiting)

    async def cancel(self, task_id: UUID, wanted: Cancellation) -> CancelAnswer:
        """Cancel a task that waits, or ask the worker of one that runs."""
        return await self._store.cancel(task_id, wanted.text)

    def cancel_all(
        self, chosen: Chosen, wanted: Cancellation, *, dry_run: bool
    ) -> Answers[CancelAnswer]:
        """Cancel tasks by id, or those of a filter, and answer for each."""
        verb = cancelling(self._store, wanted.text)
        return act_on(self._store, verb, chosen, dry_run=dry_run)

    async def change(self, task_id: UUID, change: Change) -> None:
        """Change a task that waits."""
        await self._store.change(task_id, change)

    def change_all(self, chosen: Chosen, change: Change, *, dry_run: bool) -> Answers[str]:
        """Change tasks that wait, by id or by filter, and answer for each."""
        return act_on(self._store, changing(self._store, change), chosen, dry_run=dry_run)

    async def retry(self, task_id: UUID) -> None:
        """Reopen an ended, unsuccessful task."""
        await self._store.retry(task_id)

    def retry_all(self, chosen: Chosen, *, dry_run: bool) -> Answers[str]:
        """Reopen ended, unsuccessful tasks, by id or by filter, and answer for each."""
        return act_on(self._store, retrying(self._store), chosen, dry_run=dry_run)

    async def stop_retries(self, name: str, reason: str) -> int:
        """End failed tasks of a type instead of trying them again, those that wait for it too."""
        checked_name("task name", name)
        await self._store.stop_retries(name, checked_reason(reason))
        buried = 0
        for bury in (
            self._store.bury_scheduled,
            self._store.bury_ready,
        ):  # as one becomes the other
            after = None
            while True:
                try:
                    number, after = await bury(name, BURIED_AT_ONCE, after=after)
                except StoreBusy as error:
                    raise StoreBusy(
                        f"retries of '{name}' are stopped, and {buried} tasks that waited for one were ended, but "
                        f"{error}; stop them again to end the others"
                    ) from error
                buried += number
                if after is None:
                    break
        return buried

    async def allow_retries(self, name: str) -> bool:
        """Try tasks of a type again; return whether that was stopped."""
        return await self._store.allow_retries(checked_name("task name", name))

    async def close(self) -> None:
        """Stop waiting for results, and let the enqueues that are under way be answered."""
        await self._waiter.close()
        await self._gatherer.close()


def _goes_with_others(task: NewTask) -> bool:
    return task.idempotency_key is None and task.window is None


def _cancelled(task_id: UUID, said: str) -> TaskCancelled:
    error = TaskCancelled(f"task {task_id} was cancelled: {said}")
    error.reason, error.by = Cancellation.read(said)
    return error


class Changes(TypedDict, total=False):
    """What `change(...)` takes, for type checkers."""

    priority: int | str | None
    queue: str | None
    at: datetime | None
    delay: float | timedelta | None


class Access(Protocol):
    """How a handle reaches a client, whatever event loop it is used from."""

    def using(self) -> AbstractAsyncContextManager[Client]:
        """Yield the client of the running event loop, which stays open while the block lasts."""

    def run_sync(self, name: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine for a caller that has no event loop."""


# There may be very many, and the collector would look at each, again and again. For that, an App that keeps
# one for ever is kept as well.
class Handle(msgspec.Struct, eq=False, gc=False):
    """A task that was enqueued."""

    _access: Access
    _id: UUID
    created: bool = True  # False: an idempotency key led to an earlier task

    @property
    def id(self) -> str:
        """The id of the task."""
        return str(self._id)

    def __repr__(self) -> str:
        return f"<Handle {self._id}>"

    async def get(self) -> TaskRecord:
        """Return the whole task: status, times, attempts, errors, result."""
        async with self._access.using() as client:
            return await client.get(self._id)

    async def result(self, timeout: float | timedelta | None = None) -> Any:  # noqa: ASYNC109 - public name
        """Wait for the return value; raise `TaskFailed`, `TaskCancelled` or `TimeoutError`."""
        async with self._access.using() as client:
            return await client.result(self._id, timeout)

    async def cancel(self, reason: str = "cancelled on request", *, by: str | None = None) -> bool:
        """Cancel: at once if it waits, else by asking its worker. False if it had ended.

        `by` says who wants it, and is kept with the reason.
        """
        wanted = checked_cancellation(reason, by)
        async with self._access.using() as client:
            answer = await client.cancel(self._id, wanted)
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
        async with self._access.using() as client:
            await client.change(self._id, change)

    async def retry(self) -> None:
        """Reopen it after an unsuccessful end: same id, new generation, fresh attempts."""
        async with self._access.using() as client:
            await client.retry(self._id)

    async def explain(self) -> Explanation:
        """Say why it is not running now: every reason, the most decisive first."""
        async with self._access.using() as client:
            return await client.explain(self._id)

    def get_sync(self) -> TaskRecord:
        """`get` for synchronous code."""
        return self._access.run_sync("get", self.get)

    def result_sync(self, timeout: float | timedelta | None = None) -> Any:
        """`result` for synchronous code."""
        return self._access.run_sync("result", lambda: self.result(timeout))

    def cancel_sync(self, reason: str = "cancelled on request", *, by: str | None = None) -> bool:
        """`cancel` for synchronous code."""
        return self._access.run_sync("cancel", lambda: self.cancel(reason, by=by))

    def change_sync(self, **change: Unpack[Changes]) -> None:
        """`change` for synchronous code."""
        self._access.run_sync("change", lambda: self.change(**change))

    def retry_sync(self) -> None:
        """`retry` for synchronous code."""
        self._access.run_sync("retry", self.retry)

    def explain_sync(self) -> Explanation:
        """`explain` for synchronous code."""
        return self._access.run_sync("explain", self.explain)
