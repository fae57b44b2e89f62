"""Rules of staying alive: leases, the registry, waking up."""

# ruff: noqa: S101 - tests assert

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from windlass.model.rule import LaneRule, RuleScope
from windlass.model.task import (
    Answer,
    Change,
    Claim,
    Outcome,
    Pulse,
    PulseAnswer,
    Rescued,
    TaskState,
    WorkerOrder,
    WorkerRecord,
)
from windlass.store.port import Store
from windlass.testing.store_contract.steps import (
    LEASE,
    OTHER_WORKER,
    RETURNING,
    SECOND,
    WORKER,
    Steps,
    needs,
)


class PulseRules(Steps):
    """Pulse rules."""

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

    async def test_a_claim_whose_worker_knows_better_than_the_clock_is_kept(
        self, store: Store
    ) -> None:
        """The clock was set ahead; by the worker's own the lease is not over."""
        await self.add(store)
        claim = await self.claim(store)
        await self.advance(store, LEASE + SECOND)
        trusted = Pulse(WORKER, [claim.token], LEASE, running=1, idle=False, trusted=True)

        answer = await store.pulse(trusted)

        assert answer.kept == {claim.token}
        assert await store.rescue(10) == Rescued()

    async def test_a_claim_that_was_rescued_is_lost_whatever_its_worker_knows(
        self, store: Store
    ) -> None:
        await self.add(store)
        claim = await self.claim(store)
        await self.advance(store, LEASE + SECOND)
        await store.rescue(10)
        trusted = Pulse(WORKER, [claim.token], LEASE, running=1, idle=False, trusted=True)

        assert not (await store.pulse(trusted)).kept

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
        assert answer == PulseAnswer(frozenset(), registered=True, weights={})
        assert worker.heartbeat_at >= worker.started_at + SECOND
        assert (worker.running, worker.idle) == (3, True)

    async def test_a_pulse_says_how_the_breakers_of_a_worker_are(self, store: Store) -> None:
        await store.register(self.worker(), lease=LEASE)
        pulse = Pulse(WORKER, [], LEASE, running=0, idle=False)

        before = (await self.known_worker(store)).breakers
        await store.pulse(pulse._replace(breakers={"payments": "open", "mail": "closed"}))
        said = (await self.known_worker(store)).breakers
        await store.pulse(pulse)
        after = (await self.known_worker(store)).breakers

        assert (before, after) == ({}, {})
        assert said == {"payments": "open", "mail": "closed"}

    async def test_a_pulse_says_of_which_queues_a_worker_takes_no_more(self, store: Store) -> None:
        await store.register(self.worker(), lease=LEASE)
        pulse = Pulse(WORKER, [], LEASE, running=0, idle=False)

        before = (await self.known_worker(store)).full_queues
        await store.pulse(pulse._replace(full_queues=("mail", "bulk")))
        said = (await self.known_worker(store)).full_queues
        await store.pulse(pulse)
        after = (await self.known_worker(store)).full_queues

        assert (before, said, after) == ((), ("mail", "bulk"), ())

    async def test_a_worker_that_drains_by_itself_is_seen_as_draining(self, store: Store) -> None:
        await store.register(self.worker(), lease=LEASE)
        await store.register(self.worker(OTHER_WORKER), lease=LEASE)
        pulse = Pulse(WORKER, [], LEASE, running=1, idle=False, drains=True)

        await store.pulse(pulse)
        first = (await self.known_worker(store)).drained_at
        await self.advance(store, SECOND)
        answer = await store.pulse(pulse)

        assert first is not None
        assert (await self.known_worker(store)).drained_at == first
        assert (await self.known_worker(store, OTHER_WORKER)).drained_at is None
        assert answer.order is WorkerOrder.DRAIN

    async def test_a_worker_that_was_forgotten_while_it_drains_says_so_again(
        self, store: Store
    ) -> None:
        pulse = Pulse(WORKER, [], LEASE, running=1, idle=False, drains=True)

        assert not (await store.pulse(pulse)).registered
        await store.register(self.worker(), lease=LEASE)
        await store.pulse(pulse)

        assert (await self.known_worker(store)).drained_at is not None

    async def test_the_answer_to_a_pulse_says_what_queues_weigh(self, store: Store) -> None:
        rules = [LaneRule(RuleScope.QUEUE, name, weight=2) for name in ("mail", "bulk")]
        await store.declare_rules([*rules, LaneRule(RuleScope.QUEUE, "slow", 1)], types=[])
        await store.set_rule(LaneRule(RuleScope.QUEUE, "mail", weight=3))

        answer = await store.pulse(Pulse(WORKER, [], LEASE, running=0, idle=False))

        assert answer.weights == {"mail": 3, "bulk": 2}

    async def test_a_pulse_of_an_unknown_worker_says_so_and_extends_all_the_same(
        self, store: Store
    ) -> None:
        await self.add(store)
        claim = await self.claim(store)

        answer = await self.pulse(store, claim)

        assert answer == PulseAnswer(frozenset({claim.token}), registered=False, weights={})
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


class WakeRules(Steps):
    """Wake rules."""

    async def is_woken(self, store: Store, act: Callable[[], Awaitable[object]]) -> None:
        """Act while an idle worker listens, and wait until it is woken."""
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake(*_named: object) -> None:
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
        async with store.listen(lambda *_: woken.append(True)):
            pass
        woken.clear()

        await self.add(store)

        assert woken == []


class BesideRules(Steps):
    """Beside rules."""

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
