"""Rules of settling: every outcome, repeated, late and lost."""

# ruff: noqa: S101 - tests assert

import asyncio
import json
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest

from windlass.model.task import (
    Answer,
    Outcome,
    Settlement,
    TaskState,
)
from windlass.store.port import Store
from windlass.testing.store_contract.steps import (
    ENDING,
    ERROR,
    LEASE,
    OTHER_WORKER,
    RETURNING,
    SECOND,
    WORKER,
    Steps,
    needs,
    new_id,
    without_times,
)


class SettleRules(Steps):
    """Settle rules."""

    async def test_settling_nothing_answers_nothing(self, store: Store) -> None:
        answers = await store.settle([])

        assert answers == []

    async def test_a_success_is_kept_with_its_result(self, store: Store) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store, worker_id=OTHER_WORKER)

        answer = await self.settle(
            store, claim, task, Outcome.COMPLETED, result='{"width": 7}', started_after=0.5
        )

        record = await store.get(task_id)
        assert answer is Answer.APPLIED
        assert record.status is TaskState.COMPLETED
        assert record.result == {"width": 7}
        assert record.attempts == 1
        assert record.generation == 1
        assert record.worker_id == str(OTHER_WORKER)
        assert record.claimed_at is not None
        assert record.started_at == record.claimed_at + timedelta(seconds=0.5)
        assert record.completed_at == record.updated_at
        assert record.last_error is None
        assert record.errors == ()

    @pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.DEAD])
    async def test_a_failure_for_good_is_kept_with_its_error(
        self, store: Store, outcome: Outcome
    ) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)

        await self.settle(store, claim, task, outcome, started_after=0.5)

        record = await store.get(task_id)
        assert record.status is TaskState(outcome)
        assert record.attempts == 1
        assert record.last_error == "no such image"
        (error,) = record.errors
        assert error["started_at"] is not None
        assert error["ended_at"] is not None
        assert without_times(error) == {
            "type": "ValueError",
            "message": "no such image",
            "attempt": 1,
            "generation": 1,
            "worker_id": str(WORKER),
        }

    async def test_a_cancelled_task_has_used_no_attempt(self, store: Store) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)

        await self.settle(
            store, claim, task, Outcome.CANCELLED, error='{"message": "no longer needed"}'
        )

        record = await store.get(task_id)
        assert record.status is TaskState.CANCELLED
        assert record.attempts == 0
        assert record.last_error == "no longer needed"
        assert record.errors == ()

    async def test_a_task_that_never_started_ends_without_a_start(self, store: Store) -> None:
        task_id = await self.end(store, Outcome.FAILED)

        record = await store.get(task_id)

        assert record.started_at is None
        assert record.errors[0]["started_at"] is None

    async def test_a_retried_task_comes_back_later_with_an_attempt_used(self, store: Store) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)

        answer = await self.settle(store, claim, task, Outcome.RETRIED, delay=60.0)

        record = await store.get(task_id)
        assert answer is Answer.APPLIED
        assert record.status is TaskState.SCHEDULED
        assert record.scheduled_for >= record.created_at + timedelta(seconds=60)
        assert (record.attempts, record.generation) == (1, 2)
        assert record.last_error == "no such image"
        assert record.errors[0]["attempt"] == 1
        assert record.worker_id is None
        assert record.claimed_at is None

    async def test_a_snoozed_task_comes_back_later_without_an_attempt_used(
        self, store: Store
    ) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)

        await self.settle(store, claim, task, Outcome.SNOOZED, delay=60.0)

        record = await store.get(task_id)
        assert record.status is TaskState.SCHEDULED
        assert record.scheduled_for >= record.created_at + timedelta(seconds=60)
        assert (record.attempts, record.generation) == (0, 2)
        assert record.errors == ()

    async def test_a_released_task_is_ready_as_if_it_had_never_left(self, store: Store) -> None:
        task_id = await self.add(store)
        before = await store.get(task_id)
        await self.advance(store, SECOND)
        claim, task = await self.claim_one(store)

        await self.settle(store, claim, task, Outcome.RELEASED)

        assert await store.get(task_id) == replace(before, generation=2)

    @pytest.mark.parametrize("outcome", [Outcome.RETRIED, Outcome.SNOOZED])
    async def test_a_task_that_returns_without_delay_is_ready_at_once(
        self, store: Store, outcome: Outcome
    ) -> None:
        await self.add(store)
        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, outcome)

        _, again = await self.claim_one(store)

        assert again.id == task.id
        assert again.generation == 2
        assert again.attempts == (outcome is Outcome.RETRIED)

    async def test_a_returning_task_that_ran_is_not_running_any_more(self, store: Store) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)
        await self.start(store, claim, task)
        await self.settle(store, claim, task, Outcome.RELEASED, reported=True)

        await self.claim(store)

        assert await self.status(store, task_id) is TaskState.CLAIMED

    async def test_errors_are_kept_oldest_first(self, store: Store) -> None:
        task_id = await self.add(store)
        for message in ("first", "second"):
            claim, task = await self.claim_one(store)
            await self.settle(
                store, claim, task, Outcome.RETRIED, error=json.dumps({"message": message})
            )

        record = await store.get(task_id)

        assert [error["message"] for error in record.errors] == ["first", "second"]
        assert [error["attempt"] for error in record.errors] == [1, 2]
        assert record.last_error == "second"

    async def test_a_late_success_keeps_the_errors_before_it(self, store: Store) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, Outcome.RETRIED)
        claim, task = await self.claim_one(store)

        await self.settle(store, claim, task, Outcome.COMPLETED)

        record = await store.get(task_id)
        assert record.last_error is None
        assert [error["attempt"] for error in record.errors] == [1]
        assert (record.attempts, record.generation) == (2, 2)

    async def test_a_last_failure_keeps_the_errors_before_it(self, store: Store) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, Outcome.RETRIED)
        claim, task = await self.claim_one(store)

        await self.settle(store, claim, task, Outcome.DEAD)

        record = await store.get(task_id)
        assert [error["attempt"] for error in record.errors] == [1, 2]
        assert [error["generation"] for error in record.errors] == [1, 2]

    @pytest.mark.parametrize("outcome", [*ENDING, *RETURNING])
    async def test_a_repeated_settlement_is_answered_and_changes_nothing(
        self, store: Store, outcome: Outcome
    ) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, outcome)
        before = await store.get(task_id)
        await self.advance(store, SECOND)

        answer = await self.settle(store, claim, task, outcome)

        assert answer is Answer.ALREADY
        assert await store.get(task_id) == before

    @pytest.mark.parametrize("outcome", [*ENDING, *RETURNING])
    async def test_a_repeated_settlement_of_a_half_settled_claim_changes_nothing(
        self, store: Store, outcome: Outcome
    ) -> None:
        first, second = await self.add_many(store, 2)
        claim = await self.claim(store)
        await self.settle(store, claim, claim.tasks[0], outcome)
        before = await store.get(first)

        answer = await self.settle(store, claim, claim.tasks[0], outcome)

        assert answer is Answer.ALREADY
        assert await store.get(first) == before
        assert await self.status(store, second) is TaskState.CLAIMED

    @pytest.mark.parametrize("outcome", RETURNING)
    async def test_a_repeated_settlement_does_not_touch_the_next_owner(
        self, store: Store, outcome: Outcome
    ) -> None:
        await self.add_many(store, 2)
        old = await self.claim(store)
        old_task = old.tasks[0]
        await self.settle(store, old, old_task, outcome)
        claim, task = await self.claim_one(store, worker_id=OTHER_WORKER)

        answer = await self.settle(store, old, old_task, outcome)

        assert task.id == old_task.id
        assert answer is Answer.ALREADY
        assert await self.settle(store, claim, task, Outcome.COMPLETED) is Answer.APPLIED

    async def test_an_end_cannot_be_replaced_by_another(self, store: Store) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, Outcome.COMPLETED, result="1")

        answer = await self.settle(store, claim, task, Outcome.FAILED)

        assert answer is Answer.ALREADY
        assert await self.status(store, task_id) is TaskState.COMPLETED

    async def test_an_expired_claim_that_nobody_rescued_may_settle(self, store: Store) -> None:
        await self.add(store)
        claim, task = await self.claim_one(store)
        await self.advance(store, 10 * LEASE)

        answer = await self.settle(store, claim, task, Outcome.COMPLETED)

        assert answer is Answer.APPLIED

    @pytest.mark.parametrize("outcome", [*ENDING, *RETURNING])
    async def test_a_lost_lease_cannot_settle(self, store: Store, outcome: Outcome) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)
        await self.lose_worker(store)
        before = await store.get(task_id)

        answer = await self.settle(store, claim, task, outcome)

        assert answer is Answer.LOST
        assert await store.get(task_id) == before

    @pytest.mark.parametrize("outcome", [*ENDING, *RETURNING])
    async def test_a_lost_lease_cannot_settle_for_the_next_owner(
        self, store: Store, outcome: Outcome
    ) -> None:
        await self.add(store)
        old, old_task = await self.claim_one(store)
        await self.lose_worker(store)
        claim, task = await self.claim_one(store, worker_id=OTHER_WORKER)

        answer = await self.settle(store, old, old_task, outcome)

        assert answer is Answer.LOST
        assert await self.settle(store, claim, task, Outcome.COMPLETED) is Answer.APPLIED

    async def test_a_lost_lease_cannot_settle_after_the_next_owner_did(self, store: Store) -> None:
        task_id = await self.add(store)
        old, old_task = await self.claim_one(store)
        await self.lose_worker(store)
        claim, task = await self.claim_one(store, worker_id=OTHER_WORKER)
        await self.settle(store, claim, task, Outcome.COMPLETED)

        answer = await self.settle(store, old, old_task, Outcome.FAILED)

        assert answer is Answer.LOST
        assert await self.status(store, task_id) is TaskState.COMPLETED

    async def test_a_claim_nobody_knows_is_lost(self, store: Store) -> None:
        answers = await store.settle([Settlement(uuid4(), new_id(), 1, Outcome.COMPLETED)])

        assert answers == [Answer.LOST]

    async def test_a_settlement_from_before_a_retry_by_hand_changes_nothing(
        self, store: Store
    ) -> None:
        await self.add_many(store, 2)
        claim = await self.claim(store)
        task = claim.tasks[0]
        await self.settle(store, claim, task, Outcome.FAILED)
        await store.retry(task.id)
        before = await store.get(task.id)

        answer = await self.settle(store, claim, task, Outcome.FAILED)

        assert answer is not Answer.APPLIED
        assert await store.get(task.id) == before

    async def test_answers_come_in_the_order_of_the_settlements(self, store: Store) -> None:
        await self.add_many(store, 9)
        claim = await self.claim(store, limit=8)
        other = await self.claim(store, worker_id=OTHER_WORKER)
        first = self.settlement(claim, claim.tasks[0], Outcome.COMPLETED)
        await store.settle([first])
        outcomes = [*RETURNING, *ENDING]
        fresh = [
            self.settlement(claim, task, outcome)
            for task, outcome in zip(claim.tasks[1:], outcomes, strict=True)
        ]
        unknown = Settlement(uuid4(), claim.tasks[1].id, 1, Outcome.FAILED, error=ERROR)
        theirs = self.settlement(other, other.tasks[0], Outcome.RELEASED)

        answers = await store.settle([unknown, *fresh[:4], first, *fresh[4:], theirs])

        applied = Answer.APPLIED
        assert answers == [
            Answer.LOST,
            *[applied] * 4,
            Answer.ALREADY,
            *[applied] * 4,
        ]

    async def test_of_several_claims_one_that_is_not_there_ends_nothing(self, store: Store) -> None:
        await self.add_many(store, 2)
        claim = await self.claim(store)
        valid = self.settlement(claim, claim.tasks[0], Outcome.COMPLETED)
        unknown = Settlement(uuid4(), claim.tasks[1].id, 1, Outcome.COMPLETED)

        answers = await store.settle([unknown, valid])

        assert answers == [Answer.LOST, Answer.APPLIED]
        assert await self.status(store, claim.tasks[1].id) is TaskState.CLAIMED

    @pytest.mark.parametrize("outcome", RETURNING)
    async def test_tasks_that_return_together_come_back_oldest_first(
        self, store: Store, outcome: Outcome
    ) -> None:
        tasks = await self.add_many(store, 4)
        claim = await self.claim(store)
        settlements = [self.settlement(claim, task, outcome) for task in claim.tasks]
        await store.settle([settlements[n] for n in (2, 0, 3, 1)])

        granted = await self.granted(store)

        assert granted == tasks

    @pytest.mark.parametrize("outcome", RETURNING)
    async def test_a_task_that_would_return_although_its_cancellation_was_asked_for_ends(
        self, store: Store, outcome: Outcome
    ) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)
        await store.cancel(task_id, "too late")

        answer = await self.settle(store, claim, task, outcome)

        record = await store.get(task_id)
        assert answer is Answer.APPLIED
        assert record.status is TaskState.CANCELLED
        assert record.last_error == "too late"
        assert record.attempts == 0
        assert await self.settle(store, claim, task, outcome) is Answer.ALREADY

    @pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.FAILED, Outcome.DEAD])
    async def test_a_task_that_ended_before_it_heard_of_its_cancellation_keeps_its_end(
        self, store: Store, outcome: Outcome
    ) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)
        await store.cancel(task_id, "too late")

        await self.settle(store, claim, task, outcome)

        assert await self.status(store, task_id) is TaskState(outcome)

    async def test_a_cancellation_touches_only_its_own_task(self, store: Store) -> None:
        asked, other = await self.add_many(store, 2)
        claim = await self.claim(store)
        await store.cancel(asked, "too late")

        await store.settle([self.settlement(claim, task, Outcome.RELEASED) for task in claim.tasks])

        assert await self.status(store, asked) is TaskState.CANCELLED
        assert await self.status(store, other) is TaskState.PENDING

    async def test_a_wholly_settled_claim_is_gone(self, store: Store) -> None:
        await self.add_many(store, 2)
        claim = await self.claim(store)
        await self.settle(store, claim, claim.tasks[0], Outcome.RETRIED)
        half = await self.pulse(store, claim)
        await self.settle(store, claim, claim.tasks[1], Outcome.COMPLETED)

        whole = await self.pulse(store, claim)

        assert half.kept == {claim.token}
        assert whole.kept == frozenset()

    @needs("concurrent_writers")
    async def test_of_many_equal_settlements_at_once_one_is_applied(self, store: Store) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)

        answers = await asyncio.gather(
            *(self.settle(store, claim, task, Outcome.RETRIED, delay=9.0) for _ in range(8))
        )

        assert sorted(answers) == [Answer.ALREADY] * 7 + [Answer.APPLIED]
        assert (await store.get(task_id)).generation == 2

    @needs("concurrent_writers")
    async def test_a_settlement_and_a_rescue_at_once_leave_one_of_both(self, store: Store) -> None:
        tasks = await self.add_many(store, 20)
        claims = [await self.claim(store, limit=5) for _ in range(4)]
        await self.advance(store, LEASE + SECOND)
        settlements = [
            self.settlement(claim, task, Outcome.COMPLETED)
            for claim in claims
            for task in claim.tasks
        ]

        answers, rescued = await asyncio.gather(store.settle(settlements), store.rescue(100))

        rescued_late = await store.rescue(100)
        states = [await self.status(store, task_id) for task_id in tasks]
        applied = answers.count(Answer.APPLIED)
        assert applied == states.count(TaskState.COMPLETED)
        assert rescued.returned + rescued_late.returned == states.count(TaskState.PENDING)
        assert applied + states.count(TaskState.PENDING) == len(tasks)
