"""Holds one lease; does the chores while it lasts."""

import asyncio
import random
import time
from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from windlass.maintenance.chores import FIRE_SCHEDULES, Chore
from windlass.model.errors import NotLeader, StoreUnavailable
from windlass.model.limits import MARGIN
from windlass.model.task import Leadership
from windlass.service import Stop, answered_within, is_set_within
from windlass.store.clock_watch import ClockWatch
from windlass.store.port import LeadStore
from windlass.telemetry import emit

HANGS_BEFORE_STEPPING_DOWN = 2  # of one chore, in a row: once may be a slow moment


class Leader:
    """A candidate that does the leader's chores whenever it is elected."""

    def __init__(
        self,
        *,
        store: LeadStore,
        candidate: UUID,
        term: timedelta,
        clock: ClockWatch,
        chores: Sequence[Chore],
    ) -> None:
        self._store = store
        self._clock = clock
        self._candidate = candidate
        self._term = term
        self._chores = chores
        self._held: Leadership | None = None
        self._trusted_until = 0.0
        self._hurried = asyncio.Event()  # a chore is to be done at once, or this is to stop
        self._third = term.total_seconds() / 3
        self._aside_until = 0.0  # monotonic, after stepping down: let others have the seat first

    @property
    def is_leader(self) -> bool:
        """Whether the term may still be trusted."""
        return self._trusted() is not None

    def _trusted(self) -> Leadership | None:
        return self._held if time.monotonic() < self._trusted_until else None

    def look_at_schedules(self) -> None:
        """Look at schedules at once, if this one leads: there is another one."""
        for chore in self._chores:
            if chore.name == FIRE_SCHEDULES:
                chore.hurry()
        self._hurried.set()

    async def run(self, stop: Stop) -> None:
        """Stand for election until asked to stop, then resign."""
        stop.tell(self._hurried)
        while not stop:
            if time.monotonic() >= self._aside_until:
                await self._elect()
            if self.is_leader:
                await self._do_chores(stop)
            else:
                # Not all at the same moment.
                await stop.wait(self._third * random.uniform(0.8, 1.0))  # noqa: S311
        await self._resign()

    async def _elect(self) -> None:
        asked_at = time.monotonic()
        try:
            async with answered_within(self._third):
                held = await self._store.lead(
                    self._candidate,
                    current=self._held,
                    term=self._term,
                    steady_for=self._clock.steady_for,
                )
        except StoreUnavailable as error:
            emit("store.unavailable", doing="lead", error=error)
            return  # whatever it was, it is trusted until its end and no longer
        if held is not None and held != self._held:
            emit("leader.elected", term=held.term)
        elif held is None and self._held is not None:
            emit("leader.deposed", term=self._held.term)
        self._held = held
        self._trusted_until = asked_at + self._term.total_seconds() * (1 - MARGIN)

    async def _do_chores(self, stop: Stop) -> None:
        """Do what is due until the term has to be renewed; each chore within a third of it."""
        until = time.monotonic() + self._third
        while not stop and self.is_leader and time.monotonic() < until:
            for chore in self._chores:
                held = self._trusted()
                if held is None or stop:
                    return
                if chore.is_due(time.monotonic()):
                    await self._do(chore, held)
            due_next = min(chore.due_at for chore in self._chores)
            await is_set_within(self._hurried, max(0.01, min(until, due_next) - time.monotonic()))
            self._hurried.clear()

    async def _do(self, chore: Chore, held: Leadership) -> None:
        hangs, chore.hangs = chore.hangs, 0
        try:
            async with asyncio.timeout(self._third):
                await chore.run(held)
        except NotLeader:
            emit("leader.deposed", term=held.term)
            self._held = None
        except TimeoutError:
            chore.hangs = hangs + 1
            emit("chore.delayed", chore=chore.name, error=f"not done within {self._third:g} s")
            if chore.is_duty and chore.hangs >= HANGS_BEFORE_STEPPING_DOWN:
                await self._step_down(chore)
        except StoreUnavailable as error:
            emit("chore.delayed", chore=chore.name, error=error)
        except Exception as error:  # noqa: BLE001 - one chore must not stop the others
            emit("chore.failed", chore=chore.name, error=error)

    async def _step_down(self, chore: Chore) -> None:
        """Leave the seat to whoever may fare better; they ask for it three times in a term."""
        emit("leader.stepped_down", chore=chore.name)
        chore.hangs = 0
        await self._resign()
        self._aside_until = time.monotonic() + 2 * self._third

    async def _resign(self) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        try:
            async with answered_within(self._third):
                await self._store.resign(held)
        except StoreUnavailable as error:
            emit("store.unavailable", doing="resign", error=error)
