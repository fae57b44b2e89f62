"""`windlass doctor`, and what the page says of it."""

import asyncio
import json
import re
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID

import asyncpg
import pytest
from click.testing import CliRunner

from acceptance.doctor.conditions import ERROR, OK
from acceptance.doctor.findings import said, tells
from contract.pgbouncer import store_options
from windlass.cli import main
from windlass.model.task import NewTask
from windlass.policy.diagnosis import CHECKS
from windlass.store.postgres.store import PostgresStore

ROOT = Path(__file__).parents[3]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.delenv("WINDLASS_APP", raising=False)
    return CliRunner()


def test_the_command_prints_a_line_for_each_check_and_what_to_do(
    told: CliRunner, patient: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_DATABASE_URL", patient)

    done = told.invoke(main, ["doctor"])
    listed = told.invoke(main, ["doctor", "--json"])

    assert (done.exit_code, listed.exit_code) == (0, 0), done.exception
    first_words = [line.split()[:2] for line in done.stdout.splitlines() if line[0] != " "]
    records = json.loads(listed.stdout)
    assert first_words[:-1] == [[record["level"], record["check"]] for record in records]
    assert [set(record) for record in records] == [{"check", "level", "found", "advice"}] * len(
        records
    )
    assert re.search(r"^ +→ ALTER SYSTEM SET fsync = on", done.stdout, re.MULTILINE)
    assert done.stdout.splitlines()[-1].startswith("ok ")


def test_an_empty_database_is_an_error_and_stays_empty(
    told: CliRunner, empty_database_url: str, empty_sql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_DATABASE_URL", empty_database_url)

    done = told.invoke(main, ["doctor"])

    assert done.exit_code == 1, done.exception
    assert "there is no schema 'windlass'" in done.stdout
    assert "→ run: windlass migrate" in done.stdout
    assert asyncio.run(fetchval(empty_sql_url, "SELECT to_regnamespace('windlass')::text")) is None


async def fetchval(url: str, statement: str) -> object:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(statement)
    finally:
        await connection.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://clerk:secret@127.0.0.1:1/shop", "127.0.0.1:1 cannot be reached"),
        ("no such database", "does not exist"),
    ],
)
def test_a_database_that_cannot_be_reached_is_named_without_the_password(
    told: CliRunner, server_url: str, monkeypatch: pytest.MonkeyPatch, url: str, words: str
) -> None:
    monkeypatch.delenv("WINDLASS_POOLER", raising=False)
    if "://" not in url:
        url = urlunsplit(urlsplit(server_url)._replace(path="/no_such_database"))
    monkeypatch.setenv("WINDLASS_DATABASE_URL", url)

    done = told.invoke(main, ["doctor", "--json"])

    assert done.exit_code == 1, done.exception
    (record,) = json.loads(done.stdout)
    assert (record["check"], record["level"]) == ("connection", "error")
    assert words in record["found"]
    assert "secret" not in done.output


def test_memory_has_nothing_to_examine(told: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_DATABASE_URL", "memory:")

    done = told.invoke(main, ["doctor"])

    assert done.exit_code == 2
    assert "memory:" in done.stderr


# What the page says


async def test_a_task_in_no_place_is_mended_as_the_page_shows(
    database_url: str, sql_url: str
) -> None:
    page = (ROOT / "docs" / "operating.md").read_text().split("### Tasks in the wrong place")[1]
    shown = re.findall(r"```sql\n(.+?)```", page, re.DOTALL)
    (task_id,) = set(re.findall(r"'([0-9a-f-]{36})'", shown[0]))
    store = PostgresStore(store_options(database_url))
    await store.open()
    await store.enqueue([NewTask(UUID(task_id), "resize", "{}")])
    session = await asyncpg.connect(sql_url)

    await session.execute("DELETE FROM windlass.ready; DELETE FROM windlass.lane")
    lost = await said(database_url, "places")
    await session.execute(shown[0])
    mended = await said(database_url, "places")
    await session.execute("UPDATE windlass.ready SET generation = 5")
    other = await said(database_url, "places")
    await session.execute(shown[2])
    in_order = await said(database_url, "places")

    assert tells(lost, ERROR, f"in no place, so that nobody will run it: 1 task ({task_id})")
    assert tells(other, ERROR, "a generation that is not its own")
    assert mended == in_order == [(OK, "every live task is in exactly one place")]
    await session.close()
    await store.close()


def test_every_check_is_explained() -> None:
    page = (ROOT / "docs" / "operating.md").read_text()

    explained = re.findall(
        r"^\| `(\w+)` \|", page.split("## The doctor")[1].split("\n#")[0], re.MULTILINE
    )

    assert explained == ["connection", *CHECKS]
