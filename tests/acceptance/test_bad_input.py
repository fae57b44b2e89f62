"""Bad input: one table, the same answer wherever it comes in, and nothing is written."""

import asyncio
import importlib
import json
import math
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock
from uuid import UUID

import asyncpg
import psycopg
import pytest
from click.testing import CliRunner, Result

from windlass import App, ConfigurationError, PayloadError, WindlassError
from windlass.cli import main
from windlass.settings import Settings

APP = """
from typing import Any
from windlass import App

app = App()

@app.task
async def known(x: Any = None) -> None: ...
"""
PRIORITY = "use an integer from 0 to 100 or one of low, normal, high, critical"
ATTEMPTS = "use an integer from 1 to 30000"
SECONDS = "use seconds or a timedelta"
FINITE = "use a finite number of seconds, not below 0"
CONTROL = "holds a control character; remove it"
NAME = "characters; use 1 to 200"
LIST = "give a list of strings"
KEY = "option 'on_dead' says what becomes of an ordering key; give ordering_key too"
ON_DEAD = 'use "hold" or "pass"'
ABOVE_0 = "use a finite number of seconds, above 0"
EXCLUDE = "exclude each other; give one"
AWARE = "use a time with a time zone, such as 2030-01-31T12:00:00Z"
DEEP = (
    "it is nested deeper than 200 levels; flatten it, or store the data elsewhere and pass a "
    "reference"
)
ENDLESS = "it is nested deeper than 200 levels, for a part of it contains itself; leave that out"
LONG_NUMBER = "a number has more digits than can be read back; pass it as a string"
NOT_AS_SENT = "would not arrive as it was sent"


@dataclass
class Option:
    """An option that is refused: what is said of it, in Python and where it differs in SQL."""

    given: dict[str, Any]
    said: str
    in_sql: str | None = None  # None: the same
    typed: tuple[str, ...] = ()  # at the command line, where it says the same


OPTIONS = [
    Option({"queue": ""}, f"queue '' has 0 {NAME}", typed=("--queue", "")),
    Option(
        {"queue": "x" * 201}, f"queue '{'x' * 40}' has 201 {NAME}", typed=("--queue", "x" * 201)
    ),
    Option(
        {"queue": "it's " * 60},
        f'queue "{"it" + chr(39) + "s "}' + "it's " * 7 + f'" has 300 {NAME}',
    ),
    Option({"queue": "a\nb"}, rf"queue 'a\nb' {CONTROL}", typed=("--queue", "a\nb")),
    Option({"queue": "\x1b[2J"}, rf"queue '\x1b[2J' {CONTROL}", typed=("--queue", "\x1b[2J")),
    Option({"queue": "\x9b2J"}, rf"queue '\x9b2J' {CONTROL}"),
    Option({"queue": "\u202e\t"}, rf"queue '\u202e\t' {CONTROL}"),
    Option({"queue": "a\\'\"\t"}, r"""queue 'a\\\'"\t' """ + CONTROL),
    Option({"queue": "\x00"}, rf"queue '\x00' {CONTROL}"),
    Option({"queue": "\ud800"}, rf"queue '\ud800' {CONTROL}", typed=("--queue", "\ud800")),
    Option({"queue": 5}, "queue 5 must be a string"),
    Option({"queue": True}, "queue True must be a string", "queue true must be a string"),
    Option(
        {"idempotency_key": ""}, f"idempotency_key '' has 0 {NAME}", typed=("--idempotency-key", "")
    ),
    Option({"idempotency_key": "\x7f"}, rf"idempotency_key '\x7f' {CONTROL}"),
    Option({"tags": "a"}, f"tags 'a': {LIST}"),
    Option({"tags": 5}, f"tags 5: {LIST}"),
    Option({"tags": [""]}, f"tag '' has 0 {NAME}", typed=("--tag", "")),
    Option({"tags": ["a", "b\r"]}, rf"tag 'b\r' {CONTROL}", typed=("--tag", "a", "--tag", "b\r")),
    Option({"tags": [5]}, "tag 5 must be a string"),
    Option({"tags": [None]}, "tag None must be a string", "tag null must be a string"),
    Option({"priority": 101}, f"priority 101: {PRIORITY}", typed=("--priority", "101")),
    Option({"priority": -1}, f"priority -1: {PRIORITY}"),
    Option({"priority": 1.5}, f"priority 1.5: {PRIORITY}"),
    Option({"priority": 10.0}, f"priority 10.0: {PRIORITY}"),
    Option({"priority": 2**31}, f"priority 2147483648: {PRIORITY}"),
    Option({"priority": 10**400}, f"priority 1{'0' * 99}…: {PRIORITY}"),
    Option({"priority": math.nan}, f"priority nan: {PRIORITY}"),
    Option(
        {"priority": "urgent"}, f"priority 'urgent': {PRIORITY}", typed=("--priority", "urgent")
    ),
    Option({"priority": "it's"}, f'priority "it\'s": {PRIORITY}', typed=("--priority", "it's")),
    Option({"priority": "\\"}, rf"priority '\\': {PRIORITY}", typed=("--priority", "\\")),
    Option({"priority": "x" * 10**6}, f"priority '{'x' * 99}…: {PRIORITY}"),
    Option({"delay": -1}, f"delay -1: {FINITE}"),
    Option({"delay": -0.5}, f"delay -0.5: {FINITE}", typed=("--delay", "-0.5")),
    Option(
        {"delay": math.nan}, f"delay nan: {FINITE}", f"delay 'NaN': {FINITE}", ("--delay", "nan")
    ),
    Option(
        {"delay": math.inf},
        f"delay inf: {FINITE}",
        f"delay 'Infinity': {FINITE}",
        ("--delay", "inf"),
    ),
    Option({"delay": 3162240000.5}, "delay 3162240000.5: use less than a hundred years"),
    Option({"delay": 10**400}, f"delay 1{'0' * 99}…: use less than a hundred years"),
    Option({"delay": "soon"}, f"delay 'soon': {SECONDS}"),
    Option({"delay": True}, f"delay True: {SECONDS}", f"delay true: {SECONDS}"),
    Option({"ordering_key": ""}, f"ordering_key '' has 0 {NAME}", typed=("--ordering-key", "")),
    Option({"ordering_key": "\x85"}, rf"ordering_key '\x85' {CONTROL}"),
    Option({"ordering_key": 5}, "ordering_key 5 must be a string"),
    Option({"on_dead": "hold"}, KEY, typed=("--on-dead", "hold")),
    Option({"on_dead": "pass"}, KEY, typed=("--on-dead", "pass")),
    Option(
        {"ordering_key": "a", "on_dead": "keep"},
        f"on_dead 'keep': {ON_DEAD}",
        typed=("--ordering-key", "a", "--on-dead", "keep"),
    ),
    Option({"on_dead": ""}, f"on_dead '': {ON_DEAD}", typed=("--on-dead", "")),
    Option({"on_dead": False}, f"on_dead False: {ON_DEAD}", f"on_dead false: {ON_DEAD}"),
    Option({"unique_for": 0}, f"unique_for 0: {ABOVE_0}"),
    Option({"throttle": -0.5}, f"throttle -0.5: {ABOVE_0}", typed=("--throttle", "-0.5")),
    Option(
        {"debounce": math.nan},
        f"debounce nan: {ABOVE_0}",
        f"debounce 'NaN': {ABOVE_0}",
        ("--debounce", "nan"),
    ),
    Option(
        {"unique_for": math.inf},
        f"unique_for inf: {ABOVE_0}",
        f"unique_for 'Infinity': {ABOVE_0}",
        ("--unique-for", "inf"),
    ),
    Option({"throttle": 31622400.5}, "throttle 31622400.5: use at most 366 days"),
    Option({"debounce": 10**400}, f"debounce 1{'0' * 99}…: use at most 366 days"),
    Option({"unique_for": "1h"}, f"unique_for '1h': {SECONDS}"),
    Option({"debounce": True}, f"debounce True: {SECONDS}", f"debounce true: {SECONDS}"),
    Option(
        {"unique_for": 1.5, "dedupe_key": ""},
        f"dedupe_key '' has 0 {NAME}",
        typed=("--unique-for", "1.5", "--dedupe-key", ""),
    ),
    Option({"throttle": 1.5, "dedupe_key": "a\tb"}, rf"dedupe_key 'a\tb' {CONTROL}"),
    Option({"debounce": 1.5, "dedupe_key": 5}, "dedupe_key 5 must be a string"),
    Option(
        {"dedupe_key": "a"},
        "option 'dedupe_key' says what a window is for; give unique_for, throttle or debounce too",
        typed=("--dedupe-key", "a"),
    ),
    Option({"unique_for": 1.5, "throttle": 1.5}, f"options 'unique_for' and 'throttle' {EXCLUDE}"),
    Option({"debounce": 1.5, "throttle": 1.5}, f"options 'throttle' and 'debounce' {EXCLUDE}"),
    *(
        Option(
            {kind: 1.5, "idempotency_key": "a"}, f"options '{kind}' and 'idempotency_key' {EXCLUDE}"
        )
        for kind in ("unique_for", "throttle", "debounce")
    ),
    Option(
        {"debounce": 1.5, "delay": 1.5},
        f"options 'debounce' and 'delay' {EXCLUDE}",
        typed=("--debounce", "1.5", "--delay", "1.5"),
    ),
    Option(
        {"debounce": 1.5, "at": datetime(2100, 1, 1, tzinfo=UTC)},
        f"options 'debounce' and 'at' {EXCLUDE}",
    ),
    Option(
        {"debounce": 1.5, "ordering_key": "a"}, f"options 'debounce' and 'ordering_key' {EXCLUDE}"
    ),
    Option({"max_attempts": 0}, f"max_attempts 0: {ATTEMPTS}", typed=("--max-attempts", "0")),
    Option({"max_attempts": -1}, f"max_attempts -1: {ATTEMPTS}", typed=("--max-attempts", "-1")),
    Option({"max_attempts": 30_001}, f"max_attempts 30001: {ATTEMPTS}"),
    Option({"max_attempts": 2**63}, f"max_attempts {2**63}: {ATTEMPTS}"),
    Option({"max_attempts": 1.0}, f"max_attempts 1.0: {ATTEMPTS}"),
    Option({"max_attempts": "3"}, f"max_attempts '3': {ATTEMPTS}"),
    Option({"at": "soon"}, "at 'soon': use a datetime with a time zone", f"at 'soon': {AWARE}"),
    Option(
        {"at": datetime(2100, 1, 1, tzinfo=UTC), "delay": 1},
        "options 'delay' and 'at' exclude each other; give one",
        typed=("--at", "2100-01-01T00:00:00Z", "--delay", "1"),
    ),
]


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@dataclass
class Payload:
    """An argument that is refused, what is said of it, and how it is written in JSON if at all.

    Texts that are no JSON for PostgreSQL, or none that it can hold, are refused by the server in its
    own words.
    """

    value: Any
    said: str
    text: str | None = None
    of_server: str | None = None  # its SQLSTATE


PAYLOADS = [
    Payload("a\x00b", "a string holds the NUL character, which PostgreSQL refuses", r'"a\u0000b"', "22P05"),
    Payload({"\x00": 1}, "a string holds the NUL character, which PostgreSQL refuses", r'{"\u0000": 1}', "22P05"),
    Payload(
        "\ud800", "a string holds half of a surrogate pair, which UTF-8 cannot carry", r'"\ud800"', "22P02"
    ),
    Payload(math.nan, f"(float) {NOT_AS_SENT}", "NaN", "22P02"),
    Payload([-math.inf], f"(list) {NOT_AS_SENT}", "[-Infinity]", "22P02"),
    Payload({1}, f"(set) {NOT_AS_SENT}"),
    Payload((1, 2), f"(tuple) {NOT_AS_SENT}"),
    Payload(b"bytes", f"(bytes) {NOT_AS_SENT}"),
    Payload({1: 2}, f"(dict) {NOT_AS_SENT}", "{1: 2}", "22P02"),
    Payload(object(), "a value of type object cannot be carried as JSON"),
    Payload((n for n in range(3)), "a value of type generator cannot be carried as JSON"),
    Payload(endless(), ENDLESS),
    Payload(Mock(), "a value of type Mock cannot be carried as JSON"),
    Payload(nested(201), DEEP, "[" * 201 + "]" * 201),
    Payload(nested(100_000), DEEP, "[" * 100_000 + "]" * 100_000, "54001"),
    Payload(10**5000, LONG_NUMBER, "1" + "0" * 5000),
    Payload(
        "x" * (1 << 20),
        "1048578 bytes are more than the limit of 1048576; store the data elsewhere and pass a reference",
        f'"{"x" * (1 << 20)}"',
    ),
    Payload(
        "é" * (30 << 20),
        f"{(60 << 20) + 2} bytes are more than the limit of 1048576; "
        "store the data elsewhere and pass a reference",
    ),
]  # fmt: skip


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database_url: str) -> Iterator[App]:
    (tmp_path / "bad_input_app.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("WINDLASS_DATABASE_URL", database_url)
    module: ModuleType = importlib.import_module("bad_input_app")
    app: App = module.app
    yield app
    app.close_sync()
    del sys.modules["bad_input_app"]


async def typed(*arguments: str) -> Result:
    """What the command line says to `windlass enqueue`."""
    command = ["enqueue", "bad_input_app:app", *arguments]
    return await asyncio.to_thread(CliRunner().invoke, main, command)


async def written(sql: asyncpg.Connection) -> dict[str, Any]:
    """How many rows each table has, and how far each sequence has counted."""
    names = await sql.fetch(
        "SELECT format('%I.%I', schemaname, tablename) FROM pg_tables WHERE schemaname = 'windlass'"
    )
    found = {name: await sql.fetchval(f"SELECT count(*) FROM {name}") for (name,) in names}
    counted = await sql.fetch(
        "SELECT sequencename, last_value FROM pg_sequences WHERE schemaname = 'windlass'"
    )
    return {**found, **dict(counted)}


async def refused(kind: type[WindlassError], call: Callable[[], Awaitable[Any]]) -> str:
    with pytest.raises(kind) as raised:
        await call()
    assert type(raised.value) is kind
    return str(raised.value)


async def refused_by_sql(call: Awaitable[Any]) -> tuple[str, str]:
    with pytest.raises(asyncpg.PostgresError) as raised:
        await call
    return raised.value.sqlstate, raised.value.message


def as_json(value: Any) -> str | None:
    """The text of JSON for PostgreSQL, if there is one."""
    try:
        text = json.dumps(value, allow_nan=False, default=datetime.isoformat)
    except ValueError:
        return None
    return None if "\\u0000" in text or "\\ud8" in text else text


def fits(name: str, value: Any) -> bool:
    """Whether a value is of the type of the parameter of windlass.enqueue."""
    match name:
        case "queue" | "idempotency_key" | "ordering_key" | "on_dead" | "dedupe_key":
            return isinstance(value, str) and as_json(value) is not None
        case "priority" | "max_attempts":
            return type(value) is int and abs(value) < 2**31
        case "delay" | "unique_for" | "throttle" | "debounce":
            return type(value) is float or (type(value) is int and value < 2**31)
        case "tags":
            return isinstance(value, list) and all(isinstance(tag, str | None) for tag in value)
        case _:
            return name == "at" and isinstance(value, datetime)


async def test_an_option_that_does_not_fit_is_refused_in_the_same_words_everywhere(
    app: App, sql_url: str
) -> None:
    task = app.tasks[0]
    sql = await asyncpg.connect(sql_url)
    own = await asyncpg.connect(sql_url)
    begun = own.transaction()
    await begun.start()
    before = await written(sql)

    async with app:
        for case in OPTIONS:
            given, kind = case.given, ConfigurationError
            for call in (
                task.options(**given).enqueue,
                lambda given=given: app.enqueue("known", {}, **given),
                lambda given=given: app.enqueue("unheard", {}, **given),
                task.options(**given, connection=own).enqueue,
                lambda given=given: asyncio.to_thread(app.enqueue_sync, "known", **given),
            ):
                assert await refused(kind, call) == case.said
            many = [task.call(), task.options(**given).call(), task.call()]
            assert await refused(kind, partial(app.enqueue_many, many)) == f"item 1: {case.said}"
            if case.typed:
                done = await typed("known", *case.typed)
                assert (done.exit_code, done.stderr) == (2, f"windlass: {case.said}\n")

            said = case.in_sql or case.said
            text = as_json({"type": "known", **given})
            if text is not None:
                add = "SELECT windlass.enqueue_many($1::jsonb)"
                assert await refused_by_sql(sql.fetch(add, f"[{text}]")) == ("WL006", said)
                among = f'[{{"type": "known"}}, {text}]'
                assert await refused_by_sql(sql.fetch(add, among)) == ("WL006", f"item 1: {said}")
            if all(fits(name, value) for name, value in given.items()):
                named = ", ".join(f"{name} => ${place}" for place, name in enumerate(given, 1))
                call_it = sql.fetch(f"SELECT windlass.enqueue('known', {named})", *given.values())
                assert await refused_by_sql(call_it) == ("WL006", said)

    assert await own.fetchval("SELECT 1") == 1  # the caller's transaction goes on
    await begun.commit()
    assert await written(sql) == before
    await sql.close()
    await own.close()


async def test_a_payload_that_does_not_fit_is_refused_in_the_same_words_everywhere(
    app: App, sql_url: str
) -> None:
    task = app.tasks[0]
    sql = await asyncpg.connect(sql_url)
    own = await asyncpg.connect(sql_url)
    begun = own.transaction()
    await begun.start()
    before = await written(sql)

    async with app:
        for case in PAYLOADS:
            value, kind = case.value, PayloadError
            between = " " if case.said.startswith("(") else ": "
            said = f"task '{{}}': argument 'x'{between}{case.said}"
            for name, call in (
                ("known", lambda value=value: task.enqueue(value)),
                ("known", lambda value=value: app.enqueue("known", {"x": value})),
                ("unheard", lambda value=value: app.enqueue("unheard", {"x": value})),
                ("known", lambda value=value: task.options(connection=own).enqueue(value)),
                ("known", lambda value=value: asyncio.to_thread(task.enqueue_sync, value)),
            ):
                assert (await refused(kind, call)).startswith(said.format(name))
            many = [task.call(), task.call(value)]
            told = await refused(kind, partial(app.enqueue_many, many))
            assert told.startswith("item 1: " + said.format("known"))

            if case.text is not None:
                text = f'{{"x": {case.text}}}'
                state, message = await refused_by_sql(
                    sql.fetch("SELECT windlass.enqueue('known', $1::text::jsonb)", text)
                )
                assert state == (case.of_server or "WL005")
                if case.of_server is None:
                    assert message == said.format("known")
                if len(text) < 100_000:  # an argument has no more on Linux
                    done = await typed("known", text)
                    told = (
                        "the payload is not JSON" if done.exit_code == 2 else said.format("known")
                    )
                    assert done.stderr.startswith(f"windlass: {told}")
                    assert done.exit_code in (1, 2)
                    assert (done.stderr.count("\n"), done.stdout) == (1, "")

    assert await own.fetchval("SELECT 1") == 1
    await begun.commit()
    assert await written(sql) == before
    await sql.close()
    await own.close()


@pytest.mark.parametrize(
    ("task", "state", "said"),
    [
        ({"type": ""}, "WL006", f"task name '' has 0 {NAME}"),
        ({"type": "a\x1b"}, "WL006", rf"task name 'a\x1b' {CONTROL}"),
        ({"id": "nonsense"}, "WL006", "id 'nonsense' is not the id of a task; ids are UUIDs"),
        ({"id": 5}, "WL006", "id 5 is not the id of a task; ids are UUIDs"),
        ({"retention": -1}, "WL006", "retention -1: use whole seconds, at most 68 years"),
        ({"retention": 1.5}, "WL006", "retention 1.5: use whole seconds, at most 68 years"),
        ({"retention": 2**31}, "WL006", "retention 2147483648: use whole seconds, at most 68 years"),
        ({"payload": "1" * 10}, "WL005", "task 'a': the payload is of type string; give an object"),
        ({"payload": {"x": math.inf}}, "WL005", f"task 'a': argument 'x': {LONG_NUMBER}"),
        ({"payload": {"\n": -math.inf}}, "WL005", rf"task 'a': argument '\n': {LONG_NUMBER}"),
        ({"payload": {"x": nested(200)}}, "WL005", f"task 'a': {DEEP}"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
async def test_what_only_sql_can_be_given_is_refused_by_our_functions(
    shared_sql_url: str, task: dict[str, Any], state: str, said: str
) -> None:
    sql = await asyncpg.connect(shared_sql_url)
    payload = json.dumps([{"type": "a", **task}]).replace("Infinity", "1" * 400 + ".5")

    told = await refused_by_sql(sql.fetch("SELECT windlass.enqueue_many($1::jsonb)", payload))
    await sql.close()

    assert told[0] == state
    assert told[1].startswith(said)


GIGABYTE = f"[{', '.join(['1e131071'] * 9000)}]"  # as a text, which must never be made
TOKEN, FENCED = str(UUID(int=1)), str(UUID(int=2))


async def test_what_is_small_and_would_be_huge_or_no_fence_is_refused_by_our_functions(
    shared_sql_url: str,
) -> None:
    sql = await asyncpg.connect(shared_sql_url)
    for option, state, said in (
        (f'"payload": {{"x": {GIGABYTE}}}', "WL005", f"task 'a': argument 'x': {LONG_NUMBER}"),
        (f'"tags": {GIGABYTE}', "WL006", "tag 1000"),
        (f'"tags": {{"x": {GIGABYTE}}}', "WL006", "tags (object of "),
        (f'"queue": {GIGABYTE}', "WL006", "queue (array of "),
        (f'"delay": {GIGABYTE}', "WL006", "delay (array of "),
        (f'"id": {GIGABYTE}', "WL006", "id (array of "),
        (f'"at": {GIGABYTE}', "WL006", "at (array of "),
        (f'"priority": {GIGABYTE}', "WL006", "priority (array of "),
        (r'"a\nb": 1', "WL006", r"option 'a\nb' is not known; options are: id, type"),
        (f'"{"x" * 1000}": 1', "WL006", f"option '{'x' * 99}… is not known; options are: id, type"),
    ):
        told = await refused_by_sql(
            sql.fetch("SELECT windlass.enqueue_many($1::jsonb)", f'[{{"type": "a", {option}}}]')
        )
        assert told[0] == state
        assert told[1].startswith(said)
    for fence, said in (
        ([], "fence []: use an object of token, task_id and generation, or leave it out"),
        ({"token": "x"}, 'fence {"token": "x"}: use an object of token, task_id and generation'),
        ({"token": "x", "task_id": FENCED, "generation": 1}, "token 'x' is not the id of a claim"),
        ({"token": TOKEN, "task_id": 5, "generation": 1}, "task_id 5 is not the id of a task"),
        ({"token": TOKEN, "task_id": FENCED, "generation": "1"}, "generation '1': use an integer from"),
        ({"token": TOKEN, "task_id": FENCED, "generation": 2**31}, "generation 2147483648: use an"),
        ({"token": TOKEN, "task_id": FENCED, "generation": None}, "generation null: use an integer"),
        ({"token": TOKEN, "task_id": FENCED, "generation": 1}, f"task {FENCED}: the lease is lost"),
    ):  # fmt: skip
        enqueue = """SELECT windlass.enqueue_many('[{"type": "a"}]', $1::jsonb)"""
        told = await refused_by_sql(sql.fetch(enqueue, json.dumps(fence)))
        assert told[0] == ("WL001" if "lease" in said else "WL006")
        assert told[1].startswith(said)
    await sql.close()


FITTING = [
    ("-0.0", 0.0),
    ("1e400", 10**400),
    ("1e-400", 0.0),
    ("1" + "0" * 4299, 10**4299),
    ("1.5" + "0" * 5000, 1.5),
    (json.dumps("\ufeff" + "1" * 5000), "\ufeff" + "1" * 5000),
    (json.dumps(nested(199)), nested(199)),
    (json.dumps("[" * 5000), "[" * 5000),
    ('{"a": 1, "a": 2}', {"a": 2}),  # as jsonb has it: the last one counts
    ("{}", {}),
    ('"' + "x" * ((1 << 20) - 8) + '"', "x" * ((1 << 20) - 8)),
]


async def test_what_is_at_the_limit_is_kept_and_can_be_read(app: App, sql_url: str) -> None:
    sql = await asyncpg.connect(sql_url)
    async with app:
        for text, value in FITTING:
            by_sql = await sql.fetchval(
                "SELECT windlass.enqueue('known', $1::text::jsonb)", f'{{"x": {text}}}'
            )
            assert (await app.handle(by_sql).get()).payload == {"x": value}
            handle = await app.enqueue("known", {"x": value})
            assert (await handle.get()).payload == {"x": value}
        await app.run_worker(until_idle=True)

        done = await sql.fetch("SELECT status, count(*) FROM windlass.tasks GROUP BY status")
        assert [tuple(row) for row in done] == [("completed", 2 * len(FITTING))]
    await sql.close()


NAMES = [
    "'; DROP TABLE windlass.task; --",
    '"quoted" and \\ back',
    "../../x",
    "%s %(name)s {0} $1 :name ?",
    "\u202egnp.exe",
    "\ufeffbom",
    " blank ",
    "é 名前 🧵",
    "null",
    "x" * 200,
    "é" * 200,
]


async def test_a_hostile_name_is_kept_and_shown_as_it_is_and_does_nothing(
    app: App, sql_url: str
) -> None:
    sql = await asyncpg.connect(sql_url)
    for name in NAMES:

        @app.task(name=name)
        async def work() -> str:
            return "done"

    async def listed(*arguments: str) -> Result:
        done = await asyncio.to_thread(CliRunner().invoke, main, ["tasks", "list", *arguments])
        assert done.exit_code == 0, done.stderr
        return done

    async with app:
        for name in NAMES:
            options: dict[str, Any] = {"queue": name, "idempotency_key": name, "tags": [name]}
            own = await asyncpg.connect(sql_url)
            handle = await app.enqueue(name, {}, **options)
            again = [
                (await app.enqueue(name, {}, **options, connection=own)).id,
                (
                    await typed(name, "--queue", name, "--idempotency-key", name, "--tag", name)
                ).stdout,
                await sql.fetchval(
                    "SELECT windlass.enqueue($1, queue => $1, idempotency_key => $1, tags => ARRAY[$1])",
                    name,
                ),
            ]
            await own.close()
            assert {str(one).strip() for one in again} == {handle.id}

            as_filter = ("--type", name, "--queue", name, "--tag", name)
            (record,) = json.loads((await listed(*as_filter, "--json")).stdout)
            assert record["type"] == record["queue"] == record["idempotency_key"] == name
            assert record["tags"] == [name]
        shown = (await listed()).stdout
        assert shown.count("\n") == 1 + len(NAMES)
        assert all(name.replace("\u202e", "\\u202e") in shown for name in NAMES)
        await app.run_worker(until_idle=True)

        rows = await sql.fetch("SELECT type, status FROM windlass.tasks")
        assert sorted(map(tuple, rows)) == sorted((name, "completed") for name in NAMES)
    await sql.close()


async def test_an_error_that_a_terminal_would_obey_is_spelled_out(app: App) -> None:
    @app.task(retry=1)
    async def scream() -> None:
        raise ValueError("\x1b[2Jgone\r\nsecond \u202eline")

    async with app:
        handle = await scream.enqueue()
        await app.run_worker(until_idle=True)
        done = await asyncio.to_thread(CliRunner().invoke, main, ["tasks", "show", handle.id])

    assert "\x1b" not in done.stdout
    assert "ValueError: \\x1b[2Jgone\\r\nsecond \\u202eline\n" in done.stdout


NUMBERS = [one for one in fields(Settings) if str(one.type) in ("<class 'int'>", "<class 'float'>")]


@pytest.mark.parametrize("field", NUMBERS, ids=lambda field: field.name)
def test_a_number_of_the_settings_has_bounds_that_hold(field: Any) -> None:
    for wrong in (math.nan, math.inf, -math.inf, -1, 10**400, True, "5", None):
        with pytest.raises(ConfigurationError, match=f"^{field.name}=") as refusal:
            App("memory:", **{field.name: wrong})
        assert len(str(refusal.value)) < 200
    lowest, highest = (float(word) for word in str(refusal.value).split(" from ")[1].split(" to "))
    kind = int if "int" in str(field.type) else float
    beside = {"heartbeat": 0.1} if field.name == "lease" else {}
    if field.name != "heartbeat":  # whose bound is the lease
        App("memory:", **{**beside, field.name: kind(highest)})
    App("memory:", **{**beside, field.name: kind(lowest)})
    for wrong in (kind(highest) + 1, kind(lowest) - 1):
        with pytest.raises(ConfigurationError, match=f"^{field.name}="):
            App("memory:", **{**beside, field.name: wrong})


@pytest.mark.parametrize("limit", ["0", "-1", "10001", "1.5", "99999999999999999999"])
def test_the_length_of_a_list_has_bounds(limit: str) -> None:
    done = CliRunner().invoke(main, ["tasks", "list", "--limit", limit])

    assert done.exit_code == 2
    assert "--limit" in done.stderr


def test_a_synchronous_connection_outlives_a_refusal(app: App, sql_url: str) -> None:
    with psycopg.connect(sql_url) as own:
        with pytest.raises(ConfigurationError, match="queue '' has 0"):
            app.enqueue_sync("known", queue="", connection=own)
        with pytest.raises(PayloadError, match="NUL"):
            app.enqueue_sync("unheard", {"x": "\x00"}, connection=own)
        assert app.enqueue_sync("known", connection=own).created
