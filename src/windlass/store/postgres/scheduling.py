"""Schedules on PostgreSQL."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import itemgetter
from typing import Any
from uuid import UUID

import asyncpg
import msgspec

from windlass.encoding import decode_json
from windlass.model.errors import ScheduleNotFound, StoreBusy
from windlass.model.limits import CHANGED, LAST_SLOTS, LOOKED_BACK, RETIRED
from windlass.model.schedule import (
    DueSchedule,
    Overlap,
    Schedule,
    ScheduleChanges,
    ScheduleRecord,
    Slot,
    SlotDecision,
    SlotRecord,
    SlotState,
    Stretch,
    Timing,
)
from windlass.model.task import Leadership, NewTask
from windlass.policy.schedule import given_up
from windlass.store.postgres.enqueueing import TaskItem, enqueue_statement, task_item
from windlass.store.postgres.leading import LeadVerbs
from windlass.store.postgres.parts import named_if_held

_NO_ID = UUID(int=0)
# For what somebody holds: so long others may have to wait for what these transactions hold already.
REGISTER_PATIENCE = timedelta(milliseconds=500)
DECIDE_PATIENCE = timedelta(milliseconds=100)
PRUNE_PATIENCE = timedelta(seconds=1)
PATIENCE_OF_PEOPLE = timedelta(seconds=5)  # as with what else they pause

_NEVER = datetime.max.replace(tzinfo=UTC)  # the driver writes it as infinity


class ScheduleVerbs(LeadVerbs):
    """Schedules, and their slots."""

    async def register_schedules(
        self, owner: str, schedules: Sequence[Schedule]
    ) -> ScheduleChanges:
        given = {one.name: one for one in sorted(schedules, key=lambda one: one.name)}
        async with self._run.transaction() as connection:
            await self._limit_waiting(connection, REGISTER_PATIENCE)
            text = self._sql.statement("add_schedules")
            rows = await connection.fetch(text, owner, *_columns(given.values()))
            new = {row["name"] for row in rows}
            text = self._sql.statement("lock_schedules")
            rows = await connection.fetch(text, owner, list(given))
            known = {row["name"]: row for row in rows if row["name"] not in new}
            revived = [name for name in given if name in known and known[name]["is_retired"]]
            changed = [
                name
                for name in given
                if name in known and name not in revived and not _is(known[name], given[name])
            ]
            taken = [name for name in given if name in known and known[name]["owner"] != owner]
            retired = [name for name in known if name not in given and owner]
            retired = [name for name in retired if not known[name]["is_retired"]]
            anew = [name for name in changed if _timing(known[name]) != given[name].timing]
            await self._give_up(connection, [known[name] for name in anew], CHANGED)
            await self._give_up(connection, [known[name] for name in retired], RETIRED)
            if begun := [*revived, *anew, *retired]:
                await connection.execute(self._sql.statement("renew_schedules"), begun)
            if stale := {*revived, *changed, *taken}:
                columns = _columns(given[name] for name in sorted(stale))
                await connection.execute(self._sql.statement("change_schedules"), owner, *columns)
            if retired:
                await connection.execute(self._sql.statement("retire_schedules"), retired)
                text = self._sql.statement("skip_waiting_slots")
                await connection.execute(text, retired, RETIRED)
            if new or stale:
                await connection.execute(self._sql.statement("tell_of_schedules"))
        added = tuple(sorted({*new, *revived}))
        return ScheduleChanges(added, tuple(changed), tuple(retired), tuple(taken))

    async def _give_up(
        self, connection: asyncpg.Connection, rows: Sequence[asyncpg.Record], reason: str
    ) -> None:
        for due in map(_due, rows):
            await self._write_slots(connection, due.schedule.name, due.now, given_up(due, reason))

    async def schedules(self) -> list[ScheduleRecord]:
        rows = await self._run.fetch("list_schedules")
        return [_record(list(of)) for _, of in groupby(rows, key=itemgetter("name"))]

    async def slots(self, name: str, limit: int) -> list[SlotRecord]:
        rows = await self._run.fetch("read_slots", name, limit)
        if not rows:
            await self._check_known(name)
        return [_slot_record(row) for row in rows]

    async def pause_schedule(self, name: str) -> bool:
        return _answer(name, await self._asked("pause_schedule", name))

    async def resume_schedule(self, name: str) -> bool:
        return _answer(name, await self._asked("resume_schedule", name))

    async def _asked(self, statement: str, name: str) -> bool | None:
        with named_if_held(f"schedule '{name}'"):
            async with self._run.transaction() as connection:
                await self._limit_waiting(connection, PATIENCE_OF_PEOPLE)
                answer: bool | None = await connection.fetchval(
                    self._sql.statement(statement), name
                )
        return answer

    async def run_schedule(self, name: str, task_id: UUID) -> None:
        with named_if_held(f"schedule '{name}'"):
            async with self._run.transaction(confirmed=True) as connection:
                await self._limit_waiting(connection, PATIENCE_OF_PEOPLE)
                text = self._sql.statement("request_slot")
                task = await connection.fetchval(text, name, task_id)
                if task is not None:
                    await self._enqueue_slots(connection, [_task(task)._replace(id=task_id)])
                    return
        await self._check_known(name)

    async def _check_known(self, name: str) -> None:
        if not await self._run.fetchval("has_schedule", name):
            raise ScheduleNotFound.of(name)

    async def schedule_in(self, *, without: Collection[str] = ()) -> float | None:
        wait: float | None = await self._run.fetchval("next_schedule", list(without))
        return wait

    async def due_schedules(
        self, limit: int, *, without: Collection[str] = ()
    ) -> list[DueSchedule]:
        rows = await self._run.fetch("due_schedules", limit, LOOKED_BACK, list(without))
        return [
            replace(_due(row), live_task=row["live_task"], waiting=tuple(row["waiting"]))
            for row in rows
        ]

    async def decide_slots(
        self, decision: SlotDecision, *, leadership: Leadership | None = None
    ) -> list[UUID] | None:
        async with self._led(leadership, confirmed=True) as connection:
            await self._limit_waiting(connection, DECIDE_PATIENCE)
            row = await connection.fetchrow(
                self._sql.statement("decide_schedule"),
                *(decision.name, decision.revision, decision.decided_until),
                *(decision.until, decision.next_at or _NEVER),
                [border for stretch in decision.settled for border in stretch],
            )
            if not row["is_free"]:
                raise StoreBusy(f"another transaction holds schedule '{decision.name}'")
            if not row["was_decided"]:
                return None
            released = await self._release(connection, decision)
            written = await self._write_slots(
                connection, decision.name, decision.until, decision.slots
            )
            tasks = [
                slot.task
                for slot in (*decision.released, *decision.slots)
                if slot.task is not None and slot.at in released | written
            ]
            await self._enqueue_slots(connection, tasks)
        return [task.id for task in tasks]

    async def _limit_waiting(self, connection: asyncpg.Connection, patience: timedelta) -> None:
        await connection.execute(self._sql.statement("limit_waiting"), patience)

    async def _release(
        self, connection: asyncpg.Connection, decision: SlotDecision
    ) -> set[datetime]:
        if not decision.released:
            return set()
        rows = await connection.fetch(
            self._sql.statement("release_slots"),
            *(decision.name, decision.until),
            [slot.at for slot in decision.released],
            [slot.task and slot.task.id for slot in decision.released],
        )
        return {row["slot_at"] for row in rows}

    async def _write_slots(
        self,
        connection: asyncpg.Connection,
        name: str,
        decided_at: datetime,
        slots: Sequence[Slot],
    ) -> set[datetime]:
        if not slots:
            return set()
        rows = await connection.fetch(
            self._sql.statement("write_slots"),
            *(name, decided_at),
            *map(list, zip(*map(_slot_columns, slots), strict=True)),
        )
        return {row["slot_at"] for row in rows}

    async def _enqueue_slots(
        self, connection: asyncpg.Connection, tasks: Sequence[NewTask]
    ) -> None:
        if tasks:
            name, arguments = enqueue_statement(tasks, None, repeated=False)
            await connection.fetch(self._sql.statement(name), *arguments)

    async def prune_slots(self, *, most: int, leadership: Leadership) -> int:
        kept = self._options.retention.ended
        async with self._led(leadership) as connection:
            await self._limit_waiting(connection, PRUNE_PATIENCE)
            text = self._sql.statement("prune_slots")
            number: int = await connection.fetchval(text, most, LAST_SLOTS, kept)
            await connection.execute(self._sql.statement("drop_retired_schedules"), kept)
        return number


def _answer(name: str, answer: bool | None) -> bool:
    if answer is None:
        raise ScheduleNotFound.of(name)
    return answer


def _slot_columns(slot: Slot) -> tuple[Any, ...]:
    task_id = None if slot.task is None else slot.task.id
    return (slot.at, slot.state, task_id, slot.reason, slot.first_at, slot.slots)


def _columns(schedules: Iterable[Schedule]) -> list[list[Any]]:
    rows = [
        (
            one.name,
            one.timing.cron,
            one.timing.every,
            one.timing.timezone,
            msgspec.json.encode(task_item(one.task)).decode(),
            str(one.overlap),
            one.catch_up,
            one.jitter,
        )
        for one in schedules
    ]
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[]] * 8


def _is(row: asyncpg.Record, given: Schedule) -> bool:
    """Whether a schedule is as it was given; its payload may be written in another form."""
    known, other = _schedule(row), given
    if decode_json(known.task.payload) == decode_json(other.task.payload):
        known = replace(known, task=known.task._replace(payload=other.task.payload))
    return known == other


def _timing(row: asyncpg.Record) -> Timing:
    return Timing(row["cron"], row["every"], row["timezone"])


def _schedule(row: asyncpg.Record) -> Schedule:
    return Schedule(
        name=row["name"],
        timing=_timing(row),
        task=_task(row["task"]),
        overlap=Overlap(row["overlap"]),
        catch_up=row["catch_up"],
        jitter=row["jitter"],
    )


def _due(row: asyncpg.Record) -> DueSchedule:
    borders = row["settled"]
    return DueSchedule(
        schedule=_schedule(row),
        revision=row["revision"],
        decided_until=row["decided_until"],
        now=row["now"],
        settled=tuple(map(Stretch, borders[::2], borders[1::2])),
        paused_at=row["paused_at"],
        resumed_at=row["resumed_at"],
    )


def _task(text: str) -> NewTask:
    item = msgspec.json.decode(text, type=TaskItem)
    return NewTask(
        _NO_ID,
        item.type,
        bytes(item.payload).decode(),
        item.queue,
        item.priority,
        item.max_attempts,
        tags=tuple(item.tags or ()),
        retention=None if item.retention is None else timedelta(seconds=item.retention),
        expires=item.expires,
        ordering_key=item.ordering_key,
        keeps_key=item.on_dead == "hold",
        limit_by=None if item.limit_by is None else bytes(item.limit_by).decode(),
    )


def _record(rows: Sequence[asyncpg.Record]) -> ScheduleRecord:
    row = rows[0]
    schedule = _schedule(row)
    every = schedule.timing.every
    last = {one["state"]: _slot_record(one) for one in rows if one["state"] is not None}
    return ScheduleRecord(
        name=schedule.name,
        owner=row["owner"],
        type=schedule.task.type,
        payload=decode_json(schedule.task.payload),
        queue=schedule.task.queue,
        cron=schedule.timing.cron,
        every=None if every is None else every.total_seconds(),
        timezone=schedule.timing.timezone,
        overlap=schedule.overlap,
        catch_up=schedule.catch_up,
        jitter=schedule.jitter.total_seconds(),
        paused_at=row["paused_at"],
        registered_at=row["registered_at"],
        last_fired=last.get("fired"),
        last_skipped=last.get("skipped"),
    )


def _slot_record(row: asyncpg.Record) -> SlotRecord:
    return SlotRecord(
        slot_at=row["slot_at"],
        state=SlotState(row["state"]),
        decided_at=row["decided_at"],
        task_id=None if row["task_id"] is None else str(row["task_id"]),
        reason=row["reason"],
        first_at=row["first_at"],
        slots=row["slots"],
        on_request=row["on_request"],
    )
