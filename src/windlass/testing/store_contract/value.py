"""Rules of limits for each value of an argument."""

# ruff: noqa: S101 - tests assert

import asyncio
import hashlib
import json

import pytest

from windlass.model.rule import FAIR_WINDOW, ValueRecord, ValueRule
from windlass.model.task import Outcome
from windlass.store.port import Store
from windlass.testing.store_contract.gate import BLOCKED, BY_TENANT, ONE, PENDING, TYPES, GateSteps
from windlass.testing.store_contract.steps import ENDING, SECOND, needs

BY_TENANT_AND_REGION = '[["tenant", null], ["region", "eu"]]'
TWO = ValueRule("resize", concurrency=2)
LONG = "x" * 300


class ValueLimitRules(GateSteps):
    """Limits of concurrency for each value of an argument."""

    async def test_no_more_of_a_value_are_granted_than_its_limit_lets_through(
        self, store: Store
    ) -> None:
        await store.declare_rules([], types=["resize"], values=[TWO])
        acme, other = await self.add_of(store, "acme", 4), await self.add_of(store, "other", 3)

        granted = await self.granted(store)

        assert granted == [*acme[:2], *other[:2]]
        assert await self.granted(store) == []
        assert await self.seen(store, acme[2], other[2]) == [BLOCKED, BLOCKED]

    @pytest.mark.parametrize("outcome", [*ENDING, Outcome.RETRIED, Outcome.SNOOZED])
    async def test_a_task_that_ends_or_comes_back_later_lets_the_next_one_through(
        self, store: Store, outcome: Outcome
    ) -> None:
        await store.set_value_rule(ONE)
        first, second = await self.add_of(store, "acme", 2)

        delay = 60.0 if outcome in (Outcome.RETRIED, Outcome.SNOOZED) else 0.0
        await self.run(store, first, outcome, delay=delay)

        assert await self.granted(store) == [second]

    async def test_a_task_that_comes_back_later_waits_behind_the_others(self, store: Store) -> None:
        await store.set_value_rule(ONE)
        first, second = await self.add_of(store, "acme", 2)
        await self.run(store, first, Outcome.RETRIED, delay=10.0)
        claim, task = await self.take(store, second)

        await self.pass_time(store, 11)

        assert await self.granted(store) == []
        assert await self.seen(store, first) == [BLOCKED]
        await self.settle(store, claim, task, Outcome.COMPLETED)
        assert await self.granted(store) == [first]

    @pytest.mark.parametrize("outcome", [Outcome.RETRIED, Outcome.RELEASED, None])
    async def test_a_task_that_comes_back_at_once_stays_let_through(
        self, store: Store, outcome: Outcome | None
    ) -> None:
        await store.set_value_rule(ONE)
        first, second = await self.add_of(store, "acme", 2)

        if outcome is None:
            await self.take(store, first)
            await self.lose_worker(store)
        else:
            await self.run(store, first, outcome)

        assert await self.granted(store) == [first]
        assert await self.seen(store, second) == [BLOCKED]

    @pytest.mark.parametrize("cause", ["lost worker", "cancelled"])
    async def test_a_task_that_others_end_lets_the_next_one_through(
        self, store: Store, cause: str
    ) -> None:
        await store.set_value_rule(ONE)
        first, second = await self.add_of(store, "acme", 2, max_attempts=1)

        if cause == "lost worker":
            await self.start(store, *await self.take(store, first))
            await self.lose_worker(store)
        else:
            await self.sweep(store)
            await store.cancel(first, "too late")

        assert await self.seen(store, second) == [PENDING]
        assert await self.granted(store) == [second]

    async def test_several_arguments_count_together_and_with_their_defaults(
        self, store: Store
    ) -> None:
        await store.set_value_rule(ONE)
        payloads = (
            {"tenant": "acme"},
            {"tenant": "acme", "region": "eu"},
            {"tenant": "acme", "region": "us"},
            {"tenant": "other"},
            {"region": "eu"},
            {"tenant": None},
        )
        ids = [
            await self.add(store, payload=json.dumps(one), limit_by=BY_TENANT_AND_REGION)
            for one in payloads
        ]

        assert await self.granted(store) == [ids[0], ids[2], ids[3], ids[4]]

    @pytest.mark.parametrize(
        ("limit_by", "payload", "value"),
        [
            (BY_TENANT, {"tenant": "acme"}, "acme"),
            (BY_TENANT, {"tenant": 7}, "7"),
            (BY_TENANT, {"tenant": 1.0}, "1.0"),
            (BY_TENANT, {"tenant": 1e16}, "10000000000000000"),
            (BY_TENANT, {"tenant": -1.5e-7}, "-0.00000015"),
            (BY_TENANT, {"tenant": -0.0}, "0.0"),
            (BY_TENANT, {"tenant": True}, "true"),
            (BY_TENANT, {}, "null"),
            ('[["tenant", 7]]', {}, "7"),
            (BY_TENANT_AND_REGION, {"tenant": 'a"ü'}, '["a\\"ü", "eu"]'),
            (BY_TENANT_AND_REGION, {"tenant": 7, "region": None}, '["7", null]'),
            (BY_TENANT, {"tenant": LONG}, f"{LONG[:160]}…{hashlib.md5(LONG.encode()).hexdigest()}"),  # noqa: S324 - a short name
        ],
    )
    async def test_a_rule_is_found_by_the_text_of_a_value(
        self, store: Store, limit_by: str, payload: dict[str, object], value: str
    ) -> None:
        await store.declare_rules([], types=["resize"], values=[ONE])
        await store.set_value_rule(ValueRule("resize", value, concurrency=2))
        ids = await self.add_many(store, 3, limit_by=limit_by, payload=json.dumps(payload))

        assert await self.granted(store) == ids[:2]

    async def test_a_value_of_another_type_has_a_limit_of_its_own(self, store: Store) -> None:
        await store.set_value_rule(ONE)
        first, _ = await self.add_of(store, "acme", 2)
        mails = await self.add_of(store, "acme", 2, type="mail")

        assert set(await self.granted(store, types=TYPES)) == {first, *mails}

    async def test_a_limit_that_nobody_has_given_a_size_blocks_nothing(self, store: Store) -> None:
        number = 10 * FAIR_WINDOW + 100
        ids = await self.add_of(store, "acme", number)

        (queue,) = await store.queues()

        assert (queue.counts[PENDING], queue.counts.get(BLOCKED, 0)) == (number, 0)
        assert await self.seen(store, ids[0], ids[-1]) == [PENDING, PENDING]

    async def test_of_each_value_a_window_is_let_through_ahead_of_others(
        self, store: Store
    ) -> None:
        await store.declare_rules([], types=["resize"], values=[ValueRule("resize")])
        acme = await self.add_of(store, "acme", FAIR_WINDOW + 5)
        (other,) = await self.add_of(store, "other")

        claim = await self.claim(store, limit=1000)

        assert [task.id for task in claim.tasks] == [*acme[:FAIR_WINDOW], other]
        assert await self.seen(store, acme[FAIR_WINDOW]) == [BLOCKED]
        ended = [self.settlement(claim, task, Outcome.COMPLETED) for task in claim.tasks[:2]]
        await store.settle(ended)
        assert await self.granted(store) == acme[FAIR_WINDOW : FAIR_WINDOW + 2]

    async def test_the_window_of_a_value_grows_with_its_weight(self, store: Store) -> None:
        await store.declare_rules([], types=["resize"], values=[ValueRule("resize")])
        await store.set_value_rule(ValueRule("resize", "acme", weight=2))
        await self.add_of(store, "acme", 2 * FAIR_WINDOW + 5)

        assert len(await self.granted(store, limit=1000)) == 2 * FAIR_WINDOW

    @needs("concurrent_writers")
    async def test_claims_at_the_same_time_keep_the_limit_of_a_value(self, store: Store) -> None:
        await store.set_value_rule(TWO)
        await self.add_of(store, "acme", 20)
        await self.add_of(store, "other", 20)

        many = await asyncio.gather(*(self.granted(store, limit=3) for _ in range(8)))
        rest = await self.granted(store, limit=10)  # what the first had let through and left

        assert sum(map(len, many)) + len(rest) == 4


class ValueRateRules(GateSteps):
    """Limits of rate for each value: a bucket of tokens each."""

    async def test_what_nobody_could_claim_for_long_does_not_begin_at_once(
        self, store: Store
    ) -> None:
        await store.set_value_rule(ValueRule("resize", rate=1.0, burst=3.0))
        await store.pause_type("resize")
        await self.add_of(store, "acme", 20)
        for _ in range(10):
            await self.advance(store, SECOND)
            await store.open_gates(100)
        await store.resume_type("resize")

        assert len(await self.granted(store, limit=20)) == 3

    async def test_the_rate_of_a_value_lets_its_burst_through_and_then_what_time_brings(
        self, store: Store
    ) -> None:
        await store.set_value_rule(ValueRule("resize", rate=2.0, burst=3.0))
        acme, other = await self.add_of(store, "acme", 10), await self.add_of(store, "other", 2)

        at_once = await self.granted(store)
        nothing = await self.ask(store)
        await self.pass_time(store, 2)
        later = await self.granted(store)

        assert at_once == [*acme[:3], *other]
        assert nothing.claim is None
        assert nothing.due_in is not None
        assert 0 < nothing.due_in <= 0.5
        # The store's clock may go on between two calls, but not by half a second.
        assert later == acme[3 : 3 + len(later)]
        assert 3 <= len(later) <= 4

    async def test_the_rate_of_a_value_holds_when_none_of_it_is_left(self, store: Store) -> None:
        await store.set_value_rule(ValueRule("resize", rate=0.001, burst=2.0))
        for task_id in await self.add_of(store, "acme", 2):
            claim, task = await self.claim_one(store)
            await self.settle(store, claim, task, Outcome.COMPLETED)
            assert task.id == task_id

        late, _ = await self.add_of(store, "acme", 2)

        assert await self.granted(store) == []
        assert await self.seen(store, late) == [BLOCKED]
        await self.pass_time(store, 1001)
        assert await self.granted(store) == [late]

    async def test_rate_and_concurrency_of_a_value_both_hold(self, store: Store) -> None:
        await store.set_value_rule(ValueRule("resize", concurrency=2, rate=0.001, burst=3.0))
        ids = await self.add_of(store, "acme", 10)
        claim = await self.claim(store)
        for task in claim.tasks:
            await self.settle(store, claim, task, Outcome.COMPLETED)

        again = await self.granted(store)

        assert [task.id for task in claim.tasks] == ids[:2]
        assert again == [ids[2]]

    async def test_what_waits_is_told_though_more_were_let_through_than_the_burst_is_now(
        self, store: Store
    ) -> None:
        await store.set_value_rule(ValueRule("resize", concurrency=5))
        await self.add_of(store, "acme", 3)
        await self.sweep(store)
        await store.set_value_rule(ValueRule("resize", rate=0.001, burst=1.0))
        (late,) = await self.add_of(store, "acme")

        assert await self.seen(store, late) == [BLOCKED]
        await self.sweep(store)
        assert await self.seen(store, late) == [BLOCKED]
        assert await store.has_work(["resize"], None)

    async def test_a_rate_that_is_lifted_holds_nobody_back(self, store: Store) -> None:
        await store.set_value_rule(ValueRule("resize", rate=0.001, burst=1.0))
        ids = await self.add_of(store, "acme", 3)
        await self.run(store, ids[0])

        await store.set_value_rule(TWO)

        assert await self.granted(store) == ids[1:]


class ValueRuleRules(GateSteps):
    """What code declares for each value, and what operators set instead."""

    async def test_rules_of_values_are_listed_as_they_are_in_force(self, store: Store) -> None:
        resize = ValueRule("resize", None, 5, 10.0, 20.0, 3)
        mail, each = ValueRule("mail", concurrency=1), ValueRule("mail", concurrency=2)
        acme, other = (ValueRule("mail", one, concurrency=3) for one in ("acme", "other"))

        await store.declare_rules([], types=["resize", "mail"], values=[resize, mail])
        for rule in (other, each, acme):
            await store.set_value_rule(rule)

        of_mail = [ValueRecord(rule, True) for rule in (each, acme, other)]
        assert await store.value_rules() == [*of_mail, ValueRecord(resize, False)]
        assert await store.value_rules("mail") == of_mail
        assert await store.reset_value_rule("mail", None)
        assert not await store.reset_value_rule("mail", None)
        assert (await store.value_rules("mail"))[0] == ValueRecord(mail, False)

    async def test_a_type_that_code_no_longer_limits_by_value_has_no_such_limit(
        self, store: Store
    ) -> None:
        mail = ValueRule("mail", concurrency=1)
        await store.declare_rules([], types=["resize", "mail"], values=[ONE, mail])
        ids = await self.add_of(store, "acme", 3)
        await self.take(store, ids[0])

        await store.declare_rules([], types=["resize"])

        assert await store.value_rules() == [ValueRecord(mail, False)]
        assert await self.granted(store) == ids[1:]

    async def test_the_rule_of_a_value_comes_before_that_of_each_and_that_before_code(
        self, store: Store
    ) -> None:
        await store.declare_rules([], types=["resize"], values=[ONE])
        await store.set_value_rule(TWO)
        await store.set_value_rule(ValueRule("resize", "acme", concurrency=3))
        acme, other = await self.add_of(store, "acme", 5), await self.add_of(store, "other", 5)

        granted = await self.granted(store)

        assert granted == [*acme[:3], *other[:2]]

    async def test_a_limit_of_a_value_that_is_raised_or_reset_lets_more_through_at_once(
        self, store: Store
    ) -> None:
        await store.declare_rules([], types=["resize"], values=[TWO])
        await store.set_value_rule(ValueRule("resize", "acme", concurrency=1))
        ids = await self.add_of(store, "acme", 9)
        await self.take(store, ids[0])

        assert await store.reset_value_rule("resize", "acme")
        by_code = await self.granted(store)
        await store.set_value_rule(ValueRule("resize", concurrency=5))
        by_operator = await self.granted(store)

        assert (by_code, by_operator) == (ids[1:2], ids[2:5])

    async def test_a_limit_of_a_value_that_is_lowered_waits_until_enough_have_ended(
        self, store: Store
    ) -> None:
        await store.set_value_rule(TWO)
        ids = await self.add_of(store, "acme", 3)
        claim = await self.claim(store)

        await store.set_value_rule(ONE)
        await self.settle(store, claim, claim.tasks[0], Outcome.COMPLETED)
        still_full = await self.granted(store)
        await self.settle(store, claim, claim.tasks[1], Outcome.COMPLETED)

        assert still_full == []
        assert await self.granted(store) == ids[2:]
