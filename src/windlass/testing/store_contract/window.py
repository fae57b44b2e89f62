"""The rules of a store about windows: calls that ask for a task again within some time."""

# ruff: noqa: S101 - tests assert

import asyncio
import json
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from windlass.model.errors import IdempotencyConflict, LeaseLost
from windlass.model.rule import ValueRule
from windlass.model.task import (
    Answer,
    Change,
    Enqueued,
    Fence,
    Outcome,
    TaskState,
    Window,
    WindowKind,
)
from windlass.store.port import Store
from windlass.testing.store_contract.steps import DAY, ENDING, SECOND, Steps, needs

MINUTE = timedelta(minutes=1)
UNIQUE = Window(WindowKind.UNIQUE, 60.0)
THROTTLE = Window(WindowKind.THROTTLE, 60.0)
DEBOUNCE = Window(WindowKind.DEBOUNCE, 60.0)
FIRST_WINS = pytest.mark.parametrize("window", [UNIQUE, THROTTLE], ids=lambda one: one.kind)
EVERY_KIND = pytest.mark.parametrize(
    "window", [UNIQUE, THROTTLE, DEBOUNCE], ids=lambda one: one.kind
)
LARGE = json.dumps({"text": "x" * 5000})
OTHER_LARGE = json.dumps({"text": "y" * 6000})


class WindowSteps(Steps):
    """The words of these rules."""

    async def ask_for(self, store: Store, window: Window, **options: Any) -> Enqueued:
        """Enqueue one task with a window."""
        (answer,) = await store.enqueue([self.new_task(window=window, **options)])
        return answer

    async def tidy(self, store: Store) -> int:
        leadership = await self.elect(store)
        dropped = await store.tidy(leadership=leadership)
        await store.resign(leadership)
        return dropped

    async def payload(self, store: Store, task_id: UUID) -> Any:
        return (await store.get(task_id)).payload


class WindowRules(WindowSteps):
    """Within a window the first one wins, and the others get its handle."""

    @FIRST_WINS
    async def test_within_a_window_the_first_task_is_the_answer(
        self, store: Store, window: Window
    ) -> None:
        first = await self.ask_for(store, window)
        await self.advance(store, MINUTE - SECOND)

        again = await self.ask_for(store, window)

        assert first.created
        assert again == Enqueued(first.id, created=False)
        assert await self.granted(store) == [first.id]

    @FIRST_WINS
    async def test_after_its_window_a_task_is_not_found(self, store: Store, window: Window) -> None:
        first = await self.ask_for(store, window)
        await self.advance(store, MINUTE - SECOND)
        await self.ask_for(store, window)  # does not move it
        await self.advance(store, SECOND)

        second = await self.ask_for(store, window)
        third = await self.ask_for(store, window)

        assert second.created
        assert third == Enqueued(second.id, created=False)
        assert set(await self.granted(store)) == {first.id, second.id}

    @FIRST_WINS
    async def test_a_window_is_as_long_as_the_call_that_opened_it_said(
        self, store: Store, window: Window
    ) -> None:
        first = await self.ask_for(store, window)
        await self.advance(store, MINUTE - SECOND)

        assert (await self.ask_for(store, window._replace(seconds=1.0))).id == first.id
        await self.advance(store, SECOND)
        assert (await self.ask_for(store, window._replace(seconds=3600.0))).created

    @FIRST_WINS
    @pytest.mark.parametrize("outcome", ENDING)
    async def test_a_task_that_has_ended_is_found_all_the_same(
        self, store: Store, window: Window, outcome: Outcome
    ) -> None:
        ended = await self.end(store, outcome, window=window)

        assert await self.ask_for(store, window) == Enqueued(ended, created=False)

    @FIRST_WINS
    async def test_also_when_its_record_is_gone(self, store: Store, window: Window) -> None:
        window = window._replace(seconds=40 * DAY.total_seconds())
        ended = await self.end(store, Outcome.COMPLETED, window=window)
        await self.advance(store, 30 * DAY)
        leadership = await self.elect(store)
        await store.retain(leadership=leadership)

        assert await self.ask_for(store, window) == Enqueued(ended, created=False)

    @pytest.mark.parametrize(
        ("payload", "other", "are_equal"),
        [
            ('{"a": 1, "b": [2]}', '{"b": [2.0], "a": 1.00}', True),
            ('{"a": 1e2}', '{"a": 100}', True),
            ('{"a": 0.10}', '{"a": 0.1}', True),
            ('{"a": -0.0}', '{"a": 0}', True),
            ('{"a": "x.0"}', '{"a": "x."}', False),
            ('{"a": ".0,"}', '{"a": ".,"}', False),
            ('{"a": 1}', '{"a": true}', False),
            ('{"a": 1}', '{"a": "1"}', False),
            ('{"a": [1]}', '{"a": 1}', False),
            ('{"a": [1, 2]}', '{"a": [2, 1]}', False),
            ('{"a": null}', "{}", False),
            ('{"a": {}}', '{"a": []}', False),
            (LARGE, LARGE, True),
            (LARGE, OTHER_LARGE, False),
        ],
    )
    async def test_a_task_is_unique_by_its_payload_as_jsonb(
        self, store: Store, payload: str, other: str, are_equal: bool
    ) -> None:
        first = await self.ask_for(store, UNIQUE, payload=payload)
        second = await self.ask_for(store, UNIQUE, payload=other)

        assert (second.id == first.id, second.created) == (are_equal, not are_equal)

    async def test_a_task_is_unique_by_a_key_instead(self, store: Store) -> None:
        by_key = UNIQUE._replace(key="a")
        first = await self.ask_for(store, by_key, payload='{"n": 1}')

        assert (await self.ask_for(store, by_key, payload='{"n": 2}')).id == first.id
        assert (await self.ask_for(store, UNIQUE._replace(key="b"), payload='{"n": 1}')).created
        assert (await self.ask_for(store, UNIQUE, payload='{"n": 1}')).created
        assert await self.payload(store, first.id) == {"n": 1}

    async def test_a_throttle_is_whatever_the_payload(self, store: Store) -> None:
        first = await self.ask_for(store, THROTTLE, payload='{"n": 1}')

        assert (await self.ask_for(store, THROTTLE, payload='{"n": 2}')).id == first.id
        assert (await self.ask_for(store, THROTTLE._replace(key="a"))).created
        assert await self.payload(store, first.id) == {"n": 1}

    @EVERY_KIND
    async def test_a_window_is_of_one_type_and_one_kind(self, store: Store, window: Window) -> None:
        window = window._replace(key="a")
        await self.ask_for(store, window)

        assert (await self.ask_for(store, window, type="mail")).created
        for kind in set(WindowKind) - {window.kind}:
            assert (await self.ask_for(store, window._replace(kind=kind))).created
        assert not (await self.ask_for(store, window)).created

    @EVERY_KIND
    async def test_a_task_without_a_window_opens_none(self, store: Store, window: Window) -> None:
        await self.add(store, delay=60.0)

        assert (await self.ask_for(store, window)).created
        (plain,) = await store.enqueue([self.new_task()])
        assert plain.created

    @FIRST_WINS
    async def test_within_one_call_the_first_wins_too(self, store: Store, window: Window) -> None:
        tasks = [self.new_task(window=window, tags=(str(number),)) for number in range(3)]
        between = [self.new_task(), self.new_task(idempotency_key="k")]

        answers = await store.enqueue([tasks[0], between[0], *tasks[1:], between[1]])

        assert [answer.created for answer in answers] == [True, True, False, False, True]
        assert {answers[place].id for place in (0, 2, 3)} == {tasks[0].id}
        assert await self.granted(store) == [tasks[0].id, *(task.id for task in between)]

    @EVERY_KIND
    async def test_a_repeated_call_finds_its_own_task(self, store: Store, window: Window) -> None:
        tasks = [self.new_task(window=window), self.new_task(window=window)]
        first = await store.enqueue(tasks)
        await self.advance(store, 2 * MINUTE)  # whatever became of the window
        await store.promote(10)

        again = await store.enqueue(tasks, repeated=True)

        assert again == first == [Enqueued(tasks[0].id, True), Enqueued(tasks[0].id, False)]
        assert await self.granted(store) == [tasks[0].id]

    @EVERY_KIND
    async def test_a_repeated_call_that_never_came_through_is_carried_out(
        self, store: Store, window: Window
    ) -> None:
        task = self.new_task(window=window)

        assert await store.enqueue([task], repeated=True) == [Enqueued(task.id, created=True)]
        assert (await self.ask_for(store, window)).id == task.id

    @FIRST_WINS
    async def test_a_repeated_call_that_found_a_task_finds_it_again(
        self, store: Store, window: Window
    ) -> None:
        first = await self.ask_for(store, window)
        task = self.new_task(window=window)

        for repeated in (False, True):
            (answer,) = await store.enqueue([task], repeated=repeated)
            assert answer == Enqueued(first.id, created=False)

    @EVERY_KIND
    async def test_a_call_that_is_refused_opens_no_window(
        self, store: Store, window: Window
    ) -> None:
        await self.add(store, idempotency_key="k", payload='{"n": 1}')
        before = await self.ask_for(store, window._replace(key="before"), payload='{"n": 1}')
        call = [
            self.new_task(window=window._replace(key="before"), payload='{"n": 2}'),
            self.new_task(window=window),
            self.new_task(),
            self.new_task(idempotency_key="k", payload='{"n": 2}'),
        ]

        with pytest.raises(IdempotencyConflict) as raised:
            await store.enqueue(call)

        assert raised.value.index == 3
        assert await self.payload(store, before.id) == {"n": 1}
        assert (await self.ask_for(store, window)).created

    @EVERY_KIND
    async def test_whoever_has_lost_its_lease_is_refused_also_if_nothing_were_added(
        self, store: Store, window: Window
    ) -> None:
        await self.add(store)
        claim, task = await self.claim_one(store)
        fence = Fence(claim.token, task.id, task.generation)
        first = await self.ask_for(store, window, payload='{"n": 1}')
        child = self.new_task(window=window, payload='{"n": 1}')
        assert await store.enqueue([child], fence=fence) == [Enqueued(first.id, created=False)]
        await self.lose_worker(store)

        other = self.new_task(window=window, payload='{"n": 2}')
        for asked in ([child], [other]):
            with pytest.raises(LeaseLost):
                await store.enqueue(asked, fence=fence)

        assert await self.payload(store, first.id) == {"n": 1}

    @needs("concurrent_writers")
    @EVERY_KIND
    async def test_of_many_calls_at_once_one_makes_a_task(
        self, store: Store, window: Window
    ) -> None:
        answers = await asyncio.gather(*(self.ask_for(store, window) for _ in range(20)))

        assert len({answer.id for answer in answers}) == 1
        assert sum(answer.created for answer in answers) == 1

    async def test_a_unique_task_may_have_a_time_a_key_and_a_term(self, store: Store) -> None:
        asked: dict[str, Any] = {"delay": 30.0, "ordering_key": "k", "expires": 45.0}
        first = await self.ask_for(store, UNIQUE, **asked)

        assert (await self.ask_for(store, UNIQUE, **asked)).id == first.id
        await self.advance(store, timedelta(seconds=31))
        await store.open_gates(100)
        await store.promote(100)
        assert await self.granted(store) == [first.id]

    async def test_windows_that_are_over_are_forgotten(self, store: Store) -> None:
        for window in (UNIQUE, THROTTLE, THROTTLE._replace(seconds=120.0, key="a")):
            await self.ask_for(store, window)

        assert await self.tidy(store) == 0
        await self.advance(store, MINUTE)
        assert await self.tidy(store) == 2
        assert not (await self.ask_for(store, THROTTLE._replace(key="a"))).created
        await self.advance(store, MINUTE)
        assert await self.tidy(store) == 1


class DebounceRules(WindowSteps):
    """Of calls that follow each other the last one wins, after a quiet time."""

    async def test_a_debounced_task_waits_for_a_quiet_time(self, store: Store) -> None:
        first = await self.ask_for(store, DEBOUNCE)

        assert await self.status(store, first.id) is TaskState.SCHEDULED
        await self.advance(store, MINUTE)
        assert await store.promote(10) == 1
        assert await self.granted(store) == [first.id]

    async def test_while_it_waits_each_call_replaces_its_payload_and_moves_its_time(
        self, store: Store
    ) -> None:
        first = await self.ask_for(store, DEBOUNCE, payload='{"n": 1}', tags=("a",), priority=20)
        for number in (2, 3):
            await self.advance(store, MINUTE - SECOND)
            again = await self.ask_for(store, DEBOUNCE, payload=f'{{"n": {number}}}', priority=0)
            assert again == Enqueued(first.id, created=False)
        record = await store.get(first.id)
        assert (record.payload, record.tags, record.priority) == ({"n": 3}, ("a",), 20)

        await self.advance(store, MINUTE - SECOND)
        assert await store.promote(10) == 0
        await self.advance(store, SECOND)
        assert await store.promote(10) == 1
        _, task = await self.claim_one(store)
        assert (task.id, json.loads(task.payload)) == (first.id, {"n": 3})

    async def test_the_last_call_says_how_long_it_is_to_be_quiet(self, store: Store) -> None:
        first = await self.ask_for(store, DEBOUNCE)
        await self.ask_for(store, DEBOUNCE._replace(seconds=5.0))

        await self.advance(store, timedelta(seconds=5))
        await store.promote(10)
        assert await self.granted(store) == [first.id]

    async def test_a_key_has_a_task_of_its_own(self, store: Store) -> None:
        plain = await self.ask_for(store, DEBOUNCE)
        keyed = await self.ask_for(store, DEBOUNCE._replace(key="a"))

        assert keyed.created
        assert (await self.ask_for(store, DEBOUNCE)).id == plain.id
        assert (await self.ask_for(store, DEBOUNCE._replace(key="a"))).id == keyed.id

    @pytest.mark.parametrize(
        "what", ["promoted", "claimed", "completed", "retried", "snoozed", "cancelled", "changed"]
    )
    async def test_once_it_waits_no_longer_the_next_call_makes_another(
        self, store: Store, what: str
    ) -> None:
        first = await self.ask_for(store, DEBOUNCE, payload='{"n": 1}')
        if what == "cancelled":
            await store.cancel(first.id, "no longer needed")
        elif what == "changed":
            await store.change(first.id, Change(delay=0.0))
        else:
            await self.advance(store, MINUTE)
            await store.promote(10)
        if what in ("claimed", "completed", "retried", "snoozed"):
            claim, task = await self.claim_one(store)
            outcomes = {"retried": Outcome.RETRIED, "snoozed": Outcome.SNOOZED}
            outcome = outcomes.get(what, Outcome.COMPLETED)
            if what != "claimed":
                delay = 0.0 if what == "completed" else 3600.0
                settled = await self.settle(store, claim, task, outcome, delay=delay)
                assert settled is Answer.APPLIED

        second = await self.ask_for(store, DEBOUNCE, payload='{"n": 2}')

        assert second.created
        assert await self.payload(store, first.id) == {"n": 1}
        assert await self.ask_for(store, DEBOUNCE) == Enqueued(second.id, created=False)

    async def test_a_change_that_leaves_it_waiting_changes_nothing_of_that(
        self, store: Store
    ) -> None:
        first = await self.ask_for(store, DEBOUNCE)
        await store.change(first.id, Change(delay=3600.0, queue="bulk"))
        await self.advance(store, 2 * MINUTE)
        await self.tidy(store)

        again = await self.ask_for(store, DEBOUNCE, payload='{"n": 2}')

        assert again == Enqueued(first.id, created=False)
        record = await store.get(first.id)
        assert (record.queue, record.payload) == ("bulk", {"n": 2})
        await self.advance(store, MINUTE)
        await store.promote(10)
        assert await self.granted(store, queues=("bulk",)) == [first.id]

    async def test_what_is_due_and_was_not_promoted_waits_still(self, store: Store) -> None:
        first = await self.ask_for(store, DEBOUNCE)
        await self.advance(store, 2 * MINUTE)
        assert await self.tidy(store) == 0

        assert await self.ask_for(store, DEBOUNCE) == Enqueued(first.id, created=False)
        assert await store.promote(10) == 0

    async def test_a_debounce_is_forgotten_when_its_task_waits_no_longer(
        self, store: Store
    ) -> None:
        await self.ask_for(store, DEBOUNCE)
        await self.advance(store, MINUTE)
        await store.promote(10)

        assert await self.tidy(store) == 1
        assert await self.tidy(store) == 0

    async def test_a_task_that_was_cancelled_and_is_reopened_is_left_alone(
        self, store: Store
    ) -> None:
        first = await self.ask_for(store, DEBOUNCE, payload='{"n": 1}')
        await store.cancel(first.id, "no longer needed")
        await store.retry(first.id)
        await store.change(first.id, Change(delay=3600.0))

        assert (await self.ask_for(store, DEBOUNCE, payload='{"n": 2}')).created
        assert await self.payload(store, first.id) == {"n": 1}

    async def test_within_one_call_the_last_payload_counts(self, store: Store) -> None:
        def asked(number: int) -> Any:
            return self.new_task(window=DEBOUNCE, payload=f'{{"n": {number}}}')

        tasks = [asked(1), self.new_task(), asked(2)]

        answers = await store.enqueue(tasks)
        assert [answer.created for answer in answers] == [True, True, False]
        assert answers[2].id == tasks[0].id
        assert await self.payload(store, tasks[0].id) == {"n": 2}

        answers = await store.enqueue([asked(3), asked(4)])
        assert answers == [Enqueued(tasks[0].id, created=False)] * 2
        assert await self.payload(store, tasks[0].id) == {"n": 4}

    async def test_a_repeated_call_does_not_replace_what_came_after_it(self, store: Store) -> None:
        task = self.new_task(window=DEBOUNCE, payload='{"n": 1}')
        await store.enqueue([task])
        await self.ask_for(store, DEBOUNCE, payload='{"n": 2}')

        assert await store.enqueue([task], repeated=True) == [Enqueued(task.id, created=True)]
        assert await self.payload(store, task.id) == {"n": 2}

    @pytest.mark.parametrize("first", ['{"n": 1}', LARGE])
    @pytest.mark.parametrize("last", ['{"n": 2}', OTHER_LARGE])
    async def test_payloads_of_any_size_replace_each_other(
        self, store: Store, first: str, last: str
    ) -> None:
        answer = await self.ask_for(store, DEBOUNCE, payload=first)
        await self.ask_for(store, DEBOUNCE, payload=last)

        assert await self.payload(store, answer.id) == json.loads(last)
        await self.advance(store, MINUTE)
        await store.promote(10)
        claim, task = await self.claim_one(store)
        assert json.loads(task.payload) == json.loads(last)
        assert await self.settle(store, claim, task, Outcome.COMPLETED) is Answer.APPLIED
        assert await self.payload(store, answer.id) == json.loads(last)

    async def test_a_limit_by_value_goes_by_the_last_payload(self, store: Store) -> None:
        await store.set_value_rule(ValueRule("resize", concurrency=1))
        limited: dict[str, Any] = {"limit_by": '[["tenant", null]]'}
        acme, other = '{"tenant": "acme"}', '{"tenant": "other"}'
        await self.add(store, payload=acme, **limited)
        held = await self.granted(store)
        first = await self.ask_for(store, DEBOUNCE, payload=acme, **limited)
        await self.ask_for(store, DEBOUNCE, payload=other, **limited)
        waiting = await self.add(store, payload=acme, **limited)
        await self.advance(store, MINUTE)
        await store.promote(10)

        assert len(held) == 1
        assert await self.granted(store) == [first.id]
        assert await self.status(store, waiting) is TaskState.BLOCKED

    async def test_a_debounced_task_may_expire(self, store: Store) -> None:
        first = await self.ask_for(store, DEBOUNCE, expires=90.0)
        await self.advance(store, MINUTE - SECOND)
        await self.ask_for(store, DEBOUNCE)
        await self.advance(store, timedelta(seconds=40))
        leadership = await self.elect(store)
        await store.expire(10, leadership=leadership)

        assert await self.status(store, first.id) is TaskState.CANCELLED
        assert (await self.ask_for(store, DEBOUNCE)).created
