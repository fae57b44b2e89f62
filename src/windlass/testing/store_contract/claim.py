"""Rules of claiming: order, lanes, suspects, and reporting what runs."""

# ruff: noqa: S101 - tests assert

import asyncio
import json
from datetime import timedelta
from uuid import UUID

import pytest

from windlass.model.rule import LaneRule, RuleScope
from windlass.model.task import (
    Change,
    Claim,
    ClaimAnswer,
    ClaimedTask,
    Outcome,
    Started,
    TaskState,
)
from windlass.store.port import Store
from windlass.testing.store_contract.steps import (
    AGEING,
    ENDING,
    LEASE,
    OTHER_WORKER,
    RETURNING,
    SECOND,
    Steps,
    needs,
    new_id,
)


class ClaimRules(Steps):
    """Claim rules."""

    async def test_an_empty_store_grants_nothing(self, store: Store) -> None:
        answer = await self.ask(store)

        assert answer == ClaimAnswer(claim=None, alone_waiting=False, due_in=None)

    @pytest.mark.parametrize("is_limited", [False, True])
    async def test_queues_that_are_left_out_are_not_granted(
        self, store: Store, is_limited: bool
    ) -> None:
        if is_limited:
            for queue in ("mail", "default"):
                await store.set_rule(LaneRule(RuleScope.QUEUE, queue, concurrency=5))
        task_id = await self.add(store)
        await self.add(store, queue="mail")
        await self.add(store, queue="bulk")

        assert await self.granted(store, other_than=("mail", "bulk")) == [task_id]

    async def test_a_grant_of_one_type_and_queue_says_so(self, store: Store) -> None:
        await self.add(store, priority=7)
        await self.add(store, priority=20)
        alike = await self.claim(store)
        await self.add(store)
        await self.add(store, queue="bulk")
        mixed = await self.claim(store)

        assert alike.kind == (alike.tasks[0].type, alike.tasks[0].queue)
        assert mixed.kind is None

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
            waited=task.waited,
        )
        assert not claim.alone

    async def test_a_grant_says_how_long_its_tasks_have_waited(self, store: Store) -> None:
        await self.add(store)
        await self.add(store, delay=4.0)
        await self.advance(store, 10 * SECOND)
        await store.promote(10)

        waits = sorted(task.waited for task in (await self.claim(store)).tasks)

        assert [round(waited) for waited in waits] == [6, 10]

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


class AloneRules(Steps):
    """Alone rules."""

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


class StartRules(Steps):
    """Start rules."""

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
