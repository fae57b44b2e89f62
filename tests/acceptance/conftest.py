"""An application on each store: what a user sees is the same on both."""

import socket
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


@pytest.fixture
def port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        number: int = free.getsockname()[1]
        return number
