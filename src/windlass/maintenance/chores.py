"""What a leader does, as a table: name, how often, the call."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from windlass.model.limits import PROMOTE_BATCH
from windlass.model.task import Leadership, QueueRecord
from windlass.store.clock_watch import ClockWatch
from windlass.store.port import ChoreStore, ClockStore
from windlass.telemetry import emit, is_watched, tell

RESCUE_BATCH = 100  # claims
COUNT_EVERY = 15.0  # seconds


@dataclass(slots=True)
class Chore:
    """Something to do every so many seconds."""

    name: str
    every: float
    call: Callable[[Leadership], Awaitable[bool]]  # true: there is more to do at once
    due_at: float = 0.0  # monotonic
    hangs: int = 0  # how often in a row it did not end in time
    at_most: float = 1.0  # part of the time it may take: if it takes long it is done less often
    is_duty: bool = True  # False: nobody fares worse without it than without this leader

    def is_due(self, now: float) -> bool:
        """Whether it is time."""
        return now >= self.due_at

    async def run(self, leadership: Leadership) -> None:
        """Do it, and plan the next time."""
        began = time.monotonic()
        has_more = False
        try:
            has_more = await self.call(leadership)
        finally:  # also if it took so long that it was given up
            took = time.monotonic() - began
            self.due_at = began + (0.0 if has_more else max(self.every, took / self.at_most))


class QueueStore(Protocol):
    """What is counted."""

    async def queues(self) -> list[QueueRecord]:
        """Return all queues with live tasks or a pause."""


class LeaderStore(ChoreStore, ClockStore, QueueStore, Protocol):
    """What the leader asks of the store."""


async def _rescue(store: LeaderStore, clock: ClockWatch, leadership: Leadership) -> bool:
    if not await clock.look(store):
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
    return rescued.claims >= RESCUE_BATCH


async def _count(store: LeaderStore, _: Leadership) -> bool:
    if is_watched():  # or nobody would see it
        tell("counted", await store.queues())
    return False


def chores(store: LeaderStore, clock: ClockWatch, *, sweep: float) -> list[Chore]:
    """The chores of a store; `sweep` is how often lost claims are looked for, in seconds."""

    async def promote(leadership: Leadership) -> bool:
        return await store.promote(PROMOTE_BATCH, leadership=leadership) >= PROMOTE_BATCH

    async def remove_workers(leadership: Leadership) -> bool:
        if not await clock.look(store):
            return False
        for worker_id in await store.remove_dead_workers(
            leadership=leadership, steady_for=clock.steady_for
        ):
            emit("worker.removed", worker_id=worker_id)
        return False

    async def tidy(leadership: Leadership) -> bool:
        await store.tidy(leadership=leadership)
        return False

    async def prepare(leadership: Leadership) -> bool:
        await store.prepare_history(leadership=leadership)
        return False

    async def retain(leadership: Leadership) -> bool:
        retained = await store.retain(leadership=leadership)
        dropped = bool(retained.partitions or retained.dead)
        if dropped or retained.waiting:
            emit(
                "history.dropped",
                partitions=retained.partitions,
                dead=retained.dead,
                held_by_readers=len(retained.waiting),
            )
        return dropped

    return [
        Chore("rescue", sweep, partial(_rescue, store, clock)),
        Chore("promote", sweep, promote, at_most=1 / 20),
        Chore("remove-workers", sweep, remove_workers),
        Chore("tidy", 2 * sweep, tidy, at_most=1 / 20),
        Chore("prepare-history", 3600.0, prepare),
        Chore("retain", 600.0, retain),
        Chore("count", COUNT_EVERY, partial(_count, store), at_most=1 / 20, is_duty=False),
    ]
