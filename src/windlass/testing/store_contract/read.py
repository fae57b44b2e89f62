"""Rules of looking: one task, listings, queues."""

# ruff: noqa: S101 - tests assert

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from windlass.model.errors import ConfigurationError, TaskNotFound
from windlass.model.task import (
    Change,
    Ended,
    Outcome,
    TaskFilter,
    TaskState,
)
from windlass.store.port import Store
from windlass.testing.store_contract.steps import (
    ENDING,
    RETURNING,
    SECOND,
    Steps,
    id_at,
    new_id,
)

WAITING = (TaskState.PENDING, TaskState.SCHEDULED)
LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)


class ReadRules(Steps):
    """Read rules."""

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
        """By the store's clock; those of producers, which make the ids, are up to a minute off."""
        begin = await store.now()
        ids = [
            id_at(begin + place * 3600 * SECOND + wrong * SECOND)
            for place, wrong in enumerate((0, 59, -59, 0))
        ]
        old = await self.end(store, Outcome.COMPLETED, id=ids[0])
        await self.advance(store, 3600 * SECOND)
        fast = await self.add(store, id=ids[1], delay=9.0)
        await self.advance(store, 3600 * SECOND)
        slow = await self.end(store, Outcome.DEAD, id=ids[2])
        await self.advance(store, 3600 * SECOND)
        new = await self.add(store, id=ids[3])
        first, second, third = [(await store.get(each)).created_at for each in (fast, slow, new)]

        listed = [
            await self.listed(store, created_from=since, created_until=until, **wanted)
            for since, until in ((second, None), (first, third), (first, second), (None, first))
            for wanted in ({}, {"type": "resize"})
        ]

        assert listed[::2] == listed[1::2]
        assert listed[::2] == [[new, slow], [slow, fast], [fast], [old]]

    async def test_a_listing_goes_on_where_its_page_ended(self, store: Store) -> None:
        tasks = await self.add_many(store, 3) + [
            await self.end(store, outcome, priority=50)
            for outcome in (Outcome.COMPLETED, Outcome.DEAD)
        ]

        pages = await self.paged(store, limit=2)

        assert [page for page in pages if page] == [tasks[:2:-1], tasks[2:0:-1], tasks[:1]]

    async def test_a_page_says_when_that_was_all(self, store: Store) -> None:
        await self.add_many(store, 3)

        pages = [await store.tasks(TaskFilter(limit=limit)) for limit in (2, 4)]

        assert [page.rest is None for page in pages] == [False, True]
        assert [page.looked_back_to for page in pages] == [None, None]

    @pytest.mark.parametrize(
        "wanted",
        [{}, {"type": "resize"}, {"queue": "default"}, {"tag": "red"}, {"statuses": WAITING}],
        ids=str,
    )
    async def test_pages_hold_every_task_once_however_it_came_to_its_place(
        self, store: Store, wanted: dict[str, Any]
    ) -> None:
        """Ready are: new ones, two of a priority, returned, suspect, due, retried, changed."""
        waiting = [await self.suspect(store, tags=("red",))]
        (claim, task) = await self.claim_one(store, alone=True)
        await self.settle(store, claim, task, Outcome.RELEASED)
        for outcome in RETURNING:
            waiting.append(await self.add(store, tags=("red",)))
            claim, task = await self.claim_one(store)
            await self.settle(store, claim, task, outcome, delay=1.0)
        await self.advance(store, 2 * SECOND)
        await store.promote(100)
        waiting += await self.add_many(store, 2, tags=("red",))
        waiting += await self.add_many(store, 2, priority=50, tags=("red", "blue"))
        waiting += await self.add_many(store, 2, delay=60.0, tags=("red",))
        await self.add_many(store, 2, type="mail", queue="bulk")
        reopened = await self.add(store, tags=("red",))
        await store.cancel(reopened, "too late")
        await store.retry(reopened)
        waiting.append(reopened)
        await store.change(waiting[1], Change(priority=77))
        wanted = wanted if wanted.get("statuses") is None else wanted | {"type": "resize"}

        pages = await self.paged(store, **wanted, limit=3)

        found = [task_id for page in pages for task_id in page]
        missing = set(waiting) - set(found)
        assert not missing
        assert len(found) == len(set(found))
        assert len(found) == len(waiting) + (0 if wanted else 2)

    async def test_tags_are_found_whatever_becomes_of_a_task(self, store: Store) -> None:
        ended = [await self.end(store, outcome, tags=("red", "red")) for outcome in ENDING]
        running = await self.add(store, tags=("red",))
        claim, task = await self.claim_one(store)
        await self.start(store, claim, task)
        claimed = await self.add(store, tags=("blue", "red"))
        await self.claim_one(store)
        waiting = [await self.add(store, tags=("red",)), await self.add(store, tags=("blue",))]
        scheduled = await self.add(store, tags=("red",), delay=9.0)
        await self.add(store)

        everything = await self.listed(store, tag="red")
        blue = await self.listed(store, tag="blue")
        by_status = [
            await self.listed(store, tag="red", statuses=(status,), type="resize", queue="default")
            for status in (TaskState.DEAD, TaskState.RUNNING, TaskState.CLAIMED, TaskState.PENDING)
        ]
        unheard_of = await self.listed(store, tag="re")
        elsewhere = [
            await self.listed(store, tag="red", **asked)
            for asked in ({"queue": "bulk"}, {"type": "mail"})
        ] + [
            await self.listed(store, statuses=(status,), **asked)
            for status in TaskState
            for asked in ({"queue": "bulk"}, {"type": "mail"}, {"created_until": LONG_AGO})
        ]

        assert everything == [scheduled, waiting[0], claimed, running, *ended[::-1]]
        assert blue == [waiting[1], claimed]
        assert by_status == [
            [ended[ENDING.index(Outcome.DEAD)]],
            [running],
            [claimed],
            [waiting[0]],
        ]
        assert unheard_of == []
        assert not any(elsewhere)

    async def test_a_repeated_enqueue_tags_a_task_once(self, store: Store) -> None:
        tasks = [self.new_task(tags=("red",))]
        await store.enqueue(tasks)
        await store.enqueue([*tasks, self.new_task(tags=("red",))], repeated=True)

        assert len(await self.listed(store, tag="red")) == 2

    @pytest.mark.parametrize("position", ["", "nonsense", "pending", "pending:\0", "a,b", "é"])
    async def test_a_position_that_no_page_named_is_refused(
        self, store: Store, position: str
    ) -> None:
        with pytest.raises(ConfigurationError, match="position"):
            await store.tasks(TaskFilter(after=position))

    async def test_a_listed_task_is_what_it_is_when_looked_at(self, store: Store) -> None:
        for outcome in [*ENDING, *RETURNING]:
            await self.end(store, outcome)
            await self.advance(store, SECOND)
            await self.granted(store)
        await self.lose_worker(store)
        await self.claim_one(store)
        claim, task = await self.claim_one(store)
        await self.start(store, claim, task)

        listed = (await store.tasks(TaskFilter())).records

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

    async def test_resuming_says_whether_the_queue_was_paused(self, store: Store) -> None:
        await self.add(store, queue="busy")
        await store.pause("bulk")

        assert await store.resume("bulk") is True
        assert await store.resume("bulk") is False
        assert await store.resume("busy") is False
        assert await store.resume("never seen") is False

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


class HasWorkRules(Steps):
    """Has work rules."""

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
