"""What a worker holds: tasks that run, tasks kept ready for the next free slot, ends not yet written."""

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from uuid import UUID

from windlass.model.attempt import AttemptOutcome, Failed, Released
from windlass.model.errors import StoreUnavailable
from windlass.model.task import Claim
from windlass.policy.lifecycle import settle
from windlass.policy.retry import Retry
from windlass.registry import Registry
from windlass.runtime.committer import Done
from windlass.runtime.describe import describe_exception
from windlass.runtime.executor import Executor
from windlass.runtime.heartbeat import Leases
from windlass.runtime.job import Halt, Job
from windlass.runtime.reporter import REPORT_EVERY
from windlass.service import Stop
from windlass.telemetry import emit, tell

MOST_UNSETTLED = 2000  # ended tasks that wait to be written; above it nothing is claimed
LOOK_EVERY = 0.2  # seconds
GIVE_WAY_WITHIN = 5.0  # seconds, for a handler that overran, was cancelled or lost its lease
BUFFER_AHEAD = 0.2  # seconds of work, at the present rate, that may wait in the buffer


class Slots:
    """So many tasks run at once, and a bounded buffer of claimed ones waits for them to end."""

    def __init__(
        self,
        *,
        executor: Executor,
        registry: Registry,
        leases: Leases,
        report: Callable[[Sequence[Job]], Awaitable[None]],
        write: Callable[[Done], None],
        concurrency: int,
        buffer: int,
        buffer_bytes: int,
        buffer_seconds: float,
    ) -> None:
        self._executor = executor
        self._registry = registry
        self._leases = leases
        self._report = report  # that these have begun
        self._write = write
        self._concurrency = concurrency
        self._buffer = buffer
        self._buffer_bytes = buffer_bytes
        self._buffer_seconds = buffer_seconds
        self._waiting: deque[Job] = deque()
        self._waiting_bytes = 0
        self._average_bytes = 0.0
        self._running: set[Job] = set()
        self._overdue: dict[Job, float] = {}  # told to end and still here; since which look
        self._outstanding: Counter[UUID] = Counter()
        self._received: dict[UUID, float] = {}
        self._ended = 0
        self._rate = 0.0
        self._changed = asyncio.Event()
        self._draining = False
        self.unsettled = 0

    # For the fetcher

    def wanted(self) -> int:
        """How many tasks would be taken: free slots and what the buffer may hold."""
        if self._draining or self.unsettled > MOST_UNSETTLED:
            return 0
        ahead = min(self._buffer, int(self._rate * BUFFER_AHEAD)) - len(self._waiting)
        if self._average_bytes:
            spare_bytes = self._buffer_bytes - self._waiting_bytes
            ahead = min(ahead, int(spare_bytes / self._average_bytes))
        free = self._concurrency - len(self._running)
        return free + ahead

    @property
    def filled(self) -> tuple[int, int]:
        """How many tasks run, and how many may."""
        return len(self._running), self._concurrency

    def busy(self) -> int:
        """How many tasks are held: running, waiting, or not yet written."""
        return len(self._running) + len(self._waiting) + self.unsettled

    async def room(self) -> None:
        """Wait until a task would be taken."""
        while self.wanted() < 1:
            await self._change()

    async def emptied(self) -> None:
        """Wait until none is held."""
        while self.busy():
            await self._change()

    def hold(self, claim: Claim, asked_at: float) -> None:
        """Keep the lease of a claim."""
        self._leases.add(claim.token, asked_at)
        self._received[claim.token] = time.monotonic()

    async def take(self, claim: Claim) -> None:
        """Accept a claim that is held: run what has a slot, keep the rest ready."""
        received_at = self._received.pop(claim.token)
        if self._was_lost(claim):
            return
        jobs = [Job(claim, task, received_at) for task in claim.tasks]
        if claim.alone:
            try:
                # Written before it runs: if it takes the worker down, it shows.
                await self._report(jobs)
            except StoreUnavailable:
                self._leases.drop(claim.token)  # not run, so not kept: a rescue brings it back
                raise
        self._outstanding[claim.token] = len(claim.tasks)
        for job in jobs:
            size = len(job.task.payload)
            self._average_bytes += (size - self._average_bytes) * 0.05
            self._waiting_bytes += size
            self._waiting.append(job)
        self._run_waiting()

    def _was_lost(self, claim: Claim) -> bool:
        if self._leases.holds(claim.token):
            return False
        emit("lease.lost", token=claim.token, tasks=len(claim.tasks))
        tell("lost", claim.tasks)
        return True

    # From job to job

    def _run_waiting(self) -> None:
        create_task = asyncio.get_running_loop().create_task
        now = time.monotonic()
        while self._waiting and not self._draining and len(self._running) < self._concurrency:
            job = self._next_waiting()
            if not self._is_held(job, now):
                self._let_go(job.claim.token, 1)
                continue
            self._running.add(job)
            job.runner = create_task(self._run_job(job))
        self._leases.running = len(self._running)

    def _is_held(self, job: Job, now: float) -> bool:
        """Whether its lease holds, also if the heart stood still with everything else."""
        if job.halt is Halt.LOST:
            return False
        if self._leases.trusts(job.claim.token, now):
            return True
        self._tell_lost(job)
        return False

    def _next_waiting(self) -> Job:
        job = self._waiting.popleft()
        self._waiting_bytes -= len(job.task.payload)
        return job

    async def _run_job(self, job: Job) -> None:
        try:
            outcome = await self._executor.run(job)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not cost the slot as well
            outcome = Failed(describe_exception(error))
        if job in self._running:  # it may have been given up meanwhile
            self._ended += 1
            now = time.monotonic()
            if job.started_at is not None:
                job.took = now - job.started_at
            may_write = outcome is not None and self._is_held(job, now)
            self._free_slot(job, outcome if may_write else None)

    def _free_slot(self, job: Job, outcome: AttemptOutcome | None) -> None:
        self._running.discard(job)
        if outcome is None:
            self._let_go(job.claim.token, 1)
        else:
            self._end(job, outcome)
        self._run_waiting()

    def _end(self, job: Job, outcome: AttemptOutcome) -> None:
        definition = self._registry.find(job.task.type)
        self.unsettled += 1
        self._write(
            Done(
                job,
                settle(
                    job.claim.token,
                    job.task,
                    outcome,
                    retry=Retry() if definition is None else definition.retry,
                    draw=random.random(),  # noqa: S311 - jitter
                    started_after=job.started_after,
                    reported=job.reported,
                ),
            )
        )
        self._changed.set()

    def settled(self, batch: Sequence[Done]) -> None:
        """Let go of what was written."""
        self.unsettled -= len(batch)
        for token, tasks in Counter(done.settlement.token for done in batch).items():
            self._let_go(token, tasks)

    def _let_go(self, token: UUID, tasks: int) -> None:
        self._outstanding[token] -= tasks
        if self._outstanding[token] <= 0:
            del self._outstanding[token]
            self._leases.drop(token)
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    # For those who look on

    def claims_lost(self, tokens: Sequence[UUID]) -> None:
        """Stop what runs under these claims; nothing of it will be written."""
        lost = set(tokens)
        for token in lost:
            self._leases.drop(token)
        for job in [*self._running, *self._waiting]:
            if job.claim.token in lost:
                self.job_lost(job)

    def job_lost(self, job: Job) -> None:
        """Stop one job whose task is somebody else's by now, unless it has ended meanwhile."""
        if job.halt is not Halt.LOST and (job in self._running or job in self._waiting):
            self._tell_lost(job)
            job.stop(Halt.LOST)

    def _tell_lost(self, job: Job) -> None:
        emit("lease.lost", task_id=job.task.id, type=job.task.type, token=job.claim.token)
        tell("lost", (job.task,))

    def running(self) -> list[Job]:
        """Return the jobs that run. Another thread may ask."""
        return list(self._running)

    def long_running(self) -> list[Job]:
        """Return the jobs that have run for so long that it is to be reported."""
        since = time.monotonic() - REPORT_EVERY
        return [
            job for job in self._running if job.started_at is not None and job.started_at <= since
        ]

    async def watch(self, stop: Stop) -> None:
        """Measure the rate; give back what waits, and give up what overstays, for too long."""
        while not await stop.wait(LOOK_EVERY):
            self._rate += (self._ended / LOOK_EVERY - self._rate) * 0.5
            self._ended = 0
            now = time.monotonic()
            while self._waiting and self._waiting[0].received_at < now - self._buffer_seconds:
                self._end(self._next_waiting(), Released())
            self._abandon_stuck(now)

    def _abandon_stuck(self, now: float) -> None:
        overdue = [
            job for job in self._running if job.give_way_at is not None and job.give_way_at < now
        ]
        # Counted from the look that found them so: while the event loop was blocked they could not
        # hear that they should end.
        self._overdue = {job: self._overdue.get(job, now) for job in overdue}
        for job, since in self._overdue.items():
            if now - since > GIVE_WAY_WITHIN:
                emit("handler.abandoned", task_id=job.task.id, type=job.task.type)
                self._free_slot(job, self._executor.abandoned(job))

    # At the end

    def drain(self) -> None:
        """Take and begin nothing from here on."""
        self._draining = True

    def release_waiting(self) -> None:
        """Give back what has not begun."""
        while self._waiting:
            self._end(self._next_waiting(), Released())

    def interrupt(self) -> None:
        """Ask what still runs to give way; its tasks go back."""
        for job in self._running:
            job.stop(Halt.RELEASED)

    def release_running(self) -> None:
        """Leave behind the handlers that do not give way; their tasks go back all the same."""
        while self._running:
            self._end(self._running.pop(), Released())

    async def until_nothing_runs(self) -> None:
        """Wait for the last handler."""
        while self._running:
            await self._change()
