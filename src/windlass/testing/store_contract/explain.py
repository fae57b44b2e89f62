"""Rules of explaining: what is found out about a task is what a claim goes by."""

# ruff: noqa: S101 - tests assert

from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID

import pytest

from windlass.model.errors import TaskNotFound
from windlass.model.explanation import (
    Behind,
    Buffered,
    CancellationAsked,
    Cause,
    Ended,
    Expires,
    Explanation,
    LeaseOver,
    LimitReached,
    NobodyHandles,
    QueueBusy,
    QueuePaused,
    RateLimited,
    Running,
    RunsAlone,
    TypePaused,
    WaitsForTime,
    WorkersBusy,
)
from windlass.model.rule import STRICT, LaneRule, RuleScope
from windlass.model.situation import SNOOZED
from windlass.model.task import Change, Outcome, Pulse, TaskState, WorkerInfo, WorkerOrder
from windlass.policy.explaining import explained
from windlass.store.port import Store
from windlass.testing.store_contract.fail import PUT_OFF
from windlass.testing.store_contract.steps import (
    AGEING,
    LEASE,
    OTHER_WORKER,
    SECOND,
    WORKER,
    Steps,
    new_id,
)

R = TypeVar("R")


class ExplainSteps(Steps):
    """The words of these rules."""

    async def explain(self, store: Store, task_id: UUID) -> Explanation:
        return explained(await store.situation(task_id, ageing=AGEING))

    async def reason(self, store: Store, task_id: UUID, kind: type[R]) -> R:
        """Return the one reason of a kind."""
        found = (await self.explain(store, task_id)).reasons
        (reason,) = [one for one in found if isinstance(one, kind)]
        return reason

    async def register_worker(self, store: Store, worker_id: UUID = WORKER, **said: Any) -> None:
        told: dict[str, Any] = {"capacity": 10, "types": ("resize",), "queues": None} | said
        info = WorkerInfo(id=worker_id, host="a.example", pid=7, version="0.1.0", **told)
        await store.register(info, lease=LEASE)


class ExplainRules(ExplainSteps):
    """Why a task is not running."""

    async def test_an_unknown_task_is_not_found(self, store: Store) -> None:
        with pytest.raises(TaskNotFound):
            await store.situation(new_id(), ageing=AGEING)

    async def test_a_ready_task_that_a_worker_handles_has_nothing_in_its_way(
        self, store: Store
    ) -> None:
        await self.register_worker(store)
        task_id = await self.add(store)

        told = await self.explain(store, task_id)

        assert (told.status, told.claimable, told.has_worker) == (TaskState.PENDING, True, True)
        assert told.reasons == ()

    async def test_a_task_of_no_live_worker_is_claimable_but_handled_by_nobody(
        self, store: Store
    ) -> None:
        await self.register_worker(store, types=("resize",), queues=("mail",))
        await self.register_worker(store, OTHER_WORKER, types=("mail",), queues=("default",))
        task_id = await self.add(store)

        told = await self.explain(store, task_id)
        reason = await self.reason(store, task_id, NobodyHandles)

        assert (told.claimable, told.has_worker) == (True, False)
        assert (reason.type, reason.queue, reason.live) == ("resize", "default", 2)
        assert reason.handle_type == (f"{WORKER} on a.example",)
        assert reason.serve_queue == (f"{OTHER_WORKER} on a.example",)

    async def test_a_worker_that_is_silent_for_a_lease_does_not_count(self, store: Store) -> None:
        await self.register_worker(store)
        task_id = await self.add(store)
        await self.advance(store, LEASE + SECOND)

        assert (await self.reason(store, task_id, NobodyHandles)).live == 0

    @pytest.mark.parametrize("act", ["claimed", "running", "ended"])
    async def test_a_worker_that_handles_a_task_is_told_wherever_the_task_is(
        self, store: Store, act: str
    ) -> None:
        await self.register_worker(store)
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)
        if act == "running":
            await self.start(store, claim, task)
        if act == "ended":
            await self.settle(store, claim, task, Outcome.COMPLETED)

        before = (await self.explain(store, task_id)).has_worker
        await store.deregister(WORKER)

        assert (before, (await self.explain(store, task_id)).has_worker) == (True, False)

    @pytest.mark.parametrize("order", [WorkerOrder.DRAIN, WorkerOrder.PAUSE])
    async def test_a_worker_that_is_to_claim_nothing_handles_nothing(
        self, store: Store, order: WorkerOrder
    ) -> None:
        await self.register_worker(store)
        task_id = await self.add(store)
        await store.order_workers([WORKER], order)

        told = await self.explain(store, task_id)
        (named,) = (await self.reason(store, task_id, NobodyHandles)).handle_type

        assert not told.has_worker
        assert named.endswith(" (draining)" if order is WorkerOrder.DRAIN else " (paused)")

    async def test_workers_without_a_free_slot_are_busy(self, store: Store) -> None:
        await self.register_worker(store)
        task_id = await self.add(store)
        await self.pulse(store, running=10)

        assert await self.reason(store, task_id, WorkersBusy) == WorkersBusy(1, 10, 10)

    async def test_a_worker_that_takes_no_more_of_its_queue_is_told(self, store: Store) -> None:
        await self.register_worker(store)
        task_id = await self.add(store)
        pulse = Pulse(WORKER, [], LEASE, running=1, idle=False)
        await store.pulse(pulse._replace(full_queues=("default",)))

        assert await self.reason(store, task_id, QueueBusy) == QueueBusy("default", 1)
        assert (await self.explain(store, task_id)).claimable

    async def test_a_task_waits_for_its_time(self, store: Store) -> None:
        task_id = await self.add(store, delay=60.0)
        record = await store.get(task_id)

        told = await self.explain(store, task_id)
        reason = await self.reason(store, task_id, WaitsForTime)

        assert not told.claimable
        assert reason == WaitsForTime(record.scheduled_for, Cause.ASKED)

    async def test_a_task_that_is_due_and_not_promoted_says_so(self, store: Store) -> None:
        task_id = await self.add(store, delay=60.0)
        await self.advance(store, timedelta(seconds=61))

        told = await self.explain(store, task_id)

        assert not told.claimable
        assert (await self.reason(store, task_id, WaitsForTime)).is_due

    async def test_a_retry_names_the_error_that_it_comes_after(self, store: Store) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, Outcome.RETRIED, delay=60.0)

        reason = await self.reason(store, task_id, WaitsForTime)

        assert (reason.cause, reason.error) == (Cause.RETRY, "no such image")

    async def test_what_was_put_off_is_no_retry_of_the_failure_before(self, store: Store) -> None:
        task_id = await self.add(store)
        for outcome, delay in ((Outcome.RETRIED, 0.0), (Outcome.SNOOZED, 60.0)):
            claim, task = await self.claim_one(store)
            await self.settle(store, claim, task, outcome, delay=delay)

        reason = await self.reason(store, task_id, WaitsForTime)

        assert (reason.cause, reason.error) == (Cause.PUT_OFF, None)
        assert reason.put_off == SNOOZED

    async def add_put_off(self, store: Store) -> UUID:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, Outcome.SNOOZED, delay=60.0, error=PUT_OFF)
        return task_id

    async def test_what_did_not_let_an_attempt_begin_is_told(self, store: Store) -> None:
        task_id = await self.add_put_off(store)

        reason = await self.reason(store, task_id, WaitsForTime)

        assert (reason.cause, reason.put_off) == (Cause.PUT_OFF, "its retry budget was used up")

    async def test_a_time_that_somebody_has_asked_for_since_is_no_put_off(
        self, store: Store
    ) -> None:
        task_id = await self.add_put_off(store)
        await store.change(task_id, Change(delay=90.0))

        reason = await self.reason(store, task_id, WaitsForTime)

        assert (reason.cause, reason.put_off) == (Cause.ASKED, None)

    async def test_pauses_are_told_with_their_beginning(self, store: Store) -> None:
        task_id = await self.add(store)
        await store.pause("default")
        await store.pause_type("resize")
        await self.advance(store, timedelta(minutes=1))

        told = await self.explain(store, task_id)
        queue = await self.reason(store, task_id, QueuePaused)
        kind = await self.reason(store, task_id, TypePaused)

        assert not told.claimable
        assert told.at - queue.since >= timedelta(minutes=1)
        assert told.at - kind.since >= timedelta(minutes=1)

    @pytest.mark.parametrize(
        ("scope", "name"), [(RuleScope.QUEUE, "default"), (RuleScope.TYPE, "resize")]
    )
    async def test_a_limit_that_is_reached_names_who_holds_it(
        self, store: Store, scope: RuleScope, name: str
    ) -> None:
        await store.set_rule(LaneRule(scope, name, concurrency=2))
        held = await self.add_many(store, 2)
        await self.claim(store)
        task_id = await self.add(store)

        told = await self.explain(store, task_id)
        reason = await self.reason(store, task_id, LimitReached)

        assert not told.claimable
        assert (reason.scope, reason.name, reason.concurrency, reason.used) == (scope, name, 2, 2)
        assert [holder.task_id for holder in reason.holders] == sorted(held)
        assert {holder.worker_id for holder in reason.holders} == {WORKER}

    async def test_what_was_given_back_holds_nothing(self, store: Store) -> None:
        await store.set_rule(LaneRule(RuleScope.QUEUE, "default", concurrency=2))
        await self.add_many(store, 2)
        claim = await self.claim(store)
        await self.settle(store, claim, claim.tasks[0], Outcome.COMPLETED)
        first, second = await self.add_many(store, 2)

        assert (await self.explain(store, first)).claimable
        reason = await self.reason(store, second, LimitReached)
        assert (reason.used, reason.first) == (1, 1)
        assert [holder.task_id for holder in reason.holders] == [claim.tasks[1].id]

    async def test_what_came_back_is_held_by_the_claim_that_has_it_now(self, store: Store) -> None:
        await store.set_rule(LaneRule(RuleScope.QUEUE, "default", concurrency=2))
        await self.add_many(store, 2)
        claim = await self.claim(store)
        back, kept = claim.tasks
        await self.settle(store, claim, back, Outcome.RELEASED)
        await self.claim(store, worker_id=OTHER_WORKER)
        task_id = await self.add(store)

        holders = (await self.reason(store, task_id, LimitReached)).holders

        assert [(one.task_id, one.worker_id) for one in holders] == [
            (kept.id, WORKER),
            (back.id, OTHER_WORKER),
        ]

    async def test_a_claim_holds_of_a_limit_only_what_counts_for_it(self, store: Store) -> None:
        await store.set_rule(LaneRule(RuleScope.TYPE, "resize", concurrency=2))
        await self.add_many(store, 2, type="mail", priority=20)
        held = await self.add_many(store, 2)
        await self.claim(store, types=("resize", "mail"))
        task_id = await self.add(store)

        holders = (await self.reason(store, task_id, LimitReached)).holders

        assert [holder.task_id for holder in holders] == held

    async def test_what_is_left_of_a_limit_goes_to_those_that_come_first(
        self, store: Store
    ) -> None:
        await store.set_rule(LaneRule(RuleScope.QUEUE, "default", concurrency=3))
        low = await self.add_many(store, 2, priority=0)
        await self.add_many(store, 2, priority=20, type="mail")

        claimable = [(await self.explain(store, each)).claimable for each in low]

        assert claimable == [True, False]
        assert (await self.reason(store, low[1], LimitReached)).first == 3

    async def test_a_limit_of_others_leaves_more_of_the_own_one(self, store: Store) -> None:
        await store.set_rule(LaneRule(RuleScope.QUEUE, "default", concurrency=2))
        await store.set_rule(LaneRule(RuleScope.TYPE, "mail", concurrency=1))
        await self.add_many(store, 3, priority=20, type="mail")
        low = await self.add_many(store, 2, priority=0)

        assert [(await self.explain(store, each)).claimable for each in low] == [True, False]

    async def test_a_rate_says_when_there_is_a_token(self, store: Store) -> None:
        await store.set_rule(LaneRule(RuleScope.TYPE, "resize", rate=0.1, burst=1))
        await self.add(store)
        await self.claim(store)
        first, second = await self.add_many(store, 2)

        told = await self.explain(store, first)
        waits = [(await self.reason(store, each, RateLimited)).until for each in (first, second)]

        assert not told.claimable
        assert SECOND * 8 < waits[0] - told.at <= SECOND * 10
        assert abs((waits[1] - waits[0]).total_seconds() - 10) < 1
        await self.advance(store, SECOND * 11)
        assert (await self.explain(store, first)).claimable
        assert not (await self.explain(store, second)).claimable

    async def test_a_suspect_runs_alone_and_one_after_another(self, store: Store) -> None:
        first = await self.suspect(store)
        second = await self.suspect(store)

        claimable = [(await self.explain(store, each)).claimable for each in (first, second)]

        assert claimable == [True, False]
        assert await self.reason(store, second, RunsAlone) == RunsAlone(2, 1, is_next=False)
        assert await self.granted(store, alone=True) == [first]

    async def test_a_task_is_behind_those_of_its_lane_and_of_more_urgent_ones(
        self, store: Store
    ) -> None:
        await self.register_worker(store, types=("resize", "mail"), queues=("default",))
        await self.add_many(store, 3, priority=20, type="mail")
        await self.add_many(store, 2)
        task_id = await self.add(store)
        await self.add_many(store, 4)
        await self.add_many(store, 4, priority=0)
        await self.add_many(store, 4, priority=30, queue="elsewhere")
        await self.add_many(store, 4, priority=30, type="unknown")

        told = await self.explain(store, task_id)

        assert told.claimable
        assert await self.reason(store, task_id, Behind) == Behind(5)

    async def test_one_that_has_waited_for_long_is_ahead_of_a_higher_priority(
        self, store: Store
    ) -> None:
        await self.register_worker(store)
        await self.add_many(store, 2, priority=0)
        await self.advance(store, AGEING * 10 + SECOND)
        task_id = await self.add(store, priority=10)

        assert (await self.reason(store, task_id, Behind)).tasks == 2
        await store.set_rule(LaneRule(RuleScope.QUEUE, "default", ageing=STRICT))
        assert Behind not in map(type, (await self.explain(store, task_id)).reasons)

    async def test_in_a_strict_queue_a_higher_priority_is_ahead_whenever_it_comes(
        self, store: Store
    ) -> None:
        await self.register_worker(store)
        await store.set_rule(LaneRule(RuleScope.QUEUE, "default", ageing=STRICT))
        task_id = await self.add(store, priority=10)
        await self.advance(store, AGEING * 10 + SECOND)
        await self.add_many(store, 3, priority=11)
        await self.add_many(store, 2, priority=9)

        assert (await self.reason(store, task_id, Behind)).tasks == 3

    async def test_what_is_paused_or_full_is_not_ahead_of_others(self, store: Store) -> None:
        await self.register_worker(store, types=("resize", "mail", "send"))
        await store.set_rule(LaneRule(RuleScope.TYPE, "mail", concurrency=1))
        await self.add_many(store, 4, priority=20, type="mail")
        await self.claim(store, types=("mail",))
        await self.add_many(store, 2, priority=20, queue="paused")
        await self.add_many(store, 2, priority=20, type="send")
        await store.pause("paused")
        await store.pause_type("send")
        await self.add(store)
        task_id = await self.add(store)

        assert (await self.reason(store, task_id, Behind)).tasks == 1

    async def test_the_wait_is_estimated_by_what_completed_lately(self, store: Store) -> None:
        await self.register_worker(store)
        await self.add_many(store, 10)
        claim = await self.claim(store)
        for task in claim.tasks:
            await self.settle(store, claim, task, Outcome.COMPLETED)
        *_, task_id = await self.add_many(store, 11)
        await self.advance(store, SECOND * 10)

        wait = (await self.reason(store, task_id, Behind)).wait

        assert wait is not None
        assert SECOND * 9 <= wait <= SECOND * 12

    @pytest.mark.parametrize(
        ("type", "seconds", "is_known"),
        [("resize", 50, True), ("resize", 70, False), ("mail", 0, False)],
    )
    async def test_only_what_completed_lately_of_the_same_types_says_how_long(
        self,
        store: Store,
        type: str,  # noqa: A002 - as everywhere
        seconds: int,
        is_known: bool,
    ) -> None:
        await self.register_worker(store)
        await self.add(store, type=type)
        claim, task = await self.claim_one(store, types=(type,))
        await self.settle(store, claim, task, Outcome.COMPLETED)
        await self.advance(store, seconds * SECOND)
        *_, task_id = await self.add_many(store, 2)

        assert ((await self.reason(store, task_id, Behind)).wait is not None) is is_known

    async def test_a_claimed_task_is_in_the_buffer_of_its_worker(self, store: Store) -> None:
        task_id = await self.add(store)
        await self.claim(store)
        record = await store.get(task_id)

        told = await self.explain(store, task_id)
        reason = await self.reason(store, task_id, Buffered)

        assert not told.claimable
        assert (reason.worker_id, reason.since) == (str(WORKER), record.claimed_at)
        assert reason.lease_until - reason.since == LEASE

    async def test_a_running_task_says_where_and_what_was_asked_of_it(self, store: Store) -> None:
        task_id = await self.add(store)
        claim, task = await self.claim_one(store)
        await self.start(store, claim, task)
        await store.cancel(task_id, "too late")

        running = await self.reason(store, task_id, Running)
        asked = await self.reason(store, task_id, CancellationAsked)

        assert running.worker_id == str(WORKER)
        assert running.since == (await store.get(task_id)).started_at
        assert asked == CancellationAsked("too late")

    async def test_a_task_whose_lease_is_over_waits_to_be_rescued(self, store: Store) -> None:
        task_id = await self.add(store)
        await self.claim(store)
        await self.advance(store, LEASE + SECOND)

        reason = await self.reason(store, task_id, LeaseOver)

        assert reason.worker_id == str(WORKER)
        await store.rescue(100)
        assert (await self.explain(store, task_id)).claimable

    async def test_a_task_that_expires_says_when(self, store: Store) -> None:
        task_id = await self.add(store, expires=60.0)

        soon = await self.reason(store, task_id, Expires)
        await self.advance(store, timedelta(seconds=61))
        late = await self.reason(store, task_id, Expires)

        assert (soon.is_over, late.is_over) == (False, True)
        # It is granted, for the worker to cancel it.
        assert (await self.explain(store, task_id)).claimable

    @pytest.mark.parametrize(
        ("outcome", "because"),
        [
            (Outcome.COMPLETED, None),
            (Outcome.FAILED, "no such image"),
            (Outcome.DEAD, "no such image"),
        ],
    )
    async def test_an_ended_task_says_how_and_why(
        self, store: Store, outcome: Outcome, because: str | None
    ) -> None:
        task_id = await self.end(store, outcome)
        record = await store.get(task_id)

        told = await self.explain(store, task_id)

        assert record.completed_at is not None
        assert told.reasons == (Ended(TaskState(outcome), record.completed_at, because),)
        assert not told.claimable
