"""Listings: lanes that rest or are many, pages that end before they are full, tags."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

import asyncpg
import pytest

from contract.pgbouncer import store_options
from contract.postgres_keeper import DAY, NOON, Keeper
from contract.postgres_sessions import Sessions, add, claim, settlements
from windlass.model.errors import ConfigurationError
from windlass.model.task import NewTask, Outcome, TaskFilter, TaskPage, TaskState
from windlass.store.postgres import listing
from windlass.store.postgres.store import PostgresStore
from windlass.testing.store_contract.steps import all_pages, id_at, new_id

PENDING, SCHEDULED = TaskState.PENDING, TaskState.SCHEDULED

# $1 number. Newer than whatever is enqueued, and of another type.
OTHERS = """
INSERT INTO windlass.history (
    id, type, queue, status, priority, max_attempts, attempts, generation, drop_on, created_at,
    scheduled_for, completed_at, payload
)
SELECT ('f0000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, 'other', 'default',
    'completed', 10, 4, 1, 1, (now() AT TIME ZONE 'UTC')::date + 7, now(), now(), now(), '{}'
FROM generate_series(1, $1::bigint) AS n
"""


def found(pages: Iterable[TaskPage]) -> list[UUID]:
    return [UUID(record.id) for page in pages for record in page.records]


async def test_tasks_of_lanes_that_rest_are_listed(
    store: PostgresStore, sessions: Sessions
) -> None:
    tasks = await add(store, 2) + await add(store, 2, delay=60.0)
    await sessions.watcher.execute(
        "WITH gone AS (DELETE FROM windlass.lane RETURNING lane, queue, type, priority, kind) "
        "INSERT INTO windlass.resting_lane SELECT * FROM gone"
    )

    pages = [await store.tasks(TaskFilter(type="resize", queue="default"))]

    assert found(pages) == sorted(tasks, reverse=True)


@pytest.mark.parametrize("most_lanes", [listing.MOST_LANES, 100])
async def test_a_type_of_many_lanes_is_listed_by_as_many_pages_as_it_takes(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch, most_lanes: int
) -> None:
    """Each lane takes a search: fewer are read of each, or all are walked over by id."""
    monkeypatch.setattr(listing, "MOST_LANES", most_lanes)
    await store.enqueue(
        [
            NewTask(new_id(), name, "{}", queue=f"tenant {number}", delay=delay)
            for delay in (0.0, 60.0)
            for number in range(250)
            for name in ("resize", "mail")
        ]
    )

    for status in (PENDING, SCHEDULED):
        pages = await all_pages(store, TaskFilter(statuses=(status,), type="resize", limit=200))

        assert len(pages) > 1
        assert {page.looked_back_to for page in pages} == {None}
        assert len(set(found(pages))) == len(found(pages)) == 250


async def test_a_page_ends_where_enough_was_looked_at_and_says_so(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    held = await claim(store)
    await store.settle(settlements(held, Outcome.COMPLETED))
    (waiting,) = await add(store)
    await sessions.watcher.execute(OTHERS, 10_001)
    wanted = TaskFilter(type="resize")

    first, *others = pages = await all_pages(store, wanted)
    completed = await store.tasks(TaskFilter(statuses=(TaskState.COMPLETED,), type="resize"))
    unfiltered = await store.tasks(TaskFilter(limit=10))

    assert found([first]) == [waiting]  # its place was read to the end
    assert first.looked_back_to is not None
    assert datetime.now(UTC) - first.looked_back_to < timedelta(minutes=1)
    assert found(others) == [task_id]
    assert pages[-1].looked_back_to is None
    assert (found([completed]), completed.rest is None) == ([], False)
    assert (len(unfiltered.records), unfiltered.looked_back_to) == (10, None)


async def test_a_task_that_moves_while_a_page_is_read_is_on_it_once(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    other = await sessions.begin()
    await other.connection.execute("LOCK TABLE windlass.claim IN ACCESS EXCLUSIVE MODE")

    # What is ready has been read, and what has ended has not.
    reading = await sessions.blocked(store.tasks(TaskFilter()), by=other)
    await store.cancel(task_id, "too late")
    await other.commit()

    (record,) = (await reading).records
    assert (record.id, record.status) == (str(task_id), PENDING)


async def test_what_is_ready_of_a_type_is_listed_by_age_and_not_by_when_it_became_so(
    store: PostgresStore, sessions: Sessions
) -> None:
    older = await add(store, 3, delay=60.0)
    newer = await add(store, 3)
    await sessions.advance(timedelta(seconds=61))
    assert await store.promote(10) == 3

    pages = await all_pages(store, TaskFilter(type="resize", limit=2))

    assert found(pages) == sorted(newer, reverse=True) + sorted(older, reverse=True)


@pytest.mark.parametrize("wanted", [TaskFilter(limit=3), TaskFilter(type="resize", limit=3)])
async def test_tasks_that_end_between_two_pages_are_listed_once(
    store: PostgresStore, wanted: TaskFilter
) -> None:
    """Wherever they were on the page before, and although there was nothing yet where they end."""
    tasks = await add(store, 12)
    ends = [Outcome.COMPLETED, Outcome.CANCELLED, Outcome.DEAD] * 4

    listed: list[UUID] = []
    while True:
        page = await store.tasks(wanted)
        listed += found([page])
        if page.rest is None:
            break
        wanted = replace(wanted, after=page.rest)
        for end in ends[:3]:
            await store.settle(settlements(await claim(store, limit=1), end))
        del ends[:3]

    assert listed == sorted(tasks, reverse=True)


@pytest.mark.parametrize(
    ("lanes", "read", "limit"), [(300, 66, 320), (300, 66, 100), (200, 100, 110)]
)
async def test_a_place_that_was_not_read_to_its_end_is_not_passed_over(
    store: PostgresStore, lanes: int, read: int, limit: int
) -> None:
    """Of many lanes few tasks each are read: others may be older than what is listed beside them.

    Also where those beside them fill the page.
    """
    old = await add(store, 40, type="resize")
    many = [
        NewTask(new_id(), "resize", "{}", queue=f"tenant {number}", delay=60.0)
        for number in range(lanes)
    ]
    await store.enqueue(many)

    pages = await all_pages(store, TaskFilter(type="resize", limit=limit))

    assert len(pages[0].records) == min(read + len(old), limit)
    assert sorted(found(pages)) == sorted([*old, *(task.id for task in many)])


async def test_a_place_that_was_read_further_than_one_that_stopped_is_not_listed_again(
    store: PostgresStore, sessions: Sessions
) -> None:
    old = await add(store, 3)
    done = await add(store, 4, priority=90)
    await store.settle(settlements(await claim(store, limit=4), Outcome.COMPLETED))
    await sessions.watcher.execute(OTHERS, 10_001)

    pages = await all_pages(store, TaskFilter(type="resize", limit=4))

    assert sorted(found(pages)) == sorted([*old, *done])


async def test_what_is_read_in_the_order_it_became_ready_is_not_passed_over(
    store: PostgresStore, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind an old task that became ready last there are some newer than all of a full page."""
    monkeypatch.setattr(listing, "FEW", 1)
    old = await add(store, 1, delay=60.0)
    waiting = await add(store, 3, delay=3600.0)
    newer = await add(store, 3)
    await sessions.advance(timedelta(seconds=61))
    assert await store.promote(10) == 1

    first, *others = await all_pages(store, TaskFilter(type="resize", limit=2))

    assert found([first]) == waiting[:0:-1]
    assert sorted(found([first, *others])) == [*old, *waiting, *newer]


async def test_what_is_ready_of_a_time_is_not_looked_for_among_all_that_is_newer(
    store: PostgresStore, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "FEW", 1)
    begin = await store.now()
    old = id_at(begin)
    await store.enqueue([NewTask(old, "resize", "{}")])
    await sessions.advance(timedelta(hours=1))
    later = begin + timedelta(hours=1)
    await store.enqueue([NewTask(id_at(later), "resize", "{}") for _ in range(5)])

    until = begin + timedelta(minutes=30)
    wanted = TaskFilter(statuses=(PENDING,), type="resize", created_until=until, limit=2)
    pages = await all_pages(store, wanted)

    assert [found([page]) for page in pages] == [[old]]


@pytest.mark.parametrize("seconds", [-30, 30])
async def test_a_task_whose_producer_has_another_time_is_listed_by_when_it_was_created(
    store: PostgresStore, seconds: int
) -> None:
    """By the clock of the database: that of the producer, which made the id, is slow or fast."""
    task_id = id_at(await store.now() + timedelta(seconds=seconds))
    await store.enqueue([NewTask(task_id, "resize", "{}")])
    created = (await store.get(task_id)).created_at
    moment = timedelta(microseconds=1)

    listed = [
        found([await store.tasks(TaskFilter(created_from=since, created_until=since + moment))])
        for since in (created - moment, created, created + moment)
    ]

    assert listed == [[], [task_id], []]


async def test_a_position_is_that_of_its_filter(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add(store, 3)
    page = await store.tasks(TaskFilter(statuses=(PENDING,), limit=2))
    monkeypatch.setattr(listing, "FEW", 1)
    by_lane = await store.tasks(TaskFilter(statuses=(PENDING,), type="resize", limit=2))
    assert page.rest is not None
    assert by_lane.rest is not None

    for after, wanted in (
        (page.rest, TaskFilter(tag="red")),
        (page.rest, TaskFilter(statuses=(SCHEDULED,))),
        (by_lane.rest.replace("pending", "scheduled"), TaskFilter()),
        (f"{page.rest},", TaskFilter()),
    ):
        with pytest.raises(ConfigurationError, match="of no listing by this filter"):
            await store.tasks(replace(wanted, after=after))


async def test_a_time_at_the_edge_of_the_calendar_is_no_error(store: PostgresStore) -> None:
    moment = datetime.now(UTC)
    await store.enqueue([NewTask(id_at(moment), "resize", "{}")])
    ages = [datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)]

    pages = [
        await store.tasks(TaskFilter(created_from=since, created_until=until))
        for since in ages
        for until in ages
    ]

    assert [len(page.records) for page in pages] == [0, 1, 0, 0]


async def test_tags_are_forgotten_with_their_task_and_not_before(keeper: Keeper) -> None:
    kept = timedelta(0)
    for outcome in (Outcome.COMPLETED, Outcome.CANCELLED, Outcome.DEAD):
        await keeper.end(outcome, tags=("red", str(outcome)), retention=kept)
    reopened = await keeper.end(Outcome.CANCELLED, tags=("red",), retention=kept)
    await keeper.end(tags=("red",), retention=40 * DAY)
    await keeper.end()
    await keeper.store.retry(reopened)
    tags = "SELECT tag, count(*) FROM windlass.task_tag GROUP BY tag"
    before = dict(await keeper.watcher.fetch(tags))

    await keeper.retain()
    still = dict(await keeper.watcher.fetch(tags))
    await keeper.at(NOON + DAY)
    await keeper.retain()

    assert before == still == {"red": 5, "completed": 1, "cancelled": 1, "dead": 1}
    assert dict(await keeper.watcher.fetch(tags)) == {"red": 2}


async def test_a_tag_whose_task_is_gone_is_passed_over(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store, tags=("red",))
    await sessions.watcher.execute(
        "INSERT INTO windlass.task_tag (tag, task_id) "
        "SELECT 'red', ('f0000000-0000-7000-8000-' || lpad(n::text, 12, '0'))::uuid "
        "FROM generate_series(1, 1000) AS n"
    )

    pages = await all_pages(store, TaskFilter(tag="red"))

    assert found(pages) == [task_id]
    assert pages[0].looked_back_to is not None


BEFORE_TAGS = 8  # the number of the migration that keeps them apart
TAGGED = """
SELECT windlass.add_history_partition('2030-01-01', '2030-01-02');
INSERT INTO windlass.task (id, type, queue, priority, max_attempts, created_at, scheduled_for, payload, tags)
VALUES (gen_random_uuid(), 'resize', 'default', 10, 4, now(), now(), '{}', '{live,red,red}');
INSERT INTO windlass.history (id, type, queue, status, priority, max_attempts, attempts, generation,
    drop_on, created_at, scheduled_for, completed_at, payload, tags)
VALUES (gen_random_uuid(), 'resize', 'default', 'cancelled', 10, 4, 1, 1, '2030-01-01', now(), now(), now(),
    '{}', '{ended,red}');
INSERT INTO windlass.dead (id, type, queue, status, priority, max_attempts, attempts, generation,
    drop_on, created_at, scheduled_for, completed_at, payload, tags)
VALUES (gen_random_uuid(), 'resize', 'default', 'dead', 10, 4, 1, 1, '2030-01-01', now(), now(), now(),
    '{}', '{buried,red}');
"""


async def test_tasks_from_before_there_was_a_table_of_tags_are_found(
    empty_database_url: str, empty_sql_url: str
) -> None:
    store = PostgresStore(store_options(empty_database_url))
    old = [each for each in store._sql.migrations() if each.number < BEFORE_TAGS]
    session = await asyncpg.connect(empty_sql_url)
    await session.execute(store.schema.script(old))
    await session.execute(TAGGED)

    await store.open()
    listed = {
        tag: len((await store.tasks(TaskFilter(tag=tag))).records)
        for tag in ("red", "ended", "buried", "live")
    }
    indexes = await session.fetchval(
        "SELECT count(*) FROM pg_indexes WHERE tablename = 'history_20300101_20300102'"
    )
    await store.close()
    await session.close()

    assert listed == {"red": 3, "ended": 1, "buried": 1, "live": 1}
    assert indexes == 2
