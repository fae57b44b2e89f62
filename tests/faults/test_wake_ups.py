"""No task waits for longer than a poll, whatever a worker did while it was enqueued."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from uuid import UUID

import asyncpg
import pytest

from contract.pgbouncer import store_options
from contract.postgres_sessions import (
    LEASE,
    Session,
    Sessions,
    add,
    new_task,
    request,
    worker_info,
)
from faults.conftest import FOR_EVER
from faults.said import DEADLINE
from windlass.model.task import Claim, ClaimAnswer, ClaimRequest
from windlass.runtime import fetcher
from windlass.runtime.fetcher import Fetcher
from windlass.service import Stop, stop_task
from windlass.store.postgres import enqueueing
from windlass.store.postgres.store import PostgresOptions, PostgresStore

POLL = 0.2  # seconds


class WatchedStore(PostgresStore):
    """A store in which something happens just before or just after a call of the fetcher."""

    def __init__(self, options: PostgresOptions) -> None:
        super().__init__(options)
        self.before_idle: Callable[[], Awaitable[object]] | None = None
        self.after_look: Callable[[], Awaitable[object]] | None = None

    async def set_idle(self, worker_id: UUID, idle: bool) -> None:
        if idle and self.before_idle is not None:
            await self.before_idle()
        await super().set_idle(worker_id, idle)

    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        answer = await super().claim(request)
        if self.after_look is not None:
            await self.after_look()
        return answer


class IdleWorker:
    """A fetcher on a real store, with room for ever more."""

    def __init__(self, store: WatchedStore, *, poll: float) -> None:
        self.store = store
        self.asleep = asyncio.Event()  # it has registered, looked again and found nothing
        self.woken = asyncio.Event()
        self._taken: list[UUID] = []
        self._news = asyncio.Event()
        self.fetcher = Fetcher(
            store=store,
            room=self,
            request=request(),
            poll=timedelta(seconds=poll),
            is_leader=lambda: False,
            went_idle=self.asleep.set,
        )

    def wake(self, lane: int | None = None, task_id: UUID | None = None) -> None:
        self.fetcher.wake(lane, task_id)
        self.woken.set()

    async def takes(self, *task_ids: UUID) -> None:
        """Wait until it has claimed exactly these."""
        async with asyncio.timeout(DEADLINE):
            while len(self._taken) < len(task_ids):
                self._news.clear()
                await self._news.wait()
        assert self._taken == list(task_ids)

    def wanted(self) -> int:
        return 10

    def busy(self) -> int:
        return 0

    def free_slots(self) -> int:
        return 10

    async def slot_freed(self) -> None: ...

    def at_once(self) -> int:
        return 1000

    def has_room(self) -> bool:
        return True

    async def room(self) -> None: ...

    async def emptied(self) -> None: ...

    def hold(self, claim: Claim, asked_at: float) -> None:
        self._taken += [task.id for task in claim.tasks]

    async def take(self, claim: Claim) -> None:
        self._news.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.store.register(worker_info(), lease=LEASE)
        async with self.store.listen(self.wake):
            fetching = asyncio.create_task(self.fetcher.run(Stop()))
            try:
                yield
            finally:
                await stop_task(fetching)


@pytest.fixture
async def store(database_url: str, direct_url: str | None) -> AsyncIterator[WatchedStore]:
    store = WatchedStore(store_options(database_url, direct_url=direct_url))
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def sessions(
    database_url: str, sql_url: str, watcher: asyncpg.Connection
) -> AsyncIterator[Sessions]:
    sessions = Sessions(database_url, sql_url, watcher)
    yield sessions
    await sessions.close()


@pytest.fixture
def never_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only a notification, or a look that is made anyway, find a task."""
    monkeypatch.setattr(fetcher, "SHORTEST_POLL", FOR_EVER)


@pytest.fixture
async def notified(sql_url: str) -> AsyncIterator[list[str]]:
    """What was sent to workers."""
    heard: list[str] = []
    connection = await asyncpg.connect(sql_url)
    await connection.add_listener("windlass.wake", lambda *said: heard.append(said[-1]))
    yield heard
    await connection.close()


async def enqueue_for_caller(session: Session) -> UUID:
    """Enqueue as within the transaction of a caller, who commits whenever he likes."""
    task = new_task(tags=("a",))  # one of a kind that callers may enqueue as well
    name, (*arguments, _) = enqueueing.enqueue_statement([task], None, repeated=False)
    text = session.store._sql.statement(name)
    await session.connection.execute(text, *arguments, True)
    return task.id


async def until_asleep(worker: IdleWorker) -> None:
    await asyncio.wait_for(worker.asleep.wait(), DEADLINE)


@pytest.mark.usefixtures("never_polls")
async def test_what_is_committed_before_it_registers_as_idle_is_found_by_its_next_look(
    store: WatchedStore, sessions: Sessions, notified: list[str]
) -> None:
    other, enqueued = await sessions.open_store(), list[UUID]()

    async def enqueue() -> None:
        enqueued.extend(await add(other))

    store.before_idle = enqueue
    worker = IdleWorker(store, poll=FOR_EVER)
    async with worker.running():
        async with asyncio.timeout(DEADLINE):
            while not enqueued:
                await asyncio.sleep(0.001)
        await worker.takes(*enqueued)

    assert notified == []  # nobody was idle when it looked for idle workers


async def test_what_looked_for_idle_workers_too_early_is_found_by_a_poll(
    store: WatchedStore, sessions: Sessions, notified: list[str]
) -> None:
    enqueuing = await sessions.begin()
    task_ids = await add(enqueuing.store)  # it saw nobody idle, and has not committed
    worker = IdleWorker(store, poll=POLL)
    async with worker.running():
        await until_asleep(worker)

        await enqueuing.commit()

        await worker.takes(*task_ids)
    assert notified == []


@pytest.mark.usefixtures("never_polls")
async def test_who_is_idle_when_an_enqueue_looks_is_told_when_it_commits(
    store: WatchedStore, sessions: Sessions
) -> None:
    worker = IdleWorker(store, poll=FOR_EVER)
    async with worker.running():
        await until_asleep(worker)
        enqueuing = await sessions.begin()
        task_ids = await add(enqueuing.store, 2)  # one alone would commit by itself
        assert not worker.woken.is_set()

        await enqueuing.commit()

        await worker.takes(*task_ids)


@pytest.mark.usefixtures("never_polls")
async def test_a_caller_who_commits_late_wakes_who_has_become_idle_meanwhile(
    store: WatchedStore, sessions: Sessions
) -> None:
    caller = await sessions.begin()
    task_id = await enqueue_for_caller(caller)
    worker = IdleWorker(store, poll=FOR_EVER)
    async with worker.running():
        await until_asleep(worker)
        assert not worker.woken.is_set()

        await caller.commit()

        await worker.takes(task_id)


async def test_a_caller_whom_the_worker_has_passed_is_found_when_he_commits(
    store: WatchedStore, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Claims leave behind whoever stays open for long: here at once. What he committed is asked for
    # by the look after the one that sees him gone.
    monkeypatch.setattr("windlass.store.postgres.cursors.PASS_AFTER", 0.0)
    caller = await sessions.begin()
    late = await enqueue_for_caller(caller)
    other = await sessions.open_store()
    worker = IdleWorker(store, poll=POLL)
    async with worker.running():
        taken: list[UUID] = []
        for _ in range(3):
            taken += await add(other)
            await worker.takes(*taken)
        assert await caller.xid() in store._cursors[False]._passed

        await caller.commit()

        await worker.takes(*taken, late)


@pytest.mark.usefixtures("never_polls")
async def test_a_notification_that_arrives_during_a_look_leads_to_another(
    store: WatchedStore, sessions: Sessions
) -> None:
    other, enqueued = await sessions.open_store(), list[UUID]()
    looks = 0

    async def enqueue_during_the_second_look() -> None:
        nonlocal looks
        looks += 1
        if looks == 2:  # registered as idle, and this one has seen nothing
            enqueued.extend(await add(other))
            await asyncio.wait_for(worker.woken.wait(), DEADLINE)

    worker = IdleWorker(store, poll=FOR_EVER)
    store.after_look = enqueue_during_the_second_look
    async with worker.running():
        await asyncio.wait_for(worker.woken.wait(), DEADLINE)

        await worker.takes(*enqueued)
