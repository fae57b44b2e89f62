"""What the command line does with dead letters, and what it says of them."""

import asyncio
import json
import re
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from click.testing import CliRunner, Result

from contract.pgbouncer import store_options
from windlass.cli import main
from windlass.model.task import ClaimRequest, NewTask, Outcome, Settlement
from windlass.store.postgres.store import PostgresStore

Run = Callable[..., Result]
SILENT = {
    "type": "TimeoutError",
    "message": "gateway is silent\nfor long",
    "class": "transient",
    "traceback": 'Traceback (most recent call last):\n  File "mail.py", line 7\n\x1b[31mTimeoutError',
}
WRONG = {"type": "ValueError", "message": "no such image", "class": "permanent-input"}
# Beyond what anybody types: a command has to take it as it is.
MANY = """
INSERT INTO windlass.dead (
    id, type, queue, status, priority, max_attempts, attempts, generation, drop_on, created_at,
    scheduled_for, completed_at, payload, last_error, errors
)
SELECT
    gen_random_uuid(), 'mail', CASE n % 3 WHEN 0 THEN 'other' ELSE 'mails' END, 'dead', 10, 4, 4, 4,
    '2099-01-01', now(), now(), now() - n * interval '1 second', jsonb_build_object('n', n), 'silent',
    jsonb_build_array(jsonb_build_object('type', 'TimeoutError', 'message', 'gateway is silent',
        'class', 'transient', 'ended_at', now()))
FROM generate_series(1, 15000) AS n
"""


async def make_letters(url: str) -> list[str]:
    """Two letters in the queue `mails`, one in `images`, last ended last."""
    store = PostgresStore(store_options(url))
    await store.open()
    try:
        ids = []
        for kind, queue, error, outcome in (
            ("mail", "mails", SILENT, Outcome.DEAD),
            ("mail", "mails", SILENT, Outcome.DEAD),
            ("resize", "images", WRONG, Outcome.FAILED),
        ):
            task = NewTask(uuid.uuid4(), kind, '{"to": "a", "n": 1}', queue, tags=("night",))
            await store.enqueue([task])
            lease = timedelta(minutes=5)
            asked = ClaimRequest(uuid.uuid4(), (kind,), 1, lease, timedelta(seconds=6))
            claim = (await store.claim(asked)).claim
            assert claim is not None
            generation = claim.tasks[0].generation
            said = json.dumps(error)
            await store.settle(
                [Settlement(claim.token, task.id, generation, outcome, 0.5, error=said)]
            )
            ids.append(str(task.id))
        return ids
    finally:
        await store.close()


async def ask(url: str, statement: str, *arguments: Any) -> Any:
    connection = await asyncpg.connect(url)
    try:
        return [tuple(row) for row in await connection.fetch(statement, *arguments)]
    finally:
        await connection.close()


@pytest.fixture
def letters(database_url: str) -> list[str]:
    return asyncio.run(make_letters(database_url))


@pytest.fixture
def windlass(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("WINDLASS_DATABASE_URL", database_url)

    def run(*arguments: str, code: int = 0) -> Result:
        done = CliRunner().invoke(main, ("dead", *arguments))
        assert done.exit_code == code, done.output
        return done

    return run


def named(done: Result) -> list[str]:
    """The letters that lines of standard output begin with."""
    return [line.split()[0] for line in done.stdout.splitlines()]


def made(done: Result) -> list[str]:
    return re.findall(r" replayed as (\S+)$", done.stdout, re.MULTILINE)


def test_letters_are_listed_last_ended_first(windlass: Run, letters: list[str]) -> None:
    done = windlass("list")

    titles, *lines = done.stdout.splitlines()
    assert re.split(" +", titles)[:5] == ["id", "type", "queue", "status", "class"]
    assert [line.split()[0] for line in lines] == letters[::-1]
    assert re.search(r"mails +dead +transient .* 0 +TimeoutError: gateway is silent$", lines[2])
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--queue", "mails"), {0, 1}),
        (("--type", "resize"), {2}),
        (("--class", "transient"), {0, 1}),
        (("--error", "^ValueError: no such"), {2}),
        (("--status", "dead"), {0, 1}),
        (("--status", "dead", "--status", "failed"), {0, 1, 2}),
        (("--since", "2000-01-01T00:00:00Z"), {0, 1, 2}),
        (("--until", "2000-01-01T00:00:00Z"), set()),
    ],
)
def test_letters_are_searched(
    windlass: Run, letters: list[str], arguments: tuple[str, ...], expected: set[int]
) -> None:
    found = json.loads(windlass("list", "--json", *arguments).stdout)

    assert {letters.index(one["id"]) for one in found} == expected


def test_a_listing_goes_on(windlass: Run, letters: list[str]) -> None:
    first = windlass("list", "--limit", "2", "--json")
    position = first.stderr.rsplit(maxsplit=1)[1]

    rest = windlass("list", "--after", position, "--json")

    assert [one["id"] for one in json.loads(first.stdout)] == letters[:0:-1]
    assert [one["id"] for one in json.loads(rest.stdout)] == letters[:1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("list", "--error", "((x"), "error '((x' is not a regular expression"),
        (("list", "--class", "odd"), "'odd' is not one of"),
        (("list", "--after", "x"), "position 'x'"),
        (("replay",), "either by id or by filter"),
        (("replay", str(uuid.uuid4()), "--queue", "x"), "either by id or by filter"),
        (("discard",), "either by id or by filter"),
        (
            ("replay", "--queue", "x", "--rate", "fast"),
            "rate 'fast' is not a rate; write it as \"10/s\"",
        ),
        (("replay", "--queue", "x", "--canary", "0"), "canary 0"),
        (("replay", "--queue", "x", "--max-failures", "50"), "max_failures 50.0 is of the canary"),
        (("replay", "--queue", "x", "--max-failures", "101"), "max_failures 101"),
        (("replay", "--queue", "x", "--set", "n"), "--set 'n': write it as NAME=JSON"),
        (("replay", "--queue", "x", "--set", "n=x"), "--set n is not JSON"),
        (("replay", "--queue", "x", "--payload", "{}"), "for one letter"),
        (("export", "--output", "/nowhere/at/all"), "--output '/nowhere/at/all': No such file"),
    ],
)
def test_wrong_usage_is_named(windlass: Run, arguments: tuple[str, ...], said: str) -> None:
    done = windlass(*arguments, code=2)

    assert said in done.output
    assert done.stdout == ""


def test_a_letter_is_shown_to_whoever_was_woken_by_it(
    windlass: Run, letters: list[str], database_url: str
) -> None:
    (new_id,) = made(windlass("replay", letters[0]))
    ((worker,),) = asyncio.run(
        ask(database_url, "SELECT worker_id::text FROM windlass.dead WHERE id = $1", letters[0])
    )

    shown = windlass("show", letters[0]).stdout

    assert shown.startswith(
        "mail in queue mails is dead: transient\n"
        "    TimeoutError: gateway is silent\n"
        "    for long\n"
        f"id:              {letters[0]}\n"
    )
    for part in (
        f"worker:          {worker}\n",
        "tags:            night\n",
        "attempts:        1 of 4\n",
        f"replayed as:     {new_id}\n",
        '    Traceback (most recent call last):\n      File "mail.py", line 7\n',
        "\\x1b[31mTimeoutError",  # no terminal obeys it
        'payload:\n    {\n      "n": 1,\n      "to": "a"\n    }\n',
    ):
        assert part in shown
    assert re.search(
        rf"^attempt 1: \d{{4}}-\d\d-\d\d .*, ran for -?\d+\.\d{{3}} s, worker {worker}$",
        shown,
        re.MULTILINE,
    )


def test_a_letter_is_shown_as_json(windlass: Run, letters: list[str]) -> None:
    (letter,) = json.loads(windlass("show", letters[2], "--json").stdout)

    assert (letter["id"], letter["error_class"]) == (letters[2], "permanent-input")
    assert letter["errors"][0]["message"] == "no such image"


def test_what_is_no_letter_is_not_shown(windlass: Run, letters: list[str]) -> None:
    (new_id,) = made(windlass("replay", letters[0]))

    assert "is pending" in windlass("show", new_id, code=1).stderr
    assert "not known" in windlass("show", str(uuid.uuid4()), code=1).stderr


def test_a_replay_names_its_ancestor(
    windlass: Run, letters: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = windlass("replay", letters[0])
    (new_id,) = made(done)

    assert done.stdout == f"{letters[0]} replayed as {new_id}\n"
    assert done.stderr == "1 replayed\n"
    shown = CliRunner().invoke(main, ("tasks", "show", new_id, "--json"))
    assert json.loads(shown.stdout)[0]["replay_of"] == letters[0]


def test_one_that_was_replayed_is_refused_and_the_others_are_not(
    windlass: Run, letters: list[str]
) -> None:
    (first,) = made(windlass("replay", letters[0]))

    done = windlass("replay", *letters, code=1)
    again = windlass("replay", letters[0], "--again")

    assert named(done) == letters[1:]
    assert f"task {letters[0]} was replayed as {first}" in done.stderr
    assert len(made(again)) == 1


def test_payloads_are_edited(windlass: Run, letters: list[str], database_url: str) -> None:
    (whole,) = made(windlass("replay", letters[0], "--payload", '{"to": "b"}'))
    windlass("replay", "--queue", "mails", "--set", "n=[2]", "--set", 'to="c"')

    found = asyncio.run(
        ask(database_url, "SELECT id::text, payload FROM windlass.task ORDER BY created_at")
    )
    assert found[0] == (whole, '{"to": "b"}')
    assert [json.loads(payload) for _, payload in found[1:]] == [{"to": "c", "n": [2]}]


def test_a_canary_that_is_not_run_stops_the_others(windlass: Run, letters: list[str]) -> None:
    done = windlass(
        *("replay", "--queue", "mails", "--canary", "1", "--canary-timeout", "0.01"), code=1
    )

    assert named(done) == letters[:1]
    assert done.stderr.endswith(
        "stopped: 1 of the first 1 replays have not ended within 0.01 s; 1 were not replayed\n"
    )


def test_letters_are_discarded(windlass: Run, letters: list[str]) -> None:
    foreseen = windlass("discard", "--queue", "mails", "--dry-run")
    done = windlass("discard", "--queue", "mails")

    assert named(foreseen) == named(done) == letters[:2]
    assert foreseen.stdout.replace("would be discarded", "discarded") == done.stdout
    assert [one["id"] for one in json.loads(windlass("list", "--json").stdout)] == letters[2:]
    assert "not known" in windlass("discard", letters[0], code=1).stderr


def test_letters_are_exported(windlass: Run, letters: list[str], tmp_path: Path) -> None:
    lines = windlass("export", "--queue", "mails").stdout.splitlines()
    windlass("export", "--queue", "mails", "--output", str(tmp_path / "x.jsonl"))

    assert [json.loads(line)["id"] for line in lines] == letters[:2]
    assert (tmp_path / "x.jsonl").read_text().splitlines() == lines


def test_ten_thousand_are_replayed_as_the_dry_run_said(
    windlass: Run, database_url: str, sql_url: str
) -> None:
    windlass("list")  # a database of before would be migrated
    asyncio.run(ask(sql_url, MANY))
    wanted = ("--queue", "mails", "--class", "transient", "--error", "gateway .*silent")

    foreseen = windlass("replay", *wanted, "--rate", "1000/s", "--dry-run")
    done = windlass("replay", *wanted, "--rate", "1000/s")
    rest = windlass("replay", *wanted)

    assert len(named(foreseen)) == 10_000
    assert named(foreseen) == named(done)
    assert named(rest) == []
    alike = asyncio.run(
        ask(
            sql_url,
            "SELECT d.id::text, t.id::text, d.payload = t.payload "
            "FROM windlass.replay r JOIN windlass.dead d ON d.id = r.ancestor "
            "JOIN windlass.task t ON t.id = r.task_id "
            "WHERE t.queue = 'mails' ORDER BY d.completed_at",
        )
    )
    assert alike == [(*pair, True) for pair in zip(named(done), made(done), strict=True)]
    ((first, last, number),) = asyncio.run(
        ask(
            sql_url,
            "SELECT min(s.due - t.created_at), max(s.due - t.created_at), count(*) "
            "FROM windlass.scheduled s JOIN windlass.task t ON t.id = s.task_id",
        )
    )
    assert (first, last) == (timedelta(milliseconds=1), timedelta(milliseconds=9999))
    assert number == 9999
