"""Everything that takes part in a run of chaos, and what happens to it."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from chaos.fleet import Fleet
from chaos.server import ChaosServer
from chaos.settings import LEASE, LONG, SWEEP
from faults.proxy import Effect, Proxy, after, before, reply
from windlass import App, StoreUnavailable
from windlass.testing.history_check import ClientLog

PACE = (0.2, 2.0)  # seconds between faults
PRODUCERS = 4
ENQUEUE_EVERY = 0.06  # seconds, of each producer: half of what the workers can do
STATEMENTS = (
    "claim_tasks",
    "claim_lane",
    "claim_one",
    "settle_tasks",
    "enqueue_now",
    "enqueue_alike",
    "enqueue_tasks",
    "rescue_claims",
    "start_tasks",
    "pulse",
)
POINTS = (before("Execute"), before("Commit"), after("Commit"), reply("CommandComplete"))


@dataclass(slots=True)
class World:
    """The server, the proxy before it, the workers, and the clients."""

    server: ChaosServer
    proxy: Proxy
    fleet: Fleet
    client: ClientLog
    app: App
    seed: int
    chance: random.Random = field(default_factory=random.Random)  # of the turn
    counts: Counter[str] = field(default_factory=Counter)
    producing: bool = True
    cuts: list[float] = field(default_factory=list)  # when connections were cut, or sessions ended
    _lasting: list[asyncio.Task[None]] = field(default_factory=list)

    # What happens

    async def rage(self, seconds: float) -> None:
        """Let faults happen for so long, one after the other but for those that last."""
        until = time.monotonic() + seconds
        names, weights = list(FAULTS), [weight for weight, _ in FAULTS.values()]
        for turn in count():
            if time.monotonic() > until:
                return
            # Drawn for each turn by itself: what was drawn before depends on how fast things went.
            self.chance = random.Random(f"{self.seed} {turn}")
            await asyncio.sleep(self.chance.uniform(*PACE))
            (name,) = self.chance.choices(names, weights)
            await FAULTS[name][1](self)
            self.look_after_workers()

    def look_after_workers(self) -> None:
        ended = self.fleet.ended_by_themselves()
        assert ended == [], ended

    async def kill_worker(self) -> None:
        self.counts["kills"] += 1
        self.fleet.kill(self.chance.randrange(self.fleet.size))

    async def stop_worker(self) -> None:
        place, seconds = self.chance.randrange(self.fleet.size), self.chance.uniform(0.5, 12)
        if self.fleet.stopped:  # the others have to go on
            return
        self.counts["stops"] += 1
        pid = self.fleet.stop(self.fleet.pids()[place])

        async def go_on() -> None:
            await asyncio.sleep(seconds)
            self.fleet.resume(pid)

        self._beside(go_on())

    async def make_zombie(self) -> None:
        """Hold up a settlement on its way, and its worker too, until the claim was rescued."""
        if self.fleet.stopped:
            return
        rule = self.proxy.at(before("Execute"), Effect.STALL, text="settle_tasks")
        try:
            await asyncio.wait_for(rule.reached.wait(), 1)
        except TimeoutError:
            self.proxy.drop(rule)
            return
        self.counts["zombies"] += 1
        pid = self.fleet.stop(rule.connections[0].client_pid)

        async def go_on() -> None:
            try:
                await asyncio.sleep(LEASE + 2 * SWEEP + 1)
            finally:
                self.proxy.drop(rule)  # late, it arrives
                self.fleet.resume(pid)

        self._beside(go_on())

    def _beside(self, call: Coroutine[Any, Any, None]) -> None:
        self._lasting.append(asyncio.create_task(call))

    async def restart_server(self, how: str) -> None:
        self.counts[f"restarts ({how})"] += 1
        await self.server.restart_by(how)

    async def terminate_session(self) -> None:
        self.cuts.append(time.time())
        self.counts["sessions ended"] += await self.server.terminate_one(
            self.chance.randrange(1000)
        )

    async def cut_one(self) -> None:
        self.cuts.append(time.time())
        self.counts["connections cut"] += self.proxy.cut_one(self.chance)

    async def cut_all(self) -> None:
        self.cuts.append(time.time())
        self.counts["connections cut"] += self.proxy.cut_all()

    async def cut_statement(self) -> None:
        """Cut the next connection that runs a certain statement, at a certain point of it."""
        point, text = self.chance.choice(POINTS), self.chance.choice(STATEMENTS)
        rule = self.proxy.at(point, Effect.CUT, text=text)
        try:
            await asyncio.wait_for(rule.reached.wait(), 1)
            self.cuts.append(time.time())
            self.counts["statements cut"] += 1
        except TimeoutError:
            pass
        finally:
            self.proxy.drop(rule)

    async def calm_down(self) -> None:
        """Undo whatever lasts."""
        for task in self._lasting:
            task.cancel()  # unless it is done
        for end in await asyncio.gather(*self._lasting, return_exceptions=True):
            if isinstance(end, Exception):
                raise end
        for pid in list(self.fleet.stopped):
            self.fleet.resume(pid)

    # Clients

    async def produce(self, number: int) -> None:
        """Enqueue until told otherwise; with a key again and again until it is known to be there."""
        chance = random.Random(f"{self.seed} producer {number}")
        for turn in count():
            if not self.producing:
                return
            await asyncio.sleep(ENQUEUE_EVERY * chance.uniform(0.5, 1.5))
            name = "short"
            payload: dict[str, float] = {"milliseconds": chance.randint(20, 300)}
            if chance.random() < 0.01:
                name, payload = "long", {"seconds": LONG}
            options: dict[str, Any] = {}
            if chance.random() < 0.1:
                options["delay"] = chance.uniform(0, 5)
            if chance.random() < 0.5:
                options["idempotency_key"] = f"{number}-{turn}"
            await self._enqueue(name, payload, options)

    async def _enqueue(self, name: str, payload: dict[str, Any], options: dict[str, Any]) -> None:
        while True:
            try:
                await self.client.enqueue(self.app, name, payload, **options)
            except StoreUnavailable:
                self.counts["enqueues not answered"] += 1
                if "idempotency_key" not in options:
                    return  # once more could make it two
                await asyncio.sleep(0.2)
            else:
                self.counts["enqueues acknowledged"] += 1
                return


FAULTS: dict[str, tuple[float, Callable[[World], Awaitable[None]]]] = {
    "kill": (5, World.kill_worker),
    "stop": (3, World.stop_worker),
    "zombie": (2, World.make_zombie),
    "restart": (0.7, lambda world: world.restart_server("fast")),
    "immediate": (0.7, lambda world: world.restart_server("immediate")),
    "crash": (0.7, lambda world: world.restart_server("kill")),
    "terminate": (4, World.terminate_session),
    "cut": (3, World.cut_one),
    "cut all": (1, World.cut_all),
    "cut statement": (4, World.cut_statement),
}
