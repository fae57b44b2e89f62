"""The command line that every adapter in Python has, and what every handler does.

    setup | bulk N | single N | concurrent N | latency SECONDS | work

A command but `work` prints one line of JSON. Windlass may not be installed where this runs.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import mmap
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

CALLERS = 100  # that enqueue concurrently
CHUNK_BYTES = 20_000_000  # of payloads that one call enqueues
EVERY = 0.02  # seconds between two tasks whose latency is measured

Payload = dict[str, Any]


@dataclass(frozen=True)
class Order:
    """What is asked of an adapter; the same for all, and some cannot do all of it."""

    command: str
    number: float  # of tasks, or seconds
    url: str
    folder: Path  # where handlers say that they ran
    payload_bytes: int
    sleep_ms: float
    at_once: int  # 0: the best setting of this queue
    sync: bool  # the handler is a plain function
    results: bool  # the handler returns something to keep
    lanes: int  # queues, each with as many priorities
    keys: bool
    gates: str  # what tasks have to pass, if the queue has such: "queue", "values" or "ordering"
    delay: float  # seconds until tasks are due
    within: bool  # enqueue in a transaction of the caller
    loops: int  # of arithmetic in each handler, which then runs in a process
    processes: int  # for these; 0: one per core


class Adapter(Protocol):
    """What is measured of a queue."""

    async def setup(self) -> None:
        """Make its tables."""

    async def open(self) -> None:
        """Get ready to enqueue."""

    async def close(self) -> None:
        """Give back what was opened."""

    async def bulk(self, payloads: Sequence[Payload]) -> None:
        """Enqueue all of them, in the fastest way that it has."""

    async def single(self, payload: Payload) -> None:
        """Enqueue one, and be sure of it."""

    async def work(self) -> None:
        """Run handlers until the process is told to end."""


class Tally:
    """How often handlers ran in this process, in a file that can be read meanwhile.

    Five numbers of eight bytes: the process, when it began to work, when its first handler ran,
    the CPU time until then, and how many ran; times are nanoseconds of the monotonic clock.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._lock = threading.Lock()

    def open(self) -> None:
        """Say that this process begins to work."""
        name = str(os.getpid())
        with (self._folder / f"{name}.tally").open("w+b") as file:
            file.truncate(40)
            self._numbers = memoryview(mmap.mmap(file.fileno(), 40)).cast("q")
        self._starts = (self._folder / f"{name}.starts").open("ab", buffering=0)
        self._numbers[0] = os.getpid()
        self._numbers[1] = time.monotonic_ns()

    def hit(self, asked_at: int) -> None:
        """Count a handler; if it was told when it was asked for, also keep how long that took."""
        if not self._count:
            self._numbers[2] = time.monotonic_ns()
            self._numbers[3] = time.process_time_ns()
        self._count += 1
        self._numbers[4] = self._count
        if asked_at:
            self._starts.write(b"%d\n" % (time.monotonic_ns() - asked_at))

    def hit_in_thread(self, asked_at: int) -> None:
        """Count a handler that runs beside others in threads."""
        with self._lock:
            self.hit(asked_at)


def read_order(arguments: Sequence[str]) -> Order:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("number", type=float, nargs="?", default=0)
    parser.add_argument("--url", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--payload-bytes", type=int, default=0)
    parser.add_argument("--sleep-ms", type=float, default=0)
    parser.add_argument("--at-once", type=int, default=0)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--loops", type=int, default=0)
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--gates", default="")
    parser.add_argument("--delay", type=float, default=0)
    for flag in ("sync", "results", "keys", "within"):
        parser.add_argument(f"--{flag}", action="store_true")
    return Order(**vars(parser.parse_args(arguments)))


def payloads(order: Order, number: int) -> list[Payload]:
    """As many as asked for; what fills them does not compress."""
    filler: Payload = {}
    if order.payload_bytes:
        filler["filler"] = secrets.token_urlsafe(order.payload_bytes)[: order.payload_bytes]
    return [{"n": n, **filler} for n in range(number)]


def chunked(order: Order, wanted: Sequence[Payload], at_most: int) -> Iterator[Sequence[Payload]]:
    """Divide them into what one call is to enqueue: so many, and fewer large ones."""
    size = at_most
    if order.payload_bytes:
        size = max(1, min(at_most, CHUNK_BYTES // order.payload_bytes))
    for start in range(0, len(wanted), size):
        yield wanted[start : start + size]


def main(new_adapter: Callable[[Order, Tally], Adapter]) -> None:
    """Do what the command line asks for."""
    logging.basicConfig(level=logging.WARNING)
    order = read_order(sys.argv[1:])
    tally = Tally(order.folder)
    adapter = new_adapter(order, tally)
    if order.command == "work":
        tally.open()
        _run(_until_told_to_end(adapter.work()))
    elif order.command == "setup":
        _run(adapter.setup())
        print("{}")
    else:
        _run(_ask(adapter, order))


def _run(work: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


async def _until_told_to_end(work: Coroutine[Any, Any, None]) -> None:
    working = asyncio.create_task(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await working


async def _ask(adapter: Adapter, order: Order) -> None:
    await adapter.open()
    try:
        print(json.dumps(await _COMMANDS[order.command](adapter, order)))
    finally:
        await adapter.close()


async def _bulk(adapter: Adapter, order: Order) -> dict[str, float]:
    wanted = payloads(order, int(order.number))
    return await _timed(adapter.bulk(wanted))


async def _single(adapter: Adapter, order: Order) -> dict[str, float]:
    wanted = payloads(order, int(order.number))
    await adapter.single({"n": 0})  # connects, and prepares what it needs

    async def one_by_one() -> None:
        for payload in wanted:
            await adapter.single(payload)

    return await _timed(one_by_one())


async def _concurrent(adapter: Adapter, order: Order) -> dict[str, float]:
    wanted = iter(payloads(order, int(order.number)))
    await adapter.single({"n": 0})

    async def caller() -> None:
        for payload in wanted:
            await adapter.single(payload)

    async def callers() -> None:
        await asyncio.gather(*(caller() for _ in range(CALLERS)))

    return await _timed(callers())


async def _latency(adapter: Adapter, order: Order) -> dict[str, float]:
    sent = 0
    next_at = time.monotonic()
    until = next_at + order.number
    while next_at < until:
        await adapter.single({"n": sent, "t": time.monotonic_ns()})
        sent += 1
        next_at += EVERY
        await asyncio.sleep(max(0.0, next_at - time.monotonic()))
    return {"sent": sent}


async def _timed(work: Awaitable[None]) -> dict[str, float]:
    began = time.perf_counter()
    await work
    return {"seconds": time.perf_counter() - began}


_COMMANDS = {"bulk": _bulk, "single": _single, "concurrent": _concurrent, "latency": _latency}
