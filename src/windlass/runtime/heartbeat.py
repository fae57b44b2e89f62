"""Keeps the leases of what the worker holds, from a thread and connection of its own."""

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import UUID

from windlass.model.limits import MARGIN
from windlass.model.task import Pulse, WorkerInfo, WorkerOrder
from windlass.service import answered_within, in_thread, is_set_within
from windlass.store.clock_watch import ClockWatch
from windlass.store.port import Store
from windlass.telemetry import emit

RETRY_EVERY = 1.0  # seconds, when the store could not be reached
LONGEST_WAIT = timedelta(seconds=1)  # for a claim that somebody holds


class Leases:
    """Until when each claim may be trusted. Shared between the worker's and the heart's thread."""

    def __init__(self, lease: timedelta) -> None:
        self._trust = lease.total_seconds() * (1 - MARGIN)
        self._lock = threading.Lock()
        self._until: dict[UUID, float] = {}

    def add(self, token: UUID, asked_at: float) -> None:
        """Trust a claim from the moment it was asked for, not from when the answer came."""
        with self._lock:
            self._until[token] = asked_at + self._trust

    def holds(self, token: UUID) -> bool:
        """Whether a claim is still held."""
        with self._lock:
            return token in self._until

    def trusts(self, token: UUID, now: float) -> bool:
        """Whether a claim may still be trusted."""
        return now < self.until(token)

    def until(self, token: UUID) -> float:
        """Until when a claim may be trusted. Takes no lock: it is asked of nearly every task."""
        return self._until.get(token, 0.0)

    def drop(self, token: UUID) -> None:
        """Forget a claim that is settled or lost."""
        with self._lock:
            self._until.pop(token, None)

    def tokens(self) -> list[UUID]:
        """Return the claims that are held."""
        with self._lock:
            return list(self._until)

    def extend(self, kept: frozenset[UUID], asked_at: float) -> None:
        """Trust these claims for another lease."""
        with self._lock:
            for token in kept & self._until.keys():
                self._until[token] = asked_at + self._trust

    def expired(self, now: float) -> list[UUID]:
        """Return the claims that may not be trusted any more."""
        with self._lock:
            return [token for token, until in self._until.items() if until <= now]


class Heartbeat:
    """A thread that beats: it goes on when a handler blocks the worker's event loop."""

    def __init__(
        self,
        *,
        store: Store,
        worker: WorkerInfo,
        leases: Leases,
        clock: ClockWatch,
        lease: timedelta,
        every: timedelta,
        is_idle: Callable[[], bool],
        running: Callable[[], int],
        breakers: Callable[[], Mapping[str, str]],
        full_queues: Callable[[], Sequence[str]],
        drains: Callable[[], bool],
        lost: Callable[[list[UUID]], None],
        ordered: Callable[[WorkerOrder], None],
        weighed: Callable[[Mapping[str, int]], None],
        watch_loop: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._store = store
        self._worker = worker
        self._leases = leases
        self._clock = clock
        self._lease = lease
        self._every = every.total_seconds()
        self._answer_within = lease.total_seconds() / 3
        self._patience = min(LONGEST_WAIT, lease / 6)
        self._is_idle = is_idle
        self._running = running
        self._breakers = breakers
        self._full_queues = full_queues
        self._drains = drains
        self._lost = lost  # called in the heart's thread, as are the others
        self._ordered = ordered  # what people ask of the worker
        self._weighed = weighed  # what queues weigh
        self._watch_loop = watch_loop
        self._thread = threading.Thread(target=self._run, name="windlass-heartbeat", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beating: asyncio.Task[None] | None = None
        self._stopping = False
        self._ending: asyncio.Event | None = None  # of its event loop
        self._hurried: asyncio.Event | None = None  # likewise
        self._has_beaten = threading.Event()
        self._rests = threading.Event()
        self._beaten_at = time.monotonic()  # when the last beat succeeded, or it was made

    async def start(self) -> None:
        """Start beating, on a connection of its own.

        Returns after the first beat, so that the connection is there before anything is claimed:
        later the server may have none to spare. One that does not answer is not waited for.
        """
        self._thread.start()
        await in_thread(self._has_beaten.wait, self._answer_within)

    @property
    def is_beating(self) -> bool:
        """Whether it goes on."""
        return self._thread.is_alive() and not self._rests.is_set()

    @property
    def trouble(self) -> str:
        """Whether it keeps no lease: the worker may have lost what it holds."""
        silent = time.monotonic() - self._beaten_at
        if silent < self._lease.total_seconds():
            return ""
        return f"has kept no lease for {silent:.0f} s"

    def beat_now(self) -> None:
        """Beat before the time, for somebody has something to say. From any thread."""
        if self._loop is not None and self._hurried is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._hurried.set)

    async def rest(self) -> None:
        """Stop beating and give the connection back; the event loop is still watched."""
        self._stopping = True
        if self._loop is not None and self._beating is not None:
            # A beat under way is given up: a store that does not answer must not hold up the end.
            with suppress(RuntimeError):  # the loop is closed: it has stopped by itself
                self._loop.call_soon_threadsafe(self._beating.cancel)
        await in_thread(self._rests.wait)

    async def stop(self) -> None:
        """End."""
        await self.rest()
        if self._loop is not None and self._ending is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._ending.set)
        await in_thread(self._thread.join)

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        finally:
            self._rests.set()

    async def _live(self) -> None:
        """Watch, and beat for as long as that is wanted."""
        self._ending = asyncio.Event()
        self._hurried = hurried = asyncio.Event()
        self._beating = asyncio.create_task(self._beat_until_stopped(hurried))
        self._loop = asyncio.get_running_loop()  # from here on it can be stopped
        watching = [
            asyncio.create_task(watch()) for watch in (self._watch_expiry, self._watch_loop)
        ]
        try:
            await asyncio.wait([self._beating])
            self._rests.set()
            if not self._beating.cancelled():
                self._beating.result()  # a fault of ours ends the thread, which probes tell
            await self._ending.wait()
        finally:
            for task in watching:
                task.cancel()

    async def _beat_until_stopped(self, hurried: asyncio.Event) -> None:
        store = self._store.beside()
        pause = 0.0
        is_open = False
        try:
            while not self._stopping:
                await is_set_within(hurried, pause)
                hurried.clear()
                try:
                    if not is_open:
                        async with answered_within(self._lease.total_seconds()):
                            await store.open()
                        is_open = True
                    began = time.monotonic()
                    await self._beat(store)
                    self._beaten_at = time.monotonic()
                    pause = max(0.0, began + self._every - time.monotonic())
                except Exception as error:  # noqa: BLE001 - without a heart every lease is lost
                    emit("store.unavailable", doing="heartbeat", error=error)
                    pause = min(RETRY_EVERY, self._every) * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
                self._has_beaten.set()
        finally:
            await store.close()

    async def _beat(self, store: Store) -> None:
        """Keep every claim; then wait for each one that somebody holds, until the next beat is due.

        Our own settlements hold a claim while they commit, and may do so nearly all the time:
        who waits is the next in line. Somebody else may hold one for long: none waits for another.
        """
        due_next = time.monotonic() + self._every
        skipped = deque(await self._pulse(store, self._leases.tokens()))
        while skipped and time.monotonic() < due_next:
            skipped += await self._pulse(store, [skipped.popleft()], self._patience)
        # For the leader that this worker may become: it has to know how the clock went before. One that
        # leads looks by itself, more often than the heart beats; our own last look was a beat ago.
        if not self._clock.has_looked_within(self._every * 0.75):
            async with answered_within(self._answer_within):
                await self._clock.look(store)

    async def _pulse(
        self, store: Store, tokens: list[UUID], patience: timedelta = timedelta(0)
    ) -> list[UUID]:
        """Try to keep these; return those that somebody holds."""
        asked_at = time.monotonic()
        running, idle = self._running(), self._is_idle()
        # What is not trusted any more was lost while everything stood still: it is told beside this.
        tokens = [token for token in tokens if self._leases.trusts(token, asked_at)]
        pulse = Pulse(
            self._worker.id,
            tokens,
            self._lease,
            running,
            idle,
            patience,
            trusted=True,
            breakers=self._breakers() or None,
            full_queues=self._full_queues(),
            drains=self._drains(),
        )
        async with answered_within(self._answer_within):
            answer = await store.pulse(pulse)
        # Before anything else is asked of the store, which may fail.
        self._leases.extend(answer.kept, asked_at)
        # A claim that was settled while the pulse was under way is not lost.
        held = set(self._leases.tokens())
        if lost := (held & set(tokens)) - answer.kept - answer.skipped:
            self._lost(list(lost))
        if answer.weights is not None:
            self._weighed(answer.weights)
        if answer.registered and answer.order is not None:  # or it went with the row
            self._ordered(answer.order)
        async with answered_within(self._answer_within):
            if not answer.registered:
                await store.register(self._worker, lease=self._lease)
            if self._is_idle() != idle:  # what the fetcher wrote meanwhile was overwritten
                await store.set_idle(self._worker.id, not idle)
        return list(held & answer.skipped)

    async def _watch_expiry(self) -> None:
        """Beside the beat, so that a pulse which hangs does not hide that a lease has run out."""
        while True:
            await asyncio.sleep(self._lease.total_seconds() * MARGIN / 2)
            if expired := self._leases.expired(time.monotonic()):
                self._lost(expired)
