"""A real PostgreSQL for the whole session, and a fresh database from a template for each test."""

import asyncio
import gc
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from contract.pgbouncer import BEHIND_POOLER, SUITE_SESSIONS, Pooler, store_options
from windlass.store.postgres.embedded import EmbeddedServer
from windlass.store.postgres.store import PostgresStore
from windlass.testing.databases import drop_database, make_database, make_template

pytest.register_assert_rewrite("windlass.testing.store_contract", "contract.store_machine")


MEMORY = Path("/dev/shm")
ROOM = 4 << 30  # bytes; the tests use a quarter of it


@pytest.hookimpl(tryfirst=True)  # before pytest decides on its folder
def pytest_configure(config: pytest.Config) -> None:
    if BEHIND_POOLER:
        os.environ["WINDLASS_POOLER"] = "true"  # for every app, also in other processes
    if config.option.basetemp is None and has_room_in_memory():
        folder = MEMORY / f"pytest-of-windlass-{os.getpid()}"
        config.option.basetemp = str(folder)
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays: it need not be looked through again and again


def has_room_in_memory() -> bool:
    """Whether there is: a database per test is hundreds of files, which some disks are slow to make."""
    if not MEMORY.is_dir() or os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:
        return False
    return os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out behind a pooler what no pooler in transaction mode can give."""
    for item in items:
        mark = item.get_closest_marker("needs_direct")
        if BEHIND_POOLER and mark is not None:
            item.add_marker(pytest.mark.skip(reason=f"needs a direct connection: {mark.args[0]}"))


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """POSTGRES_TEST_URL names a server to use instead of the embedded one."""
    given = os.environ.get("POSTGRES_TEST_URL")
    if given:
        yield given
        return
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    server = EmbeddedServer.acquire(
        folder / "postgres", settings={"fsync": "off", "max_connections": "300"}
    )
    yield server.url
    server.release()


@pytest.fixture(scope="session")
def template(server_url: str) -> str:
    """A migrated database to copy, made once per server and state of the migrations."""
    return asyncio.run(make_template(server_url))


@pytest.fixture(scope="session")
def suite_pooler(server_url: str) -> Iterator[Pooler | None]:
    """With POSTGRES_TEST_POOLER=1 what is tested talks to the server through a pooler."""
    if not BEHIND_POOLER:
        yield None
        return
    with Pooler.running(server_url, sessions=SUITE_SESSIONS) as pooler:
        yield pooler


def _through(pooler: Pooler | None, url: str) -> str:
    return url if pooler is None else pooler.url(url)


@pytest.fixture(scope="session")
def tested_server_url(server_url: str, suite_pooler: Pooler | None) -> str:
    """The server, or the pooler before it, for what is tested."""
    return _through(suite_pooler, server_url)


@pytest.fixture
async def empty_sql_url(server_url: str) -> AsyncIterator[str]:
    """A database without our schema, for the test's own SQL."""
    async for url in _database(server_url, "template1"):
        yield url


@pytest.fixture
def empty_database_url(empty_sql_url: str, suite_pooler: Pooler | None) -> str:
    """The same database for what is tested."""
    return _through(suite_pooler, empty_sql_url)


@pytest.fixture
async def sql_url(server_url: str, template: str) -> AsyncIterator[str]:
    """A migrated, empty database of the test's own, for its own SQL: around any pooler."""
    async for url in _database(server_url, template):
        yield url


@pytest.fixture
def database_url(sql_url: str, suite_pooler: Pooler | None) -> str:
    """The same database for what is tested."""
    return _through(suite_pooler, sql_url)


async def _database(server_url: str, template: str) -> AsyncIterator[str]:
    url = await make_database(server_url, template)
    yield url
    await drop_database(url)


@pytest.fixture(scope="session")
def shared_sql_url(server_url: str, template: str) -> Iterator[str]:
    """A migrated database that tests share and empty themselves, for their own SQL."""
    url = asyncio.run(make_database(server_url, template))
    yield url
    asyncio.run(drop_database(url))


@pytest.fixture(scope="session")
def shared_database_url(shared_sql_url: str, suite_pooler: Pooler | None) -> str:
    """The same database for what is tested."""
    return _through(suite_pooler, shared_sql_url)


@pytest.fixture
async def postgres_store(database_url: str) -> AsyncIterator[PostgresStore]:
    # Patient, so that what is to be seen waiting for a lock does wait on a slow machine too.
    store = PostgresStore(store_options(database_url, patience=timedelta(minutes=1)))
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture(scope="session")
def with_data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Put the data of a server that was started before into a directory: quicker than initdb."""
    made = tmp_path_factory.mktemp("made") / ".windlass"
    EmbeddedServer.acquire(made, settings={"fsync": "off"}).release()

    def with_data(directory: Path) -> Path:
        directory.mkdir(mode=0o700, parents=True)
        shutil.copytree(made / "data", directory / "data")
        return directory

    return with_data
