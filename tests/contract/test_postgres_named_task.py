"""A claim of the task that a wake-up named: as any other, but that it looks at nothing else."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from contract.postgres_sessions import (
    AT_ONCE,
    LEASE,
    OTHER_WORKER,
    Sessions,
    add,
    claim,
    request,
    settlements,
)
from windlass.model.task import Change, Claim, Outcome, TaskState
from windlass.store.postgres import claiming
from windlass.store.postgres.store import PostgresStore

CLAIMS = """
SELECT c.worker_id, c.expires_at - c.claimed_at AS lease, c.remaining, c.fence, b.task_ids, b.generations,
    c.claimed_at <= clock_timestamp() AS is_past
FROM windlass.claim c
JOIN windlass.claim_task b ON b.token = c.token
WHERE c.token = $1
"""
USUAL = 4999623357813735181  # the lane of a task that says nothing about it
LANE = "SELECT windlass.lane_number($1, 'resize', $2::smallint, 0::smallint)"


@pytest.fixture
def watcher(sessions: Sessions) -> asyncpg.Connection:
    return sessions.watcher


async def claim_named(store: PostgresStore, task_id: UUID, **asked: Any) -> Claim | None:
    named: dict[str, Any] = {"lane": USUAL, "task_id": task_id} | asked
    answer = await store.claim(replace(request(), **named))
    assert (answer.alone_waiting, answer.due_in) == (False, None)
    return answer.claim


async def granted_named(store: PostgresStore, task_id: UUID, **asked: Any) -> list[UUID]:
    held = await claim_named(store, task_id, **asked)
    return [] if held is None else [task.id for task in held.tasks]


async def lose_all(store: PostgresStore, watcher: asyncpg.Connection) -> None:
    await watcher.execute(
        "UPDATE windlass.claim SET expires_at = clock_timestamp() - interval '1 s'"
    )
    await store.rescue(10)


async def test_the_usual_lane_is_what_these_tests_say(watcher: asyncpg.Connection) -> None:
    assert await watcher.fetchval(LANE, "default", 10) == USUAL


async def test_it_grants_what_any_other_claim_would(
    store: PostgresStore, watcher: asyncpg.Connection
) -> None:
    options: dict[str, Any] = {
        "priority": 50,
        "queue": "mail",
        "payload": '{"to": "a"}',
        "max_attempts": 7,
    }
    first, second = [(await add(store, **options))[0] for _ in range(2)]

    named = await claim_named(store, first, lane=await watcher.fetchval(LANE, "mail", 50))
    other = await claim(store)

    assert named is not None
    assert [task.id for task in (*named.tasks, *other.tasks)] == [first, second]
    ours, theirs = named.tasks[0], other.tasks[0]
    for field in set(ours.__struct_fields__) - {"id", "waited"}:
        assert getattr(ours, field) == getattr(theirs, field), field
    assert 0 <= ours.waited < AT_ONCE
    assert (named.kind, named.alone) == (other.kind, other.alone)
    assert named.fence < other.fence
    rows = [dict(await watcher.fetchrow(CLAIMS, held.token)) for held in (named, other)]
    assert [row.pop("fence") for row in rows] == [named.fence, other.fence]
    assert [row.pop("task_ids") for row in rows] == [[first], [second]]
    assert rows[0] == rows[1]
    await store.settle(settlements(named, Outcome.COMPLETED))
    assert (await store.get(first)).status is TaskState.COMPLETED


async def test_no_bound_moves(store: PostgresStore) -> None:
    await add(store)
    await claim(store)
    bounds = dict(store._cursors[False].bounds)
    (task_id,) = await add(store)

    assert await granted_named(store, task_id) == [task_id]
    assert await granted_named(store, task_id) == []

    assert store._cursors[False].bounds == bounds


async def test_what_was_there_before_it_in_its_lane_comes_first(store: PostgresStore) -> None:
    await add(store)
    await claim(store)  # so that there is a bound
    first, second, third = [(await add(store))[0] for _ in range(3)]

    assert await granted_named(store, third, limit=2) == [first, second]
    assert await granted_named(store, third) == [third]


async def test_what_is_before_it_in_another_lane_does_not_keep_it(store: PostgresStore) -> None:
    (high,) = await add(store, priority=50)
    (task_id,) = await add(store)

    assert await granted_named(store, task_id) == [task_id]
    assert [task.id for task in (await claim(store)).tasks] == [high]


async def test_a_task_that_was_moved_to_another_lane_is_left_to_who_is_told_of_that(
    store: PostgresStore,
) -> None:
    (task_id,) = await add(store)
    await store.change(task_id, Change(priority=30))

    assert await granted_named(store, task_id) == []
    assert [task.id for task in (await claim(store)).tasks] == [task_id]


@pytest.mark.parametrize(
    "asked",
    [{"types": ("other",)}, {"queues": ("other",)}, {"types": ()}, {"queues": ()}],
    ids=str,
)
async def test_a_task_that_is_not_the_workers_is_left_alone(
    store: PostgresStore, asked: dict[str, Any]
) -> None:
    (task_id,) = await add(store)

    assert await granted_named(store, task_id, **asked) == []
    assert await granted_named(store, task_id, queues=("other", "default")) == [task_id]


async def test_a_task_of_a_paused_queue_is_left_alone(store: PostgresStore) -> None:
    (task_id,) = await add(store)
    await store.pause("default")
    assert await granted_named(store, task_id) == []

    await store.resume("default")
    assert await granted_named(store, task_id) == [task_id]


async def test_what_cannot_be_claimed_is_not_and_nothing_is_written(
    store: PostgresStore, watcher: asyncpg.Connection
) -> None:
    (later,) = await add(store, delay=60.0)
    (ended,) = await add(store)
    await store.settle(settlements(await claim(store), Outcome.COMPLETED))

    for task_id in (later, ended, UUID(int=7)):
        assert await granted_named(store, task_id) == []

    assert await watcher.fetchval("SELECT count(*) FROM windlass.claim") == 0
    assert await watcher.fetchval("SELECT count(*) FROM windlass.claim_task") == 0


async def test_a_task_is_granted_once(store: PostgresStore) -> None:
    (task_id,) = await add(store)

    asked = replace(request(), lane=USUAL, task_id=task_id)
    answers = await asyncio.gather(*(store.claim(asked) for _ in range(8)))

    assert len([answer for answer in answers if answer.claim is not None]) == 1


async def test_one_that_came_back_is_left_to_the_claims_that_know_how(
    store: PostgresStore, watcher: asyncpg.Connection
) -> None:
    (task_id,) = await add(store)
    for _ in range(2):
        await claim(store)
        await lose_all(store, watcher)

        assert await granted_named(store, task_id) == []

    answer = await store.claim(request())
    assert answer.alone_waiting  # a suspect by now


async def test_a_large_payload_comes_whole(store: PostgresStore) -> None:
    payload = '{"name": "%s"}' % ("x" * 5000)
    (task_id,) = await add(store, payload=payload)

    held = await claim_named(store, task_id)

    assert held is not None
    assert held.tasks[0].payload == payload


async def test_who_finds_it_held_waits_for_nobody(store: PostgresStore, sessions: Sessions) -> None:
    (task_id,) = await add(store)
    holder = await sessions.begin()
    assert await granted_named(holder.store, task_id) == [task_id]

    async with asyncio.timeout(AT_ONCE):
        assert await granted_named(store, task_id, worker_id=OTHER_WORKER) == []

    await holder.rollback()
    assert await granted_named(store, task_id, worker_id=OTHER_WORKER) == [task_id]


async def test_a_user_who_holds_its_task_holds_up_nobody(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    user = await sessions.begin("repeatable read")
    await user.lock_task(task_id)

    async with asyncio.timeout(AT_ONCE):
        assert await granted_named(store, task_id) == [task_id]


async def test_a_lease_is_counted_from_when_the_task_was_had(
    store: PostgresStore, watcher: asyncpg.Connection, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    pause = await sessions.pause("ready", "DELETE")
    claiming = await sessions.blocked(claim_named(store, task_id), by=pause)
    let_go_at = await watcher.fetchval("SELECT clock_timestamp()")
    await pause.commit()
    held = await claiming

    assert held is not None
    ends = await watcher.fetchval(
        "SELECT expires_at FROM windlass.claim WHERE token = $1", held.token
    )
    assert ends > let_go_at + LEASE


async def test_who_has_late_tasks_to_ask_for_reads_all_lanes(
    store: PostgresStore, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(claiming, "time", SimpleNamespace(monotonic=lambda: clock.now))
    slow = await sessions.begin()
    late = await add(slow.store, 1)
    await add(store)
    await claim(store)
    clock.now += 1.1  # so that it is passed
    await store.claim(request())
    await slow.commit()
    await store.claim(request())  # this look finds that it has ended

    assert await granted_named(store, UUID(int=7)) == late


async def test_after_a_claim_that_failed_every_lane_is_read_from_its_beginning(
    store: PostgresStore, watcher: asyncpg.Connection
) -> None:
    await add(store)
    await claim(store)
    assert store._cursors[False].bounds
    (task_id,) = await add(store)
    await watcher.execute(
        "ALTER TABLE windlass.claim ADD CONSTRAINT refused CHECK (false) NOT VALID"
    )

    with pytest.raises(asyncpg.CheckViolationError):
        await granted_named(store, task_id)

    assert not store._cursors[False].bounds
    await watcher.execute("ALTER TABLE windlass.claim DROP CONSTRAINT refused")
    assert await granted_named(store, task_id) == [task_id]
