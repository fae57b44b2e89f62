"""An application whose handlers end their own tasks, and a table for what they do."""

from collections.abc import AsyncIterator

import asyncpg
import pytest

from acceptance.completing.effects import PATIENT
from windlass import App


@pytest.fixture
async def app(database_url: str) -> AsyncIterator[App]:
    async with App(database_url, **PATIENT) as app:
        yield app


@pytest.fixture
async def look(app: App, sql_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(sql_url)
    await connection.execute("CREATE TABLE effects (n integer)")
    yield connection
    await connection.close()
