"""Windlass, through its public interface alone."""

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import asyncpg

from bench.peers.adapter import Order, Payload, Tally, chunked, main, read_order
from windlass import App, Call, Limit

AT_ONCE = 500
VALUES = 1000  # of the argument that a limit is by
OF_EACH = 10  # at once
MANY = 100_000  # more than any worker holds


class WindlassAdapter:
    """One task type, whose handler is what the order asks for."""

    def __init__(self, order: Order, tally: Tally) -> None:
        self._order = order
        self._app = App(order.url, processes=order.processes)
        if order.loops:
            self._note = self._app.task(name="note", run="process")(compute)
        else:
            limit = Limit(concurrency=OF_EACH, by="group") if order.gates == "values" else None
            self._note = self._app.task(name="note", limit=limit)(_handler(order, tally))
        if order.gates == "queue":
            self._app.queue("default", concurrency=MANY)
        self._connection: Any = None
        self._closing = contextlib.AsyncExitStack()

    async def setup(self) -> None:
        async with self._app:
            pass  # an app that is opened migrates its database

    async def open(self) -> None:
        await self._closing.enter_async_context(self._app)
        if self._order.within:
            self._connection = await asyncpg.connect(self._order.url)

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
        await self._closing.aclose()

    async def bulk(self, payloads: Sequence[Payload]) -> None:
        for chunk in chunked(self._order, payloads, len(payloads)):
            await self._app.enqueue_many([self._call(payload) for payload in chunk])

    async def single(self, payload: Payload) -> None:
        if self._connection is None:
            await self._note.enqueue(**payload)
            return
        async with self._connection.transaction():
            await self._note.options(connection=self._connection).enqueue(**payload)

    async def work(self) -> None:
        await self._app.run_worker(concurrency=self._order.at_once or AT_ONCE)

    def _call(self, payload: Payload) -> Call:
        number, lanes = payload["n"], self._order.lanes
        task: Any = self._note
        if lanes > 1:
            task = task.options(queue=f"queue-{number % lanes}", priority=number // lanes % lanes)
        if self._order.keys:
            task = task.options(idempotency_key=str(number))
        if self._order.gates == "ordering":
            task = task.options(ordering_key=str(number))
        if self._order.delay:
            task = task.options(delay=self._order.delay)
        grouped = {"group": number % VALUES} if self._order.gates == "values" else {}
        call: Call = task.call(**payload, **grouped)
        return call


def compute(n: int, t: int = 0, filler: str = "") -> int:
    """Use a core for a while. Runs in a process, which has the command line of its worker."""
    order, tally = _in_process()
    tally.hit(t)
    return sum(range(order.loops))


@cache
def _in_process() -> tuple[Order, Tally]:
    order = read_order(sys.argv[1:])
    tally = Tally(order.folder)
    tally.open()
    return order, tally


def _handler(order: Order, tally: Tally) -> Any:
    seconds = order.sleep_ms / 1000
    result = {"kept": True} if order.results else None

    async def note(n: int, t: int = 0, filler: str = "", group: int = 0) -> Any:
        tally.hit(t)
        return result

    async def sleep(n: int, t: int = 0, filler: str = "", group: int = 0) -> Any:
        tally.hit(t)
        await asyncio.sleep(seconds)
        return result

    def note_in_thread(n: int, t: int = 0, filler: str = "", group: int = 0) -> Any:
        tally.hit_in_thread(t)
        return result

    if order.sync:
        return note_in_thread
    return sleep if seconds else note


if __name__ == "__main__":
    main(WindlassAdapter)
