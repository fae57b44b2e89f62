"""Rules of limits on queues and types, of ageing by queue, and of paused types."""

# ruff: noqa: S101 - tests assert

import asyncio
from uuid import UUID

import pytest

from windlass.model.rule import STRICT, LaneRule, RuleRecord, RuleScope
from windlass.model.task import Answer, Claim, Outcome
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
)

QUEUE = RuleScope.QUEUE
TYPE = RuleScope.TYPE
THREE = LaneRule(QUEUE, "default", concurrency=3)


class LimitRules(Steps):
    """Limits of concurrency."""

    async def used(self, store: Store, scope: RuleScope = QUEUE, name: str = "default") -> int:
        (found,) = [one for one in await store.rules() if one.rule.key == (scope, name)]
        return found.used

    async def end_all(self, store: Store, claim: Claim, outcome: Outcome) -> None:
        settlements = [self.settlement(claim, task, outcome) for task in claim.tasks]
        assert await store.settle(settlements) == [Answer.APPLIED] * len(settlements)

    @pytest.mark.parametrize(
        "rule", [THREE, LaneRule(TYPE, "resize", concurrency=3)], ids=["queue", "type"]
    )
    async def test_no_more_are_granted_than_a_limit_lets_through(
        self, store: Store, rule: LaneRule
    ) -> None:
        await store.set_rule(rule)
        first = await self.add_many(store, 5)

        granted = await self.granted(store)
        more = await self.granted(store, worker_id=OTHER_WORKER)

        assert (granted, more) == (first[:3], [])
        assert await self.used(store, *rule.key) == 3

    async def test_a_limit_holds_back_nobody_else(self, store: Store) -> None:
        await store.set_rule(THREE)
        await self.add_many(store, 5)
        others = await self.add_many(store, 2, queue="mail")

        granted = await self.granted(store)

        assert len(granted) == 5
        assert set(others) <= set(granted)

    async def test_the_smaller_of_two_limits_counts_and_both_are_used(self, store: Store) -> None:
        await store.set_rule(THREE)
        await store.set_rule(LaneRule(TYPE, "resize", concurrency=4))
        await self.add_many(store, 5)
        mail = await self.add_many(store, 5, queue="mail")

        granted = await self.granted(store)

        assert len(granted) == 4
        assert len(set(granted) & set(mail)) == 1
        assert await self.used(store) == 3
        assert await self.used(store, TYPE, "resize") == 4

    async def test_lanes_of_a_limit_share_it_by_their_rank(self, store: Store) -> None:
        await store.set_rule(THREE)
        low = await self.add_many(store, 2, priority=0)
        high = await self.add_many(store, 2, priority=20)

        assert await self.granted(store) == [*high, low[0]]

    @pytest.mark.parametrize("outcome", [*ENDING, *RETURNING])
    async def test_what_a_task_holds_of_a_limit_comes_back_with_its_settlement(
        self, store: Store, outcome: Outcome
    ) -> None:
        await store.set_rule(THREE)
        await self.add_many(store, 3)
        claim = await self.claim(store)
        waiting = await self.add_many(store, 3)

        await self.settle(store, claim, claim.tasks[0], outcome)
        after_one = await self.used(store)
        settlements = [self.settlement(claim, task, outcome) for task in claim.tasks[1:]]
        await store.settle(settlements)

        assert after_one == 2
        assert await self.used(store) == 0
        await self.granted(store)
        assert await self.used(store) == 3
        assert len(waiting) == 3

    async def test_a_repeated_settlement_gives_nothing_back_twice(self, store: Store) -> None:
        await store.set_rule(THREE)
        await self.add_many(store, 6)
        claim = await self.claim(store)
        await self.settle(store, claim, claim.tasks[0], Outcome.COMPLETED)

        again = await self.settle(store, claim, claim.tasks[0], Outcome.COMPLETED)

        assert again is Answer.ALREADY
        assert await self.used(store) == 2

    async def test_what_a_lost_worker_holds_of_a_limit_comes_back_with_its_lease(
        self, store: Store
    ) -> None:
        await store.set_rule(THREE)
        ids = await self.add_many(store, 3)
        claim = await self.claim(store)
        await self.start(store, claim, claim.tasks[0])
        await self.settle(store, claim, claim.tasks[1], Outcome.COMPLETED)

        await self.lose_worker(store)

        assert await self.used(store) == 0
        assert len(await self.granted(store)) == 2
        assert await self.used(store) == 2
        assert len(ids) == 3

    async def test_a_suspect_counts_for_a_limit_too(self, store: Store) -> None:
        await self.suspect(store)
        await store.set_rule(LaneRule(QUEUE, "default", concurrency=1))
        await self.add_many(store, 2)
        await self.claim(store)

        answer = await self.ask(store, alone=True)

        assert answer.claim is None

    async def test_a_limit_that_is_raised_lets_more_through_at_once(self, store: Store) -> None:
        await store.set_rule(THREE)
        await self.add_many(store, 10)
        await self.claim(store)

        await store.set_rule(LaneRule(QUEUE, "default", concurrency=5))

        assert len(await self.granted(store)) == 2

    async def test_a_limit_that_is_lowered_waits_until_enough_have_ended(
        self, store: Store
    ) -> None:
        await store.set_rule(THREE)
        await self.add_many(store, 10)
        claim = await self.claim(store)

        await store.set_rule(LaneRule(QUEUE, "default", concurrency=1))
        await self.settle(store, claim, claim.tasks[0], Outcome.COMPLETED)
        await self.settle(store, claim, claim.tasks[1], Outcome.COMPLETED)
        still_full = await self.granted(store)
        await self.settle(store, claim, claim.tasks[2], Outcome.COMPLETED)

        assert still_full == []
        assert len(await self.granted(store)) == 1

    async def test_what_was_claimed_before_there_was_a_limit_is_not_given_back(
        self, store: Store
    ) -> None:
        await self.add_many(store, 3)
        before = await self.claim(store)
        await store.set_rule(THREE)
        await self.add_many(store, 5)
        await self.claim(store)

        await self.end_all(store, before, Outcome.COMPLETED)

        assert await self.used(store) == 3
        assert await self.granted(store) == []

    async def test_a_limit_that_was_away_knows_what_is_held(self, store: Store) -> None:
        await store.set_rule(THREE)
        await self.add_many(store, 5)
        claim = await self.claim(store)
        await store.reset_rule(QUEUE, "default")
        await self.settle(store, claim, claim.tasks[0], Outcome.COMPLETED)

        await store.set_rule(THREE)

        assert await self.used(store) == 2

    async def test_of_what_has_a_limit_no_more_is_granted_than_can_begin(
        self, store: Store
    ) -> None:
        await store.set_rule(THREE)
        limited = await self.add_many(store, 5)
        others = await self.add_many(store, 5, queue="mail")

        answer = await self.ask(store, at_most=2)

        assert answer.claim is not None
        granted = {task.id for task in answer.claim.tasks}
        assert granted == {*limited[:2], *others}
        assert answer.is_capped

    async def test_a_claim_that_has_all_it_may_is_not_capped(self, store: Store) -> None:
        await store.set_rule(THREE)
        await self.add_many(store, 5)

        answer = await self.ask(store, at_most=10)

        assert not answer.is_capped
        assert answer.more_in is None

    async def test_a_limit_is_kept_over_many_claims(self, store: Store) -> None:
        await store.set_rule(LaneRule(QUEUE, "default", concurrency=1))
        ids = await self.add_many(store, 120)
        seen: list[UUID] = []
        while len(seen) < len(ids):
            claim, task = await self.claim_one(store, limit=10)
            assert await self.granted(store) == []
            await self.settle(store, claim, task, Outcome.COMPLETED)
            seen.append(task.id)

        assert seen == ids
        assert await self.used(store) == 0

    @needs("concurrent_writers")
    async def test_claims_at_the_same_time_keep_a_limit(self, store: Store) -> None:
        await store.set_rule(LaneRule(QUEUE, "default", concurrency=7))
        await self.add_many(store, 40)

        many = await asyncio.gather(*(self.granted(store, limit=3) for _ in range(8)))

        assert sum(map(len, many)) == 7
        assert await self.used(store) == 7

    @needs("wakeups")
    async def test_whoever_was_turned_away_is_woken(self, store: Store) -> None:
        await store.register(self.worker(), lease=LEASE)
        await store.set_rule(THREE)
        await self.add_many(store, 5)
        claim = await self.claim(store)
        woken = asyncio.Event()
        async with store.listen(lambda *_: woken.set()):
            await store.set_idle(self.worker().id, True)
            woken.clear()

            await self.settle(store, claim, claim.tasks[0], Outcome.COMPLETED)

            await asyncio.wait_for(woken.wait(), 10)


class RateRules(Steps):
    """Limits of rate: a bucket of tokens."""

    async def test_a_rate_lets_its_burst_through_and_then_what_time_brings(
        self, store: Store
    ) -> None:
        await store.set_rule(LaneRule(QUEUE, "default", rate=2.0, burst=3.0))
        ids = await self.add_many(store, 10)

        at_once = await self.granted(store)
        nothing = await self.ask(store)
        await self.advance(store, 2 * SECOND)
        later = await self.granted(store)

        assert at_once == ids[:3]
        assert nothing.claim is None
        assert nothing.more_in is not None
        assert 0 < nothing.more_in <= 0.5
        # The store's clock may go on between two calls, but not by half a second.
        assert later == ids[3 : 3 + len(later)]
        assert 3 <= len(later) <= 4

    async def test_a_rate_is_not_given_back(self, store: Store) -> None:
        await store.set_rule(LaneRule(TYPE, "resize", rate=0.001, burst=2.0))
        await self.add_many(store, 5)
        claim = await self.claim(store)
        for task in claim.tasks:
            await self.settle(store, claim, task, Outcome.COMPLETED)

        assert len(claim.tasks) == 2
        assert await self.granted(store) == []

    async def test_what_a_rate_leaves_over_is_kept(self, store: Store) -> None:
        await store.set_rule(LaneRule(QUEUE, "default", rate=0.001, burst=5.0))
        await self.add_many(store, 10)

        first = await self.granted(store, limit=2)
        rest = await self.granted(store)

        assert (len(first), len(rest)) == (2, 3)

    async def test_a_clock_that_is_set_back_fills_the_bucket_once(self, store: Store) -> None:
        await store.set_rule(LaneRule(QUEUE, "default", rate=0.001, burst=2.0))
        await self.add_many(store, 10)
        await self.claim(store)

        await self.advance(store, -3600 * SECOND)
        granted = await self.granted(store)

        assert len(granted) == 2
        assert await self.granted(store) == []

    async def test_a_bucket_fills_since_it_was_last_taken_from_at_the_rate_in_force(
        self, store: Store
    ) -> None:
        await store.set_rule(LaneRule(TYPE, "resize", rate=20.0, burst=2.0))
        await self.add_many(store, 1)
        await self.claim(store)
        await self.advance(store, 10 * SECOND)
        other = await self.add_many(store, 1, type="send", priority=20)
        await self.add_many(store, 10)
        seen_only = await self.granted(store, types=("send", "resize"), limit=1)

        await store.set_rule(LaneRule(TYPE, "resize", rate=0.5, burst=9.0))

        assert seen_only == other
        assert len(await self.granted(store)) == 6

    async def test_rate_and_concurrency_both_hold(self, store: Store) -> None:
        await store.set_rule(LaneRule(QUEUE, "default", concurrency=2, rate=0.001, burst=3.0))
        await self.add_many(store, 10)
        claim = await self.claim(store)
        for task in claim.tasks:
            await self.settle(store, claim, task, Outcome.COMPLETED)

        again = await self.granted(store)

        assert (len(claim.tasks), len(again)) == (2, 1)


class DeclaredRules(Steps):
    """What code declares, and what operators set instead."""

    async def in_force(self, store: Store) -> list[tuple[str, int | None, bool]]:
        return [
            (one.rule.name, one.rule.concurrency, one.by_operator) for one in await store.rules()
        ]

    async def test_rules_are_listed_as_they_are(self, store: Store) -> None:
        mail = LaneRule(QUEUE, "mail", 5, 10.0, 20.0, STRICT, 3)
        send = LaneRule(TYPE, "send", rate=1.0, burst=1.0)

        await store.declare_rules([send, mail], types=["send"])

        assert await store.rules() == [RuleRecord(mail, False), RuleRecord(send, False)]

    async def test_what_an_operator_sets_stands_instead_of_what_code_declares(
        self, store: Store
    ) -> None:
        await store.declare_rules([LaneRule(QUEUE, "mail", concurrency=5)], types=[])
        await store.set_rule(LaneRule(QUEUE, "mail", concurrency=2))
        await store.declare_rules([LaneRule(QUEUE, "mail", concurrency=7)], types=[])

        assert await self.in_force(store) == [("mail", 2, True)]
        assert await store.reset_rule(QUEUE, "mail")
        assert await self.in_force(store) == [("mail", 7, False)]
        assert not await store.reset_rule(QUEUE, "mail")

    async def test_a_type_that_code_no_longer_limits_has_no_limit(self, store: Store) -> None:
        send, other = (LaneRule(TYPE, name, concurrency=1) for name in ("send", "other"))
        await store.declare_rules([send, other], types=["send", "other"])

        await store.declare_rules([], types=["send", "resize"])

        assert await self.in_force(store) == [("other", 1, False)]

    async def test_an_operator_can_lift_a_limit(self, store: Store) -> None:
        await store.declare_rules([LaneRule(QUEUE, "default", concurrency=1)], types=[])
        await store.set_rule(LaneRule(QUEUE, "default"))
        await self.add_many(store, 3)

        assert len(await self.granted(store)) == 3


class AgeingRules(Steps):
    """How tasks of a queue age."""

    async def test_a_queue_may_age_by_steps_of_its_own(self, store: Store) -> None:
        await store.set_rule(LaneRule(QUEUE, "default", ageing=1.0))
        low = await self.add(store, priority=0)
        await self.advance(store, 11 * SECOND)
        high = await self.add(store, priority=10)

        assert await self.granted(store) == [low, high]

    async def test_without_steps_of_its_own_those_of_the_worker_count(self, store: Store) -> None:
        await store.set_rule(LaneRule(QUEUE, "default", concurrency=5))
        low = await self.add(store, priority=0)
        await self.advance(store, 11 * SECOND)
        high = await self.add(store, priority=10)

        assert await self.granted(store) == [high, low]

    async def test_in_a_strict_queue_nothing_comes_before_a_higher_priority(
        self, store: Store
    ) -> None:
        await store.set_rule(LaneRule(QUEUE, "default", ageing=STRICT))
        low = await self.add(store, priority=0)
        await self.advance(store, 1000 * AGEING)
        normal = await self.add(store, priority=10)
        high = await self.add(store, priority=20)

        assert await self.granted(store) == [high, normal, low]

    async def test_of_one_priority_the_oldest_comes_first_in_a_strict_queue_too(
        self, store: Store
    ) -> None:
        await store.set_rule(LaneRule(QUEUE, "default", ageing=STRICT))
        older = await self.add(store, type="resize")
        await self.advance(store, SECOND)
        newer = await self.add(store, type="mail")

        assert await self.granted(store, types=("resize", "mail")) == [older, newer]

    async def test_a_strict_queue_does_not_come_before_others(self, store: Store) -> None:
        await store.set_rule(LaneRule(QUEUE, "strict", ageing=STRICT))
        strict = await self.add(store, priority=1, queue="strict")
        await self.advance(store, SECOND)
        low = await self.add(store, priority=0, queue="strict")
        older = await self.add(store, priority=2)
        await self.advance(store, 7 * SECOND)
        newer = await self.add(store, priority=0)

        assert await self.granted(store) == [older, strict, low, newer]


class PausedTypeRules(Steps):
    """Types of which nothing is granted."""

    async def test_nothing_is_used_of_a_concurrency_that_was_lifted(self, store: Store) -> None:
        await store.set_rule(LaneRule(QUEUE, "default", concurrency=5))
        await self.add(store)
        await self.claim(store)
        (before,) = await store.rules()

        await store.set_rule(LaneRule(QUEUE, "default", rate=1.0, burst=3.0))

        (after,) = await store.rules()
        assert (before.used, after.used) == (1, 0)

    async def test_nothing_is_granted_of_a_paused_type(self, store: Store) -> None:
        await self.add(store)
        mail = await self.add(store, type="mail")
        await store.pause_type("resize")

        granted = await self.granted(store, types=("resize", "mail"))

        assert granted == [mail]
        assert not await store.has_work(("resize",), None)

    async def test_a_resumed_type_is_granted_again(self, store: Store) -> None:
        task_id = await self.add(store)
        await store.pause_type("resize")
        await store.pause_type("resize")

        assert await store.resume_type("resize")
        assert not await store.resume_type("resize")
        assert await self.granted(store) == [task_id]

    async def test_a_paused_type_is_listed_with_when(self, store: Store) -> None:
        await store.pause_type("resize")

        (record,) = await store.types()

        assert record.name == "resize"
        assert record.paused_at is not None
