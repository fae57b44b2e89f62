"""Rules of what people ask of single workers."""

# ruff: noqa: S101 - tests assert

import asyncio
from uuid import UUID

import pytest

from windlass.model.task import WorkerOrder
from windlass.store.port import Store
from windlass.testing.store_contract.steps import (
    LEASE,
    OTHER_WORKER,
    SECOND,
    WORKER,
    Steps,
    needs,
)


class OrderRules(Steps):
    """Order rules."""

    async def test_a_worker_of_whom_nothing_is_asked_is_told_to_go_on(self, store: Store) -> None:
        await store.register(self.worker(), lease=LEASE)

        answer = await self.pulse(store)

        assert answer.order is WorkerOrder.RESUME

    @pytest.mark.parametrize("order", [WorkerOrder.PAUSE, WorkerOrder.DRAIN])
    async def test_what_is_asked_of_a_worker_is_told_to_it_alone_and_every_time(
        self, store: Store, order: WorkerOrder
    ) -> None:
        await store.register(self.worker(), lease=LEASE)
        await store.register(self.worker(OTHER_WORKER), lease=LEASE)

        known = await store.order_workers([WORKER], order)

        answers = [await self.pulse(store) for _ in range(2)]
        other = await self.pulse(store, worker_id=OTHER_WORKER)
        assert known == {WORKER}
        assert [answer.order for answer in answers] == [order, order]
        assert other.order is WorkerOrder.RESUME

    async def test_a_paused_worker_is_seen_as_paused_until_it_is_resumed(
        self, store: Store
    ) -> None:
        await store.register(self.worker(), lease=LEASE)
        await store.order_workers([WORKER], WorkerOrder.PAUSE)
        first = (await self.known_worker(store)).paused_at
        await self.advance(store, SECOND)
        await store.order_workers([WORKER], WorkerOrder.PAUSE)
        second = (await self.known_worker(store)).paused_at

        await store.order_workers([WORKER], WorkerOrder.RESUME)

        assert first is not None
        assert first == second
        assert (await self.known_worker(store)).paused_at is None
        assert (await self.pulse(store)).order is WorkerOrder.RESUME

    async def test_a_drain_cannot_be_taken_back(self, store: Store) -> None:
        await store.register(self.worker(), lease=LEASE)
        await store.order_workers([WORKER], WorkerOrder.PAUSE)
        await store.order_workers([WORKER], WorkerOrder.DRAIN)
        drained_at = (await self.known_worker(store)).drained_at

        await store.order_workers([WORKER], WorkerOrder.RESUME)

        assert drained_at is not None
        assert (await self.known_worker(store)).drained_at == drained_at
        assert (await self.pulse(store)).order is WorkerOrder.DRAIN

    async def test_several_workers_are_asked_at_once_and_unknown_ones_are_left_out(
        self, store: Store
    ) -> None:
        await store.register(self.worker(), lease=LEASE)
        await store.register(self.worker(OTHER_WORKER), lease=LEASE)
        asked = [UUID(int=99), OTHER_WORKER, WORKER, WORKER]

        known = await store.order_workers(asked, WorkerOrder.DRAIN)

        assert known == {WORKER, OTHER_WORKER}
        assert await store.order_workers([UUID(int=99)], WorkerOrder.PAUSE) == frozenset()
        assert await store.order_workers([], WorkerOrder.PAUSE) == frozenset()

    async def test_an_order_outlives_a_second_registration(self, store: Store) -> None:
        await store.register(self.worker(), lease=LEASE)
        await store.order_workers([WORKER], WorkerOrder.PAUSE)

        await store.register(self.worker(), lease=LEASE)

        assert (await self.pulse(store)).order is WorkerOrder.PAUSE

    async def test_an_order_goes_with_its_worker(self, store: Store) -> None:
        await store.register(self.worker(), lease=LEASE)
        await store.order_workers([WORKER], WorkerOrder.PAUSE)
        await store.deregister(WORKER)

        await store.register(self.worker(), lease=LEASE)

        assert (await self.pulse(store)).order is WorkerOrder.RESUME

    @needs("wakeups")
    async def test_whoever_listens_is_told_of_whom_something_is_asked(self, store: Store) -> None:
        loop = asyncio.get_running_loop()
        told: asyncio.Queue[UUID] = asyncio.Queue()

        def ordered(worker_id: UUID) -> None:
            loop.call_soon_threadsafe(told.put_nowait, worker_id)

        await store.register(self.worker(), lease=LEASE)
        async with store.listen(lambda *_: None, ordered=ordered), asyncio.timeout(10):
            await store.order_workers([WORKER], WorkerOrder.PAUSE)

            assert await told.get() == WORKER
