"""Rules of leadership, its chores, and retention."""

# ruff: noqa: S101 - tests assert

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from uuid import UUID, uuid4

import pytest

from windlass.model.errors import (
    NotLeader,
    TaskNotFound,
)
from windlass.model.limits import UNNOTICED_STEP
from windlass.model.task import (
    Answer,
    Enqueued,
    Leadership,
    Outcome,
    Rescued,
    TaskState,
)
from windlass.store.port import Store
from windlass.testing.store_contract.steps import (
    DAY,
    ENDING,
    LEASE,
    OTHER_WORKER,
    SECOND,
    TERM,
    WORKER,
    Steps,
    needs,
)


class LeadRules(Steps):
    """Lead rules."""

    async def test_who_leads_again_keeps_the_seat_when_an_old_term_is_resigned(
        self, store: Store
    ) -> None:
        old = await self.elect(store)
        await self.advance(store, TERM + SECOND)
        new = await self.elect(store)
        await store.resign(old)

        assert new.holder == old.holder
        assert await store.lead(OTHER_WORKER, current=None, term=TERM) is None

    async def test_the_clock_of_the_store_can_be_read(self, store: Store) -> None:
        before = await store.now()
        await self.advance(store, DAY)

        assert DAY <= await store.now() - before < 2 * DAY

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

    async def test_the_seat_of_a_leader_lost_when_the_clock_was_set_back_is_free_after_a_lease(
        self, store: Store
    ) -> None:
        await store.register(self.worker(), lease=LEASE)
        old = await self.elect(store)
        await self.advance(store, -100 * LEASE)

        for watched in (timedelta(0), LEASE - SECOND):
            won = await store.lead(OTHER_WORKER, current=None, term=TERM, steady_for=watched)
            assert won is None
        new = await store.lead(OTHER_WORKER, current=None, term=TERM, steady_for=LEASE)

        assert new is not None
        assert new.term > old.term
        assert await store.lead(WORKER, current=old, term=TERM) is None

    async def test_the_seat_of_a_leader_that_left_when_the_clock_was_set_back_is_free(
        self, store: Store
    ) -> None:
        await store.register(self.worker(), lease=LEASE)
        old = await self.elect(store)
        await store.deregister(WORKER)  # and could not resign
        assert await store.lead(OTHER_WORKER, current=None, term=TERM) is None
        await self.advance(store, -100 * LEASE)

        new = await store.lead(OTHER_WORKER, current=None, term=TERM)

        assert new is not None
        assert new.term > old.term

    async def test_a_leader_keeps_its_seat_when_the_clock_was_set_back_by_little(
        self, store: Store
    ) -> None:
        await store.register(self.worker(), lease=LEASE)
        held = await self.elect(store)
        await self.advance(store, -UNNOTICED_STEP / 2)

        won = await store.lead(OTHER_WORKER, current=None, term=TERM, steady_for=100 * LEASE)

        assert won is None
        assert await store.lead(WORKER, current=held, term=TERM) == held

    async def test_a_term_that_is_over_is_not_renewed_by_whoever_holds_the_next_one(
        self, store: Store
    ) -> None:
        old = await self.elect(store)
        await self.advance(store, TERM + SECOND)
        new = await self.elect(store)

        assert await store.lead(WORKER, current=old, term=TERM) is None
        assert await store.lead(WORKER, current=new, term=TERM) == new

    async def test_a_leader_that_lived_on_when_the_clock_was_set_back_keeps_its_seat(
        self, store: Store
    ) -> None:
        await store.register(self.worker(), lease=LEASE)
        old = await self.elect(store)
        await self.advance(store, -100 * LEASE)
        await self.pulse(store)

        won = await store.lead(OTHER_WORKER, current=None, term=TERM, steady_for=100 * LEASE)

        assert won is None
        assert await store.lead(WORKER, current=old, term=TERM, steady_for=100 * LEASE) == old

    async def test_a_leader_that_lives_keeps_its_seat_whoever_else_was_lost_then(
        self, store: Store
    ) -> None:
        for worker_id in (WORKER, OTHER_WORKER):
            await store.register(self.worker(worker_id), lease=LEASE)
        held = await self.elect(store)
        await self.advance(store, -100 * LEASE)
        await self.pulse(store)
        assert await store.lead(WORKER, current=held, term=TERM) == held

        won = await store.lead(UUID(int=9), current=None, term=TERM, steady_for=100 * LEASE)

        assert won is None

    async def test_the_seat_of_a_leader_lost_just_after_the_clock_was_set_back_is_free_after_a_lease(
        self, store: Store
    ) -> None:
        """Its heart has beaten once more, by the new clock, and its term was not renewed."""
        await store.register(self.worker(), lease=LEASE)
        old = await self.elect(store)
        await self.advance(store, -100 * LEASE)
        await self.pulse(store)
        await self.advance(store, LEASE - SECOND)
        assert await store.lead(OTHER_WORKER, current=None, term=TERM) is None
        await self.advance(store, 2 * SECOND)

        new = await store.lead(OTHER_WORKER, current=None, term=TERM)

        assert new is not None
        assert new.term > old.term

    async def test_a_silent_leader_whose_term_is_not_over_keeps_its_seat(
        self, store: Store
    ) -> None:
        await store.register(self.worker(), lease=SECOND)
        await self.elect(store)
        await self.advance(store, 2 * SECOND)

        assert await store.lead(OTHER_WORKER, current=None, term=TERM) is None

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
    lambda store, leadership: store.fail_unknown(
        "lost", error="{}", ready_for=SECOND, limit=10, leadership=leadership
    ),
    lambda store, leadership: store.remove_dead_workers(leadership=leadership),
    lambda store, leadership: store.tidy(leadership=leadership),
    lambda store, leadership: store.prepare_history(leadership=leadership),
    lambda store, leadership: store.retain(leadership=leadership),
)
_each_chore = pytest.mark.parametrize(
    "chore",
    _CHORES,
    ids=[
        *("promote", "rescue", "fail_unknown"),
        *("remove_dead_workers", "tidy", "prepare_history", "retain"),
    ],
)


class ChoreRules(Steps):
    """Chore rules."""

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

    async def test_a_look_denies_nothing_that_there_is_to_do(self, store: Store) -> None:
        await self.add(store, delay=5.0, expires=60.0)
        await self.add(store)
        await store.register(self.worker(), lease=LEASE)
        _, task = await self.claim_one(store)
        await store.cancel(task.id, "enough")
        await self.advance(store, LEASE + SECOND)

        due = await store.due()

        assert due[1:6] == (True, True, True, True, True)
        assert due.now <= await store.now()

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

    async def test_a_worker_lost_when_the_clock_was_set_back_is_found_after_a_lease(
        self, store: Store
    ) -> None:
        """Its last sign of life and its claims lie ahead: nobody waits until the clock is there."""
        await store.register(self.worker(), lease=LEASE)
        task_id = await self.add(store)
        await self.claim(store)
        await self.advance(store, -100 * LEASE)
        leadership = await self.elect(store, OTHER_WORKER)

        for watched in (timedelta(0), LEASE - SECOND):
            await store.remove_dead_workers(leadership=leadership, steady_for=watched)
            assert await store.rescue(10) == Rescued()

        first = await store.remove_dead_workers(leadership=leadership, steady_for=LEASE)
        assert (await store.rescue(10)).returned == 1
        assert await self.status(store, task_id) is TaskState.PENDING
        then = await store.remove_dead_workers(leadership=leadership, steady_for=LEASE)
        assert (first, then) == ([], [WORKER])

    async def test_a_claim_that_the_last_sign_of_life_after_the_clock_was_set_back_left_out_is_ended(
        self, store: Store
    ) -> None:
        await store.register(self.worker(), lease=LEASE)
        await self.add(store)
        await self.claim(store)
        await self.advance(store, -100 * LEASE)
        await self.pulse(store)  # of the worker alone
        await self.advance(store, 3 * LEASE + SECOND)
        leadership = await self.elect(store, OTHER_WORKER)

        assert await store.remove_dead_workers(leadership=leadership) == []
        assert (await store.rescue(10)).returned == 1
        assert await store.remove_dead_workers(leadership=leadership) == [WORKER]

    async def test_a_worker_that_lived_on_when_the_clock_was_set_back_keeps_what_it_holds(
        self, store: Store
    ) -> None:
        await store.register(self.worker(), lease=LEASE)
        await self.add(store)
        claim = await self.claim(store)
        await self.advance(store, -100 * LEASE)
        await self.pulse(store, claim)
        leadership = await self.elect(store, OTHER_WORKER)

        removed = await store.remove_dead_workers(leadership=leadership, steady_for=100 * LEASE)

        assert removed == []
        assert await store.rescue(10) == Rescued()
        await self.advance(store, LEASE + SECOND)
        assert (await store.rescue(10)).claims == 1

    async def test_a_clock_set_back_by_little_is_left_to_come_as_far_again(
        self, store: Store
    ) -> None:
        await store.register(self.worker(), lease=LEASE)
        await self.add(store)
        claim, task = await self.claim_one(store)
        await self.advance(store, -2 * SECOND)
        leadership = await self.elect(store, OTHER_WORKER)

        removed = await store.remove_dead_workers(leadership=leadership, steady_for=100 * LEASE)

        assert removed == []
        assert await store.rescue(10) == Rescued()
        assert await self.settle(store, claim, task, Outcome.COMPLETED) is Answer.APPLIED

    async def test_what_is_granted_since_the_clock_was_set_back_is_not_ended(
        self, store: Store
    ) -> None:
        """A heart that has stopped is no reason to take from a worker what it has just got."""
        await store.register(self.worker(), lease=LEASE)
        await self.advance(store, -100 * LEASE)
        await self.add(store)
        await self.claim(store)
        leadership = await self.elect(store, OTHER_WORKER)

        removed = await store.remove_dead_workers(leadership=leadership, steady_for=LEASE)

        assert removed == [WORKER]
        assert await store.rescue(10) == Rescued()

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


class RetentionRules(Steps):
    """Retention rules."""

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
