"""Rules of what people may do to tasks: cancel, change, retry."""

# ruff: noqa: S101 - tests assert

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from windlass.model.cancellation import Cancellation
from windlass.model.errors import (
    TaskNotFound,
    WrongState,
)
from windlass.model.task import (
    Answer,
    CancelAnswer,
    Change,
    Outcome,
    TaskFilter,
    TaskState,
)
from windlass.store.port import Store
from windlass.testing.store_contract.steps import (
    DAY,
    ENDING,
    RETURNING,
    SECOND,
    UNSUCCESSFUL,
    Steps,
    needs,
    new_id,
)

BY_OPS = Cancellation("no longer needed", "ops").text


class CancelRules(Steps):
    """Cancel rules."""

    async def test_a_pending_task_is_cancelled_at_once(self, store: Store) -> None:
        task_id = await self.add(store)

        answer = await store.cancel(task_id, "no longer needed")

        record = await store.get(task_id)
        assert answer is CancelAnswer.CANCELLED
        assert record.status is TaskState.CANCELLED
        assert record.last_error == "no longer needed"
        assert record.attempts == 0
        assert record.worker_id is None
        assert record.completed_at == record.updated_at
        assert await self.granted(store) == []

    async def test_a_scheduled_task_is_cancelled_at_once(self, store: Store) -> None:
        task_id = await self.add(store, delay=1.0)

        answer = await store.cancel(task_id, "no longer needed")

        await self.advance(store, 2 * SECOND)
        assert answer is CancelAnswer.CANCELLED
        assert await store.promote(10) == 0

    async def test_a_record_says_who_asked_if_anybody_said(self, store: Store) -> None:
        somebody, nobody = await self.add_many(store, 2)

        await store.cancel(somebody, BY_OPS)
        await store.cancel(nobody, "no longer needed")

        record = await store.get(somebody)
        assert (record.last_error, record.cancelled_by) == (BY_OPS, "ops")
        assert (await store.get(nobody)).cancelled_by is None
        listed = await store.tasks(TaskFilter())
        assert {one.id: one.cancelled_by for one in listed.records} == {
            str(somebody): "ops",
            str(nobody): None,
        }

    @pytest.mark.parametrize("outcome", RETURNING)
    async def test_who_asked_a_worker_stays_with_what_it_gives_back(
        self, store: Store, outcome: Outcome
    ) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)

        await store.cancel(task_id, BY_OPS)
        await self.settle(store, claim, task, outcome)

        record = await store.get(task_id)
        assert (record.last_error, record.cancelled_by) == (BY_OPS, "ops")

    async def test_who_asked_a_lost_worker_stays_with_its_task(self, store: Store) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)
        await self.start(store, claim, task)

        await store.cancel(task_id, BY_OPS)
        await self.lose_worker(store)

        record = await store.get(task_id)
        assert (record.last_error, record.cancelled_by) == (BY_OPS, "ops")

    async def test_a_task_that_was_not_cancelled_was_so_by_nobody(self, store: Store) -> None:
        said = '{"type": "E", "message": "no (asked for by ops)"}'
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, Outcome.DEAD, error=said)

        assert (await store.get(task_id)).cancelled_by is None

    async def test_a_task_waiting_for_its_retry_is_cancelled_with_its_errors(
        self, store: Store
    ) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, Outcome.RETRIED, delay=60.0)

        answer = await store.cancel(task_id, "no longer needed")

        record = await store.get(task_id)
        assert answer is CancelAnswer.CANCELLED
        assert record.last_error == "no longer needed"
        assert [error["message"] for error in record.errors] == ["no such image"]
        assert (record.attempts, record.generation) == (1, 2)

    async def test_the_worker_of_a_claimed_task_is_asked(self, store: Store) -> None:
        task_id = await self.add(store)
        await self.claim(store)

        answer = await store.cancel(task_id, "no longer needed")

        assert answer is CancelAnswer.REQUESTED
        assert await self.status(store, task_id) is TaskState.CLAIMED

    async def test_the_worker_of_a_running_task_is_asked(self, store: Store) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)
        await self.start(store, claim, task)

        answer = await store.cancel(task_id, "no longer needed")

        assert answer is CancelAnswer.REQUESTED
        assert await self.status(store, task_id) is TaskState.RUNNING

    async def test_the_first_reason_to_cancel_stays(self, store: Store) -> None:
        task_id = await self.add(store)
        await self.claim(store)
        await store.cancel(task_id, "first")

        answer = await store.cancel(task_id, "second")

        assert answer is CancelAnswer.REQUESTED
        assert await store.requested_cancellations([task_id]) == {task_id: "first"}

    @pytest.mark.parametrize("outcome", ENDING)
    async def test_an_ended_task_cannot_be_cancelled(self, store: Store, outcome: Outcome) -> None:
        task_id = await self.end(store, outcome)
        before = await store.get(task_id)

        answer = await store.cancel(task_id, "no longer needed")

        assert answer is CancelAnswer.ENDED
        assert await store.get(task_id) == before

    async def test_an_unknown_task_cannot_be_cancelled(self, store: Store) -> None:
        with pytest.raises(TaskNotFound):
            await store.cancel(new_id(), "no longer needed")

    async def test_many_are_cancelled_as_each_by_itself(self, store: Store) -> None:
        ended = [await self.end(store, outcome) for outcome in ENDING]
        claimed, running = await self.add_many(store, 2)
        claim = await self.claim(store)
        await self.start(store, claim, claim.tasks[1])
        pending = await self.add(store)
        scheduled = await self.add(store, delay=60.0)
        before = [await store.get(task_id) for task_id in ended]

        answers = await store.cancel_many(
            [pending, new_id(), claimed, *ended, scheduled, running], BY_OPS
        )

        assert answers == [
            CancelAnswer.CANCELLED,
            CancelAnswer.ABSENT,
            CancelAnswer.REQUESTED,
            *[CancelAnswer.ENDED] * len(ended),
            CancelAnswer.CANCELLED,
            CancelAnswer.REQUESTED,
        ]
        for task_id in (pending, scheduled):
            record = await store.get(task_id)
            assert record.status is TaskState.CANCELLED
            assert (record.last_error, record.cancelled_by) == (BY_OPS, "ops")
            assert (record.attempts, record.worker_id) == (0, None)
            assert record.completed_at == record.updated_at
        assert await self.status(store, claimed) is TaskState.CLAIMED
        assert await self.status(store, running) is TaskState.RUNNING
        requests = await store.requested_cancellations([claimed, running, pending, *ended])
        assert requests == {claimed: BY_OPS, running: BY_OPS}
        assert [await store.get(task_id) for task_id in ended] == before
        assert await self.granted(store) == []
        await self.advance(store, 61 * SECOND)
        assert await store.promote(10) == 0

    async def test_of_many_each_is_kept_with_its_errors(self, store: Store) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, Outcome.RETRIED, delay=60.0)

        await store.cancel_many([task_id], "no longer needed")

        record = await store.get(task_id)
        assert [error["message"] for error in record.errors] == ["no such image"]
        assert (record.attempts, record.generation) == (1, 2)

    async def test_one_that_is_named_twice_is_answered_twice(self, store: Store) -> None:
        task_id, other = await self.add_many(store, 2)

        answers = await store.cancel_many([task_id, other, task_id], "no longer needed")

        assert answers == [CancelAnswer.CANCELLED] * 3
        assert await store.cancel_many([], "no longer needed") == []

    async def test_the_first_reason_to_cancel_one_of_many_stays(self, store: Store) -> None:
        task_id = await self.add(store)
        await self.claim(store)
        await store.cancel(task_id, "first")

        answers = await store.cancel_many([task_id], "second")

        assert answers == [CancelAnswer.REQUESTED]
        assert await store.requested_cancellations([task_id]) == {task_id: "first"}


class ChangeRules(Steps):
    """Change rules."""

    async def test_a_change_of_priority_changes_the_order(self, store: Store) -> None:
        first, second = await self.add_many(store, 2)

        await store.change(second, Change(priority=11))

        assert await self.granted(store) == [second, first]
        assert (await store.get(second)).priority == 11

    async def test_a_change_of_queue_moves_the_task(self, store: Store) -> None:
        task_id = await self.add(store)

        await store.change(task_id, Change(queue="bulk"))

        assert await self.granted(store, queues=("default",)) == []
        assert await self.granted(store, queues=("bulk",)) == [task_id]

    async def test_a_change_leaves_the_rest_as_it_is(self, store: Store) -> None:
        task_id = await self.add(store, queue="bulk", payload='{"a": 1}', tags=("red",))
        before = await store.get(task_id)
        await self.advance(store, SECOND)

        await store.change(task_id, Change(priority=50))

        assert await store.get(task_id) == replace(before, priority=50)

    async def test_a_pending_task_can_be_put_off(self, store: Store) -> None:
        task_id = await self.add(store)

        await store.change(task_id, Change(delay=60.0))

        assert await self.status(store, task_id) is TaskState.SCHEDULED
        assert await self.granted(store) == []

    async def test_a_scheduled_task_can_be_brought_forward(self, store: Store) -> None:
        task_id = await self.add(store, delay=60.0)

        await store.change(task_id, Change(delay=0.0))

        assert await self.granted(store) == [task_id]

    async def test_a_task_can_be_changed_to_a_time(self, store: Store) -> None:
        task_id = await self.add(store)
        time = (await store.get(task_id)).created_at + timedelta(hours=1)

        await store.change(task_id, Change(at=time))

        record = await store.get(task_id)
        assert record.status is TaskState.SCHEDULED
        assert record.scheduled_for == time

    async def test_a_change_to_a_time_in_the_past_means_now(self, store: Store) -> None:
        task_id = await self.add(store, delay=60.0)
        created_at = (await store.get(task_id)).created_at

        await store.change(task_id, Change(at=created_at - DAY))

        record = await store.get(task_id)
        assert record.status is TaskState.PENDING
        assert record.scheduled_for >= created_at

    async def test_a_scheduled_task_keeps_its_time_when_something_else_is_changed(
        self, store: Store
    ) -> None:
        task_id = await self.add(store, delay=10.0)
        before = await store.get(task_id)

        await store.change(task_id, Change(queue="bulk", priority=20))

        await self.advance(store, 11 * SECOND)
        assert await store.get(task_id) == replace(before, queue="bulk", priority=20)
        assert await store.promote(10) == 1
        assert await self.granted(store, queues=("bulk",)) == [task_id]

    async def test_a_claimed_task_cannot_be_changed(self, store: Store) -> None:
        task_id = await self.add(store)
        await self.claim(store)

        with pytest.raises(WrongState):
            await store.change(task_id, Change(priority=20))

        assert (await store.get(task_id)).priority == 10

    async def test_a_running_task_cannot_be_changed(self, store: Store) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)
        await self.start(store, claim, task)

        with pytest.raises(WrongState):
            await store.change(task_id, Change(queue="bulk"))

        assert (await store.get(task_id)).queue == "default"

    @pytest.mark.parametrize("outcome", ENDING)
    async def test_an_ended_task_cannot_be_changed(self, store: Store, outcome: Outcome) -> None:
        task_id = await self.end(store, outcome)
        before = await store.get(task_id)

        with pytest.raises(WrongState):
            await store.change(task_id, Change(priority=20))

        assert await store.get(task_id) == before

    async def test_an_unknown_task_cannot_be_changed(self, store: Store) -> None:
        with pytest.raises(TaskNotFound):
            await store.change(new_id(), Change(priority=20))


class RetryRules(Steps):
    """Retry rules."""

    @pytest.mark.parametrize("outcome", UNSUCCESSFUL)
    async def test_an_unsuccessful_task_is_reopened_as_a_new_generation(
        self, store: Store, outcome: Outcome
    ) -> None:
        task_id = await self.end(store, outcome, payload='{"a": 1}', tags=("red",), priority=20)
        ended = await store.get(task_id)
        await self.advance(store, SECOND)

        await store.retry(task_id)

        record = await store.get(task_id)
        assert record.scheduled_for >= ended.created_at + SECOND
        assert record == replace(
            ended,
            status=TaskState.PENDING,
            scheduled_for=record.scheduled_for,
            updated_at=record.updated_at,
            attempts=0,
            generation=2,
            worker_id=None,
            claimed_at=None,
            completed_at=None,
            last_error=None if outcome is Outcome.CANCELLED else "no such image",
        )

    async def test_a_task_cancelled_while_it_waited_can_be_retried(self, store: Store) -> None:
        task_id = await self.add(store, delay=60.0)
        await store.cancel(task_id, "no longer needed")

        await store.retry(task_id)

        assert await self.granted(store) == [task_id]

    async def test_a_reopened_task_is_granted_with_fresh_attempts(self, store: Store) -> None:
        task_id = await self.end(store, Outcome.DEAD)
        await store.retry(task_id)

        _, task = await self.claim_one(store)

        assert (task.id, task.attempts, task.generation) == (task_id, 0, 2)

    async def test_a_reopened_task_has_forgotten_its_cancellation(self, store: Store) -> None:
        task_id = await self.add(store)
        await self.claim(store)
        await store.cancel(task_id, "too late")
        await self.lose_worker(store)
        await store.retry(task_id)

        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, Outcome.RELEASED)

        assert task.cancel_reason is None
        assert await self.status(store, task_id) is TaskState.PENDING

    async def test_a_reopened_suspect_is_none_any_more(self, store: Store) -> None:
        task_id = await self.suspect(store)
        claim, task = await self.claim_one(store, alone=True)
        await self.settle(store, claim, task, Outcome.FAILED)

        await store.retry(task_id)

        assert await self.granted(store) == [task_id]

    async def test_errors_are_kept_across_generations(self, store: Store) -> None:
        task_id = await self.end(store, Outcome.FAILED)
        await store.retry(task_id)
        claim, task = await self.claim_one(store)

        await self.settle(store, claim, task, Outcome.DEAD)

        errors = (await store.get(task_id)).errors
        assert [(error["generation"], error["attempt"]) for error in errors] == [(1, 1), (2, 1)]
        assert {error["type"] for error in errors} == {"ValueError"}

    async def test_a_completed_task_cannot_be_retried(self, store: Store) -> None:
        task_id = await self.end(store, Outcome.COMPLETED)
        before = await store.get(task_id)

        with pytest.raises(WrongState):
            await store.retry(task_id)

        assert await store.get(task_id) == before

    @pytest.mark.parametrize("delay", [0.0, 60.0])
    async def test_a_waiting_task_cannot_be_retried(self, store: Store, delay: float) -> None:
        task_id = await self.add(store, delay=delay)
        before = await store.get(task_id)

        with pytest.raises(WrongState):
            await store.retry(task_id)

        assert await store.get(task_id) == before

    async def test_a_claimed_task_cannot_be_retried(self, store: Store) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)

        with pytest.raises(WrongState):
            await store.retry(task_id)

        assert await self.settle(store, claim, task, Outcome.COMPLETED) is Answer.APPLIED

    async def test_a_second_retry_is_refused(self, store: Store) -> None:
        task_id = await self.end(store, Outcome.DEAD)
        await store.retry(task_id)

        with pytest.raises(WrongState):
            await store.retry(task_id)

        assert (await store.get(task_id)).generation == 2

    async def test_an_unknown_task_cannot_be_retried(self, store: Store) -> None:
        with pytest.raises(TaskNotFound):
            await store.retry(new_id())

    @needs("concurrent_writers")
    async def test_of_many_retries_at_once_one_succeeds(self, store: Store) -> None:
        task_id = await self.end(store, Outcome.DEAD)

        answers = await asyncio.gather(
            *(store.retry(task_id) for _ in range(8)), return_exceptions=True
        )

        assert answers.count(None) == 1
        assert {type(answer) for answer in answers} == {type(None), WrongState}
        assert (await store.get(task_id)).generation == 2
