"""The fixtures for users' own suites, used as a user does: in a suite of another directory."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest

from slowly import slowly
from windlass.testing.databases import on_database

SUITE = {
    "pytest.ini": """
[pytest]
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
filterwarnings = error
""",
    "shop.py": """
from windlass import App

app = App("postgresql://nobody@127.0.0.1:1/nothing")

@app.task
async def greet(name: str) -> str:
    return f"hello {name}"
""",
    "conftest.py": """
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import shop

pytest_plugins = ["windlass.testing.plugin"]

@pytest.fixture
def windlass_app():
    return shop.app

@pytest.fixture
def windlass_database_url(windlass_database_url):
    with Path("databases").open("a") as file:
        print(urlsplit(windlass_database_url).path.removeprefix("/"), file=file)
    return windlass_database_url

def pytest_sessionfinish():
    runs = Path("base/windlass/data/postmaster.pid").exists()
    Path("at_the_end").write_text("a server runs" if runs else "no server runs")
""",
    "test_shop.py": """
import gc
import shop
from windlass import testing

def test_in_memory(windlass_in_memory, windlass_clock):
    shop.greet.options(delay=60).enqueue_sync("ada")
    assert windlass_in_memory is shop.app
    assert testing.assert_enqueued(shop.app, shop.greet, name="ada").status == "scheduled"

async def test_in_memory_again(windlass_in_memory, windlass_clock):
    assert testing.enqueued(shop.app, shop.greet) == []
    handle = await shop.greet.options(delay=60).enqueue("ada")
    windlass_clock.move(60)
    await testing.drain(shop.app)
    assert await handle.result(timeout=1) == "hello ada"

async def test_on_postgres(windlass_on_postgres, windlass_database_url):
    async with shop.app:
        handle = await shop.greet.enqueue("bob")
        await shop.app.run_worker(until_idle=True)
        assert await handle.result(timeout=10) == "hello bob"
        assert shop.app.url == windlass_database_url

async def test_on_postgres_again(windlass_on_postgres):
    async with shop.app:
        assert await (await shop.app.store()).queues() == []
        await shop.greet.enqueue("carol")

def test_on_postgres_without_an_event_loop(windlass_on_postgres):
    assert shop.greet.enqueue_sync("eve").get_sync().status == "pending"

def test_everything_is_as_before():
    gc.collect()  # whatever was left open is told of now
    assert shop.app.url.endswith("/nothing")
""",
    "test_schema.py": """
import pytest
from windlass import App

@pytest.fixture
def windlass_app():
    return App("postgresql://nobody@127.0.0.1:1/nothing", schema="shop_tasks", auto_migrate=False)

async def test_on_postgres_in_another_schema(windlass_on_postgres):
    async with windlass_on_postgres as app:
        assert (await (await app.enqueue("greet")).get()).status == "pending"
""",
}


@pytest.mark.parametrize("processes", slowly([0, 2], lambda processes: processes == 0))
async def test_a_suite_of_a_user_passes_and_leaves_no_database(
    tmp_path: Path, server_url: str, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:  # as by a worker of another test
        monkeypatch.setenv("WINDLASS_HEALTH_PORT", str(taken.getsockname()[1]))
        run_suite(tmp_path, "-n", str(processes), "-o", f"windlass_server_url={server_url}")

    made = (tmp_path / "databases").read_text().split()
    assert len(made) == 4
    admin = await asyncpg.connect(on_database(server_url, "postgres"))
    try:
        there = [row["datname"] for row in await admin.fetch("SELECT datname FROM pg_database")]
    finally:
        await admin.close()
    assert not set(made) & set(there)


def test_a_suite_that_names_no_server_has_one_until_its_end(tmp_path: Path) -> None:
    run_suite(tmp_path, "-n", "0", "--basetemp=base")

    assert (tmp_path / "base/windlass/data/PG_VERSION").exists()
    assert (tmp_path / "at_the_end").read_text() == "no server runs"


def run_suite(folder: Path, *options: str) -> None:
    for name, text in SUITE.items():
        (folder / name).write_text(text)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:randomly"),
            *("-p", "no:cacheprovider", *options),
        ],
        cwd=folder,
        # It is no process of ours, whose directory it would share.
        env={name: value for name, value in os.environ.items() if "XDIST" not in name},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stdout
    assert "7 passed" in done.stdout


def test_a_suite_without_an_app_is_told_how(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["windlass.testing.plugin"]')
    (tmp_path / "test_it.py").write_text("def test_it(windlass_in_memory): ...")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode != 0
    assert "define a fixture windlass_app" in done.stdout + done.stderr
