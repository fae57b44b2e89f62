"""The bound of ageing, by a simulation: what came too late never goes first, and nothing starves."""

import random
from datetime import UTC, datetime, timedelta
from itertools import count
from uuid import UUID

import pytest

from windlass.model.rule import LaneRule, RuleScope
from windlass.model.task import ClaimRequest, NewTask, Outcome, Settlement
from windlass.store.memory import MemoryStore

SECOND = timedelta(seconds=1)
AGEING = timedelta(seconds=6)
WORKERS = (UUID(int=1), UUID(int=2))
BATCH = 20
ROUNDS = 200  # seconds


class Simulation:
    """Two workers that claim by the batch, and a flood of which they cannot keep up with."""

    def __init__(self, seed: int) -> None:
        self.now = datetime(2026, 11, 15, 20, tzinfo=UTC)
        self.store = MemoryStore(clock=lambda: self.now)
        self.chance = random.Random(seed)
        self.ready: dict[UUID, tuple[datetime, int]] = {}  # since when, and the priority
        self._ids = count(1)

    async def arrive(self, number: int) -> None:
        tasks = [
            NewTask(UUID(int=next(self._ids)), "work", "{}", "default", self.priority())
            for _ in range(number)
        ]
        self.chance.shuffle(tasks)
        await self.store.enqueue(tasks)
        self.ready |= {task.id: (self.now, task.priority) for task in tasks}

    def priority(self) -> int:
        return 20 if self.chance.random() < 0.9 else self.chance.choice([0, 10])

    def oldest(self) -> dict[int, datetime]:
        """Since when the first of each priority waits."""
        oldest: dict[int, datetime] = {}
        for since, priority in self.ready.values():
            oldest.setdefault(priority, since)  # in the order in which they came
        return oldest

    async def claim(self, worker: UUID) -> list[tuple[datetime, int]]:
        asked = ClaimRequest(worker, ("work",), BATCH, 30 * SECOND, AGEING)
        claim = (await self.store.claim(asked)).claim
        if claim is None:
            return []
        await self.store.settle(
            [Settlement(claim.token, t.id, t.generation, Outcome.COMPLETED) for t in claim.tasks]
        )
        return [self.ready.pop(task.id) for task in claim.tasks]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("step", [None, 1.0])
async def test_nobody_goes_first_who_came_later_than_the_bound(
    seed: int, step: float | None
) -> None:
    simulation = Simulation(seed)
    ageing = AGEING if step is None else step * SECOND
    if step is not None:
        await simulation.store.set_rule(LaneRule(RuleScope.QUEUE, "default", ageing=step))
    longest = {0: 0.0, 10: 0.0, 20: 0.0}
    for _ in range(ROUNDS):
        await simulation.arrive(42 if simulation.chance.random() < 0.7 else 24)
        for worker in WORKERS:
            taken = await simulation.claim(worker)
            first_of_each = {
                priority: min(since for since, one in taken if one == priority)
                for _, priority in taken
            }
            for priority, since in simulation.oldest().items():
                for taken_priority, taken_since in first_of_each.items():
                    ahead = max(0, taken_priority - priority) * ageing
                    assert taken_since <= since + ahead, "it came too late to go first"
            for since, priority in taken:
                waited = (simulation.now - since).total_seconds()
                longest[priority] = max(longest[priority], waited)
        simulation.now += SECOND

    # Whatever the flood, the difference between waits is that of the priorities, and a round.
    for priority in (0, 10):
        bound = (20 - priority) * ageing.total_seconds()
        assert longest[priority] <= longest[20] + bound + 1


async def test_a_strict_queue_may_starve() -> None:
    simulation = Simulation(7)
    await simulation.store.set_rule(LaneRule(RuleScope.QUEUE, "default", ageing=float("inf")))
    for _ in range(30):
        await simulation.arrive(46)
        for worker in WORKERS:
            taken = await simulation.claim(worker)
            waiting = {priority for _, priority in simulation.ready.values()}
            lowest = min(priority for _, priority in taken)
            assert all(priority <= lowest for priority in waiting)
        simulation.now += SECOND
