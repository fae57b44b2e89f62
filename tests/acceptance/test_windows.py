"""Calls that ask for a task again within some time, through an application, SQL and the command line."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from click.testing import CliRunner

from windlass import App, Context, IdempotencyConflict, TaskState
from windlass.cli import main
from windlass.testing import Clock, app_in_memory

APP = """
from windlass import App

app = App()

@app.task
async def work(n: int) -> None: ...
"""
ENQUEUE = "SELECT windlass.enqueue('work', $1::jsonb, {})"


async def test_a_unique_task_is_enqueued_once_for_a_payload(app: App) -> None:
    @app.task
    async def work(n: float) -> None: ...

    unique = work.options(unique_for=60)
    first = await unique.enqueue(1)
    again = await unique.enqueue(1.0)
    named = await app.enqueue("work", {"n": 1}, unique_for=timedelta(minutes=1))
    other = await unique.enqueue(2)

    assert [one.created for one in (first, again, named, other)] == [True, False, False, True]
    assert again.id == named.id == first.id != other.id
    assert (await work.enqueue(1)).created


async def test_a_throttled_task_runs_once_whatever_it_is_asked_for_with(app: App) -> None:
    ran = []

    @app.task
    async def work(n: int) -> None:
        ran.append(n)

    handles = [await work.options(throttle=60).enqueue(n) for n in range(3)]
    handles += [await work.options(throttle=60, dedupe_key="a").enqueue(n) for n in (7, 8)]
    await app.run_worker(until_idle=True)
    late = await work.options(throttle=60).enqueue(9)

    assert [one.created for one in handles] == [True, False, False, True, False]
    assert sorted(ran) == [0, 7]
    assert late.id == handles[0].id
    assert (await late.get()).status is TaskState.COMPLETED


async def test_of_debounced_calls_the_last_one_runs(app: App) -> None:
    ran = []

    @app.task
    async def work(n: int) -> None:
        ran.append(n)

    handles = [await work.options(debounce=1.0, dedupe_key="doc").enqueue(n) for n in range(4)]

    async with app.worker():
        await handles[0].result(timeout=20)

    assert {one.id for one in handles} == {handles[0].id}
    assert [one.created for one in handles] == [True, False, False, False]
    assert ran == [3]
    assert (await work.options(debounce=60, dedupe_key="doc").enqueue(5)).created


async def test_many_at_once_are_decided_on_in_their_order(app: App) -> None:
    @app.task
    async def work(n: int) -> None: ...

    handles = await app.enqueue_many(
        [
            work.options(throttle=60).call(1),
            work.call(2),
            work.options(throttle=60).call(3),
            work.options(debounce=60).call(4),
            work.options(debounce=60).call(5),
            work.options(idempotency_key="k").call(6),
        ]
    )

    assert [one.created for one in handles] == [True, True, False, True, False, True]
    assert (await handles[0].get()).payload == {"n": 1}
    assert (await handles[4].get()).payload == {"n": 5}
    with pytest.raises(IdempotencyConflict, match=r"^item 2: "):
        await app.enqueue_many(
            [
                work.options(throttle=60).call(1),
                work.options(throttle=60, dedupe_key="new").call(1),
                work.options(idempotency_key="k").call(7),
            ]
        )
    assert (await work.options(throttle=60, dedupe_key="new").enqueue(1)).created


async def test_a_large_call_may_have_windows(app: App) -> None:
    @app.task
    async def work(n: int) -> None: ...

    calls = [work.options(unique_for=60).call(n % 1500) for n in range(2500)]

    handles = await app.enqueue_many(calls)

    assert sum(one.created for one in handles) == 1500
    assert [one.id for one in handles[1500:]] == [one.id for one in handles[:1000]]


async def test_a_handler_may_debounce_what_it_enqueues(app: App) -> None:
    @app.task
    async def index(n: int) -> None: ...

    @app.task
    async def save(ctx: Context, n: int) -> str:
        return (await index.options(debounce=3600).enqueue(n)).id

    handles = [await save.enqueue(n) for n in range(3)]
    await app.run_worker(until_idle=True)

    ids = {await one.result(timeout=10) for one in handles}
    assert len(ids) == 1
    assert (await app.handle(ids.pop()).get()).payload["n"] in range(3)


async def test_windows_go_by_the_clock() -> None:
    app, clock, ran = App("memory:"), Clock(), []

    @app.task
    async def work(n: int) -> None:
        ran.append(n)

    async with app_in_memory(app, clock=clock):
        assert (await work.options(throttle=60).enqueue(1)).created
        await work.options(debounce=30).enqueue(2)
        clock.move(20)
        await work.options(debounce=30).enqueue(3)
        clock.move(29)
        await app.run_worker(until_idle=True)
        assert ran == [1]
        clock.move(1)
        await app.run_worker(until_idle=True)
        assert ran == [1, 3]
        assert not (await work.options(throttle=60).enqueue(4)).created
        clock.move(10)
        assert (await work.options(throttle=60).enqueue(5)).created


async def test_in_a_transaction_of_the_caller(database_url: str, sql_url: str) -> None:
    async with App(database_url) as app:

        @app.task
        async def work(n: int) -> None: ...

        own = await asyncpg.connect(sql_url)
        for kind in ("unique_for", "throttle", "debounce"):
            options: Any = {kind: 60, "dedupe_key": "k"}
            undone = own.transaction()
            await undone.start()
            gone = await work.options(**options, connection=own).enqueue(1)
            assert gone.created
            await undone.rollback()

            async with own.transaction():
                first = await work.options(**options, connection=own).enqueue(1)
                many = await app.enqueue_many(
                    [work.options(**options).call(2), work.call(3)], connection=own
                )
            assert first.created
            assert [one.created for one in many] == [False, True]
            assert many[0].id == first.id != gone.id
            assert not (await work.options(**options).enqueue(4)).created
            assert (await first.get()).payload == {"n": 4 if kind == "debounce" else 1}

        await work.options(idempotency_key="i").enqueue(1)
        conflicting = [
            work.options(throttle=60, dedupe_key="k").call(1),
            work.options(idempotency_key="i").call(2),
        ]
        with pytest.raises(IdempotencyConflict, match=r"^item 1: "):
            await app.enqueue_many(conflicting, connection=own)
        await own.close()


@pytest.fixture
async def sql(database_url: str, sql_url: str) -> Any:
    async with App(database_url):
        connection = await asyncpg.connect(sql_url)
        yield connection
        await connection.close()


async def test_by_sql(sql: asyncpg.Connection) -> None:
    async def asked(options: str, payload: str = "{}") -> Any:
        return await sql.fetchval(ENQUEUE.format(options), payload)

    first = await asked("unique_for => 60", '{"n": 1.0}')
    assert await asked("unique_for => 60", '{"n": 1}') == first
    assert await asked("unique_for => 60", '{"n": 2}') != first
    throttled = await asked("throttle => 60, dedupe_key => 'a'", '{"n": 1}')
    assert await asked("throttle => 0.5, dedupe_key => 'a'", '{"n": 2}') == throttled
    moved = await asked("debounce => 60", '{"n": 1}')
    assert await asked("debounce => 3600", '{"n": 2}') == moved
    row = await sql.fetchrow(
        "SELECT payload, status, scheduled_for - windlass.clock() AS wait FROM windlass.tasks WHERE id = $1",
        moved,
    )
    assert (json.loads(row["payload"]), row["status"]) == ({"n": 2}, "scheduled")
    assert timedelta(minutes=59) < row["wait"] <= timedelta(hours=1)


async def test_by_sql_many_at_once(sql: asyncpg.Connection) -> None:
    tasks: list[dict[str, Any]] = [
        {"type": "work", "throttle": 60},
        {"type": "work"},
        {"type": "work", "throttle": 60, "payload": {"n": 1}},
        {"type": "work", "debounce": 60, "dedupe_key": "k", "payload": {"n": 1}},
        {"type": "work", "debounce": 60, "dedupe_key": "k", "payload": {"n": 2}, "expires": 90},
        {"type": "work", "idempotency_key": "i"},
    ]
    add = "SELECT windlass.enqueue_many($1::jsonb)"

    ids = [row[0] for row in await sql.fetch(add, json.dumps(tasks))]
    again = [row[0] for row in await sql.fetch(add, json.dumps(tasks))]

    assert (ids[0], ids[3]) == (ids[2], ids[4])
    assert len(set(ids)) == 4
    assert [one == two for one, two in zip(ids, again, strict=True)] == [
        *(True, False, True, True, True, True)
    ]
    tasks[5]["payload"] = {"n": 2}
    with pytest.raises(asyncpg.PostgresError, match=r"^item 5: task type 'work', idempotency key"):
        await sql.fetch(add, json.dumps(tasks))


async def test_the_grants_of_the_function_are_kept(sql: asyncpg.Connection) -> None:
    right = "SELECT has_function_privilege('public', p.oid, 'EXECUTE') FROM pg_proc p WHERE proname = $1"

    for name in ("enqueue", "enqueue_many", "enqueue_windowed", "reserve_windows"):
        assert await sql.fetchval(right, name) is False


def test_at_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database_url: str
) -> None:
    (tmp_path / "windows_app.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("WINDLASS_DATABASE_URL", database_url)

    def typed(n: int, *options: str) -> str:
        command = ["enqueue", "windows_app:app", "work", json.dumps({"n": n}), *options]
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 0, done.stderr
        return done.stdout.strip()

    assert typed(1, "--unique-for", "60") == typed(1, "--unique-for", "60")
    assert typed(1, "--unique-for", "60") != typed(2, "--unique-for", "60")
    throttled = [typed(n, "--throttle", "60", "--dedupe-key", "k") for n in (1, 2)]
    debounced = [typed(n, "--debounce", "60") for n in (1, 2)]
    assert len({*throttled, *debounced}) == 2
