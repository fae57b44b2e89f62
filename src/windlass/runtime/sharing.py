"""Keeps breakers that are shared in step with the store: what one worker found out spares the others."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from windlass.breaker import Breaker
from windlass.model.breaker import SharedBreaker
from windlass.model.errors import StoreBusy, StoreUnavailable
from windlass.service import SHORTEST_PATIENCE, Stop, answered_within, backoff, is_set_within
from windlass.store.port import BreakerStore
from windlass.telemetry import emit

LOOK_EVERY = 1.0  # seconds
TRIALS_LEASE = timedelta(
    seconds=10
)  # without a word from it, after which a worker that tries is replaced


class Sharing:
    """Writes down what was found out here, and follows what was found out elsewhere.

    Whatever the store does, nobody waits for it but those who would try, and they for a moment.
    """

    def __init__(
        self,
        *,
        store: BreakerStore,
        breakers: Sequence[Breaker],
        patience: float = SHORTEST_PATIENCE,  # short: without an answer each goes by itself
    ) -> None:
        self._store = store
        self._breakers = {breaker.name: breaker for breaker in breakers}
        self._patience = patience
        self._told = asyncio.Event()

    async def run(self, stop: Stop) -> None:
        """Look once a second, and at once when something was found out here."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody looks any more
                loop.call_soon_threadsafe(self._told.set)

        stop.tell(self._told)
        failures = 0
        try:
            while not stop:
                self._told.clear()
                try:
                    async with answered_within(self._patience):
                        held = await self._look()
                except StoreUnavailable as error:
                    failures += 1
                    emit("store.unavailable", doing="share breakers", error=error)
                    self._leave_alone()
                    await stop.wait(backoff(failures))
                    continue
                failures = 0
                for name, breaker in self._breakers.items():
                    breaker.govern(None if name in held else wake)
                if not stop:
                    await is_set_within(self._told, LOOK_EVERY)
            await self._take_leave()
        finally:
            self._leave_alone()

    def _leave_alone(self) -> None:
        """Let each go by itself: a store that is away stops nobody from trying."""
        for breaker in self._breakers.values():
            breaker.govern(None)

    async def _look(self) -> set[str]:
        """Look at all of them; return those that somebody holds in the store."""
        found = {one.name: one for one in await self._store.breakers(list(self._breakers))}
        held = set()
        for name, breaker in self._breakers.items():
            known = found.get(name, SharedBreaker(name, 0, None))
            try:
                await self._keep_in_step(breaker, known)
            except StoreBusy as error:
                emit("breaker.held", breaker=name, error=error)
                held.add(name)
        return held

    async def _keep_in_step(self, breaker: Breaker, known: SharedBreaker) -> None:
        if breaker.follow(known):
            return
        if breaker.news is not None:
            await self._tell(breaker)
        elif known.open_for == 0 and breaker.wants_trials:
            is_ours = await self._store.probe_breaker(
                known.name, epoch=known.epoch, holder=breaker.holder, lease=TRIALS_LEASE
            )
            breaker.grant(known.epoch, is_ours=is_ours, theirs_for=LOOK_EVERY)
        else:
            await self._leave_trials(breaker)

    async def _tell(self, breaker: Breaker) -> None:
        """Write down what was found out here, unless others were first."""
        news = breaker.news
        if news is None:
            return
        if news.open_for is None:
            is_written = await self._store.close_breaker(news.name, epoch=news.epoch)
        else:
            recovery = timedelta(seconds=news.open_for)
            is_written = await self._store.open_breaker(
                news.name, epoch=news.epoch, recovery=recovery
            )
        breaker.was_told(news, is_written=is_written)
        if not is_written:
            self._told.set()  # to look at what the others found out

    async def _leave_trials(self, breaker: Breaker) -> None:
        """Let another try if we have nothing to try with."""
        if breaker.give_up_trials():
            await self._store.leave_breaker(breaker.name, holder=breaker.holder)

    async def _take_leave(self) -> None:
        """Say at last what was found out here; others may have the trials."""
        for breaker in self._breakers.values():
            try:
                async with answered_within(self._patience):
                    await self._tell(breaker)
                    await self._leave_trials(breaker)
            except StoreBusy as error:
                emit("breaker.held", breaker=breaker.name, error=error)
            except StoreUnavailable as error:
                emit("store.unavailable", doing="share breakers", error=error)
                return
