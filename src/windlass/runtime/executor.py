"""Claimed task → handler → outcome. Never touches the store."""

import asyncio
import contextvars
import inspect
import random
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

from windlass.context import Context, current_job
from windlass.encoding import decode_json, encode_json
from windlass.failures.describe import describe, describe_exception, failed_by
from windlass.model.attempt import AttemptOutcome, Cancelled, Failed, Released, Snoozed, Succeeded
from windlass.model.breaker import CallOutcome
from windlass.model.errors import BreakerOpen
from windlass.model.failure import ErrorClass
from windlass.policy.budget import Account, Budget
from windlass.registry import Registry, TaskDefinition
from windlass.runtime.completing import Completing
from windlass.runtime.interrupting import Overran
from windlass.runtime.job import Halt, Job
from windlass.runtime.processes.apart import Apart, Elsewhere
from windlass.runtime.steering import as_predicate_says, put_off, steered
from windlass.runtime.threads import Threads
from windlass.telemetry import emit

_NOTHING_TO_KEEP = Succeeded()


class Executor:
    """Runs handlers and says what became of them."""

    def __init__(
        self,
        *,
        registry: Registry,
        threads: Threads,
        worker_id: UUID,
        max_result_bytes: int,
        completing: Callable[[Job, Callable[[Any], str | None]], Completing],
        apart: Apart | None = None,  # for handlers that run in processes
    ) -> None:
        self._registry = registry
        self._threads = threads
        self._worker_id = str(worker_id)
        self._max_result_bytes = max_result_bytes
        self._completing = completing
        self._accounts: dict[str, Account] = {}  # by type, of those that have a budget
        self._apart = apart
        self.state: Any = None  # what the start-up hook returned

    async def run(self, job: Job) -> AttemptOutcome | None:
        """Run the handler of a job; None if its lease was lost and nothing may be written."""
        if job.halt is not None or job.task.cancel_reason is not None:
            return self._halted(job)
        definition = self._registry.find(job.task.type)
        if definition is None:
            return Released()  # not ours after all
        if definition.is_special:
            let_through = await self._run_special(job, definition)
            if not isinstance(let_through, TaskDefinition):
                return let_through
            definition = let_through
        job.started_at = time.monotonic()
        current_job.set((self._registry, job))
        limit = definition.timeout
        job.give_way_at = None if limit is None else job.started_at + limit
        try:
            arguments = definition.codec.decode(job.task.payload)
        except BaseException as error:  # noqa: BLE001 - the types of arguments bring their own code
            return _told(job, self._undecoded(job, definition, error))
        job.task.forget_payload()
        try:
            if limit is None:
                value = await self._call(job, definition, arguments)
            else:
                value = await _within(limit, self._call(job, definition, arguments))
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything
            outcome = self._raised(job, definition, error)
        else:
            outcome = _NOTHING_TO_KEEP if value is None else self._returned(definition, value)
        if job.completing is not None or job.protected is not None:
            outcome = _judged(job, outcome)
        return None if job.is_lost() else outcome

    def _wait(self, job: Job, definition: TaskDefinition) -> float | None:
        """Count an attempt against the budget of its type; return for how long it waits, if it is used up."""
        account = self._accounts.get(definition.name)
        if account is None:
            budget = definition.retry.budget
            account = Account(budget if isinstance(budget, Budget) else Budget())
            self._accounts[definition.name] = account
        if account.begin(is_retry=job.task.attempts > 0, now=time.monotonic()):
            return None
        wait = account.wait(random.random())  # noqa: S311 - jitter
        emit("retry.put_off", task_id=job.task.id, type=job.task.type, seconds=round(wait, 1))
        return wait

    async def _run_apart(self, job: Job, definition: TaskDefinition) -> AttemptOutcome | None:
        """Run a handler in a process, where its arguments are decoded and its result is encoded."""
        job.started_at = time.monotonic()
        current_job.set((self._registry, job))  # for middleware; the handler is told there
        limit = asyncio.timeout(definition.timeout)
        if definition.timeout is not None:
            job.give_way_at = job.started_at + definition.timeout
        call: Callable[[], Awaitable[Any]] = partial(self._in_process, job, definition, limit)
        middleware = self._registry.middleware
        if middleware:
            job.context = self._context(job, definition)
            call = partial(_decoded, call)
            for each in reversed(middleware):
                call = partial(each, job.context, call)
        outcome: AttemptOutcome | None
        try:
            value = await _within(definition.timeout, call(), limit)
        except Overran as error:
            # Without a traceback: our frames say nothing of it.
            outcome = self._timed_out(definition, str(error))
        except BaseException as error:  # noqa: BLE001 - as above
            outcome = self._raised(job, definition, error)
        else:
            outcome = self._returned(definition, value) if middleware else Succeeded(value)
        if job.completing is not None or job.protected is not None:
            outcome = _judged(job, outcome)
        return None if job.is_lost() else outcome

    async def _in_process(
        self, job: Job, definition: TaskDefinition, limit: asyncio.Timeout
    ) -> str | None:
        """Run a handler; while it waits for a process its time stands still."""
        if limit.expired():  # and middleware took no notice
            raise Overran(definition.timeout or 0)
        asked_at = time.monotonic()
        spent = asked_at - (job.started_at or asked_at)  # by middleware
        job.is_waiting = True
        _reschedule(limit, None)
        if job.halt is None:
            job.give_way_at = None

        def begun() -> None:
            job.is_waiting = False
            job.started_at = time.monotonic() - spent
            if definition.timeout is not None:
                left = definition.timeout - spent
                _reschedule(limit, asyncio.get_running_loop().time() + left)
                if job.halt is None:
                    job.give_way_at = job.started_at + definition.timeout

        assert self._apart is not None  # noqa: S101 - a worker of such types has processes
        try:
            return await self._apart.run(job, definition, begun)
        finally:
            if job.is_waiting:  # in vain; what middleware does about it takes time again
                begun()

    async def _run_special(
        self, job: Job, definition: TaskDefinition
    ) -> TaskDefinition | AttemptOutcome | None:
        """Put an attempt off, or run it in a process; or return what is to be run as any other."""
        if definition.breaker is not None:
            let_through = await self._let_through(job, definition)
            if not isinstance(let_through, TaskDefinition):
                return let_through
            definition = let_through
        if definition.retry.budget is not None and (wait := self._wait(job, definition)):
            return _told(job, Snoozed(wait, describe("PutOff", "its retry budget was used up")))
        return definition if definition.run != "process" else await self._run_apart(job, definition)

    async def _let_through(
        self, job: Job, definition: TaskDefinition
    ) -> TaskDefinition | AttemptOutcome | None:
        """Ask the breaker of a task; return what is to be run, or what becomes of the attempt."""
        try:
            job.protected = await self._registry.breakers[str(definition.breaker)].begin()
        except BreakerOpen as refused:
            fallback = self._registry.fallback_of(definition)
            return fallback or put_off(refused, refused.seconds)
        # It may have waited, and was not cancelled meanwhile: it has not begun.
        return definition if job.halt is None else _told(job, self._halted(job))

    def _call(
        self, job: Job, definition: TaskDefinition, arguments: dict[str, Any]
    ) -> Awaitable[Any]:
        codec = definition.codec
        is_plain = codec.context_name is None and not self._registry.middleware
        if is_plain and definition.run == "async":
            plain: Awaitable[Any] = codec.call(definition.function, arguments)
            return plain
        if not is_plain:
            job.context = self._context(job, definition)
            if codec.context_name is not None:
                arguments[codec.context_name] = job.context
        call = partial(codec.call, definition.function, arguments)
        if definition.run == "thread":
            call = partial(self._in_thread, job, call)
        if job.context is not None:
            for middleware in reversed(self._registry.middleware):
                call = partial(middleware, job.context, call)
        awaitable: Awaitable[Any] = call()
        return awaitable

    async def _in_thread(self, job: Job, call: Callable[[], Any]) -> Any:
        running = self._threads.submit(partial(contextvars.copy_context().run, call))
        try:
            value = await running.answer
        except asyncio.CancelledError as error:
            if job.context is not None:
                job.context.cancel()
            if not running.is_over:
                error.add_note(_where_is(running.thread))  # ours are the only frames it has
                emit("thread.abandoned", task_id=job.task.id, type=job.task.type)
                self._threads.give_up(running)
            raise
        # A plain decorator around a coroutine function looks like a plain function.
        return await value if inspect.iscoroutine(value) else value

    def _context(self, job: Job, definition: TaskDefinition) -> Context:
        job.completing = own_end = self._completing(job, partial(self._encoded, definition))
        deadline = None
        if definition.timeout is not None:
            deadline = datetime.now(UTC) + timedelta(seconds=definition.timeout)
        return Context(
            task_id=str(job.task.id),
            type=job.task.type,
            attempt=job.task.attempts + 1,
            max_attempts=job.task.max_attempts,
            queue=job.task.queue,
            worker_id=self._worker_id,
            fence=job.claim.fence,
            deadline=deadline,
            state=self.state,
            _own_end=own_end,
        )

    def _returned(self, definition: TaskDefinition, value: Any) -> AttemptOutcome:
        try:
            return Succeeded(self._encoded(definition, value))
        except BaseException as error:  # noqa: BLE001 - what was returned brings its own code
            return failed_by(error, ErrorClass.CODE_BUG)

    def _encoded(self, definition: TaskDefinition, value: Any) -> str | None:
        if value is None or not definition.keep_result:
            return None
        what = f"result of task '{definition.name}'"
        return encode_json(value, what=what, max_bytes=self._max_result_bytes)

    def abandoned(self, job: Job) -> AttemptOutcome | None:
        """Say what becomes of a job whose handler did not give way when it was told to."""
        if job.halt is not None:
            return _told(job, self._halted(job))
        said = "took longer than its timeout and did not give way"
        return _told(job, self._timed_out(self._registry.find(job.task.type), said))

    def _halted(self, job: Job) -> AttemptOutcome | None:
        match job.halt:
            case None:
                return Cancelled(describe("Cancelled", job.task.cancel_reason or ""))
            case Halt.CANCELLED:
                return Cancelled(describe("Cancelled", job.halt_reason))
            case Halt.RELEASED:
                return Released()
            case _:
                return None

    def _raised(
        self, job: Job, definition: TaskDefinition, error: BaseException
    ) -> AttemptOutcome | None:
        match error:
            case asyncio.CancelledError() | Overran() if job.halt is not None:
                return self._halted(job)
            case Elsewhere():
                return error.outcome
            case Overran() | BaseExceptionGroup() if overran := _first_overran(error):
                return self._timed_out(definition, str(overran), error)
            case _:
                return steered(error) or self._classified(definition, error)

    def _undecoded(
        self, job: Job, definition: TaskDefinition, error: BaseException
    ) -> AttemptOutcome | None:
        if isinstance(error, Overran):
            return self._raised(job, definition, error)
        return failed_by(error, ErrorClass.PERMANENT_INPUT)

    def _timed_out(
        self, definition: TaskDefinition | None, said: str, error: BaseException | None = None
    ) -> Failed:
        """The same for an attempt that took too long: a TimeoutError, for rules and predicates too."""
        timeout = TimeoutError(said)
        classifier = self._registry.classifier
        error_class = classifier.classify(
            classifier.facts_of(timeout, datetime.now(UTC))
        ).error_class
        return Failed(
            describe("TimeoutError", said, error_class, error),
            error_class,
            may_retry=None if definition is None else as_predicate_says(definition, timeout),
        )

    def _classified(self, definition: TaskDefinition, error: BaseException) -> Failed:
        classifier = self._registry.classifier
        facts = classifier.facts_of(error, datetime.now(UTC))
        error_class = classifier.classify(facts).error_class
        return Failed(
            describe_exception(error, error_class),
            error_class,
            asked_after=facts.retry_after,
            may_retry=as_predicate_says(definition, error),
        )


def _judged(job: Job, outcome: AttemptOutcome | None) -> AttemptOutcome | None:
    """Return what is to be settled, given what else the handler did."""
    _told(job, outcome)
    return outcome if job.completing is None else job.completing.judge(outcome)


def _told(job: Job, outcome: AttemptOutcome | None) -> AttemptOutcome | None:
    """Tell the breaker that protects the task what its attempt says of the dependency, once."""
    protected, job.protected = job.protected, None
    if protected is None:
        return outcome
    match outcome:
        case Succeeded() if not job.is_lost():
            protected.end(CallOutcome.SUCCEEDED)
        case Failed() if job.overran():
            protected.end(CallOutcome.FAILED)
        case Failed(error_class=error_class) if not job.is_lost():
            protected.end(protected.breaker.outcome_of(error_class))
        case _:
            protected.end(CallOutcome.NO_VERDICT)
    return outcome


def _first_overran(error: BaseException, levels: int = 8) -> Overran | None:
    """Whether what a handler has started took too long. Groups may be nested as deep as anybody likes."""
    if isinstance(error, BaseExceptionGroup) and levels:
        found = (_first_overran(one, levels - 1) for one in error.exceptions)
        return next(filter(None, found), None)
    return error if isinstance(error, Overran) else None


async def _within(
    seconds: float | None, call: Awaitable[Any], limit: asyncio.Timeout | None = None
) -> Any:
    """Await a call for so long; from when `limit` says so, if it is given."""
    limit = limit or asyncio.timeout(seconds)
    try:
        async with limit:
            value = await call
    except TimeoutError as error:
        if limit.expired():
            raise Overran(seconds or 0) from error
        raise
    if limit.expired():  # it caught its cancellation and returned all the same
        raise Overran(seconds or 0)
    return value


def _reschedule(limit: asyncio.Timeout, when: float | None) -> None:
    with suppress(RuntimeError):  # it is over: middleware has returned, and left the call behind
        limit.reschedule(when)


async def _decoded(call: Callable[[], Awaitable[str | None]]) -> Any:
    result = await call()
    return None if result is None else decode_json(result)


def _where_is(thread: int) -> str:
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - the one way to it
    if frame is None:
        return "its thread had not begun"
    return "its thread was here:\n" + "".join(traceback.format_stack(frame, limit=20))
