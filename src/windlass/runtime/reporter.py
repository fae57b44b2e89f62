"""Tells the store which tasks run for a while, and handlers that they are cancelled."""

from collections.abc import Awaitable, Callable, Sequence

from windlass.model.errors import StoreUnavailable
from windlass.model.task import Started
from windlass.runtime.job import Halt, Job
from windlass.service import Stop
from windlass.store.port import ClaimStore
from windlass.telemetry import emit

REPORT_EVERY = 0.5  # seconds; a task that ends sooner is never reported


class Reporter:
    """Reports what runs, in batches. Short tasks never pay for it."""

    def __init__(
        self,
        *,
        store: ClaimStore,
        long_running: Callable[[], Sequence[Job]],
        lost: Callable[[Job], None],
        beside: Callable[[], Awaitable[None]],
    ) -> None:
        self._store = store
        self._beside = beside  # what else is to be done at this pace
        self._long_running = long_running
        self._lost = lost

    async def run(self, stop: Stop) -> None:
        """Report while anything runs for that long."""
        while not await stop.wait(REPORT_EVERY):
            try:
                await self.report(self._long_running())
                await self._beside()
            except StoreUnavailable as error:
                emit("store.unavailable", doing="report", error=error)

    async def report(self, jobs: Sequence[Job]) -> None:
        """Record jobs as running, and pass on cancellations that were asked for."""
        fresh = [job for job in jobs if not job.report_confirmed]
        if fresh:
            await self._start(fresh)
        if jobs:
            requested = await self._store.requested_cancellations([job.task.id for job in jobs])
            for job in jobs:
                if job.task.id in requested and job.halt is None:
                    job.stop(Halt.CANCELLED, requested[job.task.id])

    async def _start(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            job.reported = True  # before the write: a settlement that overtakes it cleans up
        started = [
            Started(job.claim.token, job.task.id, job.task.generation, job.started_after or 0.0)
            for job in jobs
        ]
        lost = await self._store.start(started)
        for job in jobs:
            job.report_confirmed = True
            if job.task.id in lost:
                self._lost(job)
