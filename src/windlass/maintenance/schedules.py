"""Fires the slots of schedules, each on time."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

from windlass.model.errors import StoreBusy
from windlass.model.schedule import DueSchedule, SlotDecision, SlotState
from windlass.model.task import Leadership
from windlass.policy.schedule import decide, is_on_time
from windlass.store.port import FireStore
from windlass.telemetry import emit

BATCH = 100  # schedules that are decided on in a turn
NOTICE_EVERY = 1.0  # seconds in which a leader with schedules notices that they were changed
SOON = 0.05  # seconds until what is left of a turn is gone on with
MOST_SLOTS = 1000  # of which it is kept what became of them, for each schedule
HELD_AGAIN = 0.5  # seconds until a schedule that somebody holds is tried again
HELD_TOLD = 1.0  # seconds that it was held before that is told: others hold one for a moment
REFUSED_AGAIN = 60.0  # seconds until one is tried again of which it cannot be told when it is due
MOST_WAITED = 0.3  # seconds of a turn for what is held: the leader has other duties


@dataclass(slots=True)
class _Held:
    """A schedule that could not be decided on, since somebody holds it."""

    since: float  # monotonic, as the next one
    again_at: float
    was_on_time: bool  # else what is missed had been missed before
    is_told: bool = False


@dataclass(slots=True)
class _Refused:
    """A schedule of which this worker cannot tell when it is due."""

    revision: int
    again_at: float  # monotonic


class Firing:
    """Decides on slots when they come: says in how many seconds the next one does."""

    def __init__(self, store: FireStore, new_ids: Callable[[int], list[UUID]]) -> None:
        self._store = store
        self._new_ids = new_ids
        self._refused: dict[str, _Refused] = {}
        self._held: dict[str, _Held] = {}

    async def __call__(self, leadership: Leadership) -> bool | float:
        """Decide on what is due; true if there is more of it."""
        aside = self._aside()
        wait = await self._store.schedule_in(without=aside)
        if wait is None or wait > 0:
            self._forget_held(aside)
            return self._rest(wait)
        # Those that were held come last, and take the place of none: they may be held again.
        due = await self._store.due_schedules(BATCH + len(self._held), without=aside)
        self._forget_held([*aside, *(one.schedule.name for one in due)])
        waited = 0.0
        for one in sorted(due, key=lambda one: one.schedule.name in self._held):
            waited += await self._decide(one, leadership)
            if waited > MOST_WAITED:
                return SOON
        if len(due) >= BATCH:
            return True
        wait = await self._store.schedule_in(without=self._aside())
        return self._rest(None if wait is None else max(wait, SOON))

    def look_again(self) -> None:
        """Try again at once what was refused: it may have been changed."""
        for one in self._refused.values():
            one.again_at = 0.0

    def _aside(self) -> list[str]:
        """Those that are not to be tried now."""
        now = time.monotonic()
        held = [name for name, one in self._held.items() if one.again_at > now]
        return held + [name for name, one in self._refused.items() if one.again_at > now]

    def _rest(self, wait: float | None) -> bool | float:
        """Until when there is nothing to do."""
        now = time.monotonic()
        waits = [max(SOON, held.again_at - now) for held in self._held.values()]
        if wait is not None:
            waits.append(min(wait, NOTICE_EVERY))
        return min(waits) if waits else False

    def _forget_held(self, but: Sequence[str]) -> None:
        """Forget those that are not due any more."""
        self._held = {name: self._held[name] for name in but if name in self._held}

    async def _decide(self, due: DueSchedule, leadership: Leadership) -> float:
        """Decide on one; return for how many seconds it was waited for what somebody holds."""
        name = due.schedule.name
        held = self._held.get(name)
        try:
            decision = decide(due, self._new_ids, was_held=held is not None and held.was_on_time)
        except Exception as error:  # noqa: BLE001 - a zone that is not known here; the others go on
            known = self._refused.get(name)
            if known is None or known.revision != due.revision:
                emit("schedule.refused", schedule=name, error=error)
            self._refused[name] = _Refused(due.revision, time.monotonic() + REFUSED_AGAIN)
            return 0.0
        self._refused.pop(name, None)
        began = time.monotonic()
        try:
            fired = await self._store.decide_slots(decision, leadership=leadership)
        except StoreBusy as error:
            self._put_aside(due, error)
            return time.monotonic() - began
        self._held.pop(name, None)
        if fired is not None:
            _tell(decision, fired)
        return 0.0

    def _put_aside(self, due: DueSchedule, error: StoreBusy) -> None:
        now, name = time.monotonic(), due.schedule.name
        held = self._held.get(name)
        if held is None:
            held = self._held[name] = _Held(now, now, was_on_time=is_on_time(due))
        held.again_at = now + HELD_AGAIN
        if not held.is_told and now - held.since >= HELD_TOLD:
            held.is_told = True
            emit("schedule.held", schedule=name, error=error)

    async def prune(self, leadership: Leadership) -> bool:
        """Forget what became of old slots."""
        await self._store.prune_slots(most=MOST_SLOTS, leadership=leadership)
        return False


def _tell(decision: SlotDecision, fired: list[UUID]) -> None:
    if decision.repeats_until is not None:
        until = decision.repeats_until.isoformat()
        emit("schedule.clock_set_back", schedule=decision.name, until=until)
    if fired:
        emit("schedule.fired", schedule=decision.name, tasks=len(fired))
    for slot in decision.slots:
        if slot.state is SlotState.SKIPPED:
            emit(
                "schedule.skipped",
                schedule=decision.name,
                slot=slot.at.isoformat(),
                slots=slot.slots,
                reason=slot.reason,
            )
