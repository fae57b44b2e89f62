"""Every place where a statement can wait for a lock, tried with sessions that really hold it."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any, TypeVar
from uuid import UUID

import asyncpg
import pytest

from windlass.model.errors import (
    IdempotencyConflict,
    LeaseLost,
    NotLeader,
    StoreBusy,
    WrongState,
)
from windlass.model.task import (
    Answer,
    CancelAnswer,
    Change,
    Claim,
    ClaimRequest,
    Enqueued,
    Fence,
    Leadership,
    NewTask,
    Outcome,
    Pulse,
    Rescued,
    Settlement,
    Started,
    TaskFilter,
    TaskState,
    TypeDefaults,
    WorkerInfo,
)
from windlass.store import port
from windlass.store.postgres import history
from windlass.store.postgres import store as store_module
from windlass.store.postgres.cursors import Key
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
        self.fetch = connection.fetch
        self.fetchval = connection.fetchval
        self.execute = connection.execute

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[asyncpg.Connection]:
        yield self._connection

    async def close(self) -> None:
        """The connection belongs to the test."""


class Session:
    """A session with a transaction left open; the calls of its `store` stay uncommitted."""

    def __init__(self, connection: asyncpg.Connection, url: str) -> None:
        self.connection = connection
        self.pid: int = connection.get_server_pid()
        self.store = PostgresStore(PostgresOptions(url=url))
        self.store._run.pool = _OneSession(connection)
        self._transaction = connection.transaction()

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

    def __init__(self, url: str, watcher: asyncpg.Connection) -> None:
        self.url = url
        self.watcher = watcher
        self._open: list[asyncpg.Connection] = []
        self._stores: list[PostgresStore] = []
        self._calls: list[asyncio.Task[Any]] = []

    async def connect(self) -> asyncpg.Connection:
        connection = await asyncpg.connect(self.url)
        self._open.append(connection)
        return connection

    async def begin(self) -> Session:
        session = Session(await self.connect(), self.url)
        self._stores.append(session.store)
        await session.begin()
        return session

    async def open_store(self, **options: Any) -> PostgresStore:
        """Another store on the same database: a worker in another process."""
        store = PostgresStore(PostgresOptions(url=self.url, **options))
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
            CREATE FUNCTION public.pause_{number}() RETURNS trigger LANGUAGE plpgsql AS $$
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


@pytest.fixture
async def sessions(postgres_store: PostgresStore, database_url: str) -> AsyncIterator[Sessions]:
    # A session in the middle of a transaction could not make a missing place and try again.
    await postgres_store._history.prepare()
    sessions = Sessions(database_url, await asyncpg.connect(database_url))
    yield sessions
    await sessions.close()


@pytest.fixture
def store(postgres_store: PostgresStore) -> PostgresStore:
    return postgres_store


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


# Settle against rescue


async def test_a_rescue_leaves_a_claim_whose_settlement_is_under_way(
    store: PostgresStore, sessions: Sessions
) -> None:
    done, left = await add(store, 2)
    held = await claim(store)
    settling = await sessions.begin()
    completed = settlements(held, Outcome.COMPLETED)[:1]
    assert await settling.store.settle(completed) == [Answer.APPLIED]
    await sessions.advance(LEASE + SECOND)

    async with asyncio.timeout(AT_ONCE):
        meanwhile = await store.rescue(100)
    await settling.commit()
    afterwards = await store.rescue(100)

    assert meanwhile == Rescued()
    assert afterwards == Rescued(claims=1, returned=1)
    assert await sessions.places(done) == ["history"]
    assert await sessions.places(left) == ["ready"]


async def test_a_rescue_leaves_a_claim_whose_settlement_waits_for_somebody(
    store: PostgresStore, sessions: Sessions
) -> None:
    done, kept, left = await add(store, 3)
    held = await claim(store)
    user = await sessions.begin()
    await user.lock_task(kept)
    settling = await sessions.blocked(
        store.settle(settlements(held, Outcome.COMPLETED)[:2]), by=user
    )
    await sessions.advance(LEASE + SECOND)

    async with asyncio.timeout(AT_ONCE):
        meanwhile = await store.rescue(100)
    await user.commit()

    assert meanwhile == Rescued()
    assert await settling == [Answer.APPLIED, Answer.APPLIED]
    assert await store.rescue(100) == Rescued(claims=1, returned=1)
    assert [await sessions.places(task_id) for task_id in (done, kept, left)] == [
        ["history"],
        ["history"],
        ["ready"],
    ]


async def test_a_settlement_that_waits_for_a_rescue_finds_its_lease_lost(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    held = await claim(store)
    await sessions.advance(LEASE + SECOND)
    rescuing = await sessions.begin()
    assert await rescuing.store.rescue(100) == Rescued(claims=1, returned=1)

    settling = await sessions.blocked(
        store.settle(settlements(held, Outcome.COMPLETED)), by=rescuing
    )
    await rescuing.commit()

    assert await settling == [Answer.LOST]
    assert await sessions.places(task_id) == ["ready"]
    assert (await store.get(task_id)).generation == 2


async def test_a_settlement_that_waits_for_a_rescue_that_is_undone_is_applied(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    held = await claim(store)
    await sessions.advance(LEASE + SECOND)
    rescuing = await sessions.begin()
    await rescuing.store.rescue(100)

    settling = await sessions.blocked(
        store.settle(settlements(held, Outcome.COMPLETED)), by=rescuing
    )
    await rescuing.rollback()

    assert await settling == [Answer.APPLIED]
    assert await sessions.places(task_id) == ["history"]


async def test_a_claim_extended_while_the_rescue_was_on_its_way_is_kept(
    store: PostgresStore, sessions: Sessions
) -> None:
    # The rescue reads which claims have expired, then locks them a few at a time: the last of
    # these is extended between the two.
    await add(store, 12)
    claims = [await claim(store, limit=1) for _ in range(12)]
    beating = await sessions.begin()
    pulse = Pulse(WORKER, [claims[-1].token], timedelta(hours=1), 0, False)
    assert (await beating.store.pulse(pulse)).kept == {claims[-1].token}
    await sessions.advance(LEASE + SECOND)
    first = claims[0].tasks[0].id
    pause = await sessions.pause("task", "UPDATE", f"OLD.id = '{first}'")

    rescuing = await sessions.blocked(store.rescue(100), by=pause)
    await beating.commit()
    await pause.commit()

    assert await rescuing == Rescued(claims=11, returned=11)
    assert await sessions.places(claims[-1].tasks[0].id) == ["claim"]
    assert await store.settle(settlements(claims[-1], Outcome.COMPLETED)) == [Answer.APPLIED]


async def test_a_rescue_does_not_wait_for_a_task_that_somebody_holds(
    store: PostgresStore, sessions: Sessions
) -> None:
    (kept,) = await add(store)
    await claim(store)
    (free,) = await add(store)
    await claim(store)
    await sessions.advance(LEASE + SECOND)
    user = await sessions.begin()
    await user.lock_task(kept)

    async with asyncio.timeout(AT_ONCE):
        await store.rescue(100)

    assert await sessions.places(free) == ["ready"]
    await user.rollback()
    await store.rescue(100)
    assert await sessions.places(kept) == ["ready"]


@pytest.mark.parametrize("claimed_again", [False, True])
async def test_a_rescue_of_a_half_settled_batch_leaves_the_task_that_came_back_to_its_next_owner(
    store: PostgresStore, sessions: Sessions, claimed_again: bool
) -> None:
    retried, left = await add(store, 2)
    first = await claim(store)
    assert await store.settle(settlements(first, Outcome.RETRIED)[:1]) == [Answer.APPLIED]
    if claimed_again:
        next_claim = await claim(store, worker=OTHER_WORKER, lease=10 * LEASE)
        assert [task.id for task in next_claim.tasks] == [retried]
    await sessions.advance(LEASE + SECOND)

    rescued = await store.rescue(100)

    assert rescued == Rescued(claims=1, returned=1)
    assert await sessions.places(left) == ["ready"]
    record = await store.get(retried)
    assert (record.generation, record.attempts) == (2, 1)
    if claimed_again:
        assert await sessions.places(retried) == ["claim"]
        answers = await store.settle(settlements(next_claim, Outcome.COMPLETED))
        assert answers == [Answer.APPLIED]
    else:
        assert await sessions.places(retried) == ["ready"]


async def test_a_rescue_keeps_away_from_a_task_that_is_being_reported_as_running(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store)
    held = await claim(store)
    (task,) = held.tasks
    reporting = await sessions.begin()
    assert not await reporting.store.start([Started(held.token, task.id, task.generation, 0.0)])
    await sessions.advance(LEASE + SECOND)

    async with asyncio.timeout(AT_ONCE):
        assert await store.rescue(100) == Rescued()
    await reporting.commit()
    assert await store.rescue(100) == Rescued(claims=1, returned=1, lost_attempts=1)


async def test_a_report_of_running_that_waits_for_a_rescue_is_told_of_the_loss(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store)
    held = await claim(store)
    (task,) = held.tasks
    await sessions.advance(LEASE + SECOND)
    rescuing = await sessions.begin()
    await rescuing.store.rescue(100)

    started = [Started(held.token, task.id, task.generation, 0.0)]
    reporting = await sessions.blocked(store.start(started), by=rescuing)
    await rescuing.commit()

    assert await reporting == {task.id}
    assert (await store.get(UUID(str(task.id)))).status is TaskState.PENDING


async def test_a_report_of_running_that_is_overtaken_by_the_end_leaves_nothing_behind(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store, 2)
    held = await claim(store)
    task, _ = held.tasks
    reporting = await sessions.begin()
    await reporting.store.start([Started(held.token, task.id, task.generation, 0.0)])

    ended = await store.settle(settlements(held, Outcome.COMPLETED, reported=True)[:1])
    await reporting.commit()
    await store.settle(settlements(held, Outcome.COMPLETED)[1:])
    await store.tidy(leadership=await lead(store))

    assert ended == [Answer.APPLIED]
    assert await sessions.watcher.fetchval("SELECT count(*) FROM windlass.running") == 0


async def test_a_child_enqueued_under_a_fence_keeps_the_rescue_away_until_it_is_committed(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store)
    held = await claim(store)
    (task,) = held.tasks
    handler = await sessions.begin()
    fence = Fence(held.token, task.id, task.generation)
    (child,) = await handler.store.enqueue([new_task(type="child")], fence=fence)
    await sessions.advance(LEASE + SECOND)

    async with asyncio.timeout(AT_ONCE):
        assert await store.rescue(100) == Rescued()
    await handler.commit()
    assert await store.rescue(100) == Rescued(claims=1, returned=1)
    assert await granted(store, of="child") == [child.id]


async def test_a_settlement_does_not_wait_for_a_child_that_is_being_enqueued(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    held = await claim(store)
    handler = await sessions.begin()
    fence = Fence(held.token, task_id, 1)
    (child,) = await handler.store.enqueue([new_task(type="child")], fence=fence)

    async with asyncio.timeout(AT_ONCE):
        assert await store.settle(settlements(held, Outcome.COMPLETED)) == [Answer.APPLIED]
    await handler.commit()

    assert await granted(store, of="child") == [child.id]
    # The claim could not be removed while the child's transaction held it: a sweep does.
    await sessions.advance(LEASE + SECOND)
    rescued = await store.rescue(100)
    assert (rescued.lost_attempts, rescued.dead, rescued.cancelled) == (0, 0, 0)
    assert await sessions.places(task_id) == ["history"]
    gone = "SELECT count(*) FROM windlass.claim WHERE token = $1"
    assert await sessions.watcher.fetchval(gone, held.token) == 0


async def test_a_child_whose_fence_waits_for_a_rescue_is_refused(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store)
    held = await claim(store)
    (task,) = held.tasks
    await sessions.advance(LEASE + SECOND)
    rescuing = await sessions.begin()
    await rescuing.store.rescue(100)

    fence = Fence(held.token, task.id, task.generation)
    enqueueing = await sessions.blocked(
        store.enqueue([new_task(type="child")], fence=fence), by=rescuing
    )
    await rescuing.commit()

    with pytest.raises(LeaseLost):
        await enqueueing
    assert await granted(store, of="child") == []


# Settle against settle and retry


async def test_a_repeated_settlement_does_not_hit_the_next_owner(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store, 2)
    first = await claim(store)
    retried = settlements(first, Outcome.RETRIED)[:1]
    assert await store.settle(retried) == [Answer.APPLIED]
    second = await claim(store, worker=OTHER_WORKER)
    task_id = second.tasks[0].id
    assert task_id == first.tasks[0].id

    completed = settlements(first, Outcome.COMPLETED)[:1]
    dead = settlements(first, Outcome.DEAD)[:1]
    repeated = [await store.settle(again) for again in (retried, completed, dead)]

    # The token of the claim is still there for its other task: only the generation tells.
    assert repeated == [[Answer.ALREADY]] * 3
    assert await sessions.places(task_id) == ["claim"]
    assert (await store.get(task_id)).generation == 2
    assert await store.settle(settlements(second, Outcome.COMPLETED)) == [Answer.APPLIED]
    assert await store.settle(retried) == [Answer.LOST]
    assert await sessions.places(task_id) == ["history"]


async def test_a_settlement_that_waits_for_the_same_one_changes_nothing(
    store: PostgresStore, sessions: Sessions
) -> None:
    retried, _ = await add(store, 2)
    held = await claim(store)
    settling = await sessions.begin()
    once = settlements(held, Outcome.RETRIED)[:1]
    assert await settling.store.settle(once) == [Answer.APPLIED]

    repeating = await sessions.blocked(store.settle(once), by=settling)
    await settling.commit()

    assert await repeating == [Answer.ALREADY]
    assert await sessions.places(retried) == ["ready"]
    assert (await store.get(retried)).attempts == 1


async def test_a_settlement_repeated_while_the_first_empties_its_claim_does_not_deadlock(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    once = settlements(await claim(store), Outcome.COMPLETED)
    pause = await sessions.pause("history", "INSERT")
    first = await sessions.blocked(store.settle(once), by=pause)
    first_pid = await sessions.watcher.fetchval(
        "SELECT pid FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid))", pause.pid
    )
    second = await sessions.blocked(store.settle(once), by=first_pid)

    await pause.commit()
    answers = list(await asyncio.gather(first, second, return_exceptions=True))

    assert answers == [[Answer.APPLIED], [Answer.ALREADY]]
    assert await sessions.places(task_id) == ["history"]


async def test_settlements_of_one_claim_count_it_down_together(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store, 3)
    first, second, third = settlements(held := await claim(store), Outcome.COMPLETED)
    settling = await sessions.begin()
    assert await settling.store.settle([first]) == [Answer.APPLIED]

    other = await sessions.blocked(store.settle([second]), by=settling)
    await settling.commit()
    assert await other == [Answer.APPLIED]

    remaining = "SELECT remaining FROM windlass.claim WHERE token = $1"
    assert await sessions.watcher.fetchval(remaining, held.token) == 1
    assert await store.settle([third]) == [Answer.APPLIED]
    assert await sessions.watcher.fetchval(remaining, held.token) is None
    assert await sessions.watcher.fetchval("SELECT count(*) FROM windlass.claim_task") == 0


async def test_a_settlement_that_may_not_wait_any_longer_does_nothing_by_halves(
    store: PostgresStore, sessions: Sessions
) -> None:
    hasty = await sessions.open_store(patience=timedelta(milliseconds=100))
    free, kept = await add(store, 2)
    held = await claim(store)
    both = settlements(held, Outcome.COMPLETED)
    user = await sessions.begin()
    await user.lock_task(kept)

    with pytest.raises(StoreBusy):
        await hasty.settle(both)

    assert await sessions.places(free) == ["claim"]
    assert await sessions.places(kept) == ["claim"]
    assert await sessions.watcher.fetchval("SELECT remaining FROM windlass.claim") == 2
    assert await hasty.settle(both[:1]) == [Answer.APPLIED]
    await user.commit()
    assert await hasty.settle(both) == [Answer.ALREADY, Answer.APPLIED]
    assert await sessions.watcher.fetchval("SELECT count(*) FROM windlass.claim") == 0


# Pulse


async def test_a_pulse_goes_on_while_a_settlement_waits(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    held = await claim(store)
    user = await sessions.begin()
    await user.lock_task(task_id)
    settling = await sessions.blocked(store.settle(settlements(held, Outcome.COMPLETED)), by=user)
    expiry = "SELECT expires_at - claimed_at FROM windlass.claim"
    assert await sessions.watcher.fetchval(expiry) == LEASE

    async with asyncio.timeout(AT_ONCE):
        answer = await store.pulse(Pulse(WORKER, [held.token], 10 * LEASE, 1, False))

    assert answer.kept == {held.token}
    assert await sessions.watcher.fetchval(expiry) >= 10 * LEASE
    assert not settling.done()
    await user.commit()
    assert await settling == [Answer.APPLIED]


async def test_a_pulse_that_waited_gives_the_whole_lease_from_after_the_wait(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store)
    held = await claim(store)
    holder = await sessions.begin()
    await holder.connection.execute("SELECT FROM windlass.claim FOR NO KEY UPDATE")

    pulse = Pulse(WORKER, [held.token], LEASE, 0, False)
    beating = await sessions.blocked(store.pulse(pulse), by=holder)
    released_at = await sessions.watcher.fetchval("SELECT clock_timestamp()")
    await holder.commit()

    assert (await beating).kept == {held.token}
    expires_at = await sessions.watcher.fetchval("SELECT expires_at FROM windlass.claim")
    assert expires_at >= released_at + LEASE


async def test_a_pulse_that_waits_for_a_rescue_keeps_nothing(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store, 2)
    lost = await claim(store, limit=1)
    kept = await claim(store, limit=1, lease=10 * LEASE)
    rescuing = await sessions.begin()
    await sessions.advance(LEASE + SECOND)
    assert await rescuing.store.rescue(100) == Rescued(claims=1, returned=1)
    await sessions.advance(timedelta(0))  # the pulse finds the claim unexpired when it looks

    pulse = Pulse(WORKER, [lost.token, kept.token], LEASE, 0, False)
    beating = await sessions.blocked(store.pulse(pulse), by=rescuing)
    await rescuing.commit()

    assert (await beating).kept == {kept.token}


@pytest.mark.parametrize("method", ["pulse", "settle", "start"])
async def test_claims_are_locked_in_sorted_order(
    store: PostgresStore, sessions: Sessions, method: str
) -> None:
    await add(store, 2)
    claims = [await claim(store, limit=1), await claim(store, limit=1)]
    claims.sort(key=lambda held: held.token, reverse=True)
    last, first = claims
    holder = await sessions.begin()
    await holder.connection.execute(
        "SELECT FROM windlass.claim WHERE token = $1 FOR UPDATE", first.token
    )
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "pulse": lambda: store.pulse(Pulse(WORKER, [c.token for c in claims], LEASE, 0, False)),
        "settle": lambda: store.settle(
            [one for held in claims for one in settlements(held, Outcome.COMPLETED)]
        ),
        "start": lambda: store.start(
            [Started(held.token, held.tasks[0].id, 1, 0.0) for held in claims]
        ),
    }

    waiting = await sessions.blocked(calls[method](), by=holder)

    # Whoever waits for the first one must not hold the last one yet.
    await sessions.watcher.execute(
        "SELECT FROM windlass.claim WHERE token = $1 FOR UPDATE NOWAIT", last.token
    )
    await holder.commit()
    await waiting


async def test_a_settlement_counts_its_claims_down_in_sorted_order(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store, 4)
    claims = [await claim(store, limit=2), await claim(store, limit=2)]
    first, last = sorted(claims, key=lambda held: held.token)
    beating = await sessions.begin()
    await beating.store.pulse(Pulse(WORKER, [first.token], LEASE, 0, False))

    one_each = [settlements(held, Outcome.COMPLETED)[0] for held in (last, first)]
    settling = await sessions.blocked(store.settle(one_each), by=beating)

    await sessions.watcher.execute(
        "SELECT FROM windlass.claim WHERE token = $1 FOR NO KEY UPDATE NOWAIT", last.token
    )
    await beating.commit()
    assert await settling == [Answer.APPLIED, Answer.APPLIED]


async def test_pulses_and_settlements_over_two_claims_never_deadlock(
    store: PostgresStore, sessions: Sessions
) -> None:
    rounds = 300
    beside = await sessions.open_store(pool_size=1)
    await add(store, 2 * rounds)
    claims = [await claim(store, limit=rounds), await claim(store, limit=rounds)]
    tokens = [held.token for held in claims]
    ends = [settlements(held, Outcome.COMPLETED) for held in claims]

    async def beat_until(done: asyncio.Event) -> int:
        beats = 0
        while not done.is_set():
            tokens.reverse()
            await beside.pulse(Pulse(WORKER, list(tokens), LEASE, 0, False))
            beats += 1
        return beats

    async def settle_all(done: asyncio.Event) -> None:
        for turn in range(rounds):
            ends.reverse()
            assert await store.settle([end[turn] for end in ends]) == [Answer.APPLIED] * 2
        done.set()

    done = asyncio.Event()
    async with asyncio.TaskGroup() as both:
        beating = both.create_task(beat_until(done))
        both.create_task(settle_all(done))

    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    assert await sessions.watcher.fetchval(deadlocks) == 0
    assert beating.result() > rounds / 10


# Claim against cancel and change


@pytest.mark.parametrize("undone", [False, True])
async def test_a_claim_skips_a_task_that_is_being_cancelled(
    store: PostgresStore, sessions: Sessions, undone: bool
) -> None:
    task_id, other = await add(store, 2)
    cancelling = await sessions.begin()
    assert await cancelling.store.cancel(task_id, "no need") is CancelAnswer.CANCELLED

    async with asyncio.timeout(AT_ONCE):
        assert await granted(store) == [other]
    await (cancelling.rollback() if undone else cancelling.commit())
    await look_behind_twice(store)

    assert await granted(store) == ([task_id] if undone else [])
    assert await sessions.places(task_id) == (["claim"] if undone else ["history"])


async def test_a_cancel_that_waits_for_a_claim_ends_as_a_request(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    claiming = await sessions.begin()
    held = await claim(claiming.store)

    cancelling = await sessions.blocked(store.cancel(task_id, "no need"), by=claiming)
    await claiming.commit()

    assert await cancelling is CancelAnswer.REQUESTED
    assert await store.requested_cancellations([task_id]) == {task_id: "no need"}
    assert await sessions.places(task_id) == ["claim"]
    assert await store.settle(settlements(held, Outcome.RELEASED)) == [Answer.APPLIED]
    assert await sessions.places(task_id) == ["history"]


async def test_a_cancel_that_waits_for_a_claim_that_is_undone_cancels(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    claiming = await sessions.begin()
    await claim(claiming.store)

    cancelling = await sessions.blocked(store.cancel(task_id, "no need"), by=claiming)
    await claiming.rollback()

    assert await cancelling is CancelAnswer.CANCELLED
    assert await sessions.places(task_id) == ["history"]
    assert await granted(store) == []


async def test_a_claim_skips_a_task_that_is_being_changed_and_finds_it_where_it_went(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    changing = await sessions.begin()
    await changing.store.change(task_id, Change(priority=50, queue="fast"))

    async with asyncio.timeout(AT_ONCE):
        assert await granted(store) == []
    await changing.commit()

    assert await granted(store) == [task_id]


async def test_a_change_that_waits_for_a_claim_is_refused(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    claiming = await sessions.begin()
    await claim(claiming.store)

    changing = await sessions.blocked(store.change(task_id, Change(priority=50)), by=claiming)
    await claiming.commit()

    with pytest.raises(WrongState):
        await changing
    assert (await store.get(task_id)).priority == 10


async def test_a_cancel_waits_for_no_settlement_of_the_claimed_task(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    held = await claim(store)
    settling = await sessions.begin()
    await settling.store.settle(settlements(held, Outcome.RETRIED))

    async with asyncio.timeout(AT_ONCE):
        assert await store.cancel(task_id, "no need") is CancelAnswer.REQUESTED
    await settling.commit()
    await store.tidy(leadership=await lead(store))

    # It came back although its cancellation was asked for: the leader finishes the request.
    assert await sessions.places(task_id) == ["history"]


@pytest.mark.parametrize("undone", [False, True])
@pytest.mark.parametrize(
    ("before", "change"),
    [
        ({}, Change(delay=3600.0)),
        ({"delay": 3600.0}, Change(delay=0.0)),
        ({}, Change(priority=50)),
    ],
)
async def test_a_cancel_that_waits_for_a_change_finds_the_task_where_it_went(
    store: PostgresStore,
    sessions: Sessions,
    before: dict[str, Any],
    change: Change,
    undone: bool,
) -> None:
    (task_id,) = await add(store, **before)
    changing = await sessions.begin()
    await changing.store.change(task_id, change)

    cancelling = await sessions.blocked(store.cancel(task_id, "no need"), by=changing)
    await (changing.rollback() if undone else changing.commit())

    assert await cancelling is CancelAnswer.CANCELLED
    assert await sessions.places(task_id) == ["history"]


@pytest.mark.parametrize("undone", [False, True])
async def test_of_two_cancels_the_second_waits_and_answers_by_what_became_of_the_first(
    store: PostgresStore, sessions: Sessions, undone: bool
) -> None:
    (task_id,) = await add(store)
    first = await sessions.begin()
    await first.store.cancel(task_id, "first")

    second = await sessions.blocked(store.cancel(task_id, "second"), by=first)
    await (first.rollback() if undone else first.commit())

    assert await second is (CancelAnswer.CANCELLED if undone else CancelAnswer.ENDED)
    assert (await store.get(task_id)).last_error == ("second" if undone else "first")


# Promotion against cancel and change


@pytest.mark.parametrize("verb", ["cancel", "change"])
async def test_a_promotion_skips_a_task_that_somebody_is_taking(
    store: PostgresStore, sessions: Sessions, verb: str
) -> None:
    taken, due = await add(store, 2, delay=60.0)
    await sessions.advance(timedelta(seconds=61))
    taking = await sessions.begin()
    await take(taking.store, taken, verb)

    async with asyncio.timeout(AT_ONCE):
        promoted = await store.promote(100)
    await taking.rollback()

    assert promoted == 1
    assert await sessions.places(due) == ["ready"]
    assert await sessions.places(taken) == ["scheduled"]
    assert await store.promote(100) == 1
    assert await sessions.places(taken) == ["ready"]


@pytest.mark.parametrize("undone", [False, True])
@pytest.mark.parametrize("verb", ["cancel", "change"])
async def test_whoever_waits_for_a_promotion_finds_the_task_where_it_is_then(
    store: PostgresStore, sessions: Sessions, verb: str, undone: bool
) -> None:
    (task_id,) = await add(store, delay=60.0)
    await sessions.advance(timedelta(seconds=61))
    promoting = await sessions.begin()
    assert await promoting.store.promote(100) == 1

    taking = await sessions.blocked(take(store, task_id, verb), by=promoting)
    await (promoting.rollback() if undone else promoting.commit())
    await taking

    if verb == "cancel":
        assert await sessions.places(task_id) == ["history"]
        assert (await store.get(task_id)).status is TaskState.CANCELLED
    else:
        assert await sessions.places(task_id) == ["scheduled"]
        assert (await store.get(task_id)).priority == 50


async def test_two_promotions_at_once_share_what_is_due(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store, 10, delay=60.0)
    await sessions.advance(timedelta(seconds=61))
    promoting = await sessions.begin()
    assert await promoting.store.promote(4) == 4

    async with asyncio.timeout(AT_ONCE):
        assert await store.promote(100) == 6
    await promoting.commit()

    assert len(await granted(store, limit=100)) == 10


async def take(store: PostgresStore, task_id: UUID, verb: str) -> None:
    if verb == "cancel":
        await store.cancel(task_id, "no need")
    else:
        await store.change(task_id, Change(priority=50, delay=3600.0))


# Twin enqueues


async def test_an_enqueue_waits_for_its_uncommitted_twin_and_answers_with_the_first(
    store: PostgresStore, sessions: Sessions
) -> None:
    producer = await sessions.begin()
    (first,) = await producer.store.enqueue([new_task(idempotency_key="k")])

    twin = await sessions.blocked(store.enqueue([new_task(idempotency_key="k")]), by=producer)
    await producer.commit()

    assert await twin == [Enqueued(first.id, created=False)]
    assert await granted(store) == [first.id]


async def test_an_enqueue_whose_twin_is_undone_creates_the_task(
    store: PostgresStore, sessions: Sessions
) -> None:
    producer = await sessions.begin()
    await producer.store.enqueue([new_task(idempotency_key="k")])
    second = new_task(idempotency_key="k")

    twin = await sessions.blocked(store.enqueue([second]), by=producer)
    await producer.rollback()

    assert await twin == [Enqueued(second.id, created=True)]
    assert await granted(store) == [second.id]


async def test_an_enqueue_whose_twin_has_another_payload_is_refused_as_a_whole(
    store: PostgresStore, sessions: Sessions
) -> None:
    producer = await sessions.begin()
    (first,) = await producer.store.enqueue([new_task(idempotency_key="k", payload='{"a": 1}')])

    other = new_task(idempotency_key="k", payload='{"a": 2}')
    twin = await sessions.blocked(store.enqueue([new_task(), other]), by=producer)
    await producer.commit()

    with pytest.raises(IdempotencyConflict):
        await twin
    assert await granted(store) == [first.id]


@pytest.mark.parametrize("key", [None, "k"])
async def test_an_enqueue_repeated_while_the_first_is_under_way_answers_with_it(
    store: PostgresStore, sessions: Sessions, key: str | None
) -> None:
    task = new_task(idempotency_key=key)
    producer = await sessions.begin()
    assert await producer.store.enqueue([task]) == [Enqueued(task.id, created=True)]

    repeating = await sessions.blocked(store.enqueue([task], repeated=True), by=producer)
    await producer.commit()

    assert [answer.id for answer in await repeating] == [task.id]
    assert await granted(store) == [task.id]


@pytest.mark.parametrize("number", [1, store_module.ENQUEUE_CHUNK])
async def test_idempotency_keys_are_taken_in_sorted_order(
    store: PostgresStore, sessions: Sessions, number: int
) -> None:
    producer = await sessions.begin()
    await producer.store.enqueue([new_task(idempotency_key="a")])

    tasks = [new_task(idempotency_key=f"b{place}") for place in range(number)]
    tasks.append(new_task(idempotency_key="a"))
    waiting = await sessions.blocked(store.enqueue(tasks), by=producer)

    # Whoever waits for the first key must not hold the last one yet.
    async with asyncio.timeout(AT_ONCE):
        (answer,) = await store.enqueue([new_task(idempotency_key="b0")])
    assert answer.created
    await producer.rollback()
    answers = await waiting
    assert (answers[0].created, answers[-1].created) == (False, True)


@pytest.mark.parametrize("undone", [False, True])
async def test_an_enqueue_waits_for_the_retention_that_forgets_its_key(
    store: PostgresStore, sessions: Sessions, undone: bool
) -> None:
    first = new_task(idempotency_key="k")
    await store.enqueue([first])
    assert await store.settle(settlements(await claim(store), Outcome.DEAD)) == [Answer.APPLIED]
    await sessions.advance(60 * DAY)
    retaining = await sessions.begin()
    discard = store._sql.statement("discard_old_dead")
    assert await retaining.connection.fetchval(discard, 100) == 1

    second = new_task(idempotency_key="k")
    waiting = await sessions.blocked(store.enqueue([second]), by=retaining)
    await (retaining.rollback() if undone else retaining.commit())

    expected = Enqueued(first.id, created=False) if undone else Enqueued(second.id, created=True)
    assert await waiting == [expected]


async def test_an_enqueue_into_a_new_lane_waits_for_nobody(
    store: PostgresStore, sessions: Sessions
) -> None:
    producer = await sessions.begin()
    first = await add(producer.store)

    async with asyncio.timeout(AT_ONCE):
        second = await add(store)
        assert await granted(store) == second
    await producer.commit()

    lanes = "SELECT count(*) FROM windlass.lane"
    assert await sessions.watcher.fetchval(lanes) == 2  # neither saw the other's
    third = await add(store)
    assert await granted(store) == first + third
    assert await store.tidy(leadership=await lead(store)) == 1
    assert await sessions.watcher.fetchval(lanes) == 1
    fourth = await add(store)
    assert await granted(store) == fourth


# The lower bound of a lane


async def look_behind_twice(store: PostgresStore) -> None:
    """What a worker does every five seconds: a row seen twice was let go."""
    for _ in range(2):
        await store._look_behind_once(store._cursors[False])


def bound(store: PostgresStore) -> Key:
    """Where the next claim in the only lane starts."""
    bounds, _ = store._cursors[False].begin()
    (key,) = bounds.values()
    return key


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The monotonic clock by which a store waits for an open transaction."""
    moving = SimpleNamespace(now=100.0)
    monkeypatch.setattr(store_module, "time", SimpleNamespace(monotonic=lambda: moving.now))
    return moving


async def test_a_task_whose_transaction_commits_late_is_claimed(
    store: PostgresStore, sessions: Sessions, clock: SimpleNamespace
) -> None:
    slow = await sessions.begin()
    (late,) = await add(slow.store)
    early = await add(store, 20)
    taken = await granted(store, limit=8)
    taken += await granted(store, limit=8)
    assert taken == early[:16]
    assert bound(store) < (await slow.xid(), 0)

    await slow.commit()

    assert await granted(store) == [late, *early[16:]]


async def test_a_task_whose_transaction_commits_during_a_claim_is_claimed_by_the_next(
    store: PostgresStore, sessions: Sessions
) -> None:
    slow = await sessions.begin()
    (late,) = await add(slow.store)
    early = await add(store, 3)
    pause = await sessions.pause("claim", "INSERT")

    # The lanes have been read, and the claim is not done.
    claiming = await sessions.blocked(granted(store), by=pause)
    await slow.commit()
    await pause.commit()

    assert await claiming == early
    assert await granted(store) == [late]


async def test_claims_pass_an_open_writer_and_come_back_for_its_tasks(
    store: PostgresStore, sessions: Sessions, clock: SimpleNamespace
) -> None:
    await sessions.watcher.execute("CREATE TABLE public.orders (id integer)")
    writer = await sessions.begin()
    await writer.connection.execute("INSERT INTO public.orders VALUES (1)")
    late = await add(writer.store, 3)
    xid = await writer.xid()
    early = await add(store, 40)
    taken = await granted(store, limit=10)
    assert bound(store) < (xid, 0)

    clock.now += 1.1
    taken += await granted(store, limit=10)
    passed = bound(store)
    await writer.commit()
    for _ in range(4):
        taken += await granted(store, limit=10)

    assert passed > (xid, 0)
    assert sorted(taken) == sorted(early + late)
    assert await granted(store) == []
    assert xid not in store._cursors[False].begin()[1]  # it is not asked for any more


async def test_an_open_writer_holds_the_bound_for_no_longer_than_a_second(
    store: PostgresStore, sessions: Sessions, clock: SimpleNamespace
) -> None:
    await sessions.watcher.execute("CREATE TABLE public.orders (id integer)")
    writer = await sessions.begin()
    await writer.connection.execute("INSERT INTO public.orders VALUES (1)")
    xid = await writer.xid()
    bounds = []

    for _ in range(5):
        await add(store, 10)
        assert len(await granted(store, limit=10)) == 10
        bounds.append(bound(store))
        clock.now += 0.4

    assert [key > (xid, 0) for key in bounds] == [False, False, False, True, True]


async def test_an_open_writer_that_is_undone_leaves_nothing_to_ask_for(
    store: PostgresStore, sessions: Sessions, clock: SimpleNamespace
) -> None:
    writer = await sessions.begin()
    await add(writer.store, 3)
    xid = await writer.xid()
    early = await add(store, 30)
    taken = await granted(store, limit=10)
    clock.now += 1.1
    taken += await granted(store, limit=10)

    await writer.rollback()
    for _ in range(3):
        taken += await granted(store, limit=10)

    assert taken == early
    assert xid not in store._cursors[False].begin()[1]


async def test_tasks_of_two_lanes_and_several_open_writers_are_all_claimed_once(
    store: PostgresStore, sessions: Sessions, clock: SimpleNamespace
) -> None:
    writers = [await sessions.begin() for _ in range(3)]
    expected: list[UUID] = []
    taken: list[UUID] = []
    for turn in range(4):
        for writer in writers:
            expected += await add(writer.store, 2, priority=10 + 10 * (turn % 2))
        expected += await add(store, 7, priority=10 + 10 * (turn % 2))
        taken += await granted(store, limit=5)
        clock.now += 0.6
        if turn:
            await writers.pop(turn % len(writers)).commit()
    empty = 0
    while empty < 3:  # a claim finds that a writer has ended, the next one asks for its tasks
        more = await granted(store, limit=5)
        taken += more
        empty = 0 if more else empty + 1
        clock.now += 0.6

    assert sorted(taken) == sorted(expected)


@pytest.mark.parametrize("seen_while_held", [False, True])
async def test_tasks_of_a_claim_that_was_undone_are_claimed_in_the_end(
    store: PostgresStore, sessions: Sessions, clock: SimpleNamespace, seen_while_held: bool
) -> None:
    ids = await add(store, 10)
    claiming = await sessions.begin()
    assert len((await claim(claiming.store, limit=5)).tasks) == 5
    assert await granted(store) == ids[5:]
    clock.now += 1.1  # passes whatever other tests have open in other databases
    assert await granted(store) == []
    if seen_while_held:
        await look_behind_twice(store)
        assert await granted(store) == []

    await claiming.rollback()
    assert await granted(store) == []
    await look_behind_twice(store)

    assert await granted(store) == ids[:5]


async def test_a_worker_that_starts_reads_from_the_beginning(
    store: PostgresStore, sessions: Sessions
) -> None:
    ids = await add(store, 4)
    claiming = await sessions.begin()
    await claim(claiming.store, limit=2)
    assert await granted(store) == ids[2:]
    await claiming.rollback()

    other = await sessions.open_store()

    assert await granted(other) == ids[:2]


async def test_a_claim_whose_answer_was_lost_reads_from_the_beginning(
    store: PostgresStore, sessions: Sessions
) -> None:
    ids = await add(store, 4)
    claiming = await sessions.begin()
    await claim(claiming.store, limit=2)
    assert await granted(store) == ids[2:]
    await claiming.rollback()
    ids += await add(store)
    pause = await sessions.pause("claim", "INSERT")

    losing = await sessions.blocked(store.claim(request()), by=pause)
    losing.cancel()
    await asyncio.gather(losing, return_exceptions=True)
    await pause.commit()

    assert await granted(store) == [*ids[:2], ids[4]]


async def test_two_claims_at_once_share_a_lane_without_waiting(
    store: PostgresStore, sessions: Sessions
) -> None:
    ids = await add(store, 10)
    claiming = await sessions.begin()
    first = await claim(claiming.store, limit=4)

    async with asyncio.timeout(AT_ONCE):
        second = await granted(store, limit=10)
    await claiming.commit()

    assert [task.id for task in first.tasks] + second == ids


# Retry


@pytest.mark.parametrize("outcome", [Outcome.DEAD, Outcome.FAILED, Outcome.CANCELLED])
@pytest.mark.parametrize("undone", [False, True])
async def test_of_two_retries_one_wins(
    store: PostgresStore, sessions: Sessions, outcome: Outcome, undone: bool
) -> None:
    task_id = await bury(store, outcome)
    first = await sessions.begin()
    await first.store.retry(task_id)

    second = await sessions.blocked(store.retry(task_id), by=first)
    if undone:
        await first.rollback()
        await second
    else:
        await first.commit()
        with pytest.raises(WrongState):
            await second

    assert await sessions.places(task_id) == ["ready"]
    assert (await store.get(task_id)).generation == 2


async def test_a_discard_does_not_wait_for_a_retry(
    store: PostgresStore, sessions: Sessions
) -> None:
    task_id = await bury(store)
    await sessions.advance(60 * DAY)
    retrying = await sessions.begin()
    await retrying.store.retry(task_id)

    async with asyncio.timeout(AT_ONCE):
        retained = await store.retain(leadership=await lead(store))
    await retrying.commit()

    assert retained.dead == 0
    assert await sessions.places(task_id) == ["ready"]


# Workers


async def test_a_worker_whose_pulse_is_under_way_is_not_removed(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.register(worker_info(), lease=LEASE)
    await sessions.advance(10 * LEASE)
    leadership = await lead(store, OTHER_WORKER)
    beating = await sessions.begin()
    assert (await beating.store.pulse(Pulse(WORKER, [], LEASE, 0, False))).registered

    removing = await sessions.blocked(store.remove_dead_workers(leadership=leadership), by=beating)
    await beating.commit()

    assert await removing == []
    assert [worker.id for worker in await store.workers()] == [str(WORKER)]


async def test_a_pulse_that_waits_for_the_removal_of_its_worker_is_told_to_register(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.register(worker_info(), lease=LEASE)
    leaving = await sessions.begin()
    await leaving.store.deregister(WORKER)

    pulse = Pulse(WORKER, [], LEASE, 0, False)
    beating = await sessions.blocked(store.pulse(pulse), by=leaving)
    await leaving.commit()

    assert not (await beating).registered


async def test_types_are_registered_in_sorted_order(
    store: PostgresStore, sessions: Sessions
) -> None:
    first = await sessions.begin()
    await first.store.register_types([TypeDefaults("a")])

    both = [TypeDefaults("b", priority=20), TypeDefaults("a", priority=20)]
    waiting = await sessions.blocked(store.register_types(both), by=first)

    async with asyncio.timeout(AT_ONCE):
        await store.register_types([TypeDefaults("b", priority=30)])
    await first.commit()
    await waiting
    for name in ("a", "b"):
        known = await store.type_defaults(name)
        assert known is not None
        assert known.priority == 20


# Leadership


async def test_an_election_waits_for_the_leaders_write_and_deposes_it(
    store: PostgresStore, sessions: Sessions
) -> None:
    leadership = await lead(store, WORKER)
    due, later = await add(store, 1, delay=60.0), await add(store, 1, delay=90.0)
    await sessions.advance(timedelta(seconds=61))
    renewed = await store.lead(WORKER, current=leadership, term=TERM)
    assert renewed is not None
    leading = await sessions.begin()
    assert await leading.store.promote(100, leadership=renewed) == 1
    await sessions.advance(timedelta(seconds=91))

    electing = await sessions.blocked(store.lead(OTHER_WORKER, current=None, term=TERM), by=leading)
    await leading.commit()

    won = await electing
    assert won == Leadership(OTHER_WORKER, renewed.term + 1)
    with pytest.raises(NotLeader):
        await store.promote(100, leadership=renewed)
    assert await sessions.places(due[0]) == ["ready"]
    assert await sessions.places(later[0]) == ["scheduled"]


CHORES: dict[str, Callable[[PostgresStore, Leadership], Awaitable[Any]]] = {
    "promote": lambda store, shown: store.promote(100, leadership=shown),
    "rescue": lambda store, shown: store.rescue(100, leadership=shown),
    "remove_dead_workers": lambda store, shown: store.remove_dead_workers(leadership=shown),
    "tidy": lambda store, shown: store.tidy(leadership=shown),
    "prepare_history": lambda store, shown: store.prepare_history(leadership=shown),
    "retain": lambda store, shown: store.retain(leadership=shown),
}


@pytest.mark.parametrize("chore", CHORES)
async def test_a_leaders_write_that_waits_for_an_election_changes_nothing(
    store: PostgresStore, sessions: Sessions, chore: str
) -> None:
    await add(store)
    await claim(store)  # to be rescued
    await add(store, delay=1.0)  # to be promoted
    await store.register(worker_info(UUID(int=3)), lease=LEASE)  # to be removed
    await sessions.advance(20 * DAY)  # to be prepared and retained
    leadership = await lead(store, WORKER)
    electing = await sessions.begin()
    await electing.store.resign(leadership)
    assert await electing.store.lead(OTHER_WORKER, current=None, term=TERM) is not None
    before = await contents(sessions)

    writing = await sessions.blocked(CHORES[chore](store, leadership), by=electing)
    await electing.commit()

    with pytest.raises(NotLeader):
        await writing
    assert await contents(sessions) == before


async def contents(sessions: Sessions) -> list[int]:
    tables = ("claim", "scheduled", "ready", "worker", "lane", "history")
    counts = [f"(SELECT count(*) FROM windlass.{table})" for table in tables]
    counts.append("(SELECT count(*) FROM pg_inherits)")
    return list(await sessions.watcher.fetchrow(f"SELECT {', '.join(counts)}"))


@pytest.mark.parametrize("undone", [False, True])
async def test_of_two_candidates_one_is_elected(
    store: PostgresStore, sessions: Sessions, undone: bool
) -> None:
    first = await sessions.begin()
    won = await first.store.lead(WORKER, current=None, term=TERM)
    assert won is not None

    second = await sessions.blocked(store.lead(OTHER_WORKER, current=None, term=TERM), by=first)
    await (first.rollback() if undone else first.commit())

    assert await second == (Leadership(OTHER_WORKER, won.term) if undone else None)


async def test_leaders_writes_do_not_wait_for_each_other(
    store: PostgresStore, sessions: Sessions
) -> None:
    leadership = await lead(store)
    leading = await sessions.begin()
    await leading.store.promote(100, leadership=leadership)

    async with asyncio.timeout(AT_ONCE):
        await store.rescue(100, leadership=leadership)


# Users' transactions left open


class Scene:
    """Something for every method of the store to do."""

    def __init__(self, store: PostgresStore, leadership: Leadership) -> None:
        self.store = store
        self.leadership = leadership
        self.ids: list[UUID] = []
        self.claims: list[Claim] = []
        self.buried: list[UUID] = []

    @classmethod
    async def set(cls, store: PostgresStore, sessions: Sessions) -> "Scene":
        await add(store, retention=timedelta(0))
        await store.settle(settlements(await claim(store), Outcome.COMPLETED))
        await claim_some(store, 2)  # to be rescued
        await sessions.advance(3 * DAY)  # the partition of the completed one is over
        scene = cls(store, await lead(store))
        scene.buried = [await bury(store), await bury(store)]
        scene.claims = [await claim_some(store, 2), await claim_some(store, 2)]
        await add(store, 2, delay=0.001)
        scene.ids = await add(store, 4)
        await store.register(worker_info(), lease=LEASE)
        return scene

    def fence(self) -> Fence:
        (_, task), token = self.claims[1].tasks, self.claims[1].token
        return Fence(token, task.id, task.generation)

    async def listen(self) -> None:
        async with self.store.listen(lambda: None):
            pass


async def claim_some(store: PostgresStore, number: int) -> Claim:
    await add(store, number, type="some")
    return await claim(store, limit=number, of="some")


# In the order in which they are called.
CALLS: dict[str, Callable[[Scene], Awaitable[Any]]] = {
    "enqueue": lambda s: s.store.enqueue(
        [new_task(type="new", idempotency_key="k"), new_task(delay=5.0)], fence=s.fence()
    ),
    "type_defaults": lambda s: s.store.type_defaults("resize"),
    "register_types": lambda s: s.store.register_types([TypeDefaults("resize")]),
    "change": lambda s: s.store.change(s.ids[0], Change(priority=20, queue="other")),
    "cancel": lambda s: asyncio.gather(
        s.store.cancel(s.ids[1], "waiting"), s.store.cancel(s.claims[0].tasks[0].id, "claimed")
    ),
    "claim": lambda s: s.store.claim(request()),
    "start": lambda s: s.store.start(
        [Started(s.claims[0].token, task.id, task.generation, 0.0) for task in s.claims[0].tasks]
    ),
    "requested_cancellations": lambda s: s.store.requested_cancellations(s.ids),
    "register": lambda s: s.store.register(worker_info(OTHER_WORKER), lease=LEASE),
    "pulse": lambda s: s.store.pulse(Pulse(WORKER, [s.claims[0].token], LEASE, 1, True)),
    "set_idle": lambda s: s.store.set_idle(WORKER, idle=False),
    "settle": lambda s: s.store.settle(
        settlements(s.claims[0], Outcome.COMPLETED, reported=True)
        + settlements(s.claims[1], Outcome.RETRIED)
    ),
    "deregister": lambda s: s.store.deregister(WORKER),
    "retry": lambda s: s.store.retry(s.buried[0]),
    "pause": lambda s: s.store.pause("default"),
    "resume": lambda s: s.store.resume("default"),
    "get": lambda s: s.store.get(s.ids[0]),
    "ended": lambda s: s.store.ended(s.ids),
    "tasks": lambda s: s.store.tasks(TaskFilter()),
    "queues": lambda s: s.store.queues(),
    "workers": lambda s: s.store.workers(),
    "has_work": lambda s: s.store.has_work(["resize"], None),
    "lead": lambda s: s.store.lead(WORKER, current=s.leadership, term=TERM),
    "promote": lambda s: s.store.promote(100, leadership=s.leadership),
    "rescue": lambda s: s.store.rescue(100, leadership=s.leadership),
    "remove_dead_workers": lambda s: s.store.remove_dead_workers(leadership=s.leadership),
    "tidy": lambda s: s.store.tidy(leadership=s.leadership),
    "prepare_history": lambda s: s.store.prepare_history(leadership=s.leadership),
    "retain": lambda s: s.store.retain(leadership=s.leadership),
    "resign": lambda s: s.store.resign(s.leadership),
    "listen": lambda s: s.listen(),
}


def test_every_method_of_the_port_is_called_beside_a_users_transaction() -> None:
    protocols = [
        protocol
        for protocol in vars(port).values()
        if getattr(protocol, "_is_protocol", False) and protocol.__module__ == port.__name__
    ]
    methods = {name for protocol in protocols for name in vars(protocol) if name[0] != "_"}

    assert set(CALLS) == methods - {"open", "close", "beside"}


async def open_reader(sessions: Sessions) -> Session:
    """A report that has looked at everything and is not done."""
    reader = Session(await sessions.connect(), sessions.url)
    await reader.connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    tables = await reader.connection.fetch(
        "SELECT oid::regclass::text FROM pg_class "
        "WHERE relnamespace = 'windlass'::regnamespace AND relkind IN ('r', 'p', 'v')"
    )
    for (table,) in tables:
        await reader.connection.fetchval(f"SELECT count(*) FROM {table}")
    return reader


async def open_writer(sessions: Sessions) -> Session:
    """An application in the middle of something of its own."""
    await sessions.watcher.execute("CREATE TABLE public.orders (id integer)")
    writer = await sessions.begin()
    await writer.connection.execute("INSERT INTO public.orders VALUES (1)")
    await writer.xid()
    return writer


@pytest.mark.parametrize("open_transaction", [open_reader, open_writer])
async def test_no_method_waits_for_a_users_open_transaction(
    store: PostgresStore,
    sessions: Sessions,
    monkeypatch: pytest.MonkeyPatch,
    open_transaction: Callable[[Sessions], Awaitable[Session]],
) -> None:
    monkeypatch.setattr(history, "DETACH_WITHIN", 0.3)  # what retain waits for a reader
    scene = await Scene.set(store, sessions)
    user = await open_transaction(sessions)
    hung = []

    for name, call in CALLS.items():
        try:
            async with asyncio.timeout(AT_ONCE):
                await call(scene)
        except TimeoutError:
            hung.append(name)

    assert hung == []
    state = "SELECT state FROM pg_stat_activity WHERE pid = $1"
    assert await sessions.watcher.fetchval(state, user.pid) == "idle in transaction"


@pytest.mark.parametrize("open_transaction", [open_reader, open_writer])
async def test_a_store_opens_beside_a_users_open_transaction(
    sessions: Sessions, open_transaction: Callable[[Sessions], Awaitable[Session]]
) -> None:
    await open_transaction(sessions)

    async with asyncio.timeout(AT_ONCE):
        other = await sessions.open_store()
        beside = other.beside()
        await beside.open()
        await beside.close()


# Other defaults


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
async def test_a_stricter_default_isolation_of_the_database_changes_nothing(
    store: PostgresStore, sessions: Sessions, isolation: str
) -> None:
    database = await sessions.watcher.fetchval("SELECT current_database()")
    await sessions.watcher.execute(
        f"ALTER DATABASE {database} SET default_transaction_isolation TO '{isolation}'"
    )
    fresh = await sessions.open_store()
    (task_id,) = await add(store)
    claiming = await sessions.begin()
    await claim(claiming.store)

    cancelling = await sessions.blocked(fresh.cancel(task_id, "no need"), by=claiming)
    await claiming.commit()

    assert await cancelling is CancelAnswer.REQUESTED


# Migrations


async def test_eight_migrations_at_once_apply_each_step_once(empty_database_url: str) -> None:
    stores = [PostgresStore(PostgresOptions(url=empty_database_url)) for _ in range(8)]

    applied: Sequence[list[Any]] = await asyncio.gather(
        *(store.schema.migrate() for store in stores)
    )

    steps = [step.number for steps in applied for step in steps]
    assert sorted(steps) == [step.number for step in stores[0]._sql.migrations()]
    assert await stores[0].schema.pending() == []
