"""What a worker holds: tasks that run, tasks kept ready for the next free slot, ends not yet written."""

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from uuid import UUID

from msgspec.structs import replace

from windlass.model.attempt import AttemptOutcome, Released, Succeeded
from windlass.model.errors import StoreUnavailable
from windlass.model.task import Claim, Settlement
from windlass.policy.lifecycle import completed, settle
from windlass.policy.retry import Retry
from windlass.registry import Registry
from windlass.runtime.carrier import Carriers
from windlass.runtime.committer import Done
from windlass.runtime.executor import Executor
from windlass.runtime.heartbeat import Leases
from windlass.runtime.job import GIVE_WAY_WITHIN, Halt, Job
from windlass.runtime.reporter import REPORT_EVERY
from windlass.runtime.serving import QueueRoom
from windlass.service import Stop
from windlass.telemetry import emit, tell

MOST_UNSETTLED = 4000  # ended tasks that wait to be written; above it nothing is claimed
MOST_UNSETTLED_BYTES = 32 << 20  # of their results, if they are as large as those before
LOOK_EVERY = 0.2  # seconds
LOOK_EVERY_IDLE = 0.5
SHORTEST_LOOK = 0.05  # seconds, over which a rate is taken
FORGET = 0.95  # what is left of the average size of payloads after each one more
FIRST_CLAIM = 100  # tasks, of which nobody knows yet how large they are
CLAIM_BYTES = 4 << 20  # of payloads in one claim, if they are as large as those before
ENOUGH = 500  # free places are worth a claim, although tasks still wait
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
        tell_held_up: Callable[[], None],
        concurrency: int,
        buffer: int,
        buffer_bytes: int,
        buffer_seconds: float,
        queue_room: QueueRoom | None = None,
    ) -> None:
        self._executor = executor
        self._registry = registry
        self._leases = leases
        self._report = report  # that these have begun
        self._write = write
        self._tell_held_up = tell_held_up  # whoever looks for deadlocks
        self._concurrency = concurrency
        self._buffer = buffer
        self._buffer_bytes = buffer_bytes
        self._buffer_seconds = buffer_seconds
        self._queue_room = queue_room  # None: no queue has a limit of its own
        self._waiting: deque[Job] = deque()
        self._waiting_bytes = 0
        self._average_bytes = 0.0
        self._average_result = 0.0  # bytes
        self._running: set[Job] = set()
        self._overdue: dict[Job, float] = {}  # told to end and still here; since which look
        self._outstanding: Counter[UUID] = Counter()
        self._received: dict[UUID, float] = {}
        self._trusted: Claim | None = None  # the last one that was asked for: most ask for the same
        self._trusted_until = 0.0  # monotonic; it may be longer by now
        self._ended = 0
        self._measured_at = time.monotonic()
        self._rate = 0.0
        self._empty_since = self._measured_at
        self._changed = asyncio.Event()
        self._draining = False
        self.unsettled = 0
        self._calls_back = frozenset(one.name for one in registry if one.defaults.calls_back)
        self.beside: Slots | None = None  # those of the same worker for handlers of another kind
        self._carriers = Carriers(executor, self)

    # For the fetcher

    def wanted(self) -> int:
        """How many tasks would be taken: free slots and what the buffer may hold."""
        if self._draining or self.unsettled > MOST_UNSETTLED:
            return 0
        if self.unsettled * self._average_result > MOST_UNSETTLED_BYTES:
            return 0
        ahead = min(self._buffer, int(self._rate_now() * BUFFER_AHEAD)) - len(self._waiting)
        if self._average_bytes:
            spare_bytes = self._buffer_bytes - self._waiting_bytes
            ahead = min(ahead, int(spare_bytes / self._average_bytes))
        return self._concurrency - len(self._running) + ahead

    def free_slots(self) -> int:
        """How many tasks could begin at once, once those that wait have."""
        return max(0, self._concurrency - len(self._running) - len(self._waiting))

    async def slot_freed(self) -> None:
        """Wait until one could."""
        while not self.free_slots():
            await self._change()

    def at_once(self) -> int:
        """How many may be claimed at once: not so many that their payloads fill the memory on their way."""
        if not self._average_bytes:
            return FIRST_CLAIM
        return max(1, int(CLAIM_BYTES / self._average_bytes))

    @property
    def filled(self) -> tuple[int, int]:
        """How many tasks run, and how many may."""
        return len(self._running), self._concurrency

    def busy(self) -> int:
        """How many tasks are held: running, waiting, or not yet written."""
        return len(self._running) + len(self._waiting) + self.unsettled

    def has_room(self) -> bool:
        """Whether it is time to claim: while tasks wait for a slot, not before as many more would fit."""
        wanted = self.wanted()
        return wanted > 0 and wanted >= min(ENOUGH, len(self._waiting))

    async def room(self) -> None:
        """Wait until it is time to claim."""
        while not self.has_room():
            await self._change()

    async def emptied(self) -> None:
        """Wait until the worker holds none."""
        for slots in (self, self.beside or self):
            while slots.busy():
                await slots._change()  # noqa: SLF001 - of our own kind

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
        if (
            claim.alone and len(jobs) == 1
        ):  # many suspects are an outage: they must not pay for one of them
            try:
                # Written before it runs: if it takes the worker down, it shows.
                await self._report(jobs)
            except StoreUnavailable:
                self._leases.drop(claim.token)  # not run, so not kept: a rescue brings it back
                raise
        now = time.monotonic()
        if self._has_paused(now):
            self._rate, self._ended, self._measured_at = 0.0, 0, now
        self._outstanding[claim.token] = len(claim.tasks)
        if self._queue_room is not None:
            self._queue_room.take(claim.tasks)
        size = sum([len(job.task.payload) for job in jobs])
        weight = 1 - FORGET ** len(jobs)
        self._average_bytes += (size / len(jobs) - self._average_bytes) * weight
        self._waiting_bytes += size
        self._waiting += jobs
        self._carriers.start()

    def _was_lost(self, claim: Claim) -> bool:
        if self._leases.holds(claim.token):
            return False
        emit("lease.lost", token=claim.token, tasks=len(claim.tasks))
        tell("lost", claim.tasks)
        return True

    # From job to job: what carriers ask for

    def peek(self) -> Job | None:
        """Return the job that is to begin next, if one may begin now."""
        if not self._waiting or self._draining or len(self._running) >= self._concurrency:
            return None
        return self._waiting[0]

    def begin(self, now: float) -> bool:
        """Take that job out, to run it; false if its lease is lost."""
        job = self._next_waiting()
        if not self._is_held(job, now):
            self._leave_queue(job)
            self._let_go(job.claim, 1)
            return False
        self._running.add(job)
        return True

    def _is_held(self, job: Job, now: float) -> bool:
        """Whether its lease holds, also if the heart stood still with everything else."""
        if job.halt is Halt.LOST:
            return False
        if job.claim is self._trusted and now < self._trusted_until:
            return True
        self._trusted, self._trusted_until = job.claim, self._leases.until(job.claim.token)
        if now < self._trusted_until:
            return True
        self._tell_lost(job)
        return False

    def _next_waiting(self) -> Job:
        job = self._waiting.popleft()
        self._waiting_bytes -= len(job.task.payload)
        return job

    def end(self, job: Job, outcome: AttemptOutcome | None, now: float) -> None:
        """Free the slot of a job whose handler has ended, unless it was given up meanwhile."""
        if job in self._running:
            self._ended += 1
            if job.started_at is not None:
                job.took = now - job.started_at
            may_write = outcome is not None and self._is_held(job, now)
            self._free_slot(job, outcome if may_write else None)

    def _leave_queue(self, job: Job) -> None:
        if self._queue_room is not None:
            self._queue_room.leave(job.task.queue)

    def _free_slot(self, job: Job, outcome: AttemptOutcome | None) -> None:
        self._running.discard(job)
        if self._queue_room is not None:  # no call for most tasks
            self._leave_queue(job)
        if outcome is None:
            self._let_go(job.claim, 1)
        else:
            self._end(job, outcome)

    def _end(self, job: Job, outcome: AttemptOutcome) -> None:
        self.unsettled += 1
        settlement = self._settlement(job, outcome)
        result = settlement.result
        if result is not None or self._average_result:
            size = 0 if result is None else len(result)
            self._average_result += (size - self._average_result) * (1 - FORGET)
        self._write(Done(job, settlement))
        self._changed.set()

    def _settlement(self, job: Job, outcome: AttemptOutcome) -> Settlement:
        settlement = self._decided(job, outcome)
        if job.task.type in self._calls_back:
            settlement = replace(settlement, calls_back=True)
        return settlement

    def _decided(self, job: Job, outcome: AttemptOutcome) -> Settlement:
        task, token = job.task, job.claim.token
        if isinstance(outcome, Succeeded):
            return completed(token, task, outcome, job.started_after, reported=job.reported)
        definition = self._registry.find(task.type)
        return settle(
            token,
            task,
            outcome,
            retry=Retry() if definition is None else definition.retry,
            draw=random.random(),  # noqa: S311 - jitter
            started_after=job.started_after,
            reported=job.reported,
        )

    def took(self, claim: Claim) -> bool:
        """Whether it holds something of a claim."""
        return claim.token in self._outstanding

    def settled(self, claims: Counter[Claim]) -> None:
        """Let go of what was written: so many tasks of each claim."""
        for claim, tasks in claims.items():
            self.unsettled -= tasks
            self._let_go(claim, tasks)

    def _let_go(self, claim: Claim, tasks: int) -> None:
        token = claim.token
        self._outstanding[token] -= tasks
        if self._outstanding[token] <= 0:
            del self._outstanding[token]
            self._leases.drop(token)
            if not self._outstanding:
                self._empty_since = time.monotonic()
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

    def held_up(self) -> list[Job]:
        """Return the jobs that run if they take every slot and each waits for the result of another task."""
        if len(self._running) < self._concurrency or not all(job.awaited for job in self._running):
            return []
        return self.running()

    def long_running(self) -> list[Job]:
        """Return the jobs that have run for so long that it is to be reported."""
        since = time.monotonic() - REPORT_EVERY
        return [
            job for job in self._running if job.started_at is not None and job.started_at <= since
        ]

    async def watch(self, stop: Stop) -> None:
        """Measure the rate; give back what waits, and give up what overstays, for too long."""
        while not await stop.wait(LOOK_EVERY if self._outstanding else LOOK_EVERY_IDLE):
            now = time.monotonic()
            self._measure(now)
            while self._waiting and self._waiting[0].received_at < now - self._buffer_seconds:
                job = self._next_waiting()
                self._leave_queue(job)
                self._end(job, Released())
            self._abandon_stuck(now)
            if self.held_up():
                self._tell_held_up()

    def _measure(self, now: float) -> None:
        seconds = now - self._measured_at
        if seconds >= SHORTEST_LOOK:
            weight = 1 - 0.5 ** (seconds / LOOK_EVERY)
            self._rate += (self._ended / seconds - self._rate) * weight
            self._ended, self._measured_at = 0, now

    def _rate_now(self) -> float:
        """Tasks a second: as measured, or more if work has begun since, of which nothing is measured yet.

        None after a pause: what comes next may be of another kind, and is not all to be taken ahead of others.
        """
        now = time.monotonic()
        if self._has_paused(now):
            return 0.0
        seconds = max(now - self._measured_at, SHORTEST_LOOK)
        return max(self._rate, self._ended / seconds)

    def _has_paused(self, now: float) -> bool:
        return not self._outstanding and now - self._empty_since > SHORTEST_LOOK

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
                self._carriers.start()

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

    def last_settlements(self, blocking: Job | None) -> list[Settlement]:
        """What is to be written of all that is held when a job has cost the process. Another thread may ask."""
        last = [self._settlement(job, Released()) for job in list(self._waiting)]
        for job in self.running():
            outcome = self._executor.abandoned(job) if job is blocking else Released()
            if outcome is not None:
                last.append(self._settlement(job, outcome))
        return last

    async def until_nothing_runs(self) -> None:
        """Wait for the last handler."""
        while self._running:
            await self._change()
