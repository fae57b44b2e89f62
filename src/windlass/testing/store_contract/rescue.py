"""Rules of bringing tasks back: rescue and promotion."""

# ruff: noqa: S101 - tests assert

import asyncio
from dataclasses import replace

import pytest

from windlass.model.task import (
    Answer,
    Outcome,
    Rescued,
    TaskState,
    TypeDefaults,
)
from windlass.store.port import Store
from windlass.testing.store_contract.steps import (
    AGEING,
    LEASE,
    OTHER_WORKER,
    SECOND,
    WORKER,
    Steps,
    needs,
    without_times,
)


class RescueRules(Steps):
    """Rescue rules."""

    async def test_a_claim_that_has_not_expired_is_left_alone(self, store: Store) -> None:
        task_id = await self.add(store)
        await self.claim(store)
        await self.advance(store, LEASE - SECOND)

        rescued = await store.rescue(10)

        assert rescued == Rescued()
        assert await self.status(store, task_id) is TaskState.CLAIMED

    async def test_a_task_that_had_not_started_returns_without_an_attempt_used(
        self, store: Store
    ) -> None:
        task_id = await self.add(store)
        before = await store.get(task_id)
        await self.claim(store)

        rescued = await self.lose_worker(store)

        assert rescued == Rescued(claims=1, returned=1)
        assert await store.get(task_id) == replace(before, generation=2)

    async def test_a_task_that_was_running_returns_with_an_attempt_used(self, store: Store) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)
        await self.start(store, claim, task)

        rescued = await self.lose_worker(store)

        record = await store.get(task_id)
        assert rescued == Rescued(claims=1, returned=1, lost_attempts=1)
        assert record.status is TaskState.PENDING
        assert (record.attempts, record.generation) == (1, 2)
        assert record.last_error is not None
        assert str(WORKER) in record.last_error
        (error,) = record.errors
        assert error["started_at"] is not None
        assert without_times(error) == {
            "type": "WorkerLost",
            "message": record.last_error,
            "class": "transient",
            "attempt": 1,
            "generation": 1,
            "worker_id": str(WORKER),
        }

    async def test_a_running_task_without_attempts_left_is_dead(self, store: Store) -> None:
        task_id = await self.add(store, max_attempts=1)
        claim, task = await self.claim_one(store)
        await self.start(store, claim, task)

        rescued = await self.lose_worker(store)

        record = await store.get(task_id)
        assert rescued == Rescued(claims=1, lost_attempts=1, dead=1, died=(task_id,))
        assert record.status is TaskState.DEAD
        assert record.attempts == 1
        assert record.last_error == record.errors[0]["message"]
        assert record.errors[0]["type"] == "WorkerLost"
        assert record.worker_id == str(WORKER)
        assert record.started_at is not None

    async def test_a_lost_attempt_of_a_stopped_type_ends_its_task(self, store: Store) -> None:
        task_id, other_id = await self.add(store), await self.add(store, type="mail")
        claim = await self.claim(store, types=("resize", "mail"))
        for task in claim.tasks:
            await self.start(store, claim, task)
        await store.stop_retries("resize", "the images are gone")

        rescued = await self.lose_worker(store)

        record = await store.get(task_id)
        assert rescued == Rescued(claims=1, returned=1, lost_attempts=2, dead=1, died=(task_id,))
        assert (record.status, record.attempts) == (TaskState.DEAD, 1)
        assert record.last_error == f"worker {WORKER} was lost"
        assert without_times(record.errors[-1]) == {
            "type": "WorkerLost",
            "message": record.last_error,
            "class": "transient",
            "given_up": "retries of this type are stopped: the images are gone",
            "attempt": 1,
            "generation": 1,
            "worker_id": str(WORKER),
        }
        assert await self.status(store, other_id) is TaskState.PENDING

    @pytest.mark.parametrize("max_age", [LEASE.total_seconds() - 1, 3600.0, None])
    async def test_a_lost_attempt_of_a_task_that_is_too_old_is_its_last(
        self, store: Store, max_age: float | None
    ) -> None:
        await store.register_types([TypeDefaults("resize"), TypeDefaults("mail")])
        await store.register_types([TypeDefaults("resize", max_age=max_age)])
        begun, waiting, other = await self.add_many(store, 3)
        claim = await self.claim(store, limit=2)
        await self.start(store, claim, claim.tasks[0])

        await self.lose_worker(store)

        record = await store.get(begun)
        assert await self.status(store, waiting) is TaskState.PENDING
        assert await self.status(store, other) is TaskState.PENDING
        if max_age is None or max_age > LEASE.total_seconds():
            assert record.status is TaskState.PENDING
            assert "given_up" not in record.errors[-1]
        else:
            assert (record.status, record.attempts) == (TaskState.DEAD, 1)
            assert record.errors[-1]["given_up"] == (
                "its next attempt would begin more than 29 s after it was enqueued"
            )

    async def test_the_age_of_a_reopened_task_counts_from_its_first_attempt_since(
        self, store: Store
    ) -> None:
        await store.register_types([TypeDefaults("resize", max_age=45.0)])
        task_id = await self.end(store, Outcome.DEAD)
        await self.advance(store, 100 * SECOND)
        await store.retry(task_id)

        states = []
        for _ in range(3):
            claim, task = await self.claim_one(store)
            await self.start(store, claim, task)
            await self.lose_worker(store)
            states.append(await self.status(store, task_id))
            if states[-1] is TaskState.DEAD:
                break

        assert states == [TaskState.PENDING, TaskState.DEAD]

    async def test_a_last_attempt_that_is_lost_was_not_given_up(self, store: Store) -> None:
        task_id = await self.add(store, max_attempts=1)
        await store.stop_retries("resize", "stop")
        claim, task = await self.claim_one(store)
        await self.start(store, claim, task)

        await self.lose_worker(store)

        assert "given_up" not in (await store.get(task_id)).errors[-1]

    async def test_what_had_not_started_comes_back_whatever_is_stopped(self, store: Store) -> None:
        await store.register_types([TypeDefaults("resize", max_age=1.0)])
        task_id = await self.add(store)
        await self.claim(store)
        await store.stop_retries("resize", "stop")

        assert await self.lose_worker(store) == Rescued(claims=1, returned=1)
        assert await self.status(store, task_id) is TaskState.PENDING

    async def test_a_task_that_had_not_started_never_dies_of_lost_workers(
        self, store: Store
    ) -> None:
        task_id = await self.add(store, max_attempts=1)

        for alone in (False, False, True, True):
            await self.claim(store, alone=alone)
            await self.lose_worker(store)

        record = await store.get(task_id)
        assert record.status is TaskState.PENDING
        assert (record.attempts, record.generation) == (0, 5)

    async def test_a_lost_attempt_is_no_recovery(self, store: Store) -> None:
        task_id = await self.add(store)
        for _ in range(3):
            claim, task = await self.claim_one(store)
            await self.start(store, claim, task)
            await self.lose_worker(store)

        granted = await self.granted(store)

        assert granted == [task_id]

    async def test_a_dead_task_keeps_the_errors_before_its_lost_attempt(self, store: Store) -> None:
        task_id = await self.add(store, max_attempts=2)
        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, Outcome.RETRIED)
        claim, task = await self.claim_one(store)
        await self.start(store, claim, task)

        await self.lose_worker(store)

        errors = (await store.get(task_id)).errors
        assert [error["type"] for error in errors] == ["ValueError", "WorkerLost"]

    async def test_a_task_whose_cancellation_was_asked_for_ends_instead_of_returning(
        self, store: Store
    ) -> None:
        claimed, running = await self.add_many(store, 2)
        claim = await self.claim(store)
        await self.start(store, claim, claim.tasks[1])
        await store.cancel(claimed, "first")
        await store.cancel(running, "second")

        rescued = await self.lose_worker(store)

        records = [await store.get(task_id) for task_id in (claimed, running)]
        assert rescued == Rescued(claims=1, cancelled=2)
        assert [record.status for record in records] == [TaskState.CANCELLED] * 2
        assert [record.last_error for record in records] == ["first", "second"]
        assert [record.attempts for record in records] == [0, 0]

    async def test_only_what_a_half_settled_claim_still_holds_returns(self, store: Store) -> None:
        tasks = await self.add_many(store, 4)
        claim = await self.claim(store)
        await store.settle(
            [
                self.settlement(claim, claim.tasks[0], Outcome.COMPLETED),
                self.settlement(claim, claim.tasks[1], Outcome.RETRIED, delay=999.0),
                self.settlement(claim, claim.tasks[2], Outcome.DEAD),
            ]
        )

        rescued = await self.lose_worker(store)

        assert rescued == Rescued(claims=1, returned=1)
        assert [await self.status(store, task_id) for task_id in tasks] == [
            TaskState.COMPLETED,
            TaskState.SCHEDULED,
            TaskState.DEAD,
            TaskState.PENDING,
        ]

    async def test_a_task_that_is_ready_again_is_not_touched_by_the_rescue_of_its_old_claim(
        self, store: Store
    ) -> None:
        first, _ = await self.add_many(store, 2)
        claim = await self.claim(store)
        await self.settle(store, claim, claim.tasks[0], Outcome.RETRIED)
        before = await store.get(first)

        rescued = await self.lose_worker(store)

        assert rescued.returned == 1
        assert await store.get(first) == before

    async def test_the_next_owner_is_not_touched_by_the_rescue_of_an_old_claim(
        self, store: Store
    ) -> None:
        await self.add_many(store, 2)
        old = await self.claim(store)
        await self.settle(store, old, old.tasks[0], Outcome.RELEASED)
        claim, task = await self.claim_one(store, worker_id=OTHER_WORKER, lease=10 * LEASE)
        await self.start(store, claim, task)

        rescued = await self.lose_worker(store)

        assert rescued == Rescued(claims=1, returned=1)
        assert await self.status(store, task.id) is TaskState.RUNNING
        assert await self.settle(store, claim, task, Outcome.COMPLETED) is Answer.APPLIED

    async def test_a_task_reopened_by_hand_is_not_touched_by_the_rescue_of_its_old_claim(
        self, store: Store
    ) -> None:
        first, _ = await self.add_many(store, 2)
        claim = await self.claim(store)
        await self.settle(store, claim, claim.tasks[0], Outcome.FAILED)
        await store.retry(first)
        before = await store.get(first)

        await self.lose_worker(store)

        assert await store.get(first) == before

    async def test_a_sweep_takes_no_more_claims_than_its_limit_longest_expired_first(
        self, store: Store
    ) -> None:
        tasks = await self.add_many(store, 3)
        await self.claim_one(store, lease=3 * SECOND)
        await self.claim_one(store, lease=1 * SECOND)
        await self.claim_one(store, lease=2 * SECOND)
        await self.advance(store, LEASE)

        rescued = await store.rescue(2)

        assert rescued == Rescued(claims=2, returned=2)
        assert [await self.status(store, task_id) for task_id in tasks] == [
            TaskState.CLAIMED,
            TaskState.PENDING,
            TaskState.PENDING,
        ]

    async def test_rescued_tasks_come_first_and_in_their_old_order(self, store: Store) -> None:
        tasks = await self.add_many(store, 4)
        await self.claim(store, limit=3)
        await self.lose_worker(store)

        granted = await self.granted(store)

        assert granted == tasks

    async def test_a_rescued_claim_is_rescued_once(self, store: Store) -> None:
        await self.add(store)
        await self.claim(store)
        await self.lose_worker(store)

        rescued = await store.rescue(10)

        assert rescued == Rescued()

    @needs("concurrent_writers")
    async def test_sweeps_at_once_rescue_each_claim_once(self, store: Store) -> None:
        await self.add_many(store, 12)
        for _ in range(6):
            await self.claim(store, limit=2)
        await self.advance(store, LEASE + SECOND)

        sweeps = await asyncio.gather(*(store.rescue(100) for _ in range(4)))

        assert sum(rescued.claims for rescued in sweeps) == 6
        assert sum(rescued.returned for rescued in sweeps) == 12


class PromoteRules(Steps):
    """Promote rules."""

    async def test_a_due_task_is_made_ready(self, store: Store) -> None:
        task_id = await self.add(store, delay=10.0)
        scheduled_for = (await store.get(task_id)).scheduled_for
        await self.advance(store, 11 * SECOND)

        promoted = await store.promote(10)

        record = await store.get(task_id)
        assert promoted == 1
        assert record.status is TaskState.PENDING
        assert record.scheduled_for == scheduled_for
        assert record.generation == 1

    async def test_a_task_that_is_not_due_waits(self, store: Store) -> None:
        task_id = await self.add(store, delay=10.0)
        await self.advance(store, 9 * SECOND)

        promoted = await store.promote(10)

        assert promoted == 0
        assert await self.status(store, task_id) is TaskState.SCHEDULED

    async def test_no_more_than_the_limit_is_promoted_oldest_first(self, store: Store) -> None:
        third, first, second = [await self.add(store, delay=delay) for delay in (9.0, 7.0, 8.0)]
        await self.advance(store, 10 * SECOND)

        promoted = await store.promote(2)

        assert promoted == 2
        assert await self.granted(store) == [first, second]
        assert await self.status(store, third) is TaskState.SCHEDULED

    async def test_a_promoted_task_ranks_by_the_time_it_was_due(self, store: Store) -> None:
        due = await self.add(store, delay=1.0, priority=0)
        await self.advance(store, 10 * AGEING + 3 * SECOND)
        new = await self.add(store, priority=10)
        await store.promote(10)

        granted = await self.granted(store)

        assert granted == [due, new]

    async def test_a_promoted_retry_keeps_its_attempts(self, store: Store) -> None:
        await self.add(store)
        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, Outcome.RETRIED, delay=5.0)
        await self.advance(store, 6 * SECOND)
        await store.promote(10)

        _, again = await self.claim_one(store)

        assert (again.attempts, again.generation) == (1, 2)

    @needs("concurrent_writers")
    async def test_promotions_at_once_promote_each_task_once(self, store: Store) -> None:
        tasks = await self.add_many(store, 30, delay=1.0)
        await self.advance(store, 2 * SECOND)

        promoted = await asyncio.gather(*(store.promote(100) for _ in range(4)))

        assert sum(promoted) == 30
        assert sorted(await self.granted(store, limit=100)) == sorted(tasks)
