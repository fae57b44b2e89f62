"""An application on each store: what a user sees is the same on both."""

import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from acceptance.quick import QUICK
from windlass import App
from windlass.store.postgres.embedded import EmbeddedServer


@pytest.fixture(params=["memory", "postgres"])
def app_url(request: pytest.FixtureRequest) -> str:
    return "memory:" if request.param == "memory" else request.getfixturevalue("database_url")


@pytest.fixture
async def app(app_url: str) -> AsyncIterator[App]:
    async with App(app_url, **QUICK) as app:
        yield app


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
