"""What an adapter provides, and the words the rules of a store are written in."""

# ruff: noqa: S101 - tests assert

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import count
from typing import Any, TypeVar
from uuid import UUID

import pytest
import pytest_asyncio

from windlass.model.task import (
    Answer,
    Claim,
    ClaimAnswer,
    ClaimedTask,
    ClaimRequest,
    Leadership,
    NewTask,
    Outcome,
    Pulse,
    PulseAnswer,
    QueueRecord,
    Rescued,
    Settlement,
    Started,
    TaskFilter,
    TaskPage,
    TaskState,
    WorkerInfo,
    WorkerRecord,
)
from windlass.store.port import Store

WORKER = UUID(int=1)
OTHER_WORKER = UUID(int=2)
LEASE = timedelta(seconds=30)
AGEING = timedelta(seconds=6)
TERM = timedelta(seconds=15)
SECOND = timedelta(seconds=1)
DAY = timedelta(days=1)
ERROR = '{"type": "ValueError", "message": "no such image"}'
ENDING = (Outcome.COMPLETED, Outcome.FAILED, Outcome.DEAD, Outcome.CANCELLED)
UNSUCCESSFUL = (Outcome.FAILED, Outcome.DEAD, Outcome.CANCELLED)
RETURNING = (Outcome.RETRIED, Outcome.SNOOZED, Outcome.RELEASED)

_Test = TypeVar("_Test", bound=Callable[..., Awaitable[None]])
_milliseconds = count(1_700_000_000_000)


def needs(capability: str) -> Callable[[_Test], _Test]:
    """Skip a test for adapters that do not declare this capability."""

    def mark(test: _Test) -> _Test:
        test.needed_capability = capability  # type: ignore[attr-defined]  # read by the fixture
        return test

    return mark


def new_id() -> UUID:
    """Return a UUID version 7 that is greater than those before it."""
    return _id_of(next(_milliseconds))


def id_at(moment: datetime) -> UUID:
    """Return a UUID version 7 as it is made at a moment."""
    return _id_of(int(moment.timestamp() * 1000))


def _id_of(milliseconds: int) -> UUID:
    return UUID(int=milliseconds << 80 | 7 << 76 | 2 << 62 | random.getrandbits(62))


def without_times(error: dict[str, Any]) -> dict[str, Any]:
    """Return a kept error without its times, which no two stores share."""
    times = ("started_at", "ended_at")
    return {name: value for name, value in error.items() if name not in times}


async def all_pages(store: Store, wanted: TaskFilter) -> list[TaskPage]:
    """List page by page, to the end."""
    pages: list[TaskPage] = []
    while not pages or wanted.after is not None:
        page = await store.tasks(wanted)
        assert len(page.records) <= wanted.limit
        assert page.rest is None or page.rest != wanted.after, "the listing does not go on"
        pages.append(page)
        wanted = replace(wanted, after=page.rest)
    return pages


class Steps:
    """What an adapter provides, and the words the rules are written in."""

    capabilities: frozenset[str] = frozenset()
    pytestmark = pytest.mark.asyncio

    async def open_store(self) -> Store:
        """Return a fresh, empty, open store."""
        raise NotImplementedError

    async def close_store(self, store: Store) -> None:
        """Give back what `open_store` took."""
        raise NotImplementedError

    async def advance(self, store: Store, delta: timedelta) -> None:
        """Move the store's clock."""
        raise NotImplementedError

    @pytest_asyncio.fixture
    async def store(self, request: pytest.FixtureRequest) -> AsyncIterator[Store]:
        """Open a store of its own for each test."""
        needed = getattr(request.function, "needed_capability", None)
        if needed is not None and needed not in self.capabilities:
            pytest.skip(f"the adapter does not declare {needed!r}")
        store = await self.open_store()
        try:
            yield store
        finally:
            await self.close_store(store)

    def new_task(self, **options: Any) -> NewTask:
        asked: dict[str, Any] = {"id": new_id(), "type": "resize", "payload": "{}"}
        return NewTask(**(asked | options))

    async def add(self, store: Store, **options: Any) -> UUID:
        """Enqueue one task."""
        (answer,) = await store.enqueue([self.new_task(**options)])
        return answer.id

    async def add_many(self, store: Store, number: int, **options: Any) -> list[UUID]:
        """Enqueue tasks in one call."""
        tasks = [self.new_task(**options) for _ in range(number)]
        return [answer.id for answer in await store.enqueue(tasks)]

    async def ask(self, store: Store, **options: Any) -> ClaimAnswer:
        """Ask for tasks; by default for up to ten of the type `resize` from any queue."""
        asked: dict[str, Any] = {
            "worker_id": WORKER,
            "types": ("resize",),
            "limit": 10,
            "lease": LEASE,
            "ageing": AGEING,
        }
        return await store.claim(ClaimRequest(**(asked | options)))

    async def claim(self, store: Store, **options: Any) -> Claim:
        """Claim tasks that are known to be there."""
        answer = await self.ask(store, **options)
        assert answer.claim is not None, "nothing was granted"
        return answer.claim

    async def claim_one(self, store: Store, **options: Any) -> tuple[Claim, ClaimedTask]:
        """Claim a single task that is known to be there."""
        claim = await self.claim(store, **({"limit": 1} | options))
        (task,) = claim.tasks
        return claim, task

    async def granted(self, store: Store, **options: Any) -> list[UUID]:
        """Claim, and return the ids in the order they were granted."""
        answer = await self.ask(store, **options)
        return [task.id for task in answer.claim.tasks] if answer.claim else []

    def settlement(
        self, claim: Claim, task: ClaimedTask, outcome: Outcome, **details: Any
    ) -> Settlement:
        if outcome in (Outcome.FAILED, Outcome.DEAD, Outcome.RETRIED):
            details = {"error": ERROR} | details
        return Settlement(claim.token, task.id, task.generation, outcome, **details)

    async def settle(
        self, store: Store, claim: Claim, task: ClaimedTask, outcome: Outcome, **details: Any
    ) -> Answer:
        (answer,) = await store.settle([self.settlement(claim, task, outcome, **details)])
        return answer

    async def end(self, store: Store, outcome: Outcome, **options: Any) -> UUID:
        """Enqueue a task and bring it to its end."""
        task_id = await self.add(store, **options)
        claim, task = await self.claim_one(store)
        assert await self.settle(store, claim, task, outcome) is Answer.APPLIED
        return task_id

    async def start(self, store: Store, claim: Claim, task: ClaimedTask) -> frozenset[UUID]:
        return await store.start([Started(claim.token, task.id, task.generation, 0.5)])

    async def lose_worker(self, store: Store) -> Rescued:
        """Let every lease expire, and sweep."""
        await self.advance(store, LEASE + SECOND)
        return await store.rescue(1000)

    async def suspect(self, store: Store, **options: Any) -> UUID:
        """Enqueue a task, and lose two workers that had claimed it."""
        task_id = await self.add(store, **options)
        for _ in range(2):
            await self.claim(store, types=(options.get("type", "resize"),))
            await self.lose_worker(store)
        return task_id

    async def status(self, store: Store, task_id: UUID) -> TaskState:
        return (await store.get(task_id)).status

    async def elect(self, store: Store, candidate: UUID = WORKER) -> Leadership:
        leadership = await store.lead(candidate, current=None, term=TERM)
        assert leadership is not None, "the seat is taken"
        return leadership

    def worker(self, worker_id: UUID = WORKER) -> WorkerInfo:
        return WorkerInfo(
            id=worker_id,
            host="a.example",
            pid=7,
            version="0.1.0",
            capacity=100,
            types=("resize", "mail"),
            queues=("default",),
        )

    async def pulse(
        self, store: Store, *claims: Claim, worker_id: UUID = WORKER, running: int = 0
    ) -> PulseAnswer:
        tokens = [claim.token for claim in claims]
        return await store.pulse(Pulse(worker_id, tokens, LEASE, running=running, idle=False))

    async def known_worker(self, store: Store, worker_id: UUID = WORKER) -> WorkerRecord:
        (found,) = [each for each in await store.workers() if each.id == str(worker_id)]
        return found

    async def queue(self, store: Store, name: str) -> QueueRecord | None:
        found = [queue for queue in await store.queues() if queue.name == name]
        return found[0] if found else None

    async def listed(self, store: Store, **wanted: Any) -> list[UUID]:
        page = await store.tasks(TaskFilter(**wanted))
        assert page.rest is None or len(page.records) == TaskFilter(**wanted).limit
        return [UUID(record.id) for record in page.records]

    async def paged(self, store: Store, **wanted: Any) -> list[list[UUID]]:
        """What each page of a listing holds."""
        pages = await all_pages(store, TaskFilter(**wanted))
        return [[UUID(record.id) for record in page.records] for page in pages]
