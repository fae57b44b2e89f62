"""A worker whose slots are looked at from outside, and claims for it."""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

from windlass import App
from windlass.model.task import Claim, ClaimedTask
from windlass.runtime.worker import Worker
from windlass.service import Stop

SIZE = 1000  # bytes of a payload
TOKEN = UUID(int=1)


class Bench:
    """An app whose one task runs until it is let go, and a worker that has one slot for it if not more."""

    def __init__(self, **settings: Any) -> None:
        self.app = App("memory:", **settings)
        self.let_go = asyncio.Event()
        self.workers: list[Worker] = []
        self.result: str | None = None

        @self.app.task
        async def work(text: str) -> str | None:
            await self.let_go.wait()
            return self.result

    async def worker(self, concurrency: int = 1) -> Worker:
        worker = await self.app.new_worker(concurrency=concurrency)
        # As if tasks had been short until now, so that as many as possible are kept ready.
        worker._slots._rate, worker._slots._empty_since = 1e6, math.inf
        self.workers.append(worker)
        return worker

    async def close(self) -> None:
        self.let_go.set()
        for worker in self.workers:
            worker.stop()
            await worker._slots.until_nothing_runs()
        await self.app.close()


Make = Callable[..., Bench]


def claim(tasks: int, *, alone: bool = False) -> Claim:
    text = "x" * (SIZE - len('{"text":""}'))
    payload = f'{{"text":"{text}"}}'
    return Claim(
        TOKEN,
        1,
        tuple(
            ClaimedTask(UUID(int=n), "work", "default", 10, payload, 0, 4, 1, None)
            for n in range(tasks)
        ),
        alone,
    )


async def take(worker: Worker, held: Claim) -> None:
    worker._slots.hold(held, time.monotonic())
    await worker._slots.take(held)


class OneLook(Stop):
    """Lets a loop pass once."""

    _passes = 1

    async def wait(self, seconds: float | None = None) -> bool:
        self._passes -= 1
        return self._passes < 0
