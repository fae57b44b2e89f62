"""Rules of gates: tasks that run in the order of a key, and what is seen of those that wait."""

# ruff: noqa: S101 - tests assert

import asyncio
import json
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from windlass.model.rule import ValueRule
from windlass.model.task import (
    Answer,
    CancelAnswer,
    Change,
    Claim,
    ClaimedTask,
    Outcome,
    TaskState,
)
from windlass.store.port import Store
from windlass.testing.store_contract.dead import DeadSteps
from windlass.testing.store_contract.steps import DAY, ENDING, ERROR, LEASE, SECOND, Steps, needs

KEY = "account 7"
TYPES = ("resize", "mail")
BY_TENANT = '[["tenant", null]]'
ONE = ValueRule("resize", concurrency=1)
TWO = ValueRule("resize", concurrency=2)
BLOCKED, PENDING, SCHEDULED = TaskState.BLOCKED, TaskState.PENDING, TaskState.SCHEDULED


class GateSteps(Steps):
    """The words of these rules."""

    async def add_in_order(self, store: Store, number: int, **options: Any) -> list[UUID]:
        """Enqueue tasks of one key."""
        return await self.add_many(store, number, **({"ordering_key": KEY} | options))

    async def add_of(
        self, store: Store, tenant: object, number: int = 1, **options: Any
    ) -> list[UUID]:
        """Enqueue tasks of one value."""
        payload = json.dumps({"tenant": tenant})
        return await self.add_many(
            store, number, **({"payload": payload, "limit_by": BY_TENANT} | options)
        )

    async def take(self, store: Store, task_id: UUID) -> tuple[Claim, ClaimedTask]:
        """Claim this task, the only one that is granted."""
        claim, task = await self.claim_one(store, limit=10, types=TYPES)
        assert task.id == task_id
        return claim, task

    async def run(
        self, store: Store, task_id: UUID, outcome: Outcome = Outcome.COMPLETED, **details: Any
    ) -> None:
        """Claim this task, the only one that is granted, and settle it."""
        claim, task = await self.take(store, task_id)
        assert await self.settle(store, claim, task, outcome, **details) is Answer.APPLIED

    async def sweep(self, store: Store) -> int:
        """Do what a leader does for tasks that wait; return how many calls were answered."""
        await store.promote(1000)
        return await store.open_gates(1000)

    async def pass_time(self, store: Store, seconds: float) -> None:
        """Let so much time pass, and sweep."""
        await self.advance(store, timedelta(seconds=seconds))
        await self.sweep(store)

    async def seen(self, store: Store, *task_ids: UUID) -> list[TaskState]:
        return [await self.status(store, task_id) for task_id in task_ids]


class OrderingKeyRules(GateSteps):
    """Tasks of one key run one at a time, in the order of their enqueue."""

    async def test_those_of_a_key_whose_time_is_ahead_are_no_work(self, store: Store) -> None:
        await self.add_many(store, 2, ordering_key="k", delay=60.0)
        before = await store.has_work(["resize"], None)
        await self.add(store, ordering_key="k")

        assert not before
        assert await store.has_work(["resize"], None)
        await self.sweep(store)
        assert not await store.has_work(["resize"], None)

    async def test_one_that_comes_after_very_many_is_looked_at_by_the_next_claim(
        self, store: Store
    ) -> None:
        await self.granted(store)
        for number in range(1200):
            await self.add(store, ordering_key=f"key {number}")
        urgent = await self.add(store, ordering_key="urgent", priority=30)

        assert await self.granted(store, limit=1) == [urgent]

    async def test_tasks_of_a_key_are_granted_one_at_a_time_in_their_order(
        self, store: Store
    ) -> None:
        ids = [
            *await self.add_in_order(store, 2, priority=0),
            *await self.add_in_order(store, 2, type="mail", queue="bulk", priority=30),
            *await self.add_in_order(store, 1),
        ]

        for task_id in ids:
            claim, task = await self.take(store, task_id)
            assert await self.granted(store, types=TYPES) == []
            await self.settle(store, claim, task, Outcome.COMPLETED)

        assert await self.seen(store, *ids) == [TaskState.COMPLETED] * 5

    async def test_a_key_holds_back_nobody_else(self, store: Store) -> None:
        first, _ = await self.add_in_order(store, 2)
        other, _ = await self.add_in_order(store, 2, ordering_key="account 8")
        plain = await self.add(store)

        assert set(await self.granted(store)) == {first, other, plain}

    @pytest.mark.parametrize("outcome", ENDING)
    async def test_a_key_is_passed_on_by_the_end_of_its_task(
        self, store: Store, outcome: Outcome
    ) -> None:
        first, second = await self.add_in_order(store, 2)

        await self.run(store, first, outcome)

        assert await self.seen(store, second) == [PENDING]
        assert await self.granted(store) == [second]

    @pytest.mark.parametrize("place", ["in line", "ready", "claimed"])
    async def test_a_key_is_passed_on_by_a_cancellation(self, store: Store, place: str) -> None:
        first, second = await self.add_in_order(store, 2)
        if place == "ready":
            await self.sweep(store)
        if place == "claimed":
            claim, task = await self.take(store, first)
            assert await store.cancel(first, "too late") is CancelAnswer.REQUESTED
            assert await self.granted(store) == []
            await self.settle(store, claim, task, Outcome.RELEASED)
        else:
            assert await store.cancel(first, "too late") is CancelAnswer.CANCELLED

        assert await self.seen(store, first, second) == [TaskState.CANCELLED, PENDING]
        assert await self.granted(store) == [second]

    async def test_a_key_is_passed_on_by_an_expiry(self, store: Store) -> None:
        first, second, third = await self.add_in_order(store, 3, expires=10.0)
        last = await self.add(store, ordering_key=KEY)
        await self.run(store, first)
        await self.advance(store, 11 * SECOND)

        leadership = await self.elect(store)
        expired = await store.expire(100, leadership=leadership)

        assert expired.cancelled == 2
        assert await self.seen(store, second, third) == [TaskState.CANCELLED] * 2
        assert await self.granted(store) == [last]

    @pytest.mark.parametrize("cause", ["lost worker", "stopped retries", "unknown type"])
    async def test_a_key_is_passed_on_by_whoever_else_ends_its_task(
        self, store: Store, cause: str
    ) -> None:
        first, second = await self.add_in_order(store, 2, max_attempts=2)
        if cause == "lost worker":
            for _ in range(2):
                await self.start(store, *await self.take(store, first))
                await self.lose_worker(store)
        elif cause == "stopped retries":
            await self.run(store, first, Outcome.RETRIED, delay=60.0)
            await store.stop_retries("resize", "broken")
            await store.bury_scheduled("resize", 10)
        else:
            await self.sweep(store)
            leadership = await self.elect(store)
            asked = {"error": ERROR, "ready_for": timedelta(0), "limit": 10}
            await store.fail_unknown("resize", **asked, leadership=leadership)  # type: ignore[arg-type]  # of several types

        assert await self.seen(store, first, second) in (
            [TaskState.DEAD, PENDING],
            [TaskState.FAILED, PENDING],
        )
        assert await self.granted(store) == [second]

    @pytest.mark.parametrize("outcome", [Outcome.RETRIED, Outcome.SNOOZED])
    async def test_a_task_that_comes_back_later_keeps_its_place(
        self, store: Store, outcome: Outcome
    ) -> None:
        first, second = await self.add_in_order(store, 2)

        await self.run(store, first, outcome, delay=60.0)

        assert await self.seen(store, first, second) == [SCHEDULED, BLOCKED]
        assert await self.granted(store) == []
        await self.pass_time(store, 61)
        await self.run(store, first)
        await self.run(store, second)

    @pytest.mark.parametrize("outcome", [Outcome.RETRIED, Outcome.RELEASED, None])
    async def test_a_task_that_comes_back_at_once_keeps_its_place(
        self, store: Store, outcome: Outcome | None
    ) -> None:
        first, second = await self.add_in_order(store, 2)

        if outcome is None:
            await self.take(store, first)
            await self.lose_worker(store)
        else:
            await self.run(store, first, outcome)

        assert await self.seen(store, first, second) == [PENDING, BLOCKED]
        await self.run(store, first)
        await self.run(store, second)

    async def test_a_delay_at_the_head_of_a_key_holds_the_others(self, store: Store) -> None:
        (first,) = await self.add_in_order(store, 1, delay=60.0)
        (second,) = await self.add_in_order(store, 1)

        assert await self.seen(store, first, second) == [SCHEDULED, BLOCKED]
        assert await self.granted(store) == []
        assert await self.seen(store, first, second) == [SCHEDULED, BLOCKED]
        await self.pass_time(store, 61)
        await self.run(store, first)
        await self.run(store, second)

    async def test_a_task_waits_for_its_time_once_it_has_the_key(self, store: Store) -> None:
        (first,) = await self.add_in_order(store, 1)
        (second,) = await self.add_in_order(store, 1, delay=60.0)
        (third,) = await self.add_in_order(store, 1)

        assert await self.seen(store, second) == [BLOCKED]
        await self.run(store, first)
        assert await self.seen(store, second, third) == [SCHEDULED, BLOCKED]
        await store.change(second, Change(delay=0.0))
        await self.run(store, second)
        await self.run(store, third)

    async def test_a_repeated_settlement_passes_nothing_on(self, store: Store) -> None:
        first, second, third = await self.add_in_order(store, 3)
        claim, task = await self.take(store, first)
        await self.settle(store, claim, task, Outcome.COMPLETED)
        await self.take(store, second)

        again = await self.settle(store, claim, task, Outcome.COMPLETED)

        assert again is Answer.ALREADY
        assert await self.granted(store) == []
        assert await self.seen(store, third) == [BLOCKED]

    async def test_a_settlement_passes_on_the_keys_of_all_its_tasks(self, store: Store) -> None:
        keys = [f"account {number}" for number in range(5)]
        ids = [await self.add_in_order(store, 2, ordering_key=key) for key in keys]
        claim = await self.claim(store)

        await store.settle(
            [self.settlement(claim, task, Outcome.COMPLETED) for task in claim.tasks]
        )

        assert set(await self.granted(store)) == {second for _, second in ids}

    async def test_a_reopened_task_comes_behind_the_others(self, store: Store) -> None:
        first, second, third = await self.add_in_order(store, 3)
        await self.run(store, first, Outcome.FAILED)
        claim, task = await self.take(store, second)

        await store.retry(first)

        assert await self.seen(store, first) == [BLOCKED]
        await self.settle(store, claim, task, Outcome.COMPLETED)
        await self.run(store, third)
        await self.run(store, first)

    async def test_a_task_that_is_reopened_at_once_runs_alone_of_its_key(
        self, store: Store
    ) -> None:
        first, second = await self.add_in_order(store, 2)
        await self.sweep(store)

        await store.cancel(first, "too late")
        await store.retry(first)

        claim, task = await self.claim_one(store, limit=10)
        assert await self.granted(store) == []
        await self.settle(store, claim, task, Outcome.COMPLETED)
        assert {task.id, *await self.granted(store)} == {first, second}

    @needs("concurrent_writers")
    async def test_claims_at_the_same_time_keep_the_order(self, store: Store) -> None:
        ids = await self.add_in_order(store, 4)

        for task_id in ids:
            answers = await asyncio.gather(*(self.ask(store) for _ in range(6)))
            (claim,) = [answer.claim for answer in answers if answer.claim is not None]
            (task,) = claim.tasks
            assert task.id == task_id
            await self.settle(store, claim, task, Outcome.COMPLETED)

    @needs("wakeups")
    @pytest.mark.parametrize("outcome", [Outcome.COMPLETED, None])
    async def test_whoever_waits_for_a_key_is_woken(
        self, store: Store, outcome: Outcome | None
    ) -> None:
        await store.register(self.worker(), lease=LEASE)
        first, _ = await self.add_in_order(store, 2)
        if outcome is None:
            await self.sweep(store)
        else:
            claim, task = await self.take(store, first)
        woken = asyncio.Event()
        async with store.listen(lambda *_: woken.set()):
            await store.set_idle(self.worker().id, True)
            woken.clear()

            if outcome is None:
                await store.cancel(first, "too late")
            else:
                await self.settle(store, claim, task, outcome)

            await asyncio.wait_for(woken.wait(), 10)


class HeldKeyRules(DeadSteps, GateSteps):
    """Keys that are held by tasks that have failed."""

    async def holding(
        self, store: Store, outcome: Outcome = Outcome.DEAD, **options: Any
    ) -> tuple[UUID, UUID]:
        """Let a task fail that holds its key, and return the one behind it too."""
        first, second = await self.add_in_order(store, 2, keeps_key=True, **options)
        await self.run(store, first, outcome)
        return first, second

    @pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.DEAD])
    async def test_a_task_that_has_failed_may_hold_its_key(
        self, store: Store, outcome: Outcome
    ) -> None:
        _, second = await self.holding(store, outcome)

        await self.sweep(store)

        assert await self.granted(store) == []
        assert await self.seen(store, second) == [BLOCKED]
        assert not await store.has_work(["resize"], None)

    @pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.CANCELLED])
    async def test_no_other_end_holds_a_key(self, store: Store, outcome: Outcome) -> None:
        _, second = await self.holding(store, outcome)

        assert await self.granted(store) == [second]

    async def test_a_task_that_is_dead_by_a_lost_worker_holds_its_key(self, store: Store) -> None:
        first, second = await self.add_in_order(store, 2, keeps_key=True, max_attempts=1)
        await self.start(store, *await self.take(store, first))

        await self.lose_worker(store)

        assert await self.seen(store, first, second) == [TaskState.DEAD, BLOCKED]
        assert await self.granted(store) == []

    async def test_a_task_that_is_reopened_has_its_key(self, store: Store) -> None:
        first, second = await self.holding(store)

        await store.retry(first)

        await self.run(store, first)
        await self.run(store, second)

    async def test_a_replay_takes_the_key_over(self, store: Store) -> None:
        first, second = await self.holding(store)

        new = await self.replay(store, first)
        again = await self.replay(store, first, again=True)

        await self.run(store, new)
        await self.run(store, second)
        await self.run(store, again)

    async def test_a_key_is_passed_on_when_its_letter_is_discarded(self, store: Store) -> None:
        first, second = await self.holding(store)

        await store.discard([first])

        assert await self.granted(store) == [second]

    async def test_a_key_is_passed_on_when_the_time_of_its_letter_is_over(
        self, store: Store
    ) -> None:
        _, second = await self.holding(store, retention=timedelta(0))
        await self.advance(store, 2 * DAY)

        await store.retain(leadership=await self.elect(store))

        assert await self.granted(store) == [second]

    async def test_a_replay_of_a_task_that_holds_nothing_waits_behind_the_others(
        self, store: Store
    ) -> None:
        first, second = await self.add_in_order(store, 2)
        await self.run(store, first, Outcome.DEAD)
        await self.sweep(store)

        new = await self.replay(store, first)

        await self.run(store, second)
        await self.run(store, new)


class GateRules(GateSteps):
    """What is seen of tasks that wait at gates, and what may be done to them."""

    async def test_a_task_passes_the_gate_of_its_key_and_then_that_of_its_value(
        self, store: Store
    ) -> None:
        await store.set_value_rule(ONE)
        (busy,) = await self.add_of(store, "acme")
        claim, task = await self.take(store, busy)
        first, second = await self.add_of(store, "acme", 2, ordering_key=KEY)
        (third,) = await self.add_of(store, "other", ordering_key=KEY)

        assert await self.granted(store) == []
        assert await self.seen(store, first, second, third) == [BLOCKED] * 3
        await self.settle(store, claim, task, Outcome.COMPLETED)
        for task_id in (first, second, third):
            await self.run(store, task_id)

    async def test_whoever_waits_for_a_key_takes_no_place_of_its_value(self, store: Store) -> None:
        await store.set_value_rule(ONE)
        first, _ = await self.add_of(store, "acme", 2, ordering_key=KEY)
        await self.add_of(store, "other", ordering_key=KEY)
        (free,) = await self.add_of(store, "other")

        assert set(await self.granted(store)) == {first, free}

    async def test_a_task_that_comes_back_later_keeps_its_key_and_not_its_place_of_a_value(
        self, store: Store
    ) -> None:
        await store.set_value_rule(ONE)
        first, second = await self.add_of(store, "acme", 2, ordering_key=KEY)
        claim, task = await self.take(store, first)
        (free,) = await self.add_of(store, "acme")

        await self.settle(store, claim, task, Outcome.SNOOZED, delay=60.0)

        assert await self.granted(store) == [free]
        assert await self.seen(store, first, second) == [SCHEDULED, BLOCKED]

    async def test_what_waits_only_for_somebody_to_look_is_pending(self, store: Store) -> None:
        await store.set_value_rule(TWO)
        keyed = await self.add_in_order(store, 2)
        acme = await self.add_of(store, "acme", 3)
        (both,) = await self.add_of(store, "acme", ordering_key="account 8")

        expected = [PENDING, BLOCKED, PENDING, PENDING, BLOCKED, BLOCKED]
        assert await self.seen(store, *keyed, *acme, both) == expected
        await self.sweep(store)
        assert await self.seen(store, *keyed, *acme, both) == expected
        await store.cancel_many([keyed[0], acme[0]], "too late")
        assert await self.seen(store, keyed[1], acme[2], both) == [PENDING, PENDING, BLOCKED]

    async def test_blocked_tasks_are_listed_and_counted(self, store: Store) -> None:
        await store.set_value_rule(ONE)
        first, second = await self.add_in_order(store, 2, queue="bulk")
        third, fourth = await self.add_of(store, "acme", 2)
        plain = await self.add(store, delay=60.0)

        assert await self.listed(store, statuses=(BLOCKED,)) == [fourth, second]
        assert await self.listed(store, statuses=(PENDING,)) == [third, first]
        assert await self.listed(store, statuses=(BLOCKED,), queue="bulk") == [second]
        assert await self.listed(store) == [plain, fourth, third, second, first]
        counts = {
            queue.name: {state: number for state, number in queue.counts.items() if number}
            for queue in await store.queues()
        }
        assert counts == {
            "bulk": {PENDING: 1, BLOCKED: 1},
            "default": {PENDING: 1, BLOCKED: 1, SCHEDULED: 1},
        }

    async def test_a_blocked_task_that_is_changed_keeps_its_place(self, store: Store) -> None:
        await store.set_value_rule(ONE)
        keyed = await self.add_in_order(store, 3)
        acme = await self.add_of(store, "acme", 3)
        claim = await self.claim(store)
        assert {task.id for task in claim.tasks} == {keyed[0], acme[0]}

        for task_id in (keyed[2], acme[2]):
            await store.change(task_id, Change(priority=30, queue="bulk", delay=0.0))

        for number in (1, 2):
            settlements = [self.settlement(claim, one, Outcome.COMPLETED) for one in claim.tasks]
            await store.settle(settlements)
            claim = await self.claim(store)
            assert {task.id for task in claim.tasks} == {keyed[number], acme[number]}
        assert {(task.priority, task.queue) for task in claim.tasks} == {(30, "bulk")}

    async def test_a_task_that_is_put_off_does_not_wait_at_the_gate_of_its_value(
        self, store: Store
    ) -> None:
        await store.set_value_rule(ONE)
        first, second, third = await self.add_of(store, "acme", 3)
        await self.sweep(store)

        await store.change(second, Change(delay=60.0))
        await store.change(first, Change(delay=120.0))

        assert await self.seen(store, first, second) == [SCHEDULED, SCHEDULED]
        await self.run(store, third)
        await self.pass_time(store, 61)
        await self.run(store, second)

    async def test_a_blocked_task_that_is_put_off_still_waits_for_its_key(
        self, store: Store
    ) -> None:
        first, second, third = await self.add_in_order(store, 3)
        claim, task = await self.take(store, first)

        await store.change(second, Change(delay=60.0))

        assert await self.seen(store, second) == [BLOCKED]
        await self.settle(store, claim, task, Outcome.COMPLETED)
        assert await self.seen(store, second, third) == [SCHEDULED, BLOCKED]

    async def test_a_blocked_task_that_is_cancelled_is_left_out(self, store: Store) -> None:
        await store.set_value_rule(ONE)
        keyed = await self.add_in_order(store, 3)
        acme = await self.add_of(store, "acme", 3)
        claim = await self.claim(store)

        answer = await store.cancel(keyed[1], "too late")
        (other,) = await store.cancel_many([acme[1]], "too late")

        assert (answer, other) == (CancelAnswer.CANCELLED, CancelAnswer.CANCELLED)
        assert await self.granted(store) == []
        await store.settle([self.settlement(claim, one, Outcome.COMPLETED) for one in claim.tasks])
        assert set(await self.granted(store)) == {keyed[2], acme[2]}

    async def test_a_reopened_task_waits_at_the_gate_of_its_value(self, store: Store) -> None:
        await store.set_value_rule(ONE)
        first, second = await self.add_of(store, "acme", 2)
        await self.run(store, first, Outcome.FAILED)

        await store.retry(first)

        await self.run(store, second)
        await self.run(store, first)

    async def test_tasks_that_may_be_let_through_are_work(self, store: Store) -> None:
        await store.set_value_rule(ValueRule("resize", rate=0.1, burst=1.0))
        before = await store.has_work(["resize"], None)
        first, _ = await self.add_of(store, "acme", 2)

        added = [await store.has_work([name], None) for name in TYPES]
        await self.run(store, first)
        refilling = [await store.has_work([name], None) for name in TYPES]

        assert (before, added, refilling) == (False, [True, False], [True, False])

    async def test_tasks_behind_one_that_is_scheduled_are_no_work(self, store: Store) -> None:
        (first,) = await self.add_in_order(store, 1, delay=60.0)
        alone = await store.has_work(["resize"], None)
        await self.add_in_order(store, 1)
        await self.sweep(store)

        assert await self.seen(store, first) == [SCHEDULED]
        assert (alone, await store.has_work(["resize"], None)) == (False, False)

    async def test_gates_that_were_called_are_opened(self, store: Store) -> None:
        nothing = (await store.due()).gates, await store.open_gates(10)
        first, second = await self.add_in_order(store, 2)

        called = (await store.due()).gates
        answered = await store.open_gates(10)
        more = (await store.due()).gates, await store.open_gates(10)

        assert nothing == (False, 0)
        assert (called, answered > 0) == (True, True)
        assert more == (False, 0)
        assert await self.seen(store, first, second) == [PENDING, BLOCKED]
        assert await self.granted(store) == [first]
