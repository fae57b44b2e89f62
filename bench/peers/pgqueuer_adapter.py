"""pgqueuer, with its best settings: batches of 1000, a pool of four connections."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import nullcontext

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from bench.peers.adapter import Order, Payload, Tally, chunked, main

BATCH = 1000
CONNECTIONS = 4
CHUNK = 5000  # tasks of one call


class PgqueuerAdapter:
    """One entrypoint."""

    def __init__(self, order: Order, tally: Tally) -> None:
        self._order = order
        self._tally = tally

    async def setup(self) -> None:
        connection = await asyncpg.connect(self._order.url)
        await Queries(AsyncpgDriver(connection)).install()
        await connection.close()

    async def open(self) -> None:
        self._pool = await asyncpg.create_pool(self._order.url, min_size=1, max_size=10)
        self._queries = Queries(AsyncpgPoolDriver(self._pool))
        self._caller: asyncpg.Connection | None = None
        if self._order.within:
            self._caller = await asyncpg.connect(self._order.url)
            self._queries = Queries(AsyncpgDriver(self._caller))

    async def close(self) -> None:
        if self._caller is not None:
            await self._caller.close()
        await self._pool.close()

    async def bulk(self, payloads: Sequence[Payload]) -> None:
        for chunk in chunked(self._order, payloads, CHUNK):
            encoded = [json.dumps(payload).encode() for payload in chunk]
            await self._queries.enqueue(["note"] * len(chunk), encoded, [0] * len(chunk))

    async def single(self, payload: Payload) -> None:
        transaction = nullcontext() if self._caller is None else self._caller.transaction()
        async with transaction:
            await self._queries.enqueue("note", json.dumps(payload).encode())

    async def work(self) -> None:
        pool = await asyncpg.create_pool(self._order.url, min_size=2, max_size=CONNECTIONS)
        queue = PgQueuer(AsyncpgPoolDriver(pool))
        order, tally = self._order, self._tally
        seconds = order.sleep_ms / 1000

        async def note(job: Job) -> None:
            payload = json.loads(job.payload or b"{}")
            if order.sync:  # it takes no plain functions, and advises this
                await asyncio.to_thread(tally.hit_in_thread, payload.get("t", 0))
                return
            tally.hit(payload.get("t", 0))
            if seconds:
                await asyncio.sleep(seconds)

        queue.entrypoint("note")(note)
        await queue.run(batch_size=BATCH)


if __name__ == "__main__":
    main(PgqueuerAdapter)
