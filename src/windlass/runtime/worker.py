"""Joins the stages with bounded buffers; drains them in order on stop."""

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from uuid import UUID

from windlass.model.attempt import AttemptOutcome, Failed, Released
from windlass.model.errors import StoreUnavailable
from windlass.model.task import Claim, ClaimRequest, WorkerInfo
from windlass.policy.lifecycle import settle
from windlass.policy.retry import Retry
from windlass.registry import Registry
from windlass.runtime.committer import Committer, Done
from windlass.runtime.describe import describe_exception
from windlass.runtime.executor import Executor
from windlass.runtime.fetcher import Fetcher
from windlass.runtime.heartbeat import Heartbeat, Leases
from windlass.runtime.job import Halt, Job
from windlass.runtime.reporter import REPORT_EVERY, Reporter
from windlass.runtime.threads import Threads
from windlass.service import Stop, first_of, stop_task
from windlass.store.port import Store
from windlass.telemetry import emit

MOST_UNSETTLED = 2000  # ended tasks that wait to be written; above it nothing is claimed
LOOK_AT_BUFFER_EVERY = 0.2  # seconds
BUFFER_AHEAD = 0.2  # seconds of work, at the present rate, that may wait in the buffer
FLUSH_WITHIN = 10.0  # seconds for the last writes at shutdown
LEAVE_WITHIN = 3.0  # seconds for what else is said to the store then


class Companion(Protocol):
    """The leader's work, which a worker carries along."""

    @property
    def is_leader(self) -> bool:
        """Whether this worker leads now."""

    async def run(self, stop: Stop) -> None:
        """Stand for election and do what a leader does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How a worker works; durations are seconds."""

    info: WorkerInfo
    concurrency: int
    lease: float
    heartbeat: float
    poll: float
    ageing: float
    shutdown_timeout: float
    buffer: int
    buffer_bytes: int
    buffer_seconds: float
    max_result_bytes: int
    on_startup: Sequence[Callable[[], Any]] = ()
    on_shutdown: Sequence[Callable[[], Any]] = ()


class Worker:
    """Fetcher → executor → committer, with a heart and a buffer."""

    def __init__(
        self, *, store: Store, registry: Registry, companion: Companion, options: WorkerOptions
    ) -> None:
        self._store = store
        self._registry = registry
        self._companion = companion
        self._options = options
        self._lease = timedelta(seconds=options.lease)
        self._threads = Threads()
        self._executor = Executor(
            registry=registry,
            threads=self._threads,
            worker_id=options.info.id,
            max_result_bytes=options.max_result_bytes,
        )
        self._committer = Committer(store=store, settled=self._settled)
        self._leases = Leases(self._lease)
        self._fetcher = Fetcher(
            store=store,
            room=self,
            request=ClaimRequest(
                options.info.id,
                options.info.types,
                1,
                self._lease,
                timedelta(seconds=options.ageing),
                options.info.queues,
            ),
            poll=timedelta(seconds=options.poll),
            is_leader=lambda: companion.is_leader,
            went_idle=self._went_idle,
        )
        self._reporter = Reporter(
            store=store,
            long_running=self._long_running,
            lost=self._job_lost,
            beside=self._fetcher.promote_while_busy,
        )
        self._waiting: deque[Job] = deque()
        self._waiting_bytes = 0
        self._average_bytes = 0.0
        self._running: set[Job] = set()
        self._unsettled = 0
        self._outstanding: Counter[UUID] = Counter()
        self._received: dict[UUID, float] = {}
        self._ended = 0
        self._rate = 0.0
        self._changed = asyncio.Event()
        self._idle_seen = asyncio.Event()
        self._draining = False
        self._stopping = Stop()
        self._insisting = Stop()

    # From outside

    def stop(self) -> None:
        """Ask to drain; asked again, insist: what still runs is given back at once."""
        if self._stopping:
            self._insisting.set()
        self._draining = True  # at once: nothing is claimed or begun from here on
        self._stopping.set()

    async def run(
        self, *, until_idle: bool = False, started: Callable[[], None] | None = None
    ) -> None:
        """Work until asked to stop, or until there is nothing ready and nothing running."""
        try:
            await self._start()
        except BaseException:
            await self._leave()
            raise
        heartbeat = self._heartbeat()
        await heartbeat.start()
        stop_fetching, stop_services = Stop(), Stop()
        committing = asyncio.create_task(self._committer.run(), name="windlass-committer")
        fetching = asyncio.create_task(self._fetch(stop_fetching), name="windlass-fetcher")
        services = [
            asyncio.create_task(self._reporter.run(stop_services), name="windlass-reporter"),
            asyncio.create_task(self._watch_buffer(stop_services), name="windlass-buffer"),
        ]
        leading = asyncio.create_task(self._companion.run(stop_services), name="windlass-leader")
        try:
            if started is not None:
                started()
            waiting = asyncio.create_task(self._until_stop(until_idle), name="windlass-stop")
            everything = {waiting, committing, fetching, leading, *services}
            ended, _ = await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
            _tell_failed(ended)
            await stop_task(waiting)
            stop_fetching.set()
            await self._finish_or_release(fetching)
            self._committer.close()
            await self._flush(committing)
            stop_services.set()
            # On a database that does not answer none of them ends by itself.
            ended, _ = await asyncio.wait([fetching, leading, *services], timeout=LEAVE_WITHIN)
            for task in ended:
                task.result()
        finally:
            for task in (fetching, committing, leading, *services):
                task.cancel()
            await asyncio.gather(fetching, committing, leading, *services, return_exceptions=True)
            await heartbeat.stop()
            self._threads.close()
            await self._leave()

    # The life of a worker

    async def _start(self) -> None:
        info = self._options.info
        await self._store.register_types([one.defaults for one in self._registry])
        await self._store.register(info, lease=self._lease)
        for hook in self._options.on_startup:
            state = await _call(hook)
            if state is not None:
                self._executor.state = state
        emit("worker.started", worker_id=info.id, concurrency=self._options.concurrency)

    def _heartbeat(self) -> Heartbeat:
        loop = asyncio.get_running_loop()

        def lost(tokens: list[UUID]) -> None:
            loop.call_soon_threadsafe(self._claims_lost, tokens)

        return Heartbeat(
            store=self._store,
            worker=self._options.info,
            leases=self._leases,
            lease=self._lease,
            every=timedelta(seconds=self._options.heartbeat),
            lost=lost,
        )

    async def _fetch(self, stop: Stop) -> None:
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(self._fetcher.wake)

        async with self._store.listen(wake):
            await self._fetcher.run(stop)

    async def _until_stop(self, until_idle: bool) -> None:
        while not self._stopping:
            if not until_idle:
                await self._stopping.wait()
                return
            self._idle_seen.clear()
            await first_of(self._idle_seen.wait(), self._stopping.wait())
            info = self._options.info
            if not self.busy() and not await self._store.has_work(info.types, info.queues):
                return

    async def _finish_or_release(self, fetching: asyncio.Task[None]) -> None:
        """Give back what has not begun, wait for what has, and at the deadline give it back too."""
        self._draining = True
        deadline = asyncio.get_running_loop().time() + self._options.shutdown_timeout
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await first_of(asyncio.shield(fetching), self._insisting.wait())
        for job in list(self._waiting):
            self._end(job, Released())
        self._waiting.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await first_of(self._until_nothing_runs(), self._insisting.wait())
        for job in list(self._running):
            job.stop(Halt.RELEASED)
        try:
            async with asyncio.timeout(1.0):
                await self._until_nothing_runs()
        except TimeoutError:
            # A handler that does not give way is left behind; its task goes back all the same.
            for job in list(self._running):
                self._running.discard(job)
                self._end(job, Released())

    async def _flush(self, committing: asyncio.Task[None]) -> None:
        done, _ = await asyncio.wait([committing], timeout=FLUSH_WITHIN)
        for task in done:
            task.result()
        if self._unsettled:
            # The store does not answer, or somebody holds them: they run again once rescued.
            emit("settlement.abandoned", tasks=self._unsettled)

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(LEAVE_WITHIN):
                await self._store.deregister(self._options.info.id)
        except (StoreUnavailable, TimeoutError) as error:
            emit("store.unavailable", doing="deregister", error=error)
        for hook in self._options.on_shutdown:
            await _call(hook)
        emit("worker.stopped", worker_id=self._options.info.id)

    def _went_idle(self) -> None:
        self._leases.idle = True
        self._idle_seen.set()

    # The room that the fetcher fills

    def wanted(self) -> int:
        """How many tasks would be taken: free slots and what the buffer may hold."""
        if self._draining or self._unsettled > MOST_UNSETTLED:
            return 0
        ahead = min(self._options.buffer, int(self._rate * BUFFER_AHEAD)) - len(self._waiting)
        if self._average_bytes:
            spare_bytes = self._options.buffer_bytes - self._waiting_bytes
            ahead = min(ahead, int(spare_bytes / self._average_bytes))
        free = self._options.concurrency - len(self._running)
        return free + ahead

    def busy(self) -> int:
        """How many tasks are held: running, waiting, or not yet written."""
        return len(self._running) + len(self._waiting) + self._unsettled

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
                await self._reporter.report(jobs)
            except StoreUnavailable:
                self._leases.drop(claim.token)  # not run, so not kept: a rescue brings it back
                raise
            if self._was_lost(claim):
                return  # while that was written
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
        return True

    # From job to job

    def _run_waiting(self) -> None:
        create_task = asyncio.get_running_loop().create_task
        while (
            self._waiting and not self._draining and len(self._running) < self._options.concurrency
        ):
            job = self._waiting.popleft()
            self._waiting_bytes -= len(job.task.payload)
            if job.halt is Halt.LOST:
                self._let_go(job.claim.token, 1)
                continue
            self._running.add(job)
            job.runner = create_task(self._run_job(job))
        self._leases.running = len(self._running)

    async def _run_job(self, job: Job) -> None:
        try:
            outcome = await self._executor.run(job)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not cost the slot as well
            outcome = Failed(describe_exception(error))
        if job not in self._running:
            return  # it was given back meanwhile
        self._running.discard(job)
        self._ended += 1
        if outcome is None:
            self._let_go(job.claim.token, 1)
        else:
            self._end(job, outcome)
        self._run_waiting()

    def _end(self, job: Job, outcome: AttemptOutcome) -> None:
        definition = self._registry.find(job.task.type)
        self._unsettled += 1
        self._committer.add(
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

    def _settled(self, batch: Sequence[Done]) -> None:
        self._unsettled -= len(batch)
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

    async def _until_nothing_runs(self) -> None:
        while self._running:
            await self._change()

    def _claims_lost(self, tokens: list[UUID]) -> None:
        lost = set(tokens)
        for token in lost:
            self._leases.drop(token)
        for job in [*self._running, *self._waiting]:
            if job.claim.token in lost:
                self._job_lost(job)

    def _job_lost(self, job: Job) -> None:
        if job.halt is not Halt.LOST:
            emit("lease.lost", task_id=job.task.id, type=job.task.type, token=job.claim.token)
            job.stop(Halt.LOST)

    def _long_running(self) -> list[Job]:
        since = time.monotonic() - REPORT_EVERY
        return [
            job for job in self._running if job.started_at is not None and job.started_at <= since
        ]

    async def _watch_buffer(self, stop: Stop) -> None:
        """Measure the rate, and give back what has waited in the buffer for too long."""
        while not await stop.wait(LOOK_AT_BUFFER_EVERY):
            self._rate += (self._ended / LOOK_AT_BUFFER_EVERY - self._rate) * 0.5
            self._ended = 0
            self._leases.idle = self._fetcher.idle
            oldest = time.monotonic() - self._options.buffer_seconds
            while self._waiting and self._waiting[0].received_at < oldest:
                job = self._waiting.popleft()
                self._waiting_bytes -= len(job.task.payload)
                self._end(job, Released())


def _tell_failed(ended: set[asyncio.Task[None]]) -> None:
    """At once: draining may take a while, and only then is the error raised."""
    for task in ended:
        if error := task.exception():
            emit("service.failed", service=task.get_name(), error=error)


async def _call(hook: Callable[[], Any]) -> Any:
    result = hook()
    return await result if isinstance(result, Awaitable) else result
