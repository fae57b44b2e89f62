"""What a claim would ask about one task, on PostgreSQL: bounded looks in one snapshot."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg

from windlass.model.errors import TaskNotFound
from windlass.model.explanation import GateHolder, Holder
from windlass.model.rule import LaneRule, RuleScope
from windlass.model.situation import (
    COUNTED,
    HOLDERS,
    LATELY,
    Ahead,
    GateState,
    LaneState,
    LimitState,
    Situation,
    Suspects,
)
from windlass.model.task import (
    ALONE_IS_AN_OUTAGE_ABOVE,
    ENDS,
    RECOVERIES_BEFORE_ALONE,
    TaskState,
    WorkerRecord,
)
from windlass.policy.explaining import closed_to_others, competing, own_limits
from windlass.store.postgres.parts import PostgresParts
from windlass.store.postgres.records import task_record, worker_record
from windlass.store.sqlfiles import SqlFiles


class ExplainVerbs(PostgresParts):
    """One task, and all that stands before it."""

    async def situation(self, task_id: UUID, *, ageing: timedelta) -> Situation:
        async with self._run.transaction("begin_listing") as connection:
            return await Looks(self._sql, connection, ageing).situation(task_id)


class Looks:
    """The statements about one task, in a transaction of its own."""

    def __init__(self, sql: SqlFiles, connection: asyncpg.Connection, ageing: timedelta) -> None:
        self._sql = sql
        self._connection = connection
        self._ageing = ageing

    async def situation(self, task_id: UUID) -> Situation:
        """Look at the task, then at what a claim would ask if it waits."""
        await self._fetch("pin_listing_plans")
        rows = await self._fetch("read_task", task_id)
        if not rows:
            raise TaskNotFound.of(task_id)
        record = task_record(rows[0])
        if record.status in ENDS:
            ended = Situation(now=await self._only("read_clock"), record=record)
            return replace(ended, workers=await self._workers(ended))
        (row,) = await self._fetch("explain_task", task_id)
        found = Situation(
            now=row["now"],
            record=record,
            recoveries=row["recoveries"],
            is_listed=row["is_listed"],
            lease_until=row["lease_until"],
            cancel_reason=row["cancel_reason"],
            expires_at=row["expires_at"],
            put_off=row["put_off"],
            queue_paused_at=row["queue_paused_at"],
            type_paused_at=row["type_paused_at"],
        )
        found = replace(found, workers=await self._workers(found))
        if found.lease_until is not None:
            return found
        found = replace(found, limits=tuple(await self._limits(found)))
        found = await self._with_gates(task_id, found)
        is_suspect = found.recoveries >= RECOVERIES_BEFORE_ALONE
        if is_suspect or any(limit.key in own_limits(record) for limit in found.limits):
            found = await self._with_lanes(found, row["lane"], is_suspect=is_suspect)
        if row["lane"] is None:
            return found
        return replace(found, ahead=await self._ahead(found, row))

    async def _workers(self, found: Situation) -> tuple[WorkerRecord, ...]:
        return tuple(map(worker_record, await self._fetch("explain_workers", found.now)))

    async def _with_gates(self, task_id: UUID, found: Situation) -> Situation:
        rows = await self._fetch("explain_gates", task_id, found.now, COUNTED + 1)
        gates = {row["is_next"]: await self._gate(row) for row in rows}
        return replace(found, gate=gates.get(False), next_gate=gates.get(True))

    async def _gate(self, row: asyncpg.Record) -> GateState:
        holders = [
            GateHolder(holder, TaskState(status), worker_id, until)
            for holder, status, worker_id, until in await self._fetch(
                "explain_gate_holders", row["gate"], HOLDERS
            )
        ]
        return GateState(
            type=row["type"],
            name=row["name"],
            slots=row["slots"],
            used=row["used"],
            first=row["first"],
            rate=row["rate"],
            tokens=row["tokens"],
            holders=tuple(holders),
        )

    async def _limits(self, found: Situation) -> list[LimitState]:
        limits = []
        for row in await self._fetch("explain_limits", found.now):
            scope, name, concurrency, rate, burst, room, used, tokens = row
            rule = LaneRule(RuleScope(scope), name, concurrency, rate, burst)
            holders: Sequence[asyncpg.Record] = ()
            if rule.key in own_limits(found.record) and concurrency is not None:
                holders = await self._fetch("explain_holders", scope, name, HOLDERS)
            limits.append(
                LimitState(rule, room, used, tokens, tuple(Holder(*holder) for holder in holders))
            )
        return limits

    async def _with_lanes(
        self, found: Situation, own: int | None, *, is_suspect: bool
    ) -> Situation:
        rooms: list[list[Any]] = []
        for scope in (RuleScope.QUEUE, RuleScope.TYPE):
            limits = [limit for limit in found.limits if limit.rule.scope is scope]
            rooms += [[one.rule.name for one in limits], [one.room for one in limits]]
        rows = await self._fetch("explain_lanes", self._ageing, is_suspect, *rooms, COUNTED)
        suspects = None
        if is_suspect:
            number = await self._only("explain_suspects", ALONE_IS_AN_OUTAGE_ABOVE + 1)
            suspects = Suspects(number, rows[0]["recoveries"] if rows else 0)
        lanes = (
            LaneState(row["queue"], row["type"], row["tasks"], row["lane"] == own, row["or_more"])
            for row in rows
        )
        return replace(found, lanes=tuple(lanes), suspects=suspects)

    async def _ahead(self, found: Situation, row: asyncpg.Record) -> Ahead:
        record = found.record
        types, queues = competing(found.workers, record)
        in_lane = await self._only("explain_place", row["lane"], row["x"], row["n"], COUNTED + 1)
        (others,) = await self._fetch(
            "explain_ahead",
            row["lane"],
            record.queue,
            record.type,
            record.priority,
            row["ready_at"],
            self._ageing,
            types,
            queues,
            *closed_to_others(found.limits, record),
            COUNTED,
        )
        since = found.now - timedelta(seconds=LATELY)
        (rate,) = await self._fetch("explain_rate", types, queues, since, COUNTED)
        return Ahead(in_lane, others["tasks"], others["or_more"], rate["completed"], rate["since"])

    async def _fetch(self, statement: str, *arguments: Any) -> list[asyncpg.Record]:
        return list(await self._connection.fetch(self._sql.statement(statement), *arguments))

    async def _only(self, statement: str, *arguments: Any) -> Any:
        (row,) = await self._fetch(statement, *arguments)
        return row[0]
