"""The partitions in which ended tasks rest: made ahead, and detached when their day is over."""

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeVar
from uuid import UUID

import asyncpg

from windlass.model.task import Retention
from windlass.policy.retention import Span, is_over, missing_spans
from windlass.store.postgres.statements import Statements
from windlass.store.sqlfiles import SqlFiles

DETACH_WITHIN = 3.0  # seconds; a reader that takes longer is waited for at the next turn

T = TypeVar("T")


class History:
    """Keeps history's partitions."""

    def __init__(self, sql: SqlFiles, run: Statements, retention: Retention) -> None:
        self._sql = sql
        self._run = run
        self._retention = retention

    async def with_places(
        self, task_ids: Sequence[UUID] | None, call: Callable[[], Awaitable[T]]
    ) -> T:
        """Make a call that ends these tasks (None: any), again once a missing place was made."""
        try:
            return await call()
        except asyncpg.CheckViolationError as error:
            if "no partition" not in str(error):
                raise
        rows = await self._run.fetch("list_task_retentions", task_ids and list(task_ids))
        await self.prepare([timedelta(seconds=row[0]) for row in rows])
        return await call()

    async def prepare(self, more: Sequence[timedelta] = ()) -> int:
        """Make the partitions that tasks ending in the coming days need; return how many."""
        rows = await self._run.fetch("list_retentions")
        registered = [timedelta(seconds=row[0]) for row in rows]
        wanted = {self._retention.ended, self._retention.keys, *registered, *more}
        today = await self._run.fetchval("read_today")
        present = [span_of(row["name"]) for row in await self._run.fetch("list_partitions")]
        made = 0
        for span in missing_spans(today, wanted, present):
            made += await self._run.fetchval("add_history_partition", span.first, span.past)
        return made

    async def retain(
        self, connection: asyncpg.Connection, *, behind_pooler: bool
    ) -> tuple[int, list[str]]:
        """Drop partitions whose day is over; return how many, and those that readers hold."""
        today = await connection.fetchval(self._sql.statement("read_today"))
        dropped, waiting = 0, []
        for row in await connection.fetch(self._sql.statement("list_partitions")):
            name = row["name"]
            if not is_over(span_of(name), today):
                continue
            try:
                if row["attached"]:
                    await self._detach(connection, name, row["pending"], behind_pooler)
                await connection.execute(self._sql.statement("drop_history_partition"), name)
                dropped += 1
            except (TimeoutError, asyncpg.QueryCanceledError, asyncpg.LockNotAvailableError):
                waiting.append(name)
                break  # only one partition at a time can be between attached and detached
            except (asyncpg.UndefinedTableError, asyncpg.ObjectNotInPrerequisiteStateError):
                continue  # another leader was here: it is gone, or on its way
        return dropped, waiting

    async def _detach(
        self, connection: asyncpg.Connection, name: str, pending: bool, behind_pooler: bool
    ) -> None:
        if behind_pooler and not pending:
            await connection.execute(self._sql.statement("detach_history_partition"), name)
            return
        verb = "detach_finalize" if pending else "detach_concurrently"
        text = self._sql.statement(verb).replace("PARTITION_NAME", name)
        await connection.execute(text, timeout=DETACH_WITHIN)


def span_of(name: str) -> Span:
    """Return the days whose tasks rest in the partition of this name."""
    _, first, past = name.split("_")
    days = (datetime.strptime(day, "%Y%m%d").replace(tzinfo=UTC).date() for day in (first, past))
    return Span(*days)
