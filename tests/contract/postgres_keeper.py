"""A store whose history is watched, at a time of the test's choosing."""

import asyncio
import time
from collections.abc import Awaitable
from datetime import UTC, date, datetime, timedelta
from itertools import count
from typing import Any, TypeVar
from uuid import UUID

import asyncpg

from contract.pgbouncer import store_options
from windlass.model.errors import TaskNotFound
from windlass.model.task import (
    Answer,
    Claim,
    ClaimRequest,
    Enqueued,
    Leadership,
    NewTask,
    Outcome,
    Retained,
    Settlement,
)
from windlass.policy.retention import Span
from windlass.store.postgres import history as history_module
from windlass.store.postgres.store import PostgresStore

T = TypeVar("T")

WORKER = UUID(int=1)
TODAY = date(2027, 3, 3)  # a Wednesday
NOON = datetime(2027, 3, 3, 12, tzinfo=UTC)
LEASE = timedelta(seconds=30)
TERM = timedelta(seconds=15)
DAY = timedelta(days=1)
DEADLINE = 20.0  # seconds until a test gives up on a session
ERROR = '{"type": "ValueError", "message": "no such image"}'

_numbers = count(1)


class Keeper:
    """A store whose clock stands where it is put, and whoever keeps its history."""

    def __init__(
        self, store: PostgresStore, watcher: asyncpg.Connection, url: str, sql_url: str
    ) -> None:
        self.store = store
        self.watcher = watcher
        self.url = url  # of stores
        self.sql_url = sql_url
        self._leadership: Leadership | None = None
        self._open: list[asyncpg.Connection] = []
        self._stores: list[PostgresStore] = []

    async def at(self, moment: datetime) -> None:
        """Let the clock stand at this moment."""
        await self.watcher.execute(
            "CREATE OR REPLACE FUNCTION windlass.clock() RETURNS timestamptz "
            f"LANGUAGE sql VOLATILE PARALLEL SAFE AS $$SELECT timestamptz '{moment}'$$"
        )

    async def leadership(self) -> Leadership:
        self._leadership = await self.store.lead(WORKER, current=self._leadership, term=TERM)
        assert self._leadership is not None
        return self._leadership

    async def prepare(self) -> int:
        return await self.store.prepare_history(leadership=await self.leadership())

    async def retain(self, store: PostgresStore | None = None) -> Retained:
        return await (store or self.store).retain(leadership=await self.leadership())

    async def enqueue(self, **options: Any) -> Enqueued:
        task_id = UUID(int=1_700_000_000_000 << 80 | 7 << 76 | 2 << 62 | next(_numbers))
        asked: dict[str, Any] = {"id": task_id, "type": "resize", "payload": "{}"}
        (answer,) = await self.store.enqueue([NewTask(**(asked | options))])
        return answer

    async def claim(self) -> Claim:
        request = ClaimRequest(WORKER, ("resize",), 1, LEASE, timedelta(seconds=6))
        answer = await self.store.claim(request)
        assert answer.claim is not None
        return answer.claim

    async def end(self, outcome: Outcome = Outcome.COMPLETED, **options: Any) -> UUID:
        """Bring a task to its end."""
        task_id = (await self.enqueue(**options)).id
        held = await self.claim()
        error = ERROR if outcome in {Outcome.FAILED, Outcome.DEAD} else None
        settlement = Settlement(held.token, task_id, held.tasks[0].generation, outcome, error=error)
        assert await self.store.settle([settlement]) == [Answer.APPLIED]
        return task_id

    async def is_known(self, task_id: UUID) -> bool:
        try:
            await self.store.get(task_id)
        except TaskNotFound:
            return False
        return True

    async def spans(self) -> list[Span]:
        """The partitions that are attached or about to be."""
        return [
            history_module.span_of(row["name"])
            for row in await self.partitions()
            if row["attached"] and not row["pending"]
        ]

    async def partitions(self) -> list[asyncpg.Record]:
        return list(await self.watcher.fetch(self.store._sql.statement("list_partitions")))

    async def place_of(self, task_id: UUID) -> Span:
        name = await self.watcher.fetchval(
            "SELECT c.relname FROM windlass.history h JOIN pg_class c ON c.oid = h.tableoid "
            "WHERE h.id = $1",
            task_id,
        )
        return history_module.span_of(name)

    async def keys(self) -> list[str]:
        rows = await self.watcher.fetch("SELECT key FROM windlass.idempotency ORDER BY key")
        return [row["key"] for row in rows]

    async def open_reader(self, isolation: str) -> asyncpg.Connection:
        """A report on all of history that is not done."""
        reader = await asyncpg.connect(self.sql_url)
        self._open.append(reader)
        await reader.execute(f"BEGIN ISOLATION LEVEL {isolation}")
        await reader.fetchval("SELECT count(*) FROM windlass.history")
        return reader

    async def open_store(self, **options: Any) -> PostgresStore:
        store = PostgresStore(store_options(self.url, **options))
        await store.open()
        self._stores.append(store)
        return store

    async def waiting(self, call: Awaitable[T], *, by: asyncpg.Connection) -> asyncio.Task[T]:
        """Make a call, and return once it waits for what the other session holds."""
        task = asyncio.ensure_future(call)
        assert isinstance(task, asyncio.Task)
        deadline = time.monotonic() + DEADLINE
        while await self.blocked_by(by) is None:
            assert not task.done(), f"did not wait: {task}"
            assert time.monotonic() < deadline, "never waited"
            await asyncio.sleep(0.005)
        return task

    async def blocked_by(self, session: asyncpg.Connection) -> int | None:
        blocked: int | None = await self.watcher.fetchval(
            "SELECT pid FROM pg_stat_activity "
            "WHERE wait_event_type = 'Lock' AND $1 = ANY (pg_blocking_pids(pid))",
            session.get_server_pid(),
        )
        return blocked

    async def waiters(self) -> int:
        return int(
            await self.watcher.fetchval(
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
        )

    async def close(self) -> None:
        for session in self._open:
            session.terminate()
        for store in self._stores:
            await store.close()
        await self.watcher.close()


def days(first: date, past: date) -> Span:
    return Span(first, past)


def one_day(day: date) -> Span:
    return Span(day, day + DAY)


def history_name(span: Span) -> str:
    return f"history_{span.first:%Y%m%d}_{span.past:%Y%m%d}"
