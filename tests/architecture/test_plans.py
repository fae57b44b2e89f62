"""What a call reads depends on what it is asked for, not on how much there is."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import asyncpg
import pytest

from contract.postgres_clock import PostgresClock
from windlass.model.task import (
    Answer,
    Claim,
    ClaimRequest,
    NewTask,
    Outcome,
    Settlement,
    Started,
)
from windlass.store.postgres import cursors
from windlass.store.postgres.store import PostgresOptions, PostgresStore

WORKER = UUID(int=1)
LEASE = timedelta(seconds=30)
AGEING = timedelta(seconds=6)
ERROR = '{"type": "ValueError", "message": "no such image"}'
TURNS = 8  # more than the five after which PostgreSQL may settle for a generic plan

_numbers = count(1)
_fillings = count(1)  # of their own: an id has room for 65,535

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


class Subject:
    """A store to be measured, its database, and a session that fills it."""

    def __init__(self, url: str, connection: asyncpg.Connection) -> None:
        self.connection = connection
        self.store = PostgresStore(PostgresOptions(url=url))
        self.probe = Probe(connection)

    async def fill(self, number: int, of: str = "resize", kinds: int = 1) -> None:
        """Put tasks straight into their places; `kinds` types share them out."""
        first = next(_fillings) << 32
        await self.connection.execute(FILL, first, number, of, kinds)
        await self.connection.execute("TRUNCATE windlass.lane")
        await self.connection.execute(LANES)

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


@pytest.fixture
async def subject(database_url: str) -> AsyncIterator[Subject]:
    connection = await asyncpg.connect(database_url, server_settings={"jit": "off"})
    # Autovacuum would come and go as it likes.
    for table in ("task", "ready", "scheduled", "claim", "claim_task"):
        await connection.execute(f"ALTER TABLE windlass.{table} SET (autovacuum_enabled = off)")
    subject = Subject(database_url, connection)
    await subject.store.open()
    await subject.store._history.prepare()
    pool = subject.store._run.pool
    yield subject
    subject.store._run.pool = pool
    await subject.store.close()
    await connection.close()


def ask(limit: int, types: Sequence[str] = ("resize",), *, lane: int | None = None) -> ClaimRequest:
    return ClaimRequest(WORKER, tuple(types), limit, LEASE, AGEING, lane=lane)


def settlements(claim: Claim, outcome: Outcome) -> list[Settlement]:
    error = ERROR if outcome in {Outcome.DEAD, Outcome.RETRIED} else None
    return [
        Settlement(claim.token, task.id, task.generation, outcome, error=error)
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


# Claims


async def test_a_claim_does_not_feel_a_million_pending_tasks(subject: Subject) -> None:
    await subject.fill(1_000_000)
    for is_analyzed in (False, True):
        if is_analyzed:
            await subject.analyze()
        subject.start_measuring()

        for limit in (1, 100, 500):
            subject.probe.costs.clear()
            await subject.store.claim(ask(limit))

            assert subject.buffers < 100 + 15 * limit
            assert subject.rows("ready") < 10 + 5 * limit
            assert subject.rows("task") <= limit


async def test_a_claim_of_a_named_lane_does_not_feel_a_million_pending_tasks(
    subject: Subject,
) -> None:
    lane = await subject.connection.fetchval(LANE, "resize")
    subject.start_measuring()
    await subject.store.claim(ask(1, lane=lane))  # the plans are made while all is empty
    await subject.fill(500_000)
    await subject.fill(500_000, of="foreign")
    for is_analyzed in (False, True):
        if is_analyzed:
            await subject.analyze()

        for limit in (1, 100, 500):
            subject.probe.costs.clear()
            await subject.store.claim(ask(limit, lane=lane))

            assert subject.buffers < 50 + 15 * limit
            assert subject.rows("ready") < 10 + 5 * limit
            assert subject.rows("task") <= limit


async def test_a_claim_does_not_feel_tasks_of_a_foreign_type_in_front(subject: Subject) -> None:
    await subject.fill(200_000, of="foreign")
    await subject.fill(1000)
    await subject.analyze()
    subject.start_measuring()

    await subject.store.claim(ask(100))

    assert subject.buffers < 100 + 15 * 100
    assert subject.rows("ready") < 10 + 5 * 100


async def test_plans_that_were_made_while_all_was_empty_serve_when_it_is_full(
    subject: Subject,
) -> None:
    subject.start_measuring()
    await subject.fill(1)
    await subject.store.settle(settlements(await subject.claim(), Outcome.COMPLETED))
    await subject.fill(100_000)
    subject.probe.costs.clear()
    claim = await subject.claim(500)
    to_claim = subject.buffers
    subject.probe.costs.clear()
    await subject.store.settle(settlements(claim, Outcome.COMPLETED))
    to_settle = subject.buffers

    assert to_claim < 100 + 15 * 500
    assert to_settle < 100 + 25 * 500


async def test_a_task_is_claimed_and_completed_with_few_records_of_wal(subject: Subject) -> None:
    await subject.fill(2000)
    await subject.analyze()
    claim = await subject.claim(500)
    subject.start_measuring()

    await subject.store.claim(ask(500))
    to_claim = subject.wal_records
    subject.probe.costs.clear()
    await subject.store.settle(settlements(claim, Outcome.COMPLETED))
    to_complete = subject.wal_records

    assert to_claim < 2.1 * 500 + 30  # a lock and a deletion
    assert to_complete < 3.1 * 500 + 30  # a deletion, a row, and its entry in the index


@pytest.mark.parametrize("limit", [1, 500])
async def test_a_claim_from_three_hundred_lanes_reads_a_little_of_each(
    subject: Subject, limit: int
) -> None:
    await subject.fill(300_000, kinds=300)
    await subject.analyze()
    types = [f"resize{kind}" for kind in range(300)]
    subject.start_measuring()

    await subject.store.claim(ask(limit, types))

    assert subject.buffers < 10 * 300 + 15 * limit
    assert subject.rows("ready") < 2 * 300 + 5 * limit


async def test_a_claim_that_finds_three_hundred_lanes_empty_reads_a_little_of_each(
    subject: Subject,
) -> None:
    await subject.fill(300, kinds=300)
    types = [f"resize{kind}" for kind in range(300)]
    await subject.store.claim(ask(500, types))
    subject.start_measuring()

    assert (await subject.store.claim(ask(500, types))).claim is None

    assert subject.buffers < 10 * 300


OLD_LANES = """
INSERT INTO windlass.lane (lane, queue, type, priority, kind, listed_at)
SELECT n, 'tenant' || n, 'resize', 50, 0, now() - interval '2 hours'
FROM generate_series(1, 3000) AS n
"""


@pytest.mark.parametrize("analyzed", ["when empty", "when full"])
async def test_lanes_that_rest_cost_a_claim_nothing_and_tidying_a_look_each(
    subject: Subject, analyzed: str
) -> None:
    if analyzed == "when empty":
        await work(subject, 1000)
        await subject.analyze()
    await subject.fill(50_000)
    await subject.connection.execute(OLD_LANES)
    if analyzed == "when full":
        await subject.analyze()
    sql = subject.store._sql

    (retire, *_) = await measure(
        subject.connection, sql.statement("retire_lanes"), timedelta(hours=1)
    )
    await subject.connection.execute(sql.statement("retire_lanes"), timedelta(hours=1))
    (relist, *_) = await measure(subject.connection, sql.statement("relist_busy_lanes"))
    subject.start_measuring()
    await subject.claim(10)

    assert retire.rows["ready"] + relist.rows["ready"] < 100
    assert retire.buffers + relist.buffers < 50 * 3000
    assert subject.rows("lane") <= 1
    assert subject.buffers < 100 + 15 * 10


@pytest.mark.usefixtures("no_foreign_writers")
async def test_a_claim_that_asks_for_late_tasks_reads_only_those(
    subject: Subject, database_url: str
) -> None:
    producer = await asyncpg.connect(database_url)
    await producer.execute("BEGIN")
    await producer.fetchval("SELECT pg_current_xact_id()")
    await subject.fill(20_000)
    await subject.claim()
    await subject.claim()  # goes past the open transaction
    await producer.execute("COMMIT")
    await producer.close()
    await subject.claim()  # notices its end
    assert subject.store._cursors[False].begin()[1]
    subject.start_measuring()

    await subject.claim(10)

    assert subject.rows("ready") < 10 + 5 * 10
    assert subject.buffers < 500


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


@pytest.fixture
def no_foreign_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pass at once what other tests write at the same time: it holds the bound for a second."""
    monkeypatch.setattr(cursors, "PASS_AFTER", 0.0)


@pytest.mark.usefixtures("no_foreign_writers")
async def test_a_claim_does_not_walk_over_what_was_taken_under_an_old_snapshot(
    subject: Subject, database_url: str
) -> None:
    async with old_snapshot(subject, database_url):
        await work(subject, 20_000)
        await subject.store.enqueue(new_tasks(500))
        subject.start_measuring()

        held = await subject.claim(1)
        moved = subject.buffers
        subject.probe.costs.clear()
        (lane,) = subject.store._cursors[False].bounds
        named = await subject.store.claim(ask(1, lane=lane))
        moved_in_one = subject.buffers
        subject.probe.costs.clear()
        another = PostgresStore(PostgresOptions(url=database_url))
        another._run.pool = subject.probe
        await another.claim(ask(1))
        from_the_beginning = subject.buffers
        await another.close()

        assert len(held.tasks) == 1
        assert named.claim is not None
        assert moved < 100
        assert moved_in_one < 70
        assert from_the_beginning > 5 * moved  # or this test would prove nothing


@pytest.mark.usefixtures("no_foreign_writers")
async def test_a_claim_does_not_walk_over_what_was_promoted_under_an_old_snapshot(
    subject: Subject, database_url: str
) -> None:
    async with old_snapshot(subject, database_url):
        await work(subject, 20_000, delay=1e-6)
        await subject.store.enqueue(new_tasks(500))
        clock = await PostgresClock.install(database_url)
        await clock.advance(timedelta(minutes=1))
        await clock.close()
        subject.start_measuring()

        await subject.store.claim(ask(1))

        assert subject.buffers < 100


# What else is done for every task


OUTCOMES = [Outcome.COMPLETED, Outcome.CANCELLED, Outcome.DEAD, Outcome.RETRIED, Outcome.RELEASED]


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("analyzed", [False, True])
async def test_a_settlement_of_five_hundred_reads_five_hundred(
    subject: Subject, outcome: Outcome, analyzed: bool
) -> None:
    await subject.fill(100_000)
    if analyzed:
        await subject.analyze()
    held = await subject.claim()
    subject.start_measuring()

    answers = await subject.store.settle(settlements(held, outcome))

    assert answers == [Answer.APPLIED] * 500
    assert subject.rows("task") <= 500
    assert subject.buffers < 100 + 30 * 500


async def test_a_settlement_under_an_old_snapshot_costs_the_same(
    subject: Subject, database_url: str
) -> None:
    async with old_snapshot(subject, database_url):
        await work(subject, 20_000)
        await subject.store.enqueue(new_tasks(500))
        held = await subject.claim()
        subject.start_measuring()

        await subject.store.settle(settlements(held, Outcome.COMPLETED))

        assert subject.buffers < 100 + 30 * 500


@pytest.mark.parametrize("analyzed", [False, True])
async def test_a_report_of_running_reads_what_it_reports(subject: Subject, analyzed: bool) -> None:
    await subject.fill(100_000)
    if analyzed:
        await subject.analyze()
    held = await subject.claim()
    subject.start_measuring()

    await subject.store.start([Started(held.token, task.id, 1, 0.0) for task in held.tasks])

    assert subject.rows("task") <= 500
    assert subject.buffers < 100 + 20 * 500


@pytest.mark.parametrize("analyzed", [False, True])
async def test_a_rescue_reads_what_it_returns(subject: Subject, analyzed: bool) -> None:
    await subject.fill(100_000)
    if analyzed:
        await subject.analyze()
    for _ in range(2):
        await subject.claim()
    await subject.connection.execute("UPDATE windlass.claim SET expires_at = now()")
    subject.start_measuring()

    assert (await subject.store.rescue(100)).returned == 1000

    assert subject.rows("task") <= 4 * 1000
    assert subject.buffers < 200 + 50 * 1000


MANY = 20_000


@pytest.mark.parametrize("number", [1, 500])
@pytest.mark.parametrize("analyzed", [False, True])
async def test_an_enqueue_with_keys_does_not_feel_how_many_keys_there_are(
    subject: Subject, analyzed: bool, number: int
) -> None:
    await subject.fill(1)
    if not analyzed:
        await subject.store.enqueue(new_tasks(1, keys="first"))
        await subject.analyze()  # taken for tables of one row from here on
    await subject.connection.execute(
        "INSERT INTO windlass.idempotency (type, key, task_id, fingerprint) "
        f"SELECT 'resize', 'old-' || n, gen_random_uuid(), 0 FROM generate_series(1, {MANY}) AS n"
    )
    if analyzed:
        await subject.analyze()
    subject.start_measuring()

    await subject.store.enqueue(new_tasks(number, keys="new"))

    assert subject.rows("idempotency") <= 4 * number
    assert subject.buffers < 500 + 50 * number


@pytest.mark.parametrize("analyzed", [False, True])
async def test_an_enqueue_that_is_repeated_does_not_feel_how_many_tasks_there_are(
    subject: Subject, analyzed: bool
) -> None:
    if not analyzed:
        await subject.fill(1)
        await subject.analyze()
    await subject.fill(MANY)
    if analyzed:
        await subject.analyze()
    tasks = new_tasks(500)
    await subject.store.enqueue(tasks)
    subject.start_measuring()

    answers = await subject.store.enqueue(tasks, repeated=True)

    assert [answer.id for answer in answers] == [task.id for task in tasks]
    assert subject.rows("task") <= 500
    assert subject.buffers < 500 + 50 * 500


@pytest.mark.parametrize("analyzed", [False, True])
async def test_a_plain_enqueue_by_sql_does_not_feel_what_is_there(
    subject: Subject, analyzed: bool
) -> None:
    add = "SELECT windlass.enqueue('resize1', '{\"image\": \"a.png\"}')"
    if not analyzed:
        await subject.analyze()  # taken for empty tables from here on
        await subject.connection.execute(add)  # and its plans are made
    await subject.fill(MANY, kinds=1000)
    await subject.connection.execute(
        "INSERT INTO windlass.task_type (name, queue, priority, max_attempts, registered_at) "
        f"SELECT 'resize' || n, 'default', 10, 4, now() FROM generate_series(1, {MANY}) AS n"
    )
    if analyzed:
        await subject.analyze()

    costs = await measure(subject.connection, add)

    assert max(cost.buffers for cost in costs) < 50
    assert max(cost.wal_records for cost in costs) < 10
    for cost in costs:
        read = {table: number for table, number in cost.rows.items() if number}
        assert read == {"lane": 1, "setting": 1, "task_type": 1}


@pytest.mark.parametrize("analyzed", [False, True])
async def test_a_promotion_reads_what_it_promotes(subject: Subject, analyzed: bool) -> None:
    await subject.fill(1)
    await subject.connection.execute(
        "INSERT INTO windlass.scheduled (task_id, lane, generation, due) "
        "SELECT gen_random_uuid(), 1, 1, now() + (n - 1000) * interval '1 second' "
        "FROM generate_series(1, 100000) AS n"
    )
    if analyzed:
        await subject.analyze()
    subject.start_measuring()

    assert await subject.store.promote(500) == 500

    assert subject.rows("scheduled") <= 1500
    assert subject.buffers < 100 + 30 * 500


@pytest.mark.parametrize("patience", [None, LEASE])
async def test_a_pulse_reads_the_claims_it_keeps(
    subject: Subject, patience: timedelta | None
) -> None:
    await subject.connection.execute(
        "INSERT INTO windlass.claim (token, worker_id, claimed_at, expires_at, remaining) "
        "SELECT gen_random_uuid(), $1, now(), now() + interval '1 hour', 1 "
        "FROM generate_series(1, 20000)",
        uuid4(),
    )
    await subject.analyze()
    rows = await subject.connection.fetch("SELECT token FROM windlass.claim LIMIT 20")
    tokens = [row["token"] for row in rows]

    costs = await measure(
        subject.connection,
        subject.store._sql.statement("pulse"),
        WORKER,
        tokens,
        LEASE,
        0,
        False,
        patience,
        True,
    )

    assert max(cost.rows["claim"] for cost in costs) <= 80
    assert max(cost.buffers for cost in costs) < 1000


async def test_tables_analysed_while_they_were_empty_are_not_read_whole(subject: Subject) -> None:
    await work(subject, 1000)
    await subject.analyze()  # taken for tables of one row from here on
    await subject.fill(20_000)
    subject.start_measuring()
    held = await subject.claim()
    claimed = subject.rows("task"), subject.rows("ready")
    subject.start_measuring()

    answers = await subject.store.settle(settlements(held, Outcome.COMPLETED))

    assert set(answers) == {Answer.APPLIED}
    assert max(claimed) <= 3 * 500
    assert subject.rows("task") <= 3 * 500
    subject.probe.costs.clear()

    lost = await subject.claim()
    await subject.store.start([Started(lost.token, task.id, 1, 0.0) for task in lost.tasks])
    await subject.connection.execute("UPDATE windlass.claim SET expires_at = now()")
    assert (await subject.store.rescue(100)).lost_attempts == 500

    assert subject.rows("task") <= 4 * 500
    assert subject.rows("running") <= 4 * 500


async def test_functions_with_pinned_plans_are_never_compiled(subject: Subject) -> None:
    """Before PostgreSQL 18, a plan that must do what is switched off seems dear enough for it."""
    pinned = await subject.connection.fetch(
        "SELECT proname, proconfig FROM pg_proc "
        "WHERE pronamespace = 'windlass'::regnamespace AND 'enable_seqscan=off' = ANY (proconfig)"
    )

    assert {"claim_batches", "claim_lane", "enqueue_tasks", "settle_batch"} <= {
        row["proname"] for row in pinned
    }
    for row in pinned:
        assert "jit=off" in row["proconfig"], row["proname"]
