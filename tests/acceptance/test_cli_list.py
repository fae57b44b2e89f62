"""How far `windlass tasks list` looks, what it says of it, and how to go on."""

import asyncio
import json
import re
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
from click.testing import CliRunner, Result

from contract.pgbouncer import store_options
from windlass.cli import main
from windlass.model.task import NewTask
from windlass.store.postgres.store import PostgresStore
from windlass.testing.store_contract.steps import id_at

Run = Callable[..., Result]
NOW = datetime.now(UTC)
OLD = NOW - timedelta(days=2)

# Ended tasks of another type, all of a few seconds a day ago. $1 number
OTHERS = """
INSERT INTO windlass.history (
    id, type, queue, status, priority, max_attempts, attempts, generation, drop_on, created_at,
    scheduled_for, completed_at, payload
)
SELECT
    (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || '70008000' || lpad(to_hex(n), 12, '0'))::uuid,
    'other', 'default', 'completed', 10, 4, 1, 1, (now() AT TIME ZONE 'UTC')::date + 7, at, at, at, '{}'
FROM (
    SELECT n, now() - interval '1 day' + n * interval '1 millisecond' AS at
    FROM generate_series(1, $1::bigint) AS n
) s
"""
AGE = """
WITH gone AS (DELETE FROM windlass.ready WHERE task_id = $1), ended AS (
    DELETE FROM windlass.task WHERE id = $1 RETURNING *
)
INSERT INTO windlass.history (
    id, type, queue, status, priority, max_attempts, attempts, generation, drop_on, created_at,
    scheduled_for, completed_at, payload
)
SELECT id, type, queue, 'completed', priority, max_attempts, 1, 1, (now() AT TIME ZONE 'UTC')::date + 7,
    $2, $2, $2, payload
FROM ended
"""


async def make_tasks(url: str, sql_url: str) -> list[str]:
    """Fourteen tasks that wait, and one that ended long before 20,001 others."""
    store = PostgresStore(store_options(url))
    await store.open()
    old = NewTask(id_at(OLD), "work", "{}")
    waiting = [NewTask(id_at(NOW + timedelta(seconds=n)), "work", "{}") for n in range(14)]
    await store.enqueue([old, *waiting])
    await store._history.prepare()
    await store.close()
    session = await asyncpg.connect(sql_url)
    await session.execute(OTHERS, 20_001)
    await session.execute(AGE, old.id, OLD)
    await session.close()
    return [str(task.id) for task in [*reversed(waiting), old]]


@pytest.fixture
def windlass(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("WINDLASS_DATABASE_URL", database_url)

    def run(*arguments: str, code: int = 0) -> Result:
        done = CliRunner().invoke(main, ["tasks", "list", *arguments])
        assert done.exit_code == code, done.output
        return done

    return run


def ids(result: Result) -> list[str]:
    return [record["id"] for record in json.loads(result.stdout)]


def after(result: Result) -> str:
    found = re.search(r"go on with --after (\S+)$", result.stderr)
    assert found is not None, result.stderr
    return found[1]


def test_a_listing_says_how_far_it_looked_and_goes_on(
    windlass: Run, database_url: str, sql_url: str
) -> None:
    tasks = asyncio.run(make_tasks(database_url, sql_url))
    of_type = ("--type", "work", "--json")
    since = (OLD - timedelta(hours=1)).isoformat()

    first = windlass(*of_type, "--limit", "10")
    second = windlass(*of_type, "--limit", "10", "--after", after(first))
    third = windlass(*of_type, "--after", after(second))
    fourth = windlass(*of_type, "--after", after(third))
    whole = windlass(*of_type, "--since", since)
    before = windlass(*of_type, "--until", (NOW - timedelta(days=1)).isoformat())
    everything = windlass("--limit", "10000")

    assert (ids(first), ids(second)) == (tasks[:10], tasks[10:14])
    assert (ids(third), ids(fourth)) == ([], tasks[14:])
    assert "the first 10; there may be more: give --limit, or go on with --after" in first.stderr
    assert re.match(r"looked back to \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ only", second.stderr)
    assert "say with --since how far to look, or go on with --after" in second.stderr
    assert (fourth.stderr, whole.stderr, before.stderr) == ("", "", "")
    assert (ids(whole), ids(before)) == (tasks, tasks[14:])
    assert "the first 10000; there may be more" in everything.stderr


def test_a_position_that_no_listing_named_is_wrong_usage(windlass: Run) -> None:
    done = windlass("--after", "nonsense", code=2)

    assert "position 'nonsense' is of no listing" in done.stderr


def test_a_task_whose_id_says_no_time_is_listed(windlass: Run, database_url: str) -> None:
    async def add() -> str:
        store = PostgresStore(store_options(database_url))
        await store.open()
        (answer,) = await store.enqueue([NewTask(uuid.UUID(int=(1 << 128) - 2), "work", "{}")])
        await store.close()
        return str(answer.id)

    task_id = asyncio.run(add())

    assert ids(windlass("--json")) == [task_id]
