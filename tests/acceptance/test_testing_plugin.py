"""The fixtures for users' own suites, used as a user does: in a suite of another directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
import pytest
import shop

pytest_plugins = ["windlass.testing.plugin"]

@pytest.fixture
def windlass_app():
    return shop.app
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
}


@pytest.mark.parametrize("processes", [0, 2])
def test_a_suite_of_a_user_passes(tmp_path: Path, server_url: str, processes: int) -> None:
    for name, text in SUITE.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-n", str(processes), "-p", "no:randomly"),
            *("-p", "no:cacheprovider", "-o", f"windlass_server_url={server_url}"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout


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
