"""What the doctor may not do, or cannot: each check by itself, and every advice helps."""

from collections.abc import AsyncIterator
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg
import pytest

from acceptance.doctor.conditions import ERROR, NOTE, OK, OTHER, UNKNOWN, WARNING
from acceptance.doctor.findings import findings, said
from windlass import App
from windlass.store.postgres import examining
from windlass.store.sqlfiles import SqlFiles


async def test_a_table_that_nobody_may_read_now_costs_only_the_checks_that_need_it(
    patient: str, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sql.transaction():
        await sql.execute("LOCK TABLE windlass.task IN ACCESS EXCLUSIVE MODE")
        found = await findings(patient)

    unknown = {one.check: one.found for one in found if one.level is UNKNOWN}
    assert unknown.keys() == {"places", "keys"}
    assert "somebody holds a lock" in unknown["places"]


def replace_look(monkeypatch: pytest.MonkeyPatch, name: str, statement: str) -> None:
    read = SqlFiles.statement
    monkeypatch.setattr(
        SqlFiles,
        "statement",
        lambda files, asked: statement if asked == name else read(files, asked),
    )


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("SELECT pg_sleep(60)", "it could not be finished within 0.05 s"),
        (
            "CREATE TABLE public.written ()",
            "ReadOnlySQLTransactionError: cannot execute CREATE TABLE in a read-only transaction",
        ),
    ],
)
async def test_a_check_can_neither_take_long_nor_write(
    patient: str, monkeypatch: pytest.MonkeyPatch, statement: str, why: str
) -> None:
    monkeypatch.setattr(examining, "IN_A_WHILE", 0.05)
    replace_look(monkeypatch, "examine_places", statement)

    found = await findings(patient)

    unknown = [(one.check, one.found) for one in found if one.level is UNKNOWN]
    assert unknown == [("places", f"not checked: {why}")]


async def test_a_key_whose_task_is_found_at_the_second_look_is_not_lost(
    patient: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost_at_first = f"SELECT '{OTHER}' AS task_id, 'resize' AS type WHERE $1::uuid[] IS DISTINCT FROM '{{{OTHER}}}'"
    replace_look(monkeypatch, "examine_keys", lost_at_first)

    found = await said(patient, "keys")

    assert found == [(OK, "every idempotency key leads to a task")]


async def test_a_connection_that_breaks_is_an_error_and_what_was_seen_is_told(
    patient: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_look(monkeypatch, "examine_places", "SELECT pg_terminate_backend(pg_backend_pid())")

    found = {one.check: (one.level, one.found) for one in await findings(patient)}

    assert found["connection"][0] is ERROR
    assert "the connection broke" in found["connection"][1]
    assert {check for check, (level, _) in found.items() if level is UNKNOWN} == {"places", "keys"}
    assert found["migrations"][0] is OK


# Rights


@pytest.fixture
async def stranger(server_url: str, sql: asyncpg.Connection) -> AsyncIterator[str]:
    """A role that may connect and nothing else."""
    name = f"stranger_{uuid4().hex}"
    await sql.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'secret'")
    yield name
    await sql.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


def as_role(role: str, url: str) -> str:
    parts = urlsplit(url)
    address = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{role}:secret@{address}"))


def database_of(url: str) -> str:
    return urlsplit(url).path.removeprefix("/")


async def test_a_role_is_told_what_it_lacks_and_each_advice_helps(
    patient_sql_url: str, sql: asyncpg.Connection, stranger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WINDLASS_POOLER", raising=False)
    url = as_role(stranger, patient_sql_url)
    # Set here it beats what is set for the role everywhere.
    await sql.execute(f"ALTER ROLE {stranger} IN DATABASE {database_of(url)} SET role = 'none'")

    nothing = await findings(url)
    lacking = [one for one in nothing if one.check == "rights"]
    for one in lacking[:3]:
        assert one.advice is not None
        await sql.execute(one.advice.partition(", unless")[0])
    enqueues = await findings(url)
    async with App(url) as app:
        large = {"text": "x" * 3000}
        handle = await app.enqueue("resize", large, tags=["red"], idempotency_key="k", delay=60)
    for table, column in (
        *(("task", "id"), ("scheduled", "task_id")),
        *(("task_tag", "task_id"), ("idempotency", "task_id"), ("large_payload", "task_id")),
    ):
        await sql.execute(f"DELETE FROM windlass.{table} WHERE {column} = '{handle.id}'")
    await sql.execute(f'ALTER TABLE windlass.lane OWNER TO "{stranger}"')
    mixed = await said(url, "rights")
    await sql.execute("ALTER TABLE windlass.lane OWNER TO CURRENT_USER")
    owner = await sql.fetchval("SELECT current_user::text")
    (to_work,) = (one.advice for one in enqueues if one.check == "rights")
    for statement in str(to_work).removeprefix("if workers use it: ").split(", and "):
        await sql.execute(statement)
    works = await said(url, "rights")

    assert [(one.level, one.found.partition(f"'{stranger}' ")[2][:15]) for one in lacking] == [
        (ERROR, "may not use the"),
        (ERROR, "may not read at"),
        (WARNING, "may not enqueue"),
        (NOTE, "does not own at"),
    ]
    assert {one.check for one in nothing if one.level is UNKNOWN} >= {"migrations", "places"}
    assert all("secret" not in f"{one.found} {one.advice}" for one in nothing)
    assert [one.level for one in enqueues if one.check == "rights"] == [NOTE]
    assert [one.level for one in enqueues if one.check in {"migrations", "places"}] == [OK, OK]
    assert any("does not see the transactions of other roles" in one.found for one in enqueues)
    assert [level for level, _ in mixed] == [WARNING]
    assert works == [(OK, f"role '{owner}' may look, enqueue and work")]


async def test_a_role_that_may_not_call_what_an_enqueue_needs_is_told_what_helps(
    patient_sql_url: str, sql: asyncpg.Connection, stranger: str
) -> None:
    url = as_role(stranger, patient_sql_url)
    needed = "windlass.lane_number, windlass.enqueue_now"  # one of them is a procedure
    await sql.execute(f"GRANT USAGE ON SCHEMA windlass TO {stranger}")
    await sql.execute(f"REVOKE EXECUTE ON ROUTINE {needed} FROM PUBLIC")
    try:
        (lacking,) = [one for one in await findings(url) if "may not call" in one.found]
        assert lacking.advice is not None
        await sql.execute(lacking.advice)
        assert not [one for one in await findings(url) if "may not call" in one.found]
    finally:
        await sql.execute(f"GRANT EXECUTE ON ROUTINE {needed} TO PUBLIC")


SETTINGS = {
    "default_transaction_read_only": "on",
    "idle_in_transaction_session_timeout": "0",
    "default_transaction_isolation": "serializable",
    "synchronous_commit": "off",
    "statement_timeout": "4s",
    "transaction_timeout": "4s",
}


@pytest.mark.parametrize(
    "whose", ["ROLE {role}", "DATABASE {database}", "ROLE {role} IN DATABASE {database}"]
)
async def test_a_setting_is_mended_as_advised_wherever_it_was_made(
    patient_sql_url: str, sql: asyncpg.Connection, stranger: str, whose: str
) -> None:
    url = as_role(stranger, patient_sql_url)
    whose = whose.format(role=stranger, database=database_of(url))
    known = await sql.fetch("SELECT name FROM pg_settings WHERE name = ANY ($1)", [*SETTINGS])
    names = {row["name"] for row in known}  # one of them is not known to older servers

    async def advised() -> dict[str, str]:
        # As behind a pooler, for nothing is set by the connection then.
        found = await App(url, pooler=True).diagnosis()
        texts = [one.advice for one in found if one.advice]
        return {name: text for name in names for text in texts if f"SET {name} =" in text}

    try:
        for name in names:
            await sql.execute(f"ALTER {whose} SET {name} = '{SETTINGS[name]}'")
        before = await advised()
        for advice in before.values():
            await sql.execute(advice.partition(", ")[0])
        after = await advised()
    finally:
        await sql.execute(f"ALTER {whose} RESET ALL")

    assert before.keys() == names
    assert after == {}
