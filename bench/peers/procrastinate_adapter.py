"""procrastinate, with its best settings: ten tasks at once, four connections."""

import asyncio
from collections.abc import Sequence
from typing import Any

import procrastinate

from bench.peers.adapter import Order, Payload, Tally, chunked, main

AT_ONCE = 10
CONNECTIONS = 4
CHUNK = 1000  # tasks of one call


class ProcrastinateAdapter:
    """One task."""

    def __init__(self, order: Order, tally: Tally) -> None:
        self._order = order
        self._app = procrastinate.App(
            connector=procrastinate.PsycopgConnector(
                conninfo=order.url, min_size=1, max_size=CONNECTIONS
            )
        )
        self._note: Any = self._app.task(name="note")(_handler(order, tally))

    async def setup(self) -> None:
        async with self._app.open_async():
            await self._app.schema_manager.apply_schema_async()

    async def open(self) -> None:
        await self._app.open_async()

    async def close(self) -> None:
        await self._app.close_async()

    async def bulk(self, payloads: Sequence[Payload]) -> None:
        for chunk in chunked(self._order, payloads, CHUNK):
            await self._note.batch_defer_async(*chunk)

    async def single(self, payload: Payload) -> None:
        await self._note.defer_async(**payload)

    async def work(self) -> None:
        async with self._app.open_async():
            await self._app.run_worker_async(
                concurrency=self._order.at_once or AT_ONCE, install_signal_handlers=False
            )


def _handler(order: Order, tally: Tally) -> Any:
    seconds = order.sleep_ms / 1000

    async def note(n: int, t: int = 0, filler: str = "") -> None:
        tally.hit(t)
        if seconds:
            await asyncio.sleep(seconds)

    def note_in_thread(n: int, t: int = 0, filler: str = "") -> None:
        tally.hit_in_thread(t)

    return note_in_thread if order.sync else note


if __name__ == "__main__":
    main(ProcrastinateAdapter)
