"""Lead on PostgreSQL: elections, and the chores of whoever won."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from uuid import UUID

import asyncpg

from windlass.model.limits import UNNOTICED_STEP
from windlass.model.task import Due, Expired, Leadership, Rescued, Retained
from windlass.store.postgres.connection import check_same_database, connected
from windlass.store.postgres.operating import OperateVerbs

RETIRE_LANES_AFTER = timedelta(hours=1)  # an empty lane; in use again it is listed anew
WINDOW_BATCH = 5000  # windows that are over, in one transaction
WINDOW_BATCHES = 10


class LeadVerbs(OperateVerbs):
    """A term of office, and writes that nobody else can be elected during."""

    async def lead(
        self,
        candidate: UUID,
        *,
        current: Leadership | None,
        term: timedelta,
        steady_for: timedelta = timedelta(0),
    ) -> Leadership | None:
        shown = current and current.term
        won = await self._run.fetchval("lead", candidate, shown, term, steady_for, UNNOTICED_STEP)
        return None if won is None else Leadership(candidate, won)

    async def resign(self, leadership: Leadership) -> None:
        await self._run.execute("resign", leadership.holder, leadership.term)

    async def now(self) -> datetime:
        now: datetime = await self._run.fetchval("read_clock")
        return now

    async def due(self) -> Due:
        (row,) = await self._run.fetch("look_for_chores")
        return Due(*row)

    async def promote(
        self, limit: int, *, leadership: Leadership | None = None, just_due: bool = False
    ) -> int:
        async with self._led(leadership) as connection:
            text = self._sql.statement("promote_due")
            return int(await connection.fetchval(text, limit, not just_due))

    async def open_gates(self, limit: int, *, if_allowed: bool = False) -> int:
        if if_allowed and not await self._run.fetchval("may_answer_calls"):
            return 0
        # One statement: whoever is stopped in its tracks leaves no gate locked.
        return int(await self._run.fetchval("answer_calls", limit, True))

    async def rescue(self, limit: int, *, leadership: Leadership | None = None) -> Rescued:
        kept = self._options.retention

        async def rescue_once() -> Rescued:
            async with self._led(leadership) as connection:
                text = self._sql.statement("rescue_claims")
                row = await connection.fetchrow(text, limit, kept.dead, kept.ended, kept.keys)
                return Rescued(**{**row, "died": tuple(sorted(row["died"]))})

        return await self._history.with_places(None, rescue_once)

    async def expire(self, limit: int, *, leadership: Leadership) -> Expired:
        kept = self._options.retention

        async def expire_once() -> Expired:
            async with self._led(leadership) as connection:
                text = self._sql.statement("expire_tasks")
                return Expired(*await connection.fetchrow(text, limit, kept.ended, kept.keys))

        return await self._history.with_places(None, expire_once)

    async def unknown_types(self) -> list[str]:
        return [name for (name,) in await self._run.fetch("unknown_types")]

    async def fail_unknown(
        self,
        type: str,  # noqa: A002
        *,
        error: str,
        ready_for: timedelta,
        limit: int,
        leadership: Leadership,
    ) -> list[UUID]:
        kept = self._options.retention
        async with self._led(leadership) as connection:
            text = self._sql.statement("fail_unknown")
            failed: list[UUID] = await connection.fetchval(
                text, type, error, ready_for, limit, kept.dead, kept.keys
            )
            return failed

    async def remove_dead_workers(
        self, *, leadership: Leadership, steady_for: timedelta = timedelta(0)
    ) -> list[UUID]:
        async with self._led(leadership) as connection:
            text = self._sql.statement("remove_dead_workers")
            rows = await connection.fetch(text, steady_for, UNNOTICED_STEP)
            return [row["id"] for row in rows]

    async def tidy(self, *, leadership: Leadership) -> int:
        async with self._led(leadership) as connection:
            came_back = await connection.fetch(self._sql.statement("list_returned_cancellations"))
            dropped = await connection.execute(self._sql.statement("drop_answered_cancellations"))
            retired: int = await connection.fetchval(
                self._sql.statement("retire_lanes"), RETIRE_LANES_AFTER
            )
            listed: int = await connection.fetchval(self._sql.statement("relist_busy_lanes"))
            doubles = await connection.execute(self._sql.statement("drop_double_lanes"))
            late = await connection.execute(self._sql.statement("drop_overtaken_reports"))
            mended: int = await connection.fetchval(
                self._sql.statement("mend_gates"), random.getrandbits(64) - (1 << 63)
            )
        for task_id, _ in came_back:
            await self._cancel_returned(task_id, leadership)
        rows = sum(map(_row_count, (dropped, doubles, late)))
        tidied = len(came_back) + retired + listed + mended + rows
        return tidied + await self._drop_windows(leadership)

    async def _drop_windows(self, leadership: Leadership) -> int:
        """Forget windows that are over, in short transactions; of very many the next time."""
        dropped = 0
        for _ in range(WINDOW_BATCHES):
            async with self._led(leadership) as connection:
                text = self._sql.statement("drop_past_windows")
                rows = _row_count(await connection.execute(text, WINDOW_BATCH))
            dropped += rows
            if rows < WINDOW_BATCH:
                break
        return dropped

    async def _cancel_returned(self, task_id: UUID, leadership: Leadership) -> None:
        """Cancel a task whose request still stands: it may have been answered meanwhile."""
        kept = self._options.retention

        async def cancel_once() -> None:
            async with self._led(leadership) as connection:
                rows = await connection.fetch(
                    self._sql.statement("read_cancel_requests"), [task_id]
                )
                for _, reason in rows:
                    text = self._sql.statement("cancel_task")
                    await connection.fetchval(text, task_id, reason, kept.ended, kept.keys)

        await self._history.with_places([task_id], cancel_once)

    async def prepare_history(self, *, leadership: Leadership) -> int:
        async with self._led(leadership):
            pass
        return await self._history.prepare()

    async def retain(self, *, leadership: Leadership, keep_dead: bool = False) -> Retained:
        async with self._led(leadership) as connection:
            at_most = 0 if keep_dead else 1000
            dead = await connection.fetchval(self._sql.statement("discard_old_dead"), at_most)
        # Detaching cannot be part of a transaction, so it cannot be fenced: it is harmless twice.
        async with connected(self._direct) as direct:
            text = self._sql.statement("which_database")
            await check_same_database(self._direct, direct, self._route, text)
            partitions, waiting = await self._history.retain(
                direct, behind_pooler=self._direct.pooler
            )
        return Retained(partitions, dead, tuple(waiting))

    @asynccontextmanager
    async def _led(
        self, leadership: Leadership | None, *, confirmed: bool = False
    ) -> AsyncIterator[asyncpg.Connection]:
        """A transaction that nobody else can be elected during, if a leadership is shown."""
        shown = () if leadership is None else ("assert_leader", *leadership)
        async with self._run.transaction(*shown, confirmed=confirmed) as connection:
            yield connection


def _row_count(status: str) -> int:
    return int(status.rsplit(" ", 1)[1])
