"""Says in the store who a worker is, what it can do, and which schedules its application has."""

import asyncio
from datetime import timedelta

from windlass.model.errors import StoreBusy, StoreUnavailable
from windlass.registry import Registry
from windlass.runtime.options import WorkerOptions
from windlass.service import Stop, answered_within, backoff, patience
from windlass.store.clock_watch import ClockWatch
from windlass.store.port import Store
from windlass.telemetry import emit

AGAIN_EVERY = 1.0  # seconds, while somebody holds the schedules


class Announcing:
    """What others are told of a worker before it works."""

    def __init__(
        self,
        *,
        store: Store,
        registry: Registry,
        clock: ClockWatch,
        options: WorkerOptions,
        lease: timedelta,
    ) -> None:
        self._store = store
        self._registry = registry
        self._clock = clock
        self._options = options
        self._lease = lease
        self.is_complete = True  # False: somebody holds the schedules

    async def announce(self) -> None:
        """Tell all there is; a store that is away for a moment is waited for."""
        failures = 0
        while True:
            try:
                async with answered_within(patience(self._lease)):
                    await self._clock.look(self._store)  # what happens from here on is noticed
                    await self._store.register_types([one.defaults for one in self._registry])
                    await self._store.declare_rules(
                        self._registry.rules(),
                        types=self._registry.names(),
                        values=self._registry.value_rules(),
                    )
                    await self._announce_schedules()
                    await self._store.register(self._options.info, lease=self._lease)
            except StoreUnavailable as error:
                failures += 1
                emit("store.unavailable", doing="start", error=error)
                await asyncio.sleep(backoff(failures))
            else:
                return

    async def run(self, stop: Stop, *, until: Stop) -> None:
        """Make schedules known once nobody holds them; not any more when this worker claims nothing more."""
        while not (self.is_complete or await until.wait(AGAIN_EVERY)):
            try:
                async with answered_within(patience(self._lease)):
                    await self._announce_schedules()
            except StoreUnavailable as error:
                emit("store.unavailable", doing="register schedules", error=error)
        await stop.wait()

    async def _announce_schedules(self) -> None:
        owner, schedules = self._options.owner, self._options.schedules
        if not (owner or schedules):
            return
        try:
            changes = await self._store.register_schedules(owner, schedules)
        except StoreBusy as error:  # what somebody holds keeps no worker from its tasks
            if self.is_complete:
                self.is_complete = False
                emit("schedule.held", owner=owner, error=error)
            return
        self.is_complete = True
        for what, names in changes._asdict().items():
            if names:
                emit(f"schedule.{what}", owner=owner, schedules=", ".join(names))
