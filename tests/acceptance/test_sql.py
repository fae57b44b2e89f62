"""Enqueue and cancel by SQL: the same defaults, the same keys, the same errors as from Python."""

import json
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from acceptance.quick import QUICK
from windlass import App, IdempotencyConflict, PayloadError, Retry
from windlass.model.task import TaskFilter

HOUR = timedelta(hours=1)


@pytest.fixture
async def app(database_url: str) -> AsyncIterator[App]:
    app = App(database_url, **QUICK)

    @app.task(name="mail.send", queue="mail", priority="high", retry=7, retention=HOUR)
    async def send(to: str) -> str:
        return f"sent to {to}"

    async with app:
        await (await app.store()).register_types([send.definition.defaults])
        yield app


@pytest.fixture
async def sql(app: App, sql_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(sql_url)
    yield connection
    await connection.close()


async def add(sql: asyncpg.Connection, *tasks: Any) -> list[str]:
    rows = await sql.fetch("SELECT windlass.enqueue_many($1::jsonb)", json.dumps(tasks))
    return [str(row[0]) for row in rows]


async def test_a_task_enqueued_by_sql_runs_with_the_defaults_of_its_type(
    app: App, sql: asyncpg.Connection
) -> None:
    task_id = await sql.fetchval("SELECT windlass.enqueue('mail.send', '{\"to\": \"a\"}')")
    task = await app.handle(task_id).get()
    kept_for = await sql.fetchval("SELECT retention_seconds FROM windlass.task")
    await app.run_worker(until_idle=True)

    assert UUID(str(task_id)).version == 7
    assert kept_for == HOUR.total_seconds()
    assert (task.queue, task.priority, task.max_attempts) == ("mail", 20, 7)
    assert await app.handle(task_id).result(timeout=10) == "sent to a"


async def test_functions_with_the_rights_of_their_owner_are_for_nobody_and_look_nowhere_else(
    sql: asyncpg.Connection,
) -> None:
    functions = await sql.fetch(
        "SELECT proname, has_function_privilege('public', oid, 'EXECUTE') AS is_open, proconfig "
        "FROM pg_proc WHERE prosecdef AND pronamespace = 'windlass'::regnamespace"
    )

    assert {name for name, _, _ in functions} == {
        *("enqueue", "enqueue_many", "cancel", "complete_task", "complete_and_call"),
        *("enqueue_windowed", "reserve_windows"),
    }
    for name, is_open, settings in functions:
        assert not is_open, name
        assert "search_path=pg_catalog, pg_temp" in settings, name


async def test_a_type_that_nobody_registered_has_the_general_defaults(
    app: App, sql: asyncpg.Connection
) -> None:
    task = await app.handle(await sql.fetchval("SELECT windlass.enqueue('unheard')")).get()

    assert (task.queue, task.priority, task.max_attempts) == ("default", 10, 4)
    assert (task.status, task.payload, task.tags) == ("pending", {}, ())


async def test_every_option_is_taken(app: App, sql: asyncpg.Connection) -> None:
    at = datetime.now(UTC) + HOUR
    task_id = await sql.fetchval(
        "SELECT windlass.enqueue('mail.send', queue => 'bulk', priority => 3, at => $1, "
        "idempotency_key => 'k', max_attempts => 2, tags => ARRAY['a', 'b'], payload => '{}')",
        at,
    )
    task = await app.handle(task_id).get()
    tagged = await (await app.store()).tasks(TaskFilter(tag="b"))

    assert (task.queue, task.priority, task.max_attempts) == ("bulk", 3, 2)
    assert (task.status, task.scheduled_for) == ("scheduled", at)
    assert (task.idempotency_key, task.tags) == ("k", ("a", "b"))
    assert tagged.records == [task]


async def test_many_are_enqueued_in_their_order(app: App, sql: asyncpg.Connection) -> None:
    own = str(uuid4())
    ids = await add(
        sql,
        {"type": "a", "priority": "critical", "delay": 60.5},
        {"type": "mail.send", "payload": {"to": "b"}, "tags": [], "queue": None},
        {"type": "c", "id": own, "at": "2100-01-01T00:00:00+02:00"},
        {"type": "d", "at": "1980-01-01 00:00:00Z"},
    )
    tasks = [await app.handle(one).get() for one in ids]

    assert [one.type for one in tasks] == ["a", "mail.send", "c", "d"]
    assert [one.status for one in tasks] == ["scheduled", "pending", "scheduled", "pending"]
    assert [one.priority for one in tasks] == [30, 20, 10, 10]
    assert tasks[0].scheduled_for - tasks[0].created_at == timedelta(seconds=60.5)
    assert ids[2] == own
    assert await add(sql) == []


async def test_an_id_that_a_task_has_or_had_is_refused(app: App, sql: asyncpg.Connection) -> None:
    @app.task(retry=1)
    async def fail() -> None:
        raise ValueError

    done = await app.enqueue("mail.send", {"to": "a"})
    dead = await fail.enqueue()
    await app.run_worker(until_idle=True)
    cancelled = await app.enqueue("a")
    await cancelled.cancel()
    live = await app.enqueue("a")
    new = str(uuid4())
    before = await sql.fetch("SELECT id, status FROM windlass.tasks ORDER BY id")

    for taken in (done.id, dead.id, cancelled.id, live.id):
        for tasks, prefix in (
            ([{"type": "a", "id": taken}], ""),
            ([{"type": "a"}, {"type": "a", "id": taken}], "item 1: "),
        ):
            with pytest.raises(asyncpg.PostgresError) as refused:
                await add(sql, *tasks)
            assert refused.value.sqlstate == "WL006"
            assert refused.value.message == (
                f"{prefix}id {taken} is that of another task; leave it out, and the task gets a new one"
            )
    with pytest.raises(asyncpg.PostgresError, match=f"item 2: id {new} is that of another task"):
        await add(sql, {"type": "a", "id": new}, {"type": "a"}, {"type": "b", "id": new})
    assert await sql.fetch("SELECT id, status FROM windlass.tasks ORDER BY id") == before

    async with sql.transaction():
        assert await add(sql, {"type": "a", "id": new}) == [new]
        held = "SELECT FROM pg_locks WHERE pid = pg_backend_pid() AND relation = 'windlass.history'::regclass"
        assert await sql.fetch(held) == []  # or retention would wait for this transaction
    with pytest.raises(asyncpg.PostgresError, match=f"id {new} is that of another task"):
        async with sql.transaction(isolation="serializable"):
            await add(sql, {"type": "a", "id": new})


async def test_a_key_leads_to_the_first_task_whoever_enqueued_it(
    app: App, sql: asyncpg.Connection
) -> None:
    first = await app.enqueue("mail.send", {"to": "a"}, idempotency_key="k")
    again = await sql.fetchval(
        "SELECT windlass.enqueue('mail.send', '{\"to\": \"a\"}', idempotency_key => 'k')"
    )
    both = await add(sql, *[{"type": "x", "idempotency_key": "l", "payload": {"n": 1}}] * 2)

    assert str(again) == first.id
    assert both[0] == both[1]
    with pytest.raises(asyncpg.PostgresError, match=f"task {first.id} was enqueued with another"):
        await sql.execute("SELECT windlass.enqueue('mail.send', idempotency_key => 'k')")


async def test_a_conflict_among_many_is_named_by_its_index_and_once(
    app: App, sql: asyncpg.Connection
) -> None:
    send = app.tasks[0]
    first = await app.enqueue("mail.send", {"to": "a"}, idempotency_key="k")
    other = {"type": "mail.send", "payload": {"to": "b"}, "idempotency_key": "k"}
    said = f"task type 'mail.send', idempotency key 'k': task {first.id} was enqueued with another payload"

    with pytest.raises(asyncpg.PostgresError) as alone:
        await add(sql, other)
    with pytest.raises(asyncpg.PostgresError) as among:
        await add(sql, {"type": "a"}, {"type": "b"}, other)
    assert (alone.value.sqlstate, alone.value.message) == ("WL002", said)
    assert (among.value.sqlstate, among.value.message) == ("WL002", f"item 2: {said}")
    assert among.value.detail == "2"
    calls = [send.call("c"), send.options(idempotency_key="k").call("b")]
    for connection in (None, sql):
        with pytest.raises(IdempotencyConflict) as refused:
            await app.enqueue_many(calls, connection=connection)
        assert str(refused.value).startswith(f"item 1: {said}")


async def test_a_trigger_enqueues_with_the_change_that_fired_it(
    app: App, sql: asyncpg.Connection
) -> None:
    await sql.execute(
        """
        CREATE TABLE customer (mail text);
        CREATE FUNCTION greet() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM windlass.enqueue('mail.send', jsonb_build_object('to', NEW.mail));
            RETURN NEW;
        END $$;
        CREATE TRIGGER greet AFTER INSERT ON customer FOR EACH ROW EXECUTE FUNCTION greet();
        """
    )
    lost = sql.transaction()
    await lost.start()
    await sql.execute("INSERT INTO customer VALUES ('lost@example.com')")
    await lost.rollback()
    await sql.execute("INSERT INTO customer VALUES ('kept@example.com')")
    await app.run_worker(until_idle=True)

    done = await sql.fetch("SELECT payload ->> 'to' FROM windlass.tasks WHERE status = 'completed'")
    assert [row[0] for row in done] == ["kept@example.com"]


@pytest.mark.parametrize(
    ("task", "state", "said"),
    [
        ({"type": "a", "payload": [1]}, "WL005", "task 'a': the payload is of type array"),
        ({"type": "a", "payload": {"x": "y" * 1_048_576}}, "WL005", "1048578 bytes are more than"),
        ({"payload": {}}, "WL006", "task name null must be a string"),
        ({"type": ""}, "WL006", "task name '' has 0 characters"),
        ({"type": "a", "when": 1}, "WL006", "option 'when' is not known; options are: id, type"),
        ({"type": "a", "delay": "NaN"}, "WL006", "delay 'NaN': use a finite number"),
        ({"type": "a", "delay": True}, "WL006", "delay true: use seconds or a timedelta"),
        ({"type": "a", "delay": "5"}, "WL006", "delay '5': use seconds or a timedelta"),
        ({"type": "a", "expires": -1}, "WL006", "expires -1: use seconds from now, not below 0"),
        (
            {"type": "a", "expires": 1e10},
            "WL006",
            "use seconds from now, not below 0 and less than",
        ),
        (
            {"type": "a", "expires": "soon"},
            "WL006",
            "expires 'soon': use seconds from now, or a time",
        ),
        ({"type": "a", "expires": "2100-01-01T00:00"}, "WL006", "or a time with a time zone"),
        ({"type": "a", "expires": True}, "WL006", "expires true: use seconds from now, or a time"),
        ({"type": "a", "ordering_key": ""}, "WL006", "ordering_key '' has 0 characters; use 1 to"),
        ({"type": "a", "on_dead": "hold"}, "WL006", "ordering key; give ordering_key too"),
        (
            {"type": "a", "ordering_key": "k", "on_dead": "keep"},
            "WL006",
            'on_dead \'keep\': use "hold" or "pass"',
        ),
        ({"type": "a", "at": "tomorrow"}, "WL006", "at 'tomorrow': use a time with a time zone"),
        ({"type": "a", "at": "2100-13-01T00:00Z"}, "WL006", "use a time with a time zone"),
        ({"type": "a", "at": "2100-01-01T00:00"}, "WL006", "use a time with a time zone"),
        ({"type": "a", "at": "20000-01-01T00:00Z"}, "WL006", "is after the year 9999"),
        ("a", "WL005", "item 0 is of type string; use an object"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_task_that_does_not_fit_is_refused(
    sql: asyncpg.Connection, task: Any, state: str, said: str
) -> None:
    with pytest.raises(asyncpg.PostgresError) as refused:
        await add(sql, task)

    assert refused.value.sqlstate == state
    assert said in refused.value.message
    assert await sql.fetchval("SELECT count(*) FROM windlass.tasks") == 0


DEEP: Any = {}
for _ in range(250):
    DEEP = {"a": DEEP}
PLAIN_KIND = "SELECT windlass.plain_kind($1::jsonb, 1000) IS NOT NULL"
WRITTEN = """
SELECT t.id, t.type, t.queue, t.priority, t.max_attempts, t.retention_seconds, t.payload, r.task_id
FROM windlass.task t LEFT JOIN windlass.ready r ON r.task_id = t.id
ORDER BY r.n
"""


def plain(number: int, **other: Any) -> dict[str, Any]:
    """A task as the client for Python writes it."""
    task_id = str(UUID(int=7 << 76 | 2 << 62 | number))
    kind = {"type": "mail.send", "queue": "bulk", "priority": 30, "max_attempts": 3}
    return {"id": task_id, "payload": {"to": number}, **kind, **other}


@pytest.mark.parametrize(
    ("odd", "is_plain"),
    [
        (plain(1), True),
        (plain(1, payload={}), True),
        (plain(1, payload={"to": "x" * 2000}), False),
        (plain(1, payload={"to": "x" * 2_000_000}), False),
        (plain(1, payload=DEEP), False),
        (plain(1, payload=[]), False),
        (plain(1, payload=None), False),
        (plain(1, id="1"), False),
        (plain(1, id=5), False),
        (plain(1, id=None), False),
        (plain(1, id=plain(0)["id"]), True),  # twice the same: whoever writes them says so
        (plain(1, type=""), False),
        (plain(1, type=None), False),
        (plain(1, type="a\n"), False),
        (plain(1, queue="x" * 201), False),
        (plain(1, queue=None), False),
        (plain(1, queue="a\n"), False),
        (plain(1, priority=101), False),
        (plain(1, priority=1.5), False),
        (plain(1, priority=30.0), False),  # equal to the others, and refused
        (plain(1, max_attempts=3.0), False),
        (plain(1, priority="high"), False),
        (plain(1, priority=None), False),
        (plain(1, max_attempts=0), False),
        (plain(1, max_attempts=True), False),
        (plain(1, when=1), False),
        (plain(1, expires=60), False),
        (plain(1, delay=60), False),
        ({"type": "mail.send"}, False),
        ("a", False),
    ],
    ids=lambda value: str(value)[:80],
)
@pytest.mark.parametrize("are_all", [False, True])
async def test_tasks_that_differ_in_their_payload_alone_are_taken_as_each_one_is(
    sql: asyncpg.Connection, odd: Any, is_plain: bool, are_all: bool
) -> None:
    """They are looked at together: the same is written, or said, as if they were not."""
    tasks = [odd] if are_all else [plain(0), odd, plain(2)]
    one_by_one = [{**task, "tags": []} if isinstance(task, dict) else task for task in tasks]
    outcomes: list[Any] = []
    for asked in (tasks, one_by_one):
        transaction = sql.transaction()
        await transaction.start()
        try:
            ids = await add(sql, *asked)
            outcomes.append((ids, [tuple(row) for row in await sql.fetch(WRITTEN)]))
        except asyncpg.PostgresError as error:
            outcomes.append((error.sqlstate, error.message))
        await transaction.rollback()

    first, second = outcomes
    assert is_plain == await sql.fetchval(PLAIN_KIND, json.dumps(tasks))
    assert not await sql.fetchval(PLAIN_KIND, json.dumps(one_by_one))
    if "id" in odd and odd["id"] is not None:  # else it gets a new one each time
        assert first == second
    else:
        assert len(first[1]) == len(second[1])


async def test_small_payloads_have_a_limit_too(app: App, sql: asyncpg.Connection) -> None:
    await sql.execute("UPDATE windlass.setting SET max_payload_bytes = 20")
    fits, too_large = plain(1, payload={"a": "x" * 10}), plain(2, payload={"a": "x" * 20})

    assert len(await add(sql, fits)) == 1
    with pytest.raises(asyncpg.PostgresError, match="20"):
        await add(sql, too_large)


@pytest.mark.parametrize("given", ["null", "{}", "5"])
async def test_many_are_an_array(sql: asyncpg.Connection, given: str) -> None:
    with pytest.raises(asyncpg.PostgresError, match="enqueue_many was given a value of type"):
        await sql.execute("SELECT windlass.enqueue_many($1::jsonb)", given)


@pytest.mark.parametrize("seconds", ["NaN", "Infinity", "-1"])
async def test_seconds_that_are_no_time_are_refused(sql: asyncpg.Connection, seconds: str) -> None:
    with pytest.raises(asyncpg.PostgresError, match=r"delay .*: use a finite number of seconds"):
        await sql.execute("SELECT windlass.enqueue('a', delay => $1::float8)", float(seconds))


async def test_seconds_are_taken_as_they_are_given(app: App, sql: asyncpg.Connection) -> None:
    await sql.execute("SET extra_float_digits = -15")
    call = "SELECT windlass.enqueue('a', delay => $1)"
    tasks = [
        await app.handle(await sql.fetchval(call, seconds)).get()
        for seconds in (123456.789012, 1234567890.123456, 0.0)
    ]
    tiny = await sql.fetchval(
        """SELECT windlass.enqueue_many('[{"type": "a", "delay": 1e-400}]')"""
    )

    waits = [(one.scheduled_for - one.created_at).total_seconds() for one in tasks]
    assert waits == [123456.789012, 1234567890.123456, 0.0]
    assert (await app.handle(tiny).get()).status == "pending"
    assert await sql.fetchval("SHOW extra_float_digits") == "-15"


@pytest.mark.parametrize("at", ["infinity", "10001-01-01 UTC"])
async def test_a_time_that_never_comes_is_refused(sql: asyncpg.Connection, at: str) -> None:
    with pytest.raises(asyncpg.PostgresError, match=r"at .*: use|after the year 9999"):
        await sql.execute(f"SELECT windlass.enqueue('a', at => '{at}')")


@pytest.mark.parametrize("at", ["-infinity", "0044-03-15 12:00 UTC BC", "1980-01-01 UTC"])
async def test_a_time_that_is_past_means_now(app: App, sql: asyncpg.Connection, at: str) -> None:
    task = await app.handle(await sql.fetchval(f"SELECT windlass.enqueue('a', at => '{at}')")).get()

    assert task.status == "pending"
    assert task.scheduled_for == task.created_at


async def test_the_size_of_a_payload_is_that_of_its_text_without_blanks(
    app: App, sql: asyncpg.Connection
) -> None:
    payload = {"list": [[1, 2], {}, [], {"a": 1, "b": [None, True]}] * 3, "text": "é, : "}
    compact = len(json.dumps(payload, separators=(",", ":"), ensure_ascii=False).encode())

    assert await sql.fetchval("SELECT windlass.compact_bytes($1)", json.dumps(payload)) == compact


async def test_the_limit_of_a_payload_is_that_of_the_application(
    database_url: str, sql: asyncpg.Connection
) -> None:
    async with App(database_url, max_payload_bytes=20) as small:
        await (await small.store()).register_types([])

    await add(sql, {"type": "a", "payload": {"x": "twelve bytes"}})
    with pytest.raises(asyncpg.PostgresError, match="21 bytes are more than the limit of 20"):
        await add(sql, {"type": "a", "payload": {"x": "thirteen byte"}})


async def test_the_view_shows_the_class_of_the_last_error_and_what_a_task_replays(
    app: App, sql: asyncpg.Connection
) -> None:
    @app.task
    async def broken() -> None:
        raise KeyError("a")

    @app.task(retry=Retry(max_attempts=2, base=3600, jitter="none"))
    async def waiting() -> None:
        raise ConnectionResetError

    @app.task
    async def good() -> None: ...

    failed, retried, done = [await one.enqueue() for one in (broken, waiting, good)]
    await app.run_worker(until_idle=True)
    report = await app.dead.replay(failed.id)
    replayed = app.handle(str(report.replayed[failed.id]))
    cancelled = await waiting.enqueue()
    await app.run_worker(until_idle=True)
    await cancelled.cancel()

    shown = await sql.fetch("SELECT id::text, error_class, replay_of::text FROM windlass.tasks")

    assert {row["id"]: (row["error_class"], row["replay_of"]) for row in shown} == {
        failed.id: ("code-bug", None),
        retried.id: ("transient", None),
        done.id: (None, None),
        replayed.id: ("code-bug", failed.id),
        cancelled.id: ("transient", None),
    }
    for row, record in [(row, await app.handle(row["id"]).get()) for row in shown]:
        assert (row["error_class"], row["replay_of"]) == (record.error_class, record.replay_of)


async def test_a_task_is_cancelled_by_sql(app: App, sql: asyncpg.Connection) -> None:
    waiting = await app.enqueue("mail.send", {"to": "a"})
    cancel = "SELECT windlass.cancel($1, 'not wanted')"

    assert await sql.fetchval(cancel, waiting.id) is True
    assert await sql.fetchval(cancel, waiting.id) is False
    task = await waiting.get()
    assert (task.status, task.last_error) == ("cancelled", "not wanted")
    with pytest.raises(asyncpg.PostgresError, match="is not known") as unknown:
        await sql.execute("SELECT windlass.cancel($1)", uuid4())
    assert unknown.value.sqlstate == "WL007"
    with pytest.raises(asyncpg.PostgresError, match=r"reason .* has 2001 characters"):
        await sql.execute("SELECT windlass.cancel($1, repeat('x', 2001))", waiting.id)
    with pytest.raises(asyncpg.PostgresError, match="reason null must be a string"):
        await sql.execute("SELECT windlass.cancel($1, NULL)", waiting.id)
    with pytest.raises(
        asyncpg.PostgresError, match=r"^null is not the id of a task; ids are"
    ) as none:
        await sql.execute("SELECT windlass.cancel(NULL)")
    assert none.value.sqlstate == "WL007"


async def test_a_task_is_cancelled_by_sql_where_no_worker_has_made_room_for_it(
    app: App, sql: asyncpg.Connection
) -> None:
    await (await app.store()).register_types([])
    for (name,) in await sql.fetch(
        "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'windlass.history'::regclass"
    ):
        await sql.execute(f"DROP TABLE {name}")
    handle = await app.enqueue("a")

    async with sql.transaction():
        await sql.execute("SET LOCAL lock_timeout = '7s'")
        assert await sql.fetchval("SELECT windlass.cancel($1)", handle.id)
        assert await sql.fetchval("SHOW lock_timeout") == "7s"
    assert (await handle.get()).status == "cancelled"


async def test_what_is_past_its_retention_by_the_settings_of_the_application_may_go(
    database_url: str, sql: asyncpg.Connection
) -> None:
    async with App(database_url, retention=timedelta(days=1), idempotency_retention=HOUR) as app:
        await (await app.store()).register_types([])
        handle = await app.enqueue("a")
        await sql.execute("SELECT windlass.cancel($1)", handle.id)

    day, tomorrow = await sql.fetchrow(
        "SELECT drop_on, ((now() AT TIME ZONE 'UTC') + interval '1 day')::date FROM windlass.history"
    )
    assert day == tomorrow


async def test_an_application_role_may_call_these_alone(app: App, sql: asyncpg.Connection) -> None:
    role = f"shop_{uuid4().hex}"
    await sql.execute(f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA windlass TO {role}")
    try:
        await sql.execute(f"SET ROLE {role}")
        for call in ("enqueue('a')", "enqueue_many('[]')", f"cancel('{uuid4()}')"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError, match="permission denied"):
                await sql.execute(f"SELECT windlass.{call}")
        await sql.execute("RESET ROLE")
        await sql.execute(
            "GRANT EXECUTE ON FUNCTION windlass.enqueue, windlass.enqueue_many, windlass.cancel "
            f"TO {role}; SET ROLE {role}"
        )
        task_id = await sql.fetchval("SELECT windlass.enqueue('a', idempotency_key => 'k')")
        assert await add(sql, {"type": "a", "idempotency_key": "k"}) == [str(task_id)]
        assert await sql.fetchval("SELECT windlass.cancel($1)", task_id)
        for forbidden in (
            "SELECT FROM windlass.task",
            "SELECT FROM windlass.tasks",
            "DELETE FROM windlass.ready",
            "SELECT windlass.retry_task(gen_random_uuid())",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await sql.execute(forbidden)
    finally:
        await sql.execute(f"RESET ROLE; DROP OWNED BY {role}; DROP ROLE {role}")


SETTINGS = [
    ("standard_conforming_strings", "off"),
    ("TimeZone", "Asia/Kathmandu"),
    ("TimeZone", "<Z>+5"),  # a zone that somebody made up, and called as UTC is
    ("TimeZone", "<ABC>-99"),
    ("DateStyle", "SQL, DMY"),
    ("IntervalStyle", "sql_standard"),
    ("extra_float_digits", "-15"),
    ("bytea_output", "escape"),
    ("array_nulls", "off"),
    ("transform_null_equals", "on"),
    ("quote_all_identifiers", "on"),
    ("backslash_quote", "on"),
    ("plpgsql.extra_errors", "all"),
    ("search_path", ""),
]


@pytest.mark.parametrize(("name", "value"), SETTINGS, ids=str)
async def test_no_setting_of_the_caller_changes_what_these_do(
    app: App, sql: asyncpg.Connection, name: str, value: str
) -> None:
    await sql.execute("SELECT set_config($1, $2, false)", name, value)
    at = datetime(2100, 1, 31, 12, tzinfo=UTC)

    ids = await add(
        sql,
        {"type": "a", "at": "2100-01-31T12:00:00Z"},
        {"type": "a", "at": "2100-01-31 14:00:00+02:00", "tags": ["NULL", "it's \\"]},
        {"type": "a", "delay": 123456.789012, "priority": "high", "retention": 10**8},
    )
    ids.append(await sql.fetchval("SELECT windlass.enqueue('a', at => $1, tags => '{b}')", at))
    ids.append(await sql.fetchval("SELECT windlass.enqueue('a', '{\"x\": 1.5}', 'd', 0)"))
    tasks = [await app.handle(one).get() for one in ids]
    assert [one.scheduled_for for one in (tasks[0], tasks[1], tasks[3])] == [at] * 3
    assert [one.tags for one in tasks] == [(), ("NULL", "it's \\"), (), ("b",), ()]
    assert (tasks[4].status, tasks[4].payload, tasks[4].queue) == ("pending", {"x": 1.5}, "d")
    waits = tasks[2].scheduled_for - tasks[2].created_at
    assert waits.total_seconds() == 123456.789012
    for refused, said in (
        ('{"type": "a", "payload": {"x": %s}}' % ("1" * 5000), "a number has more digits than can"),
        ('{"type": "a\\n"}', r"task name 'a\n' holds a control character"),
        (
            '{"type": "d{255}", "at": "d{4,}-dd-dd"}',
            "at 'd{4,}-dd-dd': use a time with a time zone",
        ),
        ('{"type": "a", "priority": "\\u202e\\\\"}', r"priority '\u202e\\': use an integer"),
        ('{"type": "a", "id": "x"}', "id 'x' is not the id of a task; ids are UUIDs"),
    ):
        with pytest.raises(asyncpg.PostgresError) as told:
            await sql.execute("SELECT windlass.enqueue_many(($1::text)::jsonb)", f"[{refused}]")
        assert said in told.value.message
    with pytest.raises(asyncpg.PostgresError, match="holds a control character"):
        await sql.execute("SELECT windlass.enqueue($1)", "a\n")
    for one in ids:
        assert await sql.fetchval("SELECT windlass.cancel($1)", one)


async def test_no_type_of_the_caller_is_taken_for_one_of_the_server(
    app: App, sql: asyncpg.Connection
) -> None:
    role = f"shop_{uuid4().hex}"
    await sql.execute(
        f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA windlass TO {role}; "
        f"CREATE SCHEMA theirs AUTHORIZATION {role}; "
        "GRANT EXECUTE ON FUNCTION windlass.enqueue, windlass.enqueue_many, windlass.cancel, "
        f"windlass.complete_task TO {role}"
    )
    ran_as: list[str] = []
    sql.add_log_listener(lambda _, message: ran_as.append(message.message))
    try:
        # A function is read once in a session, with the types that its variables have by then.
        await sql.execute(f"SET ROLE {role}; SET search_path = theirs, pg_catalog")
        await sql.execute(
            "CREATE FUNCTION theirs.look() RETURNS boolean LANGUAGE plpgsql AS "
            "$$BEGIN RAISE WARNING '%', current_user; RETURN true; END$$"
        )
        for kind in ("text", "uuid", "jsonb", "jsonpath", "timestamptz", "date", "float8"):
            await sql.execute(
                f"CREATE DOMAIN theirs.{kind} AS pg_catalog.{kind} CHECK (theirs.look())"
            )
        calls = await sql.fetch(
            "SELECT format('SELECT windlass.%I(%s)', p.proname, array_to_string(ARRAY("
            "SELECT 'NULL::' || format_type(a.kind, NULL) "
            "FROM unnest(p.proargtypes) WITH ORDINALITY AS a (kind, place) ORDER BY a.place), ', ')) "
            "FROM pg_proc p WHERE p.pronamespace = 'windlass'::regnamespace "
            "AND p.prorettype <> 'trigger'::regtype"
        )
        for (call,) in calls:
            with suppress(asyncpg.PostgresError):  # it lacks a right, or what it needs
                await sql.execute(call)
        assert len(calls) > 30
        assert role in ran_as  # what has its types from the caller is found so
        ran_as.clear()
        await sql.execute("RESET search_path")

        ids = await add(
            sql,
            {"type": "a", "at": "2100-01-31T12:00:00Z", "idempotency_key": "k", "tags": ["a"]},
            {"type": "b", "delay": 5, "priority": "high", "id": str(uuid4()), "retention": 10**8},
            {"type": "b", "payload": {"x": "x" * 2000}},
        )
        ids.append(await sql.fetchval("SELECT windlass.enqueue('a')"))
        for one in ids:
            assert await sql.fetchval("SELECT windlass.cancel($1)", one)
        for wrong in (
            {"queue": "\n"},
            {"priority": "x"},
            {"at": "x"},
            {"payload": {"x": 10**4000}},
        ):
            with suppress(asyncpg.PostgresError):
                await add(sql, {"type": "a", **wrong})
        with pytest.raises(asyncpg.PostgresError, match="the lease is lost"):
            await sql.execute(
                "SELECT windlass.complete_task(gen_random_uuid(), gen_random_uuid(), 1, 1, '1', '1s', '1s')"
            )

        assert set(ran_as) <= {role}
    finally:
        await sql.execute(f"RESET ROLE; RESET search_path; DROP OWNED BY {role}; DROP ROLE {role}")


async def test_bad_values_have_the_same_class_from_python_by_name(app: App) -> None:
    with pytest.raises(PayloadError):
        await app.enqueue("unheard", [1])  # type: ignore[arg-type]  # on purpose
