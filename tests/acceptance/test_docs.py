"""What the pages show is run: Python snippets, commands, SQL, the table of settings, the links."""

import ast
import asyncio
import configparser
import dataclasses
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg
import pytest
from click.testing import CliRunner

from windlass import App, ConfigurationError, Context, telemetry
from windlass.cli import main as cli
from windlass.cli.main import NOT_BUILT as COMMANDS_NOT_BUILT
from windlass.model.task import ClaimRequest, NewTask, Outcome, Settlement
from windlass.runtime.metrics import Metrics
from windlass.settings import NOT_SETTINGS, Settings
from windlass.store.postgres.store import PostgresOptions, PostgresStore

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WINDLASS = [sys.executable, "-c", "from windlass.cli import main; main(prog_name='windlass')"]
TASK_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


class Block(NamedTuple):
    """A part of a page to be run."""

    line: int  # before the first line of the text
    text: str


def blocks(page: Path, language: str) -> Iterator[Block]:
    """Yield fenced blocks; for Python also what `<!-- run: ... -->` hides from the reader."""
    closing, start, found = "", 0, list[str]()
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if closing:
            if line.strip() == closing:
                yield Block(start, textwrap.dedent("\n".join(found)) + "\n")
                closing = ""
            else:
                found.append(line)
        elif line.strip() == f"```{language}":
            closing, start, found = "```", number, []
        elif language == "python" and line.startswith("<!-- run:"):
            start, found = number, [line.removeprefix("<!-- run:").removesuffix("-->").strip()]
            if line.endswith("-->"):
                yield Block(start - 1, found[0] + "\n")
            else:
                closing = "-->"
    assert not closing, f"{page.name}, line {start}: is not closed"


def every_page_with(language: str) -> pytest.MarkDecorator:
    pages = [page for page in PAGES if any(blocks(page, language))]
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.stem)


def commands(page: Path) -> list[list[str]]:
    """Return the arguments of every shown `windlass` command."""
    shown = [line for block in blocks(page, "console") for line in block.text.splitlines()]
    typed = [shlex.split(line.removeprefix("$ ")) for line in shown if line.startswith("$ ")]
    return [words[1:] for words in typed if words[0] == "windlass"]


def run_python(page: Path) -> None:
    """Run the Python blocks of a page in order, in one namespace. In a process of its own."""
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    with asyncio.Runner() as runner:
        for block in blocks(page, "python"):
            text = "\n" * block.line + block.text  # so that a traceback shows the page's lines
            code = compile(text, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
            if code.co_flags & inspect.CO_COROUTINE:
                runner.run(FunctionType(code, module.__dict__)())
            else:
                exec(code, module.__dict__)
        for value in list(module.__dict__.values()):
            if isinstance(value, App):
                runner.run(value.close())


def environment(database_url: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WINDLASS_")}
    return kept | {"WINDLASS_DATABASE_URL": database_url}


@every_page_with("python")
def test_every_python_snippet_runs(page: Path, database_url: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__, str(page)],
        cwd=tmp_path,
        env=environment(database_url),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr


@every_page_with("console")
def test_every_command_succeeds(
    page: Path, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = commands(page)
    shutil.copy(ROOT / "examples" / "shop.py", tmp_path)
    first_task = next(blocks(ROOT / "README.md", "python"))
    (tmp_path / "first.py").write_text(first_task.text)
    letters = [words for words in shown if words[0] == "dead"]
    asyncio.run(add_letters(database_url, TASK_ID.findall(str(letters))))
    others = [words for words in shown if words[0] != "dead"]
    asyncio.run(add_tasks(database_url, TASK_ID.findall(str(others))))

    for words in shown:
        if words[0] in ("worker", "up"):
            result = run_until_registered(words, database_url, tmp_path)
        else:
            ended, said = run_here(words, database_url, tmp_path, monkeypatch)
            assert ended == 0, f"windlass {shlex.join(words)}\n{said}"
            continue
        assert result.returncode == 0, f"windlass {shlex.join(words)}\n{result.stderr}"


def run_here(
    words: list[str], database_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str]:
    """Run a command in this process: to start one takes longer than most of them."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    known = set(sys.modules)
    ran = CliRunner().invoke(cli, words, env={"WINDLASS_DATABASE_URL": database_url})
    for name in set(sys.modules) - known:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]  # another page has one of the same name
    return ran.exit_code, ran.output


async def add_tasks(database_url: str, task_ids: list[str]) -> None:
    """Enqueue the tasks whose ids a page mentions."""
    store = PostgresStore(PostgresOptions(url=database_url))
    await store.open()
    await store.enqueue(
        [
            NewTask(UUID(task_id), "make_thumbnails", '{"picture": 1}', delay=86400)
            for task_id in dict.fromkeys(task_ids)
        ]
    )
    await store.close()


async def add_letters(database_url: str, task_ids: list[str]) -> None:
    """Let the tasks fail for good whose ids commands on dead letters mention."""
    store = PostgresStore(PostgresOptions(url=database_url))
    await store.open()
    wanted = list(dict.fromkeys(task_ids))
    await store.enqueue(
        [NewTask(UUID(task_id), "make_thumbnails", '{"picture": 1}') for task_id in wanted]
    )
    minute = timedelta(minutes=1)
    asked = ClaimRequest(UUID(int=1), ("make_thumbnails",), 100, minute, minute)
    if (claim := (await store.claim(asked)).claim) is not None:
        error = '{"type": "ValueError", "message": "no such picture"}'
        await store.settle(
            [
                Settlement(claim.token, task.id, task.generation, Outcome.DEAD, error=error)
                for task in claim.tasks
            ]
        )
    await store.close()


def run_until_registered(
    words: list[str], database_url: str, folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run a worker, and ask it to stop once it is in the list of workers."""
    worker = subprocess.Popen(
        [*WINDLASS, *words],
        cwd=folder,
        env=environment(database_url),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        asyncio.run(registered(database_url, worker))
        worker.send_signal(signal.SIGTERM)
        _, errors = worker.communicate(timeout=60)
    finally:
        worker.kill()
    return subprocess.CompletedProcess(words, worker.returncode, "", errors)


async def registered(database_url: str, worker: subprocess.Popen[str]) -> None:
    connection = await asyncpg.connect(database_url)
    try:
        deadline = time.monotonic() + 60
        while worker.poll() is None and time.monotonic() < deadline:
            # Idle: it has looked for work, so it is past its start.
            if await connection.fetchval("SELECT EXISTS (SELECT FROM windlass.workers WHERE idle)"):
                return
            await asyncio.sleep(0.02)
    finally:
        await connection.close()


@every_page_with("sql")
async def test_every_sql_statement_runs(page: Path, database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    name = await connection.fetchval("SELECT current_database()")
    transaction = connection.transaction()  # roles belong to the whole server: none may stay

    await transaction.start()
    try:
        for block in blocks(page, "sql"):
            await connection.execute(block.text.replace("DATABASE shop", f"DATABASE {name}"))
    finally:
        await transaction.rollback()
        await connection.close()


def leads_somewhere(page: Path, link: str) -> bool:
    name, _, title = link.partition("#")
    target = page.parent / name if name else page
    if not title:
        return target.exists()
    titles = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
    return title in {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in titles}


@every_page
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", page.read_text())

    missing = [link for link in links if "://" not in link and not leads_somewhere(page, link)]

    assert missing == []


def test_the_table_of_settings_is_complete() -> None:
    text = (ROOT / "docs" / "workers.md").read_text()
    table = text.split("| setting |")[1].split("\n\n")[0]

    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", table, re.MULTILINE)

    shown = [(name, ast.literal_eval(default)) for name, default in rows]
    assert shown == [(field.name, field.default) for field in dataclasses.fields(Settings)]


@every_page
def test_every_variable_is_read(page: Path) -> None:
    named = set(re.findall(r"\bWINDLASS_[A-Z_]+[A-Z]\b", page.read_text()))

    assert named <= {f"WINDLASS_{field.name.upper()}" for field in dataclasses.fields(Settings)} | {
        *NOT_SETTINGS
    }


def test_a_unit_and_an_image_start_a_worker_that_is_there() -> None:
    page = ROOT / "docs" / "deploying.md"
    (unit,) = blocks(page, "ini")
    service = configparser.RawConfigParser()
    service.read_string(unit.text)
    (image,) = blocks(page, "dockerfile")
    started = [
        shlex.split(service["Service"]["ExecStart"])[1:],
        json.loads(image.text.partition("CMD ")[2])[1:],
    ]
    (pod,) = blocks(page, "yaml")

    assert service["Service"]["Type"] == "notify"
    for words in started:
        name, *arguments = words
        cli.commands[name].make_context(name, arguments)
    assert set(re.findall(r"path: (/\w+)", pod.text)) == {"/livez", "/readyz"}


def test_every_metric_is_explained() -> None:
    page = (ROOT / "docs" / "deploying.md").read_text()
    processes = SimpleNamespace(filled=(0, 0), restarts=Counter())
    shown = {
        family.name
        for family in Metrics(lambda: (0, 0), lambda: True, processes=processes).collect()
    }

    explained = set(re.findall(r"`(windlass_\w+?)(?:_total)?`", page))
    assert explained == shown


def context() -> Context:
    return Context(
        task_id="", type="", attempt=1, max_attempts=1, queue="", worker_id="", fence=1,
        deadline=None, state=None,
    )  # fmt: skip


NOT_BUILT: dict[str, Callable[[App], Any]] = {
    "ctx.progress()": lambda _: context().progress(1, 2),
    "app.workflow()": lambda app: app.workflow("etl"),
    "app.saga()": lambda app: app.saga("trip"),
}


@pytest.mark.parametrize("name", NOT_BUILT)
def test_what_the_readme_says_is_missing_is_refused(name: str) -> None:
    assert f"`{name}`" in (ROOT / "README.md").read_text()

    with pytest.raises(ConfigurationError, match="not built yet"):
        NOT_BUILT[name](App("memory:"))


def test_the_pages_name_the_commands_that_are_missing() -> None:
    missing = {*COMMANDS_NOT_BUILT, "tasks history"}

    for page in ("README.md", "docs/command-line.md"):
        text = (ROOT / page).read_text()
        assert [name for name in sorted(missing) if f"`{name}`" not in text] == []


def test_every_warning_is_explained() -> None:
    page = (ROOT / "docs" / "workers.md").read_text()

    assert [event for event in telemetry.LEVELS if f"`{event}`" not in page] == []


if __name__ == "__main__":
    run_python(Path(sys.argv[1]))
