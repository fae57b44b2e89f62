"""Counts what a statement reads and writes: buffers, rows, records of WAL."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg

from windlass.model.task import (
    Answer,
    Claim,
    ClaimRequest,
    NewTask,
    Outcome,
    Settlement,
)
from windlass.store.postgres.store import PostgresOptions, PostgresStore

WORKER = UUID(int=1)
LEASE = timedelta(seconds=30)
AGEING = timedelta(seconds=6)
ERROR = '{"type": "ValueError", "message": "no such image"}'
FULL = 100_000
TURNS = 8  # more than the five after which PostgreSQL may settle for a generic plan

_numbers = count(1)
_fillings = count(1)  # of their own: an id has room for 65,535; none is that of `full`

# Ids are made from a number, in order, as a client's are.
FILL = """
WITH made AS MATERIALIZED (
    SELECT n, ('018bcfe5-6800-7000-8000-' || lpad(to_hex($1::bigint + n), 12, '0'))::uuid AS id,
        $3::text || CASE WHEN $4 > 1 THEN (n % $4)::text ELSE '' END AS type
    FROM generate_series(1, $2::bigint) AS n
), tasks AS (
    INSERT INTO windlass.task (
        id, type, queue, priority, max_attempts, created_at, scheduled_for, payload
    )
    SELECT id, type, 'default', 10, 4, now(), now(), '{"image": "a.png", "width": 100}'
    FROM made
)
INSERT INTO windlass.ready (lane, task_id, generation, ready_at)
SELECT windlass.lane_number('default', type, 10::smallint, 0::smallint), id, 1, now()
FROM made
ORDER BY n
"""
LANES = """
INSERT INTO windlass.lane (lane, queue, type, priority, kind)
SELECT DISTINCT
    windlass.lane_number(queue, type, priority, 0::smallint), queue, type, priority, 0::smallint
FROM windlass.task
"""
LANE = "SELECT windlass.lane_number('default', $1, 10::smallint, 0::smallint)"
ROWS_READ = """
SELECT relname, seq_tup_read + coalesce(idx_tup_fetch, 0) AS rows
FROM pg_stat_xact_user_tables
WHERE schemaname = 'windlass'
"""


class Cost(NamedTuple):
    """What one run of a statement touched."""

    buffers: int
    rows: dict[str, int]  # by table
    wal_records: int


class Probe:
    """Stands in for a pool: each statement is explained, undone and noted, then carried out."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self.costs: list[Cost] = []

    async def fetch(self, text: str, *arguments: Any) -> list[asyncpg.Record]:
        self.costs += await measure(self._connection, text, *arguments)
        return list(await self._connection.fetch(text, *arguments))

    async def fetchrow(self, text: str, *arguments: Any) -> asyncpg.Record:
        return (await self.fetch(text, *arguments))[0]

    async def fetchval(self, text: str, *arguments: Any) -> Any:
        return (await self.fetchrow(text, *arguments))[0]

    async def execute(self, text: str, *arguments: Any) -> None:
        await self.fetch(text, *arguments)

    async def acquire(self) -> "Probe":
        return self

    async def release(self, connection: "Probe", *, timeout: float) -> None: ...  # noqa: ASYNC109

    def has_unconfirmed(self) -> bool:
        return False

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        async with self._connection.transaction():
            yield

    async def close(self) -> None:
        """The connection belongs to the test."""


async def measure(connection: asyncpg.Connection, text: str, *arguments: Any) -> list[Cost]:
    """Run a statement several times, undo it each time, and return what each run but one cost.

    The first run reads the catalogues, so it says nothing.
    """
    costs = []
    for _ in range(TURNS):
        undone = connection.transaction()
        await undone.start()
        before = dict(await connection.fetch(ROWS_READ))
        plan = await connection.fetchval(
            f"EXPLAIN (ANALYZE, BUFFERS, WAL, FORMAT JSON) {text}", *arguments
        )
        after = dict(await connection.fetch(ROWS_READ))
        await undone.rollback()
        top = json.loads(plan)[0]["Plan"]
        kinds = ("Hit", "Read")
        buffers = sum(top[f"Shared {kind} Blocks"] for kind in kinds)
        rows = {table: number - before.get(table, 0) for table, number in after.items()}
        costs.append(Cost(buffers, rows, top["WAL Records"]))
    return costs[1:]


@asynccontextmanager
async def plans(connection: asyncpg.Connection) -> AsyncIterator[list[str]]:
    """Collect the plan of every statement that runs, those inside of functions too."""
    said: list[str] = []

    def note(_: object, message: asyncpg.PostgresLogMessage) -> None:
        said.append(message.message)

    await connection.execute(
        "LOAD 'auto_explain'; SET auto_explain.log_min_duration = 0; "
        "SET auto_explain.log_nested_statements = on; SET client_min_messages = log"
    )
    connection.add_log_listener(note)
    try:
        yield said
        await connection.execute("SELECT 1")  # whose plan comes after all others
    finally:
        connection.remove_log_listener(note)


async def fill(
    connection: asyncpg.Connection, filling: int, number: int, of: str = "resize", kinds: int = 1
) -> None:
    """Put tasks straight into their places, with ids that only this filling of a database has."""
    await connection.execute(FILL, filling << 32, number, of, kinds)
    await connection.execute("TRUNCATE windlass.lane")
    await connection.execute(LANES)


class Subject:
    """A store to be measured, its database, and a session that fills it."""

    def __init__(self, url: str, connection: asyncpg.Connection) -> None:
        self.connection = connection
        self.store = PostgresStore(PostgresOptions(url=url))
        self.probe = Probe(connection)

    async def fill(self, number: int, of: str = "resize", kinds: int = 1) -> None:
        """Put tasks straight into their places; `kinds` types share them out."""
        await fill(self.connection, next(_fillings), number, of, kinds)

    async def analyze(self) -> None:
        await self.connection.execute("ANALYZE")

    async def claim(self, limit: int = 500) -> Claim:
        answer = await self.store.claim(ask(limit))
        assert answer.claim is not None
        return answer.claim

    def start_measuring(self) -> None:
        self.store._run.pool = self.probe

    @property
    def buffers(self) -> int:
        return max(cost.buffers for cost in self.probe.costs)

    @property
    def wal_records(self) -> int:
        return max(cost.wal_records for cost in self.probe.costs)

    def rows(self, table: str) -> int:
        return max(cost.rows.get(table, 0) for cost in self.probe.costs)


def ask(
    limit: int,
    types: Sequence[str] = ("resize",),
    *,
    lane: int | None = None,
    task_id: UUID | None = None,
) -> ClaimRequest:
    return ClaimRequest(WORKER, tuple(types), limit, LEASE, AGEING, lane=lane, task_id=task_id)


def settlements(
    claim: Claim, outcome: Outcome, started_after: float | None = None
) -> list[Settlement]:
    error = ERROR if outcome in {Outcome.DEAD, Outcome.RETRIED} else None
    return [
        Settlement(claim.token, task.id, task.generation, outcome, started_after, error=error)
        for task in claim.tasks
    ]


def new_tasks(number: int, *, keys: str | None = None, delay: float = 0.0) -> list[NewTask]:
    tasks = []
    for _ in range(number):
        n = next(_numbers)
        task_id = UUID(int=0x018BCFE5_6801_7000_8000 << 48 | n)
        key = None if keys is None else f"{keys}-{n}"
        tasks.append(NewTask(task_id, "resize", "{}", idempotency_key=key, delay=delay))
    return tasks


async def work(subject: Subject, number: int, *, delay: float = 0.0) -> None:
    """Enqueue, claim and complete so many tasks."""
    for _ in range(number // 500):
        await subject.store.enqueue(new_tasks(500, delay=delay))
        if delay:
            await subject.store.promote(500)
        held = await subject.claim()
        answers = await subject.store.settle(settlements(held, Outcome.COMPLETED))
        assert answers == [Answer.APPLIED] * 500


@asynccontextmanager
async def old_snapshot(subject: Subject, url: str) -> AsyncIterator[None]:
    """A report that began before and is not done: nothing it might see can be vacuumed."""
    reader = await asyncpg.connect(url)
    try:
        await reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await reader.fetchval("SELECT count(*) FROM windlass.ready")
        yield
    finally:
        await reader.close()
