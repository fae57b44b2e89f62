"""Large payloads rest apart from their tasks: written once, found everywhere, gone with the task."""

import json
import random
from datetime import timedelta
from uuid import uuid4

import asyncpg

from contract.pgbouncer import store_options
from contract.postgres_keeper import DAY, NOON, Keeper
from windlass.model.task import Enqueued, NewTask, Outcome, Settlement, TaskFilter
from windlass.store.postgres.store import PostgresStore

LARGEST_INLINE = '{"a": "' + "x" * 1991 + '"}'  # 2,000 bytes
LARGE = '{"a": "' + "x" * 1992 + '"}'
WHERE = "SELECT ctid, xmin FROM windlass.large_payload WHERE task_id = $1"
ROW_BYTES = "SELECT sum(pg_column_size(h.*)) FROM windlass.history h WHERE h.id = $1"
APART = "SELECT count(*) FROM windlass.large_payload"


def text_of(size: int) -> str:
    """What cannot be compressed."""
    return json.dumps({"text": random.Random(7).randbytes(size // 2).hex()})


async def test_only_large_payloads_are_kept_apart(keeper: Keeper) -> None:
    await keeper.enqueue(payload=LARGEST_INLINE)
    await keeper.enqueue(payload=LARGEST_INLINE, tags=("red",))
    inline = await keeper.watcher.fetchval(APART)
    await keeper.enqueue(payload=LARGE)
    await keeper.enqueue(payload=LARGE, tags=("red",))

    assert len(LARGE) == len(LARGEST_INLINE) + 1
    assert inline == 0
    assert await keeper.watcher.fetchval(APART) == 2


async def test_a_large_payload_is_not_written_again_when_its_task_ends(keeper: Keeper) -> None:
    size = 100_000
    task = await keeper.enqueue(payload=text_of(size))
    where = await keeper.watcher.fetchrow(WHERE, task.id)

    claimed = await keeper.claim()
    assert len(claimed.tasks[0].payload) > size
    await keeper.store.settle([Settlement(claimed.token, task.id, 1, Outcome.COMPLETED)])

    assert (await keeper.store.get(task.id)).status == "completed"
    assert await keeper.watcher.fetchrow(WHERE, task.id) == where
    assert await keeper.watcher.fetchval(ROW_BYTES, task.id) < 1000


async def test_large_payloads_go_with_their_task_and_not_before(keeper: Keeper) -> None:
    kept = timedelta(0)
    for outcome in (Outcome.COMPLETED, Outcome.CANCELLED, Outcome.DEAD):
        await keeper.end(outcome, payload=LARGE, retention=kept)
    reopened = await keeper.end(Outcome.CANCELLED, payload=LARGE, retention=kept)
    await keeper.end(payload=LARGE, retention=40 * DAY)
    await keeper.end(retention=kept)
    await keeper.store.retry(reopened)
    before = await keeper.watcher.fetchval(APART)

    await keeper.retain()
    still = await keeper.watcher.fetchval(APART)
    await keeper.at(NOON + DAY)
    await keeper.retain()

    assert before == still == 5
    assert await keeper.watcher.fetchval(APART) == 2


async def test_an_enqueue_that_is_repeated_keeps_its_large_payload_once(
    store: PostgresStore,
) -> None:
    task = NewTask(uuid4(), "resize", LARGE)
    await store.enqueue([task])

    (answer,) = await store.enqueue([task], repeated=True)

    assert answer == Enqueued(task.id, created=True)
    assert (await store.get(task.id)).payload == json.loads(LARGE)


async def test_a_call_that_its_key_answers_leaves_no_payload(keeper: Keeper) -> None:
    await keeper.enqueue(payload=LARGE, idempotency_key="k")

    again = await keeper.enqueue(payload=LARGE, idempotency_key="k")

    assert not again.created
    assert await keeper.watcher.fetchval(APART) == 1


CLAIM_OF_BEFORE = """
SELECT id, payload, read_lanes IS NOT NULL AS is_report, cancel_reason, waited >= 0 AS has_waited
FROM windlass.claim_tasks(
    $1, $2, '{resize}', NULL, 10, interval '30 seconds', interval '6 seconds', false, '{}', '{}', '{}', '{}'
)
"""


async def test_a_process_of_before_claims_large_payloads_too(keeper: Keeper) -> None:
    small, large = [await keeper.enqueue(payload=payload) for payload in ("{}", LARGE)]

    report, *tasks = await keeper.watcher.fetch(CLAIM_OF_BEFORE, uuid4(), uuid4())

    assert tuple(report)[:3] == (None, None, True)
    assert [(task["id"], json.loads(task["payload"])) for task in tasks] == [
        (small.id, {}),
        (large.id, json.loads(LARGE)),
    ]
    assert all(task["has_waited"] and not task["is_report"] for task in tasks)


BEFORE = 11  # the number of the migration that keeps them apart
WRITTEN_BEFORE = """
SELECT windlass.enqueue_many(jsonb_build_array(
    jsonb_build_object('type', 'resize', 'payload', jsonb_build_object('a', repeat('x', 5000)))
));
CREATE ROLE {role} NOLOGIN;
GRANT SELECT, INSERT ON windlass.task TO {role};
GRANT SELECT ON windlass.task TO PUBLIC;
"""


async def test_tasks_and_rights_from_before_are_carried_over(
    empty_database_url: str, empty_sql_url: str
) -> None:
    store = PostgresStore(store_options(empty_database_url))
    old = [each for each in store._sql.migrations() if each.number < BEFORE]
    session = await asyncpg.connect(empty_sql_url)
    role = f"shop_{uuid4().hex}"
    await session.execute(store.schema.script(old))
    await session.execute(WRITTEN_BEFORE.format(role=role))

    await store.open()
    page = await store.tasks(TaskFilter())
    rights = [
        await session.fetchval("SELECT has_table_privilege($1, 'windlass.large_payload', $2)", *one)
        for one in ((role, "INSERT"), (role, "DELETE"), ("public", "SELECT"), ("public", "INSERT"))
    ]
    await store.close()
    await session.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    await session.close()

    assert [record.payload for record in page.records] == [{"a": "x" * 5000}]
    assert rights == [True, False, True, False]
