"""What the command line does to many tasks at once, and what it says of it."""

import asyncio
import json
import os
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import pytest
from click.testing import CliRunner, Result

from contract.pgbouncer import store_options
from windlass.cli import main
from windlass.model.task import ClaimRequest, NewTask, Outcome, Settlement, TaskState
from windlass.store.postgres.store import PostgresStore

Run = Callable[..., Result]
ERROR = '{"type": "ValueError", "message": "no"}'


class Tasks(NamedTuple):
    """One task in each state, all tagged `old`."""

    scheduled: str
    pending: str
    claimed: str
    completed: str
    dead: str
    cancelled: str


async def make_tasks(url: str) -> Tasks:
    store = PostgresStore(store_options(url))
    await store.open()
    try:
        ended = (Outcome.COMPLETED, Outcome.DEAD, Outcome.CANCELLED)
        made = [NewTask(uuid.uuid4(), "work", "{}", tags=("old",)) for _ in (*ended, "claimed")]
        await store.enqueue(made)
        request = ClaimRequest(
            worker_id=uuid.uuid4(),
            types=("work",),
            limit=4,
            lease=timedelta(minutes=5),
            ageing=timedelta(seconds=6),
        )
        claim = (await store.claim(request)).claim
        assert claim is not None
        settled = zip(claim.tasks, ended, strict=False)
        await store.settle(
            [
                Settlement(claim.token, task.id, task.generation, outcome, 0.0, error=ERROR)
                for task, outcome in settled
            ]
        )
        waiting = [
            NewTask(uuid.uuid4(), "work", "{}", delay=delay, tags=("old",)) for delay in (3600, 0)
        ]
        await store.enqueue(waiting)
        ids = [str(task.id) for task in claim.tasks]
        return Tasks(str(waiting[0].id), str(waiting[1].id), ids[3], *ids[:3])
    finally:
        await store.close()


async def statuses(url: str, tasks: Tasks) -> list[TaskState]:
    store = PostgresStore(store_options(url))
    await store.open()
    try:
        return [(await store.get(uuid.UUID(task_id))).status for task_id in tasks]
    finally:
        await store.close()


@pytest.fixture
def tasks(database_url: str) -> Tasks:
    return asyncio.run(make_tasks(database_url))


@pytest.fixture
def windlass(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("WINDLASS_DATABASE_URL", database_url)

    def run(*arguments: str, code: int = 0) -> Result:
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == code, done.output
        return done

    return run


def lines(result: Result) -> dict[str, str]:
    """What was said of each task."""
    return dict(line.split(" ", 1) for line in result.stdout.splitlines())


def test_a_dry_cancellation_says_what_each_would_be_and_does_nothing(
    windlass: Run, tasks: Tasks, database_url: str
) -> None:
    before = asyncio.run(statuses(database_url, tasks))

    by_filter = lines(windlass("tasks", "cancel", "--tag", "old", "--dry-run"))
    by_id = lines(windlass("tasks", "cancel", *tasks, "--dry-run"))

    assert by_filter == {
        tasks.scheduled: "would be cancelled",
        tasks.pending: "would be cancelled",
        tasks.claimed: "would be asked to stop",
    }
    assert by_id == by_filter | dict.fromkeys(tasks[3:], "had already ended")
    assert asyncio.run(statuses(database_url, tasks)) == before


def test_a_cancellation_by_filter_passes_over_what_has_ended(
    windlass: Run, tasks: Tasks, database_url: str
) -> None:
    said = lines(windlass("tasks", "cancel", "--tag", "old"))

    assert said == {
        tasks.scheduled: "cancelled",
        tasks.pending: "cancelled",
        tasks.claimed: "asked to stop; its worker ends it",
    }
    assert lines(windlass("tasks", "cancel", tasks.dead)) == {tasks.dead: "had already ended"}
    assert asyncio.run(statuses(database_url, tasks)) == [
        TaskState.CANCELLED,
        TaskState.CANCELLED,
        TaskState.CLAIMED,
        TaskState.COMPLETED,
        TaskState.DEAD,
        TaskState.CANCELLED,
    ]


def test_a_cancelled_task_says_who_asked_and_why(windlass: Run, tasks: Tasks) -> None:
    windlass("tasks", "cancel", tasks.pending, "--reason", "tidy", "--by", "the night shift")

    shown = windlass("tasks", "show", tasks.pending).stdout.splitlines()
    assert "last_error:      tidy (asked for by the night shift)" in shown
    assert "cancelled_by:    the night shift" in shown


@pytest.mark.parametrize(
    ("user", "host", "by"),
    [
        ("ops", "a.example", "ops@a.example"),
        ("ops (night)\udcff", "", "ops__night__@unknown"),
        ("u" * 300, "h" * 300, "u" * 99 + "@" + "h" * 99),
        (None, "a", f"uid{os.getuid()}@a"),
    ],
)
def test_who_runs_the_command_asked_for_it_unless_somebody_else_is_named(
    windlass: Run,
    tasks: Tasks,
    monkeypatch: pytest.MonkeyPatch,
    user: str | None,
    host: str,
    by: str,
) -> None:
    def named() -> str:
        if user is None:
            raise KeyError(user)
        return user

    monkeypatch.setattr("getpass.getuser", named)
    monkeypatch.setattr("socket.gethostname", lambda: host)
    windlass("tasks", "cancel", tasks.pending)

    (task,) = json.loads(windlass("tasks", "show", tasks.pending, "--json").stdout)
    assert task["cancelled_by"] == by


def test_a_filter_that_nothing_fits_says_so(windlass: Run) -> None:
    done = windlass("tasks", "retry", "--tag", "unheard-of")

    assert done.stdout == ""
    assert done.stderr == "no task that is failed or dead or cancelled fits the filter\n"


def test_a_list_that_was_cut_off_says_so(windlass: Run, tasks: Tasks) -> None:
    cut = windlass("tasks", "list", "--limit", "2")
    whole = windlass("tasks", "list")

    assert len(cut.stdout.splitlines()) == 3
    assert "--limit" in cut.stderr
    assert whole.stdout.count("\n") == 1 + len(tasks)
    assert whole.stderr == ""


def test_a_retry_by_filter_reopens_what_ended_without_success(windlass: Run, tasks: Tasks) -> None:
    dry = lines(windlass("tasks", "retry", "--tag", "old", "--dry-run"))
    said = lines(windlass("tasks", "retry", "--tag", "old"))

    assert dry == {tasks.dead: "would be reopened", tasks.cancelled: "would be reopened"}
    assert said == {tasks.dead: "reopened", tasks.cancelled: "reopened"}


def test_a_change_by_filter_is_for_what_waits(windlass: Run, tasks: Tasks) -> None:
    change = ("tasks", "change", "--tag", "old", "--priority", "high")

    dry = lines(windlass(*change, "--dry-run"))
    said = lines(windlass(*change))

    assert dry == dict.fromkeys((tasks.scheduled, tasks.pending), "would be changed")
    assert said == dict.fromkeys((tasks.scheduled, tasks.pending), "changed")


def test_a_state_that_is_named_is_taken_at_its_word(windlass: Run, tasks: Tasks) -> None:
    done = windlass("tasks", "retry", "--tag", "old", "--status", "pending", "--dry-run", code=1)

    assert done.stdout == ""
    assert f"{tasks.pending} would be left alone: it is pending" in done.stderr


def test_a_dry_run_of_a_task_that_is_not_there_fails_as_the_real_one_would(windlass: Run) -> None:
    done = windlass("tasks", "retry", str(uuid.UUID(int=1)), "--dry-run", code=1)

    assert "is not known" in done.stderr


@pytest.mark.parametrize("verb", [("cancel",), ("change", "--priority", "high"), ("retry",)])
def test_one_that_is_refused_keeps_no_others_and_each_is_told_of_once(
    windlass: Run, tasks: Tasks, verb: tuple[str, ...]
) -> None:
    unknown = str(uuid.UUID(int=1))
    fitting = tasks.dead if verb == ("retry",) else tasks.pending

    done = windlass("tasks", *verb, unknown, fitting, fitting, code=1)

    assert list(lines(done)) == [fitting]
    assert done.stdout.count("\n") == 1
    assert done.stderr.startswith(f"{unknown} task {unknown} is not known")


def test_pausing_and_resuming_say_what_they_did(windlass: Run, tasks: Tasks) -> None:
    assert windlass("queues", "pause", "mail").stdout == (
        "queue 'mail' is paused; what runs goes on\n"
    )
    assert windlass("queues", "resume", "mail").stdout == "queue 'mail' is resumed\n"


def test_resuming_what_was_not_paused_says_so_and_is_no_failure(
    windlass: Run, tasks: Tasks
) -> None:
    windlass("queues", "pause", "mail")

    assert windlass("queues", "resume", "default").stdout == "queue 'default' was not paused\n"
    assert windlass("queues", "resume", "mial").stdout == (
        "queue 'mial' was not paused, and no task waits or runs in it; did you mean 'mail'?\n"
    )
    assert windlass("queues", "resume", "reports").stdout == (
        "queue 'reports' was not paused, and no task waits or runs in it\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("queues", "pause", ""),
        ("queues", "resume", "\udcff"),
        ("tasks", "list", "--queue", "\udcff"),
        ("tasks", "list", "--type", "x" * 201),
        ("tasks", "cancel", "--tag", "a\nb"),
    ],
)
def test_a_name_that_cannot_be_one_is_wrong_usage(windlass: Run, arguments: list[str]) -> None:
    assert windlass(*arguments, code=2).stderr.startswith("windlass: ")
