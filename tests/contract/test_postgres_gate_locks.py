"""Two sessions that meet at a gate: a place there is handed over exactly, and nobody waits for a caller."""

import asyncio
import json
from typing import Any
from uuid import UUID

import pytest

from contract.postgres_sessions import (
    AT_ONCE,
    DEADLINE,
    LEASE,
    OTHER_WORKER,
    SECOND,
    Sessions,
    add,
    claim,
    granted,
    lead,
    new_task,
    settlements,
)
from windlass.model.rule import ValueRule
from windlass.model.task import Answer, CancelAnswer, Change, Fence, Outcome, TaskState
from windlass.store.postgres.store import PostgresStore

KEY: dict[str, Any] = {"ordering_key": "k"}
TENANT: dict[str, Any] = {
    "payload": json.dumps({"tenant": "acme"}),
    "limit_by": '[["tenant", null]]',
}
TWO = ValueRule("resize", concurrency=2)
COUNTS = """
SELECT
    (SELECT coalesce(sum(g.held), 0) FROM windlass.gate g),
    (SELECT count(*) FROM windlass.gate_entry e WHERE e.is_open),
    (SELECT count(*) FROM windlass.gate_entry e WHERE NOT e.is_open)
"""

READ = """
SELECT pg_stat_get_tuples_returned('windlass.gate_entry'::regclass)
    + pg_stat_get_tuples_returned('windlass.gate_entry_order'::regclass)
    + pg_stat_get_tuples_fetched('windlass.gate_entry_order'::regclass)
"""


async def at_gates(sessions: Sessions) -> tuple[int, int]:
    """How many were let through, and how many wait; what gates count is what there is."""
    held, let_through, waiting = await sessions.watcher.fetchrow(COUNTS)
    assert held == let_through
    return int(let_through), int(waiting)


async def look_until_all_have_ended(store: PostgresStore, sessions: Sessions) -> int:
    """Sweep until nobody may go by an old rule; a server's other databases have transactions as well."""
    called = 0
    async with asyncio.timeout(60):
        while await sessions.watcher.fetchval("SELECT count(*) FROM windlass.value_rule_change"):
            called += await store.open_gates(10)
    return called


async def statuses(store: PostgresStore, ids: list[UUID]) -> list[TaskState]:
    return [(await store.get(one)).status for one in ids]


@pytest.mark.parametrize("options", [KEY, TENANT], ids=["key", "value"])
async def test_an_enqueue_that_stays_open_holds_up_nobody_else_of_its_gate(
    store: PostgresStore, sessions: Sessions, options: dict[str, Any]
) -> None:
    await store.set_value_rule(ValueRule("resize", concurrency=1))
    user = await sessions.begin()
    await add(user.store, **options)

    async with asyncio.timeout(AT_ONCE):
        first, second = await add(store, 2, **options)
        held = await claim(store)
        assert [task.id for task in held.tasks] == [first]
        assert await store.settle(settlements(held, Outcome.COMPLETED)) == [Answer.APPLIED]
        assert await granted(store) == [second]


async def test_what_a_caller_commits_late_comes_when_it_is_committed(
    store: PostgresStore, sessions: Sessions
) -> None:
    user = await sessions.begin()
    late = await add(user.store, **KEY)
    first, second = await add(store, 2, **KEY)
    held = await claim(store)
    await user.commit()

    await store.settle(settlements(held, Outcome.COMPLETED))
    held = await claim(store)
    await store.settle(settlements(held, Outcome.COMPLETED))

    # It began before the others, so of those that wait it is the first.
    assert [task.id for task in held.tasks] == late
    assert await granted(store) == [second]
    assert first != second


async def test_what_was_committed_after_its_call_was_due_is_found_by_who_has_nothing_to_do(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store)
    await granted(store)  # from here on it does not read from the beginning
    user = await sessions.begin()
    late = await add(user.store, **KEY)
    await sessions.advance(60 * SECOND)
    await user.commit()

    assert await granted(store) == []  # it looked at all calls, and says so
    assert await granted(store) == late


async def test_a_settlement_waits_for_another_at_its_gate_and_both_places_are_passed_on(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.set_value_rule(TWO)
    ids = await add(store, 5, **TENANT)
    first, second = await claim(store, limit=1), await claim(store, limit=1)
    other = await sessions.begin()
    await other.store.settle(settlements(first, Outcome.COMPLETED))

    waiting = await sessions.blocked(store.settle(settlements(second, Outcome.COMPLETED)), by=other)
    await other.commit()

    assert await waiting == [Answer.APPLIED]
    assert await at_gates(sessions) == (2, 1)
    assert await granted(store) == ids[2:4]


async def test_a_claim_that_answers_a_call_waits_for_a_settlement_and_sees_what_it_left(
    store: PostgresStore, sessions: Sessions
) -> None:
    (first,) = await add(store, **KEY)
    held = await claim(store)
    other = await sessions.begin()
    await other.store.settle(settlements(held, Outcome.COMPLETED))
    (second,) = await add(store, **KEY)  # it sees nobody else wait, and lets the key go

    waiting = await sessions.blocked(granted(store), by=other)
    await other.commit()

    assert await waiting == [second]
    assert first != second
    assert await at_gates(sessions) == (1, 0)


async def test_a_settlement_that_is_rolled_back_has_passed_nothing_on(
    store: PostgresStore, sessions: Sessions
) -> None:
    ids = await add(store, 2, **KEY)
    held = await claim(store)
    other = await sessions.begin()
    await other.store.settle(settlements(held, Outcome.COMPLETED))
    await other.rollback()

    assert await granted(store) == []
    await store.settle(settlements(held, Outcome.COMPLETED))
    assert await granted(store) == ids[1:]


@pytest.mark.parametrize("is_committed", [True, False])
async def test_one_that_a_caller_is_cancelling_is_not_passed_over(
    store: PostgresStore, sessions: Sessions, is_committed: bool
) -> None:
    ids = await add(store, 3, **KEY)
    held = await claim(store)
    user = await sessions.begin()
    await user.connection.execute("SELECT windlass.cancel($1)", ids[1])

    async with asyncio.timeout(AT_ONCE):
        await store.settle(settlements(held, Outcome.COMPLETED))
        assert await granted(store) == []
    await (user.commit() if is_committed else user.rollback())
    await sessions.advance(2 * SECOND)

    assert await granted(store) == (ids[2:] if is_committed else ids[1:2])


async def test_the_places_of_others_are_passed_on_while_a_caller_cancels_one_that_was_let_through(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.set_value_rule(TWO)
    ids = await add(store, 4, **TENANT)
    held = await claim(store, limit=1)
    user = await sessions.begin()
    await user.connection.execute("SELECT windlass.cancel($1)", ids[1])

    async with asyncio.timeout(AT_ONCE):
        await store.settle(settlements(held, Outcome.COMPLETED))
        assert await granted(store) == ids[2:3]
    await user.commit()

    assert await granted(store) == ids[3:]
    assert await at_gates(sessions) == (2, 0)


async def test_a_task_whose_row_somebody_holds_is_let_through(
    store: PostgresStore, sessions: Sessions
) -> None:
    ids = await add(store, 2, **KEY)
    held = await claim(store)
    user = await sessions.begin()
    await user.lock_task(ids[1])

    async with asyncio.timeout(AT_ONCE):
        await store.settle(settlements(held, Outcome.COMPLETED))
        assert await granted(store) == ids[1:]


@pytest.mark.parametrize("isolation", [None, "repeatable read"])
async def test_gates_are_opened_while_somebody_changes_a_rule(
    store: PostgresStore, sessions: Sessions, isolation: str | None
) -> None:
    await store.set_value_rule(TWO)
    ids = await add(store, 5, **TENANT)
    held = await claim(store)
    user = await sessions.begin(isolation)
    await user.store.set_value_rule(ValueRule("resize", concurrency=4))

    async with asyncio.timeout(AT_ONCE):
        await store.settle(settlements(held, Outcome.COMPLETED))
        assert await granted(store) == ids[2:4]
    await user.commit()

    assert await granted(store) == ids[4:]


WAITING = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
"""


async def test_a_gate_that_is_removed_as_tasks_come_to_it_lets_no_more_through(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.set_value_rule(TWO)
    await add(store, **TENANT)
    held = await claim(store)
    removing = await sessions.pause("gate", "DELETE")
    settling = asyncio.create_task(store.settle(settlements(held, Outcome.COMPLETED)))
    async with asyncio.timeout(DEADLINE):
        while await sessions.watcher.fetchval(WAITING) < 1:
            await asyncio.sleep(0.005)
        ids = await add(store, 5, **TENANT)
        claiming = asyncio.create_task(granted(store))
        while await sessions.watcher.fetchval(WAITING) < 2:
            await asyncio.sleep(0.005)

    await removing.commit()

    assert await settling == [Answer.APPLIED]
    assert await claiming == ids[:2]
    assert await sessions.watcher.fetchval("SELECT name FROM windlass.gate") == "acme"
    assert await at_gates(sessions) == (2, 3)


async def test_a_gate_that_is_made_while_one_waits_for_another_is_left_to_who_made_it(
    store: PostgresStore, sessions: Sessions
) -> None:
    other = TENANT | {"payload": json.dumps({"tenant": "other"})}
    await store.set_value_rule(TWO)
    await add(store, **other)
    settling = await sessions.begin()
    await settling.store.settle(settlements(await claim(store), Outcome.COMPLETED))
    (gone,) = await add(store, **TENANT)
    await store.cancel(gone, "too late")  # which leaves a call of a gate at which nobody is
    await add(store, **other)
    looking = await sessions.blocked(store.open_gates(100), by=settling)

    await add(store, **TENANT)
    making = await sessions.begin()
    await making.store.open_gates(100)
    await making.commit()
    await add(store, 3, **TENANT)
    opening = await sessions.begin()
    await opening.store.open_gates(100)
    await settling.commit()
    async with asyncio.timeout(AT_ONCE):
        await looking  # without waiting for who has that gate now
    await opening.commit()

    assert await at_gates(sessions) == (3, 2)
    held = await claim(store, limit=10)
    assert len(held.tasks) == 3  # two of one tenant, and one of the other
    assert await store.settle(settlements(held, Outcome.COMPLETED)) == 3 * [Answer.APPLIED]
    assert await at_gates(sessions) == (2, 0)


async def test_nobody_waits_for_who_looks_at_a_change_of_rules(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.set_value_rule(TWO)
    looking = await sessions.begin()
    await looking.store.open_gates(10)
    await add(store, **KEY)

    async with asyncio.timeout(AT_ONCE):
        assert await store.open_gates(10) == 1
    await looking.commit()


async def test_a_gate_that_was_being_opened_by_an_old_rule_is_looked_at_when_that_is_done(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.set_value_rule(TWO)
    ids = await add(store, 4, **TENANT)
    other = await sessions.begin()
    assert await granted(other.store) == ids[:2]
    await store.set_value_rule(ValueRule("resize", concurrency=4))
    for _ in range(3):  # nobody else can see this gate
        await store.open_gates(10)

    await other.commit()
    await look_until_all_have_ended(store, sessions)

    assert await granted(store) == ids[2:]
    assert await at_gates(sessions) == (4, 0)


async def test_gates_are_looked_at_once_more_after_a_rule_has_changed_and_not_by_every_sweep(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store, **TENANT)
    await claim(store)
    await store.set_value_rule(TWO)
    at_once = await store.open_gates(10)

    later = await look_until_all_have_ended(store, sessions)

    assert (at_once, later) == (1, 1)
    assert [await store.open_gates(10) for _ in range(3)] == [0, 0, 0]


async def test_a_handler_that_completes_in_its_own_transaction_locks_no_gate(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.set_value_rule(TWO)
    ids = await add(store, 4, **TENANT)
    first, second = await claim(store, limit=1), await claim(store, limit=1)
    user = await sessions.begin()
    fence = Fence(first.token, first.tasks[0].id, 1)
    await store.check_completion(fence)
    await user.connection.execute(
        "SELECT windlass.complete_task($1, $2, 1, 0.1, NULL, '7 days', '7 days')",
        fence.token,
        fence.task_id,
    )

    async with asyncio.timeout(AT_ONCE):
        await store.settle(settlements(second, Outcome.COMPLETED))
        assert await granted(store) == ids[2:3]
    await user.commit()
    assert await granted(store) == []  # it is the settlement that counts it down
    await store.settle(settlements(first, Outcome.COMPLETED))

    assert await granted(store) == ids[3:]
    assert await at_gates(sessions) == (2, 0)


async def test_a_retry_by_a_person_meets_who_lets_it_leave(
    store: PostgresStore, sessions: Sessions
) -> None:
    ids = await add(store, 2, **KEY)
    await claim(store)
    await sessions.advance(2 * LEASE)
    await store.cancel(ids[0], "no longer needed")
    await store.rescue(10)  # it ends by that, and has not left its gate
    other = await sessions.begin()
    await other.store.open_gates(10)

    waiting = await sessions.blocked(store.retry(ids[0]), by=other)
    await other.commit()
    await waiting

    assert await granted(store) == ids[1:]
    assert await statuses(store, ids) == [TaskState.BLOCKED, TaskState.CLAIMED]


async def test_one_that_is_reopened_before_it_left_stays_where_it_was(
    store: PostgresStore, sessions: Sessions
) -> None:
    ids = await add(store, 2, **KEY)
    await store.open_gates(10)
    assert await store.cancel(ids[0], "no longer needed") is CancelAnswer.CANCELLED
    await store.retry(ids[0])

    assert await granted(store) == ids[:1]
    assert await at_gates(sessions) == (1, 1)


async def test_a_change_of_one_that_waits_keeps_its_place(
    store: PostgresStore, sessions: Sessions
) -> None:
    ids = await add(store, 3, **KEY)
    held = await claim(store)
    user = await sessions.begin()
    await user.store.change(ids[1], Change(priority=0))
    async with asyncio.timeout(AT_ONCE):
        await store.settle(settlements(held, Outcome.COMPLETED))
        assert await granted(store) == []
    await user.commit()
    await sessions.advance(2 * SECOND)

    assert await granted(store) == ids[1:2]


async def test_two_workers_answer_calls_of_the_same_gates_in_one_order(
    store: PostgresStore, sessions: Sessions
) -> None:
    beside = await sessions.open_store()
    for turn in range(20):
        keys = [f"{turn}-{number}" for number in range(20)]
        for names in (keys, keys[::-1]):
            await store.enqueue([new_task(ordering_key=name) for name in names])

        found = await asyncio.gather(
            granted(store, limit=100), granted(beside, limit=100, worker=OTHER_WORKER)
        )

        assert len(set(found[0]) | set(found[1])) == len(found[0]) + len(found[1]) == 20


async def test_what_an_older_worker_ended_leaves_when_the_leader_tidies(
    store: PostgresStore, sessions: Sessions
) -> None:
    ids = await add(store, 2, **KEY)
    await claim(store)
    # As it ended tasks before there were gates.
    await sessions.watcher.execute("SET session_replication_role = replica")
    await sessions.watcher.execute("DELETE FROM windlass.task WHERE id = $1", ids[0])
    leadership = await lead(store)

    for _ in range(100):  # it looks at a part of the gates each time
        await store.tidy(leadership=leadership)
    await store.open_gates(10)

    assert await granted(store) == ids[1:]


async def test_a_bucket_is_remembered_while_nobody_is_at_its_gate(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.set_value_rule(ValueRule("resize", rate=0.1, burst=1.0))
    await add(store, **TENANT)
    await store.settle(settlements(await claim(store), Outcome.COMPLETED))
    later = await add(store, **TENANT)

    assert await granted(store) == []
    await sessions.advance(11 * SECOND)
    assert await granted(store) == later


async def test_a_copy_on_a_server_that_counts_transactions_anew_passes_nobody_over(
    store: PostgresStore, sessions: Sessions
) -> None:
    (first,) = await add(store, **KEY)
    held = await claim(store)
    await sessions.watcher.execute("UPDATE windlass.gate SET from_x = '9000000000'")
    (second,) = await add(store, **KEY)
    await store.settle(settlements(held, Outcome.COMPLETED))

    assert await granted(store) == [second]
    assert first != second


async def test_one_that_was_passed_over_is_found_when_the_leader_tidies(
    store: PostgresStore, sessions: Sessions
) -> None:
    ids = await add(store, 2, **KEY)
    held = await claim(store)
    await sessions.watcher.execute("UPDATE windlass.gate_entry SET x = '3' WHERE NOT is_open")
    await store.settle(settlements(held, Outcome.COMPLETED))
    assert await granted(store) == []
    leadership = await lead(store)

    for _ in range(100):  # it looks at a part of the gates each time
        await store.tidy(leadership=leadership)
    await store.open_gates(10)

    assert await granted(store) == ids[1:]


async def test_an_explanation_does_not_walk_over_those_that_wait(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.set_value_rule(TWO)
    ids = await add(store, 2000, **TENANT)
    await claim(store)
    await sessions.watcher.execute("VACUUM ANALYZE windlass.gate_entry")
    before = await sessions.watcher.fetchval(READ)

    await store.situation(ids[5], ageing=SECOND)

    await sessions.watcher.execute("SELECT pg_stat_clear_snapshot()")
    assert await sessions.watcher.fetchval(READ) - before < 100
