"""A worker whose connection falls silent keeps nobody from what it had claimed."""

import asyncio
from contextlib import suppress
from datetime import timedelta

from contract.pgbouncer import store_options
from contract.postgres_sessions import AT_ONCE, WORKER, add, claim
from faults.proxy import Effect, Proxy, reply
from windlass.model.errors import StoreUnavailable
from windlass.model.task import Pulse, Started
from windlass.store.postgres.store import PostgresStore

SHORT = timedelta(seconds=0.5)  # also of a lease that the silent worker may yet have prolonged


async def test_a_worker_that_falls_silent_in_its_report_is_rescued(
    proxy: Proxy, database_url: str, postgres_store: PostgresStore
) -> None:
    await add(postgres_store)
    held = await claim(postgres_store, lease=SHORT)
    started = Started(held.token, held.tasks[0].id, held.tasks[0].generation, 0.5)
    silent = PostgresStore(store_options(proxy.url(database_url)))
    await silent.open()
    rule = proxy.at(reply("CommandComplete"), Effect.HALF_OPEN, text="start_tasks")
    reporting = asyncio.create_task(silent.start([started]))
    await rule.reached.wait()

    await until_rescued(postgres_store)

    proxy.cut_all()
    with suppress(StoreUnavailable):
        await reporting
    await silent.close()


async def test_a_worker_that_falls_silent_in_its_pulse_is_rescued(
    proxy: Proxy, database_url: str, postgres_store: PostgresStore
) -> None:
    await add(postgres_store)
    held = await claim(postgres_store, lease=SHORT)
    pulse = Pulse(WORKER, [held.token], SHORT, running=1, idle=False, patience=SHORT)
    silent = PostgresStore(store_options(proxy.url(database_url)))
    await silent.open()
    rule = proxy.at(reply("CommandComplete"), Effect.HALF_OPEN, text="-- pulse")
    pulsing = asyncio.create_task(silent.pulse(pulse))
    await rule.reached.wait()

    await until_rescued(postgres_store)

    proxy.cut_all()
    with suppress(StoreUnavailable):
        await pulsing
    await silent.close()


async def until_rescued(store: PostgresStore) -> None:
    async with asyncio.timeout(AT_ONCE):
        while not (await store.rescue(100)).claims:
            await asyncio.sleep(0.05)
