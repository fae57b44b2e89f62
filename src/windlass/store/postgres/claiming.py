"""Claim on PostgreSQL: each reader reads every lane on from where it left off."""

import asyncio
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

import asyncpg
from asyncpg.pgproto.pgproto import UUID as DriverUUID  # noqa: N811 - its name is taken

from windlass.model.errors import StoreUnavailable
from windlass.model.limits import EXPIRED
from windlass.model.task import Claim, ClaimAnswer, ClaimedTask, ClaimRequest, Started
from windlass.store.postgres.cursors import Key, LaneCursors, LaneRead, Snapshot
from windlass.store.postgres.parts import PostgresOptions, PostgresParts

LOOK_BEHIND_EVERY = 5.0  # seconds; and never more than a twentieth of the time
LOOK_AGAIN_AFTER = 0.2
CALLS_ANSWERED = 500  # of gates, by who found nothing to claim


class ClaimVerbs(PostgresParts):
    """Leases on ready tasks, and what is behind the bounds."""

    def __init__(self, options: PostgresOptions) -> None:
        super().__init__(options)
        self._cursors = _new_cursors()
        self._cursors_apart = _new_cursors()
        self._looking_behind: asyncio.Task[None] | None = None

    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        # Who reads other lanes has other bounds, and would drop those that are not among its own.
        all_cursors = self._cursors_apart if request.apart else self._cursors
        cursors = all_cursors[request.alone]
        bounds, late = cursors.begin()
        # The driver's is made and hashed by C, and a token is a key in many places.
        token: UUID = DriverUUID(os.urandom(16))
        lane = None if late or request.alone else request.lane
        try:
            if lane is not None and request.task_id is not None:
                answer = await self._claim_one(
                    request, token, lane, request.task_id, bounds.get(lane)
                )
                if answer is not None:
                    return answer
            if lane is None:
                rows = await self._claim_tasks(request, token, bounds, late)
            else:
                rows = await self._claim_lane(request, token, lane, bounds.get(lane))
                if rows[-1]["alone_waiting"] is None:  # it has a limit
                    lane = None
                    rows = await self._claim_tasks(request, token, bounds, late)
        except BaseException:
            # Whether it was carried out is not known: read every lane from its beginning.
            all_cursors[request.alone] = LaneCursors()
            raise
        batches = [row for row in rows if row["ids"]]
        report = rows[-1]
        cursors.advance(
            Snapshot.parse(report["snapshot"]),
            [
                LaneRead(lane, None if x is None else Key(x, n), to_end)
                for lane, x, n, to_end in zip(
                    report["read_lanes"],
                    report["last_x"],
                    report["last_n"],
                    report["read_to_end"],
                    strict=True,
                )
            ],
            asked_late=late,
            now=time.monotonic(),
            is_whole=lane is None,
            part=(request.queues, request.other_than) if request.is_part else None,
        )
        self._look_behind_soon()
        claim = None
        if batches:
            reasons = dict(zip(report["cancelled"] or (), report["reasons"] or (), strict=True))
            expired = {task_id for batch in batches for task_id in batch["expired"] or ()}
            if expired:
                reasons = dict.fromkeys(_not_begun(batches, expired), EXPIRED) | reasons
            claimed = tuple(task for batch in batches for task in _tasks(batch, reasons))
            kinds = {(batch["type"], batch["queue"]) for batch in batches}
            kind = kinds.pop() if len(kinds) == 1 else None
            claim = Claim(token, report["fence"], claimed, request.alone, kind)
        if lane is not None:
            return ClaimAnswer(claim, report["alone_waiting"], report["due_in"])
        due_in = report["due_in"]
        if report["has_calls"] and await self._run.fetchval("answer_calls", CALLS_ANSWERED, True):
            due_in = 0.0  # perhaps it has let something through
        return ClaimAnswer(
            claim, report["alone_waiting"], due_in, report["more_in"], report["is_capped"]
        )

    async def _claim_tasks(
        self, request: ClaimRequest, token: UUID, bounds: Mapping[int, Key], late: list[int]
    ) -> list[asyncpg.Record]:
        """A row for each lane that tasks were taken of, and the report as the last."""
        return await self._run.fetch(
            "claim_tasks",
            request.worker_id,
            token,
            request.types,
            request.queues,
            request.limit,
            request.lease,
            request.ageing,
            request.alone,
            list(bounds),
            [key.x for key in bounds.values()],
            [key.n for key in bounds.values()],
            late,
            request.at_most,
            request.other_than or None,
        )

    async def _claim_lane(
        self, request: ClaimRequest, token: UUID, lane: int, bound: Key | None
    ) -> list[asyncpg.Record]:
        """One row, with the tasks of a lane and the report."""
        return await self._run.fetch(
            "claim_lane",
            request.worker_id,
            token,
            request.types,
            request.queues,
            request.limit,
            request.lease,
            lane,
            *(bound or (None, None)),
        )

    async def _claim_one(
        self, request: ClaimRequest, token: UUID, lane: int, task_id: UUID, bound: Key | None
    ) -> ClaimAnswer | None:
        """Claim what a wake-up named; None if others are before it. Nothing else is read, so no bound moves."""
        (row,) = await self._run.fetch(
            "claim_one",
            request.worker_id,
            token,
            request.types,
            request.queues,
            request.lease,
            lane,
            task_id,
            *(bound or (None, None)),
        )
        kind, queue, priority, payload, attempts, max_attempts, waited, fence, is_behind = row
        if fence is None:
            return None if is_behind else ClaimAnswer(None)
        task = ClaimedTask(
            task_id, kind, queue, priority, payload, attempts, max_attempts, 1, None, waited
        )
        return ClaimAnswer(Claim(token, fence, (task,), False, (kind, queue)))

    def _look_behind_soon(self) -> None:
        if self._looking_behind is None or self._looking_behind.done():
            self._looking_behind = asyncio.create_task(
                self._look_behind(), name="windlass-look-behind"
            )

    async def _stop_looking_behind(self) -> None:
        task, self._looking_behind = self._looking_behind, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _look_behind(self) -> None:
        """Find rows that a claim skipped because they were held, and that were then let go."""
        pause = LOOK_BEHIND_EVERY
        while True:
            await asyncio.sleep(pause)
            began = time.monotonic()
            again = False
            try:
                for cursors in (*self._cursors.values(), *self._cursors_apart.values()):
                    again |= await self._look_behind_once(cursors)
            except StoreUnavailable:
                return  # the next claim starts it anew
            took = time.monotonic() - began
            pause = LOOK_AGAIN_AFTER if again else max(LOOK_BEHIND_EVERY, 20 * took)

    async def _look_behind_once(self, cursors: LaneCursors) -> bool:
        bounds = cursors.bounds
        if not bounds:
            return False
        rows = await self._run.fetch(
            "look_behind",
            list(bounds),
            [key.x for key in bounds.values()],
            [key.n for key in bounds.values()],
        )
        return cursors.lower({row["lane"]: Key(row["x"], row["n"]) for row in rows})

    async def start(self, started: Sequence[Started]) -> frozenset[UUID]:
        if not started:
            return frozenset()
        columns = (list(column) for column in zip(*started, strict=True))
        rows = await self._run.fetch("start_tasks", *columns, self._options.patience)
        return frozenset(row["task_id"] for row in rows)

    async def requested_cancellations(self, task_ids: Sequence[UUID]) -> dict[UUID, str]:
        rows = await self._run.fetch("read_cancel_requests", list(task_ids))
        return {row["task_id"]: row["reason"] for row in rows}


def _not_begun(batches: Sequence[asyncpg.Record], among: Collection[UUID]) -> list[UUID]:
    """Those of some tasks of which no attempt was made."""
    granted = [
        pair for batch in batches for pair in zip(batch["ids"], batch["attempts"], strict=True)
    ]
    return [task_id for task_id, attempts in granted if task_id in among and not attempts]


def _new_cursors() -> dict[bool, LaneCursors]:
    """Those of one reader, by ClaimRequest.alone."""
    return {False: LaneCursors(), True: LaneCursors()}


def _tasks(batch: Sequence[Any], reasons: Mapping[UUID, str]) -> Iterator[ClaimedTask]:
    """The tasks of one lane, which come as columns."""
    kind, queue, priority, ids, *columns = batch[:9]
    for id_, payload, attempts, max_attempts, generation, waited in zip(ids, *columns, strict=True):
        reason = reasons.get(id_) if reasons else None
        yield ClaimedTask(
            id_, kind, queue, priority, payload, attempts, max_attempts, generation, reason, waited
        )
