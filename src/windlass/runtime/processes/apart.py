"""A job whose handler runs in a process: sent there, waited for, and ended there if need be."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from windlass.failures.classifier import Classifier
from windlass.failures.describe import failed
from windlass.model.attempt import AttemptOutcome
from windlass.model.failure import ErrorClass
from windlass.registry import TaskDefinition
from windlass.runtime.job import Halt, Job
from windlass.runtime.processes.finding import Place
from windlass.runtime.processes.messages import Answer, Died, Raised, Run
from windlass.runtime.processes.raising import outcome

GIVE_WAY_WITHIN = 1.0  # seconds for a handler that is cancelled, before its process is killed


class Running(Protocol):
    """A handler that runs in a process."""

    @property
    def answer(self) -> asyncio.Future[Answer]:
        """What became of it: a value in any case."""

    def cancel(self) -> None:
        """Tell the handler that it should give way."""

    def kill(self) -> None:
        """End its process, unless it has answered."""


class Processes(Protocol):
    """Where handlers run."""

    async def begin(self, run: Run) -> Running | Died:
        """Run a handler in the next process that is free."""


class Elsewhere(Exception):  # noqa: N818 - says where it happened
    """What a handler raised in its process, or the end of that process."""

    def __init__(self, outcome: AttemptOutcome, said: str) -> None:
        super().__init__(said)
        self.outcome = outcome


class Apart:
    """Runs the handlers of jobs in processes."""

    def __init__(
        self,
        *,
        processes: Processes,
        places: Mapping[str, Place],  # by type
        classifier: Classifier,
        worker_id: str,
        max_result_bytes: int,
    ) -> None:
        self._processes = processes
        self._places = places
        self._classifier = classifier
        self._worker_id = worker_id
        self._max_result_bytes = max_result_bytes

    async def run(
        self, job: Job, definition: TaskDefinition, begun: Callable[[], None]
    ) -> str | None:
        """Run a handler and return its result as JSON; `begun` is called when a process takes it."""
        running = await self._processes.begin(self._message(job, definition))
        if isinstance(running, Died):
            raise _died(running)
        if job.context is None:  # or middleware may call it again
            job.task.forget_payload()
        begun()
        try:
            await asyncio.wait([running.answer])
        except asyncio.CancelledError:
            if job.halt is Halt.CANCELLED:  # in any other case nothing it does is of use
                running.cancel()
                await asyncio.wait([running.answer], timeout=GIVE_WAY_WITHIN)
            raise
        finally:
            running.kill()
        match running.answer.result():
            case Died() as died:
                raise _died(died)
            case Raised() as raised:
                raise Elsewhere(outcome(raised, self._classifier), _said(raised))
            case returned:
                return returned.result

    def _message(self, job: Job, definition: TaskDefinition) -> Run:
        task, place = job.task, self._places[definition.name]
        timeout = definition.timeout
        if timeout is not None and job.started_at is not None:
            timeout -= time.monotonic() - job.started_at  # what middleware has used
        return Run(
            type=task.type,
            module=place.module,
            qualname=place.qualname,
            payload=task.payload,
            task_id=task.id,
            token=job.claim.token,
            generation=task.generation,
            fence=job.claim.fence,
            attempt=task.attempts + 1,
            max_attempts=task.max_attempts,
            queue=task.queue,
            worker_id=self._worker_id,
            timeout=timeout,
            keep_result=definition.keep_result,
            max_result_bytes=self._max_result_bytes,
            error_paths=sorted(self._classifier.paths),
        )


def _said(raised: Raised) -> str:
    if raised.snooze is not None:
        return f"Snooze: for {raised.snooze:g} s"
    error = msgspec.json.decode(raised.error)
    return f"{error['type']}: {error['message']}"


def _died(died: Died) -> Elsewhere:
    said = f"its process {died.reason}"
    return Elsewhere(failed("ProcessDied", said, ErrorClass.TRANSIENT), said)
