"""The schema is brought up to date by anybody, any number of times, and never by half."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID, uuid4

import asyncpg
import pytest

from contract.pgbouncer import store_options
from windlass.model.errors import ConfigurationError, StoreUnavailable
from windlass.model.task import (
    Answer,
    ClaimRequest,
    NewTask,
    Outcome,
    Pulse,
    Rescued,
    Settlement,
    TaskState,
    WorkerInfo,
)
from windlass.store.postgres.store import PostgresStore

T = TypeVar("T")

WORKER = UUID(int=1)
LEASE = timedelta(seconds=30)
DAY = timedelta(days=1)
DEADLINE = 20.0  # seconds until a test gives up on a session

_numbers = count(1)

# Everything in a schema that somebody wrote, in words.
SCHEMA = """
SELECT 'column', table_name || '.' || column_name,
    concat_ws(' ', data_type, is_nullable, column_default, is_identity)
FROM information_schema.columns WHERE table_schema = $1
UNION ALL
SELECT 'index', indexname, indexdef FROM pg_indexes WHERE schemaname = $1
UNION ALL
SELECT 'constraint', conrelid::regclass::text || '.' || conname, pg_get_constraintdef(oid)
FROM pg_constraint WHERE connamespace = $1::text::regnamespace
UNION ALL
SELECT 'trigger', tgname, pg_get_triggerdef(t.oid)
FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
WHERE c.relnamespace = $1::text::regnamespace AND NOT tgisinternal
UNION ALL
SELECT 'function', proname, pg_get_functiondef(oid)
FROM pg_proc WHERE pronamespace = $1::text::regnamespace
UNION ALL
SELECT 'view', viewname, definition FROM pg_views WHERE schemaname = $1
UNION ALL
SELECT 'table', relname, concat_ws(' ', relkind, reloptions::text)
FROM pg_class WHERE relnamespace = $1::text::regnamespace AND relkind IN ('r', 'p')
ORDER BY 1, 2, 3
"""


def new_store(url: str, **options: Any) -> PostgresStore:
    return PostgresStore(store_options(url, **options))


def numbers(store: PostgresStore) -> list[int]:
    return [migration.number for migration in store._sql.migrations()]


@pytest.fixture
async def session(empty_sql_url: str) -> AsyncIterator[asyncpg.Connection]:
    session = await asyncpg.connect(empty_sql_url)
    yield session
    await session.close()


async def schema_of(session: asyncpg.Connection, name: str = "windlass") -> list[tuple[Any, ...]]:
    await session.execute("SET search_path = ''")  # or names would be cut short for some
    return [tuple(row) for row in await session.fetch(SCHEMA, name)]


# Applied and pending


async def test_a_database_without_our_schema_lacks_everything(empty_database_url: str) -> None:
    store = new_store(empty_database_url)

    pending = await store.schema.pending()

    assert [migration.number for migration in pending] == numbers(store)


async def test_migrating_twice_is_harmless(
    empty_database_url: str, session: asyncpg.Connection
) -> None:
    store = new_store(empty_database_url)

    first = await store.schema.migrate()
    made = await schema_of(session)
    second = await store.schema.migrate()

    assert [migration.number for migration in first] == numbers(store)
    assert second == []
    assert await store.schema.pending() == []
    assert await schema_of(session) == made
    noted = await session.fetch("SELECT number FROM windlass.migration ORDER BY number")
    assert [row["number"] for row in noted] == numbers(store)


async def test_numbers_have_no_gap_and_no_double(empty_database_url: str) -> None:
    found = numbers(new_store(empty_database_url))

    assert found == list(range(1, len(found) + 1))


async def test_looking_for_what_is_pending_changes_nothing(
    empty_database_url: str, session: asyncpg.Connection
) -> None:
    await new_store(empty_database_url).schema.pending()

    assert await session.fetchval("SELECT to_regnamespace('windlass')") is None


async def test_a_store_that_may_not_migrate_names_the_command(empty_database_url: str) -> None:
    store = new_store(empty_database_url, auto_migrate=False)

    with pytest.raises(ConfigurationError, match=r"0001_.*run: windlass migrate"):
        await store.open()


async def test_a_store_that_may_not_migrate_opens_on_a_schema_that_is_up_to_date(
    database_url: str,
) -> None:
    store = new_store(database_url, auto_migrate=False)

    await store.open()

    assert await store.queues() == []
    await store.close()


async def test_only_what_is_missing_is_applied(
    empty_database_url: str, session: asyncpg.Connection
) -> None:
    store = new_store(empty_database_url)
    first = store._sql.migrations()[0]
    await session.execute(store.schema.script([first]))

    pending = [migration.number for migration in await store.schema.pending()]
    applied = [migration.number for migration in await store.schema.migrate()]

    assert pending == applied == numbers(store)[1:]


TAGGED = """
INSERT INTO windlass.task (id, type, queue, priority, max_attempts, created_at, scheduled_for, payload, tags)
VALUES (gen_random_uuid(), 'a', 'default', 10, 4, now(), now(), '{}', '{live,all,all}');
INSERT INTO windlass.dead (id, type, queue, status, priority, max_attempts, attempts, generation, drop_on,
    created_at, scheduled_for, completed_at, payload, tags)
VALUES (gen_random_uuid(), 'a', 'default', 'dead', 10, 4, 4, 4, current_date, now(), now(), now(), '{}',
    '{dead,all,all}');
SELECT windlass.add_history_partition(current_date, current_date + 1);
INSERT INTO windlass.history (id, type, queue, status, priority, max_attempts, attempts, generation, drop_on,
    created_at, scheduled_for, completed_at, payload, tags)
VALUES (gen_random_uuid(), 'a', 'default', 'cancelled', 10, 4, 0, 1, current_date, now(), now(), now(), '{}',
    '{cancelled,all}');
"""


async def test_tasks_are_locked_for_the_tags_of_live_ones_and_the_others_get_theirs_later(
    empty_database_url: str, session: asyncpg.Connection
) -> None:
    store = new_store(empty_database_url)
    known = store._sql.migrations()
    await session.execute(store.schema.script(known[:7]))
    await session.execute(TAGGED)

    async with session.transaction():
        # Whoever holds the tasks needs nothing of these, which may be large or in use.
        await session.execute("LOCK TABLE windlass.history, windlass.dead, windlass.scheduled")
        other = await asyncpg.connect(empty_database_url)
        await asyncio.wait_for(other.execute(store.schema.script(known[7:8])), DEADLINE)
        await other.close()
    await store.schema.migrate()

    found = await session.fetch(
        "SELECT tag, count(*) FROM windlass.task_tag GROUP BY tag ORDER BY tag"
    )
    assert [tuple(row) for row in found] == [("all", 3), ("cancelled", 1), ("dead", 1), ("live", 1)]
    indexes = "SELECT count(*) FROM pg_indexes WHERE tablename LIKE 'history_2%' AND indexdef LIKE '%cancelled%'"
    assert await session.fetchval(indexes) == 1


async def test_a_database_of_another_encoding_is_refused_before_anything_is_written(
    server_url: str,
) -> None:
    admin = await asyncpg.connect(server_url)
    name = f"latin_{uuid4().hex}"
    await admin.execute(
        f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' LOCALE_PROVIDER libc TEMPLATE template0"
    )
    try:
        url = urlunsplit(urlsplit(server_url)._replace(path=f"/{name}"))
        store = new_store(url)
        for call in (store.open, store.schema.migrate, store.schema.pending):
            with pytest.raises(ConfigurationError, match=r"is LATIN1, .* ENCODING 'UTF8'"):
                await call()
        await store.close()
        inside = await asyncpg.connect(url)
        assert await inside.fetchval("SELECT to_regnamespace('windlass')") is None
        await inside.close()
    finally:
        await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
        await admin.close()


@pytest.mark.parametrize("auto_migrate", [False, True])
async def test_a_schema_newer_than_the_code_is_refused(
    database_url: str, sql_url: str, auto_migrate: bool
) -> None:
    session = await asyncpg.connect(sql_url)
    await session.execute(
        "INSERT INTO windlass.migration (number, name) VALUES (9999, 'from_the_future')"
    )
    before = await schema_of(session)
    store = new_store(database_url, auto_migrate=auto_migrate)

    for call in (store.open, store.schema.pending, store.schema.migrate):
        with pytest.raises(ConfigurationError, match=r"9999.*upgrade windlass"):
            await call()

    assert await schema_of(session) == before
    await session.close()


async def test_a_migration_does_not_wait_long_for_a_table(
    empty_database_url: str, session: asyncpg.Connection
) -> None:
    store = new_store(empty_database_url)
    async with session.transaction():
        await session.execute(store._sql.statement("lock_migrations"))

        assert await session.fetchval("SELECT current_setting('lock_timeout')") == "5s"


# By hand


async def test_the_script_run_by_hand_gives_the_same_schema(
    empty_database_url: str, session: asyncpg.Connection, sql_url: str
) -> None:
    store = new_store(empty_database_url, auto_migrate=False)
    migrated = await asyncpg.connect(sql_url)

    await session.execute(store.schema.script(await store.schema.pending()))

    assert await schema_of(session) == await schema_of(migrated)
    assert await store.schema.pending() == []
    noted = "SELECT number, name FROM windlass.migration ORDER BY number"
    assert await session.fetch(noted) == await migrated.fetch(noted)
    assert await store.schema.migrate() == []
    await store.open()
    await work(store)
    await store.close()
    await migrated.close()


async def test_the_script_for_another_schema_makes_that_one(
    empty_database_url: str, session: asyncpg.Connection
) -> None:
    store = new_store(empty_database_url, schema="other_place", auto_migrate=False)

    await session.execute(store.schema.script(await store.schema.pending()))

    assert await store.schema.pending() == []
    assert await session.fetchval("SELECT to_regnamespace('windlass')") is None


# Another name


async def work(store: PostgresStore, of: str = "resize") -> list[UUID]:
    """Take tasks along every way there is; return their ids."""
    tasks = [
        NewTask(UUID(int=7 << 76 | 2 << 62 | next(_numbers)), of, "{}", idempotency_key=str(n))
        for n in range(5)
    ]
    ids = [answer.id for answer in await store.enqueue(tasks)]
    request = ClaimRequest(WORKER, (of,), 10, LEASE, timedelta(seconds=6))
    claim = (await store.claim(request)).claim
    assert claim is not None
    assert [task.id for task in claim.tasks] == ids
    assert (await store.pulse(Pulse(WORKER, [claim.token], LEASE, 1, False))).kept
    error = '{"type": "ValueError", "message": "no such image"}'
    outcomes = [Outcome.COMPLETED, Outcome.DEAD, Outcome.RETRIED, Outcome.CANCELLED]
    answers = await store.settle(
        [
            Settlement(claim.token, task.id, task.generation, outcome, error=error)
            for task, outcome in zip(claim.tasks, outcomes, strict=False)
        ]
    )
    assert answers == [Answer.APPLIED] * 4
    await store.retry(ids[1])
    assert await store.rescue(100) == Rescued()
    states = [(await store.get(task_id)).status for task_id in ids]
    assert states == [
        TaskState.COMPLETED,
        TaskState.PENDING,
        TaskState.PENDING,
        TaskState.CANCELLED,
        TaskState.CLAIMED,
    ]
    return ids


async def contents(session: asyncpg.Connection, schema: str) -> dict[str, list[Any]]:
    """Every row of every table of a schema."""
    tables = await session.fetch(
        "SELECT relname FROM pg_class WHERE relnamespace = $1::text::regnamespace AND relkind = 'r'",
        schema,
    )
    rows = {}
    for (table,) in tables:
        found = await session.fetch(f"SELECT t::text AS row FROM {schema}.{table} t ORDER BY 1")
        rows[table] = [row["row"] for row in found]
    return rows


async def test_another_schema_works_beside_the_default_and_does_not_touch_it(
    database_url: str,
    sql_url: str,
) -> None:
    session = await asyncpg.connect(sql_url)
    default = new_store(database_url)
    other = new_store(database_url, schema="other_place")
    await default.open()
    await other.open()
    mine = await work(default)
    before = await contents(session, "windlass")

    theirs = await work(other)
    leadership = await other.lead(WORKER, current=None, term=LEASE)
    assert leadership is not None
    await other.register(
        WorkerInfo(WORKER, "host", 1, "0.1", 10, ("resize",), None), lease=timedelta(0)
    )
    await session.execute(
        "CREATE OR REPLACE FUNCTION other_place.clock() RETURNS timestamptz LANGUAGE sql "
        "VOLATILE AS $$SELECT clock_timestamp() + interval '60 days'$$"
    )
    leadership = await other.lead(WORKER, current=leadership, term=LEASE)
    assert leadership is not None
    assert (await other.rescue(100, leadership=leadership)).returned == 1
    assert await other.remove_dead_workers(leadership=leadership) == [WORKER]
    await other.tidy(leadership=leadership)
    assert await other.prepare_history(leadership=leadership) > 0
    assert (await other.retain(leadership=leadership)).partitions > 0

    assert await contents(session, "windlass") == before
    assert (await default.get(mine[0])).status is TaskState.COMPLETED
    assert await other.ended(theirs[:1]) == ([], theirs[:1])  # forgotten there
    assert await default.ended(mine[:1]) != ([], mine[:1])
    await default.close()
    await other.close()
    await session.close()


async def test_another_schema_has_the_same_shape(database_url: str, sql_url: str) -> None:
    session = await asyncpg.connect(sql_url)
    await new_store(database_url, schema="other_place").schema.migrate()

    def renamed(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        return [tuple(part.replace("other_place", "windlass") for part in row) for row in rows]

    other = renamed(await schema_of(session, "other_place"))
    assert sorted(other) == sorted(await schema_of(session))
    await session.close()


@pytest.mark.needs_direct("notifications reach a session")
async def test_another_schema_wakes_only_its_own_workers(database_url: str) -> None:
    longest = "other_place_" + "x" * 46
    stores = [new_store(database_url), new_store(database_url, schema=longest)]
    heard = [asyncio.Queue[None](), asyncio.Queue[None]()]
    for store in stores:
        await store.open()
        info = WorkerInfo(WORKER, "host", 1, "0.1", 10, ("resize",), None)
        await store.register(info, lease=LEASE)
        await store.set_idle(WORKER, idle=True)

    def ring(which: int, *_named: object) -> None:
        heard[which].put_nowait(None)

    wakes = [partial(ring, which) for which in (0, 1)]
    async with stores[0].listen(wakes[0]), stores[1].listen(wakes[1]):
        for which in (1, 0):
            await stores[which].enqueue([NewTask(uuid4(), "resize", "{}")])
            await asyncio.wait_for(heard[which].get(), DEADLINE)

    assert [queue.qsize() for queue in heard] == [0, 0]
    for store in stores:
        await store.close()


@pytest.mark.parametrize("name", ["", "Windlass", "a-b", "a.b", 'a"b', "a b", "1a", "a" * 59])
def test_a_schema_name_that_would_need_quotes_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"schema .* at most 58, and not pg_"):
        new_store("postgresql://nobody@nowhere/none", schema=name)


# Rights


@pytest.fixture
async def stranger(server_url: str) -> AsyncIterator[str]:
    """A role that may connect and nothing else."""
    name = f"stranger_{uuid4().hex}"
    admin = await asyncpg.connect(server_url)
    await admin.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'secret'")
    yield name
    await admin.execute(f"DROP ROLE {name}")
    await admin.close()


def as_role(url: str, role: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{role}:secret@{parts.netloc.rpartition('@')[2]}"))


async def test_a_role_that_may_not_make_the_schema_is_told_the_command(
    empty_sql_url: str, stranger: str
) -> None:
    store = new_store(as_role(empty_sql_url, stranger))

    for call in (store.open, store.schema.migrate):
        with pytest.raises(ConfigurationError, match=r"may not migrate.*run: windlass migrate"):
            await call()


async def test_a_role_that_may_not_change_the_schema_is_told_the_command(
    empty_sql_url: str, session: asyncpg.Connection, stranger: str
) -> None:
    owner = new_store(empty_sql_url)
    await session.execute(owner.schema.script(owner._sql.migrations()[:1]))
    await session.execute(f"GRANT USAGE ON SCHEMA windlass TO {stranger}")
    await session.execute(f"GRANT SELECT ON windlass.migration TO {stranger}")

    try:
        with pytest.raises(ConfigurationError, match=r"may not migrate.*run: windlass migrate"):
            await new_store(as_role(empty_sql_url, stranger)).open()
    finally:
        await session.execute(f"DROP OWNED BY {stranger}")


async def test_a_role_that_may_not_see_the_schema_is_told_so(sql_url: str, stranger: str) -> None:
    for auto_migrate in (False, True):
        store = new_store(as_role(sql_url, stranger), auto_migrate=auto_migrate)
        with pytest.raises(ConfigurationError, match="right"):
            await store.open()


async def test_a_role_without_the_right_to_migrate_opens_a_schema_that_is_up_to_date(
    sql_url: str, stranger: str
) -> None:
    session = await asyncpg.connect(sql_url)
    await session.execute(f"GRANT USAGE ON SCHEMA windlass TO {stranger}")
    await session.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA windlass TO {stranger}")
    store = new_store(as_role(sql_url, stranger))

    try:
        await store.open()
        task_id = uuid4()
        await store.enqueue([NewTask(task_id, "resize", "{}")])
        assert (await store.get(task_id)).status is TaskState.PENDING
    finally:
        await store.close()
        await session.execute(f"DROP OWNED BY {stranger}")
        await session.close()


# Killed half-way


PAUSE = """
CREATE FUNCTION public.pause() RETURNS event_trigger LANGUAGE plpgsql AS $$
DECLARE
    command record;
BEGIN
    FOR command IN SELECT * FROM pg_event_trigger_ddl_commands() LOOP
        IF command.object_identity ~ 'OBJECT' THEN
            PERFORM pg_advisory_xact_lock_shared(1);
        END IF;
    END LOOP;
END $$;
CREATE EVENT TRIGGER pause ON ddl_command_end EXECUTE FUNCTION public.pause();
"""


async def blocked(session: asyncpg.Connection, call: Awaitable[T]) -> tuple[asyncio.Task[T], int]:
    """Make a call, and return it once it waits for what the session holds, with its process."""
    task = asyncio.ensure_future(call)
    assert isinstance(task, asyncio.Task)
    waiting = (
        "SELECT pid FROM pg_stat_activity "
        "WHERE wait_event_type = 'Lock' AND pg_backend_pid() = ANY (pg_blocking_pids(pid))"
    )
    deadline = time.monotonic() + DEADLINE
    while (pid := await session.fetchval(waiting)) is None:
        assert not task.done(), f"did not wait: {task}"
        assert time.monotonic() < deadline, "never waited"
        await asyncio.sleep(0.005)
    return task, pid


@pytest.mark.parametrize(
    ("place", "applied"),
    [("windlass.migration", 0), ("windlass.history", 0), ("windlass.settle_tasks", 1)],
)
async def test_a_migration_killed_half_way_is_repeated(
    empty_database_url: str, session: asyncpg.Connection, place: str, applied: int
) -> None:
    store = new_store(empty_database_url)
    await session.execute(PAUSE.replace("OBJECT", place))
    await session.execute("SELECT pg_advisory_lock(1)")
    migrating, pid = await blocked(session, store.schema.migrate())

    await session.execute("SELECT pg_terminate_backend($1)", pid)
    with pytest.raises(StoreUnavailable):
        await migrating
    await session.execute("SELECT pg_advisory_unlock(1); DROP EVENT TRIGGER pause")

    left = [migration.number for migration in await store.schema.pending()]
    assert left == numbers(store)[applied:]
    assert [migration.number for migration in await store.schema.migrate()] == left
    await store.open()
    await work(store)
    await store.close()


async def test_a_second_migration_waits_for_the_first_and_applies_nothing_twice(
    empty_database_url: str, session: asyncpg.Connection
) -> None:
    stores = [new_store(empty_database_url) for _ in range(2)]
    await session.execute(PAUSE.replace("OBJECT", "windlass.settle_tasks"))
    await session.execute("SELECT pg_advisory_lock(1)")
    first, pid = await blocked(session, stores[0].schema.migrate())

    second = asyncio.create_task(stores[1].schema.migrate())
    deadline = time.monotonic() + DEADLINE
    while not await session.fetchval(
        "SELECT count(*) FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid))", pid
    ):
        assert not second.done(), f"did not wait: {second}"
        assert time.monotonic() < deadline, "never waited"
        await asyncio.sleep(0.005)
    await session.execute("SELECT pg_advisory_unlock(1)")

    # The lock is free between two steps: which of them applies the later ones is open.
    by_first, by_second = await first, await second
    assert {1, 2} <= {migration.number for migration in by_first}
    applied = sorted(migration.number for migration in [*by_first, *by_second])
    assert applied == numbers(stores[0])


async def test_eight_migrations_at_once_apply_each_step_once(empty_database_url: str) -> None:
    stores = [new_store(empty_database_url) for _ in range(8)]

    applied = await asyncio.gather(*(store.schema.migrate() for store in stores))

    steps = [step.number for steps in applied for step in steps]
    assert sorted(steps) == [step.number for step in stores[0]._sql.migrations()]
    assert await stores[0].schema.pending() == []
