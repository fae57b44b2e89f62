"""Two sessions that meet at a limit: what it lets through is handed over exactly."""

import asyncio
import json
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from contract.postgres_sessions import (
    AT_ONCE,
    LEASE,
    OTHER_WORKER,
    SECOND,
    Sessions,
    add,
    claim,
    granted,
    request,
    settlements,
)
from windlass.model.errors import StoreBusy
from windlass.model.rule import LaneRule, RuleScope, ValueRule
from windlass.model.task import Answer, Outcome
from windlass.store.postgres.store import PostgresStore

QUEUE = RuleScope.QUEUE
TWO = LaneRule(QUEUE, "default", concurrency=2)
TENANT: dict[str, Any] = {"payload": '{"tenant": "acme"}', "limit_by": '[["tenant", null]]'}
BLOCKED_BY = "SELECT pid FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid))"
USUAL = 4999623357813735181  # the lane of a task that says nothing about it
IN_USE = """
SELECT
    (SELECT u.used FROM windlass.limit_use u ORDER BY u.version DESC LIMIT 1),
    (SELECT coalesce(sum(h.remaining), 0) FROM windlass.claim_limit h)
"""


async def used(sessions: Sessions) -> int:
    """How much is in use; what claims hold adds up to it."""
    in_use, held = await sessions.watcher.fetchrow(IN_USE)
    assert in_use == held
    return int(in_use)


async def test_a_claim_waits_for_a_claim_of_the_same_limit_and_counts_it(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.set_rule(TWO)
    ids = await add(store, 5)
    other = await sessions.begin()
    first = await granted(other.store, limit=1)

    waiting = await sessions.blocked(granted(store), by=other)
    await other.commit()

    assert first == ids[:1]
    assert await waiting == ids[1:2]
    assert await used(sessions) == 2


async def test_what_a_claim_that_was_rolled_back_had_taken_is_free(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.set_rule(TWO)
    await add(store, 5)
    other = await sessions.begin()
    await granted(other.store, limit=2)

    waiting = await sessions.blocked(granted(store), by=other)
    await other.rollback()

    assert len(await waiting) == 2
    assert await used(sessions) == 2


async def test_a_claim_counts_what_a_settlement_gives_back_while_it_waits(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.set_rule(LaneRule(QUEUE, "default", concurrency=3))
    await add(store, 5)
    held = await claim(store, limit=2)
    other = await sessions.begin()
    await other.store.settle(settlements(held, Outcome.COMPLETED))

    waiting = await sessions.blocked(granted(store), by=other)
    await other.commit()

    assert len(await waiting) == 3
    assert await used(sessions) == 3


async def test_two_settlements_of_a_limit_give_back_both(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.set_rule(TWO)
    await add(store, 2)
    first, second = await claim(store, limit=1), await claim(store, limit=1)
    other = await sessions.begin()
    await other.store.settle(settlements(first, Outcome.COMPLETED))

    waiting = await sessions.blocked(store.settle(settlements(second, Outcome.COMPLETED)), by=other)
    await other.commit()
    await waiting

    assert await used(sessions) == 0


@pytest.mark.parametrize("rule", [LaneRule(QUEUE, "mail", 1), LaneRule(RuleScope.TYPE, "send", 1)])
async def test_a_limit_holds_for_what_becomes_ready_while_the_claim_waits_for_another(
    store: PostgresStore, sessions: Sessions, rule: LaneRule
) -> None:
    await store.declare_rules([TWO, rule], types=[])
    ids = await add(store)
    other = await sessions.begin()
    await other.connection.execute("SELECT windlass.lock_limit('queue', 'default')")
    both = replace(request(), types=("resize", "send"))

    waiting = await sessions.blocked(store.claim(both), by=other)
    await add(store, 3, type="send", queue="mail")
    await other.commit()

    first, second = await waiting, await store.claim(both)
    assert first.claim is not None
    assert second.claim is not None
    assert [task.id for task in first.claim.tasks] == ids
    assert len(second.claim.tasks) == 1


async def test_a_full_limit_makes_nobody_wait(store: PostgresStore, sessions: Sessions) -> None:
    await store.set_rule(TWO)
    await add(store, 5)
    await claim(store)
    mail = await add(store, queue="mail")
    other = await sessions.begin()
    await other.connection.execute("SELECT windlass.lock_limit('queue', 'default')")

    async with asyncio.timeout(AT_ONCE):
        assert await granted(store) == mail


async def test_a_limit_without_tasks_makes_nobody_wait(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.set_rule(TWO)
    mail = await add(store, queue="mail")
    other = await sessions.begin()
    await other.connection.execute("SELECT windlass.lock_limit('queue', 'default')")

    async with asyncio.timeout(AT_ONCE):
        assert await granted(store) == mail


@pytest.mark.parametrize("isolation", [None, "repeatable read"])
async def test_claims_and_settlements_go_on_while_somebody_changes_a_rule(
    store: PostgresStore, sessions: Sessions, isolation: str | None
) -> None:
    await store.set_rule(TWO)
    await add(store, 5)
    held = await claim(store, limit=1)
    user = await sessions.begin(isolation)
    await user.store.set_rule(LaneRule(QUEUE, "default", concurrency=1))

    async with asyncio.timeout(AT_ONCE):
        more = await granted(store, limit=1)
        await store.settle(settlements(held, Outcome.COMPLETED))

    await user.commit()
    assert len(more) == 1
    assert await granted(store) == []
    assert await used(sessions) == 1


async def test_nobody_waits_long_for_who_holds_a_rule(
    store: PostgresStore, sessions: Sessions
) -> None:
    mail = LaneRule(QUEUE, "mail", concurrency=2)
    await store.set_rule(mail)
    await store.set_rule(TWO)
    await store.declare_rules([LaneRule(RuleScope.TYPE, "resize", 2)], types=[])
    await store.pause_type("resize")
    await store.pause("mail")
    await store.pause("bulk")
    await store.resume("bulk")
    user = await sessions.begin()
    await user.connection.execute("SELECT FROM windlass.queue FOR UPDATE")
    await user.connection.execute("SELECT FROM windlass.lane_rule FOR UPDATE")
    await user.connection.execute("SELECT FROM windlass.paused_type FOR UPDATE")

    async with asyncio.timeout(AT_ONCE):
        # Each has a row of its own to wait for: behind one another they would wait longer.
        answers = await asyncio.gather(
            store.set_rule(mail),
            store.reset_rule(QUEUE, "default"),
            store.declare_rules([LaneRule(RuleScope.TYPE, "resize", 3)], types=[]),
            store.resume_type("resize"),
            store.resume("mail"),
            store.pause("bulk"),
            return_exceptions=True,
        )

    await user.rollback()
    assert [type(answer) for answer in answers] == 6 * [StoreBusy]
    assert "queue 'mail' is held by a transaction that has not ended" in str(answers[4])


async def test_a_worker_that_starts_waits_for_no_rule_that_is_as_it_declares(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.declare_rules([TWO], types=[])
    user = await sessions.begin()
    await user.connection.execute("SELECT FROM windlass.lane_rule FOR UPDATE")

    async with asyncio.timeout(AT_ONCE):
        await store.declare_rules([TWO], types=["resize"])


async def test_a_limit_is_kept_beside_a_task_that_somebody_holds(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.set_rule(TWO)
    ids = await add(store, 4)
    held = await claim(store)
    user = await sessions.begin()
    await user.lock_task(ids[0])
    await sessions.advance(LEASE + SECOND)

    await store.rescue(10)
    while_held = await used(sessions)
    await user.commit()
    await store.rescue(10)

    assert len(held.tasks) == 2
    assert while_held == 1
    assert await used(sessions) == 0


async def test_what_a_handler_has_ended_itself_is_given_back_when_its_worker_is_lost(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.set_rule(TWO)
    await add(store, 2)
    held = await claim(store)
    await sessions.watcher.execute(
        "SELECT windlass.complete_task($1, $2, 1, 0.1, NULL, '7 days', '7 days')",
        held.token,
        held.tasks[0].id,
    )
    before = await used(sessions)

    await sessions.advance(LEASE + SECOND)
    await store.rescue(10)

    assert (before, await used(sessions)) == (2, 0)


async def test_what_is_in_use_is_found_at_once_however_many_versions_a_snapshot_keeps(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.set_rule(LaneRule(QUEUE, "default", concurrency=1))
    reader = await sessions.begin("repeatable read")
    await reader.connection.fetch("SELECT count(*) FROM windlass.limit_use")
    await add(store, 300)  # as many changes as six rows are for
    for _ in range(300):
        await store.settle(settlements(await claim(store, limit=1), Outcome.COMPLETED))

    rows = await sessions.watcher.fetch(
        "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "
        "SELECT * FROM windlass.limit_room('queue', 'default', 1, NULL, NULL, now())"
    )

    plan = json.loads(rows[0][0])[0]["Plan"]
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] <= 20
    # Versions of one row may be pruned, or fit into a page: that it becomes another is what counts.
    renewed = await sessions.watcher.fetchval("SELECT max(version) FROM windlass.limit_use")
    assert renewed >= 600 // 51
    await reader.rollback()


async def test_a_claim_that_found_nothing_locks_gates_when_it_has_let_go_of_limits(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.set_value_rule(ValueRule("resize", concurrency=5))
    await store.set_rule(LaneRule(RuleScope.TYPE, "resize", concurrency=10))
    _, second = await add(store, 2, **TENANT)
    other = await sessions.open_store()
    held = await claim(other, limit=1)
    user = await sessions.begin()
    late = await add(user.store, **TENANT)
    canceller = await sessions.begin()
    await canceller.connection.execute("SELECT windlass.cancel($1)", second)  # which stays ready
    await sessions.advance(60 * SECOND)
    await user.commit()
    pause = await sessions.pause("gate", "UPDATE")
    settling = await sessions.blocked(store.settle(settlements(held, Outcome.COMPLETED)), by=pause)
    holder = await sessions.watcher.fetchval(BLOCKED_BY, pause.pid)

    claiming = await sessions.blocked(granted(other), by=holder)
    await pause.commit()

    assert await settling == [Answer.APPLIED]
    assert await claiming == []
    assert await granted(other) == late
    await canceller.commit()


class TestNamed:
    """What a wake-up names is asked for like anything else."""

    async def test_a_named_task_that_has_a_limit_is_claimed_in_order(
        self, store: PostgresStore
    ) -> None:
        await store.set_rule(LaneRule(QUEUE, "default", concurrency=1))
        first, second = await add(store, 2)

        granted_first = await self.named(store, second)

        assert granted_first == [first]
        assert await self.named(store, second) == []

    async def test_a_named_task_without_a_limit_is_claimed_beside_one_that_has(
        self, store: PostgresStore
    ) -> None:
        await store.set_rule(LaneRule(QUEUE, "mail", concurrency=1))
        (task_id,) = await add(store)

        assert await self.named(store, task_id) == [task_id]

    async def test_a_named_task_of_a_paused_type_stays(self, store: PostgresStore) -> None:
        (task_id,) = await add(store)
        await store.pause_type("resize")

        assert await self.named(store, task_id) == []

    async def named(self, store: PostgresStore, task_id: UUID) -> list[UUID]:
        asked = replace(request(worker=OTHER_WORKER), lane=USUAL, task_id=task_id)
        answer = await store.claim(asked)
        return [task.id for task in answer.claim.tasks] if answer.claim else []


async def test_a_rate_counts_what_others_have_taken(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.set_rule(LaneRule(QUEUE, "default", rate=0.001, burst=3.0))
    await add(store, 5)
    other = await sessions.begin()
    await granted(other.store, limit=2)

    waiting = await sessions.blocked(granted(store), by=other)
    await other.commit()

    assert len(await waiting) == 1
