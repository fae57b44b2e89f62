"""What was typed wrongly is named in one line, whatever it is."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest
from click.testing import CliRunner, Result

from windlass import App
from windlass.cli import main
from windlass.service import Stop
from windlass.telemetry import emit

APP = """
from windlass import App

app = App()
in_memory = App("memory:")

@app.task
async def send(to: str) -> None: ...
"""


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_database_url: str
) -> Callable[..., Result]:
    (tmp_path / "usage_app.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("WINDLASS_DATABASE_URL", shared_database_url)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, arguments)

    return run


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["enqueue", "usage_app:app", "send", '{"to": "\udcff"}'], "not JSON"),
        (["enqueue", "usage_app:app", "send", "[" * 5000 + "]" * 5000], "not JSON"),
        (["enqueue", "usage_app:app", "send", '{"to": 1e400}'], "not JSON"),
        (["enqueue", "usage_app:app", "send", '{"to": "a"}', "--priority", "²"], "priority '²'"),
        (["enqueue", "usage_app:app", "send", '{"to": "a"}', "--priority", "9" * 5000], "priority"),
        (["enqueue", "usage_app:app", "send", '{"to": "a"}', "--delay", "nan"], "delay nan"),
        (["enqueue", "usage_app:app", "\udcff"], "task name"),
        (["tasks", "change", str(UUID(int=1)), "--priority", "urgent", "--dry-run"], "urgent"),
        (["tasks", "change", str(UUID(int=1)), "--set-queue", ""], "queue"),
        (["tasks", "change", str(UUID(int=1)), "--at", "2030-01-01T00:00Z", "--delay", "1"], "at"),
        (["tasks", "cancel", str(UUID(int=1)), "--reason", "x" * 2001, "--dry-run"], "reason"),
        (["tasks", "cancel", str(UUID(int=1)), "--by", "", "--dry-run"], "by ''"),
        (["worker", "..:app"], "package.module:name"),
        (["worker", ".usage_app:app"], "package.module:name"),
        (["worker", "usage app:app"], "no module"),
        (["worker", "usage_app:app", "--concurrency", "99999999999"], "concurrency"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_two(
    arguments: list[str], said: str, run: Callable[..., Result]
) -> None:
    done = run(*arguments)

    assert done.exit_code == 2, done.exception
    assert said in done.stderr
    assert len(done.stderr) < 500
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("command", "option", "values"),
    [
        (["tasks", "list"], "--type", ("send", "charge")),
        (["tasks", "list"], "--limit", ("5", "6")),
        (["tasks", "cancel"], "--queue", ("mail", "bulk")),
        (["tasks", "retry"], "--tag", ("old", "older")),
        (["tasks", "change", str(UUID(int=1))], "--priority", ("low", "high")),
        (["queues", "list"], "--app", ("usage_app:app", "other:app")),
        (["enqueue", "usage_app:app", "send"], "--queue", ("mail", "bulk")),
        (["worker", "nowhere:app"], "--concurrency", ("2", "3")),
    ],
)
def test_a_second_value_is_refused_and_both_are_named(
    command: list[str], option: str, values: tuple[str, str], run: Callable[..., Result]
) -> None:
    done = run(*command, option, values[0], option, values[1])

    assert done.exit_code == 2, done.exception
    assert done.stderr.startswith(f"windlass: {option} takes one value")
    assert all(value in done.stderr for value in values)
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_an_app_named_by_the_environment_is_one_value_whatever_it_holds() -> None:
    done = CliRunner(env={"WINDLASS_APP": "usage app:app"}).invoke(main, ["queues", "list"])

    assert done.exit_code == 2
    assert "no module 'usage app'" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["enqueue", "usage_app:in_memory", "send", '{"to": "a"}'],
        ["tasks", "list", "--app", "usage_app:in_memory"],
        ["tasks", "cancel", "--tag", "old", "--app", "usage_app:in_memory"],
        ["queues", "pause", "mail", "--app", "usage_app:in_memory"],
        ["workers", "list", "--app", "usage_app:in_memory"],
    ],
)
def test_a_store_that_ends_with_the_command_is_refused(
    arguments: list[str], run: Callable[..., Result]
) -> None:
    done = run(*arguments)

    assert done.exit_code == 2, done.exception
    assert "the database of usage_app:in_memory is 'memory:'" in done.stderr
    assert "use postgresql://… or embedded:" in done.stderr
    assert done.stdout == ""


def test_a_store_in_memory_named_by_the_environment_is_refused_by_the_name_of_the_variable(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_DATABASE_URL", "memory:")

    done = run("tasks", "list")

    assert done.exit_code == 2
    assert "the database of WINDLASS_DATABASE_URL is 'memory:'" in done.stderr


def test_a_type_that_nobody_defines_is_enqueued_with_a_warning_that_names_near_ones(
    run: Callable[..., Result],
) -> None:
    done = run("enqueue", "usage_app:app", "sned", '{"to": "a"}')

    assert done.exit_code == 0, done.exception
    assert str(UUID(done.stdout.strip())) == done.stdout.strip()
    assert "no task type 'sned' is defined by usage_app:app" in done.stderr
    assert "did you mean 'send'?" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_type_that_is_like_no_other_is_warned_of_without_a_guess(
    run: Callable[..., Result],
) -> None:
    done = run("enqueue", "usage_app:app", "quarterly.report")

    assert "'quarterly.report'" in done.stderr
    assert "did you mean" not in done.stderr


def test_a_type_that_the_app_or_another_one_defines_is_enqueued_without_a_word(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "other_app.py").write_text(APP.replace("send", "elsewhere"))
    assert run("migrate", "other_app:app").exit_code == 0  # registers its types

    done = [run("enqueue", "usage_app:app", name, '{"to": "a"}') for name in ("send", "elsewhere")]

    assert [(one.exit_code, one.stderr) for one in done] == [(0, "")] * 2


def test_an_empty_variable_for_the_database_is_said_to_be_empty(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_DATABASE_URL", "")

    done = run("tasks", "list")

    assert done.exit_code == 2
    assert "WINDLASS_DATABASE_URL is set but empty" in done.stderr
    assert "or unset it" in done.stderr


def test_a_socket_where_nobody_listens_is_named(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The form of the URL that the embedded server has.
    url = "postgresql://windlass@/windlass?host=%2Fno%2Fwhere&port=5432"
    monkeypatch.setenv("WINDLASS_DATABASE_URL", url)

    done = run("tasks", "list")

    assert done.exit_code == 1
    assert "the database at /no/where/.s.PGSQL.5432 cannot be reached" in done.stderr


def test_a_worker_whose_database_does_not_come_gives_up_and_says_so(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "late_app.py").write_text(APP)
    monkeypatch.setattr("windlass.cli.run.WAIT_FOR_DATABASE", 0.5)
    monkeypatch.setenv("WINDLASS_DATABASE_URL", f"postgresql://windlass@/windlass?host={tmp_path}")

    done = run("worker", "late_app:app")

    assert done.exit_code == 1
    assert "cannot be reached" in done.stderr.splitlines()[-1]


def test_a_worker_whose_database_takes_a_connection_and_is_silent_says_so_while_it_waits(
    run: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "hushed_app.py").write_text(APP)
    monkeypatch.setattr("windlass.cli.run.WAIT_FOR_DATABASE", 0.0)
    monkeypatch.setattr("windlass.cli.run.WAIT_IN_SILENCE", 0.1)
    told = threading.Event()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "doing=open error=no answer for 0.1 s" in record.getMessage():
                told.set()

    def be_silent(server: socket.socket) -> None:
        connection, _ = server.accept()
        told.wait(30)
        server.close()
        connection.close()

    telling = Told()
    logging.getLogger("windlass").addHandler(telling)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        url = f"postgresql://windlass@127.0.0.1:{port}/windlass"
        monkeypatch.setenv("WINDLASS_DATABASE_URL", url)
        silent = threading.Thread(target=be_silent, args=[server])
        silent.start()
        done = run("worker", "hushed_app:app")
        silent.join()
    logging.getLogger("windlass").removeHandler(telling)

    assert done.exit_code == 1
    assert told.is_set()


@pytest.fixture
def asked_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is asked to stop while its app opens."""

    async def open_under_a_signal(_: App, stop: Stop) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return await stop.wait()

    monkeypatch.setattr("windlass.cli.run._opened", open_under_a_signal)
    monkeypatch.setenv("WINDLASS_DATABASE_URL", "memory:")


@pytest.mark.usefixtures("asked_to_stop")
def test_a_worker_that_is_asked_to_stop_while_its_app_opens_stops(
    run: Callable[..., Result],
) -> None:
    assert run("worker", "usage_app:app").exit_code == 0


@pytest.mark.usefixtures("asked_to_stop")
def test_the_exit_code_of_a_worker_is_about_that_worker(run: Callable[..., Result]) -> None:
    emit("settlement.abandoned", tasks=1)  # by another one in this process

    assert run("worker", "usage_app:app").exit_code == 0
