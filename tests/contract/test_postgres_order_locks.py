"""What is asked of a worker whose row somebody holds, or whose order is not committed yet."""

import asyncio

import pytest

from contract.postgres_sessions import (
    AT_ONCE,
    LEASE,
    WORKER,
    Sessions,
    lead,
    worker_info,
)
from windlass.model.errors import StoreBusy
from windlass.model.task import Pulse, WorkerOrder
from windlass.store.postgres.store import PostgresStore

PULSE = Pulse(WORKER, [], LEASE, running=0, idle=False)


async def test_a_pulse_does_not_wait_for_an_order_that_is_not_committed(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.register(worker_info(), lease=LEASE)
    ordering = await sessions.begin()
    await ordering.store.order_workers([WORKER], WorkerOrder.PAUSE)

    async with asyncio.timeout(AT_ONCE):
        before = await store.pulse(PULSE)
    await ordering.commit()

    assert before.order is WorkerOrder.RESUME
    assert (await store.pulse(PULSE)).order is WorkerOrder.PAUSE


async def test_a_pulse_that_says_it_drains_does_not_wait_for_whoever_holds_its_worker(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.register(worker_info(), lease=LEASE)
    ordering = await sessions.begin()
    await ordering.store.order_workers([WORKER], WorkerOrder.PAUSE)

    async with asyncio.timeout(AT_ONCE):
        await store.pulse(PULSE._replace(drains=True))
    await ordering.commit()
    await store.pulse(PULSE._replace(drains=True))

    assert (await store.pulse(PULSE)).order is WorkerOrder.DRAIN


async def test_an_order_waits_for_one_before_it_and_is_carried_out(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.register(worker_info(), lease=LEASE)
    ordering = await sessions.begin()
    await ordering.store.order_workers([WORKER], WorkerOrder.PAUSE)

    resuming = await sessions.blocked(
        store.order_workers([WORKER], WorkerOrder.RESUME), by=ordering
    )
    await ordering.commit()

    assert await resuming == {WORKER}
    assert (await store.pulse(PULSE)).order is WorkerOrder.RESUME


async def test_an_order_gives_up_on_a_worker_that_somebody_holds(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.register(worker_info(), lease=LEASE)
    holding = await sessions.begin()
    await holding.connection.execute("SELECT FROM windlass.worker WHERE id = $1 FOR UPDATE", WORKER)

    async with asyncio.timeout(AT_ONCE):
        with pytest.raises(StoreBusy, match="held by a transaction"):
            await store.order_workers([WORKER], WorkerOrder.DRAIN)
    await holding.rollback()

    assert (await store.pulse(PULSE)).order is WorkerOrder.RESUME


async def test_an_order_to_a_worker_that_leaves_meanwhile_finds_nobody(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.register(worker_info(), lease=LEASE)
    leaving = await sessions.begin()
    await leaving.store.deregister(WORKER)

    ordering = await sessions.blocked(store.order_workers([WORKER], WorkerOrder.DRAIN), by=leaving)
    await leaving.commit()

    assert await ordering == frozenset()


async def test_a_leader_does_not_wait_for_an_order_that_is_not_committed(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.register(worker_info(), lease=LEASE)
    leadership = await lead(store)
    ordering = await sessions.begin()
    await ordering.store.order_workers([WORKER], WorkerOrder.PAUSE)

    async with asyncio.timeout(AT_ONCE):
        assert await store.remove_dead_workers(leadership=leadership) == []
    await ordering.rollback()
