"""Sessions that hold what a store wants, and what their tests have in common."""

import asyncio
import time
from collections.abc import Awaitable
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar
from uuid import UUID

import asyncpg

from contract.pgbouncer import store_options
from windlass.model.task import (
    Answer,
    Claim,
    ClaimRequest,
    Leadership,
    NewTask,
    Outcome,
    Settlement,
    WorkerInfo,
)
from windlass.store.postgres.connection import connect
from windlass.store.postgres.dial import Route
from windlass.store.postgres.store import PostgresOptions, PostgresStore

T = TypeVar("T")

WORKER = UUID(int=1)
OTHER_WORKER = UUID(int=2)
LEASE = timedelta(seconds=30)
AGEING = timedelta(seconds=6)
TERM = timedelta(seconds=15)
SECOND = timedelta(seconds=1)
DAY = timedelta(days=1)
DEADLINE = 20.0  # seconds until a test gives up on a session
AT_ONCE = 10.0  # seconds: whoever waits for a lock would wait for ever
ERROR = '{"type": "ValueError", "message": "no such image"}'

_numbers = count(1)

BLOCKED = """
SELECT count(*)
FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND $1 = ANY (pg_blocking_pids(pid))
"""
PLACES = """
SELECT 'ready' FROM windlass.ready WHERE task_id = $1
UNION ALL
SELECT 'scheduled' FROM windlass.scheduled WHERE task_id = $1
UNION ALL
SELECT 'gate' FROM windlass.gate_entry WHERE task_id = $1 AND NOT is_open
UNION ALL
SELECT 'claim'
FROM windlass.claim c
JOIN windlass.claim_task b ON b.token = c.token
CROSS JOIN LATERAL unnest(b.task_ids, b.generations) AS k (task_id, generation)
JOIN windlass.task t ON t.id = k.task_id AND t.generation = k.generation
WHERE t.id = $1
UNION ALL
SELECT 'history' FROM windlass.history WHERE id = $1
UNION ALL
SELECT 'dead' FROM windlass.dead WHERE id = $1
"""


class _OneSession:
    """Stands in for a pool: whatever is asked runs in the one open transaction."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    async def acquire(self) -> asyncpg.Connection:
        return self._connection

    async def release(self, connection: asyncpg.Connection, *, timeout: float) -> None: ...  # noqa: ASYNC109

    async def close(self) -> None:
        """The connection belongs to the test."""


class Session:
    """A session with a transaction left open; the calls of its `store` stay uncommitted."""

    def __init__(
        self, connection: asyncpg.Connection, url: str, isolation: str | None = None
    ) -> None:
        self.connection = connection
        self.pid: int = connection.get_server_pid()
        self.store = PostgresStore(PostgresOptions(url=url))
        self.store._run.pool = _OneSession(connection)
        self._transaction = connection.transaction(
            isolation=None if isolation is None else isolation.replace(" ", "_")
        )

    async def begin(self) -> None:
        await self._transaction.start()

    async def commit(self) -> None:
        await self._transaction.commit()

    async def rollback(self) -> None:
        await self._transaction.rollback()

    async def xid(self) -> int:
        return int(await self.connection.fetchval("SELECT pg_current_xact_id()::text"))

    async def lock_task(self, task_id: UUID) -> None:
        """Hold a task's row as an application's own SQL might."""
        await self.connection.execute("SELECT FROM windlass.task WHERE id = $1 FOR UPDATE", task_id)


class Sessions:
    """Sessions beside the store's, and one that watches them all."""

    def __init__(self, url: str, sql_url: str, watcher: asyncpg.Connection) -> None:
        self.url = url  # of stores
        self.sql_url = sql_url
        self.watcher = watcher
        self._open: list[asyncpg.Connection] = []
        self._stores: list[PostgresStore] = []
        self._calls: list[asyncio.Task[Any]] = []

    async def connect(self) -> asyncpg.Connection:
        connection = await connect(Route(self.sql_url))
        self._open.append(connection)
        return connection

    async def begin(self, isolation: str | None = None) -> Session:
        session = Session(await self.connect(), self.sql_url, isolation)
        self._stores.append(session.store)
        await session.begin()
        return session

    async def open_store(self, **options: Any) -> PostgresStore:
        """Another store on the same database: a worker in another process."""
        store = PostgresStore(store_options(self.url, **options))
        await store.open()
        self._stores.append(store)
        return store

    async def blocked(self, call: Awaitable[T], *, by: Session | int) -> asyncio.Task[T]:
        """Make a call, and return once it waits for what the other session holds."""
        task = asyncio.ensure_future(call)
        assert isinstance(task, asyncio.Task)
        self._calls.append(task)
        holder = by if isinstance(by, int) else by.pid
        deadline = time.monotonic() + DEADLINE
        while not await self.watcher.fetchval(BLOCKED, holder):
            assert not task.done(), f"did not wait: {task}"
            assert time.monotonic() < deadline, "never waited"
            await asyncio.sleep(0.005)
        return task

    async def pause(self, table: str, operation: str, when: str = "true") -> Session:
        """Make whoever writes such a row wait until the session that is returned commits."""
        number = next(_numbers)
        await self.watcher.execute(
            f"""
            CREATE FUNCTION public.pause_{number}() RETURNS trigger
            LANGUAGE plpgsql SET lock_timeout = 0 AS $$
            BEGIN
                PERFORM pg_advisory_xact_lock_shared({number});
                RETURN coalesce(NEW, OLD);
            END $$;
            CREATE TRIGGER pause_{number} BEFORE {operation} ON windlass.{table}
            FOR EACH ROW WHEN ({when}) EXECUTE FUNCTION public.pause_{number}();
            """
        )
        session = await self.begin()
        await session.connection.execute("SELECT pg_advisory_xact_lock($1)", number)
        return session

    async def advance(self, delta: timedelta) -> None:
        """Move the store's clock to so long after the real one."""
        await self.watcher.execute(
            "CREATE OR REPLACE FUNCTION windlass.clock() RETURNS timestamptz "
            "LANGUAGE sql VOLATILE PARALLEL SAFE "
            f"AS 'SELECT clock_timestamp() + interval ''{delta.total_seconds()} seconds'''"
        )

    async def places(self, task_id: UUID) -> list[str]:
        return [row[0] for row in await self.watcher.fetch(PLACES, task_id)]

    async def close(self) -> None:
        for connection in self._open:
            connection.terminate()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        for store in self._stores:
            await store.close()
        await self.watcher.close()


def new_task(**options: Any) -> NewTask:
    task_id = UUID(int=1_700_000_000_000 << 80 | 7 << 76 | 2 << 62 | next(_numbers))
    asked: dict[str, Any] = {"id": task_id, "type": "resize", "payload": "{}"}
    return NewTask(**(asked | options))


async def add(store: PostgresStore, number: int = 1, **options: Any) -> list[UUID]:
    tasks = [new_task(**options) for _ in range(number)]
    return [answer.id for answer in await store.enqueue(tasks)]


def request(
    limit: int = 10, worker: UUID = WORKER, lease: timedelta = LEASE, of: str = "resize"
) -> ClaimRequest:
    return ClaimRequest(worker, (of,), limit, lease, AGEING)


async def claim(store: PostgresStore, **options: Any) -> Claim:
    answer = await store.claim(request(**options))
    assert answer.claim is not None, "nothing was granted"
    return answer.claim


async def granted(store: PostgresStore, **options: Any) -> list[UUID]:
    answer = await store.claim(request(**options))
    return [task.id for task in answer.claim.tasks] if answer.claim else []


def settlements(claim: Claim, outcome: Outcome, **details: Any) -> list[Settlement]:
    if outcome in {Outcome.RETRIED, Outcome.FAILED, Outcome.DEAD}:
        details = {"error": ERROR} | details
    return [
        Settlement(claim.token, task.id, task.generation, outcome, **details)
        for task in claim.tasks
    ]


async def bury(store: PostgresStore, outcome: Outcome = Outcome.DEAD) -> UUID:
    (task_id,) = await add(store)
    assert await store.settle(settlements(await claim(store), outcome)) == [Answer.APPLIED]
    return task_id


async def lead(store: PostgresStore, candidate: UUID = WORKER) -> Leadership:
    won = await store.lead(candidate, current=None, term=TERM)
    assert won is not None
    return won


def worker_info(worker_id: UUID = WORKER) -> WorkerInfo:
    return WorkerInfo(worker_id, "host", 1, "0.1", 10, ("resize",), None)


async def look_behind_twice(store: PostgresStore) -> None:
    """What a worker does every five seconds: a row seen twice was let go."""
    for _ in range(2):
        await store._look_behind_once(store._cursors[False])
