"""A wake-up may come from any thread, and reaches the fetcher in its own."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from uuid import UUID

import pytest

from windlass import App
from windlass.runtime.fetcher import Fetcher
from windlass.store.memory import MemoryStore
from windlass.store.port import Listening, Wake

TASK = UUID(int=7)


@pytest.mark.parametrize("is_elsewhere", [True, False])
async def test_a_fetcher_is_woken_in_its_own_thread(
    monkeypatch: pytest.MonkeyPatch, is_elsewhere: bool
) -> None:
    told: asyncio.Queue[Wake] = asyncio.Queue()
    woken: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()
    listen = MemoryStore.listen

    @asynccontextmanager
    async def overheard(
        self: MemoryStore, wake: Wake, **others: Callable[..., None] | None
    ) -> AsyncIterator[Listening]:
        async with listen(self, wake, **others) as listening:
            told.put_nowait(wake)
            yield listening

    def noted(self: Fetcher, lane: int | None = None, task_id: UUID | None = None) -> None:
        if lane is not None:
            woken.put_nowait((threading.get_ident(), lane, task_id))

    monkeypatch.setattr(MemoryStore, "listen", overheard)
    monkeypatch.setattr(Fetcher, "wake", noted)
    app = App("memory:")
    async with app, app.worker(), asyncio.timeout(10):
        wake = await told.get()
        if is_elsewhere:
            await asyncio.to_thread(wake, 5, TASK)
        else:
            wake(5, TASK)

        assert await woken.get() == (threading.get_ident(), 5, TASK)
