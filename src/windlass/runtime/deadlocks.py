"""Finds handlers that wait for results of tasks which cannot run, because all slots are held by such handlers.

A worker sees its own slots only. Where another worker could run what is waited for, nothing is certain, and
nothing is done. Where there is none, they would wait for ever: one of them is told so, by an error.
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
        since = time.monotonic() - CERTAIN_AFTER
        jobs = self._held_up()
        waits = [(job, awaited) for job in jobs for awaited in job.awaited or ()]
        if not jobs or any(awaited.since > since for _, awaited in waits):
            return
        workers = await self._store.workers()
        others = [one for one in workers if one.id != str(self._worker.id)]
        for job, awaited in waits:
            if not await self._cannot_run(awaited, job, others):
                return
        self._end_one(jobs, [awaited for _, awaited in waits if not awaited.is_bounded])

    async def _cannot_run(self, awaited: Awaited, job: Job, others: Sequence[WorkerRecord]) -> bool:
        """Whether a task waits for a slot that only this worker could give, or holds one itself."""
        try:
            task = await self._store.get(awaited.task_id)
        except TaskNotFound:
            return False  # whoever waits is about to hear so
        if task.worker_id is not None:
            return task.worker_id == str(self._worker.id)
        if task.status not in (TaskState.PENDING, TaskState.SCHEDULED):
            return False
        waited_for, waiting = self._registry.find(task.type), self._registry.find(job.task.type)
        is_ours = waited_for is not None and _serves(self._worker.queues, task.queue)
        if not is_ours or waited_for is None or waiting is None:
            return False  # it waits for a worker, and not for a slot
        has_other_slots = (waited_for.run == "process") != (waiting.run == "process")
        return not has_other_slots and not any(
            task.type in other.types and _serves(other.queues, task.queue) for other in others
        )

    def _end_one(self, jobs: Sequence[Job], endless: Sequence[Awaited]) -> None:
        """Give back the slot of the last that waits without a limit. Others come to an end by themselves."""
        emit("handler.deadlocked", tasks=len(jobs), types=sorted({job.task.type for job in jobs}))
        if endless:
            last = max(endless, key=lambda one: one.since)
            last.fail(
                Deadlock(
                    f"would wait for ever for the result of task {last.task_id}: the slots of this worker "
                    f"({len(jobs)}) are all held by handlers that wait for results, and no other worker "
                    "runs such tasks; raise concurrency, run another worker for them, or use on_success"
                )
            )


def _serves(queues: Sequence[str] | None, queue: str) -> bool:
    return queues is None or queue in queues
