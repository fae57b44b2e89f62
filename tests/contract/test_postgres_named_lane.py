"""A claim of the lane that a wake-up named: as any other, but for the lanes it does not look at."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from contract.postgres_sessions import (
    AT_ONCE,
    OTHER_WORKER,
    Sessions,
    add,
    claim,
    request,
    settlements,
)
from windlass.model.limits import EXPIRED
from windlass.model.task import Claim, Outcome, TaskState
from windlass.store.postgres import claiming
from windlass.store.postgres.store import PostgresStore

LANE = "SELECT windlass.lane_number($1, $2, $3::smallint, 0::smallint)"
CLAIMS = """
SELECT c.worker_id, c.expires_at - c.claimed_at AS lease, c.remaining, c.fence, b.task_ids, b.generations,
    c.claimed_at <= clock_timestamp() AS is_past
FROM windlass.claim c
JOIN windlass.claim_task b ON b.token = c.token
WHERE c.token = $1
"""


@pytest.fixture
def watcher(sessions: Sessions) -> asyncpg.Connection:
    return sessions.watcher


async def lane_of(
    watcher: asyncpg.Connection, kind: str = "resize", *, queue: str = "default", priority: int = 10
) -> int:
    return int(await watcher.fetchval(LANE, queue, kind, priority))


async def claim_named(
    store: PostgresStore, lane: int, limit: int = 10, **asked: Any
) -> Claim | None:
    answer = await store.claim(replace(request(limit), lane=lane, **asked))
    assert not answer.alone_waiting
    return answer.claim


async def granted_named(
    store: PostgresStore, lane: int, limit: int = 10, **asked: Any
) -> list[UUID]:
    held = await claim_named(store, lane, limit, **asked)
    return [] if held is None else [task.id for task in held.tasks]


async def test_it_grants_what_any_other_claim_would(
    store: PostgresStore, watcher: asyncpg.Connection
) -> None:
    lane = await lane_of(watcher)
    ids = await add(store, 4)

    named = await claim_named(store, lane, 2)
    other = await claim(store, limit=2)

    assert named is not None
    assert [task.id for task in (*named.tasks, *other.tasks)] == ids
    alike = [shared(task) for task in (*named.tasks, *other.tasks)]
    assert alike == alike[:1] * 4
    assert all(0 <= task.waited < AT_ONCE for task in named.tasks)
    assert (named.kind, named.alone) == (other.kind, other.alone)
    assert named.fence < other.fence
    rows = [dict(await watcher.fetchrow(CLAIMS, held.token)) for held in (named, other)]
    assert [row.pop("fence") for row in rows] == [named.fence, other.fence]
    assert [row.pop("task_ids") for row in rows] == [ids[:2], ids[2:]]
    assert rows[0] == rows[1]
    await store.settle(settlements(named, Outcome.COMPLETED))
    assert (await store.get(ids[0])).status is TaskState.COMPLETED


def shared(task: Any) -> tuple[Any, ...]:
    """What two tasks that were enqueued together have alike."""
    return (
        *(task.type, task.queue, task.priority, task.payload, task.attempts),
        *(task.max_attempts, task.generation, task.cancel_reason),
    )


async def test_it_goes_on_where_the_last_look_ended_and_leaves_the_others_where_they_are(
    store: PostgresStore, watcher: asyncpg.Connection
) -> None:
    small, large = await lane_of(watcher), await lane_of(watcher, priority=50)
    low = await add(store, 3)
    high = await add(store, 3, priority=50)

    assert await granted_named(store, small, 2) == low[:2]
    assert await granted_named(store, small, 2) == low[2:]
    assert await granted_named(store, small, 2) == []
    assert await granted_named(store, large, 2) == high[:2]
    more = await add(store, 1)
    assert [task.id for task in (await claim(store)).tasks] == [high[2], *more]


async def test_what_is_known_of_other_lanes_is_kept(
    store: PostgresStore, watcher: asyncpg.Connection
) -> None:
    small, large = await lane_of(watcher), await lane_of(watcher, priority=50)
    await add(store, 1)
    await add(store, 1, priority=50)
    await claim(store)

    assert await granted_named(store, small) == []

    assert set(store._cursors[False].bounds) == {small, large}


@pytest.mark.parametrize(
    "asked",
    [{"types": ("other",)}, {"queues": ("other",)}, {"types": ()}, {"queues": ()}],
    ids=str,
)
async def test_a_lane_that_is_not_the_workers_is_not_read(
    store: PostgresStore, watcher: asyncpg.Connection, asked: dict[str, Any]
) -> None:
    await add(store, 1)
    lane = await lane_of(watcher)

    assert await granted_named(store, lane, **asked) == []
    assert await granted_named(store, lane, queues=("default", "other")) != []


async def test_a_lane_of_a_paused_queue_is_not_read(
    store: PostgresStore, watcher: asyncpg.Connection
) -> None:
    ids = await add(store, 1)
    lane = await lane_of(watcher)
    await store.pause("default")

    assert await granted_named(store, lane) == []

    await store.resume("default")
    assert await granted_named(store, lane) == ids


async def test_a_look_that_finds_nothing_writes_nothing(
    store: PostgresStore, watcher: asyncpg.Connection
) -> None:
    lane = await lane_of(watcher)
    await add(store, 1)
    await store.settle(settlements(await claim(store), Outcome.COMPLETED))

    assert await granted_named(store, lane) == []

    assert await watcher.fetchval("SELECT count(*) FROM windlass.claim") == 0
    assert await watcher.fetchval("SELECT count(*) FROM windlass.claim_task") == 0


async def test_a_task_whose_transaction_commits_during_a_claim_is_claimed_by_the_next(
    store: PostgresStore, watcher: asyncpg.Connection, sessions: Sessions
) -> None:
    lane = await lane_of(watcher)
    slow = await sessions.begin()
    late = await add(slow.store, 1)
    early = await add(store, 3)
    pause = await sessions.pause("claim", "INSERT")

    # The lane has been read, and the claim is not done.
    claiming = await sessions.blocked(granted_named(store, lane), by=pause)
    await slow.commit()
    await pause.commit()

    assert await claiming == early
    assert await granted_named(store, lane) == late


@pytest.mark.parametrize("lane", [0, -(1 << 63), (1 << 63) - 1])
async def test_a_lane_that_nobody_knows_holds_nothing(store: PostgresStore, lane: int) -> None:
    ids = await add(store, 1)

    assert await granted_named(store, lane) == []
    assert [task.id for task in (await claim(store)).tasks] == ids


async def test_suspects_are_not_taken_among_others(
    store: PostgresStore, watcher: asyncpg.Connection
) -> None:
    await add(store, 1)
    for _ in range(2):
        await claim(store)
        await watcher.execute(
            "UPDATE windlass.claim SET expires_at = clock_timestamp() - interval '1 s'"
        )
        await store.rescue(10)
    suspects = int(await watcher.fetchval("SELECT lane FROM windlass.ready"))
    assert await watcher.fetchval("SELECT kind FROM windlass.lane WHERE lane = $1", suspects) == 2

    assert await granted_named(store, suspects) == []


async def test_a_task_that_is_to_be_cancelled_says_so(
    store: PostgresStore, watcher: asyncpg.Connection, sessions: Sessions
) -> None:
    lane = await lane_of(watcher)
    first, second = await add(store, 2)
    await watcher.execute(
        "INSERT INTO windlass.cancel_request VALUES ($1, 'no more', clock_timestamp())", second
    )

    held = await claim_named(store, lane)

    assert held is not None
    assert [(task.id, task.cancel_reason) for task in held.tasks] == [
        (first, None),
        (second, "no more"),
    ]


async def test_a_large_payload_comes_whole(
    store: PostgresStore, watcher: asyncpg.Connection
) -> None:
    lane = await lane_of(watcher)
    payload = '{"name": "%s"}' % ("x" * 5000)
    await add(store, 1, payload=payload)

    held = await claim_named(store, lane)

    assert held is not None
    assert held.tasks[0].payload == payload


async def test_two_who_were_woken_for_the_same_lane_share_it_and_wait_for_nobody(
    store: PostgresStore, watcher: asyncpg.Connection, sessions: Sessions
) -> None:
    lane = await lane_of(watcher)
    ids = await add(store, 4)
    holder = await sessions.begin()
    held = await granted_named(holder.store, lane, 2)
    assert held == ids[:2]

    async with asyncio.timeout(AT_ONCE):
        assert await granted_named(store, lane, 2, worker_id=OTHER_WORKER) == ids[2:]

    await holder.rollback()
    # What was skipped lies behind the bound now: a look behind finds it.
    other = await sessions.open_store()
    assert await granted_named(other, lane, 4) == ids[:2]


async def test_a_user_who_holds_tasks_of_the_lane_holds_up_nobody(
    store: PostgresStore, watcher: asyncpg.Connection, sessions: Sessions
) -> None:
    lane = await lane_of(watcher)
    ids = await add(store, 3)
    user = await sessions.begin("repeatable read")
    await user.connection.execute("SELECT FROM windlass.task WHERE id = $1 FOR UPDATE", ids[0])
    await user.connection.execute(
        "SELECT FROM windlass.ready WHERE task_id = $1 FOR UPDATE", ids[1]
    )

    async with asyncio.timeout(AT_ONCE):
        assert await granted_named(store, lane) == [ids[0], ids[2]]


async def test_who_has_late_tasks_to_ask_for_reads_all_lanes(
    store: PostgresStore,
    watcher: asyncpg.Connection,
    sessions: Sessions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(claiming, "time", SimpleNamespace(monotonic=lambda: clock.now))
    lane = await lane_of(watcher)
    slow = await sessions.begin()
    late = await add(slow.store, 1)
    early = await add(store, 1)
    assert await granted_named(store, lane) == early
    clock.now += 1.1  # so that it is passed
    assert await granted_named(store, lane) == []
    await slow.commit()
    assert await granted_named(store, lane) == []  # this look finds that it has ended

    assert await granted_named(store, await lane_of(watcher, "unknown")) == late


async def test_it_may_be_of_a_worker_whose_lane_rests(
    store: PostgresStore, watcher: asyncpg.Connection
) -> None:
    lane = await lane_of(watcher)
    await add(store, 1)
    await claim(store)
    await watcher.execute("SELECT windlass.retire_lanes($1)", timedelta(0))
    assert await granted_named(store, lane) == []

    ids = await add(store, 1)

    assert await granted_named(store, lane) == ids


async def test_a_late_task_of_the_lane_is_granted_to_be_cancelled(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store, expires=60.0)
    await sessions.advance(timedelta(seconds=61))

    held = await claim_named(store, await lane_of(sessions.watcher))

    assert held is not None
    assert held.tasks[0].cancel_reason == EXPIRED
