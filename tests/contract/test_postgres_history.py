"""Ended tasks rest in partitions: made in time, dropped in time, and never in anybody's way."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, date, datetime, timedelta
from itertools import count, pairwise
from typing import Any, TypeVar
from uuid import UUID

import asyncpg
import pytest

from windlass.model.errors import StoreUnavailable, TaskNotFound
from windlass.model.task import (
    Answer,
    CancelAnswer,
    Claim,
    ClaimRequest,
    Enqueued,
    Leadership,
    NewTask,
    Outcome,
    Retained,
    Retention,
    Settlement,
    TaskFilter,
    TaskState,
    TypeDefaults,
)
from windlass.policy.retention import DAILY_UNTIL, DAYS_AHEAD, Span
from windlass.store.postgres import history as history_module
from windlass.store.postgres.store import PostgresOptions, PostgresStore

T = TypeVar("T")

WORKER = UUID(int=1)
TODAY = date(2027, 3, 3)  # a Wednesday
NOON = datetime(2027, 3, 3, 12, tzinfo=UTC)
LEASE = timedelta(seconds=30)
TERM = timedelta(seconds=15)
DAY = timedelta(days=1)
DEADLINE = 20.0  # seconds until a test gives up on a session
ERROR = '{"type": "ValueError", "message": "no such image"}'

_numbers = count(1)


class Keeper:
    """A store whose clock stands where it is put, and whoever keeps its history."""

    def __init__(self, store: PostgresStore, watcher: asyncpg.Connection, url: str) -> None:
        self.store = store
        self.watcher = watcher
        self.url = url
        self._leadership: Leadership | None = None
        self._open: list[asyncpg.Connection] = []
        self._stores: list[PostgresStore] = []

    async def at(self, moment: datetime) -> None:
        """Let the clock stand at this moment."""
        await self.watcher.execute(
            "CREATE OR REPLACE FUNCTION windlass.clock() RETURNS timestamptz "
            f"LANGUAGE sql VOLATILE PARALLEL SAFE AS $$SELECT timestamptz '{moment}'$$"
        )

    async def leadership(self) -> Leadership:
        self._leadership = await self.store.lead(WORKER, current=self._leadership, term=TERM)
        assert self._leadership is not None
        return self._leadership

    async def prepare(self) -> int:
        return await self.store.prepare_history(leadership=await self.leadership())

    async def retain(self, store: PostgresStore | None = None) -> Retained:
        return await (store or self.store).retain(leadership=await self.leadership())

    async def enqueue(self, **options: Any) -> Enqueued:
        task_id = UUID(int=1_700_000_000_000 << 80 | 7 << 76 | 2 << 62 | next(_numbers))
        asked: dict[str, Any] = {"id": task_id, "type": "resize", "payload": "{}"}
        (answer,) = await self.store.enqueue([NewTask(**(asked | options))])
        return answer

    async def claim(self) -> Claim:
        request = ClaimRequest(WORKER, ("resize",), 1, LEASE, timedelta(seconds=6))
        answer = await self.store.claim(request)
        assert answer.claim is not None
        return answer.claim

    async def end(self, outcome: Outcome = Outcome.COMPLETED, **options: Any) -> UUID:
        """Bring a task to its end."""
        task_id = (await self.enqueue(**options)).id
        held = await self.claim()
        error = ERROR if outcome in {Outcome.FAILED, Outcome.DEAD} else None
        settlement = Settlement(held.token, task_id, held.tasks[0].generation, outcome, error=error)
        assert await self.store.settle([settlement]) == [Answer.APPLIED]
        return task_id

    async def is_known(self, task_id: UUID) -> bool:
        try:
            await self.store.get(task_id)
        except TaskNotFound:
            return False
        return True

    async def spans(self) -> list[Span]:
        """The partitions that are attached or about to be."""
        return [
            history_module._span(row["name"])
            for row in await self.partitions()
            if row["attached"] and not row["pending"]
        ]

    async def partitions(self) -> list[asyncpg.Record]:
        return list(await self.watcher.fetch(self.store._sql.statement("list_partitions")))

    async def place_of(self, task_id: UUID) -> Span:
        name = await self.watcher.fetchval(
            "SELECT c.relname FROM windlass.history h JOIN pg_class c ON c.oid = h.tableoid "
            "WHERE h.id = $1",
            task_id,
        )
        return history_module._span(name)

    async def keys(self) -> list[str]:
        rows = await self.watcher.fetch("SELECT key FROM windlass.idempotency ORDER BY key")
        return [row["key"] for row in rows]

    async def open_reader(self, isolation: str) -> asyncpg.Connection:
        """A report on all of history that is not done."""
        reader = await asyncpg.connect(self.url)
        self._open.append(reader)
        await reader.execute(f"BEGIN ISOLATION LEVEL {isolation}")
        await reader.fetchval("SELECT count(*) FROM windlass.history")
        return reader

    async def open_store(self, **options: Any) -> PostgresStore:
        store = PostgresStore(PostgresOptions(url=self.url, **options))
        await store.open()
        self._stores.append(store)
        return store

    async def waiting(self, call: Awaitable[T], *, by: asyncpg.Connection) -> asyncio.Task[T]:
        """Make a call, and return once it waits for what the other session holds."""
        task = asyncio.ensure_future(call)
        assert isinstance(task, asyncio.Task)
        deadline = time.monotonic() + DEADLINE
        while await self.blocked_by(by) is None:
            assert not task.done(), f"did not wait: {task}"
            assert time.monotonic() < deadline, "never waited"
            await asyncio.sleep(0.005)
        return task

    async def blocked_by(self, session: asyncpg.Connection) -> int | None:
        blocked: int | None = await self.watcher.fetchval(
            "SELECT pid FROM pg_stat_activity "
            "WHERE wait_event_type = 'Lock' AND $1 = ANY (pg_blocking_pids(pid))",
            session.get_server_pid(),
        )
        return blocked

    async def waiters(self) -> int:
        return int(
            await self.watcher.fetchval(
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
        )

    async def close(self) -> None:
        for session in self._open:
            session.terminate()
        for store in self._stores:
            await store.close()
        await self.watcher.close()


@pytest.fixture
async def keeper(postgres_store: PostgresStore, database_url: str) -> AsyncIterator[Keeper]:
    keeper = Keeper(postgres_store, await asyncpg.connect(database_url), database_url)
    await keeper.at(NOON)
    yield keeper
    await keeper.close()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let retention wait for readers only long enough to be seen waiting."""
    monkeypatch.setattr(history_module, "DETACH_WITHIN", 1.0)


def days(first: date, past: date) -> Span:
    return Span(first, past)


def one_day(day: date) -> Span:
    return Span(day, day + DAY)


# Partitions are there when they are needed


async def test_places_for_the_coming_days_are_made_ahead(keeper: Keeper) -> None:
    assert await keeper.spans() == []

    made = await keeper.prepare()

    first = TODAY + 7 * DAY
    wanted = [one_day(first + ahead * DAY) for ahead in range(DAYS_AHEAD + 2)]
    assert await keeper.spans() == wanted
    assert made == len(wanted)
    assert await keeper.prepare() == 0


async def test_a_task_that_ends_in_the_coming_days_needs_no_new_place(keeper: Keeper) -> None:
    await keeper.prepare()
    prepared = await keeper.spans()

    for ahead in range(DAYS_AHEAD + 1):
        await keeper.at(NOON + ahead * DAY)
        assert await keeper.place_of(await keeper.end()) == one_day(TODAY + (7 + ahead) * DAY)

    assert await keeper.spans() == prepared


async def test_places_are_made_for_the_retentions_of_registered_types(keeper: Keeper) -> None:
    await keeper.store.register_types([TypeDefaults("resize", retention=20 * DAY)])

    await keeper.prepare()

    assert one_day(TODAY + 20 * DAY) in await keeper.spans()


@pytest.mark.parametrize("retention", [None, timedelta(0), timedelta(hours=13), 30 * DAY])
async def test_a_missing_place_is_made_when_a_task_ends(
    keeper: Keeper, retention: timedelta | None
) -> None:
    task_id = await keeper.end(retention=retention)

    may_go = NOON + (7 * DAY if retention is None else retention)
    assert await keeper.place_of(task_id) == one_day(may_go.date())


async def test_a_place_beyond_thirty_days_spans_a_week(keeper: Keeper) -> None:
    task_id = await keeper.end(retention=400 * DAY)

    first, past = await keeper.place_of(task_id)
    assert past - first == 7 * DAY
    assert first.weekday() == 0
    assert first <= TODAY + 400 * DAY < past


async def test_weeks_and_days_meet_without_a_gap_or_an_overlap(keeper: Keeper) -> None:
    retentions = [timedelta(days=number) for number in range(DAILY_UNTIL - 3, DAILY_UNTIL + 6)]

    for passed in range(12):
        await keeper.at(NOON + passed * DAY)
        for retention in retentions:
            span = await keeper.place_of(await keeper.end(retention=retention))
            assert span.first <= TODAY + passed * DAY + retention < span.past

    spans = await keeper.spans()
    assert all(one.past <= other.first for one, other in pairwise(spans))


@pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.CANCELLED])
async def test_a_missing_place_is_made_for_either_end(keeper: Keeper, outcome: Outcome) -> None:
    task_id = await keeper.end(outcome, retention=400 * DAY)

    assert (await keeper.store.get(task_id)).status.value == outcome.value


async def test_a_missing_place_is_made_for_a_cancelled_task(keeper: Keeper) -> None:
    task_id = (await keeper.enqueue(retention=400 * DAY)).id

    assert await keeper.store.cancel(task_id, "no need") is CancelAnswer.CANCELLED

    assert (await keeper.store.get(task_id)).status is TaskState.CANCELLED


async def test_a_missing_place_is_made_for_a_rescued_task_that_was_cancelled(
    keeper: Keeper,
) -> None:
    task_id = (await keeper.enqueue(retention=400 * DAY)).id
    await keeper.claim()
    await keeper.store.cancel(task_id, "no need")
    await keeper.at(NOON + 2 * LEASE)

    rescued = await keeper.store.rescue(100)

    assert rescued.cancelled == 1
    assert (await keeper.store.get(task_id)).status is TaskState.CANCELLED


async def test_a_place_is_made_while_history_is_read_and_written(keeper: Keeper) -> None:
    await keeper.end()
    await keeper.open_reader("REPEATABLE READ")
    writer = await keeper.open_reader("READ COMMITTED")
    await writer.execute(
        "INSERT INTO windlass.history (id, type, queue, status, priority, max_attempts, attempts, "
        "generation, drop_on, created_at, scheduled_for, completed_at, payload) "
        "VALUES (gen_random_uuid(), 'a', 'b', 'completed', 1, 1, 1, 1, $1, now(), now(), now(), '{}')",
        TODAY + 7 * DAY,
    )

    async with asyncio.timeout(DEADLINE):
        task_id = await keeper.end(retention=400 * DAY)

    assert await keeper.is_known(task_id)


async def test_two_that_miss_the_same_place_make_it_once(keeper: Keeper) -> None:
    task_id = (await keeper.enqueue(retention=400 * DAY)).id
    held = await keeper.claim()
    making = await keeper.open_reader("READ COMMITTED")
    monday = TODAY + 400 * DAY - (TODAY + 400 * DAY).weekday() * DAY
    add = keeper.store._sql.statement("add_history_partition")
    assert await making.fetchval(add, monday, monday + 7 * DAY)

    settlement = Settlement(held.token, task_id, 1, Outcome.COMPLETED)
    settling = await keeper.waiting(keeper.store.settle([settlement]), by=making)
    await making.execute("COMMIT")

    assert await settling == [Answer.APPLIED]
    assert await keeper.place_of(task_id) == days(monday, monday + 7 * DAY)


# Retention


async def test_only_what_is_over_is_dropped(keeper: Keeper) -> None:
    brief = await keeper.end(retention=timedelta(0))
    daily = await keeper.end(retention=DAY)
    weekly = await keeper.end(retention=40 * DAY)
    midnight = datetime.combine(TODAY + DAY, datetime.min.time(), UTC)
    week = await keeper.place_of(weekly)
    steps = [
        (NOON, {brief, daily, weekly}),
        (midnight - timedelta(microseconds=1), {brief, daily, weekly}),
        (midnight, {daily, weekly}),
        (midnight + DAY - timedelta(microseconds=1), {daily, weekly}),
        (midnight + DAY, {weekly}),
        (datetime.combine(week.past - DAY, datetime.max.time(), UTC), {weekly}),
        (datetime.combine(week.past, datetime.min.time(), UTC), set()),
    ]

    for moment, expected in steps:
        await keeper.at(moment)
        await keeper.retain()
        known = {task_id for task_id in (brief, daily, weekly) if await keeper.is_known(task_id)}
        assert known == expected, moment


async def test_what_was_dropped_is_counted(keeper: Keeper) -> None:
    await keeper.end(retention=timedelta(0))
    await keeper.end(retention=DAY)
    await keeper.end(Outcome.DEAD)
    over = sum(span.past <= TODAY + 60 * DAY for span in await keeper.spans())
    await keeper.at(NOON + 60 * DAY)

    assert await keeper.retain() == Retained(partitions=over, dead=1)
    assert await keeper.retain() == Retained()


async def test_a_dead_task_is_kept_for_its_own_retention(keeper: Keeper) -> None:
    failed = await keeper.end(Outcome.FAILED)
    dead = await keeper.end(Outcome.DEAD, retention=DAY)

    await keeper.at(NOON + 2 * DAY)
    await keeper.retain()
    assert [await keeper.is_known(one) for one in (failed, dead)] == [True, False]
    await keeper.at(NOON + 30 * DAY)
    await keeper.retain()
    assert await keeper.is_known(failed)
    await keeper.at(NOON + 31 * DAY)
    await keeper.retain()
    assert not await keeper.is_known(failed)


@pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.CANCELLED, Outcome.DEAD])
async def test_a_key_is_forgotten_with_its_task_and_not_before(
    keeper: Keeper, outcome: Outcome
) -> None:
    first = await keeper.end(outcome, idempotency_key="k", retention=timedelta(0))
    other = await keeper.enqueue(idempotency_key="other")

    # The key is remembered for a week, so the task is as well.
    await keeper.at(NOON + 7 * DAY)
    await keeper.retain()
    assert await keeper.is_known(first)
    assert await keeper.enqueue(idempotency_key="k") == Enqueued(first, created=False)

    await keeper.at(NOON + 8 * DAY)
    await keeper.retain()
    assert not await keeper.is_known(first)
    assert await keeper.keys() == ["other"]
    assert (await keeper.enqueue(idempotency_key="k")).created
    assert await keeper.enqueue(idempotency_key="other") == other._replace(created=False)


async def test_a_key_is_not_forgotten_while_its_retried_task_lives(keeper: Keeper) -> None:
    task_id = await keeper.end(Outcome.CANCELLED, idempotency_key="k")
    await keeper.store.retry(task_id)

    await keeper.at(NOON + 60 * DAY)
    await keeper.retain()

    assert await keeper.keys() == ["k"]
    assert await keeper.enqueue(idempotency_key="k") == Enqueued(task_id, created=False)


async def test_a_key_of_a_later_task_is_not_forgotten_with_an_earlier_one(keeper: Keeper) -> None:
    # Possible only by hand: the key's row names another task than the one that is dropped.
    await keeper.end(idempotency_key="k", retention=timedelta(0))
    await keeper.watcher.execute("UPDATE windlass.idempotency SET task_id = gen_random_uuid()")
    await keeper.at(NOON + 60 * DAY)

    await keeper.retain()

    assert await keeper.keys() == ["k"]


# Retention beside readers


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
async def test_a_reader_is_waited_for_and_stops_nobody(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    monkeypatch.setattr(history_module, "DETACH_WITHIN", 2 * DEADLINE)
    over = await keeper.end(retention=timedelta(0))
    name = history_name(await keeper.place_of(over))
    await keeper.at(NOON + DAY)
    reader = await keeper.open_reader(isolation)

    retaining = await keeper.waiting(keeper.retain(), by=reader)
    async with asyncio.timeout(DEADLINE):
        ended = await keeper.end()
        unforeseen = await keeper.end(retention=100 * DAY)
        await keeper.enqueue(idempotency_key="k")
        assert await keeper.is_known(ended)
        assert await keeper.store.tasks(TaskFilter(statuses=(TaskState.COMPLETED,)))
        await keeper.open_reader("READ COMMITTED")
        seen = await reader.fetchval("SELECT count(*) FROM windlass.history WHERE id = $1", ended)

    assert not retaining.done()
    assert seen == (isolation == "READ COMMITTED")
    await reader.execute("COMMIT")
    assert await retaining == Retained(partitions=1)
    assert not await keeper.is_known(over)
    assert await keeper.is_known(unforeseen)
    assert name not in [row["name"] for row in await keeper.partitions()]


@pytest.mark.usefixtures("patience")
async def test_a_reader_that_stays_is_waited_for_again_and_again(keeper: Keeper) -> None:
    over = await keeper.end(retention=timedelta(0))
    name = history_name(await keeper.place_of(over))
    await keeper.at(NOON + DAY)
    reader = await keeper.open_reader("REPEATABLE READ")

    turns = [await keeper.retain() for _ in range(3)]

    assert turns == [Retained(waiting=(name,))] * 3
    await reader.execute("COMMIT")
    assert (await keeper.retain()).partitions == 1


async def test_a_detachment_killed_half_way_is_finished_at_the_next_turn(keeper: Keeper) -> None:
    over = await keeper.end(retention=timedelta(0), idempotency_key=None)
    name = history_name(await keeper.place_of(over))
    await keeper.at(NOON + DAY)
    reader = await keeper.open_reader("READ COMMITTED")

    retaining = await keeper.waiting(keeper.retain(), by=reader)
    detaching = await keeper.blocked_by(reader)
    await keeper.watcher.execute("SELECT pg_terminate_backend($1)", detaching)
    with pytest.raises(StoreUnavailable):
        await retaining

    (row,) = [row for row in await keeper.partitions() if row["name"] == name]
    assert (row["attached"], row["pending"]) == (True, True)
    assert await keeper.is_known(await keeper.end())
    assert await keeper.is_known(await keeper.end(retention=100 * DAY))
    await reader.execute("COMMIT")
    assert await keeper.retain() == Retained(partitions=1)
    assert name not in [row["name"] for row in await keeper.partitions()]
    assert await keeper.retain() == Retained()


@pytest.mark.usefixtures("patience")
async def test_two_retentions_at_once_are_harmless(keeper: Keeper) -> None:
    # A deposed leader may still be detaching when the next one begins.
    over = await keeper.end(retention=timedelta(0), idempotency_key="k")
    await keeper.at(NOON + 8 * DAY)
    reader = await keeper.open_reader("READ COMMITTED")
    retaining = await keeper.waiting(keeper.retain(), by=reader)

    second = asyncio.create_task(keeper.retain())
    deadline = time.monotonic() + DEADLINE
    while not second.done() and await keeper.waiters() < 2:
        assert time.monotonic() < deadline, "neither waited nor ended"
        await asyncio.sleep(0.005)
    await reader.execute("COMMIT")
    results = await asyncio.gather(retaining, second, return_exceptions=True)

    assert [one for one in results if not isinstance(one, Retained)] == []
    await keeper.retain()
    assert not await keeper.is_known(over)
    assert await keeper.keys() == []


async def test_a_settlement_under_way_is_waited_for_and_kept(keeper: Keeper) -> None:
    over = await keeper.end(retention=timedelta(0))
    await keeper.at(NOON + DAY)
    writer = await keeper.open_reader("READ COMMITTED")
    other = UUID(int=77)
    await writer.execute(
        "INSERT INTO windlass.history (id, type, queue, status, priority, max_attempts, attempts, "
        "generation, drop_on, created_at, scheduled_for, completed_at, payload) "
        "VALUES ($1, 'a', 'b', 'completed', 1, 1, 1, 1, $2, now(), now(), now(), '{}')",
        other,
        TODAY + 7 * DAY,
    )

    retaining = await keeper.waiting(keeper.retain(), by=writer)
    await writer.execute("COMMIT")

    assert await retaining == Retained(partitions=1)
    assert not await keeper.is_known(over)
    assert await keeper.is_known(other)


async def test_a_table_left_over_from_a_detachment_is_dropped_with_its_keys(
    keeper: Keeper,
) -> None:
    over = await keeper.end(retention=timedelta(0), idempotency_key="k")
    name = history_name(await keeper.place_of(over))
    await keeper.watcher.execute(f"ALTER TABLE windlass.history DETACH PARTITION windlass.{name}")
    await keeper.at(NOON + 7 * DAY)
    assert name not in map(history_name, await keeper.spans())
    kept = await keeper.retain()
    assert (kept.waiting, await keeper.keys()) == ((), ["k"])

    await keeper.at(NOON + 8 * DAY)
    dropped = await keeper.retain()

    assert dropped.partitions > 0
    assert name not in [row["name"] for row in await keeper.partitions()]
    assert await keeper.keys() == []


async def test_a_left_over_table_that_somebody_reads_waits_for_the_next_turn(
    keeper: Keeper,
) -> None:
    name = history_name(await keeper.place_of(await keeper.end(retention=timedelta(0))))
    await keeper.watcher.execute(f"ALTER TABLE windlass.history DETACH PARTITION windlass.{name}")
    await keeper.at(NOON + DAY)
    reader = await keeper.open_reader("READ COMMITTED")
    await reader.fetchval(f"SELECT count(*) FROM windlass.{name}")

    assert await keeper.retain() == Retained(waiting=(name,))
    await reader.execute("COMMIT")
    assert await keeper.retain() == Retained(partitions=1)


async def test_behind_a_pooler_retention_gives_up_at_once_beside_a_reader(keeper: Keeper) -> None:
    pooled = await keeper.open_store(pooler=True)
    over = await keeper.end(retention=timedelta(0), idempotency_key="k")
    earliest = history_name((await keeper.spans())[0])
    await keeper.at(NOON + 8 * DAY)
    reader = await keeper.open_reader("READ COMMITTED")

    async with asyncio.timeout(DEADLINE):
        given_up = await keeper.retain(pooled)
    assert (given_up.partitions, given_up.waiting) == (0, (earliest,))
    assert await keeper.keys() == ["k"]
    assert not any(row["pending"] for row in await keeper.partitions())
    assert await keeper.is_known(await keeper.end())

    await reader.execute("COMMIT")
    assert (await keeper.retain(pooled)).waiting == ()
    assert not await keeper.is_known(over)
    assert await keeper.keys() == []


async def test_behind_a_pooler_a_pending_detachment_is_finished(keeper: Keeper) -> None:
    pooled = await keeper.open_store(pooler=True)
    await keeper.end(retention=timedelta(0))
    await keeper.at(NOON + DAY)
    reader = await keeper.open_reader("READ COMMITTED")
    retaining = await keeper.waiting(keeper.retain(), by=reader)
    await keeper.watcher.execute("SELECT pg_terminate_backend($1)", await keeper.blocked_by(reader))
    await asyncio.gather(retaining, return_exceptions=True)
    await reader.execute("COMMIT")

    assert await keeper.retain(pooled) == Retained(partitions=1)


async def test_the_retention_of_the_settings_is_used(keeper: Keeper) -> None:
    keeper.store = await keeper.open_store(
        retention=Retention(ended=2 * DAY, dead=3 * DAY, keys=4 * DAY)
    )

    ended = await keeper.place_of(await keeper.end())
    with_key = await keeper.place_of(await keeper.end(idempotency_key="k"))
    dead = await keeper.end(Outcome.DEAD)

    assert (ended, with_key) == (one_day(TODAY + 2 * DAY), one_day(TODAY + 4 * DAY))
    drop_on = await keeper.watcher.fetchval("SELECT drop_on FROM windlass.dead WHERE id = $1", dead)
    assert drop_on == TODAY + 3 * DAY


def history_name(span: Span) -> str:
    return f"history_{span.first:%Y%m%d}_{span.past:%Y%m%d}"


# What has ended stays as it is


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE windlass.{table} SET last_error = 'x' WHERE id = $1",
        "UPDATE windlass.{table} SET drop_on = drop_on + 1 WHERE id = $1",
        "DELETE FROM windlass.{table} WHERE id = $1",
    ],
)
@pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.CANCELLED, Outcome.DEAD])
async def test_an_ended_task_takes_no_update_and_no_delete(
    keeper: Keeper, outcome: Outcome, statement: str
) -> None:
    task_id = await keeper.end(outcome)
    before = await keeper.store.get(task_id)
    tables = ["dead"]
    if outcome is not Outcome.DEAD:
        tables = ["history", history_name(await keeper.place_of(task_id))]

    for table in tables:
        with pytest.raises(asyncpg.PostgresError) as refused:
            await keeper.watcher.execute(statement.format(table=table), task_id)
        assert refused.value.sqlstate == "WL003"

    assert await keeper.store.get(task_id) == before


@pytest.mark.parametrize(
    "changed", ["generation = generation - 1", "id = gen_random_uuid()", "generation = 0"]
)
async def test_a_generation_never_falls(keeper: Keeper, changed: str) -> None:
    task_id = (await keeper.enqueue()).id
    rise = "UPDATE windlass.task SET generation = generation + 1 WHERE id = $1"
    await keeper.watcher.execute(rise, task_id)

    with pytest.raises(asyncpg.PostgresError) as refused:
        await keeper.watcher.execute(f"UPDATE windlass.task SET {changed} WHERE id = $1", task_id)

    assert refused.value.sqlstate == "WL003"
    assert (await keeper.store.get(task_id)).generation == 2


REMOVALS: dict[str, Callable[[Keeper, UUID], Awaitable[Any]]] = {
    "retry": lambda keeper, task_id: keeper.store.retry(task_id),
    "retention": lambda keeper, _: keeper.retain(),
}


@pytest.mark.parametrize("removal", REMOVALS)
async def test_the_right_to_remove_ends_with_its_transaction(keeper: Keeper, removal: str) -> None:
    single = await keeper.open_store(pool_size=1)
    dead = await keeper.end(Outcome.DEAD, retention=timedelta(0))
    other = await keeper.end(Outcome.DEAD, retention=400 * DAY)
    await keeper.at(NOON + DAY)
    keeper.store = single

    await REMOVALS[removal](keeper, dead)

    with pytest.raises(asyncpg.PostgresError) as refused:
        await single._run.pool.execute("DELETE FROM windlass.dead")  # type: ignore[union-attr]  # open
    assert refused.value.sqlstate == "WL003"
    assert await keeper.is_known(other)
