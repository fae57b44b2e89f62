"""The rules of a store about tasks that have to begin by a certain time."""

# ruff: noqa: S101 - tests assert

from datetime import timedelta
from uuid import UUID

import pytest

from windlass.model.limits import EXPIRED
from windlass.model.task import Answer, Expired, NewTask, Outcome, TaskState
from windlass.store.port import Store
from windlass.testing.store_contract.steps import LEASE, SECOND, Steps, new_id

MINUTE = timedelta(minutes=1)


class ExpireRules(Steps):
    """A task that was not started in time is cancelled, and one that was is not."""

    async def expire(self, store: Store, limit: int = 100) -> int:
        leadership = await self.elect(store)
        expired = await store.expire(limit, leadership=leadership)
        await store.resign(leadership)
        return expired.cancelled

    async def test_a_task_in_time_is_granted_as_any_other(self, store: Store) -> None:
        await self.add(store, expires=60.0)
        await self.advance(store, timedelta(seconds=59))

        assert await self.expire(store) == 0
        _, task = await self.claim_one(store)
        assert task.cancel_reason is None

    async def test_a_late_task_is_granted_to_be_cancelled(self, store: Store) -> None:
        late = await self.add(store, expires=60.0)
        other = await self.add(store)
        await self.advance(store, MINUTE + SECOND)

        claim = await self.claim(store)

        assert {task.id: task.cancel_reason for task in claim.tasks} == {late: EXPIRED, other: None}

    async def test_a_late_task_that_waits_is_cancelled_by_the_leader(self, store: Store) -> None:
        pending = await self.add(store, expires=60.0)
        scheduled = await self.add(store, expires=60.0, delay=3600.0)
        in_time = await self.add(store, expires=120.0)
        never = await self.add(store)
        await self.advance(store, MINUTE + SECOND)

        assert await self.expire(store, limit=1) == 1
        assert await self.expire(store) == 1
        assert await self.expire(store) == 0

        for task_id in (pending, scheduled):
            record = await store.get(task_id)
            assert (record.status, record.last_error) == (TaskState.CANCELLED, EXPIRED)
            assert record.attempts == 0
        assert await self.status(store, in_time) is TaskState.PENDING
        assert await self.status(store, never) is TaskState.PENDING

    async def test_those_that_expired_first_are_cancelled_first(self, store: Store) -> None:
        last, first = [await self.add(store, expires=expires) for expires in (20.0, 10.0)]
        await self.advance(store, MINUTE)

        assert await self.expire(store, limit=1) == 1

        assert await self.status(store, first) is TaskState.CANCELLED
        assert await self.status(store, last) is TaskState.PENDING

    async def test_an_expiry_says_whether_there_may_be_more(self, store: Store) -> None:
        await self.add_many(store, 3, expires=10.0)
        await self.advance(store, MINUTE)
        leadership = await self.elect(store)

        assert await store.expire(2, leadership=leadership) == Expired(2, has_more=True)
        assert await store.expire(2, leadership=leadership) == Expired(1, has_more=False)

    async def test_a_time_may_be_given_instead_of_seconds(self, store: Store) -> None:
        task_id = await self.add(store, expires=await store.now() + MINUTE)
        await self.advance(store, MINUTE + SECOND)

        assert await self.expire(store) == 1
        assert await self.status(store, task_id) is TaskState.CANCELLED

    async def test_what_runs_does_not_expire(self, store: Store) -> None:
        task_id = await self.add(store, expires=5.0)
        claim, task = await self.claim_one(store)
        await self.advance(store, timedelta(seconds=6))

        assert await self.expire(store) == 0
        assert await self.settle(store, claim, task, Outcome.COMPLETED) is Answer.APPLIED
        assert await self.status(store, task_id) is TaskState.COMPLETED

    async def test_a_task_that_was_tried_does_not_expire(self, store: Store) -> None:
        task_id = await self.add(store, expires=5.0)
        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, Outcome.RETRIED)
        await self.advance(store, timedelta(seconds=6))

        assert await self.expire(store) == 0
        _, task = await self.claim_one(store)
        assert (task.id, task.cancel_reason) == (task_id, None)

    @pytest.mark.parametrize("delay", [0.0, 3.0, 10.0])
    @pytest.mark.parametrize("outcome", [Outcome.SNOOZED, Outcome.RELEASED])
    async def test_a_task_that_began_and_came_back_does_not_expire(
        self, store: Store, outcome: Outcome, delay: float
    ) -> None:
        task_id = await self.add(store, expires=5.0)
        other = await self.add(store, expires=5.0)
        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, outcome, delay=delay, started_after=0.01)
        await self.advance(store, timedelta(seconds=6))

        assert await self.expire(store) == 1
        assert await self.status(store, other) is TaskState.CANCELLED
        await self.advance(store, timedelta(seconds=6))
        await store.promote(10)
        _, task = await self.claim_one(store)
        assert (task.id, task.cancel_reason) == (task_id, None)

    @pytest.mark.parametrize("outcome", [Outcome.SNOOZED, Outcome.RELEASED])
    async def test_a_task_that_came_back_unbegun_expires(
        self, store: Store, outcome: Outcome
    ) -> None:
        task_id = await self.add(store, expires=5.0)
        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, outcome)
        await self.advance(store, timedelta(seconds=6))

        assert await self.expire(store) == 1
        assert await self.status(store, task_id) is TaskState.CANCELLED

    async def test_a_task_of_a_lost_worker_expires_only_if_it_had_not_begun(
        self, store: Store
    ) -> None:
        begun, waiting = await self.add_many(store, 2, expires=5.0)
        claim = await self.claim(store)
        (task,) = [task for task in claim.tasks if task.id == begun]
        await self.start(store, claim, task)
        await self.advance(store, LEASE + SECOND)
        await store.rescue(10)

        assert await self.expire(store) == 1
        assert await self.status(store, begun) is TaskState.PENDING
        assert await self.status(store, waiting) is TaskState.CANCELLED

    async def test_a_reopened_task_does_not_expire(self, store: Store) -> None:
        task_id = await self.add(store, expires=5.0)
        await self.advance(store, timedelta(seconds=6))
        assert await self.expire(store) == 1
        await store.retry(task_id)

        assert await self.expire(store) == 0
        _, task = await self.claim_one(store)
        assert task.cancel_reason is None

    @pytest.mark.parametrize("outcome", [Outcome.DEAD, Outcome.FAILED, Outcome.CANCELLED])
    async def test_a_task_reopened_in_time_does_not_expire(
        self, store: Store, outcome: Outcome
    ) -> None:
        task_id = await self.add(store, expires=5.0)
        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, outcome)
        await store.retry(task_id)
        await self.advance(store, timedelta(seconds=6))

        assert await self.expire(store) == 0
        _, task = await self.claim_one(store)
        assert (task.id, task.cancel_reason) == (task_id, None)

    async def test_a_lost_settlement_does_not_keep_a_task_from_expiring(self, store: Store) -> None:
        task_id = await self.add(store, expires=5.0)
        claim, task = await self.claim_one(store)
        await self.lose_worker(store)

        answer = await self.settle(store, claim, task, Outcome.SNOOZED, started_after=0.01)

        assert answer is Answer.LOST
        assert await self.expire(store) == 1
        assert await self.status(store, task_id) is TaskState.CANCELLED

    async def test_a_repeated_enqueue_leaves_the_time_as_it_was(self, store: Store) -> None:
        task = NewTask(new_id(), "resize", "{}", expires=60.0)
        await store.enqueue([task])
        await self.advance(store, timedelta(seconds=50))

        await store.enqueue([task], repeated=True)
        await self.advance(store, timedelta(seconds=11))

        assert await self.expire(store) == 1

    async def test_a_repeated_enqueue_brings_no_time_for_a_task_that_was_reopened_since(
        self, store: Store
    ) -> None:
        task = NewTask(new_id(), "resize", "{}", expires=60.0)
        await store.enqueue([task])
        claim, claimed = await self.claim_one(store)
        await self.settle(store, claim, claimed, Outcome.DEAD)
        await store.retry(task.id)

        await store.enqueue([task], repeated=True)
        await self.advance(store, MINUTE + SECOND)

        assert await self.expire(store) == 0
        _, again = await self.claim_one(store)
        assert (again.id, again.cancel_reason) == (task.id, None)

    async def test_a_second_task_of_a_key_brings_no_time(self, store: Store) -> None:
        first = await self.add(store, idempotency_key="k")
        asked = self.new_task(idempotency_key="k", expires=5.0)
        (answer,) = await store.enqueue([asked])
        await self.advance(store, timedelta(seconds=6))

        assert (answer.id, answer.created) == (first, False)
        assert await self.expire(store) == 0
        assert await self.status(store, first) is TaskState.PENDING

    async def test_of_many_tasks_each_has_its_own_time(self, store: Store) -> None:
        tasks = [self.new_task(expires=None if n % 3 else float(n)) for n in range(30)]
        await store.enqueue(tasks)
        await self.advance(store, timedelta(seconds=15))

        assert await self.expire(store) == 6
        cancelled = await self.listed(store, statuses=(TaskState.CANCELLED,))
        assert set(cancelled) == {task.id for task in tasks[:16] if task.expires is not None}
        assert all(isinstance(task_id, UUID) for task_id in cancelled)
