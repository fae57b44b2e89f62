"""What was recorded in the database and in files → the history of a run."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Any

import asyncpg

from windlass.model.errors import ConfigurationError
from windlass.store.postgres.connection import translated
from windlass.store.sqlfiles import SqlFiles
from windlass.testing.history_check.events import (
    Born,
    Call,
    Changed,
    Claimed,
    Ended,
    Event,
    Extended,
    Forgotten,
    History,
    Led,
    Pause,
    Placed,
    Pulsed,
    Registered,
    Returned,
    Run,
    Vanished,
)

PACKAGE = "windlass.testing.history_check"
INTENT = "intent:"  # the tag by which a task names the call that asked for it


BEGIN_ANEW = "DROP SCHEMA windlass_history CASCADE"


async def record(connection: asyncpg.Connection, *, schema: str = "windlass") -> None:
    """Record from now on what happens in a migrated database; once for each database.

    Raises `ConfigurationError` if there is nothing to record, or something where it would write.
    """
    sql = SqlFiles(PACKAGE, schema)
    try:
        with translated():
            async with connection.transaction():
                found = await connection.fetchrow(sql.statement("find_recording"))
                _check_migrated(found, schema)
                if found["is_taken"]:
                    raise ConfigurationError(_why_taken(found))
                await connection.execute(sql.statement("record"))
    except (asyncpg.DuplicateSchemaError, asyncpg.UniqueViolationError) as error:
        raise ConfigurationError(
            "somebody else began to record this database at the same moment; call record() once"
        ) from error


def _check_migrated(found: asyncpg.Record, schema: str) -> None:
    if not found["is_migrated"]:
        raise ConfigurationError(
            f"the schema '{schema}' of this database was never migrated, so nothing happens in it; "
            "open the app first or run: windlass migrate; an app with another schema is recorded "
            "and read with schema="
        )


def _why_taken(found: asyncpg.Record) -> str:
    if found["recorded"] is not None:
        return (
            f"the schema '{found['recorded']}' of this database is recorded already; read_history() "
            f"reads all of it, and to begin anew run: {BEGIN_ANEW}"
        )
    if found["is_ours"]:
        return f"an earlier recording was left in this database; run: {BEGIN_ANEW}"
    return (
        "this database has a schema 'windlass_history' of somebody else, and record() writes to one "
        "of that name; rename it, or record in a database of the test's own"
    )


def _check_recorded(found: asyncpg.Record, schema: str) -> None:
    if not found["is_ours"] or found["recorded"] != schema:
        other = f"but for its schema '{found['recorded']}'" if found["recorded"] else "at all"
        raise ConfigurationError(
            f"nothing that happened in the schema '{schema}' of this database was recorded, {other}; "
            "call record() before what is to be checked"
        )


async def read_history(
    connection: asyncpg.Connection,
    *,
    calls: Iterable[Path] = (),
    runs: Iterable[Path] = (),
    schema: str = "windlass",
) -> History:
    """Read what the database recorded, and the files of clients (`calls`) and workers (`runs`)."""
    sql = SqlFiles(PACKAGE, schema)
    with translated():
        rows, places = await _read(connection, sql)
    said = [line for path in calls for line in _lines(path)]
    return History(
        events=list(_events(rows)),
        calls=_calls(said),
        pauses=_pauses(said),
        runs=_runs(line for path in runs for line in _lines(path)),
        places={task: frozenset(where) for task, where in places.items()},
    )


async def _read(
    connection: asyncpg.Connection, sql: SqlFiles
) -> tuple[list["_Row"], dict[str, set[str]]]:
    places: dict[str, set[str]] = defaultdict(set)
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        found = await connection.fetchrow(sql.statement("find_recording"))
        _check_migrated(found, sql.schema)
        _check_recorded(found, sql.schema)
        rows = [
            _Row(row)
            async for row in connection.cursor(sql.statement("read_events"), prefetch=5000)
        ]
        for task, place in await connection.fetch(sql.statement("read_places")):
            places[task].add(place)
    return rows, places


class _Row:
    __slots__ = ("began", "change", "n", "new", "old", "place", "term", "time", "x")

    def __init__(self, record: asyncpg.Record) -> None:
        self.n: int = record["n"]
        self.time: float = record["at"]
        self.began: float = record["began"]
        self.x: str = record["x"]
        self.place: str = record["place"]
        self.change: str = record["change"]
        self.term: int | None = record["term"]
        self.old: dict[str, Any] = json.loads(record["old_row"] or "{}")
        self.new: dict[str, Any] = json.loads(record["new_row"] or "{}")

    @property
    def when(self) -> dict[str, Any]:
        return {"n": self.n, "at": self.time, "began": self.began}


@dataclass(slots=True)
class _Transaction:
    """What else a transaction did, by which its changes are told apart."""

    born: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    rested: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)
    noted: set[tuple[str, int]] = field(default_factory=set)
    stopped: set[tuple[str, int]] = field(default_factory=set)
    claims: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, row: _Row) -> None:
        match row.place, row.change:
            case "task", "insert":
                self.born.add(row.new["id"])
            case "task", "delete":
                self.gone.add(row.old["id"])
            case (("history" | "dead"), "insert"):
                self.rested.add(row.new["id"])
            case (("history" | "dead"), "delete"):
                self.removed.add(row.old["id"])
            case "attempt", "insert":
                self.noted.add((row.new["task_id"], row.new["generation"]))
            case "running", "delete":
                self.stopped.add((row.old["task_id"], row.old["generation"]))
            case "claim", "insert":
                self.claims[row.new["token"]] = row.new


def _events(rows: list[_Row]) -> Iterator[Event]:
    transactions: dict[str, _Transaction] = defaultdict(_Transaction)
    for row in rows:
        transactions[row.x].add(row)
    for row in rows:
        yield from _event(row, transactions[row.x])


def _event(row: _Row, beside: _Transaction) -> Iterator[Event]:
    old, new = row.old, row.new
    match row.place, row.change:
        case "task", _:
            yield from _task_event(row, beside)
        case ("history" | "dead") as place, "insert":
            yield Ended(
                **row.when,
                task=new["id"],
                place=place,
                state=new["status"],
                generation=new["generation"],
                attempts=new["attempts"],
                max_attempts=new["max_attempts"],
                token=new["token"],
                worker=new["worker_id"],
                was_live=new["id"] in beside.gone,
                was_running=(new["id"], new["generation"]) in beside.stopped,
                term=row.term,
            )
        case (("history" | "dead"), "delete") if old["id"] not in beside.born:
            yield Forgotten(**row.when, task=old["id"])
        case ("ready" | "scheduled") as place, change:
            moved = new or old
            yield Placed(
                **row.when,
                task=moved["task_id"],
                place=place,
                is_there=change == "insert",
                generation=moved["generation"],
            )
        case "claim_task", "insert":
            yield from _claimed(row, beside.claims[new["token"]])
        case "claim", "update":
            yield Extended(**row.when, token=new["token"], expires_at=_time(new["expires_at"]))
        case "leadership", "update":
            yield Led(
                **row.when,
                term=new["term"],
                holder=new["holder"],
                expires_at=_time(new["expires_at"]),
            )
        case "worker_pulse", _:
            yield Pulsed(**row.when, worker=new["worker_id"])
        case "worker", change:
            one = new or old
            there = change == "insert"
            yield Registered(**row.when, worker=one["id"], pid=one["pid"], is_there=there)


def _task_event(row: _Row, beside: _Transaction) -> Iterator[Event]:
    old, new = row.old, row.new
    if row.change == "delete":
        if old["id"] not in beside.rested:
            yield Vanished(**row.when, task=old["id"])
        return
    place: dict[str, Any] = {
        **row.when,
        "task": new["id"],
        "generation": new["generation"],
        "attempts": new["attempts"],
        "due": _time(new["scheduled_for"]),
    }
    if row.change == "insert":
        tags = [tag for tag in new["tags"] or () if tag.startswith(INTENT)]
        yield Born(
            **place,
            type=new["type"],
            queue=new["queue"],
            max_attempts=new["max_attempts"],
            key=new["idempotency_key"],
            intent=tags[0] if tags else None,
            is_reopened=new["id"] in beside.removed,
        )
    elif new["generation"] == old["generation"]:
        yield Changed(**place, queue=new["queue"])
    else:
        yield Returned(
            **place,
            token=new["returned_by"],
            is_attempt_noted=(new["id"], old["generation"]) in beside.noted,
            was_running=(new["id"], old["generation"]) in beside.stopped,
            term=row.term,
        )


def _claimed(row: _Row, claim: dict[str, Any]) -> Iterator[Event]:
    granted, expires = _time(claim["claimed_at"]), _time(claim["expires_at"])
    for task, generation in zip(row.new["task_ids"], row.new["generations"], strict=True):
        yield Claimed(
            **row.when,
            task=task,
            token=claim["token"],
            generation=generation,
            worker=claim["worker_id"],
            fence=claim["fence"],
            granted_at=granted,
            expires_at=expires,
        )


def _time(text: str) -> float:
    if text.endswith("infinity"):
        return -inf if text.startswith("-") else inf
    return datetime.fromisoformat(text).timestamp()


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _calls(lines: Iterable[dict[str, Any]]) -> list[Call]:
    """An intent that was asked for and never answered stays unknown."""
    asked: dict[str, dict[str, Any]] = {}
    for line in lines:
        if line["said"] == "invoke":
            asked[line["intent"]] = {
                "intent": line["intent"],
                "type": line["type"],
                "key": line["key"],
                "began": line["at"],
            }
        elif line["said"] in {"ok", "fail", "unknown"}:
            answer = {"outcome": line["said"], "task": line.get("task"), "ended": line["at"]}
            asked[line["intent"]].update(answer)
    return [Call(**call) for call in asked.values()]


def _pauses(lines: Iterable[dict[str, Any]]) -> list[Pause]:
    pauses: list[Pause] = []
    open_since: dict[str, float] = {}
    for line in lines:
        if line["said"] == "paused":
            open_since.setdefault(line["queue"], line["at"])
        elif line["said"] == "resume" and line["queue"] in open_since:
            since = open_since.pop(line["queue"])
            pauses.append(Pause(queue=line["queue"], since=since, until=line["at"]))
    return pauses + [Pause(queue=queue, since=since) for queue, since in open_since.items()]


def _runs(lines: Iterable[dict[str, Any]]) -> list[Run]:
    runs: list[dict[str, Any]] = []
    latest: dict[tuple[str, int], dict[str, Any]] = {}
    for line in lines:
        said, at = line.pop("said"), line.pop("at")
        if said == "started":
            latest[line["task"], line["fence"]] = run = {**line, "began": at}
            runs.append(run)
        else:
            latest[line["task"], line["fence"]].update(ended=at, outcome=line["outcome"])
    return [Run(**run) for run in runs]
