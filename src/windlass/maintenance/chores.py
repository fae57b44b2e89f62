"""What a leader does, as a table: name, how often, the call."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Protocol
from uuid import UUID

from windlass.maintenance.archive import Archive
from windlass.maintenance.dead import DeadChoreStore, Removing, Replaying
from windlass.maintenance.schedules import Firing
from windlass.maintenance.unknown import UnknownTypes
from windlass.model.dead import ReplayRule
from windlass.model.limits import PROMOTE_BATCH
from windlass.model.task import Due, Leadership, QueueRecord
from windlass.store.clock_watch import ClockWatch
from windlass.store.port import ChoreStore, FireStore, GateStore
from windlass.telemetry import emit, is_watched, tell

Died = Callable[[Sequence[UUID]], None]  # told of tasks that are dead

RESCUE_BATCH = 100  # claims
GATE_BATCH = 500  # calls
COUNT_EVERY = 15.0  # seconds
TIDY_EVERY = 300.0  # seconds, also if nothing seems to want it
REPLAY_EVERY = 10.0  # seconds
REMOVE_EVERY = 60.0  # seconds
FIRE_SCHEDULES = "fire-schedules"


@dataclass(slots=True)
class Chore:
    """Something to do every so many seconds."""

    name: str
    every: float
    # True: there is more to do at once; a number: in so many seconds.
    call: Callable[[Leadership], Awaitable[bool | float]]
    due_at: float = 0.0  # monotonic
    hangs: int = 0  # how often in a row it did not end in time
    at_most: float = 1.0  # part of the time it may take: if it takes long it is done less often
    is_duty: bool = True  # False: nobody fares worse without it than without this leader
    look_again: Callable[[], None] | None = None  # what was seen of it before is not so any more
    is_hurried: bool = False

    def is_due(self, now: float) -> bool:
        """Whether it is time."""
        return now >= self.due_at

    def hurry(self) -> None:
        """Let it be done at once, and once more if it is under way."""
        self.is_hurried, self.due_at = True, 0.0

    async def run(self, leadership: Leadership) -> None:
        """Do it, and plan the next time."""
        began = time.monotonic()
        has_more: bool | float = False
        if self.is_hurried and self.look_again is not None:
            self.look_again()
        self.is_hurried = False
        try:
            has_more = await self.call(leadership)
        finally:  # also if it took so long that it was given up
            ended = time.monotonic()
            if isinstance(has_more, bool):
                wait = max(self.every, (ended - began) / self.at_most)
                self.due_at = began + (0.0 if has_more else wait)
            else:
                self.due_at = ended + min(self.every, has_more)
            if self.is_hurried:
                self.due_at = began


class QueueStore(Protocol):
    """What is counted."""

    async def queues(self) -> list[QueueRecord]:
        """Return all queues with live tasks or a pause."""


class LeaderStore(ChoreStore, GateStore, QueueStore, DeadChoreStore, FireStore, Protocol):
    """What the leader asks of the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadCare:
    """What is to be done with dead letters."""

    most: int = 0  # for each queue; 0: any number
    archive: Archive | None = None  # of those that are removed; None: they are dropped
    rules: Sequence[ReplayRule] = ()
    new_ids: Callable[[int], list[UUID]] = lambda _: []  # of the tasks that rules make


NO_CARE = DeadCare()


class Lookout:
    """Looks for all chores of a turn at once: a worker that idles costs its database next to nothing."""

    def __init__(self, store: LeaderStore, clock: ClockWatch, *, every: float) -> None:
        self._store = store
        self._clock = clock
        self._every = every
        self._due = Due(datetime.max.replace(tzinfo=UTC))  # whatever there may be
        self._is_believed = False
        self._again_at = 0.0  # monotonic

    def forget(self) -> None:
        """Look anew the next time."""
        self._again_at = 0.0

    async def look(self) -> tuple[Due, bool]:
        """Return what there may be to do, and whether leases that seem to be over are to be believed so."""
        began = time.monotonic()
        if began >= self._again_at:
            self._is_believed = await self._clock.look(self)
            took = time.monotonic() - began
            self._again_at = began + max(self._every / 2, took * 20)
        return self._due, self._is_believed

    async def now(self) -> datetime:
        """Return the store's time, for the watch over its clock; with it comes what is due."""
        self._due = await self._store.due()
        return self._due.now


async def _rescue(store: LeaderStore, lookout: Lookout, died: Died, leadership: Leadership) -> bool:
    due, is_believed = await lookout.look()
    if not (due.claims and is_believed):
        return False
    rescued = await store.rescue(RESCUE_BATCH, leadership=leadership)
    if rescued.claims:
        emit(
            "claim.rescued",
            claims=rescued.claims,
            returned=rescued.returned,
            lost_attempts=rescued.lost_attempts,
            dead=rescued.dead,
            cancelled=rescued.cancelled,
        )
        died(rescued.died)
    return rescued.claims >= RESCUE_BATCH


async def _fire(lookout: Lookout, firing: Firing, leadership: Leadership) -> bool | float:
    due, _ = await lookout.look()
    return False if due.schedule_in is None else await firing(leadership)


async def _open_gates(store: LeaderStore, lookout: Lookout, _: Leadership) -> bool:
    if not (await lookout.look())[0].gates:
        return False
    return await store.open_gates(GATE_BATCH) >= GATE_BATCH


async def _promote(store: LeaderStore, lookout: Lookout, leadership: Leadership) -> bool:
    due, _ = await lookout.look()
    if not due.scheduled:
        return False
    return await store.promote(PROMOTE_BATCH, leadership=leadership) >= PROMOTE_BATCH


async def _expire(store: LeaderStore, lookout: Lookout, leadership: Leadership) -> bool:
    due, _ = await lookout.look()
    if not due.expiring:
        return False
    expired = await store.expire(PROMOTE_BATCH, leadership=leadership)
    if expired.cancelled:
        emit("task.expired", tasks=expired.cancelled)
    return expired.has_more


async def _remove_workers(
    store: LeaderStore, clock: ClockWatch, lookout: Lookout, leadership: Leadership
) -> bool:
    due, is_believed = await lookout.look()
    if due.silent_workers and is_believed:
        for worker_id in await store.remove_dead_workers(
            leadership=leadership, steady_for=clock.steady_for
        ):
            emit("worker.removed", worker_id=worker_id)
    return False


class _Tidying:
    """Tidies at once what was left over, and now and then what no look sees."""

    def __init__(self, store: LeaderStore, lookout: Lookout) -> None:
        self._store = store
        self._lookout = lookout
        self._anyway_at = 0.0  # monotonic

    async def __call__(self, leadership: Leadership) -> bool:
        due, _ = await self._lookout.look()
        now = time.monotonic()
        if due.leftovers or now >= self._anyway_at:
            await self._store.tidy(leadership=leadership)
            self._anyway_at = now + TIDY_EVERY
        return False


async def _count(store: LeaderStore, _: Leadership) -> bool:
    if is_watched():  # or nobody would see it
        tell("counted", await store.queues())
    return False


def chores(
    store: LeaderStore,
    clock: ClockWatch,
    *,
    sweep: float,
    died: Died = lambda _: None,
    care: DeadCare = NO_CARE,
    new_ids: Callable[[int], list[UUID]] = lambda _: [],
    unknown_type_grace: float = 0.0,
) -> list[Chore]:
    """The chores of a store; `sweep` is how often lost claims are looked for, in seconds.

    `died` is told of tasks that are dead because their worker was lost, or nobody knows their type.
    `unknown_type_grace`: seconds after which the latter fail; 0: they wait.
    """
    lookout = Lookout(store, clock, every=sweep)
    replaying = Replaying(store, care.rules, care.new_ids)
    removing = Removing(store, most=care.most, archive=care.archive)
    firing = Firing(store, new_ids)

    def look_again() -> None:
        lookout.forget()
        firing.look_again()

    async def prepare(leadership: Leadership) -> bool:
        await store.prepare_history(leadership=leadership)
        return False

    async def retain(leadership: Leadership) -> bool:
        retained = await store.retain(leadership=leadership, keep_dead=care.archive is not None)
        dropped = bool(retained.partitions or retained.dead)
        if dropped or retained.waiting:
            emit(
                "history.dropped",
                partitions=retained.partitions,
                dead=retained.dead,
                held_by_readers=len(retained.waiting),
            )
        return dropped

    unknown = (
        []
        if not unknown_type_grace
        else [
            Chore(
                "fail-unknown",
                sweep,
                UnknownTypes(store, lookout, grace=unknown_type_grace, every=sweep, died=died),
                at_most=1 / 20,
                is_duty=False,
            )
        ]
    )
    return [
        Chore(FIRE_SCHEDULES, sweep, partial(_fire, lookout, firing), look_again=look_again),
        Chore("rescue", sweep, partial(_rescue, store, lookout, died)),
        Chore("promote", sweep, partial(_promote, store, lookout), at_most=1 / 20),
        Chore("open-gates", sweep, partial(_open_gates, store, lookout), at_most=1 / 20),
        Chore("expire", sweep, partial(_expire, store, lookout), at_most=1 / 20),
        Chore("remove-workers", sweep, partial(_remove_workers, store, clock, lookout)),
        Chore("tidy", 2 * sweep, _Tidying(store, lookout), at_most=1 / 20),
        Chore("prepare-history", 3600.0, prepare),
        Chore("retain", 600.0, retain),
        Chore("prune-slots", 600.0, firing.prune),
        Chore(
            "replay-dead", min(REPLAY_EVERY, 2 * sweep), replaying, at_most=1 / 20, is_duty=False
        ),
        Chore(
            "remove-dead", min(REMOVE_EVERY, 12 * sweep), removing, at_most=1 / 20, is_duty=False
        ),
        *unknown,
        Chore("count", COUNT_EVERY, partial(_count, store), at_most=1 / 20, is_duty=False),
    ]
