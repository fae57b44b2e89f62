"""The one shape of a background loop: it runs until it is asked to stop."""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress


class Stop:
    """A request to stop that any number of loops can wait for."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def __bool__(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        """Ask to stop."""
        self._event.set()

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait for the request, at most so long; return whether it was made."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()
        return self._event.is_set()


async def first_of(*waits: Awaitable[object]) -> None:
    """Wait for whichever comes first, and stop waiting for the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def stop_task(task: asyncio.Task[None]) -> None:
    """Cancel a background task and wait until it is gone."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
