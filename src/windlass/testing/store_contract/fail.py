"""The rules of a store about failures: retries that are none any more, and what follows the end of a task."""

# ruff: noqa: S101 - tests assert

import json
from datetime import timedelta
from uuid import UUID

import pytest

from windlass.model.task import (
    Answer,
    Callback,
    NewTask,
    Outcome,
    TaskRecord,
    TaskState,
    TypeDefaults,
)
from windlass.store.port import Store
from windlass.testing.store_contract.steps import SECOND, Steps

HOUR = timedelta(hours=1)


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
        fresh = await self.add(store, delay=3600.0)
        assert await store.bury_retries("resize", 100) == 0
        await store.stop_retries("resize", "stop")

        assert await store.bury_retries("resize", 2) == 2
        assert await store.bury_retries("resize", 2) == 1
        assert await store.bury_retries("resize", 2) == 0

        dead = (await self.listed(store, statuses=(TaskState.DEAD,)))[0]
        record = await store.get(dead)
        assert (record.attempts, record.last_error) == (1, "no such image")
        assert record.errors[-1]["given_up"] == "retries of this type are stopped: stop"
        assert await self.status(store, fresh) is TaskState.SCHEDULED
        await store.retry(dead)
        assert await self.status(store, dead) is TaskState.PENDING

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

        await store.bury_retries("resize", 10)

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
