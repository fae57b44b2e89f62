"""Joins the stages with bounded buffers; drains them in order on stop."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

from windlass.model.errors import StoreUnavailable
from windlass.model.task import Claim, ClaimRequest, WorkerOrder
from windlass.registry import Registry, TaskDefinition
from windlass.runtime.alarms import Alarms
from windlass.runtime.announcing import Announcing
from windlass.runtime.committer import Committer
from windlass.runtime.completing import Completing
from windlass.runtime.deadlocks import Deadlocks
from windlass.runtime.executor import Executor
from windlass.runtime.fetcher import Beside, Fetcher
from windlass.runtime.health import Health
from windlass.runtime.heartbeat import Heartbeat, Leases
from windlass.runtime.hooks import call, call_all
from windlass.runtime.job import Job
from windlass.runtime.leaving import leave_behind
from windlass.runtime.loop_threads import LoopThreads
from windlass.runtime.loop_watch import LoopWatch
from windlass.runtime.measuring import new_metrics
from windlass.runtime.monitor import Monitor
from windlass.runtime.options import WorkerOptions
from windlass.runtime.processes.apart import Apart
from windlass.runtime.processes.finding import Program, place_of
from windlass.runtime.reporter import Reporter
from windlass.runtime.serving import QueueRoom
from windlass.runtime.sharing import Sharing
from windlass.runtime.slots import Slots
from windlass.runtime.threads import Threads
from windlass.service import Stop, answered_within, first_of, patience, stop_task
from windlass.store.clock_watch import ClockWatch
from windlass.store.port import Listening, Store
from windlass.telemetry import counted, emit, unwatch, watch

if TYPE_CHECKING:
    from windlass.runtime.processes.pool import Pool

INTERRUPT_WITHIN = 1.0  # seconds for handlers that are interrupted
FLUSH_WITHIN = 10.0  # seconds for the last writes at shutdown
STUCK_AFTER = 60.0  # seconds without a turn of the event loop
STOPPING = "stopping"  # an absence: it was asked to, or something has failed
LEAVE_WITHIN = 3.0  # seconds for what else is said to the store then


class Companion(Protocol):
    """The leader's work, which a worker carries along."""

    @property
    def is_leader(self) -> bool:
        """Whether this worker leads now."""

    async def run(self, stop: Stop) -> None:
        """Stand for election and do what a leader does."""

    def look_at_schedules(self) -> None:
        """Look at schedules at once, if this worker leads: there is another one."""


class Worker:
    """Fetcher → executor → committer, with a heart and a buffer."""

    def __init__(
        self,
        *,
        store: Store,
        registry: Registry,
        companion: Companion,
        clock: ClockWatch,
        alarms: Alarms,
        options: WorkerOptions,
        monitor: Monitor | None = None,  # answers probes, of this worker while it runs
    ) -> None:
        self._monitor = monitor
        self._store = store
        self._registry = registry
        self._companion = companion
        self._clock = clock
        self._options = options
        self._lease = timedelta(seconds=options.lease)
        self._threads = Threads(self._count_stuck)
        types_apart = _types_apart(registry, options.info.types)
        self._processes = self._new_processes(types_apart) if types_apart else None
        registry.classifier.load()
        self._executor = Executor(
            registry=registry,
            threads=self._threads,
            worker_id=options.info.id,
            max_result_bytes=options.max_result_bytes,
            completing=self._completing,
            apart=self._new_apart(types_apart),
        )
        self._leases = Leases(self._lease)
        self._alarms = alarms
        self._committer = Committer(
            store=store,
            settled=self._settled,
            died=alarms.tell,
            patience=patience(self._lease),
        )
        self._idle_seen = asyncio.Event()
        self._deadlocks = Deadlocks(
            store=store,
            registry=registry,
            worker=options.info,
            held_up=lambda: next(filter(None, (one.held_up() for one in self._all_slots)), []),
            patience=patience(self._lease),
        )
        # What runs in processes has room of its own: as many as there are processes. It does not take the
        # slots of others, nor do they wait behind it. With one kind of handlers there is but one room.
        other_types = tuple(one for one in options.info.types if one not in types_apart)
        self._fetchers = Beside()
        self._queue_room = QueueRoom(options.serving.most) if options.serving.most else None
        if self._queue_room is not None:
            self._queue_room.freed = self._fetchers.wake
        self._all_slots: list[Slots] = []
        if other_types or not types_apart:
            self._add_room(other_types, concurrency=options.concurrency, buffer=options.buffer)
        if types_apart:
            self._add_room(types_apart, concurrency=options.processes.size, buffer=options.buffer)
        self._slots, self._fetcher = self._all_slots[0], self._fetchers.fetchers[0]
        self._slots.beside = self._all_slots[-1]
        self._all_slots[-1].beside = self._slots
        self._reporter = Reporter(
            store=store,
            long_running=lambda: [job for slots in self._all_slots for job in slots.long_running()],
            lost=self._job_lost,
            beside=self._fetcher.promote_while_busy,
            patience=patience(self._lease),
        )
        self._loop_watch = LoopWatch(
            self._slots.running,
            self._give_up_process if options.process else None,
            must_end=self._must_end,
        )
        self._announcing = Announcing(
            store=store, registry=registry, clock=self._clock, options=options, lease=self._lease
        )
        self._asked_at: float | None = None  # to stop, by the monotonic clock
        self.is_exhausted = False  # another process should take the place of this one
        self._beating_heart: Heartbeat | None = None
        self._listening: Listening | None = None
        self._absence = "starting"  # why it does not work; empty: it does
        self._stopping = Stop()
        self._insisting = Stop()

    def _new_processes(self, types: Sequence[str]) -> "Pool":
        from windlass.runtime.processes.pool import Pool  # noqa: PLC0415 - others need no processes

        options = self._options.processes
        modules = dict.fromkeys(place_of(one).module for one in self._definitions(types))
        program = Program(options.application, options.url, tuple(modules))
        return Pool(size=options.size, program=program, wear=options.wear)

    def _new_apart(self, types: Sequence[str]) -> Apart | None:
        if self._processes is None:
            return None
        return Apart(
            processes=self._processes,
            places={one.name: place_of(one) for one in self._definitions(types)},
            classifier=self._registry.classifier,
            worker_id=str(self._options.info.id),
            max_result_bytes=self._options.max_result_bytes,
        )

    def _definitions(self, types: Sequence[str]) -> list[TaskDefinition]:
        return [one for one in self._registry if one.name in types]

    def _add_room(self, types: tuple[str, ...], *, concurrency: int, buffer: int) -> None:
        """Make slots for handlers of one kind, and what fills them."""
        options = self._options
        slots = Slots(
            executor=self._executor,
            registry=self._registry,
            leases=self._leases,
            report=self._report,
            write=self._committer.add,
            tell_held_up=self._deadlocks.notice,
            concurrency=concurrency,
            buffer=buffer,
            buffer_bytes=options.buffer_bytes,
            buffer_seconds=options.buffer_seconds,
            queue_room=self._queue_room,
        )
        is_second = bool(self._all_slots)
        self._all_slots.append(slots)
        Fetcher(
            store=self._store,
            room=slots,
            request=ClaimRequest(
                options.info.id,
                types,
                1,
                self._lease,
                timedelta(seconds=options.ageing),
                options.info.queues,
                apart=is_second,
            ),
            poll=timedelta(seconds=options.poll),
            is_leader=lambda: self._companion.is_leader,
            went_idle=self._idle_seen.set,
            beside=self._fetchers,
            weights=options.serving.weights({}),
            queue_room=self._queue_room,
        )

    # What was written comes back to the slots, and what begins leaves them, here

    def _settled(self, claims: Counter[Claim]) -> None:
        if len(self._all_slots) == 1:
            self._slots.settled(claims)
            return
        for slots in self._all_slots:
            slots.settled(Counter({one: n for one, n in claims.items() if slots.took(one)}))

    def _claims_lost(self, tokens: Sequence[UUID]) -> None:
        for slots in self._all_slots:
            slots.claims_lost(tokens)

    def _job_lost(self, job: Job) -> None:
        for slots in self._all_slots:
            slots.job_lost(job)  # by that which has it

    def _busy(self) -> int:
        return sum(slots.busy() for slots in self._all_slots)

    def _filled(self) -> tuple[int, int]:
        both = [slots.filled for slots in self._all_slots]
        return sum(running for running, _ in both), sum(size for _, size in both)

    def _completing(self, job: Job, encode: Callable[[Any], str | None]) -> Completing:
        definition = self._registry.find(job.task.type)
        return Completing(
            store=self._store,
            job=job,
            lease=self._lease,
            encode=encode,
            calls_back=definition is not None and definition.defaults.calls_back,
        )

    async def _report(self, jobs: Sequence[Job]) -> None:
        await self._reporter.report(jobs)

    # From outside

    @property
    def unsettled(self) -> int:
        """Tasks whose outcome is not written; once it has ended, they will run again."""
        return sum(slots.unsettled for slots in self._all_slots)

    @property
    def _drains(self) -> bool:
        """Whether it claims nothing any more: asked to stop, as the heart may know first, or by itself."""
        return self._asked_at is not None or self._absence == STOPPING

    def stop(self) -> None:
        """Ask to drain; asked again, insist: what still runs is given back at once."""
        self._asked_at = self._asked_at or time.monotonic()
        if self._stopping:
            self._insisting.set()
        for slots in self._all_slots:
            slots.drain()  # at once: nothing is claimed or begun from here on
        self._stopping.set()

    def _obey(self, order: WorkerOrder) -> None:
        """Do what somebody asks of this worker in the store; told at every beat."""
        worker_id = self._options.info.id
        if order is WorkerOrder.DRAIN:
            if not self._drains:  # else this is what it has said itself
                emit("worker.drained", worker_id=worker_id)
                self.stop()
        elif order is WorkerOrder.PAUSE and not self._fetchers.is_paused:
            emit("worker.paused", worker_id=worker_id)
            self._fetchers.pause()
        elif order is WorkerOrder.RESUME and self._fetchers.is_paused:
            emit("worker.resumed", worker_id=worker_id)
            self._fetchers.resume()

    def _weigh(self, declared: Mapping[str, int]) -> None:
        """Share by what queues weigh by now; told at every beat, the first of which comes before any claim."""
        self._fetchers.share(self._options.serving.weights(declared))

    def _must_end(self) -> bool:
        """Whether nothing may run any more: that was asked for long ago, or more than once. In the heart's thread."""
        process, now = self._options.process, time.monotonic()
        times_asked = 0 if process is None else process.times_asked()
        if self._asked_at is None and times_asked:
            self._asked_at = now  # the event loop is blocked and cannot be told
            info, within = self._options.info, self._options.shutdown_timeout
            emit("worker.held_up", worker_id=info.id, ends_within=within)
        asked_at = self._asked_at
        is_late = asked_at is not None and now > asked_at + self._options.shutdown_timeout
        return is_late or times_asked > 1

    def _count_stuck(self, threads: int) -> None:
        """Make room for a new process when too many threads of this one are lost to it."""
        if threads <= self._options.stuck_threads or self.is_exhausted:
            return
        self.is_exhausted = True
        emit("worker.exhausted", worker_id=self._options.info.id, stuck_threads=threads)
        if self._options.process is not None and not self._stopping:
            self.stop()

    async def _give_up_process(self, blocking: Job | None) -> None:
        """Leave everything to a new process: a handler keeps the event loop. In the heart's thread."""
        info, process = self._options.info, self._options.process
        of = {} if blocking is None else {"task_id": blocking.task.id, "type": blocking.task.type}
        emit("worker.stuck", worker_id=info.id, **of)
        if self._processes is not None:
            self._processes.kill()  # what ran there may run elsewhere in a moment
        last = [
            *self._committer.last_settlements(),
            *(one for slots in self._all_slots for one in slots.last_settlements(blocking)),
        ]
        await leave_behind(self._store.beside(), info.id, last, within=LEAVE_WITHIN)
        if process is not None:
            process.replace()

    async def run(
        self, *, until_idle: bool = False, started: Callable[[], None] | None = None
    ) -> None:
        """Work until asked to stop, or until there is nothing ready and nothing running."""
        turning = asyncio.create_task(self._loop_watch.turn(), name="windlass-turning")
        if self._options.process is not None:  # the event loop is its own too
            asyncio.get_running_loop().set_default_executor(LoopThreads(self._threads))
        try:
            with self._monitored():
                if not await self._has_started():
                    return
                heart = self._heartbeat()
                try:
                    await heart.start()
                    self._beating_heart = heart
                    await self._work(until_idle=until_idle, started=started)
                finally:
                    self._beating_heart = None
                    await heart.rest()
                    self._threads.close()
                    try:
                        await self._leave()
                    finally:
                        await heart.stop()  # so long it watches this event loop
        finally:
            await stop_task(turning)

    @contextmanager
    def _monitored(self) -> Iterator[None]:
        """Be what the monitor tells of while the block lasts, if there is one."""
        if self._monitor is None:
            yield
            return
        health = Health(
            alive={"event loop": self._stuck_loop, "heart": self._stuck_heart},
            present={"worker": self._not_working, "event loop": self._stuck_loop},
            working={
                "heart": self._idle_heart,
                "claims": self._no_claims,
                "wake-ups": lambda: "" if self._listening is None else self._listening.trouble,
            },
            store=self._store.check,
        )
        metrics = new_metrics(
            self._filled,
            lambda: self._companion.is_leader,
            processes=self._processes,
            breakers=self._registry.reports,
            stuck_threads=lambda: self._threads.stuck,
        )
        pages = {"/livez": health.livez, "/readyz": health.readyz, "/metrics": metrics.page}
        self._monitor.show(pages)
        watch(metrics)
        try:
            yield
        finally:
            unwatch(metrics)

    def _no_claims(self) -> str:
        return next(filter(None, (one.trouble for one in self._fetchers.fetchers)), "")

    def _not_working(self) -> str:
        return STOPPING if self._stopping else self._absence

    def _stuck_loop(self) -> str:
        silent = self._loop_watch.silent_for
        return f"has not turned for {silent:.0f} s" if silent > STUCK_AFTER else ""

    def _stuck_heart(self) -> str:
        heart = self._beating_heart
        return "has stopped" if heart is not None and not heart.is_beating else ""

    def _idle_heart(self) -> str:
        heart = self._beating_heart
        return self._stuck_heart() or ("" if heart is None else heart.trouble)

    async def _work(self, *, until_idle: bool, started: Callable[[], None] | None) -> None:
        stop_fetching, stop_services = Stop(), Stop()
        committing = asyncio.create_task(self._committer.run(), name="windlass-committer")
        fetching = asyncio.create_task(self._fetch(stop_fetching), name="windlass-fetcher")
        services = [
            asyncio.create_task(self._reporter.run(stop_services), name="windlass-reporter"),
            asyncio.create_task(self._deadlocks.run(stop_services), name="windlass-deadlocks"),
            *(
                asyncio.create_task(slots.watch(stop_services), name="windlass-slots")
                for slots in self._all_slots
            ),
        ]
        if not self._announcing.is_complete:
            announcing = self._announcing.run(stop_services, until=stop_fetching)
            services.append(asyncio.create_task(announcing, name="windlass-announcing"))
        if shared := [one for one in self._registry.breakers.values() if one.settings.shared]:
            sharing = Sharing(store=self._store, breakers=shared)
            services.append(
                asyncio.create_task(sharing.run(stop_services), name="windlass-sharing")
            )
        leading = asyncio.create_task(self._companion.run(stop_services), name="windlass-leader")
        telling = asyncio.create_task(self._alarms.run(), name="windlass-alarms")
        try:
            self._absence = ""
            if started is not None:
                started()
            waiting = asyncio.create_task(self._until_stop(until_idle), name="windlass-stop")
            everything = {waiting, committing, fetching, leading, *services}
            ended, _ = await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
            self._absence = STOPPING  # as asked, or because something has failed
            _tell_failed(ended)
            if self._beating_heart is not None and self._busy():
                self._beating_heart.beat_now()  # which says so; nobody waits for it
            await stop_task(waiting)
            emit("worker.stopping", worker_id=self._options.info.id, tasks=self._busy())
            stop_fetching.set()
            await self._finish_or_release(fetching)
            self._committer.close()
            await self._flush(committing)
            stop_services.set()
            # On a database that does not answer none of them ends by itself.
            rest = [fetching, leading, *services]
            ended, left = await asyncio.wait(rest, timeout=LEAVE_WITHIN)
            for task in left:
                emit("store.unavailable", doing="stop", error=f"{task.get_name()} did not end")
            for task in ended:
                task.result()
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_WITHIN):
                    await self._alarms.finish()
        finally:
            everything = {fetching, committing, leading, telling, *services}
            for task in everything:
                task.cancel()
            await asyncio.gather(*everything, return_exceptions=True)

    # The life of a worker

    async def _has_started(self) -> bool:
        """Start, unless asked to stop: a start-up hook that hangs would never look."""
        starting = asyncio.create_task(self._start(), name="windlass-start")
        stopping = asyncio.create_task(self._stopping.wait(), name="windlass-stop")
        try:
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            starting.cancel()  # unless it is done
            await asyncio.wait([starting])
            try:
                if starting.cancelled() or starting.exception() is not None:
                    await self._leave()
            finally:
                if not starting.cancelled():
                    starting.result()  # the reason, whatever else goes wrong on leaving
        return not starting.cancelled()

    async def _start(self) -> None:
        info = self._options.info
        if self._processes is not None:
            await self._processes.start()
        await self._announcing.announce()
        for hook in self._options.on_startup:
            state = await call(hook)
            if state is not None:
                self._executor.state = state
        emit("worker.started", worker_id=info.id, concurrency=self._options.concurrency)

    def _heartbeat(self) -> Heartbeat:
        loop = asyncio.get_running_loop()

        def lost(tokens: list[UUID]) -> None:
            loop.call_soon_threadsafe(self._claims_lost, tokens)

        def ordered(order: WorkerOrder) -> None:
            loop.call_soon_threadsafe(self._obey, order)

        def weighed(weights: Mapping[str, int]) -> None:
            loop.call_soon_threadsafe(self._weigh, weights)

        return Heartbeat(
            store=self._store,
            worker=self._options.info,
            leases=self._leases,
            clock=self._clock,
            lease=self._lease,
            every=timedelta(seconds=self._options.heartbeat),
            is_idle=lambda: self._fetcher.idle,
            running=lambda: self._filled()[0],
            breakers=lambda: {one.name: one.state for one in self._registry.reports()},
            full_queues=lambda: () if self._queue_room is None else self._queue_room.full,
            drains=lambda: self._drains,
            lost=lost,
            ordered=ordered,
            weighed=weighed,
            watch_loop=self._loop_watch.watch,
        )

    async def _fetch(self, stop: Stop) -> None:
        loop, thread = asyncio.get_running_loop(), threading.get_ident()

        def wake(lane: int | None = None, task_id: UUID | None = None) -> None:
            if threading.get_ident() == thread:
                self._fetchers.wake(lane, task_id)
            else:
                loop.call_soon_threadsafe(self._fetchers.wake, lane, task_id)

        def ordered(worker_id: UUID) -> None:
            heart = self._beating_heart
            if worker_id == self._options.info.id and heart is not None:
                heart.beat_now()  # whose answer says what was ordered

        def scheduled() -> None:
            loop.call_soon_threadsafe(self._companion.look_at_schedules)

        async with self._store.listen(
            wake, ordered=ordered, scheduled=scheduled
        ) as self._listening:
            await self._fetchers.run(stop)

    async def _until_stop(self, until_idle: bool) -> None:
        while not self._stopping:
            if not until_idle:
                await self._stopping.wait()
                return
            self._idle_seen.clear()
            await first_of(self._idle_seen.wait(), self._stopping.wait())
            if not self._busy() and not await self._has_work():
                return

    async def _has_work(self) -> bool:
        info = self._options.info
        try:
            async with answered_within(patience(self._lease)):
                return await self._store.has_work(info.types, info.queues)
        except StoreUnavailable as error:
            emit("store.unavailable", doing="look", error=error)
            return True  # for all that is known

    async def _finish_or_release(self, fetching: asyncio.Task[None]) -> None:
        """Give back what has not begun, wait for what has, and at the deadline give it back too."""
        every = self._all_slots
        for slots in every:
            slots.drain()
        deadline = asyncio.get_running_loop().time() + self._options.shutdown_timeout
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await first_of(asyncio.wait([fetching]), self._insisting.wait())
        for slots in every:
            slots.release_waiting()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await first_of(self._until_nothing_runs(), self._insisting.wait())
        for slots in every:
            slots.interrupt()
        with suppress(TimeoutError):
            async with asyncio.timeout(INTERRUPT_WITHIN):
                await self._until_nothing_runs()
        for slots in every:
            slots.release_running()

    async def _until_nothing_runs(self) -> None:
        for slots in self._all_slots:  # nothing begins any more, so one after the other
            await slots.until_nothing_runs()

    async def _flush(self, committing: asyncio.Task[None]) -> None:
        done, _ = await asyncio.wait([committing], timeout=FLUSH_WITHIN)
        for task in done:
            task.result()
        if self.unsettled:
            # The store does not answer, or somebody holds them: they run again once rescued.
            emit("settlement.abandoned", tasks=self.unsettled)

    async def _leave(self) -> None:
        if self._processes is not None:
            await self._processes.stop()
        if not self.unsettled:  # or it is listed until its claims were taken back
            await self._deregister()
        try:
            await call_all(self._options.on_shutdown)
        finally:
            emit(
                "worker.stopped",
                worker_id=self._options.info.id,
                leases_lost=counted("lease.lost"),
                settlements_lost=counted("settlement.lost"),
            )

    async def _deregister(self) -> None:
        try:
            async with asyncio.timeout(LEAVE_WITHIN):
                await self._store.deregister(self._options.info.id)
        except (StoreUnavailable, TimeoutError) as error:
            emit("store.unavailable", doing="deregister", error=error)


def _types_apart(registry: Registry, types: Sequence[str]) -> tuple[str, ...]:
    """The types whose handlers run in processes."""
    return tuple(one.name for one in registry if one.run == "process" and one.name in types)


def _tell_failed(ended: set[asyncio.Task[None]]) -> None:
    """At once: draining may take a while, and only then is the error raised."""
    for task in ended:
        if error := task.exception():
            emit("service.failed", service=task.get_name(), error=error)
