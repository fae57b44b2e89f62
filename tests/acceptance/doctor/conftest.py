"""A patient: a database in good health, which tests make ill."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import asyncpg
import pytest

from acceptance.doctor.findings import nurse
from contract.pgbouncer import Pooler
from windlass.testing.databases import drop_database, make_database


@pytest.fixture(scope="module")
def patient_sql_url(server_url: str, template: str) -> Iterator[str]:
    """A database in good health: a task that waits, a worker that lives and leads."""
    url = asyncio.run(make_database(server_url, template))
    asyncio.run(nurse(url))
    yield url
    asyncio.run(drop_database(url))


@pytest.fixture
def patient(patient_sql_url: str, suite_pooler: Pooler | None) -> str:
    """The same database for what is tested."""
    return patient_sql_url if suite_pooler is None else suite_pooler.url(patient_sql_url)


@pytest.fixture
async def sql(patient_sql_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(patient_sql_url)
    yield connection
    await connection.close()
