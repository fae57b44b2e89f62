"""Rules of dead letters: found, replayed, discarded, and removed when there are too many."""

# ruff: noqa: S101 - tests assert

import asyncio
import json
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from windlass.model.dead import (
    DeadFilter,
    DeadLetter,
    DiscardAnswer,
    QueuedLetter,
    Replay,
    ReplayAnswer,
    Replayed,
)
from windlass.model.errors import ConfigurationError, NotLeader, TaskNotFound
from windlass.model.task import Answer, Change, Enqueued, Leadership, Outcome, TaskFilter, TaskState
from windlass.store.port import Store
from windlass.testing.store_contract.steps import DAY, SECOND, WORKER, Steps, needs, new_id

OTHER_ENDS = (Outcome.COMPLETED, Outcome.CANCELLED)


class DeadSteps(Steps):
    """The words of these rules."""

    async def bury(
        self,
        store: Store,
        outcome: Outcome = Outcome.DEAD,
        *,
        error: dict[str, Any] | None = None,
        **options: Any,
    ) -> UUID:
        """Enqueue a task and let it fail for good."""
        task_id = await self.add(store, **options)
        await self.fail(store, outcome, error=error, of=options.get("type", "resize"))
        await self.advance(store, SECOND)  # so that no two end at the same moment
        return task_id

    async def fail(
        self,
        store: Store,
        outcome: Outcome = Outcome.DEAD,
        *,
        error: dict[str, Any] | None = None,
        of: str = "resize",
    ) -> None:
        """Let the next task fail for good."""
        said = {"type": "ValueError", "message": "no such image"} | (error or {})
        claim, task = await self.claim_one(store, types=(of,))
        answer = await self.settle(store, claim, task, outcome, error=json.dumps(said))
        assert answer is Answer.APPLIED

    async def found(self, store: Store, **wanted: Any) -> list[UUID]:
        return (await store.find_dead(DeadFilter(**wanted))).ids

    async def letter(self, store: Store, task_id: UUID) -> DeadLetter:
        (letter,) = await store.read_dead([task_id])
        return letter

    async def replay(self, store: Store, task_id: UUID, **options: Any) -> UUID:
        """Replay a letter that can be."""
        new = new_id()
        again = options.pop("again", False)
        (answer,) = await store.replay([Replay(task_id, new, **options)], again=again)
        assert answer == Replayed(ReplayAnswer.REPLAYED, new)
        return new


class FindDeadRules(DeadSteps):
    """Find dead rules."""

    async def test_dead_letters_are_found_last_ended_first(self, store: Store) -> None:
        first = await self.add(store)
        await self.end(store, Outcome.COMPLETED, type="resize", priority=90)
        second = await self.bury(store, Outcome.FAILED, priority=90)
        await self.fail(store)

        assert await self.found(store) == [first, second]

    async def test_what_is_alive_or_ended_otherwise_is_no_dead_letter(self, store: Store) -> None:
        ids = [await self.end(store, outcome) for outcome in OTHER_ENDS]
        ids += await self.add_many(store, 2)
        await self.claim(store, limit=1)

        assert await self.found(store) == []
        assert await store.read_dead([*ids, new_id()]) == []

    async def test_a_letter_holds_all_that_is_known_of_its_task(self, store: Store) -> None:
        payload = {"text": "x" * 3000}
        task_id = await self.add(
            store, payload=json.dumps(payload), tags=("red",), idempotency_key="k", queue="bulk"
        )
        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, Outcome.RETRIED)
        await store.promote(10)
        error = {"class": "transient", "traceback": "Traceback …"}
        await self.fail(store, error=error)

        letter = await self.letter(store, task_id)

        record = await store.get(task_id)
        assert letter == DeadLetter.of(record, depth=0, replayed_as=())
        assert (letter.payload, letter.tags, letter.queue) == (payload, ("red",), "bulk")
        assert (letter.error_class, letter.error_type) == ("transient", "ValueError")
        assert [one["attempt"] for one in letter.errors] == [1, 2]
        assert letter.errors[-1].items() >= error.items()
        assert letter.errors[-1]["worker_id"] == str(WORKER)

    async def test_letters_are_read_in_the_order_asked_for(self, store: Store) -> None:
        ids = [await self.bury(store) for _ in range(3)]
        asked = [ids[1], ids[2], new_id(), ids[0]]

        letters = await store.read_dead(asked)

        assert [letter.id for letter in letters] == [str(ids[1]), str(ids[2]), str(ids[0])]

    async def test_letters_are_found_by_what_they_are(self, store: Store) -> None:
        plain = await self.bury(store)
        queued = await self.bury(store, queue="bulk")
        typed = await self.bury(store, type="mail")
        failed = await self.bury(store, Outcome.FAILED)

        assert await self.found(store, queue="bulk") == [queued]
        assert await self.found(store, type="mail") == [typed]
        assert await self.found(store, statuses=(TaskState.FAILED,)) == [failed]
        assert await self.found(store, statuses=(TaskState.DEAD,)) == [typed, queued, plain]
        assert await self.found(store, queue="bulk", type="mail") == []

    async def test_letters_are_found_by_the_class_of_their_last_error(self, store: Store) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)
        await self.settle(
            store, claim, task, Outcome.RETRIED,
            error='{"type": "E", "message": "", "class": "code-bug"}',
        )  # fmt: skip
        await store.promote(10)
        await self.fail(store, error={"class": "transient"})
        unclassed = await self.bury(store)

        assert await self.found(store, error_class="transient") == [task_id]
        assert await self.found(store, error_class="code-bug") == []
        assert await self.found(store, error_class="unknown") == [unclassed]

    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [
            ("TimeoutError", {0}),
            ("^TimeoutError: gate", {0}),
            ("gateway .* silent$", {0}),
            ("gate(way)?|image", {0, 1}),
            ("GATEWAY", set()),
            ("[0-9]{3}", set()),
        ],
    )
    async def test_letters_are_found_by_a_pattern_in_type_and_message(
        self, store: Store, pattern: str, expected: set[int]
    ) -> None:
        said = {"type": "TimeoutError", "message": "gateway 17 is silent"}
        ids = [await self.bury(store, error=said), await self.bury(store)]

        found = await self.found(store, error=pattern)

        assert {ids.index(one) for one in found} == expected

    async def test_a_pattern_reaches_over_the_lines_of_a_message(self, store: Store) -> None:
        task_id = await self.bury(store, error={"message": "no image\nin the folder"})

        assert await self.found(store, error="image.*folder$") == [task_id]

    @pytest.mark.parametrize("number", [0, 1])
    async def test_a_pattern_that_is_none_is_named(self, store: Store, number: int) -> None:
        for _ in range(number):
            await self.bury(store)

        with pytest.raises(ConfigurationError, match=r"'\(\(gate' is not a regular expression"):
            await store.find_dead(DeadFilter(error="((gate"))

    async def test_letters_are_found_by_when_they_ended(self, store: Store) -> None:
        ids = [await self.bury(store) for _ in range(3)]
        ended = [(await store.get(task_id)).completed_at for task_id in ids]

        assert await self.found(store, ended_from=ended[1]) == [ids[2], ids[1]]
        assert await self.found(store, ended_until=ended[1]) == [ids[0]]
        assert await self.found(store, ended_from=ended[1], ended_until=ended[2]) == [ids[1]]

    @pytest.mark.parametrize("limit", [1, 2, 3])
    async def test_pages_hold_each_letter_once(self, store: Store, limit: int) -> None:
        ids = [await self.bury(store, queue="bulk" if place % 2 else "mail") for place in range(5)]
        found, after = list[UUID](), None
        until = (await store.get(ids[4])).completed_at

        while True:
            wanted = DeadFilter(queue="mail", ended_until=until, after=after, limit=limit)
            page = await store.find_dead(wanted)
            assert len(page.ids) <= limit
            found += page.ids
            after = page.rest
            if after is None:
                break

        assert found == [ids[2], ids[0]]

    @pytest.mark.parametrize("after", ["", "1", "x.y", f"{'9' * 18}.{0:032x}", f"{7:032x}"])
    async def test_a_position_that_no_page_said_is_refused(self, store: Store, after: str) -> None:
        with pytest.raises(ConfigurationError, match="position"):
            await store.find_dead(DeadFilter(after=after))


class ReplayRules(DeadSteps):
    """Replay rules."""

    @pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.DEAD])
    async def test_a_replay_is_a_new_task_like_the_old_one(
        self, store: Store, outcome: Outcome
    ) -> None:
        task_id = await self.bury(
            store,
            outcome,
            payload='{"a": 1}',
            queue="bulk",
            priority=30,
            max_attempts=7,
            tags=("red", "blue"),
            retention=40 * DAY,
        )

        new = await self.replay(store, task_id)

        old, record = await store.get(task_id), await store.get(new)
        kept = ("type", "payload", "queue", "priority", "max_attempts", "tags")
        assert [getattr(record, name) for name in kept] == [getattr(old, name) for name in kept]
        assert record.status is TaskState.PENDING
        assert (record.attempts, record.generation, record.errors) == (0, 1, ())
        assert await self.listed(store, tag="red") == [new, task_id]
        _, task = await self.claim_one(store)
        assert task.id == new

    async def test_a_replay_is_kept_as_long_as_its_ancestor_was_to_be(self, store: Store) -> None:
        task_id = await self.bury(store, retention=40 * DAY)
        new = await self.replay(store, task_id)
        await self.fail(store)

        await self.advance(store, 39 * DAY)
        await store.retain(leadership=await self.elect(store))

        assert await self.status(store, new) is TaskState.DEAD

    async def test_a_replay_and_its_ancestor_name_each_other(self, store: Store) -> None:
        task_id = await self.bury(store)
        new = await self.replay(store, task_id)

        letter, record = await self.letter(store, task_id), await store.get(new)

        assert (letter.replayed_as, letter.replay_of, letter.depth) == ((str(new),), None, 0)
        assert record.replay_of == str(task_id)
        page = await store.tasks(TaskFilter((TaskState.PENDING, TaskState.DEAD)))
        assert [one.replay_of for one in page.records] == [str(task_id), None]

    async def test_the_letter_stays_as_it_is(self, store: Store) -> None:
        task_id = await self.bury(store)
        before = await store.get(task_id)

        await self.replay(store, task_id)

        assert await store.get(task_id) == before

    async def test_a_replay_of_a_replay_is_one_deeper(self, store: Store) -> None:
        task_id = await self.bury(store)
        second = await self.replay(store, task_id)
        await self.fail(store)
        third = await self.replay(store, second)
        await self.fail(store)

        letters = await store.read_dead([task_id, second, third])

        assert [letter.depth for letter in letters] == [0, 1, 2]
        assert [letter.replay_of for letter in letters] == [None, str(task_id), str(second)]
        assert await self.found(store, depth_below=1) == [task_id]
        assert await self.found(store, depth_below=2, unreplayed=True) == []
        assert await self.found(store, depth_below=3, unreplayed=True) == [third]

    async def test_the_depth_of_a_replay_outlives_its_ancestors(self, store: Store) -> None:
        task_id = await self.bury(store)
        second = await self.replay(store, task_id)
        await self.fail(store)
        third = await self.replay(store, second)
        await self.fail(store)

        await store.discard([task_id, second])

        letter = await self.letter(store, third)
        assert (letter.depth, letter.replay_of) == (2, str(second))

    async def test_a_replay_carries_no_idempotency_key(self, store: Store) -> None:
        task_id = await self.bury(store, idempotency_key="k")

        new = await self.replay(store, task_id)

        assert (await store.get(new)).idempotency_key is None
        asked = self.new_task(idempotency_key="k")
        assert await store.enqueue([asked]) == [Enqueued(task_id, created=False)]

    async def test_a_letter_that_was_moved_is_replayed_where_it_was_moved_to(
        self, store: Store
    ) -> None:
        task_id = await self.add(store)
        await store.change(task_id, Change(queue="bulk", priority=50))
        await self.fail(store)

        record = await store.get(await self.replay(store, task_id))

        assert (record.queue, record.priority) == ("bulk", 50)

    @pytest.mark.parametrize("payload", ['{"b": 2}', json.dumps({"b": "x" * 3000})])
    async def test_a_replay_may_have_another_payload(self, store: Store, payload: str) -> None:
        task_id = await self.bury(store, payload='{"a": 1}')

        new = await self.replay(store, task_id, payload=payload)

        assert (await store.get(new)).payload == json.loads(payload)
        assert (await store.get(task_id)).payload == {"a": 1}
        _, task = await self.claim_one(store)
        assert json.loads(task.payload) == json.loads(payload)

    async def test_a_large_payload_is_replayed_whole(self, store: Store) -> None:
        payload = json.dumps({"text": "ß" * 3000})
        task_id = await self.bury(store, payload=payload)
        new = await self.replay(store, task_id)

        await store.discard([task_id])

        assert (await store.get(new)).payload == json.loads(payload)
        _, task = await self.claim_one(store)
        assert json.loads(task.payload) == json.loads(payload)

    async def test_replays_may_be_put_off(self, store: Store) -> None:
        ids = [await self.bury(store) for _ in range(2)]
        new = [new_id(), new_id()]

        await store.replay([Replay(ids[0], new[0]), Replay(ids[1], new[1], delay=60.0)])

        assert await self.status(store, new[0]) is TaskState.PENDING
        later = await store.get(new[1])
        assert later.status is TaskState.SCHEDULED
        assert later.scheduled_for - later.created_at == timedelta(seconds=60)

    async def test_a_letter_is_replayed_once(self, store: Store) -> None:
        task_id = await self.bury(store)
        new, other = await self.replay(store, task_id), new_id()

        (answer,) = await store.replay([Replay(task_id, other)])

        assert answer == Replayed(ReplayAnswer.BEFORE, new)
        with pytest.raises(TaskNotFound):
            await store.get(other)
        assert await self.found(store, unreplayed=True) == []
        assert await self.found(store) == [task_id]

    async def test_a_letter_is_replayed_again_if_that_is_said(self, store: Store) -> None:
        task_id = await self.bury(store)
        first = await self.replay(store, task_id)
        await self.advance(store, SECOND)

        second = await self.replay(store, task_id, again=True)

        letter = await self.letter(store, task_id)
        assert letter.replayed_as == (str(first), str(second))
        (answer,) = await store.replay([Replay(task_id, new_id())])
        assert answer == Replayed(ReplayAnswer.BEFORE, second)

    @pytest.mark.parametrize("again", [False, True])
    async def test_a_repeated_call_makes_no_other_task(self, store: Store, again: bool) -> None:
        ids = [await self.bury(store) for _ in range(2)]
        replays = [Replay(task_id, new_id()) for task_id in ids]
        first = await store.replay(replays, again=again)
        await self.fail(store)  # it may have come far meanwhile

        assert await store.replay(replays, again=again) == first
        assert len(await self.granted(store)) == 1

    async def test_a_letter_that_was_reopened_and_died_again_may_be_replayed_again(
        self, store: Store
    ) -> None:
        task_id = await self.bury(store)
        await self.replay(store, task_id)
        await self.claim_one(store)
        await store.retry(task_id)
        await self.fail(store)

        assert await self.found(store, unreplayed=True) == [task_id]
        new = await self.replay(store, task_id)
        assert (await self.letter(store, task_id)).replayed_as == (str(new),)

    async def test_what_is_no_dead_letter_is_not_replayed(self, store: Store) -> None:
        ended = [await self.end(store, outcome) for outcome in OTHER_ENDS]
        ids = [*ended, await self.add(store), new_id()]
        replays = [Replay(task_id, new_id()) for task_id in ids]

        answers = await store.replay(replays)

        assert answers == [Replayed(ReplayAnswer.ABSENT)] * len(ids)
        assert await self.granted(store) == [ids[2]]

    async def test_each_replay_of_a_call_is_answered_for_itself(self, store: Store) -> None:
        ids = [await self.bury(store) for _ in range(2)]
        before = await self.replay(store, ids[0])
        new = new_id()

        answers = await store.replay(
            [Replay(ids[0], new_id()), Replay(new_id(), new_id()), Replay(ids[1], new)]
        )

        assert answers == [
            Replayed(ReplayAnswer.BEFORE, before),
            Replayed(ReplayAnswer.ABSENT),
            Replayed(ReplayAnswer.REPLAYED, new),
        ]
        assert await store.replay([]) == []

    async def test_replays_are_ready_in_the_order_of_the_call(self, store: Store) -> None:
        ids = [await self.bury(store) for _ in range(3)]
        replays = [Replay(task_id, new_id()) for task_id in reversed(ids)]

        await store.replay(replays)

        assert await self.granted(store) == [one.id for one in replays]

    @needs("concurrent_writers")
    async def test_of_many_replays_at_once_one_makes_a_task(self, store: Store) -> None:
        task_id = await self.bury(store)
        calls = [store.replay([Replay(task_id, new_id())]) for _ in range(8)]

        answers = [answer for (answer,) in await asyncio.gather(*calls)]

        said = [answer.answer for answer in answers]
        assert said.count(ReplayAnswer.REPLAYED) == 1
        assert set(said) <= {ReplayAnswer.REPLAYED, ReplayAnswer.BEFORE, ReplayAnswer.HELD}
        assert len(await self.granted(store)) == 1

    async def test_a_deposed_leader_replays_nothing(self, store: Store) -> None:
        task_id = await self.bury(store)
        await self.elect(store)

        with pytest.raises(NotLeader):
            await store.replay(
                [Replay(task_id, new_id())], leadership=Leadership(WORKER, 1_000_000)
            )

        assert await self.found(store, unreplayed=True) == [task_id]

    async def test_a_leader_replays(self, store: Store) -> None:
        task_id, new = await self.bury(store), new_id()

        answers = await store.replay([Replay(task_id, new)], leadership=await self.elect(store))

        assert answers == [Replayed(ReplayAnswer.REPLAYED, new)]


class DiscardRules(DeadSteps):
    """Discard rules."""

    async def test_what_is_discarded_is_gone(self, store: Store) -> None:
        task_id = await self.bury(
            store, tags=("red",), idempotency_key="k", payload=json.dumps({"text": "x" * 3000})
        )
        kept = await self.bury(store)

        assert await store.discard([task_id]) == [DiscardAnswer.DISCARDED]

        with pytest.raises(TaskNotFound):
            await store.get(task_id)
        assert await self.found(store) == [kept]
        assert await self.listed(store, tag="red") == []
        again = self.new_task(idempotency_key="k")
        assert await store.enqueue([again]) == [Enqueued(again.id, created=True)]

    async def test_only_dead_letters_are_discarded(self, store: Store) -> None:
        ended = [await self.end(store, outcome) for outcome in OTHER_ENDS]
        ids = [*ended, await self.add(store), new_id(), await self.bury(store, priority=90)]

        answers = await store.discard(ids)

        assert answers == [DiscardAnswer.ABSENT] * 4 + [DiscardAnswer.DISCARDED]
        assert await store.discard(ids[-1:]) == [DiscardAnswer.ABSENT]
        assert await self.granted(store) == [ids[2]]

    async def test_a_letter_was_replayed_although_its_replay_is_discarded(
        self, store: Store
    ) -> None:
        task_id = await self.bury(store)
        new = await self.replay(store, task_id)
        await self.fail(store)

        await store.discard([new])

        assert (await self.letter(store, task_id)).replayed_as == (str(new),)
        assert await self.found(store, unreplayed=True) == []

    async def test_a_deposed_leader_discards_nothing(self, store: Store) -> None:
        task_id = await self.bury(store)
        await self.elect(store)

        with pytest.raises(NotLeader):
            await store.discard([task_id], leadership=Leadership(WORKER, 1_000_000))

        assert await self.found(store) == [task_id]


class OutdatedRules(DeadSteps):
    """Outdated rules."""

    async def test_what_a_queue_has_too_many_of_is_the_oldest(self, store: Store) -> None:
        ids = [await self.bury(store, queue="bulk") for _ in range(4)]
        other = [await self.bury(store, queue="mail") for _ in range(3)]

        surplus = await store.surplus_dead(["bulk", "mail", "unheard-of"], 2, 10)

        expected = [(ids[0], "bulk"), (ids[1], "bulk"), (other[0], "mail")]
        assert surplus == [QueuedLetter(*one) for one in expected]
        assert await store.surplus_dead(["bulk", "mail"], 2, 1) == surplus[:1]
        assert await store.surplus_dead(["mail"], 2, 10) == surplus[2:]
        assert await store.surplus_dead(["bulk", "mail"], 4, 10) == []
        assert await store.surplus_dead([], 0, 10) == []

    async def test_of_those_that_ended_at_one_moment_no_more_than_the_surplus_are_too_many(
        self, store: Store
    ) -> None:
        ids = await self.add_many(store, 6)
        claim = await self.claim(store)
        await store.settle([self.settlement(claim, task, Outcome.DEAD) for task in claim.tasks])
        moments = {(await store.get(task_id)).completed_at for task_id in ids}
        assert len(moments) == 1

        surplus = await store.surplus_dead(["default"], 2, 10)

        assert surplus == [QueuedLetter(task_id, "default") for task_id in sorted(ids)[:4]]
        assert await store.surplus_dead(["default"], 2, 3) == surplus[:3]
        await store.discard([letter.id for letter in surplus])
        assert await store.surplus_dead(["default"], 2, 10) == []

    async def test_queues_with_too_many_are_named(self, store: Store) -> None:
        for queue in ("bulk", "mail", "mail", "bulk", "bulk"):
            await self.bury(store, queue=queue)

        assert await store.crowded_queues(1) == ["bulk", "mail"]
        assert await store.crowded_queues(2) == ["bulk"]
        assert await store.crowded_queues(3) == []

    async def test_what_is_discarded_meanwhile_is_no_surplus(self, store: Store) -> None:
        ids = [await self.bury(store, queue="bulk") for _ in range(5)]
        await store.discard([ids[1], ids[4]])

        assert await store.surplus_dead(["bulk"], 2, 10) == [QueuedLetter(ids[0], "bulk")]

    async def test_letters_whose_time_is_over_are_named(self, store: Store) -> None:
        old = await self.bury(store, queue="bulk")
        await self.bury(store, retention=90 * DAY)
        await self.end(store, Outcome.COMPLETED)
        await self.advance(store, 32 * DAY)
        await self.bury(store)

        assert await store.expired_dead(10) == [QueuedLetter(old, "bulk")]

    async def test_retention_may_leave_dead_letters_to_others(self, store: Store) -> None:
        old, other = await self.bury(store), await self.end(store, Outcome.CANCELLED)
        await self.advance(store, 32 * DAY)

        retained = await store.retain(leadership=await self.elect(store), keep_dead=True)

        assert (retained.dead, await self.found(store)) == (0, [old])
        with pytest.raises(TaskNotFound):
            await store.get(other)

    async def test_a_letter_was_replayed_although_its_replay_is_forgotten(
        self, store: Store
    ) -> None:
        task_id = await self.bury(store)
        new = await self.replay(store, task_id)
        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, Outcome.COMPLETED)

        await self.advance(store, 10 * DAY)
        await store.retain(leadership=await self.elect(store))

        with pytest.raises(TaskNotFound):
            await store.get(new)
        assert (await self.letter(store, task_id)).replayed_as == (str(new),)
        assert await self.found(store, unreplayed=True) == []
