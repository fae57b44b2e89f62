"""A store behind a proxy, and beside it a way around: what is really in the database."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg

from contract.pgbouncer import Pooler, store_options
from contract.postgres_clock import REPLACE, PostgresClock
from contract.postgres_empty import EMPTY
from faults.carrying import Connection
from faults.proxy import Proxy
from windlass.model.task import (
    Claim,
    ClaimRequest,
    Leadership,
    NewTask,
    Outcome,
    Settlement,
    WorkerInfo,
)
from windlass.store.postgres.store import PostgresStore

WORKER = UUID(int=1)
OTHER_WORKER = UUID(int=2)
LEASE = timedelta(seconds=30)
TERM = timedelta(seconds=15)
AGEING = timedelta(seconds=6)
NOON = datetime(2027, 3, 3, 12, tzinfo=UTC)
ERROR = '{"type": "ValueError", "message": "no such image"}'
DEADLINE = 30.0  # seconds until a test gives up

RESET = f"""
{EMPTY}
UPDATE windlass.leadership SET term = 0;
UPDATE public.test_clock SET frozen_at = '{NOON}';
"""

# All that a store keeps. Left out is what differs from run to run: tokens, fences, transactions.
STATE = """
SELECT 'task' AS place, to_jsonb(t) - 'returned_by' || jsonb_build_object('returned', returned_by IS NOT NULL) AS row
FROM windlass.task t
UNION ALL
SELECT 'ready', to_jsonb(t) - '{x,n}'::text[] FROM windlass.ready t
UNION ALL
SELECT 'scheduled', to_jsonb(t) FROM windlass.scheduled t
UNION ALL
SELECT 'claim', to_jsonb(t) - '{token,fence}'::text[] || to_jsonb(k) - 'token'
FROM windlass.claim t LEFT JOIN windlass.claim_task k USING (token)
UNION ALL
SELECT 'claim_task', to_jsonb(t) - 'token' FROM windlass.claim_task t
UNION ALL
SELECT 'completed_within', to_jsonb(t) - 'token' FROM windlass.completed_within t
UNION ALL
SELECT 'claim_limit', to_jsonb(t) - 'token' FROM windlass.claim_limit t
UNION ALL
SELECT 'limit_use', to_jsonb(t) FROM windlass.limit_use t
UNION ALL
SELECT 'lane_rule', to_jsonb(t) FROM windlass.lane_rule t
UNION ALL
SELECT 'paused_type', to_jsonb(t) FROM windlass.paused_type t
UNION ALL
SELECT 'task_gate', to_jsonb(t) FROM windlass.task_gate t
UNION ALL
SELECT 'gate', to_jsonb(t) - '{from_x,from_n}'::text[] FROM windlass.gate t
UNION ALL
SELECT 'gate_entry', to_jsonb(t) - '{x,n}'::text[] FROM windlass.gate_entry t
UNION ALL
SELECT DISTINCT 'gate_call', to_jsonb(t) FROM windlass.gate_call t
UNION ALL
SELECT 'gate_used', to_jsonb(t) FROM windlass.gate_used t
UNION ALL
SELECT 'value_rule', to_jsonb(t) FROM windlass.value_rule t
UNION ALL
SELECT DISTINCT 'value_rule_change', to_jsonb(t) FROM windlass.value_rule_change t
UNION ALL
SELECT 'running', to_jsonb(t) - 'token' FROM windlass.running t
UNION ALL
SELECT 'cancel_request', to_jsonb(t) FROM windlass.cancel_request t
UNION ALL
SELECT 'attempt', to_jsonb(t) FROM windlass.attempt t
UNION ALL
SELECT 'history', to_jsonb(t) - 'token' FROM windlass.history t
UNION ALL
SELECT 'dead', to_jsonb(t) - 'token' FROM windlass.dead t
UNION ALL
SELECT 'replay', to_jsonb(t) FROM windlass.replay t
UNION ALL
SELECT 'idempotency', to_jsonb(t) FROM windlass.idempotency t
UNION ALL
SELECT 'dedupe', to_jsonb(t) FROM windlass.dedupe t
UNION ALL
SELECT 'task_tag', to_jsonb(t) FROM windlass.task_tag t
UNION ALL
SELECT 'large_payload', to_jsonb(t) FROM windlass.large_payload t
UNION ALL
SELECT 'lane', to_jsonb(t) FROM windlass.lane t
UNION ALL
SELECT 'resting_lane', to_jsonb(t) FROM windlass.resting_lane t
UNION ALL
SELECT 'queue', to_jsonb(t) FROM windlass.queue t
UNION ALL
SELECT 'task_type', to_jsonb(t) FROM windlass.task_type t
UNION ALL
SELECT 'stopped_type', to_jsonb(t) FROM windlass.stopped_type t
UNION ALL
SELECT 'expiry', to_jsonb(t) FROM windlass.expiry t
UNION ALL
SELECT 'setting', to_jsonb(t) FROM windlass.setting t
UNION ALL
SELECT 'worker', to_jsonb(t) FROM windlass.worker t
UNION ALL
SELECT 'worker_pulse', to_jsonb(t) FROM windlass.worker_pulse t
UNION ALL
SELECT 'breaker', to_jsonb(t) FROM windlass.breaker t
UNION ALL
SELECT 'schedule', to_jsonb(t) FROM windlass.schedule t
UNION ALL
SELECT 'slot', to_jsonb(t) - 'id' FROM windlass.slot t
UNION ALL
SELECT 'leadership', to_jsonb(t) FROM windlass.leadership t
UNION ALL
SELECT 'partition', to_jsonb(c.relname) FROM pg_class c
WHERE c.relnamespace = 'windlass'::regnamespace AND c.relkind = 'r' AND c.relname LIKE 'history_%'
"""
# In how many places each task is: one, or it is lost or doubled.
MISPLACED = """
WITH place (task_id) AS (
    SELECT task_id FROM windlass.ready
    UNION ALL
    SELECT task_id FROM windlass.scheduled
    UNION ALL
    SELECT task_id FROM windlass.gate_entry WHERE NOT is_open
    UNION ALL
    SELECT t.id
    FROM windlass.claim c
    JOIN windlass.claim_task b ON b.token = c.token
    CROSS JOIN LATERAL unnest(b.task_ids, b.generations) AS k (task_id, generation)
    JOIN windlass.task t ON t.id = k.task_id AND t.generation = k.generation
    UNION ALL
    SELECT id FROM windlass.history
    UNION ALL
    SELECT id FROM windlass.dead
), live AS (
    SELECT id FROM windlass.task
    UNION ALL
    SELECT id FROM windlass.history
    UNION ALL
    SELECT id FROM windlass.dead
)
SELECT coalesce(p.task_id, l.id) AS task_id, count(p.task_id) AS places
FROM live l
FULL JOIN place p ON p.task_id = l.id
GROUP BY 1
HAVING count(p.task_id) <> 1 OR count(l.id) <> 1
"""
IS_THERE = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)"
IS_ANYBODY_THERE = """
SELECT EXISTS (
    SELECT FROM pg_stat_activity
    WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
)
"""

State = list[tuple[str, str]]


class Scene:
    """One database, a store through the proxy, one around it, and a clock that stands still."""

    def __init__(
        self, url: str, *, proxy: Proxy, watcher: asyncpg.Connection, pooler: Pooler | None
    ) -> None:
        self.proxy = proxy
        self.watcher = watcher  # the only session that goes around a pooler
        self.around = PostgresStore(store_options(url, pool_size=2))
        self.store = PostgresStore(store_options(proxy.url(url), pool_size=2, auto_migrate=False))
        self._url = url
        self._pooler = pooler
        self._clock = PostgresClock(watcher)
        self._numbers = itertools.count(1)

    async def reset(self) -> None:
        """Begin again: an empty database at noon."""
        self._numbers = itertools.count(1)
        await self.watcher.execute(RESET)

    async def warm(self) -> None:
        """Give the store a connection that knows the types, and has prepared no statement yet."""
        await self.store.queues()
        assert self.store._run.pool is not None
        for holder in self.store._run.pool._holders:
            if holder.is_connected():
                holder._con._stmt_cache.clear()
                holder._con._stmts_to_close.clear()

    async def chill(self) -> None:
        """Let the store's next call open a connection."""
        await self.store._run.expire()

    async def at(self, seconds: float) -> None:
        """Let the clock stand so long after noon."""
        await self._clock.freeze(NOON + timedelta(seconds=seconds))

    async def pass_time(self, seconds: float) -> None:
        """Let the clock stand so much later."""
        await self.watcher.execute(
            "UPDATE public.test_clock SET frozen_at = frozen_at + $1", timedelta(seconds=seconds)
        )

    async def state(self) -> State:
        """Everything the store keeps, whatever a cut session still had open being over."""
        rows = await self.watcher.fetch(STATE)
        return sorted((row["place"], row["row"]) for row in rows)

    async def misplaced(self) -> list[tuple[UUID, int]]:
        """Tasks that are not in exactly one place."""
        return [tuple(row) for row in await self.watcher.fetch(MISPLACED)]

    async def gone(self, cut: Connection) -> None:
        """Return once its session has ended, and with it whatever it had not committed.

        A pooler does not tell which session that was, so behind one all of them are ended.
        """
        async with asyncio.timeout(DEADLINE):
            if self._pooler is None:
                asked: tuple[Any, ...] = (IS_THERE, cut.backend_pid)
            else:
                await self._pooler.close_sessions(self._url)
                asked = (IS_ANYBODY_THERE,)
            while await self.watcher.fetchval(*asked):
                await asyncio.sleep(0.002)

    # What scenarios begin with, done around the proxy

    def new_task(self, **options: Any) -> NewTask:
        task_id = UUID(int=1_700_000_000_000 << 80 | 7 << 76 | 2 << 62 | next(self._numbers))
        asked: dict[str, Any] = {"id": task_id, "type": "resize", "payload": "{}"}
        return NewTask(**(asked | options))

    async def add(self, number: int = 1, **options: Any) -> list[UUID]:
        tasks = [self.new_task(**options) for _ in range(number)]
        return [answer.id for answer in await self.around.enqueue(tasks)]

    async def claim(self) -> Claim:
        answer = await self.around.claim(request())
        assert answer.claim is not None, "nothing was granted"
        return answer.claim

    async def lead(self) -> Leadership:
        won = await self.around.lead(WORKER, current=None, term=timedelta(hours=1))
        assert won is not None
        return won

    async def bury(self, outcome: Outcome) -> UUID:
        (task_id,) = await self.add()
        await self.around.settle(settlements(await self.claim(), outcome))
        return task_id


@asynccontextmanager
async def opened(scene: Scene) -> AsyncIterator[Scene]:
    """Open a scene on a migrated database of the test's own."""
    await scene.watcher.execute(REPLACE)
    await scene.at(0)
    try:
        await scene.around.open()
        await scene.around._history.prepare()
        await scene.store.open()
        yield scene
    finally:
        await scene.store.close()
        await scene.around.close()


def request(limit: int = 10, *, alone: bool = False, worker: UUID = WORKER) -> ClaimRequest:
    return ClaimRequest(worker, ("resize",), limit, LEASE, AGEING, alone=alone)


def settlements(claim: Claim, outcome: Outcome, **details: Any) -> list[Settlement]:
    if outcome in {Outcome.RETRIED, Outcome.FAILED, Outcome.DEAD}:
        details = {"error": ERROR} | details
    return [
        Settlement(claim.token, task.id, task.generation, outcome, **details)
        for task in claim.tasks
    ]


def worker_info(worker_id: UUID = WORKER) -> WorkerInfo:
    return WorkerInfo(worker_id, "host", 1, "0.1", 10, ("resize",), None)
