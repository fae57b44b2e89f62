"""Rules of explaining: tasks that wait at gates, or will."""

# ruff: noqa: S101 - tests assert

from uuid import UUID

import pytest

from windlass.model.explanation import (
    Cause,
    GateCalled,
    GateHolder,
    KeyHeld,
    ValueLimitReached,
    ValueRateLimited,
    WaitsForTime,
)
from windlass.model.rule import ValueRule
from windlass.model.task import Change, Outcome, TaskState
from windlass.store.port import Store
from windlass.testing.store_contract.explain import ExplainSteps
from windlass.testing.store_contract.gate import KEY, ONE, TWO, GateSteps
from windlass.testing.store_contract.steps import AGEING, OTHER_WORKER, SECOND

KINDS = (KeyHeld, ValueLimitReached, ValueRateLimited, WaitsForTime, GateCalled)


class ExplainGateRules(ExplainSteps, GateSteps):
    """Why a task that has gates is not running."""

    async def kinds(self, store: Store, task_id: UUID) -> set[type]:
        """What is said of its gates and its time."""
        found = (await self.explain(store, task_id)).reasons
        return {type(one) for one in found if isinstance(one, KINDS)}

    async def test_a_delay_in_line_for_an_ordering_key_is_told_with_the_key(
        self, store: Store
    ) -> None:
        (first,) = await self.add_in_order(store, 1)
        await self.take(store, first)
        (task_id,) = await self.add_in_order(store, 1, delay=3600.0)
        record = await store.get(task_id)

        held = await self.reason(store, task_id, KeyHeld)
        waits = await self.reason(store, task_id, WaitsForTime)

        assert held.holder is not None
        assert held.holder.task_id == first
        assert waits == WaitsForTime(record.scheduled_for, Cause.ASKED)
        await self.advance(store, 3601 * SECOND)
        assert await self.kinds(store, task_id) == {KeyHeld}

    async def test_a_delay_that_somebody_asks_for_after_a_reopening_is_no_retry(
        self, store: Store
    ) -> None:
        (first, task_id) = await self.add_in_order(store, 2)
        await self.run(store, first)
        await self.run(store, task_id, Outcome.FAILED)
        (other,) = await self.add_in_order(store, 1)
        await self.take(store, other)
        await store.retry(task_id)
        await store.change(task_id, Change(delay=3600.0))

        assert (await self.reason(store, task_id, WaitsForTime)).cause is Cause.ASKED

    async def test_a_full_value_is_told_to_one_in_line_for_an_ordering_key(
        self, store: Store
    ) -> None:
        await store.set_value_rule(ONE)
        (first,) = await self.add_in_order(store, 1)
        (acme,) = await self.add_of(store, "acme")
        assert set(await self.granted(store)) == {first, acme}
        await self.add_of(store, "acme", 2)
        (task_id,) = await self.add_of(store, "acme", ordering_key=KEY)

        told = await self.explain(store, task_id)
        reached = await self.reason(store, task_id, ValueLimitReached)

        assert not told.claimable
        assert await self.kinds(store, task_id) == {KeyHeld, ValueLimitReached}
        assert (reached.slots, reached.used, reached.first) == (1, 1, 2)
        assert [holder.task_id for holder in reached.holders] == [acme]

    async def test_what_its_key_lets_through_may_still_wait_for_its_value(
        self, store: Store
    ) -> None:
        await store.set_value_rule(ONE)
        await self.add_of(store, "acme")
        await self.claim(store)
        (task_id,) = await self.add_of(store, "acme", ordering_key=KEY)

        before = await self.explain(store, task_id)
        before_kinds = await self.kinds(store, task_id)
        await self.sweep(store)

        assert not before.claimable
        assert before_kinds == {GateCalled, ValueLimitReached}
        assert await self.kinds(store, task_id) == {ValueLimitReached}

    async def test_a_full_value_is_told_to_one_that_waits_for_its_time(self, store: Store) -> None:
        await store.set_value_rule(ONE)
        (task_id,) = await self.add_of(store, "acme", delay=60.0)
        assert await self.kinds(store, task_id) == {WaitsForTime}
        (held,) = await self.add_of(store, "acme")
        await self.claim(store)

        reached = await self.reason(store, task_id, ValueLimitReached)

        assert [holder.task_id for holder in reached.holders] == [held]
        assert await self.kinds(store, task_id) == {WaitsForTime, ValueLimitReached}

    async def test_what_is_put_off_does_not_wait_for_itself(self, store: Store) -> None:
        await store.set_value_rule(ONE)
        (task_id,) = await self.add_of(store, "acme", ordering_key=KEY)
        await self.run(store, task_id, Outcome.SNOOZED, delay=60.0)

        assert await self.kinds(store, task_id) == {WaitsForTime}

    @pytest.mark.parametrize("ordering_key", [None, KEY])
    async def test_the_rate_of_a_value_is_told_before_it_is_come_to(
        self, store: Store, ordering_key: str | None
    ) -> None:
        await store.set_value_rule(ValueRule("resize", rate=0.1, burst=1))
        await self.add_in_order(store, 1)
        await self.add_of(store, "acme")
        await self.claim(store)
        (task_id,) = await self.add_of(store, "acme", delay=60.0, ordering_key=ordering_key)

        told = await self.explain(store, task_id)
        limited = await self.reason(store, task_id, ValueRateLimited)

        assert told.status is (TaskState.BLOCKED if ordering_key else TaskState.SCHEDULED)
        assert SECOND * 8 < limited.until - told.at <= SECOND * 10

    async def test_who_is_about_to_leave_holds_nothing(self, store: Store) -> None:
        await store.set_value_rule(TWO)
        leaving, staying, task_id = await self.add_of(store, "acme", 3)
        await self.sweep(store)
        await store.cancel(leaving, "too late")

        gate = (await store.situation(task_id, ageing=AGEING)).gate

        assert gate is not None
        assert (gate.used, [holder.task_id for holder in gate.holders]) == (1, [staying])

    async def test_what_came_back_is_named_with_the_worker_that_has_it_now(
        self, store: Store
    ) -> None:
        (held, task_id) = await self.add_in_order(store, 2)
        await self.add(store)
        claim = await self.claim(store)
        (back,) = [task for task in claim.tasks if task.id == held]
        await self.start(store, claim, back)
        await self.settle(store, claim, back, Outcome.RELEASED)
        await self.claim(store, worker_id=OTHER_WORKER)

        reason = await self.reason(store, task_id, KeyHeld)

        assert reason.holder == GateHolder(held, TaskState.CLAIMED, OTHER_WORKER)
