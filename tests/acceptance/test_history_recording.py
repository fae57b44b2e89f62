"""Recording a database: once, where there is something to record, and beside nothing of somebody else."""

import asyncio
from collections.abc import AsyncIterator
from uuid import uuid4

import asyncpg
import pytest

from windlass import App, ConfigurationError
from windlass.testing.history_check import read_history, record


@pytest.fixture
async def connection(sql_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(sql_url)
    yield connection
    await connection.close()


async def test_a_database_is_recorded_once_and_it_says_how_to_begin_anew(
    connection: asyncpg.Connection,
) -> None:
    await record(connection)

    with pytest.raises(ConfigurationError, match="'windlass' of this database is recorded already"):
        await record(connection)

    await connection.execute("DROP SCHEMA windlass_history CASCADE")
    await record(connection)


async def test_of_two_who_begin_at_once_one_is_told(
    connection: asyncpg.Connection, sql_url: str
) -> None:
    other = await asyncpg.connect(sql_url)

    ends = await asyncio.gather(record(connection), record(other), return_exceptions=True)

    assert sorted(map(type, ends), key=str) == [type(None), ConfigurationError]
    await other.close()


async def test_a_database_that_was_never_migrated_is_named(empty_sql_url: str) -> None:
    connection = await asyncpg.connect(empty_sql_url)
    for ask in (record, read_history):
        with pytest.raises(
            ConfigurationError, match=r"'windlass' .* never migrated.*windlass migrate"
        ):
            await ask(connection)
    await connection.close()


async def test_a_schema_of_somebody_else_is_left_alone(connection: asyncpg.Connection) -> None:
    await connection.execute("CREATE SCHEMA windlass_history CREATE TABLE event_log (id int)")

    with pytest.raises(ConfigurationError, match="of somebody else"):
        await record(connection)
    with pytest.raises(ConfigurationError, match="call record"):
        await read_history(connection)

    assert await connection.fetchval("SELECT count(*) FROM windlass_history.event_log") == 0


async def test_a_recording_whose_tables_are_gone_is_told_apart(
    connection: asyncpg.Connection, sql_url: str
) -> None:
    await record(connection)
    await connection.execute("DROP SCHEMA windlass CASCADE")
    async with App(sql_url):
        pass

    with pytest.raises(
        ConfigurationError, match=r"earlier recording.*DROP SCHEMA windlass_history"
    ):
        await record(connection)
    with pytest.raises(ConfigurationError, match="call record"):
        await read_history(connection)


async def test_what_was_never_recorded_cannot_be_read(connection: asyncpg.Connection) -> None:
    with pytest.raises(ConfigurationError, match="call record"):
        await read_history(connection)


async def test_another_schema_than_the_recorded_one_cannot_be_read(
    connection: asyncpg.Connection, sql_url: str
) -> None:
    async with App(sql_url, schema="other"):
        pass
    await record(connection, schema="other")

    with pytest.raises(ConfigurationError, match="but for its schema 'other'"):
        await read_history(connection)
    with pytest.raises(ConfigurationError, match="'other' of this database is recorded already"):
        await record(connection)
    assert (await read_history(connection, schema="other")).events == []


async def test_who_lacks_the_right_to_record_is_told_so(connection: asyncpg.Connection) -> None:
    role = f"onlooker_{uuid4().hex}"
    await connection.execute(f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA windlass TO {role}")
    try:
        await connection.execute(f"SET ROLE {role}")
        with pytest.raises(ConfigurationError, match="lacks a right"):
            await record(connection)
    finally:
        await connection.execute(f"RESET ROLE; DROP OWNED BY {role}; DROP ROLE {role}")
