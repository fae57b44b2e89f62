"""One plain task by SQL takes a short way: what is written and said is the same as on the long one."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import asyncpg
import pytest

from acceptance.quick import QUICK
from windlass import App

AT_ONCE = 10  # seconds
PARAMETERS = {
    "type": "text",
    "payload": "jsonb",
    "queue": "text",
    "priority": "integer",
    "delay": "float8",
    "at": "timestamptz",
    "idempotency_key": "text",
    "max_attempts": "integer",
    "tags": "text[]",
}
TAKEN = """
SELECT coalesce(sum(calls), 0) FROM pg_stat_xact_user_functions
WHERE schemaname = 'windlass' AND funcname = 'enqueue_many'
"""
WRITTEN = """
SELECT
    to_jsonb(t) - '{id,created_at,scheduled_for}'::text[] AS task, t.scheduled_for - t.created_at AS waits,
    r.lane, r.generation, r.ready_at = t.created_at AS is_ready_at_once, r.x = pg_current_xact_id() AS is_ours,
    (SELECT array_agg(to_jsonb(l) - 'listed_at') FROM windlass.lane l) AS lanes
FROM windlass.task t LEFT JOIN windlass.ready r ON r.task_id = t.id
WHERE t.id = $1
"""
LOCKED = """
SELECT DISTINCT c.relname FROM pg_locks k JOIN pg_class c ON c.oid = k.relation
WHERE k.pid = pg_backend_pid() AND c.relnamespace = 'windlass'::regnamespace AND c.relkind <> 'i'
"""


class Outcome(NamedTuple):
    """What one call wrote, or said."""

    written: Any
    took_the_long_way: bool


@pytest.fixture
async def app(database_url: str) -> AsyncIterator[App]:
    app = App(database_url, **QUICK)

    @app.task(
        name="mail.send", queue="mail", priority="high", retry=7, retention=timedelta(hours=1)
    )
    async def send(to: str = "") -> str:
        return f"sent to {to}"

    @app.task
    async def work(n: int = 0) -> int:
        return n

    async with app:
        definitions = [send.definition.defaults, work.definition.defaults]
        await (await app.store()).register_types(definitions)
        yield app


@pytest.fixture
async def sql(app: App, sql_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(sql_url)
    await connection.execute("SET track_functions = 'pl'")
    yield connection
    await connection.close()


@pytest.fixture
async def other(app: App, sql_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(sql_url)
    yield connection
    await connection.close()


def by_enqueue(asked: dict[str, Any]) -> str:
    named = (f"{name} => ${n}::{PARAMETERS[name]}" for n, name in enumerate(asked, 1))
    return f"SELECT windlass.enqueue({', '.join(named)})"


def by_enqueue_many(asked: dict[str, Any]) -> str:
    named = (f"'{name}', ${n}::{PARAMETERS[name]}" for n, name in enumerate(asked, 1))
    return (
        f"SELECT windlass.enqueue_many(jsonb_build_array(jsonb_build_object({', '.join(named)})))"
    )


async def outcome(sql: asyncpg.Connection, call: str, asked: dict[str, Any]) -> Outcome:
    """Make a call and take it back."""
    transaction = sql.transaction()
    await transaction.start()
    before = await sql.fetchval(TAKEN)
    try:
        async with sql.transaction():
            added = await sql.fetchval(call, *asked.values())
            assert UUID(str(added)).version == 7
            written: Any = tuple(await sql.fetchrow(WRITTEN, added))
            took_the_long_way = await sql.fetchval(TAKEN) > before
    except asyncpg.PostgresError as error:
        written = (error.sqlstate, error.message, error.detail, error.hint)
        took_the_long_way = True  # nothing else refuses
    await transaction.rollback()
    return Outcome(written, took_the_long_way)


def payload_of(size: int, letter: str = "y") -> str:
    """A payload of so many bytes, as PostgreSQL writes it."""
    rest, of_one = divmod(size - len('{"x": ""}'), len(letter.encode()))
    return json.dumps({"x": letter * rest + "y" * of_one}, ensure_ascii=False)


PLAIN: list[dict[str, Any]] = [
    {"type": "unheard"},
    {"type": "unheard", "queue": None, "priority": None, "max_attempts": None, "tags": None},
    {"type": "mail.send"},
    {"type": "mail.send", "payload": '{"to": "a", "n": 1.50, "deep": [{"a": [null, true]}]}'},
    {"type": "mail.send", "queue": "bulk", "priority": 0, "max_attempts": 1},
    {"type": "mail.send", "queue": "bulk"},
    {"type": "mail.send", "priority": 100},
    {"type": "mail.send", "max_attempts": 30_000},
    {"type": "t" * 200, "queue": "é" * 200},
    {"type": "\u00a0 '\"\\%", "queue": " "},
    {"type": "work", "payload": "{}"},
    {"type": "work", "payload": payload_of(299)},
    {"type": "work", "payload": payload_of(299, "é")},
    {"type": "work", "payload": json.dumps({"x": 10**200})},
    {"type": "work", "payload": '{"x": 1e-200}'},
]
LONG: list[dict[str, Any]] = [
    {"type": "work", "payload": payload_of(300)},
    {"type": "work", "payload": payload_of(300, "é")},
    {"type": "work", "payload": payload_of(5000)},
    {"type": "work", "payload": payload_of(2_000_000)},
    {"type": "work", "payload": '{"x": 1e400}'},
    {"type": "work", "payload": '{"x": 1e5000}'},
    {"type": "work", "payload": '{"x": 1.5e310}'},
    {"type": "work", "payload": json.dumps({"x": [1] * 90})},  # short as a text, long as it is held
    {"type": "work", "payload": '{"x":' + "[" * 210 + "]" * 210 + "}"},
    {"type": "work", "payload": None},
    {"type": "work", "payload": "null"},
    {"type": "work", "payload": "[]"},
    {"type": "work", "payload": '"x"'},
    {"type": "work", "payload": "5"},
    {"type": None},
    {"type": ""},
    {"type": "t" * 201},
    *({"type": f"a{sign}"} for sign in "\x01\n\x1f\x7f\x80\x9f"),
    {"type": "work", "queue": ""},
    {"type": "work", "queue": "é" * 201},
    *({"type": "work", "queue": f"a{sign}"} for sign in "\x01\n\x1f\x7f\x80\x9f"),
    {"type": "work", "priority": -1},
    {"type": "work", "priority": 101},
    {"type": "work", "priority": 1 << 20},
    {"type": "work", "max_attempts": 0},
    {"type": "work", "max_attempts": 30_001},
    {"type": "work", "max_attempts": 1 << 20},
    {"type": "work", "delay": 0.0},
    {"type": "work", "delay": -1.0},
    {"type": "work", "at": datetime(1980, 1, 1, tzinfo=UTC)},
    {"type": "work", "delay": 1.0, "at": datetime(2100, 1, 1, tzinfo=UTC)},
    {"type": "work", "idempotency_key": "k"},
    {"type": "work", "idempotency_key": ""},
    {"type": "work", "tags": []},
    {"type": "work", "tags": ["a", "b"]},
    {"type": "work", "tags": [""]},
]


@pytest.mark.parametrize(
    ("asked", "is_plain"),
    [*((one, True) for one in PLAIN), *((one, False) for one in LONG)],
    ids=lambda value: ascii(value)[:60],
)
async def test_the_same_is_written_and_said_on_both_ways(
    sql: asyncpg.Connection, asked: dict[str, Any], is_plain: bool
) -> None:
    for _ in range(2):
        short = await outcome(sql, by_enqueue(asked), asked)
        long = await outcome(sql, by_enqueue_many(asked), asked)

        assert short.written == long.written
        assert (short.took_the_long_way, long.took_the_long_way) == (not is_plain, True)
        # From here on its lane is listed.
        await sql.execute("SELECT windlass.enqueue('work'), windlass.enqueue('mail.send')")


@pytest.mark.parametrize(
    ("payload", "is_plain"),
    [
        ('{"x": "eleven byte"}', True),
        ('{"x": "twelve bytes"}', False),  # of 20 bytes, without the blank
        ('{"x": "thirteen byte"}', False),
        ('{"x": [1, 2, 3, 4]}', True),
        ('{"x": [1, 2, 3, 4, 5]}', False),
        ('{"x": [1, 2, 3, 4, 56, 7]}', False),
    ],
)
async def test_the_limit_of_the_application_holds_on_both_ways(
    sql: asyncpg.Connection, payload: str, is_plain: bool
) -> None:
    await sql.execute("UPDATE windlass.setting SET max_payload_bytes = 20")
    asked = {"type": "work", "payload": payload}
    short = await outcome(sql, by_enqueue(asked), asked)
    long = await outcome(sql, by_enqueue_many(asked), asked)

    assert short.written == long.written
    assert short.took_the_long_way is not is_plain
    assert (short.written[0] == "WL005") == (
        len(json.dumps(json.loads(payload), separators=(",", ":"))) > 20
    )


async def test_payloads_whose_text_would_be_of_gigabytes_are_refused_unread(
    sql: asyncpg.Connection,
) -> None:
    payload = '{"x": [' + ", ".join(["1e130000"] * 10_000) + "]}"
    await sql.execute("SET statement_timeout = '10s'")
    with pytest.raises(asyncpg.PostgresError, match="more digits than can be read back"):
        await sql.execute("SELECT windlass.enqueue('work', $1::text::jsonb)", payload)
    kind = {
        "type": "work",
        "queue": "default",
        "priority": 10,
        "max_attempts": 4,
        "id": str(uuid4()),
    }
    item = json.dumps(kind)[:-1] + f', "payload": {payload}}}'
    with pytest.raises(asyncpg.PostgresError, match="more digits than can be read back"):
        await sql.execute("SELECT windlass.enqueue_many($1::text::jsonb)", f"[{item}]")


async def test_tasks_run_in_the_order_in_which_they_were_enqueued(
    app: App, sql: asyncpg.Connection
) -> None:
    payloads = [payload_of(290 + n) for n in range(20)]  # both ways
    async with sql.transaction():
        for payload in payloads:
            await sql.execute("SELECT windlass.enqueue('unheard', $1::text::jsonb)", payload)

    rows = await sql.fetch(
        "SELECT t.payload FROM windlass.ready r JOIN windlass.task t ON t.id = r.task_id ORDER BY r.x, r.n"
    )
    assert [row[0] for row in rows] == payloads
    assert await sql.fetchval("SELECT count(*) FROM windlass.lane") == 1


async def test_a_task_of_a_paused_queue_waits_for_it(app: App, sql: asyncpg.Connection) -> None:
    store = await app.store()
    await store.pause("default")
    added = await sql.fetchval("SELECT windlass.enqueue('work', '{\"n\": 5}')")
    await app.run_worker(until_idle=True)
    assert (await app.handle(added).get()).status == "pending"

    await store.resume("default")
    await app.run_worker(until_idle=True)
    assert await app.handle(added).result(timeout=AT_ONCE) == 5


@pytest.mark.parametrize("kept", [False, True])
async def test_the_commit_names_the_new_task_and_its_lane_and_a_rollback_nothing(
    sql: asyncpg.Connection, other: asyncpg.Connection, kept: bool
) -> None:
    told: asyncio.Queue[str] = asyncio.Queue()
    await other.add_listener("windlass.wake", lambda *said: told.put_nowait(said[-1]))
    transaction = sql.transaction()
    await transaction.start()
    await sql.execute("SELECT windlass.enqueue('work'), windlass.enqueue('mail.send')")
    ready = await sql.fetch("SELECT lane, task_id FROM windlass.ready ORDER BY n")
    await (transaction.commit() if kept else transaction.rollback())
    await sql.execute("SELECT pg_notify('windlass.wake', 'the last')")

    async with asyncio.timeout(AT_ONCE):
        heard = [await told.get() for _ in range(3 if kept else 1)]
    named = [f"{lane} {task_id}" for lane, task_id in ready]
    assert heard == ([*named, "the last"] if kept else ["the last"])
    for table in ("task", "ready", "lane"):
        assert await other.fetchval(f"SELECT count(*) FROM windlass.{table}") == (2 if kept else 0)


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_transactions_of_every_kind_enqueue_beside_each_other(
    app: App, sql: asyncpg.Connection, other: asyncpg.Connection, isolation: Any
) -> None:
    await other.execute("SELECT windlass.enqueue('work')")
    async with sql.transaction(isolation=isolation):
        first = await sql.fetchval("SELECT windlass.enqueue('work', '{\"n\": 1}')")
        async with other.transaction(isolation=isolation):
            second = await other.fetchval("SELECT windlass.enqueue('work', '{\"n\": 2}')")
            await other.execute("SELECT windlass.enqueue('work')")
        await sql.execute("SELECT windlass.enqueue('work')")

    await app.run_worker(until_idle=True)
    assert await app.handle(first).result(timeout=AT_ONCE) == 1
    assert await app.handle(second).result(timeout=AT_ONCE) == 2


async def test_it_waits_for_no_transaction_of_another(
    app: App, sql: asyncpg.Connection, other: asyncpg.Connection, sql_url: str
) -> None:
    """One that reads, with an old snapshot; one that writes into the same lane, and into a new one."""
    await sql.execute("SELECT windlass.enqueue('work')")
    reader = await asyncpg.connect(sql_url)
    async with reader.transaction(isolation="repeatable_read"):
        await reader.fetch("SELECT FROM windlass.tasks")
        async with other.transaction():
            await other.execute("SELECT windlass.enqueue('work'), windlass.enqueue('new')")
            async with asyncio.timeout(AT_ONCE):
                await sql.execute("SELECT windlass.enqueue('work'), windlass.enqueue('new')")
                await app.run_worker(until_idle=True)
            left = await sql.fetchval("SELECT count(*) FROM windlass.task")
    await reader.close()

    assert left == 1  # of the type that nobody handles


async def test_it_locks_nothing_that_retention_needs(sql: asyncpg.Connection) -> None:
    """The caller may keep its transaction open for long."""
    async with sql.transaction():
        await sql.execute("SELECT windlass.enqueue('work')")
        locked = {row[0] for row in await sql.fetch(LOCKED)}

    assert locked == {"task", "ready", "ready_n_seq", "lane", "setting", "task_type"}
