"""What the database is not even asked to do."""

from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from contract.pgbouncer import store_options
from windlass.model.errors import ConfigurationError, PayloadError
from windlass.store.postgres.parts import PACKAGE
from windlass.store.postgres.store import PostgresOptions, PostgresStore
from windlass.store.sqlfiles import SqlFiles


@pytest.mark.parametrize("word", ["user", "authorization", "int"])
async def test_a_schema_named_as_a_word_of_sql_is_refused_before_anything_is_created(
    empty_database_url: str, empty_sql_url: str, word: str
) -> None:
    store = PostgresStore(store_options(empty_database_url, schema=word))

    with pytest.raises(ConfigurationError, match=f"schema '{word}'"):
        await store.open()

    connection = await asyncpg.connect(empty_sql_url)
    made = await connection.fetchval("SELECT count(*) FROM pg_namespace WHERE nspname = $1", word)
    await connection.close()
    assert made == 0


@pytest.mark.parametrize("parameter", ["nonsense=1", "work_mem=much", "sslmode=perhaps"])
async def test_a_parameter_of_the_url_that_is_not_taken_is_named(
    database_url: str, parameter: str
) -> None:
    mark = "&" if "?" in database_url else "?"
    store = PostgresStore(store_options(f"{database_url}{mark}{parameter}"))

    with pytest.raises(ConfigurationError, match=parameter.partition("=")[0]):
        await store.open()


@pytest.mark.parametrize("queue", ["a\x00secret", 5, "\ud800secret"])
async def test_a_value_that_the_database_cannot_hold_is_our_error_and_not_repeated(
    postgres_store: PostgresStore, queue: Any
) -> None:
    with pytest.raises(PayloadError, match="cannot hold") as raised:
        await postgres_store.pause(queue)

    assert "secret" not in str(raised.value)
    assert await postgres_store.queues() == []


async def test_with_a_pooler_another_isolation_level_is_refused_until_it_is_set_as_told(
    empty_sql_url: str,
) -> None:
    name = urlsplit(empty_sql_url).path[1:]
    admin = await asyncpg.connect(empty_sql_url)
    try:
        await admin.execute(
            f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'"
        )
        pooled = PostgresStore(PostgresOptions(url=empty_sql_url, pooler=True))
        with pytest.raises(ConfigurationError, match="default_transaction_isolation") as raised:
            await pooled.open()
        assert await pooled.schema.pending() == SqlFiles(PACKAGE, "windlass").migrations()

        told = str(raised.value).partition("run: ")[2].partition(", and let")[0]
        await admin.execute(told)
        await pooled.open()
        await pooled.close()
    finally:
        await admin.close()


async def test_without_a_pooler_the_isolation_level_is_our_own(sql_url: str) -> None:
    name = urlsplit(sql_url).path[1:]
    admin = await asyncpg.connect(sql_url)
    await admin.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
    await admin.close()
    store = PostgresStore(PostgresOptions(url=sql_url))

    await store.open()

    row = (await store._run.fetch("read_isolation"))[0]
    await store.close()
    assert row["level"] == "read committed"
