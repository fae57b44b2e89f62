"""Rules of enqueueing: order, idempotency, fences, repeated calls."""

# ruff: noqa: S101 - tests assert

import asyncio
import json
import random
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from windlass.model.errors import (
    IdempotencyConflict,
    LeaseLost,
    PayloadError,
    TaskNotFound,
)
from windlass.model.task import (
    Enqueued,
    Fence,
    NewTask,
    Outcome,
    TaskFilter,
    TaskRecord,
    TaskState,
    TypeDefaults,
)
from windlass.store.port import NewTasks, Store
from windlass.testing.store_contract.steps import (
    ENDING,
    LEASE,
    RETURNING,
    SECOND,
    Steps,
    all_pages,
    needs,
)


class EnqueueRules(Steps):
    """Enqueue rules."""

    async def test_tasks_are_answered_in_the_order_they_were_asked_for(self, store: Store) -> None:
        tasks = [self.new_task() for _ in range(5)]
        random.shuffle(tasks)

        answers = await store.enqueue(tasks)

        assert answers == [Enqueued(task.id, created=True) for task in tasks]

    @pytest.mark.parametrize("number", [5, 1200])
    @pytest.mark.parametrize("is_alike", [True, False])
    async def test_tasks_become_ready_in_the_order_they_were_asked_for(
        self, store: Store, number: int, is_alike: bool
    ) -> None:
        tasks = [self.new_task(tags=() if is_alike or n else ("odd",)) for n in range(number)]
        random.shuffle(tasks)

        await store.enqueue(tasks)

        claimed: list[UUID] = []
        while len(claimed) < number:
            claimed += await self.granted(store, limit=100)
        assert claimed == [task.id for task in tasks]

    @pytest.mark.parametrize("number", [5, 2500])
    async def test_tasks_may_be_made_while_the_first_are_written(
        self, store: Store, number: int
    ) -> None:
        tasks = [self.new_task() for _ in range(number)]
        asked = NewTasks(number, lambda first, last: tasks[first:last])

        answers = await store.enqueue(asked)

        assert answers == [Enqueued(task.id, created=True) for task in tasks]
        assert (await store.get(tasks[-1].id)).status is TaskState.PENDING

    @pytest.mark.parametrize("number", [5, 2500])
    async def test_if_a_task_cannot_be_made_none_is_added(self, store: Store, number: int) -> None:
        tasks = [self.new_task() for _ in range(number)]

        def make(first: int, last: int) -> list[NewTask]:
            if last == number:
                raise PayloadError("it does not fit")
            return tasks[first:last]

        with pytest.raises(PayloadError, match="it does not fit"):
            await store.enqueue(NewTasks(number, make))

        assert await store.queues() == []
        assert await store.enqueue(tasks) == [Enqueued(task.id, created=True) for task in tasks]

    async def test_enqueueing_nothing_answers_nothing(self, store: Store) -> None:
        answers = await store.enqueue([])

        assert answers == []

    async def test_a_task_keeps_what_was_asked_for(self, store: Store) -> None:
        task = self.new_task(
            type="mail",
            payload='{"to": "a@example.com", "copies": [1, null]}',
            queue="bulk",
            priority=30,
            max_attempts=7,
            idempotency_key="a",
            tags=("red", "blue"),
        )

        await store.enqueue([task])

        record = await store.get(task.id)
        assert record == TaskRecord(
            id=str(task.id),
            type="mail",
            queue="bulk",
            payload={"to": "a@example.com", "copies": [1, None]},
            status=TaskState.PENDING,
            priority=30,
            created_at=record.created_at,
            scheduled_for=record.created_at,
            updated_at=record.created_at,
            attempts=0,
            max_attempts=7,
            generation=1,
            idempotency_key="a",
            tags=("red", "blue"),
        )

    async def test_a_delayed_task_is_scheduled(self, store: Store) -> None:
        task_id = await self.add(store, delay=60.0)

        record = await store.get(task_id)
        assert record.status is TaskState.SCHEDULED
        assert record.scheduled_for - record.created_at == timedelta(seconds=60)

    async def test_a_task_for_a_later_time_is_scheduled(self, store: Store) -> None:
        now = (await store.get(await self.add(store))).created_at

        task_id = await self.add(store, at=now + timedelta(hours=1))

        record = await store.get(task_id)
        assert record.status is TaskState.SCHEDULED
        assert record.scheduled_for == now + timedelta(hours=1)

    async def test_a_time_in_the_past_means_now(self, store: Store) -> None:
        now = (await store.get(await self.add(store))).created_at

        task_id = await self.add(store, at=now - timedelta(hours=1))

        record = await store.get(task_id)
        assert record.status is TaskState.PENDING
        assert record.scheduled_for == record.created_at

    async def test_a_known_key_is_answered_with_the_first_task(self, store: Store) -> None:
        first = await self.add(store, idempotency_key="a")

        answers = await store.enqueue([self.new_task(idempotency_key="a")])

        assert answers == [Enqueued(first, created=False)]
        assert await self.granted(store) == [first]

    @pytest.mark.parametrize(
        ("payload", "equal"),
        [
            ('{"a": 1, "b": 2}', '{"b":2,"a":1}'),
            ('{"a": 1}', '{"a": 1.0}'),
            ('{"a": 100}', '{"a": 1e2}'),
            ('{"a": 1}', '{"a": 2, "a": 1}'),
            ('{"a": "\\u00e9"}', '{"a": "é"}'),
        ],
    )
    async def test_payloads_are_compared_as_values(
        self, store: Store, payload: str, equal: str
    ) -> None:
        first = await self.add(store, idempotency_key="a", payload=payload)

        answers = await store.enqueue([self.new_task(idempotency_key="a", payload=equal)])

        assert answers == [Enqueued(first, created=False)]

    @pytest.mark.parametrize(
        ("payload", "other"),
        [
            ('{"a": 1}', '{"a": 2}'),
            ('{"a": 1}', "{}"),
            ('{"a": 1}', '{"a": true}'),
            ('{"a": 0}', '{"a": false}'),
            ('{"a": "1"}', '{"a": 1}'),
            ('{"a": null}', "{}"),
            ('{"a": [1, 2]}', '{"a": [2, 1]}'),
            ('{"a": [[1], 2]}', '{"a": [[1, 2]]}'),
            ('{"a": {}, "b": 1}', '{"a": {"b": 1}}'),
            ('{"a": [1]}', '{"a": [[[1]]]}'),
            ('{"a": 9007199254740993}', '{"a": 9007199254740992}'),
            ('{"a": 0.1}', '{"a": 0.10000000000000000001}'),
        ],
    )
    async def test_a_known_key_with_another_payload_is_a_conflict(
        self, store: Store, payload: str, other: str
    ) -> None:
        await self.add(store, idempotency_key="a", payload=payload)

        with pytest.raises(IdempotencyConflict):
            await store.enqueue([self.new_task(idempotency_key="a", payload=other)])

    async def test_a_conflict_adds_nothing_of_its_call(self, store: Store) -> None:
        first = await self.add(store, idempotency_key="a", payload='{"a": 1}')
        tasks = [
            self.new_task(),
            self.new_task(idempotency_key="b"),
            self.new_task(idempotency_key="a", payload='{"a": 2}'),
        ]

        with pytest.raises(IdempotencyConflict):
            await store.enqueue(tasks)

        assert await self.granted(store) == [first]
        assert await store.enqueue(tasks[1:2]) == [Enqueued(tasks[1].id, created=True)]

    async def test_a_key_belongs_to_its_type(self, store: Store) -> None:
        await self.add(store, idempotency_key="a", payload='{"a": 1}')

        (answer,) = await store.enqueue([self.new_task(type="mail", idempotency_key="a")])

        assert answer.created

    async def test_a_key_named_twice_in_a_call_makes_one_task(self, store: Store) -> None:
        tasks = [self.new_task(idempotency_key=key) for key in ("a", "b", "a")]

        answers = await store.enqueue(tasks)

        first, second, _ = (task.id for task in tasks)
        assert answers == [
            Enqueued(first, created=True),
            Enqueued(second, created=True),
            Enqueued(first, created=False),
        ]
        assert await self.granted(store) == [first, second]

    async def test_a_key_with_two_payloads_in_a_call_is_a_conflict(self, store: Store) -> None:
        tasks = [self.new_task(idempotency_key="a", payload=f'{{"a": {n}}}') for n in range(2)]

        with pytest.raises(IdempotencyConflict):
            await store.enqueue(tasks)

        assert await self.granted(store) == []

    @pytest.mark.parametrize("outcome", ENDING)
    async def test_a_key_is_remembered_after_the_end(self, store: Store, outcome: Outcome) -> None:
        first = await self.end(store, outcome, idempotency_key="a", payload='{"a": 1}')

        (answer,) = await store.enqueue([self.new_task(idempotency_key="a", payload='{"a": 1}')])

        assert answer == Enqueued(first, created=False)
        with pytest.raises(IdempotencyConflict):
            await store.enqueue([self.new_task(idempotency_key="a", payload='{"a": 2}')])

    async def test_a_key_is_kept_by_a_retry(self, store: Store) -> None:
        first = await self.end(store, Outcome.FAILED, idempotency_key="a")
        await store.retry(first)

        (answer,) = await store.enqueue([self.new_task(idempotency_key="a")])

        assert answer == Enqueued(first, created=False)

    async def test_a_repeated_call_adds_only_what_is_missing(self, store: Store) -> None:
        tasks = [self.new_task(), self.new_task(idempotency_key="a"), self.new_task()]
        await store.enqueue(tasks[:2])

        answers = await store.enqueue(tasks, repeated=True)

        assert [answer.id for answer in answers] == [task.id for task in tasks]
        assert await self.granted(store) == [task.id for task in tasks]

    async def test_a_repeated_call_answers_the_task_it_created(self, store: Store) -> None:
        task = self.new_task(idempotency_key="a")
        await store.enqueue([task])

        answers = await store.enqueue([task], repeated=True)

        assert answers == [Enqueued(task.id, created=True)]

    @pytest.mark.parametrize("outcome", ENDING)
    async def test_a_repeated_call_does_not_revive_an_ended_task(
        self, store: Store, outcome: Outcome
    ) -> None:
        task = self.new_task()
        await store.enqueue([task])
        claim, claimed = await self.claim_one(store)
        await self.settle(store, claim, claimed, outcome)

        answers = await store.enqueue([task], repeated=True)

        assert [answer.id for answer in answers] == [task.id]
        assert await self.granted(store) == []

    async def test_a_repeated_call_may_meet_a_key_of_others(self, store: Store) -> None:
        first = await self.add(store, idempotency_key="a")

        answers = await store.enqueue([self.new_task(idempotency_key="a")], repeated=True)

        assert answers == [Enqueued(first, created=False)]

    async def test_a_fence_that_holds_lets_a_child_in(self, store: Store) -> None:
        await self.add(store)
        claim, parent = await self.claim_one(store)
        child = self.new_task()

        await store.enqueue([child], fence=Fence(claim.token, parent.id, parent.generation))

        assert await self.granted(store) == [child.id]

    async def test_an_expired_claim_that_nobody_rescued_still_enqueues(self, store: Store) -> None:
        await self.add(store)
        claim, parent = await self.claim_one(store)
        child = self.new_task()
        await self.advance(store, LEASE + SECOND)

        await store.enqueue([child], fence=Fence(claim.token, parent.id, parent.generation))

        assert await self.granted(store) == [child.id]

    async def test_a_rescued_claim_cannot_enqueue(self, store: Store) -> None:
        await self.add(store)
        claim, parent = await self.claim_one(store)
        child = self.new_task()
        await self.lose_worker(store)

        with pytest.raises(LeaseLost):
            await store.enqueue([child], fence=Fence(claim.token, parent.id, parent.generation))

        with pytest.raises(TaskNotFound):
            await store.get(child.id)

    @pytest.mark.parametrize("outcome", [*ENDING, *RETURNING])
    async def test_a_settled_task_cannot_enqueue(self, store: Store, outcome: Outcome) -> None:
        await self.add_many(store, 2)
        claim = await self.claim(store)
        parent = claim.tasks[0]
        await self.settle(store, claim, parent, outcome)

        with pytest.raises(LeaseLost):
            await store.enqueue(
                [self.new_task()], fence=Fence(claim.token, parent.id, parent.generation)
            )

    @needs("concurrent_writers")
    async def test_of_many_enqueues_with_one_key_one_creates(self, store: Store) -> None:
        calls = [store.enqueue([self.new_task(idempotency_key="a")]) for _ in range(10)]

        answers = [answer for (answer,) in await asyncio.gather(*calls)]

        assert len({answer.id for answer in answers}) == 1
        assert sum(answer.created for answer in answers) == 1

    @needs("concurrent_writers")
    async def test_enqueues_that_name_keys_in_another_order_do_not_block_each_other(
        self, store: Store
    ) -> None:
        keys = [str(n) for n in range(20)]
        calls = [
            store.enqueue([self.new_task(idempotency_key=key) for key in order])
            for order in (keys, keys[::-1]) * 5
        ]

        answers = await asyncio.gather(*calls)

        assert sum(answer.created for call in answers for answer in call) == len(keys)

    async def test_an_unknown_type_has_no_defaults(self, store: Store) -> None:
        defaults = await store.type_defaults("resize")

        assert defaults is None

    async def test_the_last_registration_of_a_type_wins(self, store: Store) -> None:
        await store.register_types([TypeDefaults("mail"), TypeDefaults("resize")])
        latest = TypeDefaults("resize", "bulk", 20, 9, retention=timedelta(days=2))

        await store.register_types([latest])

        assert await store.type_defaults("resize") == latest
        assert await store.type_defaults("mail") == TypeDefaults("mail")

    @pytest.mark.parametrize("tags", [(), ("red",)])
    async def test_a_large_payload_is_kept_whole(self, store: Store, tags: tuple[str, ...]) -> None:
        large = {"text": "".join(chr(33 + n * n % 93) for n in range(50_000))}
        options: dict[str, Any] = {"payload": json.dumps(large), "tags": tags}

        waiting = await self.add(store, delay=3600.0, **options)
        ended = [
            await self.end(store, outcome, **options)
            for outcome in (Outcome.COMPLETED, Outcome.CANCELLED, Outcome.DEAD)
        ]
        await store.retry(ended[-1])
        again, task = await self.claim_one(store)
        pending = await self.add(store, **options)

        assert json.loads(task.payload) == large
        for task_id in (waiting, *ended, pending):
            assert (await store.get(task_id)).payload == large
        for tag in (None, "red") if tags else (None,):
            (page,) = await all_pages(store, TaskFilter(tag=tag))
            assert [record.payload for record in page.records] == [large] * 5
        await self.settle(store, again, task, Outcome.DEAD)
        assert (await store.get(task.id)).payload == large

    async def test_a_key_knows_a_large_payload_again(self, store: Store) -> None:
        text = "x" * 5000

        async def asked(number: str) -> Enqueued:
            payload = f'{{"text": "{text}", "n": {number}}}'
            task = self.new_task(payload=payload, idempotency_key="k")
            return (await store.enqueue([task]))[0]

        first = await asked("1")
        second = await asked("1.0")
        await self.claim(store)
        with pytest.raises(IdempotencyConflict):
            await asked("2")

        assert second == Enqueued(first.id, created=False)
