"""Fixtures for pytest. In a conftest.py: `pytest_plugins = ["windlass.testing.plugin"]`.

Define a fixture `windlass_app` that returns your application; then ask for `windlass_in_memory`, or for
`windlass_on_postgres`.
"""

import asyncio
import os
from collections.abc import Iterator

import pytest

from windlass.app import App
from windlass.store.postgres.embedded import EmbeddedServer
from windlass.testing.databases import drop_database, make_database, make_template, migrate
from windlass.testing.kit import Clock, app_in_memory


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a suite name a server."""
    parser.addini(
        "windlass_server_url",
        "PostgreSQL to make databases for tests in; without it the embedded server is used",
        default="",
    )


@pytest.fixture
def windlass_app() -> App:
    """Your application: define a fixture of this name."""
    raise pytest.UsageError(
        "define a fixture windlass_app that returns your application, next to your tests or in a "
        "conftest.py"
    )


@pytest.fixture
def windlass_clock() -> Clock:
    """The clock of the application in memory."""
    return Clock()


@pytest.fixture
def windlass_in_memory(windlass_app: App, windlass_clock: Clock) -> Iterator[App]:
    """Your application, with its tasks in memory and without any for each test."""
    with app_in_memory(windlass_app, clock=windlass_clock) as app:
        yield app


@pytest.fixture(scope="session")
def windlass_server_url(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A PostgreSQL server for the session: the one that is named, or an embedded one."""
    if given := request.config.getini("windlass_server_url"):
        yield given
        return
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # one server for all processes
    server = EmbeddedServer.acquire(
        folder / "windlass", settings={"fsync": "off", "max_connections": "300"}
    )
    yield server.url
    server.release()


@pytest.fixture(scope="session")
def windlass_template(windlass_server_url: str) -> str:
    """A migrated database to copy. Override it to add tables of your own."""
    return asyncio.run(make_template(windlass_server_url))


@pytest.fixture
def windlass_database_url(windlass_server_url: str, windlass_template: str) -> Iterator[str]:
    """A migrated, empty database of the test's own."""
    url = asyncio.run(make_database(windlass_server_url, windlass_template))
    yield url
    asyncio.run(drop_database(url))


@pytest.fixture
def windlass_on_postgres(windlass_app: App, windlass_database_url: str) -> Iterator[App]:
    """Your application on a PostgreSQL database of the test's own."""
    schema = windlass_app.settings.schema
    if schema != "windlass":  # which is all that the template need have
        asyncio.run(migrate(windlass_database_url, schema))
    with windlass_app.kept_at(windlass_database_url):
        yield windlass_app
