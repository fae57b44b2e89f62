"""A run in which everything happens that may happen, recorded and found to be right."""

import asyncio
import json
from dataclasses import replace
from math import inf
from pathlib import Path

import asyncpg
import pytest

from acceptance.quick import QUICK
from windlass import (
    App,
    ConfigurationError,
    Context,
    Fail,
    IdempotencyConflict,
    Retry,
    Snooze,
    StoreUnavailable,
)
from windlass.testing.history_check import (
    ClientLog,
    Quiet,
    check,
    check_liveness,
    log_runs,
    read_history,
    record,
)

PATIENCE = 30.0  # seconds, with a machine that is busy


def shop(url: str, runs: Path) -> App:
    app = App(url, **QUICK)
    app.middleware(log_runs(runs))

    @app.task
    async def short(n: int) -> int:
        return n

    @app.task(retry=Retry(max_attempts=2, base=0.01))
    async def fails(ctx: Context, times: int) -> None:
        if ctx.attempt <= times:
            raise ValueError

    @app.task
    async def refuses() -> None:
        raise Fail("no")

    @app.task
    def snoozes(path: str) -> None:
        if not Path(path).exists():
            Path(path).touch()
            raise Snooze(0.05)

    @app.task
    async def endless() -> None:
        await asyncio.Event().wait()

    return app


async def test_a_run_with_every_outcome_is_clean(
    database_url: str, sql_url: str, tmp_path: Path
) -> None:
    connection = await asyncpg.connect(sql_url)
    await record(connection)
    calls, runs = tmp_path / "calls.jsonl", tmp_path / "runs.jsonl"
    client, app = ClientLog(calls), shop(database_url, runs)
    async with app:
        store = await app.store()
        handles = [await client.enqueue(app, "short", {"n": n}) for n in range(20)]
        handles.append(await client.enqueue(app, "fails", {"times": 1}))
        handles.append(await client.enqueue(app, "snoozes", {"path": str(tmp_path / "seen")}))
        handles.append(await client.enqueue(app, "short", {"n": 1}, delay=0.3))
        first = await client.enqueue(app, "short", {"n": 7}, idempotency_key="seven")
        again = await client.enqueue(app, "short", {"n": 7}, idempotency_key="seven")
        assert (first.id, again.created) == (again.id, False)
        with pytest.raises(IdempotencyConflict):
            await client.enqueue(app, "short", {"n": 8}, idempotency_key="seven")
        waiting = await client.enqueue(app, "short", {"n": 1}, delay=1000)
        await waiting.cancel()
        dead = await client.enqueue(app, "fails", {"times": 2})
        refused = await client.enqueue(app, "refuses")
        endless = await client.enqueue(app, "endless")
        await client.pause(store, "paused")
        left = await client.enqueue(app, "short", {"n": 1}, queue="paused")
        since = await connection.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8")
        async with app.worker():
            worker = await connection.fetchval("SELECT id::text FROM windlass.worker")
            await asyncio.gather(*(handle.result(timeout=30) for handle in [*handles, first]))
            await until_status(dead.id, "dead", app)
            await until_status(refused.id, "failed", app)
            await refused.retry()
            await until_status(refused.id, "failed", app)
            await until_status(endless.id, "running", app)
            await endless.cancel()
            await until_status(endless.id, "cancelled", app)
            await client.resume(store, "paused")
            await left.result(timeout=30)
    client.close()

    history = await read_history(connection, calls=[calls], runs=[runs])
    await connection.close()
    quiet = Quiet(
        since=since,
        until=inf,  # all has ended, so nothing is left that only later would be late
        sweep=QUICK["sweep"],
        term=QUICK["leader_term"],
        queueing=PATIENCE,
        slack=PATIENCE,
        workers=frozenset({worker}),
    )

    assert check(history) == []
    assert check_liveness(history, quiet) == []
    nobody = replace(quiet, workers=frozenset({"nobody"}))
    assert [one.rule for one in check_liveness(history, nobody)] == ["L5"]
    assert len(history.runs) == 20 + 2 + 2 + 1 + 1 + 2 + 2 + 1 + 1


async def until_status(task_id: str, status: str, app: App) -> None:
    async with asyncio.timeout(30):
        while (await app.handle(task_id).get()).status != status:
            await asyncio.sleep(0.01)


async def test_a_call_that_was_refused_is_known_not_to_have_happened(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    client = ClientLog(calls)

    with pytest.raises(ConfigurationError):
        await client.enqueue(App("memory:"), "short", {"n": 1}, priority=1000)
    client.close()

    said = [json.loads(line)["said"] for line in calls.read_text().splitlines()]
    assert said == ["invoke", "fail"]


async def test_a_call_whose_end_is_not_known_stays_unknown(tmp_path: Path) -> None:
    calls = tmp_path / "calls.jsonl"
    client = ClientLog(calls)
    app = App(f"postgresql://nobody@/nothing?host={tmp_path}&port=5432")

    with pytest.raises(StoreUnavailable):
        await client.enqueue(app, "short", {"n": 1})
    client.close()

    said = [json.loads(line)["said"] for line in calls.read_text().splitlines()]
    assert said == ["invoke", "unknown"]
