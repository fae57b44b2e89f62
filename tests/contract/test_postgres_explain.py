"""What only PostgreSQL has to be asked about a task: counts with an end, lanes at rest, versions of a limit."""

from uuid import UUID

import pytest

from contract.postgres_sessions import SECOND, Sessions, add, claim
from windlass.model.explanation import (
    Behind,
    Explanation,
    KeyHeld,
    LimitReached,
    NotListed,
    RunsAlone,
)
from windlass.model.rule import LaneRule, RuleScope
from windlass.policy import explaining as policy
from windlass.policy.explaining import explained
from windlass.store.postgres import explaining
from windlass.store.postgres.store import PostgresStore

COUNTED = 3  # instead of many more
LOST = "UPDATE windlass.task SET recoveries = 2"
EXPIRED = "UPDATE windlass.claim SET expires_at = expires_at - interval '1 hour'"
OLDER = """
INSERT INTO windlass.limit_use (scope, name, version, used, counted_at)
SELECT u.scope, u.name, u.version - 1, 7, u.counted_at FROM windlass.limit_use u
"""


@pytest.fixture
def few_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count few, so that there is more than is counted."""
    monkeypatch.setattr(explaining, "COUNTED", COUNTED)
    monkeypatch.setattr(policy, "COUNTED", COUNTED)


async def explain(store: PostgresStore, task_id: UUID) -> Explanation:
    return explained(await store.situation(task_id, ageing=6 * SECOND))


async def test_a_lane_that_was_put_to_rest_is_told(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    await sessions.watcher.execute("DELETE FROM windlass.lane")

    told = await explain(store, task_id)

    assert NotListed() in told.reasons
    assert not told.claimable


async def test_what_is_used_of_a_limit_is_what_its_last_version_says(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.set_rule(LaneRule(RuleScope.QUEUE, "default", concurrency=2))
    *_, task_id = await add(store, 3)
    await claim(store, limit=2)
    await sessions.watcher.execute(OLDER)

    (reason,) = [
        one for one in (await explain(store, task_id)).reasons if one.kind == "limit_reached"
    ]

    assert isinstance(reason, LimitReached)
    assert reason.used == 2


@pytest.mark.usefixtures("few_counted")
@pytest.mark.parametrize("number", [COUNTED, COUNTED + 1])
async def test_those_before_it_in_line_for_a_key_are_counted_to_an_end(
    store: PostgresStore, number: int
) -> None:
    await add(store, ordering_key="k")
    await claim(store)
    *_, task_id = await add(store, number + 1, ordering_key="k")

    reason = (await explain(store, task_id)).reasons[0]

    assert isinstance(reason, KeyHeld)
    assert (reason.first, reason.or_more) == (COUNTED, number > COUNTED)


@pytest.mark.usefixtures("few_counted")
@pytest.mark.parametrize("number", [COUNTED, COUNTED + 1])
async def test_those_of_another_lane_are_counted_to_an_end(
    store: PostgresStore, number: int
) -> None:
    await add(store, number, priority=20)
    (task_id,) = await add(store, priority=0)

    behind = (await explain(store, task_id)).reasons[-1]

    assert isinstance(behind, Behind)
    assert (behind.tasks, behind.or_more) == (COUNTED, number > COUNTED)


@pytest.mark.usefixtures("few_counted")
@pytest.mark.parametrize("room", [COUNTED, COUNTED + 1])
async def test_what_others_take_of_a_limit_is_counted_to_an_end(
    store: PostgresStore, room: int
) -> None:
    await store.set_rule(LaneRule(RuleScope.QUEUE, "default", concurrency=room))
    await add(store, 2 * room, priority=20)
    *_, task_id = await add(store, 2, priority=0)

    reason = (await explain(store, task_id)).reasons[0]

    assert isinstance(reason, LimitReached)
    assert (reason.first, reason.or_more) == (COUNTED, True)


@pytest.mark.usefixtures("few_counted")
@pytest.mark.parametrize("number", [COUNTED, COUNTED + 1])
async def test_suspects_of_another_lane_are_counted_to_an_end(
    store: PostgresStore, sessions: Sessions, number: int
) -> None:
    await add(store, number, priority=20)
    *_, task_id = await add(store, priority=0)
    await claim(store, limit=20)
    await sessions.watcher.execute(LOST)
    await sessions.watcher.execute(EXPIRED)
    await store.rescue(10)

    reason = (await explain(store, task_id)).reasons[0]

    assert isinstance(reason, RunsAlone)
    assert (reason.first, reason.or_more) == (COUNTED, number > COUNTED)
