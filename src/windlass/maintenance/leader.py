"""Holds one lease; does the chores while it lasts."""

import asyncio
import time
from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from windlass.maintenance.chores import Chore
from windlass.model.errors import NotLeader, StoreUnavailable
from windlass.model.limits import MARGIN
from windlass.model.task import Leadership
from windlass.service import Stop
from windlass.store.port import LeadStore
from windlass.telemetry import emit


class Leader:
    """A candidate that does the leader's chores whenever it is elected."""

    def __init__(
        self,
        *,
        store: LeadStore,
        candidate: UUID,
        term: timedelta,
        chores: Sequence[Chore],
    ) -> None:
        self._store = store
        self._candidate = candidate
        self._term = term
        self._chores = chores
        self._held: Leadership | None = None
        self._trusted_until = 0.0

    @property
    def is_leader(self) -> bool:
        """Whether the term may still be trusted."""
        return self._held is not None and time.monotonic() < self._trusted_until

    async def run(self, stop: Stop) -> None:
        """Stand for election until asked to stop, then resign."""
        every = self._term.total_seconds() / 3
        while not stop:
            await self._elect()
            if self.is_leader:
                await self._do_chores(stop, every)
            else:
                await stop.wait(every)
        await self._resign()

    async def _elect(self) -> None:
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(self._term.total_seconds() / 3):
                held = await self._store.lead(self._candidate, current=self._held, term=self._term)
        except (StoreUnavailable, TimeoutError) as error:
            emit("store.unavailable", doing="lead", error=error)
            return  # whatever it was, it is trusted until its end and no longer
        if held is not None and held != self._held:
            emit("leader.elected", term=held.term)
        elif held is None and self._held is not None:
            emit("leader.deposed", term=self._held.term)
        self._held = held
        self._trusted_until = asked_at + self._term.total_seconds() * (1 - MARGIN)

    async def _do_chores(self, stop: Stop, seconds: float) -> None:
        """Do what is due until the term has to be renewed; each chore within a third of it."""
        until = time.monotonic() + seconds
        while not stop and self.is_leader and time.monotonic() < until:
            for chore in self._chores:
                if chore.is_due(time.monotonic()) and self._held is not None and not stop:
                    await self._do(chore, self._held)
            due_next = min(chore.due_at for chore in self._chores)
            await stop.wait(max(0.01, min(until, due_next) - time.monotonic()))

    async def _do(self, chore: Chore, held: Leadership) -> None:
        try:
            async with asyncio.timeout(self._term.total_seconds() / 3):
                await chore.run(held)
        except NotLeader:
            emit("leader.deposed", term=held.term)
            self._held = None
        except (StoreUnavailable, TimeoutError) as error:
            emit("chore.delayed", chore=chore.name, error=error)
        except Exception as error:  # noqa: BLE001 - one chore must not stop the others
            emit("chore.failed", chore=chore.name, error=error)

    async def _resign(self) -> None:
        if self._held is None:
            return
        try:
            await self._store.resign(self._held)
        except StoreUnavailable as error:
            emit("store.unavailable", doing="resign", error=error)
        self._held = None
