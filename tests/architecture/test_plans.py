"""What a call reads depends on what it is asked for, not on how much there is."""

from datetime import timedelta
from unittest.mock import ANY
from uuid import uuid4

import pytest

from architecture.plan_costs import (
    ERROR,
    LEASE,
    TURNS,
    WORKER,
    Subject,
    measure,
    new_tasks,
    old_snapshot,
    plans,
    settlements,
    work,
)
from windlass.model.task import (
    Answer,
    Outcome,
    Started,
    TypeDefaults,
)

pytestmark = pytest.mark.slow  # many rows, to guard what only another statement can change
OUTCOMES = [Outcome.COMPLETED, Outcome.CANCELLED, Outcome.DEAD, Outcome.RETRIED, Outcome.RELEASED]


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("analyzed", [False, True])
async def test_a_settlement_of_five_hundred_reads_five_hundred(
    full: Subject, outcome: Outcome, analyzed: bool
) -> None:
    if analyzed:
        await full.analyze()
    held = await full.claim()
    full.start_measuring()

    answers = await full.store.settle(settlements(held, outcome))

    assert answers == [Answer.APPLIED] * 500
    assert full.rows("task") <= 500
    assert full.buffers < 100 + 30 * 500


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("settings", ["", "enable_sort", "enable_mergejoin"])
async def test_completed_tasks_are_merged_with_those_there_are(
    subject: Subject, analyzed: bool, settings: str
) -> None:
    """Nested loops would read no more, and compare each with each."""
    if settings:
        await subject.connection.execute(f"SET {settings} = off")  # as a role may have it
    await subject.fill(1000)
    if analyzed:
        await subject.analyze()
    held = await subject.claim()
    subject.start_measuring()

    async with plans(subject.connection) as said:
        await subject.store.settle(settlements(held, Outcome.COMPLETED))

    found = [plan for plan in said if "Delete on task" in plan]
    assert len(found) >= TURNS
    for plan in found:
        assert "Merge Join" in plan
        assert "Index Cond: (id = ANY" in plan
        assert "Nested Loop" not in plan


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
async def test_a_report_of_running_reads_what_it_reports(full: Subject, analyzed: bool) -> None:
    if analyzed:
        await full.analyze()
    held = await full.claim()
    full.start_measuring()

    await full.store.start([Started(held.token, task.id, 1, 0.0) for task in held.tasks])

    assert full.rows("task") <= 500
    assert full.buffers < 100 + 20 * 500


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("analyzed", [False, True])
async def test_a_rescue_reads_what_it_returns(full: Subject, analyzed: bool, running: bool) -> None:
    await full.store.register_types([TypeDefaults("resize", max_age=3600.0)])
    if analyzed:
        await full.analyze()
    for _ in range(2):
        held = await full.claim()
        if running:
            await full.store.start([Started(held.token, one.id, 1, 0.0) for one in held.tasks])
    await full.connection.execute("UPDATE windlass.claim SET expires_at = now()")
    full.start_measuring()

    assert (await full.store.rescue(100)).returned == 1000

    assert full.rows("task") <= 4 * 1000
    assert full.buffers < 200 + (80 if running else 50) * 1000


MANY = 20_000


# New keys are only looked for when they are taken; those of a large call once more, since then they are its own.
@pytest.mark.parametrize(("number", "looked_at"), [(1, 0), (500, 0), (1500, 1000)])
@pytest.mark.parametrize("analyzed", [False, True])
async def test_an_enqueue_with_keys_does_not_feel_how_many_keys_there_are(
    subject: Subject, analyzed: bool, number: int, looked_at: int
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

    assert subject.rows("idempotency") == looked_at
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


# Of those that are late first some wait, some are claimed and some have ended.
EXPIRING = """
INSERT INTO windlass.expiry (task_id, expires_at)
SELECT t.id, now() - interval '1 day' + row_number() OVER (ORDER BY t.id) * interval '1 ms'
FROM windlass.task t
"""
ENDED = """
INSERT INTO windlass.expiry (task_id, expires_at)
SELECT gen_random_uuid(), now() - interval '1 day' + n * interval '1 ms' FROM generate_series(1, $1::integer) AS n
"""


async def test_a_settlement_forgets_the_expiry_of_what_it_returns(subject: Subject) -> None:
    await subject.fill(500)
    await subject.analyze()  # taken for an empty table from here on
    await subject.connection.execute(ENDED, 100_000)
    await subject.connection.execute(EXPIRING)
    held = await subject.claim()
    subject.start_measuring()

    await subject.store.settle(settlements(held, Outcome.SNOOZED, started_after=0.1))

    assert subject.rows("expiry") <= 501
    assert subject.buffers < 100 + 40 * 500


@pytest.mark.parametrize("claimed", [0, 500])
@pytest.mark.parametrize("analyzed", [False, True])
async def test_an_expiry_reads_what_it_looks_at(
    full: Subject, analyzed: bool, claimed: int
) -> None:
    await check_expiry(full, analyzed=analyzed, claimed=claimed, ended=0)


@pytest.mark.parametrize("claimed", [0, 500])
@pytest.mark.parametrize("analyzed", [False, True])
async def test_an_expiry_looks_at_no_more_if_many_have_ended(
    subject: Subject, analyzed: bool, claimed: int
) -> None:
    await subject.fill(1000)
    await check_expiry(subject, analyzed=analyzed, claimed=claimed, ended=100_000)


async def check_expiry(subject: Subject, *, analyzed: bool, claimed: int, ended: int) -> None:
    if claimed:
        await subject.claim(claimed)
    await subject.connection.execute(EXPIRING)
    await subject.connection.execute(ENDED, ended)
    if analyzed:
        await subject.analyze()
    leadership = await subject.store.lead(WORKER, current=None, term=LEASE)
    assert leadership is not None
    subject.start_measuring()

    await subject.store.expire(1000, leadership=leadership)

    assert subject.rows("expiry") <= 4 * 1000
    assert subject.rows("task") <= 6 * 1000
    assert subject.buffers < 500 + 50 * 1000


@pytest.mark.parametrize("analyzed", [False, True])
async def test_cancelling_many_reads_what_it_cancels(full: Subject, analyzed: bool) -> None:
    await full.connection.execute(
        "INSERT INTO windlass.cancel_request (task_id, reason, requested_at) "
        "SELECT gen_random_uuid(), '', now() FROM generate_series(1, 20000)"
    )
    await full.connection.execute(
        "INSERT INTO windlass.attempt (task_id, generation, attempt, ended_at, error) "
        "SELECT gen_random_uuid(), 1, 1, now(), '{}' FROM generate_series(1, 20000)"
    )
    if analyzed:
        await full.analyze()
    held = await full.claim(100)
    waiting = await full.connection.fetch("SELECT task_id FROM windlass.ready LIMIT 300")
    ids = [row[0] for row in waiting] + [task.id for task in held.tasks]
    ids += [uuid4() for _ in range(100)]
    full.start_measuring()

    await full.store.cancel_many(ids, "no need")

    assert full.rows("task") <= 4 * 500
    assert full.rows("ready") <= 4 * 500
    assert full.rows("cancel_request") <= 2 * 500
    assert full.rows("attempt") <= 500
    assert full.buffers < 500 + 60 * 500


@pytest.mark.parametrize("retried", [0, 500])
@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("place", ["ready", "scheduled"])
async def test_burying_what_waits_looks_at_so_many(
    subject: Subject, analyzed: bool, retried: int, place: str
) -> None:
    if retried:
        await subject.fill(retried)
        held = await subject.claim(retried)
        await subject.store.settle(settlements(held, Outcome.RETRIED))
    await subject.fill(20_000, of="mail")
    await subject.fill(50_000)
    if place == "scheduled":
        await subject.connection.execute(
            "WITH gone AS (DELETE FROM windlass.ready RETURNING task_id, lane, generation) "
            "INSERT INTO windlass.scheduled SELECT *, now() + interval '1 hour' FROM gone"
        )
    await subject.store.stop_retries("resize", "stop")
    if analyzed:
        await subject.analyze()
    subject.start_measuring()

    store = subject.store
    bury = store.bury_scheduled if place == "scheduled" else store.bury_ready
    assert await bury("resize", 1000) == (retried, ANY)

    assert subject.rows(place) <= 10_000 + 2 * retried
    assert subject.rows("task") <= 2 * retried
    assert subject.rows("attempt") <= 3 * retried
    assert subject.buffers < 10_500 + 80 * retried


@pytest.mark.parametrize("analyzed", [False, True])
async def test_a_look_for_unknown_types_reads_a_task_of_each_lane(
    subject: Subject, analyzed: bool
) -> None:
    await subject.fill(20_000, kinds=10)
    if analyzed:
        await subject.analyze()
    subject.start_measuring()

    assert len(await subject.store.unknown_types()) == 10

    assert subject.rows("ready") <= 10
    assert subject.buffers < 200


@pytest.mark.parametrize("ready_for", [timedelta(0), timedelta(hours=1)])
@pytest.mark.parametrize("analyzed", [False, True])
async def test_failing_unknown_types_reads_what_it_fails(
    subject: Subject, analyzed: bool, ready_for: timedelta
) -> None:
    await subject.fill(20_000)
    if analyzed:
        await subject.analyze()
    text = subject.store._sql.statement("fail_unknown")

    costs = await measure(
        subject.connection, text, "resize", ERROR, ready_for, 500, 30 * LEASE, LEASE
    )

    assert max(cost.rows["ready"] for cost in costs) <= 4 * 500
    assert max(cost.rows["task"] for cost in costs) <= 2 * 500
    assert max(cost.buffers for cost in costs) < 100 + 60 * 500


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
        *(None, False, None),
    )

    assert max(cost.rows["claim"] for cost in costs) <= 80
    assert max(cost.buffers for cost in costs) < 1000


SCHEDULES, SLOTS = 30, 300
KEPT = """
INSERT INTO windlass.schedule (
    name, owner, cron, timezone, task, overlap, catch_up, jitter, registered_at, decided_until, look_at
)
SELECT 's' || n, 'shop', '* * * * *', 'UTC', '{}', 'skip', 1, '0', now(), now(), now()
FROM generate_series(1, $1::integer) AS n
"""
WRITTEN = """
INSERT INTO windlass.slot (schedule, slot_at, state, decided_at, reason)
SELECT s.name, now() - m * interval '1 minute', 'skipped', now(), 'missed'
FROM windlass.schedule s, generate_series(1, $1::integer) AS m
"""


@pytest.mark.parametrize("analyzed", [False, True])
async def test_slots_are_pruned_by_a_look_at_each_schedule(
    subject: Subject, analyzed: bool
) -> None:
    if not analyzed:
        await subject.analyze()  # taken for empty tables from here on
    await subject.connection.execute(KEPT, SCHEDULES)
    await subject.connection.execute(WRITTEN, SLOTS)
    if analyzed:
        await subject.analyze()
    text = subject.store._sql.statement("prune_slots")

    costs = await measure(subject.connection, text, SLOTS, 10, timedelta(days=7))

    assert max(cost.rows["slot"] for cost in costs) <= 3 * SCHEDULES * SLOTS
    assert max(cost.buffers for cost in costs) <= 3 * SCHEDULES * SLOTS


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

    assert {"claim_batches", "claim_lane", "claim_one", "enqueue_tasks", "settle_batch"} <= {
        row["proname"] for row in pinned
    }
    for row in pinned:
        assert "jit=off" in row["proconfig"], row["proname"]
