"""Finds handlers that wait for results of tasks which cannot run, because all slots are held by such handlers.

A worker sees its own slots only. Where no other worker could run what is waited for, they would wait for ever: one
of them is told so, by an error. Where there are others, and they are full too, nobody knows: it is told in the log
after a while. Where one has a free slot, nothing is the matter.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from windlass.model.errors import Deadlock, StoreUnavailable, TaskNotFound
from windlass.model.task import TaskState, WorkerInfo, WorkerRecord
from windlass.registry import Registry
from windlass.runtime.job import Awaited, Job
from windlass.service import Stop, answered_within
from windlass.store.port import Store
from windlass.telemetry import emit

CERTAIN_AFTER = 1.0  # seconds for which all of them have waited
LIKELY_AFTER = 30.0  # where other workers might help, but are full
LOOK_EVERY = 1.0


class Deadlocks:
    """Looks when it is told that the slots of a worker are full of handlers that wait."""

    def __init__(
        self,
        *,
        store: Store,
        registry: Registry,
        worker: WorkerInfo,
        held_up: Callable[[], Sequence[Job]],
        patience: float,
    ) -> None:
        self._store = store
        self._registry = registry
        self._worker = worker
        self._held_up = held_up  # the jobs of full slots, if each waits for a result; or none
        self._patience = patience  # seconds, for an answer of the store
        self._noticed = asyncio.Event()
        self._told: set[int] = set()  # which waits were told of

    def notice(self) -> None:
        """Look soon."""
        self._noticed.set()

    async def run(self, stop: Stop) -> None:
        """Look whenever there is a reason to, until asked to stop."""
        stop.tell(self._noticed)
        while not stop:
            await self._noticed.wait()
            self._noticed.clear()
            try:
                async with answered_within(self._patience):
                    await self._look()
            except StoreUnavailable as error:
                emit("store.unavailable", doing="look", error=error)
            await stop.wait(LOOK_EVERY)

    async def _look(self) -> None:
        jobs = self._held_up()
        waits = [(job, awaited) for job in jobs for awaited in job.awaited or ()]
        last = max((awaited.since for _, awaited in waits), default=0.0)
        if not jobs or time.monotonic() - last < CERTAIN_AFTER:
            return
        workers = await self._store.workers()
        others = [one for one in workers if one.id != str(self._worker.id)]
        is_certain = True
        for job, awaited in waits:
            helpers = await self._helpers(awaited, job, others)
            if helpers is None or any(one.running < one.capacity for one in helpers):
                return
            is_certain = is_certain and not helpers
        if is_certain:
            self._tell(waits, is_certain=True)
            self._end_one(len(jobs), [one for _, one in waits if not one.is_bounded])
        elif time.monotonic() - last > LIKELY_AFTER:
            self._tell(waits, is_certain=False)

    async def _helpers(
        self, awaited: Awaited, job: Job, others: Sequence[WorkerRecord]
    ) -> list[WorkerRecord] | None:
        """Return which other workers might run a task that waits for a slot of ours; None: it needs none."""
        try:
            task = await self._store.get(awaited.task_id)
        except TaskNotFound:
            return None  # whoever waits is about to hear so
        if task.worker_id is not None:
            return [] if task.worker_id == str(self._worker.id) else None
        if task.status not in (TaskState.PENDING, TaskState.SCHEDULED):
            return None
        waited_for, waiting = self._registry.find(task.type), self._registry.find(job.task.type)
        is_ours = waited_for is not None and _serves(self._worker.queues, task.queue)
        if not is_ours or waited_for is None or waiting is None:
            return None  # it waits for a worker, and not for a slot
        if (waited_for.run == "process") != (waiting.run == "process"):
            return None  # there are other slots for it
        return [
            other
            for other in others
            if task.type in other.types and _serves(other.queues, task.queue)
        ]

    def _tell(self, waits: Sequence[tuple[Job, Awaited]], *, is_certain: bool) -> None:
        """Say it once of the same waits."""
        seen = {id(awaited) for _, awaited in waits}
        if not seen <= self._told:
            types = sorted({job.task.type for job, _ in waits})
            emit("handler.deadlocked", tasks=len(waits), types=types, certain=is_certain)
        self._told = seen

    def _end_one(self, slots: int, endless: Sequence[Awaited]) -> None:
        """Give back the slot of the last that waits without a limit. Others come to an end by themselves."""
        if endless:
            last = max(endless, key=lambda one: one.since)
            last.fail(
                Deadlock(
                    f"would wait for ever for the result of task {last.task_id}: the slots of this worker "
                    f"({slots}) are all held by handlers that wait for results, and no other worker "
                    "runs such tasks; raise concurrency, run another worker for them, or use on_success"
                )
            )


def _serves(queues: Sequence[str] | None, queue: str) -> bool:
    return queues is None or queue in queues
