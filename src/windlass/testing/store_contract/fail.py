"""The rules of a store about failures: retries that are none any more, and what follows the end of a task."""

# ruff: noqa: S101 - tests assert

import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from windlass.model.task import (
    Answer,
    Buried,
    Callback,
    Claim,
    ClaimedTask,
    NewTask,
    Outcome,
    Settlement,
    TaskRecord,
    TaskState,
    TypeDefaults,
)
from windlass.store.port import Store
from windlass.testing.store_contract.steps import SECOND, Steps

HOUR = timedelta(hours=1)
PUT_OFF = '{"type": "PutOff", "message": "its retry budget was used up"}'


class RetryLimitRules(Steps):
    """A retry that comes too late, or whose type is stopped, ends the task."""

    async def _fail(self, store: Store, *, delay: float = 0.0, max_age: float | None) -> Answer:
        claim, task = await self.claim_one(store)
        return await self.settle(store, claim, task, Outcome.RETRIED, delay=delay, max_age=max_age)

    async def test_a_retry_within_the_age_is_made(self, store: Store) -> None:
        task_id = await self.add(store)
        await self.advance(store, timedelta(seconds=50))

        await self._fail(store, delay=5, max_age=60)

        assert await self.status(store, task_id) is TaskState.SCHEDULED

    @pytest.mark.parametrize(("waited", "delay"), [(50, 15), (65, 0)])
    async def test_a_retry_beyond_the_age_ends_the_task_and_says_so(
        self, store: Store, waited: int, delay: float
    ) -> None:
        task_id = await self.add(store)
        await self.advance(store, timedelta(seconds=waited))

        assert await self._fail(store, delay=delay, max_age=60) is Answer.GIVEN_UP

        record = await store.get(task_id)
        assert (record.status, record.attempts) == (TaskState.DEAD, 1)
        assert record.last_error == "no such image"
        assert "more than 60 s after it was enqueued" in record.errors[-1]["given_up"]

    async def test_the_age_counts_over_all_attempts(self, store: Store) -> None:
        task_id = await self.add(store)
        await self._fail(store, max_age=60)
        await self.advance(store, timedelta(seconds=61))

        await self._fail(store, max_age=60)

        record = await store.get(task_id)
        assert (record.status, record.attempts) == (TaskState.DEAD, 2)

    def _as_put_off(self, claim: Claim, task: ClaimedTask, **more: Any) -> Settlement:
        return self.settlement(claim, task, Outcome.SNOOZED, **({"error": PUT_OFF} | more))

    async def _put_off(self, store: Store, delay: float = 5.0, **more: Any) -> Answer:
        """Put an attempt off, and say so, as for a retry."""
        claim, task = await self.claim_one(store)
        asked = self._as_put_off(claim, task, delay=delay, **more)
        (answer,) = await store.settle([asked])
        if answer is Answer.GIVEN_UP:
            assert await store.settle([asked]) == [Answer.ALREADY]
        return answer

    async def test_a_retry_that_is_put_off_until_it_is_too_old_ends_and_uses_no_attempt(
        self, store: Store
    ) -> None:
        task_id = await self.add(store)
        await self._fail(store, max_age=60)
        await self.advance(store, timedelta(seconds=50))

        assert await self._put_off(store, max_age=60.0) is Answer.APPLIED
        assert await self.status(store, task_id) is TaskState.SCHEDULED
        await self.advance(store, timedelta(seconds=6))
        await store.promote(10)
        assert await self._put_off(store, max_age=60.0) is Answer.GIVEN_UP

        record = await store.get(task_id)
        assert (record.status, record.attempts) == (TaskState.DEAD, 1)
        assert (len(record.errors), record.last_error) == (1, "no such image")
        given_up = record.errors[-1]["given_up"]
        assert "more than 60 s after it was enqueued" in given_up
        assert "put off: its retry budget was used up" in given_up
        assert await self.granted(store) == []

    async def test_a_retry_that_is_put_off_ends_if_those_of_its_type_are_stopped(
        self, store: Store
    ) -> None:
        task_id = await self.add(store)
        await self._fail(store, max_age=None)
        await store.stop_retries("resize", "the images are gone")

        assert await self._put_off(store, delay=0.0) is Answer.GIVEN_UP

        record = await store.get(task_id)
        assert record.status is TaskState.DEAD
        assert "stopped: the images are gone" in record.errors[-1]["given_up"]

    async def test_a_first_attempt_that_is_put_off_is_no_retry(self, store: Store) -> None:
        task_id = await self.add(store)
        await store.stop_retries("resize", "the images are gone")

        assert await self._put_off(store) is Answer.APPLIED

        assert await self.status(store, task_id) is TaskState.SCHEDULED

    async def test_a_snooze_that_a_handler_asked_for_is_of_no_age(self, store: Store) -> None:
        task_id = await self.add(store)
        await self._fail(store, max_age=60)
        await store.stop_retries("resize", "the images are gone")
        await self.advance(store, HOUR)
        claim, task = await self.claim_one(store)

        await self.settle(store, claim, task, Outcome.SNOOZED, delay=5.0)

        assert await self.status(store, task_id) is TaskState.SCHEDULED

    @pytest.mark.parametrize("max_age", [60.0, None])
    async def test_a_snooze_of_a_handler_is_of_no_age_beside_a_retry_that_is_put_off(
        self, store: Store, max_age: float | None
    ) -> None:
        await self.add_many(store, 2)
        await self._fail_all(store)
        if max_age is None:
            await store.stop_retries("resize", "the images are gone")
        await self.advance(store, HOUR)
        claim = await self.claim(store)
        late, snoozed = claim.tasks

        answers = await store.settle(
            [
                self._as_put_off(claim, late, delay=5.0, max_age=60.0),
                self.settlement(claim, snoozed, Outcome.SNOOZED, delay=5.0, max_age=max_age),
            ]
        )

        assert answers == [Answer.GIVEN_UP, Answer.APPLIED]
        assert await self.status(store, late.id) is TaskState.DEAD
        record = await store.get(snoozed.id)
        assert (record.status, record.attempts) == (TaskState.SCHEDULED, 1)

    async def _fail_all(self, store: Store) -> None:
        """Let each task that is ready fail once, and be ready again."""
        claim = await self.claim(store)
        await store.settle([self.settlement(claim, task, Outcome.RETRIED) for task in claim.tasks])

    async def test_a_retry_that_is_put_off_by_who_has_lost_it_is_left_to_its_next_owner(
        self, store: Store
    ) -> None:
        task_id = await self.add(store)
        await self._fail(store, max_age=60)
        lost, before = await self.claim_one(store)
        await self.settle(store, lost, before, Outcome.RELEASED)
        await self.advance(store, HOUR)
        claim, task = await self.claim_one(store)

        answers = await store.settle([self._as_put_off(lost, before, max_age=60.0)])

        assert answers != [Answer.GIVEN_UP]
        assert await self.settle(store, claim, task, Outcome.COMPLETED) is Answer.APPLIED
        assert await self.status(store, task_id) is TaskState.COMPLETED

    async def test_a_repeated_settlement_of_one_that_was_put_off_leaves_it_to_its_next_owner(
        self, store: Store
    ) -> None:
        task_id = await self.add(store)
        await self._fail(store, max_age=60)
        asked = self._as_put_off(*await self.claim_one(store), max_age=60.0)
        assert await store.settle([asked]) == [Answer.APPLIED]
        await self.advance(store, HOUR)

        assert await store.settle([asked]) == [Answer.ALREADY]
        claim, task = await self.claim_one(store)
        assert await store.settle([asked]) != [Answer.GIVEN_UP]

        assert await self.settle(store, claim, task, Outcome.COMPLETED) is Answer.APPLIED
        assert await self.status(store, task_id) is TaskState.COMPLETED

    async def test_retries_of_several_claims_that_are_put_off_end_by_their_own(
        self, store: Store
    ) -> None:
        await self.add_many(store, 2)
        await self._fail_all(store)
        await self.advance(store, HOUR)
        held = [await self.claim_one(store) for _ in range(2)]
        asked = [self._as_put_off(*one, max_age=60.0) for one in held]

        assert await store.settle(asked) == [Answer.GIVEN_UP] * 2

        for again in asked:
            assert await store.settle([again]) == [Answer.ALREADY]
        assert await store.settle(asked) == [Answer.ALREADY] * 2
        (_, first), (other, _) = held
        assert await store.settle([self._as_put_off(other, first)]) == [Answer.LOST]

    async def test_a_cancellation_comes_before_the_end_of_one_that_was_put_off(
        self, store: Store
    ) -> None:
        task_id = await self.add(store)
        await self._fail(store, max_age=60)
        await self.advance(store, HOUR)
        claim, task = await self.claim_one(store)
        await store.cancel(task_id, "no longer needed")
        asked = self.settlement(
            claim, task, Outcome.SNOOZED, error='{"message": "put off"}', max_age=60.0
        )

        await store.settle([asked])

        assert await self.status(store, task_id) is TaskState.CANCELLED

    async def test_a_repeated_settlement_of_one_that_was_given_up_is_answered(
        self, store: Store
    ) -> None:
        await self.add(store)
        await self.advance(store, HOUR)
        claim, task = await self.claim_one(store)
        asked = self.settlement(claim, task, Outcome.RETRIED, max_age=60.0)

        assert await store.settle([asked]) == [Answer.GIVEN_UP]
        assert await store.settle([asked]) == [Answer.ALREADY]

    async def test_a_task_that_was_reopened_is_as_young_as_its_first_attempt_since(
        self, store: Store
    ) -> None:
        task_id = await self.end(store, Outcome.DEAD)
        await self.advance(store, HOUR)
        await store.retry(task_id)

        await self._fail(store, max_age=60)
        assert await self.status(store, task_id) is TaskState.PENDING
        await self.advance(store, timedelta(seconds=30))
        await self._fail(store, max_age=60)
        assert await self.status(store, task_id) is TaskState.PENDING
        await self.advance(store, timedelta(seconds=31))
        await self._fail(store, max_age=60)
        assert await self.status(store, task_id) is TaskState.DEAD

    async def test_a_cancellation_comes_before_an_age(self, store: Store) -> None:
        task_id = await self.add(store)
        await self.advance(store, HOUR)
        claim, task = await self.claim_one(store)
        await store.cancel(task_id, "no longer needed")

        await self.settle(store, claim, task, Outcome.RETRIED, max_age=60.0)

        assert await self.status(store, task_id) is TaskState.CANCELLED

    async def test_a_failure_of_a_stopped_type_ends_its_task(self, store: Store) -> None:
        task_id, other_id = await self.add(store), await self.add(store, type="mail")
        await store.stop_retries("resize", "the images are gone")
        claim = await self.claim(store, types=("resize", "mail"))
        tasks = sorted(claim.tasks, key=lambda task: task.id != task_id)

        answers = await store.settle(
            [self.settlement(claim, task, Outcome.RETRIED, delay=5.0) for task in tasks]
        )

        record = await store.get(task_id)
        assert answers == [Answer.GIVEN_UP, Answer.APPLIED]
        assert (record.status, record.attempts) == (TaskState.DEAD, 1)
        assert (
            record.errors[-1]["given_up"] == "retries of this type are stopped: the images are gone"
        )
        assert await self.status(store, other_id) is TaskState.SCHEDULED

    async def test_a_stopped_type_may_snooze_and_is_released(self, store: Store) -> None:
        await self.add_many(store, 2)
        await store.stop_retries("resize", "stop")
        claim = await self.claim(store)
        first, second = claim.tasks

        await self.settle(store, claim, first, Outcome.SNOOZED, delay=5.0)
        await self.settle(store, claim, second, Outcome.RELEASED)

        assert await self.status(store, first.id) is TaskState.SCHEDULED
        assert await self.status(store, second.id) is TaskState.PENDING

    async def test_what_waits_for_a_retry_of_a_stopped_type_is_buried(self, store: Store) -> None:
        for _ in range(3):
            await self.add(store)
            await self._fail(store, delay=3600, max_age=None)
        snoozed = await self.add(store)
        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, Outcome.SNOOZED, delay=3600.0)
        fresh = await self.add(store, delay=3600.0)
        assert await self._bury(store.bury_scheduled) == []
        await store.stop_retries("resize", "stop")

        assert await self._bury(store.bury_scheduled) == [2, 1]
        assert await self._bury(store.bury_scheduled) == []

        dead = (await self.listed(store, statuses=(TaskState.DEAD,)))[0]
        record = await store.get(dead)
        assert (record.attempts, record.last_error) == (1, "no such image")
        assert record.errors[-1]["given_up"] == "retries of this type are stopped: stop"
        for waiting in (fresh, snoozed):
            assert await self.status(store, waiting) is TaskState.SCHEDULED
        await store.retry(dead)
        assert await self.status(store, dead) is TaskState.PENDING

    async def test_what_is_ready_for_a_retry_of_a_stopped_type_is_buried(
        self, store: Store
    ) -> None:
        failed = await self.add_many(store, 2)
        failed += [await self.add(store, queue="bulk"), await self.add(store, priority=20)]
        claim = await self.claim(store)
        for task in claim.tasks:
            await self.settle(store, claim, task, Outcome.RETRIED)
        lost = await self.add(store, queue="mail")
        claim, task = await self.claim_one(store, queues=("mail",))
        await self.start(store, claim, task)
        await self.lose_worker(store)
        released = await self.add(store, queue="mail", priority=90)
        claim, task = await self.claim_one(store, queues=("mail",))
        assert task.id == released
        await self.settle(store, claim, task, Outcome.RELEASED)
        fresh, other = await self.add(store), await self.add(store, type="mail")
        assert await self._bury(store.bury_ready) == []
        await store.stop_retries("resize", "stop")

        buried = await self._bury(store.bury_ready)

        assert max(buried) <= 2
        assert sum(buried) == 5
        for task_id in (*failed, lost):
            record = await store.get(task_id)
            assert (record.status, record.attempts) == (TaskState.DEAD, 1)
            assert record.errors[-1]["given_up"] == "retries of this type are stopped: stop"
            assert record.last_error == record.errors[-1]["message"]
        for task_id in (released, fresh, other):
            assert await self.status(store, task_id) is TaskState.PENDING
        assert await self._bury(store.bury_ready) == []
        assert set(await self.granted(store)) == {released, fresh}

    async def test_no_more_are_buried_at_once_than_were_asked_for(self, store: Store) -> None:
        failed = await self.add_many(store, 7)
        await self._fail_all(store)
        fresh = await self.add_many(store, 2)
        await store.stop_retries("resize", "stop")

        assert await self._bury(store.bury_ready) == [2, 2, 2, 1]

        assert set(await self.listed(store, statuses=(TaskState.DEAD,))) == set(failed)
        assert set(await self.granted(store)) == set(fresh)

    async def _bury(self, bury: Callable[..., Awaitable[Buried]]) -> list[int]:
        """Bury two at a time, and return how many each time, without those that found none."""
        numbers, after = [], None
        while True:
            number, after = await bury("resize", 2, after=after)
            numbers += [number] if number else []
            if after is None:
                return numbers

    async def test_a_type_that_is_allowed_again_is_tried_again(self, store: Store) -> None:
        await store.stop_retries("resize", "stop")
        await store.stop_retries("resize", "stop, I said")

        assert await store.allow_retries("resize") is True
        assert await store.allow_retries("resize") is False

        task_id = await self.add(store)
        await self._fail(store, delay=5, max_age=None)
        assert await self.status(store, task_id) is TaskState.SCHEDULED

    async def test_types_are_listed_with_what_stops_them(self, store: Store) -> None:
        await store.register_types([TypeDefaults("resize", "images", 30, 2)])
        await store.stop_retries("resize", "stop")
        await store.stop_retries("unheard-of", "stop too")

        known, unknown = await store.types()

        assert (known.name, known.queue, known.priority, known.max_attempts) == (
            "resize",
            "images",
            30,
            2,
        )
        assert known.retries_stopped_at is not None
        assert known.retries_stopped_because == "stop"
        assert (unknown.name, unknown.retries_stopped_because) == ("unheard-of", "stop too")


class CallbackRules(Steps):
    """What a type calls back is enqueued with the end of a task, and only then."""

    async def _register(self, store: Store) -> None:
        everything = ("task_id", "task_type", "queue", "attempts", "result", "error")
        template = NewTask(UUID(int=0), "after", '{"given": 1}', "calls", 20, 2)
        success = Callback(template, everything[:5])
        failure = Callback(template, (*everything[:4], "error"))
        await store.register_types([TypeDefaults("resize", on_success=success, on_failure=failure)])

    async def _called(self, store: Store) -> list[TaskRecord]:
        return [await store.get(each) for each in await self.listed(store, type="after")]

    async def test_a_success_is_called_back_with_its_result(self, store: Store) -> None:
        await self._register(store)
        task_id = await self.add(store, queue="images")
        claim, task = await self.claim_one(store)

        await self.settle(
            store, claim, task, Outcome.COMPLETED, result='{"width": 7}', calls_back=True
        )

        (record,) = await self._called(store)
        assert (record.queue, record.priority, record.max_attempts) == ("calls", 20, 2)
        assert record.status is TaskState.PENDING
        assert record.payload == {
            "given": 1,
            "task_id": str(task_id),
            "task_type": "resize",
            "queue": "images",
            "attempts": 1,
            "result": {"width": 7},
        }

    @pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.DEAD])
    async def test_a_failure_for_good_is_called_back_with_its_error(
        self, store: Store, outcome: Outcome
    ) -> None:
        await self._register(store)
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)
        error = json.dumps({"type": "E", "message": "m", "class": "unknown", "traceback": "t"})

        await self.settle(store, claim, task, outcome, error=error, calls_back=True)

        (record,) = await self._called(store)
        assert record.payload["task_id"] == str(task_id)
        assert record.payload["error"] == {"type": "E", "message": "m", "class": "unknown"}
        assert "result" not in record.payload

    @pytest.mark.parametrize(
        "outcome", [Outcome.RETRIED, Outcome.SNOOZED, Outcome.RELEASED, Outcome.CANCELLED]
    )
    async def test_nothing_is_called_back_before_the_end_or_when_it_is_cancelled(
        self, store: Store, outcome: Outcome
    ) -> None:
        await self._register(store)
        await self.add(store)
        claim, task = await self.claim_one(store)

        await self.settle(store, claim, task, outcome, calls_back=True)

        assert await self._called(store) == []

    async def test_a_repeated_settlement_calls_back_once(self, store: Store) -> None:
        await self._register(store)
        await self.add_many(store, 2)
        claim = await self.claim(store)
        asked = [
            self.settlement(claim, task, Outcome.COMPLETED, calls_back=True) for task in claim.tasks
        ]

        assert await store.settle(asked[:1]) == [Answer.APPLIED]
        assert await store.settle(asked) == [Answer.ALREADY, Answer.APPLIED]
        assert await store.settle(asked) == [Answer.ALREADY] * 2

        assert len(await self._called(store)) == 2

    async def test_a_retry_that_is_given_up_is_called_back_as_a_failure(self, store: Store) -> None:
        await self._register(store)
        await self.add(store)
        await self.advance(store, HOUR)
        claim, task = await self.claim_one(store)

        await self.settle(store, claim, task, Outcome.RETRIED, max_age=60.0, calls_back=True)

        (record,) = await self._called(store)
        assert "given_up" in record.payload["error"]

    async def test_a_task_that_dies_with_its_worker_is_called_back(self, store: Store) -> None:
        await self._register(store)
        task_id = await self.add(store, max_attempts=1)
        claim, task = await self.claim_one(store)
        await self.start(store, claim, task)

        rescued = await self.lose_worker(store)

        (record,) = await self._called(store)
        assert rescued.died == (task_id,)
        assert record.payload["error"]["type"] == "WorkerLost"
        assert record.payload["error"]["class"] == "transient"

    async def test_what_is_buried_is_called_back(self, store: Store) -> None:
        await self._register(store)
        await self.add(store)
        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, Outcome.RETRIED, delay=60.0)
        await store.stop_retries("resize", "stop")

        await store.bury_scheduled("resize", 10)

        assert len(await self._called(store)) == 1

    async def test_a_type_that_calls_back_no_longer_does_not(self, store: Store) -> None:
        await self._register(store)
        await store.register_types([TypeDefaults("resize")])
        await self.add(store)
        claim, task = await self.claim_one(store)

        await self.settle(store, claim, task, Outcome.COMPLETED, calls_back=True)

        assert await self._called(store) == []

    async def test_a_call_that_is_to_wait_waits(self, store: Store) -> None:
        later = NewTask(UUID(int=0), "after", "{}", delay=60.0, tags=("follow-up",))
        await store.register_types([TypeDefaults("resize", on_success=Callback(later))])
        await self.add(store)
        claim, task = await self.claim_one(store)

        await self.settle(store, claim, task, Outcome.COMPLETED, calls_back=True)

        (record,) = await self._called(store)
        assert (record.status, record.tags) == (TaskState.SCHEDULED, ("follow-up",))
        await self.advance(store, timedelta(seconds=60) + SECOND)
        await store.promote(10)
        assert await self.status(store, UUID(record.id)) is TaskState.PENDING
