"""Starts handlers in asyncio tasks. Those that end without waiting for anything share one, and cannot tell.

A task of asyncio costs as much as the handler of a job that ends at once, and more. So a *carrier* runs one
job after another, each in a context of its own, for as long as none of them waits. One that does keeps the
task it began in to its end, and another carrier goes on with the rest.
"""

import asyncio
import contextvars
import sys
import time
import types
import weakref
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Protocol

from windlass.failures.describe import failed_by
from windlass.model.attempt import AttemptOutcome
from windlass.model.failure import ErrorClass
from windlass.runtime.executor import Executor
from windlass.runtime.job import Job

SLICE = 0.002  # seconds after which a carrier lets the event loop turn


class Jobs(Protocol):
    """Where jobs come from, and where they are left."""

    def peek(self) -> Job | None:
        """Return the job that is to begin next, if one may begin now."""

    def begin(self, now: float) -> bool:
        """Take that job out, to run it; false if it must not run after all."""

    def end(self, job: Job, outcome: AttemptOutcome | None, now: float) -> None:
        """Take back a job whose handler has ended."""


class Carriers:
    """The tasks in which the jobs of one worker run."""

    def __init__(self, executor: Executor, jobs: Jobs) -> None:
        self._executor = executor
        self._jobs = jobs
        self._loop = asyncio.get_running_loop()
        # Not that of whoever hands over a claim, or ends a job: what they set is theirs.
        self._context = contextvars.copy_context()
        self._quick: set[str] = set()  # types whose last job ended without waiting
        self._is_carrying = False  # there is a carrier that comes to what waits
        self._will_start = False  # when the event loop turns
        self._turn = 0  # grows after the first step of a task, and before any other of it

    def start(self) -> None:
        """Begin whatever may begin: what is known to wait in a task of its own."""
        self._will_start = False
        has_begun = False
        while (job := self._jobs.peek()) is not None:
            is_quick = job.task.type in self._quick
            if is_quick and self._is_carrying:
                break
            if not self._jobs.begin(time.monotonic()):
                continue
            self._is_carrying |= is_quick
            running = self._carry(job) if is_quick else self._run_alone(job)
            # Not by an argument, which a task factory of before Python 3.11 does not know.
            job.runner = self._context.copy().run(self._loop.create_task, running)
            has_begun = True
        if has_begun:
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turn += 1

    def _start_soon(self) -> None:
        """Begin others when the task that asks for it has ended; once for all that end in this turn."""
        if not self._will_start:
            self._will_start = True
            self._loop.call_soon(self.start)

    async def _run_alone(self, job: Job) -> None:
        """Run a job in a task of its own. There may be thousands, so they are to be small."""
        turn = self._turn
        try:
            outcome = await self._executor.run(job)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not cost the slot as well
            outcome = _fault(error)
        if turn == self._turn:
            self._quick.add(job.task.type)
        else:
            self._quick.discard(job.task.type)
        self._jobs.end(job, outcome, time.monotonic())
        job.runner = None
        self._start_soon()

    async def _carry(self, first: Job) -> None:
        """Run a job and go on with others, unless one of them has waited."""
        task: Any = asyncio.current_task()
        is_untouched = _watch(task)
        context: contextvars.Context | None = None  # the first one's is that of the task
        job: Job | None = first
        is_carrier = True
        until = time.monotonic() + SLICE
        while job is not None:
            running = self._executor.run(job)
            try:
                if context is None:
                    waits_for = running.send(None)
                else:
                    waits_for = context.run(running.send, None)
                self._quick.discard(job.task.type)
                self._is_carrying = is_carrier = False
                self.start()
                outcome = await _rest_of(running, context, waits_for)
            except StopIteration as end:
                outcome = end.value
                self._quick.add(job.task.type)
            except Exception as error:  # noqa: BLE001 - as above
                outcome = _fault(error)
            now = time.monotonic()
            self._jobs.end(job, outcome, now)
            may_go_on = is_carrier and is_untouched()
            job.runner = None
            if may_go_on and now > until:
                may_go_on = await _let_turn()
                now = time.monotonic()
                until = now + SLICE
            job = self._next_quick(task, now) if may_go_on else None
            context = self._context.copy()
        if is_carrier:
            self._is_carrying = False
        self._start_soon()

    def _next_quick(self, task: asyncio.Task[Any], now: float) -> Job | None:
        while (job := self._jobs.peek()) is not None and job.task.type in self._quick:
            if self._jobs.begin(now):
                job.runner = task
                return job
        return None


async def _let_turn() -> bool:
    """Let the event loop turn; false if somebody cancels every task there is, and so this one."""
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        return False
    return True


def _fault(error: Exception) -> AttemptOutcome:
    """What becomes of a job that we could not run."""
    return failed_by(error, ErrorClass.UNKNOWN)


def _watch(task: asyncio.Task[Any]) -> Callable[[], bool]:
    """Return what tells whether a task is as it was: nobody has kept it, named it or is to hear of its end."""
    references, weak_references = sys.getrefcount(task), weakref.getweakrefcount(task)
    name = task.get_name()

    def is_untouched() -> bool:
        return (
            sys.getrefcount(task) == references
            and weakref.getweakrefcount(task) == weak_references
            and not task.cancelling()
            and not getattr(task, "_must_cancel", False)  # stays if a cancellation was taken back
            and task.get_name() is name
            and task._callbacks is None  # noqa: SLF001 - the one way to know
        )

    return is_untouched


@types.coroutine
def _rest_of(
    running: Coroutine[Any, Any, Any], context: contextvars.Context | None, waits_for: Any
) -> Generator[Any, Any, Any]:
    """Go on with a coroutine that has begun to wait, in its context, and return its value."""
    step: Callable[..., Any]
    while True:
        try:
            value = yield waits_for
        except BaseException as error:  # noqa: BLE001 - handed on as it is
            step, value = running.throw, error
        else:
            step = running.send
        try:
            waits_for = step(value) if context is None else context.run(step, value)
        except StopIteration as end:
            return end.value
