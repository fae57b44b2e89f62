"""Dead letters where there are very many, and what a search of them may cost."""

from uuid import UUID

import asyncpg
import pytest

from contract.postgres_keeper import DAY, NOON, Keeper
from contract.postgres_sessions import Sessions, bury, granted
from windlass.model.dead import DeadFilter, Replay, ReplayAnswer
from windlass.model.errors import ConfigurationError
from windlass.model.task import Outcome, Settlement
from windlass.store.postgres import dead as dead_module
from windlass.store.postgres.store import PostgresStore

# One of them is of the queue `rare`: that which ended first.
MANY = """
INSERT INTO windlass.dead (
    id, type, queue, status, priority, max_attempts, attempts, generation, drop_on, created_at,
    scheduled_for, completed_at, payload, last_error, errors
)
SELECT
    gen_random_uuid(), 'resize', CASE n WHEN 1 THEN 'rare' ELSE 'usual' END, 'dead', 10, 4, 4, 4,
    '2027-05-01', '2027-03-03', '2027-03-03', timestamptz '2027-03-03' + n * interval '1 second', '{}',
    'no', jsonb_build_array(jsonb_build_object('type', 'ValueError', 'message', 'no', 'ended_at',
        '2027-03-03T00:00:00Z'))
FROM generate_series(1, $1::integer) AS n
"""
QUEUE = "CASE n WHEN 1 THEN 'rare' ELSE 'usual' END"  # of each of them
LINEAGE = "SELECT count(*) FROM windlass.replay"


async def test_a_page_looks_at_so_many_and_says_how_far_it_came(
    store: PostgresStore, sql_url: str
) -> None:
    connection = await asyncpg.connect(sql_url)
    await connection.execute(MANY, 10_001)
    oldest = await connection.fetchval("SELECT id FROM windlass.dead WHERE queue = 'rare'")
    second = await connection.fetchval(
        "SELECT completed_at FROM windlass.dead ORDER BY completed_at OFFSET 1 LIMIT 1"
    )
    await connection.close()

    first = await store.find_dead(DeadFilter(queue="rare"))
    rest = await store.find_dead(DeadFilter(queue="rare", after=first.rest))

    assert (first.ids, first.looked_back_to) == ([], second)
    assert (rest.ids, rest.rest, rest.looked_back_to) == ([oldest], None, None)


async def test_a_pattern_that_takes_too_long_is_given_up(
    store: PostgresStore, sql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = await asyncpg.connect(sql_url)
    await connection.execute(MANY, 10_000)
    await connection.close()
    monkeypatch.setattr(dead_module, "SEARCH_WITHIN", 0.001)

    with pytest.raises(ConfigurationError, match=r"'\(x\+x\+\)\+y' could not be looked for"):
        await store.find_dead(DeadFilter(error="(x+x+)+y"))


async def test_a_page_is_read_by_indexes_alone(store: PostgresStore, sql_url: str) -> None:
    connection = await asyncpg.connect(sql_url)
    await connection.execute(MANY, 2000)
    await connection.execute("ANALYZE windlass.dead")
    await connection.close()
    asked = (None, "rare", None, "transient", "gate", True, 2)
    times = (NOON + 9000 * DAY, UUID(int=0), NOON - 9000 * DAY, 50)

    async with store._run.transaction("begin_listing") as session:
        await session.execute(store._sql.statement("pin_listing_plans"))
        text = f"EXPLAIN (VERBOSE) {store._sql.statement('find_dead')}"
        plan = "\n".join(row[0] for row in await session.fetch(text, *asked, *times))

    assert "Index Scan Backward using dead_ended" in plan
    # Each letter is looked up: to hash what was replayed, all of it would be read.
    for absent in ("Seq Scan", "hashed SubPlan", "Sort"):
        assert absent not in plan


# What one session has read of them by any index, in its transaction.
READ = "SELECT idx_tup_fetch + seq_tup_read FROM pg_stat_xact_user_tables WHERE relname = 'dead'"


@pytest.mark.parametrize("plans", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("analyzed", [False, True])
async def test_a_batch_above_the_limit_reads_what_is_kept_and_not_what_there_is(
    store: PostgresStore, sql_url: str, analyzed: bool, plans: str
) -> None:
    connection = await asyncpg.connect(sql_url)
    await connection.execute("ALTER TABLE windlass.dead SET (autovacuum_enabled = off)")
    await connection.execute(MANY, 30_000)
    if analyzed:
        await connection.execute("ANALYZE windlass.dead")
    await connection.close()

    async with store._run.transaction("pin_listing_plans") as session:
        await session.execute(f"SET LOCAL plan_cache_mode = {plans}")
        text = store._sql.statement("surplus_dead")
        rows = await session.fetch(text, ["usual"], 500, 100)
        read = await session.fetchval(READ)

    assert len(rows) == 100
    assert read < 1000


async def test_a_batch_above_the_limit_of_many_queues_reads_little_of_each(
    store: PostgresStore, sql_url: str
) -> None:
    connection = await asyncpg.connect(sql_url)
    await connection.execute(MANY.replace(QUEUE, "'q' || n % 50"), 30_000)
    await connection.close()
    queues = await store.crowded_queues(500)
    assert len(queues) == 50

    async with store._run.transaction("pin_listing_plans") as session:
        text = store._sql.statement("surplus_dead")
        before = await session.fetchval(READ)  # to count them, which may not be told yet
        rows = await session.fetch(text, queues, 500, 10)
        read = await session.fetchval(READ) - before

    assert len(rows) == 10
    assert read < 50 * 600


async def test_very_large_payloads_are_replayed_in_parts(
    store: PostgresStore, sessions: Sessions
) -> None:
    sizes = [40, 40, 1]  # megabytes, of which one part holds 64
    replays = [Replay(await bury(store), UUID(int=number)) for number in (7, 8, 9)]
    await sessions.watcher.execute("SET session_replication_role = replica")
    for size, replay in zip(sizes, replays, strict=True):
        await sessions.watcher.execute(
            "UPDATE windlass.dead SET payload = NULL WHERE id = $1", replay.ancestor
        )
        await sessions.watcher.execute(
            "INSERT INTO windlass.large_payload SELECT $1, "
            "jsonb_build_object('a', repeat('x', 1000000 * $2::integer))::text",
            *(replay.ancestor, size),
        )

    answers = await store.replay(replays)

    written = await sessions.watcher.fetch(
        "SELECT length(payload) / 1000000 FROM windlass.large_payload "
        "WHERE task_id = ANY ($1) ORDER BY task_id",
        [replay.id for replay in replays],
    )
    assert [one.answer for one in answers] == [ReplayAnswer.REPLAYED] * 3
    assert [row[0] for row in written] == sizes
    assert await granted(store) == [replay.id for replay in replays]


async def test_lineage_goes_with_the_last_of_both_records(keeper: Keeper) -> None:
    await keeper.prepare()
    letter = await keeper.end(Outcome.DEAD)
    (answer,) = await keeper.store.replay([Replay(letter, UUID(int=7))])
    held = await keeper.claim()
    await keeper.store.settle(
        [Settlement(held.token, held.tasks[0].id, held.tasks[0].generation, Outcome.COMPLETED)]
    )

    await keeper.at(NOON + 10 * DAY)
    await keeper.retain()
    kept = await keeper.watcher.fetchval(LINEAGE)
    await keeper.at(NOON + 40 * DAY)
    await keeper.retain()

    assert answer.answer is ReplayAnswer.REPLAYED
    assert (kept, await keeper.watcher.fetchval(LINEAGE)) == (1, 0)
