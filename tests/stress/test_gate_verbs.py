"""Everything that is done to tasks at gates, at once: no limit is exceeded, nothing is left behind."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from contract.postgres_sessions import AGEING, ERROR, LEASE, WORKER, add, request, settlements
from windlass.model.errors import TaskNotFound, WrongState
from windlass.model.rule import LaneRule, RuleScope, ValueRule
from windlass.model.task import Answer, Change, ClaimedTask, ClaimRequest, Outcome, Settlement
from windlass.store.postgres.store import PostgresOptions, PostgresStore

SECONDS = 20.0
TASKS = 150  # at once, about
AT_ONCE = 20  # of the type
SHORT_LEASE = timedelta(seconds=1.5)
ENQUEUERS, WORKERS = 3, 4

# By claims: how many are held of each value, and of each ordering key.
HELD = """
SELECT k.limit_value, k.ordering_key, count(*) AS tasks
FROM windlass.claim_task b
CROSS JOIN LATERAL unnest(b.task_ids, b.generations) AS u (task_id, generation)
JOIN windlass.task t ON t.id = u.task_id AND t.generation = u.generation
JOIN windlass.task_gate k ON k.task_id = t.id
GROUP BY GROUPING SETS (k.limit_value, k.ordering_key)
"""
COUNTS = """
SELECT
    (
        SELECT count(*)
        FROM windlass.gate g
        WHERE g.held <> (SELECT count(*) FROM windlass.gate_entry e WHERE e.gate = g.gate AND e.is_open)
    ) AS miscounted,
    coalesce((SELECT u.used FROM windlass.limit_use u ORDER BY u.version DESC LIMIT 1), 0) AS used,
    (SELECT coalesce(sum(h.remaining), 0) FROM windlass.claim_limit h) AS counted,
    (SELECT count(*) FROM windlass.task) AS tasks
"""
LEFT = """
SELECT
    (SELECT count(*) FROM windlass.task), (SELECT count(*) FROM windlass.gate),
    (SELECT count(*) FROM windlass.gate_entry), (SELECT count(*) FROM windlass.gate_call),
    (SELECT count(*) FROM windlass.claim), (SELECT count(*) FROM windlass.claim_limit)
"""
DEADLOCKS = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
RULES = {
    "many at once": (8, ValueRule("resize", concurrency=4), 4),
    "a rate": (40, ValueRule("resize", concurrency=2, rate=200.0, burst=5.0), 2),
    "one at once": (3, ValueRule("resize", concurrency=1), 1),
}


class Trial:
    """Enqueuers, workers some of which fall silent, and a leader, on stores of their own."""

    def __init__(self, watcher: asyncpg.Connection, chance: random.Random, values: int) -> None:
        self._watcher = watcher
        self._chance = chance
        self._values = values
        self._until = time.monotonic() + SECONDS
        self._ids: list[UUID] = []
        self._live = 0
        self.done: Counter[str] = Counter()

    async def go_on(self, step: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while time.monotonic() < self._until:
            await step()

    async def enqueue(self, store: PostgresStore) -> None:
        chance = self._chance
        while self._live > TASKS and time.monotonic() < self._until:
            await asyncio.sleep(0.01)  # the pace of the tasks
        ids = await add(store, chance.randint(1, 3), **self._options())
        self._ids += ids
        verb = chance.random()
        try:
            if verb < 0.2:
                await store.cancel(chance.choice(ids), "too late")
            elif verb < 0.3:
                delay = chance.choice([None, 0.0, 0.1])
                await store.change(chance.choice(ids), Change(priority=30, delay=delay))
            elif verb < 0.35:
                await store.retry(chance.choice(self._ids[-200:]))
        except (WrongState, TaskNotFound):
            pass  # it has begun, or did not end

    def _options(self) -> dict[str, Any]:
        chance, payload = self._chance, {"tenant": self._chance.randrange(self._values)}
        options: dict[str, Any] = {"payload": json.dumps(payload), "max_attempts": 30}
        if chance.random() < 0.8:
            options["limit_by"] = '[["tenant", null]]'
        if chance.random() < 0.3:
            options["ordering_key"] = f"key {chance.randrange(self._values)}"
        if chance.random() < 0.1:
            options["delay"] = chance.random() * 0.1
        return options

    async def work(self, store: PostgresStore, worker: UUID) -> None:
        chance = self._chance
        asked = request(limit=chance.choice([1, 3, 10]), worker=worker, lease=SHORT_LEASE)
        claim = (await store.claim(asked)).claim
        await asyncio.sleep(chance.random() * 0.01)  # as a handler takes
        if claim is None:
            await store.promote(100)
        elif chance.random() < 0.01:
            self.done["abandoned"] += 1
        else:
            answers = await store.settle([self._end(claim.token, task) for task in claim.tasks])
            self.done["settled"] += answers.count(Answer.APPLIED)

    def _end(self, token: UUID, task: ClaimedTask) -> Settlement:
        outcome = self._chance.choice(
            [
                *(6 * [Outcome.COMPLETED]),
                *(Outcome.RETRIED, Outcome.SNOOZED, Outcome.RELEASED, Outcome.FAILED),
            ]
        )
        if outcome is Outcome.RETRIED and task.attempts > 5:
            outcome = Outcome.COMPLETED
        return Settlement(
            token,
            task.id,
            task.generation,
            outcome,
            delay=0.02 if outcome in (Outcome.RETRIED, Outcome.SNOOZED) else 0.0,
            error=ERROR if outcome in (Outcome.RETRIED, Outcome.FAILED) else None,
        )

    async def lead(self, store: PostgresStore) -> None:
        await store.open_gates(50)
        await store.rescue(10)
        await asyncio.sleep(0.05)  # the pace of the sweeps

    async def watch(self, most: int) -> None:
        for value, key, tasks in await self._watcher.fetch(HELD):
            assert tasks <= most or value is None
            assert tasks <= 1 or key is None
        miscounted, used, counted, self._live = await self._watcher.fetchrow(COUNTS)
        assert miscounted == 0
        assert used == counted <= AT_ONCE
        await asyncio.sleep(0.01)  # the pace of the samples

    async def drain(self, store: PostgresStore) -> None:
        """End all there is, suspects too, until nothing is left of them."""
        async with asyncio.timeout(60):
            while any(await self._watcher.fetchrow(LEFT)):
                await store.open_gates(1000)
                await store.promote(100)
                await store.rescue(10)
                for alone in (False, True):
                    asked = ClaimRequest(WORKER, ("resize",), 50, LEASE, AGEING, alone=alone)
                    claim = (await store.claim(asked)).claim
                    if claim is not None:
                        await store.settle(settlements(claim, Outcome.COMPLETED))


@pytest.fixture
async def stores(database_url: str) -> AsyncIterator[list[PostgresStore]]:
    opened = [
        PostgresStore(PostgresOptions(url=database_url)) for _ in range(ENQUEUERS + WORKERS + 1)
    ]
    for store in opened:
        await store.open()
    yield opened
    for store in opened:
        await store.close()


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rule", RULES)
async def test_nothing_is_exceeded_or_left_behind_whatever_is_done_to_tasks(
    stores: list[PostgresStore], database_url: str, rule: str
) -> None:
    values, of_each, most = RULES[rule]
    seed = random.randrange(2**32)
    print(f"\n{rule}: seed {seed}")
    leader, *others = stores
    await leader.set_value_rule(of_each)
    await leader.set_rule(LaneRule(RuleScope.TYPE, "resize", concurrency=AT_ONCE))
    watcher = await asyncpg.connect(database_url)
    trial = Trial(watcher, random.Random(seed), values)
    enqueuers, workers = others[:ENQUEUERS], others[ENQUEUERS:]

    async with asyncio.TaskGroup() as group:
        for store in enqueuers:
            group.create_task(trial.go_on(partial(trial.enqueue, store)))
        for number, store in enumerate(workers, start=10):
            group.create_task(trial.go_on(partial(trial.work, store, UUID(int=number))))
        group.create_task(trial.go_on(partial(trial.lead, leader)))
        group.create_task(trial.go_on(partial(trial.watch, most)))
    await trial.drain(leader)

    print(dict(trial.done))
    assert trial.done["settled"] > 100
    assert await watcher.fetchval(DEADLOCKS) == 0
    assert (await watcher.fetchrow(COUNTS))["used"] == 0
    await watcher.close()
