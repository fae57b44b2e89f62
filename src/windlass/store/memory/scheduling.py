"""Schedules in memory."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from uuid import UUID

from windlass.encoding import decode_json
from windlass.model.errors import ScheduleNotFound
from windlass.model.limits import CHANGED, LAST_SLOTS, LOOKED_BACK, RETIRED
from windlass.model.schedule import (
    DueSchedule,
    Schedule,
    ScheduleChanges,
    ScheduleRecord,
    Slot,
    SlotDecision,
    SlotRecord,
    SlotState,
)
from windlass.model.task import ENDS, Leadership
from windlass.policy.schedule import given_up
from windlass.store.memory.leading import LeadVerbs
from windlass.store.memory.state import ScheduleEntry
from windlass.store.memory.tables import transaction


class ScheduleVerbs(LeadVerbs):
    """Schedules, and their slots."""

    @transaction
    async def register_schedules(
        self, owner: str, schedules: Sequence[Schedule]
    ) -> ScheduleChanges:
        now = self._clock()
        added, changed, taken_over = [], [], []
        for schedule in sorted(schedules, key=lambda one: one.name):
            known = self._schedules.get(schedule.name)
            if known is None:
                self._schedules[schedule.name] = ScheduleEntry(schedule, owner, now, now)
                added.append(schedule.name)
                continue
            if known.owner != owner:
                taken_over.append(schedule.name)
                known.owner = owner
            if known.retired_at is not None:
                known.renew(now)
                known.retired_at = None
                added.append(schedule.name)
            elif known.schedule == schedule:
                continue
            else:
                if known.schedule.timing != schedule.timing:
                    _give_up(known, now, CHANGED)
                changed.append(schedule.name)
            known.schedule, known.registered_at = schedule, now
            known.revision += 1
        self._has_new_schedules = bool(added or changed or taken_over)
        names = {schedule.name for schedule in schedules}
        retired = [
            name
            for name, entry in sorted(self._schedules.items())
            if owner and entry.owner == owner and entry.retired_at is None and name not in names
        ]
        for entry in [self._schedules[name] for name in retired]:
            _give_up(entry, now, RETIRED)
            for at in _waiting(entry):
                entry.slots[at, False] = _slot_record(
                    Slot(at, SlotState.SKIPPED, reason=RETIRED), now
                )
            entry.retired_at = now
            entry.revision += 1
        return ScheduleChanges(tuple(added), tuple(changed), tuple(retired), tuple(taken_over))

    @transaction
    async def schedules(self) -> list[ScheduleRecord]:
        return [
            _record(entry)
            for _, entry in sorted(self._schedules.items())
            if entry.retired_at is None
        ]

    @transaction
    async def slots(self, name: str, limit: int) -> list[SlotRecord]:
        return _newest(self._schedule(name))[:limit]

    @transaction
    async def pause_schedule(self, name: str) -> bool:
        entry = self._schedule(name)
        if entry.is_paused:
            return False
        entry.paused_at = entry.paused_at or self._clock()
        entry.resumed_at = None
        entry.revision += 1
        return True

    @transaction
    async def resume_schedule(self, name: str) -> bool:
        entry = self._schedule(name)
        if not entry.is_paused:
            return False
        entry.resumed_at = self._clock()
        entry.is_planned = False
        entry.revision += 1
        self._has_new_schedules = True
        return True

    @transaction
    async def run_schedule(self, name: str, task_id: UUID) -> None:
        entry = self._schedule(name)
        if task_id in self._tasks:
            return
        now = self._clock()
        self._add(entry.schedule.task._replace(id=task_id), now)
        at = now
        while (at, True) in entry.slots:
            at += timedelta(microseconds=1)
        entry.slots[at, True] = SlotRecord(
            slot_at=at,
            state=SlotState.FIRED,
            decided_at=now,
            task_id=str(task_id),
            on_request=True,
        )

    @transaction
    async def schedule_in(self, *, without: Collection[str] = ()) -> float | None:
        return self._schedule_in(without)

    @transaction
    async def due_schedules(
        self, limit: int, *, without: Collection[str] = ()
    ) -> list[DueSchedule]:
        now = self._clock()
        due = sorted(
            (entry.look_at(now), name)
            for name, entry in self._schedules.items()
            if entry.is_active and entry.look_at(now) <= now and name not in without
        )
        entries = [self._schedules[name] for _, name in due[:limit]]
        return [
            replace(_due(entry, now), live_task=self._live_task(entry), waiting=_waiting(entry))
            for entry in entries
        ]

    def _live_task(self, entry: ScheduleEntry) -> UUID | None:
        """The latest task that has not ended, of so many slots."""
        ids = [UUID(one.task_id) for one in _newest(entry) if one.task_id is not None]
        for task_id in ids[:LOOKED_BACK]:
            if task_id in self._tasks and self._tasks[task_id].status not in ENDS:
                return task_id
        return None

    @transaction
    async def decide_slots(
        self, decision: SlotDecision, *, leadership: Leadership | None = None
    ) -> list[UUID] | None:
        if leadership is not None:
            self._assert_leader(leadership)
        entry = self._schedules.get(decision.name)
        if entry is None or (entry.revision, entry.decided_until) != (
            decision.revision,
            decision.decided_until,
        ):
            return None
        entry.decided_until, entry.next_at = decision.until, decision.next_at
        entry.settled = decision.settled
        entry.is_planned, entry.paused_at, entry.resumed_at = True, None, None
        new = [slot for slot in decision.slots if _is_news(slot, entry)]
        released = [slot for slot in decision.released if slot.at in _waiting(entry)]
        now = self._clock()
        fired = []
        for slot in (*released, *new):
            entry.slots[slot.at, False] = _slot_record(slot, decision.until)
            if slot.task is not None:
                self._add(slot.task, now)
                fired.append(slot.task.id)
        return fired

    @transaction
    async def prune_slots(self, *, most: int, leadership: Leadership) -> int:
        self._assert_leader(leadership)
        over = self._clock() - self._retention.ended
        number = 0
        for name, entry in list(self._schedules.items()):
            if entry.retired_at is not None and entry.retired_at < over:
                number += len(self._schedules.pop(name).slots)
                continue
            for rank, slot in enumerate(_newest(entry)):
                if rank >= most or (rank >= LAST_SLOTS and slot.decided_at < over):
                    del entry.slots[slot.slot_at, slot.on_request]
                    number += 1
        return number

    def _schedule(self, name: str) -> ScheduleEntry:
        entry = self._schedules.get(name)
        if entry is None or entry.retired_at is not None:
            raise ScheduleNotFound.of(name)
        return entry


def _give_up(entry: ScheduleEntry, now: datetime, reason: str) -> None:
    """Let a schedule begin anew; what was due until now and not decided on is skipped."""
    for slot in given_up(_due(entry, now), reason):
        entry.slots.setdefault((slot.at, False), _slot_record(slot, now))
    entry.renew(now)


def _is_news(slot: Slot, entry: ScheduleEntry) -> bool:
    known = entry.slots.get((slot.at, False))
    if known is None:
        return True
    return known.state is SlotState.SKIPPED and slot.state is not SlotState.SKIPPED


def _due(entry: ScheduleEntry, now: datetime) -> DueSchedule:
    return DueSchedule(
        schedule=entry.schedule,
        revision=entry.revision,
        decided_until=entry.decided_until,
        now=now,
        settled=entry.settled,
        paused_at=entry.paused_at,
        resumed_at=entry.resumed_at,
    )


def _newest(entry: ScheduleEntry) -> list[SlotRecord]:
    return [entry.slots[key] for key in sorted(entry.slots, reverse=True)]


def _waiting(entry: ScheduleEntry) -> tuple[datetime, ...]:
    return tuple(
        at for (at, _), slot in sorted(entry.slots.items()) if slot.state is SlotState.WAITING
    )


def _slot_record(slot: Slot, decided_at: datetime) -> SlotRecord:
    return SlotRecord(
        slot_at=slot.at,
        state=slot.state,
        decided_at=decided_at,
        task_id=None if slot.task is None else str(slot.task.id),
        reason=slot.reason,
        first_at=slot.first_at,
        slots=slot.slots,
    )


def _record(entry: ScheduleEntry) -> ScheduleRecord:
    schedule, newest = entry.schedule, _newest(entry)
    every = schedule.timing.every
    return ScheduleRecord(
        name=schedule.name,
        owner=entry.owner,
        type=schedule.task.type,
        payload=decode_json(schedule.task.payload),
        queue=schedule.task.queue,
        cron=schedule.timing.cron,
        every=None if every is None else every.total_seconds(),
        timezone=schedule.timing.timezone,
        overlap=schedule.overlap,
        catch_up=schedule.catch_up,
        jitter=schedule.jitter.total_seconds(),
        paused_at=entry.paused_at if entry.is_paused else None,
        registered_at=entry.registered_at,
        last_fired=_last(newest, SlotState.FIRED),
        last_skipped=_last(newest, SlotState.SKIPPED),
    )


def _last(newest: Sequence[SlotRecord], state: SlotState) -> SlotRecord | None:
    return next((one for one in newest if one.state is state), None)
