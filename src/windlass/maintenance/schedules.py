"""Fires the slots of schedules, each on time."""

from collections.abc import Callable
from typing import Protocol
from uuid import UUID

from windlass.model.schedule import DueSchedule, SlotDecision, SlotState
from windlass.model.task import Due, Leadership
from windlass.policy.schedule import decide
from windlass.store.port import FireStore
from windlass.telemetry import emit

BATCH = 100  # schedules that are decided on in a turn
NOTICE_EVERY = 1.0  # seconds in which a leader with schedules notices that they were changed
MOST_SLOTS = 1000  # of which it is kept what became of them, for each schedule


class FiringStore(FireStore, Protocol):
    """What is asked of the store."""

    async def due(self) -> Due:
        """Say what there may be to do."""


class Firing:
    """Decides on slots when they come: says in how many seconds the next one does."""

    def __init__(self, store: FiringStore, new_ids: Callable[[int], list[UUID]]) -> None:
        self._store = store
        self._new_ids = new_ids
        self._refused: set[tuple[str, int]] = set()  # of which it was said, by revision

    async def __call__(self, leadership: Leadership) -> bool | float:
        """Decide on what is due; true if there is more of it."""
        wait = (await self._store.due()).schedule_in
        if wait is None:
            return False
        if wait > 0:
            return min(wait, NOTICE_EVERY)
        due = await self._store.due_schedules(BATCH)
        for one in due:
            await self._decide(one, leadership)
        if len(due) >= BATCH:
            return True
        wait = (await self._store.due()).schedule_in
        return False if wait is None else min(max(wait, 0.05), NOTICE_EVERY)

    async def _decide(self, due: DueSchedule, leadership: Leadership) -> None:
        try:
            decision = decide(due, self._new_ids)
        except Exception as error:  # noqa: BLE001 - a zone that is not known here; the others go on
            if (key := (due.schedule.name, due.revision)) not in self._refused:
                self._refused.add(key)
                emit("schedule.refused", schedule=due.schedule.name, error=error)
            return
        fired = await self._store.decide_slots(decision, leadership=leadership)
        if fired is not None:
            _tell(decision, fired)

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
