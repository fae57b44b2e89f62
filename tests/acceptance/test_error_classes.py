"""What class an error is of, and what becomes of its task by that."""

import asyncio
import errno
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Never

import aiohttp
import httpx
import pytest
import requests
from click.testing import CliRunner

from acceptance.quick import QUICK
from windlass import App, ConfigurationError, Context, Retry, TaskFailed
from windlass.cli import main
from windlass.failures import classifier
from windlass.failures.classifier import built_in_rules
from windlass.model.task import TaskRecord

SOON = Retry(max_attempts=3, base=0.01, jitter="none")


class Answers(BaseHTTPRequestHandler):
    """Answers /STATUS/RETRY-AFTER with both, the latter in either form."""

    def do_GET(self) -> None:
        status, after = self.path.strip("/").split("/")
        self.send_response(int(status))
        if after.startswith("date"):
            later = datetime.now(UTC) + timedelta(seconds=int(after.removeprefix("date")))
            self.send_header("Retry-After", format_datetime(later, usegmt=True))
        elif after != "none":
            self.send_header("Retry-After", after)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


async def ended(app: App, task: Any, *args: Any) -> TaskRecord:
    async with app.worker():
        handle = await task.enqueue(*args)
        with pytest.raises(TaskFailed):
            await handle.result(20)
    record: TaskRecord = await handle.get()
    return record


async def once_tried(app: App, task: Any, *args: Any) -> TaskRecord:
    handle = await task.enqueue(*args)
    await app.run_worker(until_idle=True)
    record: TaskRecord = await handle.get()
    return record


@pytest.mark.parametrize(
    ("error", "error_class", "status", "attempts"),
    [
        (KeyError("x"), "code-bug", "failed", 1),
        (json.JSONDecodeError("x", "y", 0), "permanent-input", "failed", 1),
        (ConnectionResetError(), "transient", "dead", 3),
        (RuntimeError("too many requests"), "rate-limited", "dead", 3),
        (ValueError("odd"), "unknown", "dead", 3),
    ],
)
async def test_the_class_decides_whether_another_attempt_is_made(
    app: App, error: Exception, error_class: str, status: str, attempts: int
) -> None:
    @app.task(retry=SOON)
    async def work() -> None:
        raise error

    record = await ended(app, work)

    assert (record.status, record.attempts) == (status, attempts)
    assert [one["class"] for one in record.errors] == [error_class] * attempts
    assert record.error_class == error_class


async def test_who_waits_for_a_result_is_told_the_class(app: App) -> None:
    @app.task
    async def work() -> None:
        raise KeyError("x")

    handle = await work.enqueue()
    await app.run_worker(until_idle=True)

    with pytest.raises(TaskFailed, match=r"is failed \(code-bug\): 'x'") as raised:
        await handle.result(5)
    assert raised.value.error_class == "code-bug"


async def test_a_bug_is_an_alarm_and_an_unknown_error_is_visible(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(retry=1)
    async def bug() -> None:
        raise KeyError("secret")

    @app.task(retry=2)
    async def unknown() -> None:
        raise ValueError("secret")

    await once_tried(app, bug)
    await once_tried(app, unknown)

    said = {(line.levelname, line.message.split()[0]) for line in caplog.records}
    assert ("ERROR", "task.code_bug") in said
    assert ("WARNING", "task.unknown_error") in said
    assert "secret" not in caplog.text


def by_httpx(url: str) -> None:
    httpx.get(url).raise_for_status()


def by_requests(url: str) -> None:
    requests.get(url, timeout=10).raise_for_status()


async def by_aiohttp(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        answer.raise_for_status()


@pytest.mark.parametrize("call", [by_httpx, by_requests, by_aiohttp])
@pytest.mark.parametrize(("after", "least"), [("600", 600), ("date600", 599)])
async def test_a_retry_after_of_the_other_side_is_obeyed(
    app: App, server: str, call: Any, after: str, least: float
) -> None:
    task = app.task(retry=SOON)(call)

    record = await once_tried(app, task, f"{server}/503/{after}")

    assert record.status == "scheduled"
    waits = record.scheduled_for - datetime.fromisoformat(record.errors[0]["ended_at"])
    assert least <= waits.total_seconds() <= 601


async def test_a_retry_after_of_a_request_that_cannot_succeed_is_not(app: App, server: str) -> None:
    record = await once_tried(app, app.task(by_httpx), f"{server}/404/600")

    assert (record.status, record.error_class) == ("failed", "permanent-input")


async def test_a_predicate_decides_whatever_the_class(app: App) -> None:
    @app.task(retry=Retry(max_attempts=3, base=0.01, jitter="none", when=lambda _: True))
    async def bug() -> None:
        raise KeyError("x")

    @app.task(retry=Retry(max_attempts=3, when=lambda error: "maybe" in str(error)))
    async def transient() -> None:
        raise ConnectionResetError("never")

    assert (await ended(app, bug)).attempts == 3
    record = await ended(app, transient)
    assert (record.status, record.attempts, record.error_class) == ("failed", 1, "transient")


async def test_a_predicate_that_fails_leaves_it_to_the_class(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    def when(_: BaseException) -> bool:
        raise LookupError("broken predicate")

    @app.task(retry=Retry(when=when))
    async def bug() -> None:
        raise KeyError("x")

    assert (await once_tried(app, bug)).status == "failed"
    assert "retry.undecided" in caplog.text


async def test_an_overrun_is_transient(app: App) -> None:
    @app.task(retry=1, timeout=0.05)
    async def slow() -> None:
        await asyncio.sleep(60)

    record = await once_tried(app, slow)

    assert (record.status, record.error_class) == ("dead", "transient")


async def test_a_payload_that_does_not_fit_is_permanent_input(database_url: str) -> None:
    async with App(database_url, **QUICK) as app:

        @app.task(name="strict")
        async def strict(number: int) -> None: ...

        async with App(database_url, **QUICK) as other:  # which does not know better
            handle = await other.enqueue("strict", {"number": "many"})
        await app.run_worker(until_idle=True)

        record = await app.handle(handle.id).get()
        assert (record.status, record.error_class) == ("failed", "permanent-input")


async def test_a_result_that_cannot_be_kept_is_a_bug(app: App) -> None:
    @app.task
    async def odd() -> object:
        return object()

    record = await once_tried(app, odd)

    assert (record.status, record.error_class) == ("failed", "code-bug")


class OddError(Exception):
    status = 503


async def test_rules_of_the_application_come_first(app_url: str, tmp_path: Path) -> None:
    written = tmp_path / "errors.toml"
    written.write_text(
        '[[rule]]\nname = "odd"\nclass = "permanent input"\n'
        f'type = ["{OddError.__module__}.OddError", "KeyError"]\n'
    )
    async with App(app_url, error_rules=str(written), **QUICK) as app:
        app.error_rule("rate-limited", type=KeyError, message="later")

        @app.task(retry=1)
        async def work(text: str) -> None:
            raise KeyError(text) if text else OddError

        assert (await once_tried(app, work, "")).error_class == "permanent-input"
        assert (await once_tried(app, work, "later")).error_class == "rate-limited"
        assert (await once_tried(app, work, "never")).error_class == "permanent-input"


def test_a_wrong_file_of_rules_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.toml.*cannot be read"):
        App("memory:", error_rules=str(tmp_path / "none.toml"))


def test_a_wrong_rule_in_code_is_refused() -> None:
    app = App("memory:")

    with pytest.raises(ConfigurationError, match="error rule: class 'bad'"):
        app.error_rule("bad", type=KeyError)
    with pytest.raises(ConfigurationError, match="would match every error"):
        app.error_rule("transient")


async def test_middleware_sees_the_exception_before_it_is_classified(app: App) -> None:
    @app.middleware
    async def translate(_: Context, call_next: Any) -> Any:
        try:
            return await call_next()
        except KeyError as error:
            raise ConnectionError from error

    @app.task(retry=1)
    async def work() -> None:
        raise KeyError("x")

    assert (await once_tried(app, work)).error_class == "transient"


def said_by(*arguments: str, env: dict[str, str] | None = None) -> str:
    ran = CliRunner().invoke(main, ["errors", *arguments], env=env)
    assert ran.exit_code == 0, ran.output
    return ran.output


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            ["KeyError"],
            "KeyError is code-bug: fails at once\nby the rule 'python: programming error'",
        ),
        (["httpx.ReadTimeout"], "httpx.ReadTimeout is transient: tried again"),
        (["x.Y", "--status", "429"], "x.Y is rate-limited"),
        (["x.Y", "--sqlstate", "40001"], "x.Y is transient"),
        (["x.Y", "--message", "connection reset"], "x.Y is transient"),
        (["OSError", "--attribute", "errno=28"], "OSError is transient"),
        (
            ["kafka.errors.KafkaError", "--attribute", "retriable=true"],
            "kafka.errors.KafkaError is transient",
        ),
        (["asyncpg.UniqueViolationError"], "asyncpg.UniqueViolationError is permanent-input"),
        (["asyncpg.DeadlockDetectedError"], "asyncpg.DeadlockDetectedError is transient"),
        (
            ["kafka.errors.NotLeaderForPartitionError"],
            "kafka.errors.NotLeaderForPartitionError is transient",
        ),
        (
            ["asyncpg.UniqueViolationError", "--sqlstate", "40001"],
            "asyncpg.UniqueViolationError is transient",
        ),
        (["x.Y"], "x.Y is unknown: tried again\nno rule matches it\n'x.Y' cannot be imported"),
    ],
)
def test_the_command_tells_which_rule_is_hit(asked: list[str], said: str) -> None:
    assert said_by("test", *asked).startswith(said)


def test_the_command_knows_the_rules_that_are_configured(tmp_path: Path) -> None:
    written = tmp_path / "errors.toml"
    written.write_text('[[rule]]\nname = "mine"\nclass = "code-bug"\nmessage = "never"\n')
    environment = {"WINDLASS_ERROR_RULES": str(written)}

    (found,) = json.loads(said_by("test", "x.Y", "--message", "never", "--json", env=environment))
    rules = json.loads(said_by("list", "--json", env=environment))

    assert (found["class"], found["rule"]["name"]) == ("code-bug", "mine")
    assert (rules[0]["name"], rules[0]["source"]) == ("mine", str(written))
    assert "built-in" in said_by("list")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--status", "700"), "--status 700: give one of HTTP, from 100 to 599"),
        (("--sqlstate", "abc"), "--sqlstate 'abc': give all five characters"),
    ],
)
def test_a_wrong_code_is_named(wrong: tuple[str, str], said: str) -> None:
    ran = CliRunner().invoke(main, ["errors", "test", "x.Y", *wrong])

    assert (ran.exit_code, said in ran.output) == (2, True)


def test_a_wrong_attribute_is_named() -> None:
    ran = CliRunner().invoke(main, ["errors", "test", "x.Y", "--attribute", "errno"])

    assert (ran.exit_code, "--attribute 'errno': write it as PATH=VALUE" in ran.output) == (2, True)


async def test_rules_are_read_before_there_is_an_error_to_judge(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task
    async def fail() -> None:
        raise KeyError("a")

    def refuse(_: str) -> Never:
        raise OSError(errno.EMFILE, "Too many open files")

    built_in_rules.cache_clear()
    async with app.worker():
        monkeypatch.setattr(classifier, "files", refuse)
        handle = await fail.enqueue()
        with pytest.raises(TaskFailed):
            await handle.result(timeout=30)

    assert (await handle.get()).error_class == "code-bug"
