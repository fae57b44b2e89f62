"""Tells the store which tasks run for a while, and handlers that they are cancelled."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from windlass.model.errors import StoreBusy, StoreUnavailable
from windlass.model.task import Started
from windlass.runtime.job import Halt, Job
from windlass.service import LONGEST_PATIENCE, Stop, answered_within, backoff
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
        patience: float = LONGEST_PATIENCE,
    ) -> None:
        self._store = store
        self._patience = patience  # seconds, for an answer of the store
        self._beside = beside  # what else is to be done at this pace
        self._long_running = long_running
        self._lost = lost

    async def run(self, stop: Stop) -> None:
        """Report while anything runs for that long."""
        failures, pause = 0, REPORT_EVERY
        while not await stop.wait(pause):
            try:
                jobs = self._long_running()
                await self._pass_on_cancellations(jobs)
                await self._beside()
                await self._report_apart(
                    [job for job in jobs if not job.report_confirmed and not job.is_waiting]
                )
                failures, pause = 0, REPORT_EVERY
            except StoreUnavailable as error:
                failures += 1
                pause = REPORT_EVERY + backoff(failures)
                emit("store.unavailable", doing="report", error=error)

    async def _report_apart(self, jobs: Sequence[Job]) -> None:
        """Report jobs; those of a claim that somebody holds later, the others all the same."""
        try:
            await self.report(jobs)
        except StoreBusy as error:
            emit("report.delayed", tasks=len(jobs), error=error)
            for token in {job.claim.token for job in jobs}:
                with suppress(StoreBusy):
                    await self.report([job for job in jobs if job.claim.token == token])

    async def _pass_on_cancellations(self, jobs: Sequence[Job]) -> None:
        if jobs:
            ids = [job.task.id for job in jobs]
            async with answered_within(self._patience):
                requested = await self._store.requested_cancellations(ids)
            for job in jobs:
                if job.task.id in requested and job.halt is None:
                    job.stop(Halt.CANCELLED, requested[job.task.id])

    async def report(self, jobs: Sequence[Job]) -> None:
        """Record jobs as running."""
        if not jobs:
            return
        for job in jobs:
            job.reported = True  # before the write: a settlement that overtakes it cleans up
        started = [
            Started(job.claim.token, job.task.id, job.task.generation, job.started_after or 0.0)
            for job in jobs
        ]
        async with answered_within(self._patience):
            lost = await self._store.start(started)
        for job in jobs:
            job.report_confirmed = True
            if job.task.id in lost:
                self._lost(job)
