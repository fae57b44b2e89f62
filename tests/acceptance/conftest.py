"""An application on each store: what a user sees is the same on both."""

from collections.abc import AsyncIterator

import pytest

from acceptance.quick import QUICK
from windlass import App


@pytest.fixture(params=["memory", "postgres"])
def app_url(request: pytest.FixtureRequest) -> str:
    return "memory:" if request.param == "memory" else request.getfixturevalue("database_url")


@pytest.fixture
async def app(app_url: str) -> AsyncIterator[App]:
    async with App(app_url, **QUICK) as app:
        yield app
