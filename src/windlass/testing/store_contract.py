"""The rules every store keeps, as tests: subclass `StoreContract` to put an adapter through them.

```python
class TestMyStore(StoreContract):
    capabilities = frozenset({"wakeups"})

    async def open_store(self) -> Store: ...
    async def close_store(self, store: Store) -> None: ...
    async def advance(self, store: Store, delta: timedelta) -> None: ...
```
"""

# ruff: noqa: S101 - tests assert

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar
from uuid import UUID, uuid4

import pytest
import pytest_asyncio

from windlass.model.errors import (
    IdempotencyConflict,
    LeaseLost,
    NotLeader,
    TaskNotFound,
    WrongState,
)
from windlass.model.task import (
    Answer,
    CancelAnswer,
    Change,
    Claim,
    ClaimAnswer,
    ClaimedTask,
    ClaimRequest,
    Ended,
    Enqueued,
    Fence,
    Leadership,
    NewTask,
    Outcome,
    Pulse,
    PulseAnswer,
    QueueRecord,
    Rescued,
    Settlement,
    Started,
    TaskFilter,
    TaskRecord,
    TaskState,
    TypeDefaults,
    WorkerInfo,
    WorkerRecord,
)
from windlass.store.port import Store

WORKER = UUID(int=1)
OTHER_WORKER = UUID(int=2)
LEASE = timedelta(seconds=30)
AGEING = timedelta(seconds=6)
TERM = timedelta(seconds=15)
SECOND = timedelta(seconds=1)
DAY = timedelta(days=1)
ERROR = '{"type": "ValueError", "message": "no such image"}'
ENDING = (Outcome.COMPLETED, Outcome.FAILED, Outcome.DEAD, Outcome.CANCELLED)
UNSUCCESSFUL = (Outcome.FAILED, Outcome.DEAD, Outcome.CANCELLED)
RETURNING = (Outcome.RETRIED, Outcome.SNOOZED, Outcome.RELEASED)

_Test = TypeVar("_Test", bound=Callable[..., Awaitable[None]])
_milliseconds = count(1_700_000_000_000)


def needs(capability: str) -> Callable[[_Test], _Test]:
    """Skip a test for adapters that do not declare this capability."""

    def mark(test: _Test) -> _Test:
        test.needed_capability = capability  # type: ignore[attr-defined]  # read by the fixture
        return test

    return mark


def new_id() -> UUID:
    """Return a UUID version 7 that is greater than those before it."""
    return UUID(int=next(_milliseconds) << 80 | 7 << 76 | 2 << 62 | random.getrandbits(62))


class _Steps:
    """What an adapter provides, and the words the rules are written in."""

    capabilities: frozenset[str] = frozenset()
    pytestmark = pytest.mark.asyncio

    async def open_store(self) -> Store:
        """Return a fresh, empty, open store."""
        raise NotImplementedError

    async def close_store(self, store: Store) -> None:
        """Give back what `open_store` took."""
        raise NotImplementedError

    async def advance(self, store: Store, delta: timedelta) -> None:
        """Move the store's clock."""
        raise NotImplementedError

    @pytest_asyncio.fixture
    async def store(self, request: pytest.FixtureRequest) -> AsyncIterator[Store]:
        """Open a store of its own for each test."""
        needed = getattr(request.function, "needed_capability", None)
        if needed is not None and needed not in self.capabilities:
            pytest.skip(f"the adapter does not declare {needed!r}")
        store = await self.open_store()
        try:
            yield store
        finally:
            await self.close_store(store)

    def new_task(self, **options: Any) -> NewTask:
        asked: dict[str, Any] = {"id": new_id(), "type": "resize", "payload": "{}"}
        return NewTask(**(asked | options))

    async def add(self, store: Store, **options: Any) -> UUID:
        """Enqueue one task."""
        (answer,) = await store.enqueue([self.new_task(**options)])
        return answer.id

    async def add_many(self, store: Store, number: int, **options: Any) -> list[UUID]:
        """Enqueue tasks in one call."""
        tasks = [self.new_task(**options) for _ in range(number)]
        return [answer.id for answer in await store.enqueue(tasks)]

    async def ask(self, store: Store, **options: Any) -> ClaimAnswer:
        """Ask for tasks; by default for up to ten of the type `resize` from any queue."""
        asked: dict[str, Any] = {
            "worker_id": WORKER,
            "types": ("resize",),
            "limit": 10,
            "lease": LEASE,
            "ageing": AGEING,
        }
        return await store.claim(ClaimRequest(**(asked | options)))

    async def claim(self, store: Store, **options: Any) -> Claim:
        """Claim tasks that are known to be there."""
        answer = await self.ask(store, **options)
        assert answer.claim is not None, "nothing was granted"
        return answer.claim

    async def claim_one(self, store: Store, **options: Any) -> tuple[Claim, ClaimedTask]:
        """Claim a single task that is known to be there."""
        claim = await self.claim(store, **({"limit": 1} | options))
        (task,) = claim.tasks
        return claim, task

    async def granted(self, store: Store, **options: Any) -> list[UUID]:
        """Claim, and return the ids in the order they were granted."""
        answer = await self.ask(store, **options)
        return [task.id for task in answer.claim.tasks] if answer.claim else []

    def settlement(
        self, claim: Claim, task: ClaimedTask, outcome: Outcome, **details: Any
    ) -> Settlement:
        if outcome in (Outcome.FAILED, Outcome.DEAD, Outcome.RETRIED):
            details = {"error": ERROR} | details
        return Settlement(claim.token, task.id, task.generation, outcome, **details)

    async def settle(
        self, store: Store, claim: Claim, task: ClaimedTask, outcome: Outcome, **details: Any
    ) -> Answer:
        (answer,) = await store.settle([self.settlement(claim, task, outcome, **details)])
        return answer

    async def end(self, store: Store, outcome: Outcome, **options: Any) -> UUID:
        """Enqueue a task and bring it to its end."""
        task_id = await self.add(store, **options)
        claim, task = await self.claim_one(store)
        assert await self.settle(store, claim, task, outcome) is Answer.APPLIED
        return task_id

    async def start(self, store: Store, claim: Claim, task: ClaimedTask) -> frozenset[UUID]:
        return await store.start([Started(claim.token, task.id, task.generation, 0.5)])

    async def lose_worker(self, store: Store) -> Rescued:
        """Let every lease expire, and sweep."""
        await self.advance(store, LEASE + SECOND)
        return await store.rescue(1000)

    async def suspect(self, store: Store, **options: Any) -> UUID:
        """Enqueue a task, and lose two workers that had claimed it."""
        task_id = await self.add(store, **options)
        for _ in range(2):
            await self.claim(store, types=(options.get("type", "resize"),))
            await self.lose_worker(store)
        return task_id

    async def status(self, store: Store, task_id: UUID) -> TaskState:
        return (await store.get(task_id)).status

    async def elect(self, store: Store, candidate: UUID = WORKER) -> Leadership:
        leadership = await store.lead(candidate, current=None, term=TERM)
        assert leadership is not None, "the seat is taken"
        return leadership

    def worker(self, worker_id: UUID = WORKER) -> WorkerInfo:
        return WorkerInfo(
            id=worker_id,
            host="a.example",
            pid=7,
            version="0.1.0",
            capacity=100,
            types=("resize", "mail"),
            queues=("default",),
        )

    async def pulse(
        self, store: Store, *claims: Claim, worker_id: UUID = WORKER, running: int = 0
    ) -> PulseAnswer:
        tokens = [claim.token for claim in claims]
        return await store.pulse(Pulse(worker_id, tokens, LEASE, running=running, idle=False))

    async def known_worker(self, store: Store, worker_id: UUID = WORKER) -> WorkerRecord:
        (found,) = [each for each in await store.workers() if each.id == str(worker_id)]
        return found

    async def queue(self, store: Store, name: str) -> QueueRecord | None:
        found = [queue for queue in await store.queues() if queue.name == name]
        return found[0] if found else None

    async def listed(self, store: Store, **wanted: Any) -> list[UUID]:
        return [UUID(record.id) for record in await store.tasks(TaskFilter(**wanted))]


class _EnqueueRules(_Steps):
    async def test_tasks_are_answered_in_the_order_they_were_asked_for(self, store: Store) -> None:
        tasks = [self.new_task() for _ in range(5)]
        random.shuffle(tasks)

        answers = await store.enqueue(tasks)

        assert answers == [Enqueued(task.id, created=True) for task in tasks]

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


class _ClaimRules(_Steps):
    async def test_an_empty_store_grants_nothing(self, store: Store) -> None:
        answer = await self.ask(store)

        assert answer == ClaimAnswer(claim=None, alone_waiting=False, due_in=None)

    async def test_a_grant_carries_the_task(self, store: Store) -> None:
        task_id = await self.add(store, payload='{"a": 1}', queue="bulk", priority=7)

        claim = await self.claim(store)

        (task,) = claim.tasks
        assert json.loads(task.payload) == {"a": 1}
        assert task == ClaimedTask(
            id=task_id,
            type="resize",
            queue="bulk",
            priority=7,
            payload=task.payload,
            attempts=0,
            max_attempts=4,
            generation=1,
            cancel_reason=None,
        )
        assert not claim.alone

    async def test_a_claimed_task_shows_its_worker(self, store: Store) -> None:
        task_id = await self.add(store)

        await self.claim(store, worker_id=OTHER_WORKER)

        record = await store.get(task_id)
        assert record.status is TaskState.CLAIMED
        assert record.worker_id == str(OTHER_WORKER)
        assert record.claimed_at is not None
        assert record.started_at is None
        assert record.updated_at == record.claimed_at

    async def test_a_task_is_granted_once(self, store: Store) -> None:
        task_id = await self.add(store)

        first, second = await self.granted(store), await self.granted(store)

        assert (first, second) == ([task_id], [])

    async def test_every_claim_has_its_own_token_and_a_higher_fence(self, store: Store) -> None:
        await self.add_many(store, 2)

        first, _ = await self.claim_one(store)
        second, _ = await self.claim_one(store)

        assert first.token != second.token
        assert first.fence < second.fence

    async def test_no_more_than_the_limit_is_granted(self, store: Store) -> None:
        one, two, three = await self.add_many(store, 3)

        first, second = await self.granted(store, limit=2), await self.granted(store, limit=2)

        assert (first, second) == ([one, two], [three])

    async def test_the_limit_holds_across_lanes(self, store: Store) -> None:
        urgent = await self.add_many(store, 2, priority=20)
        normal = await self.add_many(store, 2)

        granted = await self.granted(store, limit=3)

        assert granted == [*urgent, normal[0]]

    async def test_tasks_of_a_lane_are_granted_in_the_order_they_became_ready(
        self, store: Store
    ) -> None:
        tasks = [await self.add(store) for _ in range(3)] + await self.add_many(store, 3)

        granted = await self.granted(store)

        assert granted == tasks

    async def test_a_promoted_task_is_behind_those_that_were_ready_before(
        self, store: Store
    ) -> None:
        late = await self.add(store, delay=1.0)
        early = await self.add(store)
        await self.advance(store, 2 * SECOND)
        await store.promote(10)

        granted = await self.granted(store)

        assert granted == [early, late]

    async def test_a_higher_priority_is_granted_first(self, store: Store) -> None:
        low, high, middle = [await self.add(store, priority=each) for each in (0, 20, 10)]

        granted = await self.granted(store)

        assert granted == [high, middle, low]

    async def test_waiting_raises_a_task_above_newer_ones_of_higher_priority(
        self, store: Store
    ) -> None:
        old = await self.add(store, priority=0)
        await self.advance(store, 10 * AGEING + SECOND)
        new = await self.add(store, priority=10)

        granted = await self.granted(store)

        assert granted == [old, new]

    async def test_waiting_too_little_leaves_priority_in_front(self, store: Store) -> None:
        old = await self.add(store, priority=0)
        await self.advance(store, 10 * AGEING - SECOND)
        new = await self.add(store, priority=10)

        granted = await self.granted(store)

        assert granted == [new, old]

    async def test_the_ageing_step_is_that_of_the_request(self, store: Store) -> None:
        old = await self.add(store, priority=0)
        await self.advance(store, 10 * AGEING - SECOND)
        new = await self.add(store, priority=10)

        granted = await self.granted(store, ageing=timedelta(0))

        assert granted == [old, new]

    async def test_equal_ranks_are_ordered_by_priority_then_queue_then_type(
        self, store: Store
    ) -> None:
        lanes = [("b", "mail", 1), ("a", "resize", 0), ("b", "mail", 0), ("a", "mail", 0)]
        tasks = [
            self.new_task(queue=queue, type=kind, priority=priority)
            for queue, kind, priority in lanes
        ]
        await store.enqueue(tasks)

        granted = await self.granted(store, types=("mail", "resize"), ageing=timedelta(0))

        assert granted == [tasks[n].id for n in (0, 3, 1, 2)]

    async def test_a_returned_task_is_next_and_not_last(self, store: Store) -> None:
        tasks = await self.add_many(store, 3)
        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, Outcome.RELEASED)

        granted = await self.granted(store)

        assert granted == tasks

    async def test_a_retried_task_is_behind_those_that_were_ready_before(
        self, store: Store
    ) -> None:
        first, second = await self.add_many(store, 2)
        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, Outcome.RETRIED)

        granted = await self.granted(store)

        assert granted == [second, first]

    async def test_types_that_were_not_asked_for_wait(self, store: Store) -> None:
        await self.add(store, type="mail")
        known = await self.add(store)

        granted = await self.granted(store)

        assert granted == [known]

    async def test_queues_that_were_not_asked_for_wait(self, store: Store) -> None:
        await self.add(store, queue="other")
        asked = await self.add(store, queue="bulk")

        granted = await self.granted(store, queues=("bulk", "empty"))

        assert granted == [asked]

    async def test_a_worker_of_no_type_or_no_queue_is_granted_nothing(self, store: Store) -> None:
        await self.add(store)

        by_type, by_queue = (
            await self.granted(store, types=()),
            await self.granted(store, queues=()),
        )

        assert (by_type, by_queue) == ([], [])

    async def test_a_paused_queue_grants_nothing(self, store: Store) -> None:
        await self.add(store, queue="bulk")
        other = await self.add(store)
        await store.pause("bulk")

        granted = await self.granted(store)

        assert granted == [other]

    async def test_a_resumed_queue_grants_again(self, store: Store) -> None:
        task_id = await self.add(store)
        await store.pause("default")
        await self.ask(store)
        await store.resume("default")

        granted = await self.granted(store)

        assert granted == [task_id]

    async def test_a_scheduled_task_is_not_granted(self, store: Store) -> None:
        await self.add(store, delay=1.0)
        await self.advance(store, 60 * SECOND)

        answer = await self.ask(store)

        assert answer.claim is None

    async def test_a_claim_says_when_the_next_scheduled_task_of_any_type_is_due(
        self, store: Store
    ) -> None:
        await self.add(store, delay=60.0)
        await self.add(store, delay=10.0, type="mail", queue="bulk")

        answer = await self.ask(store)

        assert answer.due_in == pytest.approx(10.0, abs=1.0)

    async def test_a_claim_is_not_held_up_by_what_has_been_due_for_long(self, store: Store) -> None:
        await self.add(store, delay=60.0)
        await self.add(store, delay=10.0)
        await self.advance(store, 20 * SECOND)

        answer = await self.ask(store)

        assert answer.due_in == pytest.approx(40.0, abs=1.0)

    async def test_what_came_behind_an_earlier_claim_is_still_granted(self, store: Store) -> None:
        held = await self.claim_after_add(store)
        await self.granted(store)
        new = await self.add(store)
        await self.settle(store, held, held.tasks[0], Outcome.SNOOZED)

        granted = await self.granted(store)

        assert granted == [new, held.tasks[0].id]

    async def claim_after_add(self, store: Store) -> Claim:
        await self.add(store)
        return await self.claim(store)

    @needs("concurrent_writers")
    async def test_claims_at_the_same_time_share_without_overlap(self, store: Store) -> None:
        tasks = await self.add_many(store, 60)

        grants = await asyncio.gather(*(self.granted(store, limit=7) for _ in range(5)))

        granted = [task_id for grant in grants for task_id in grant]
        while rest := await self.granted(store, limit=7):
            granted += rest
        assert sorted(granted) == sorted(tasks)


class _AloneRules(_Steps):
    async def test_a_task_recovered_once_is_claimed_with_the_others(self, store: Store) -> None:
        tasks = await self.add_many(store, 2)
        await self.claim(store)
        await self.lose_worker(store)

        answer = await self.ask(store)

        assert answer.claim is not None
        assert [task.id for task in answer.claim.tasks] == tasks
        assert not answer.alone_waiting

    async def test_a_task_recovered_twice_is_not_claimed_with_others(self, store: Store) -> None:
        await self.suspect(store)
        other = await self.add(store)

        answer = await self.ask(store)

        assert answer.claim is not None
        assert [task.id for task in answer.claim.tasks] == [other]
        assert answer.alone_waiting

    async def test_waiting_suspects_are_reported_by_a_full_claim_too(self, store: Store) -> None:
        await self.suspect(store)
        await self.add(store, priority=100)

        answer = await self.ask(store, limit=1)

        assert answer.alone_waiting

    async def test_suspects_of_others_are_not_reported(self, store: Store) -> None:
        await self.suspect(store, type="mail", queue="bulk")

        by_type = await self.ask(store)
        by_queue = await self.ask(store, types=("mail",), queues=("default",))
        await store.pause("bulk")
        by_pause = await self.ask(store, types=("mail",))

        assert not any(each.alone_waiting for each in (by_type, by_queue, by_pause))

    async def test_suspects_are_claimed_one_at_a_time(self, store: Store) -> None:
        tasks = await self.add_many(store, 2)
        for _ in range(2):
            await self.claim(store)
            await self.lose_worker(store)

        first = await self.claim(store, alone=True)
        second = await self.claim(store, alone=True)

        assert [[task.id for task in claim.tasks] for claim in (first, second)] == [
            [tasks[0]],
            [tasks[1]],
        ]
        assert first.alone

    async def test_a_claim_alone_grants_no_other_task(self, store: Store) -> None:
        await self.add(store)

        answer = await self.ask(store, alone=True)

        assert answer.claim is None
        assert not answer.alone_waiting

    async def test_a_lost_suspect_stays_a_suspect(self, store: Store) -> None:
        task_id = await self.suspect(store)
        await self.claim(store, alone=True)
        await self.lose_worker(store)

        granted = await self.granted(store), await self.granted(store, alone=True)

        assert granted == ([], [task_id])

    @pytest.mark.parametrize("outcome", [Outcome.RELEASED, Outcome.SNOOZED])
    async def test_a_suspect_that_has_not_run_stays_a_suspect(
        self, store: Store, outcome: Outcome
    ) -> None:
        task_id = await self.suspect(store)
        claim, task = await self.claim_one(store, alone=True)
        await self.settle(store, claim, task, outcome)

        granted = await self.granted(store), await self.granted(store, alone=True)

        assert granted == ([], [task_id])

    async def test_a_snoozed_suspect_is_promoted_as_a_suspect(self, store: Store) -> None:
        task_id = await self.suspect(store)
        claim, task = await self.claim_one(store, alone=True)
        await self.settle(store, claim, task, Outcome.SNOOZED, delay=10.0)
        await self.advance(store, 11 * SECOND)
        await store.promote(10)

        granted = await self.granted(store), await self.granted(store, alone=True)

        assert granted == ([], [task_id])

    async def test_a_changed_suspect_stays_a_suspect(self, store: Store) -> None:
        task_id = await self.suspect(store)
        await store.change(task_id, Change(priority=20))

        granted = await self.granted(store), await self.granted(store, alone=True)

        assert granted == ([], [task_id])

    async def test_a_suspect_that_ended_an_attempt_is_none_any_more(self, store: Store) -> None:
        task_id = await self.suspect(store)
        claim, task = await self.claim_one(store, alone=True)
        await self.settle(store, claim, task, Outcome.RETRIED)

        granted = await self.granted(store)

        assert granted == [task_id]

    async def test_a_hundred_suspects_are_claimed_one_at_a_time(self, store: Store) -> None:
        await self.suspects(store, 100, recoveries=2)

        granted = await self.granted(store, alone=True, limit=16)

        assert len(granted) == 1

    @pytest.mark.parametrize(("recoveries", "batch"), [(2, 8), (3, 4), (6, 1)])
    async def test_more_suspects_are_an_outage_and_claimed_in_batches_halved_with_each_recovery(
        self, store: Store, recoveries: int, batch: int
    ) -> None:
        tasks = await self.suspects(store, 101, recoveries=2)
        for _ in range(recoveries - 2):
            while await self.granted(store, alone=True, limit=1000):
                pass
            await self.lose_worker(store)

        granted = await self.granted(store, alone=True, limit=16)

        assert len(granted) == batch
        assert set(granted) <= set(tasks)

    async def suspects(self, store: Store, number: int, *, recoveries: int) -> list[UUID]:
        tasks = await self.add_many(store, number)
        for _ in range(recoveries):
            await self.claim(store, limit=number)
            await self.lose_worker(store)
        return tasks


class _StartRules(_Steps):
    async def test_a_started_task_is_running(self, store: Store) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)

        lost = await store.start([Started(claim.token, task.id, task.generation, 0.25)])

        record = await store.get(task_id)
        assert lost == frozenset()
        assert record.status is TaskState.RUNNING
        assert record.claimed_at is not None
        assert record.started_at == record.claimed_at + timedelta(seconds=0.25)
        assert record.updated_at == record.started_at

    async def test_starting_nothing_loses_nothing(self, store: Store) -> None:
        lost = await store.start([])

        assert lost == frozenset()

    async def test_a_start_reported_twice_changes_nothing(self, store: Store) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)
        await self.start(store, claim, task)
        before = await store.get(task_id)

        lost = await self.start(store, claim, task)

        assert lost == frozenset()
        assert await store.get(task_id) == before

    async def test_an_expired_claim_that_nobody_rescued_may_start(self, store: Store) -> None:
        await self.add(store)
        claim, task = await self.claim_one(store)
        await self.advance(store, LEASE + SECOND)

        lost = await self.start(store, claim, task)

        assert lost == frozenset()

    async def test_a_lost_lease_cannot_start(self, store: Store) -> None:
        lost_id, kept_id = await self.add_many(store, 2)
        old, old_task = await self.claim_one(store)
        await self.lose_worker(store)
        await self.claim_one(store, worker_id=OTHER_WORKER)
        claim, task = await self.claim_one(store)

        lost = await store.start(
            [
                Started(old.token, old_task.id, old_task.generation, 0.0),
                Started(claim.token, task.id, task.generation, 0.0),
            ]
        )

        assert lost == {lost_id}
        assert await self.status(store, lost_id) is TaskState.CLAIMED
        assert await self.status(store, kept_id) is TaskState.RUNNING

    @pytest.mark.parametrize("outcome", [*ENDING, *RETURNING])
    async def test_a_settled_task_cannot_start(self, store: Store, outcome: Outcome) -> None:
        await self.add_many(store, 2)
        claim = await self.claim(store)
        await self.settle(store, claim, claim.tasks[0], outcome)

        lost = await self.start(store, claim, claim.tasks[0])

        assert lost == {claim.tasks[0].id}
        assert await self.status(store, claim.tasks[0].id) is not TaskState.RUNNING

    async def test_requested_cancellations_are_found_with_their_reasons(self, store: Store) -> None:
        asked, silent = await self.add_many(store, 2)
        await self.claim(store)
        await store.cancel(asked, "too late")

        requests = await store.requested_cancellations([asked, silent, new_id()])

        assert requests == {asked: "too late"}

    async def test_a_request_to_cancel_is_answered_by_the_end(self, store: Store) -> None:
        await self.add(store)
        claim, task = await self.claim_one(store)
        await store.cancel(task.id, "too late")
        await self.settle(store, claim, task, Outcome.CANCELLED)

        requests = await store.requested_cancellations([task.id])

        assert requests == {}


class _SettleRules(_Steps):
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
        assert _without_times(error) == {
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


class _PulseRules(_Steps):
    async def test_a_pulse_extends_a_claim(self, store: Store) -> None:
        task_id = await self.add(store)
        claim = await self.claim(store)
        await self.advance(store, LEASE - SECOND)

        answer = await self.pulse(store, claim)

        await self.advance(store, LEASE - SECOND)
        assert answer.kept == {claim.token}
        assert await store.rescue(10) == Rescued()
        assert await self.status(store, task_id) is TaskState.CLAIMED

    async def test_an_extension_is_one_lease_long(self, store: Store) -> None:
        await self.add(store)
        claim = await self.claim(store)
        await self.advance(store, SECOND)
        await self.pulse(store, claim)
        await self.advance(store, LEASE + SECOND)

        rescued = await store.rescue(10)

        assert rescued.claims == 1

    async def test_an_expired_claim_cannot_be_extended(self, store: Store) -> None:
        await self.add(store)
        claim = await self.claim(store)
        await self.advance(store, LEASE + SECOND)

        answer = await self.pulse(store, claim)

        assert answer.kept == frozenset()
        assert (await store.rescue(10)).claims == 1

    async def test_a_rescued_claim_cannot_be_extended(self, store: Store) -> None:
        await self.add(store)
        claim = await self.claim(store)
        await self.lose_worker(store)

        answer = await self.pulse(store, claim)

        assert answer.kept == frozenset()

    async def test_a_pulse_keeps_only_the_claims_it_names(self, store: Store) -> None:
        await self.add_many(store, 3)
        kept, _ = await self.claim_one(store)
        dropped, _ = await self.claim_one(store)
        also_kept, _ = await self.claim_one(store)
        await self.advance(store, LEASE - SECOND)

        answer = await self.pulse(store, kept, also_kept)

        await self.advance(store, 2 * SECOND)
        assert answer.kept == {kept.token, also_kept.token}
        assert (await store.rescue(10)).claims == 1
        assert (await self.pulse(store, kept, dropped)).kept == {kept.token}

    async def test_a_registered_worker_is_listed(self, store: Store) -> None:
        await store.register(self.worker(), lease=LEASE)
        await store.register(replace(self.worker(OTHER_WORKER), queues=None), lease=LEASE)

        workers = await store.workers()

        first, second = sorted(workers, key=lambda worker: worker.id)
        assert first == WorkerRecord(
            id=str(WORKER),
            host="a.example",
            pid=7,
            version="0.1.0",
            capacity=100,
            types=("resize", "mail"),
            queues=("default",),
            started_at=first.started_at,
            heartbeat_at=first.started_at,
            running=0,
            idle=False,
            leader=False,
        )
        assert (second.id, second.queues) == (str(OTHER_WORKER), None)

    async def test_a_pulse_is_a_sign_of_life(self, store: Store) -> None:
        await store.register(self.worker(), lease=LEASE)
        await self.advance(store, SECOND)

        answer = await store.pulse(Pulse(WORKER, [], LEASE, running=3, idle=True))

        worker = await self.known_worker(store)
        assert answer == PulseAnswer(frozenset(), registered=True)
        assert worker.heartbeat_at >= worker.started_at + SECOND
        assert (worker.running, worker.idle) == (3, True)

    async def test_a_pulse_of_an_unknown_worker_says_so_and_extends_all_the_same(
        self, store: Store
    ) -> None:
        await self.add(store)
        claim = await self.claim(store)

        answer = await self.pulse(store, claim)

        assert answer == PulseAnswer(frozenset({claim.token}), registered=False)
        assert await store.workers() == []

    async def test_a_worker_says_whether_it_is_idle(self, store: Store) -> None:
        await store.register(self.worker(), lease=LEASE)

        await store.set_idle(WORKER, True)
        idle = await self.known_worker(store)
        await store.set_idle(WORKER, False)
        busy = await self.known_worker(store)

        assert (idle.idle, busy.idle) == (True, False)

    async def test_an_unknown_worker_cannot_be_idle(self, store: Store) -> None:
        await store.set_idle(WORKER, True)

        assert await store.workers() == []

    async def test_a_worker_that_leaves_keeps_its_claims(self, store: Store) -> None:
        await store.register(self.worker(), lease=LEASE)
        await self.add(store)
        claim, task = await self.claim_one(store)

        await store.deregister(WORKER)

        assert await store.workers() == []
        assert await self.settle(store, claim, task, Outcome.COMPLETED) is Answer.APPLIED

    async def test_a_worker_may_register_again(self, store: Store) -> None:
        await store.register(self.worker(), lease=LEASE)
        await store.deregister(WORKER)

        await store.register(self.worker(), lease=LEASE)

        assert len(await store.workers()) == 1


class _CancelRules(_Steps):
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


class _ChangeRules(_Steps):
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


class _RetryRules(_Steps):
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


class _RescueRules(_Steps):
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
        assert _without_times(error) == {
            "type": "WorkerLost",
            "message": record.last_error,
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
        assert rescued == Rescued(claims=1, lost_attempts=1, dead=1)
        assert record.status is TaskState.DEAD
        assert record.attempts == 1
        assert record.last_error == record.errors[0]["message"]
        assert record.errors[0]["type"] == "WorkerLost"
        assert record.worker_id == str(WORKER)
        assert record.started_at is not None

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


class _PromoteRules(_Steps):
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


class _LeadRules(_Steps):
    async def test_a_free_seat_is_taken(self, store: Store) -> None:
        leadership = await store.lead(WORKER, current=None, term=TERM)

        assert leadership is not None
        assert leadership.holder == WORKER

    async def test_there_is_one_leader(self, store: Store) -> None:
        await self.elect(store)

        other = await store.lead(OTHER_WORKER, current=None, term=TERM)

        assert other is None

    async def test_a_renewal_keeps_the_term(self, store: Store) -> None:
        leadership = await self.elect(store)
        await self.advance(store, TERM - SECOND)

        renewed = await store.lead(WORKER, current=leadership, term=TERM)

        await self.advance(store, TERM - SECOND)
        assert renewed == leadership
        assert await store.lead(OTHER_WORKER, current=None, term=TERM) is None

    async def test_a_seat_whose_term_is_over_is_taken_under_a_higher_term(
        self, store: Store
    ) -> None:
        old = await self.elect(store)
        await self.advance(store, TERM + SECOND)

        new = await store.lead(OTHER_WORKER, current=None, term=TERM)

        assert new is not None
        assert new.term > old.term
        assert await store.lead(WORKER, current=old, term=TERM) is None

    async def test_a_leader_that_renews_too_late_gets_a_higher_term(self, store: Store) -> None:
        old = await self.elect(store)
        await self.advance(store, TERM + SECOND)

        new = await store.lead(WORKER, current=old, term=TERM)

        assert new is not None
        assert new.term > old.term

    async def test_a_candidate_cannot_show_the_term_of_another(self, store: Store) -> None:
        leadership = await self.elect(store)

        stolen = await store.lead(OTHER_WORKER, current=leadership, term=TERM)

        assert stolen is None

    async def test_a_resigned_seat_is_free_at_once(self, store: Store) -> None:
        old = await self.elect(store)

        await store.resign(old)

        new = await self.elect(store, OTHER_WORKER)
        assert new.term > old.term

    async def test_a_deposed_leader_cannot_free_the_seat(self, store: Store) -> None:
        old = await self.elect(store)
        await self.advance(store, TERM + SECOND)
        new = await self.elect(store, OTHER_WORKER)

        await store.resign(old)

        assert await store.lead(OTHER_WORKER, current=new, term=TERM) == new
        assert await store.lead(WORKER, current=None, term=TERM) is None

    async def test_the_leader_is_shown_among_the_workers(self, store: Store) -> None:
        await store.register(self.worker(WORKER), lease=LEASE)
        await store.register(self.worker(OTHER_WORKER), lease=LEASE)
        await self.elect(store)

        leaders = [worker.id for worker in await store.workers() if worker.leader]

        await self.advance(store, TERM + SECOND)
        assert leaders == [str(WORKER)]
        assert not any(worker.leader for worker in await store.workers())

    @needs("concurrent_writers")
    async def test_of_many_candidates_at_once_one_is_elected(self, store: Store) -> None:
        candidates = [uuid4() for _ in range(8)]

        answers = await asyncio.gather(
            *(store.lead(each, current=None, term=TERM) for each in candidates)
        )

        assert sum(answer is not None for answer in answers) == 1


_Chore = Callable[[Store, Leadership], Awaitable[object]]
_CHORES: Sequence[_Chore] = (
    lambda store, leadership: store.promote(10, leadership=leadership),
    lambda store, leadership: store.rescue(10, leadership=leadership),
    lambda store, leadership: store.remove_dead_workers(leadership=leadership),
    lambda store, leadership: store.tidy(leadership=leadership),
    lambda store, leadership: store.prepare_history(leadership=leadership),
    lambda store, leadership: store.retain(leadership=leadership),
)
_each_chore = pytest.mark.parametrize(
    "chore",
    _CHORES,
    ids=["promote", "rescue", "remove_dead_workers", "tidy", "prepare_history", "retain"],
)


class _ChoreRules(_Steps):
    @_each_chore
    async def test_the_leader_does_its_chores(self, store: Store, chore: _Chore) -> None:
        leadership = await self.elect(store)

        answer = await chore(store, leadership)

        assert answer is not None

    @_each_chore
    async def test_a_leader_whose_term_is_over_does_no_chore(
        self, store: Store, chore: _Chore
    ) -> None:
        leadership = await self.elect(store)
        await self.advance(store, TERM + SECOND)

        with pytest.raises(NotLeader):
            await chore(store, leadership)

    @_each_chore
    async def test_a_deposed_leader_does_no_chore(self, store: Store, chore: _Chore) -> None:
        leadership = await self.elect(store)
        await self.advance(store, TERM + SECOND)
        await self.elect(store, OTHER_WORKER)

        with pytest.raises(NotLeader):
            await chore(store, leadership)

    @_each_chore
    async def test_a_leader_that_resigned_does_no_chore(self, store: Store, chore: _Chore) -> None:
        leadership = await self.elect(store)
        await store.resign(leadership)

        with pytest.raises(NotLeader):
            await chore(store, leadership)

    async def test_a_refused_chore_changes_nothing(self, store: Store) -> None:
        task_id = await self.add(store, delay=5.0)
        leadership = await self.elect(store)
        await self.advance(store, TERM + SECOND)

        with pytest.raises(NotLeader):
            await store.promote(10, leadership=leadership)

        assert await self.status(store, task_id) is TaskState.SCHEDULED

    async def test_workers_silent_for_three_leases_are_removed(self, store: Store) -> None:
        await store.register(self.worker(WORKER), lease=LEASE)
        await store.register(self.worker(OTHER_WORKER), lease=LEASE)
        await self.advance(store, 2 * LEASE)
        await self.pulse(store, worker_id=OTHER_WORKER)
        await self.advance(store, LEASE + SECOND)

        removed = await store.remove_dead_workers(leadership=await self.elect(store))

        assert removed == [WORKER]
        assert [worker.id for worker in await store.workers()] == [str(OTHER_WORKER)]
        assert not (await self.pulse(store)).registered

    async def test_workers_silent_for_less_stay(self, store: Store) -> None:
        await store.register(self.worker(), lease=LEASE)
        await self.advance(store, 3 * LEASE - SECOND)

        removed = await store.remove_dead_workers(leadership=await self.elect(store))

        assert removed == []

    async def test_claims_of_a_removed_worker_are_left_to_the_rescue(self, store: Store) -> None:
        await store.register(self.worker(), lease=LEASE)
        await self.add(store)
        claim, task = await self.claim_one(store)
        await self.advance(store, 3 * LEASE + SECOND)

        await store.remove_dead_workers(leadership=await self.elect(store))

        assert await self.settle(store, claim, task, Outcome.COMPLETED) is Answer.APPLIED

    async def test_tidying_touches_no_live_task(self, store: Store) -> None:
        ready = await self.add(store, queue="bulk")
        await self.add(store, delay=5.0)
        claimed = await self.add(store, priority=50)
        claim, task = await self.claim_one(store)
        await store.cancel(claimed, "too late")
        before = [await store.get(task_id) for task_id in (ready, claimed)]

        await store.tidy(leadership=await self.elect(store))

        assert [await store.get(task_id) for task_id in (ready, claimed)] == before
        assert await store.requested_cancellations([claimed]) == {claimed: "too late"}
        await self.advance(store, 6 * SECOND)
        assert await store.promote(10) == 1
        assert len(await self.granted(store)) == 2
        assert await self.settle(store, claim, task, Outcome.COMPLETED) is Answer.APPLIED


class _RetentionRules(_Steps):
    async def retain_after(self, store: Store, delta: timedelta) -> None:
        await self.advance(store, delta)
        await store.retain(leadership=await self.elect(store))

    async def is_known(self, store: Store, task_id: UUID) -> bool:
        _, unknown = await store.ended([task_id])
        return not unknown

    @pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.CANCELLED])
    async def test_an_ended_task_is_kept_for_its_time_and_then_removed(
        self, store: Store, outcome: Outcome
    ) -> None:
        task_id = await self.end(store, outcome, retention=2 * DAY)

        await self.retain_after(store, 2 * DAY)
        kept = await self.is_known(store, task_id)
        await self.retain_after(store, DAY + SECOND)

        assert kept
        assert not await self.is_known(store, task_id)
        with pytest.raises(TaskNotFound):
            await store.get(task_id)

    async def test_without_a_time_of_its_own_a_task_is_kept_for_a_week(self, store: Store) -> None:
        task_id = await self.end(store, Outcome.COMPLETED)

        await self.retain_after(store, 7 * DAY)
        kept = await self.is_known(store, task_id)
        await self.retain_after(store, DAY + SECOND)

        assert kept
        assert not await self.is_known(store, task_id)

    @pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.DEAD])
    async def test_failed_and_dead_tasks_are_kept_for_a_month(
        self, store: Store, outcome: Outcome
    ) -> None:
        task_id = await self.end(store, outcome)

        await self.retain_after(store, 30 * DAY)
        kept = await self.is_known(store, task_id)
        await self.advance(store, DAY + SECOND)
        retained = await store.retain(leadership=await self.elect(store))

        assert kept
        assert retained.dead == 1
        assert not await self.is_known(store, task_id)

    @pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.DEAD])
    async def test_a_time_of_its_own_holds_for_a_failed_task_too(
        self, store: Store, outcome: Outcome
    ) -> None:
        task_id = await self.end(store, outcome, retention=DAY)

        await self.retain_after(store, 2 * DAY + SECOND)

        assert not await self.is_known(store, task_id)

    async def test_a_task_with_a_key_is_kept_as_long_as_its_key(self, store: Store) -> None:
        task_id = await self.end(store, Outcome.COMPLETED, retention=DAY, idempotency_key="a")

        await self.retain_after(store, 7 * DAY)
        answers = await store.enqueue([self.new_task(idempotency_key="a")])

        assert answers == [Enqueued(task_id, created=False)]

    @pytest.mark.parametrize("outcome", ENDING)
    async def test_a_key_is_forgotten_with_its_task(self, store: Store, outcome: Outcome) -> None:
        await self.end(store, outcome, retention=DAY, idempotency_key="a", payload='{"a": 1}')
        await self.retain_after(store, 8 * DAY + SECOND)

        (answer,) = await store.enqueue([self.new_task(idempotency_key="a", payload='{"a": 2}')])

        assert answer.created

    async def test_live_tasks_are_never_removed(self, store: Store) -> None:
        pending = await self.add(store, retention=timedelta(0), idempotency_key="a")
        scheduled = await self.add(store, delay=1.0)
        claimed = await self.add(store, priority=50)
        await self.claim_one(store)

        await self.retain_after(store, 400 * DAY)

        assert [await self.status(store, each) for each in (pending, scheduled, claimed)] == [
            TaskState.PENDING,
            TaskState.SCHEDULED,
            TaskState.CLAIMED,
        ]

    async def test_a_reopened_task_is_not_removed(self, store: Store) -> None:
        task_id = await self.end(store, Outcome.FAILED, retention=DAY)
        await store.retry(task_id)

        await self.retain_after(store, 3 * DAY)

        assert await self.status(store, task_id) is TaskState.PENDING


class _ReadRules(_Steps):
    async def test_an_unknown_task_cannot_be_looked_at(self, store: Store) -> None:
        with pytest.raises(TaskNotFound):
            await store.get(new_id())

    async def test_the_end_of_a_task_is_found_with_its_result(self, store: Store) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, Outcome.COMPLETED, result='{"a": [1]}')

        (ended,), unknown = await store.ended([task_id])

        assert ended.result is not None
        assert json.loads(ended.result) == {"a": [1]}
        assert ended == Ended(task_id, TaskState.COMPLETED, ended.result, None)
        assert unknown == []

    @pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.DEAD])
    async def test_the_end_of_a_task_is_found_with_its_error(
        self, store: Store, outcome: Outcome
    ) -> None:
        task_id = await self.end(store, outcome)

        ended, _ = await store.ended([task_id])

        assert ended == [Ended(task_id, TaskState(outcome), None, "no such image")]

    async def test_live_tasks_have_no_end_and_unknown_ones_are_named(self, store: Store) -> None:
        pending = await self.add(store)
        claimed = await self.add(store, priority=50)
        await self.claim_one(store)
        scheduled = await self.add(store, delay=60.0)
        stranger = new_id()

        ended, unknown = await store.ended([pending, stranger, claimed, scheduled])

        assert (ended, unknown) == ([], [stranger])

    async def test_an_end_undone_by_a_retry_is_none(self, store: Store) -> None:
        task_id = await self.end(store, Outcome.FAILED)
        await store.retry(task_id)

        ended, unknown = await store.ended([task_id])

        assert (ended, unknown) == ([], [])

    async def test_tasks_are_listed_newest_first_wherever_they_are(self, store: Store) -> None:
        tasks = [await self.end(store, outcome) for outcome in ENDING]
        running = await self.add(store)
        claim, task = await self.claim_one(store)
        await self.start(store, claim, task)
        claimed = await self.add(store)
        await self.claim(store)
        tasks += [running, claimed, await self.add(store), await self.add(store, delay=9.0)]

        listed = await self.listed(store)

        assert listed == tasks[::-1]

    async def test_tasks_are_listed_by_status(self, store: Store) -> None:
        completed = await self.end(store, Outcome.COMPLETED)
        await self.end(store, Outcome.CANCELLED)
        failed = await self.end(store, Outcome.FAILED)
        running = await self.add(store)
        claim, task = await self.claim_one(store)
        await self.start(store, claim, task)
        await self.add(store)
        scheduled = await self.add(store, delay=9.0)
        wanted = (
            TaskState.COMPLETED,
            TaskState.FAILED,
            TaskState.RUNNING,
            TaskState.SCHEDULED,
        )

        listed = await self.listed(store, statuses=wanted)

        assert listed == [scheduled, running, failed, completed]

    async def test_tasks_are_listed_by_type_queue_and_tag(self, store: Store) -> None:
        plain = await self.add(store)
        mail = await self.add(store, type="mail")
        bulk = await self.add(store, queue="bulk")
        red = await self.add(store, tags=("red", "blue"))

        by_type = await self.listed(store, type="mail")
        by_queue = await self.listed(store, queue="bulk")
        by_tag = await self.listed(store, tag="red")
        by_both = await self.listed(store, type="resize", queue="default")

        assert (by_type, by_queue, by_tag, by_both) == ([mail], [bulk], [red], [red, plain])

    async def test_tasks_are_listed_by_the_time_of_their_creation(self, store: Store) -> None:
        old = await self.add(store)
        await self.advance(store, 60 * SECOND)
        new = await self.add(store)
        between = (await store.get(new)).created_at - 30 * SECOND

        listed = (
            await self.listed(store, created_from=between),
            await self.listed(store, created_until=between),
        )

        assert listed == ([new], [old])

    async def test_a_listing_goes_on_before_a_task(self, store: Store) -> None:
        tasks = await self.add_many(store, 3) + [
            await self.end(store, Outcome.COMPLETED, priority=50) for _ in range(2)
        ]

        pages = [await self.listed(store, limit=2)]
        pages += [await self.listed(store, limit=2, before=page[-1]) for page in pages]

        assert pages == [[tasks[4], tasks[3]], [tasks[2], tasks[1]]]

    async def test_a_listed_task_is_what_it_is_when_looked_at(self, store: Store) -> None:
        for outcome in [*ENDING, *RETURNING]:
            await self.end(store, outcome)
            await self.advance(store, SECOND)
            await self.granted(store)
        await self.lose_worker(store)
        await self.claim_one(store)
        claim, task = await self.claim_one(store)
        await self.start(store, claim, task)

        listed = await store.tasks(TaskFilter())

        assert listed == [await store.get(UUID(record.id)) for record in listed]

    async def test_queues_are_listed_with_their_live_tasks(self, store: Store) -> None:
        await self.end(store, Outcome.COMPLETED)
        first, *_ = await self.add_many(store, 4)
        claim = await self.claim(store, limit=2)
        await self.start(store, claim, claim.tasks[0])
        await self.add_many(store, 3, delay=60.0)

        queue = await self.queue(store, "default")

        assert queue is not None
        assert not queue.paused
        assert {state: number for state, number in queue.counts.items() if number} == {
            TaskState.RUNNING: 1,
            TaskState.CLAIMED: 1,
            TaskState.PENDING: 2,
            TaskState.SCHEDULED: 3,
        }
        assert queue.oldest_ready_at == (await store.get(first)).created_at

    async def test_a_queue_without_live_tasks_is_listed_while_it_is_paused(
        self, store: Store
    ) -> None:
        await store.pause("bulk")
        await store.pause("bulk")

        paused = await self.queue(store, "bulk")
        await store.resume("bulk")
        resumed = await self.queue(store, "bulk")

        assert paused is not None
        assert paused.paused
        assert paused.oldest_ready_at is None
        assert not any(paused.counts.values())
        assert resumed is None

    async def test_a_queue_whose_tasks_have_ended_is_not_listed(self, store: Store) -> None:
        await self.end(store, Outcome.COMPLETED)

        queues = await store.queues()

        assert queues == []

    async def test_the_oldest_ready_time_counts_returned_tasks_and_no_scheduled_ones(
        self, store: Store
    ) -> None:
        task_id = await self.add(store)
        created_at = (await store.get(task_id)).created_at
        claim, task = await self.claim_one(store)
        claimed = await self.queue(store, "default")
        await self.add(store, delay=60.0)
        await self.advance(store, SECOND)
        await self.settle(store, claim, task, Outcome.RELEASED)

        queue = await self.queue(store, "default")

        assert claimed is not None
        assert claimed.oldest_ready_at is None
        assert queue is not None
        assert queue.oldest_ready_at == created_at

    async def test_queues_are_listed_by_name(self, store: Store) -> None:
        for name in ("b", "c", "a"):
            await self.add(store, queue=name)

        names = [queue.name for queue in await store.queues()]

        assert names == ["a", "b", "c"]


class _HasWorkRules(_Steps):
    async def has_work(self, store: Store, queues: Sequence[str] | None = None) -> bool:
        return await store.has_work(["resize"], queues)

    async def test_an_empty_store_has_no_work(self, store: Store) -> None:
        assert not await self.has_work(store)

    async def test_a_ready_task_is_work(self, store: Store) -> None:
        await self.add(store, queue="bulk")

        assert await self.has_work(store)
        assert await self.has_work(store, ["bulk"])
        assert not await self.has_work(store, ["default"])

    async def test_a_claimed_task_is_work_until_it_ends(self, store: Store) -> None:
        await self.add(store, queue="bulk")
        claim, task = await self.claim_one(store)

        claimed = await self.has_work(store), await self.has_work(store, ["default"])
        await self.settle(store, claim, task, Outcome.COMPLETED)
        ended = await self.has_work(store)

        assert (claimed, ended) == ((True, False), False)

    async def test_a_task_that_may_only_be_claimed_alone_is_work(self, store: Store) -> None:
        await self.suspect(store)

        waiting = await self.has_work(store)
        await self.claim(store, alone=True)
        claimed = await self.has_work(store)

        assert (waiting, claimed) == (True, True)

    async def test_a_scheduled_task_is_no_work(self, store: Store) -> None:
        await self.add(store, delay=60.0)

        assert not await self.has_work(store)

    async def test_a_task_of_another_type_is_no_work(self, store: Store) -> None:
        await self.add_many(store, 2, type="mail")
        await self.claim_one(store, types=("mail",))

        assert not await self.has_work(store)

    async def test_a_paused_queue_has_no_work_but_what_is_claimed(self, store: Store) -> None:
        await self.add_many(store, 2)
        claim, task = await self.claim_one(store)
        await store.pause("default")

        claimed = await self.has_work(store)
        await self.settle(store, claim, task, Outcome.COMPLETED)
        paused = await self.has_work(store)

        assert (claimed, paused) == (True, False)


class _WakeRules(_Steps):
    async def is_woken(self, store: Store, act: Callable[[], Awaitable[object]]) -> None:
        """Act while an idle worker listens, and wait until it is woken."""
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(woken.set)

        await store.register(self.worker(), lease=LEASE)
        await store.set_idle(WORKER, True)
        async with store.listen(wake):
            await asyncio.sleep(0)
            woken.clear()
            await act()
            await asyncio.wait_for(woken.wait(), timeout=10)

    @needs("wakeups")
    async def test_an_enqueue_wakes(self, store: Store) -> None:
        await self.is_woken(store, lambda: self.add(store))

    @needs("wakeups")
    async def test_a_promotion_wakes(self, store: Store) -> None:
        await self.add(store, delay=1.0)
        await self.advance(store, 2 * SECOND)

        await self.is_woken(store, lambda: store.promote(10))

    @needs("wakeups")
    @pytest.mark.parametrize("outcome", RETURNING)
    async def test_a_task_that_returns_wakes(self, store: Store, outcome: Outcome) -> None:
        await self.add(store)
        claim, task = await self.claim_one(store)

        await self.is_woken(store, lambda: self.settle(store, claim, task, outcome))

    @needs("wakeups")
    async def test_a_rescue_wakes(self, store: Store) -> None:
        await self.add(store)
        await self.claim(store)

        await self.is_woken(store, lambda: self.lose_worker(store))

    @needs("wakeups")
    async def test_a_change_wakes(self, store: Store) -> None:
        task_id = await self.add(store, delay=60.0)

        await self.is_woken(store, lambda: store.change(task_id, Change(delay=0.0)))

    @needs("wakeups")
    async def test_a_retry_wakes(self, store: Store) -> None:
        task_id = await self.end(store, Outcome.FAILED)

        await self.is_woken(store, lambda: store.retry(task_id))

    @needs("wakeups")
    async def test_a_resumed_queue_wakes(self, store: Store) -> None:
        await store.pause("default")
        await self.add(store)

        await self.is_woken(store, lambda: store.resume("default"))

    @needs("wakeups")
    async def test_who_has_left_is_not_woken(self, store: Store) -> None:
        woken: list[bool] = []
        async with store.listen(lambda: woken.append(True)):
            pass
        woken.clear()

        await self.add(store)

        assert woken == []


class _BesideRules(_Steps):
    async def test_another_thread_sees_the_same_truth(self, store: Store) -> None:
        beside = store.beside()
        task_id = await self.add(store)

        async def claim_there() -> Claim:
            await beside.open()
            try:
                return await self.claim(beside)
            finally:
                await beside.close()

        claim = await asyncio.to_thread(lambda: asyncio.run(claim_there()))

        assert [task.id for task in claim.tasks] == [task_id]
        assert await self.settle(store, claim, claim.tasks[0], Outcome.COMPLETED) is Answer.APPLIED


class StoreContract(
    _EnqueueRules,
    _ClaimRules,
    _AloneRules,
    _StartRules,
    _SettleRules,
    _PulseRules,
    _CancelRules,
    _ChangeRules,
    _RetryRules,
    _RescueRules,
    _PromoteRules,
    _LeadRules,
    _ChoreRules,
    _RetentionRules,
    _ReadRules,
    _HasWorkRules,
    _WakeRules,
    _BesideRules,
):
    """Every rule of a store; the retention of a store under test is the default one.

    Capabilities: `wakeups` (`listen` is told of new work by the store itself) and
    `concurrent_writers` (calls at the same time neither fail nor overlap).
    """


def _without_times(error: dict[str, Any]) -> dict[str, Any]:
    times = ("started_at", "ended_at")
    return {name: value for name, value in error.items() if name not in times}
