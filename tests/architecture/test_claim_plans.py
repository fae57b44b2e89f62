"""What a claim reads depends on how much it is asked for, not on how much there is."""

from datetime import timedelta

import asyncpg
import pytest

from architecture.plan_costs import (
    LANE,
    TURNS,
    Subject,
    ask,
    measure,
    new_tasks,
    old_snapshot,
    settlements,
    work,
)
from contract.postgres_clock import PostgresClock
from windlass.model.task import (
    Outcome,
)
from windlass.store.postgres.cursors import BEGINNING, Key
from windlass.store.postgres.store import PostgresOptions, PostgresStore

pytestmark = pytest.mark.slow  # many rows, to guard what only another statement can change
very_many = pytest.mark.parametrize("pending", [100_000, 1_000_000])


@very_many
async def test_a_claim_does_not_feel_how_many_tasks_are_pending(
    subject: Subject, pending: int
) -> None:
    await subject.fill(pending)
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


@very_many
async def test_a_claim_of_a_named_lane_does_not_feel_how_many_tasks_are_pending(
    subject: Subject, pending: int
) -> None:
    lane = await subject.connection.fetchval(LANE, "resize")
    subject.start_measuring()
    await subject.store.claim(ask(1, lane=lane))  # the plans are made while all is empty
    await subject.fill(pending // 2)
    await subject.fill(pending // 2, of="foreign")
    for is_analyzed in (False, True):
        if is_analyzed:
            await subject.analyze()

        for limit in (1, 100, 500):
            subject.probe.costs.clear()
            await subject.store.claim(ask(limit, lane=lane))

            assert subject.buffers < 50 + 15 * limit
            assert subject.rows("ready") < 10 + 5 * limit
            assert subject.rows("task") <= limit


async def test_a_claim_of_a_named_task_does_not_feel_how_many_tasks_are_pending(
    subject: Subject,
) -> None:
    await subject.fill(3)
    await subject.analyze()
    subject.start_measuring()
    await claim_first(subject)  # the plans are made while there is next to nothing
    await subject.fill(100_000)
    await subject.fill(100_000, of="foreign")
    for is_analyzed in (False, True):
        if is_analyzed:
            await subject.analyze()

        await claim_first(subject)
        assert subject.buffers < 60
        assert subject.rows("ready") <= 4
        assert subject.rows("task") <= 1

        last = await subject.connection.fetchval(
            "SELECT task_id FROM windlass.ready ORDER BY x DESC, n DESC LIMIT 1"
        )
        subject.probe.costs.clear()
        lane = await subject.connection.fetchval(LANE, "foreign")
        answer = await subject.store.claim(ask(1, ("foreign",), lane=lane, task_id=last))
        assert answer.claim is not None
        assert answer.claim.tasks[0].id != last  # others are before it
        assert subject.buffers < 70


async def claim_first(subject: Subject, bound: Key = BEGINNING) -> None:
    """Claim the first task of its lane by its name."""
    task_id = await subject.connection.fetchval(
        "SELECT r.task_id FROM windlass.ready r JOIN windlass.task t ON t.id = r.task_id "
        "WHERE t.type = 'resize' AND (r.x, r.n) > ($1::text::xid8, $2) ORDER BY r.x, r.n LIMIT 1",
        *(str(bound.x), bound.n),
    )
    subject.probe.costs.clear()
    lane = await subject.connection.fetchval(LANE, "resize")
    answer = await subject.store.claim(ask(1, lane=lane, task_id=task_id))
    assert answer.claim is not None
    assert [task.id for task in answer.claim.tasks] == [task_id]
    assert len(subject.probe.costs) == TURNS - 1  # of one statement


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


async def test_a_claim_from_three_hundred_lanes_reads_a_little_of_each(subject: Subject) -> None:
    await subject.fill(300_000, kinds=300)
    await subject.analyze()
    types = [f"resize{kind}" for kind in range(300)]
    subject.start_measuring()

    for limit in (1, 500):
        subject.probe.costs.clear()
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
        (bound,) = subject.store._cursors[False].bounds.values()
        await claim_first(subject, bound)
        by_name = subject.buffers
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
        assert by_name < 60
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
