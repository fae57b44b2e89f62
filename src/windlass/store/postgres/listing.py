"""Lists tasks: each place from where the last page left it, merged newest first."""

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg

from windlass.model.errors import ConfigurationError
from windlass.model.limits import shown
from windlass.model.task import TaskFilter, TaskPage, TaskRecord, TaskState
from windlass.store.postgres.records import task_record
from windlass.store.sqlfiles import SqlFiles

MOST_LANES = 2000  # that are read one by one; above it is cheaper to walk over other tasks
FEW = 10_000  # ready tasks of some lanes, to look at each for the newest
SLACK = timedelta(minutes=1)  # between the clock of a producer, which makes ids, and the database's

PLACES = {
    TaskState.SCHEDULED: ("scheduled", "gated"),  # at a gate: only nobody has looked at it yet
    TaskState.BLOCKED: ("gated",),
    TaskState.PENDING: ("pending", "gated"),
    TaskState.CLAIMED: ("held",),
    TaskState.RUNNING: ("held",),
    TaskState.COMPLETED: ("history",),
    TaskState.CANCELLED: ("history",),
    TaskState.FAILED: ("failed",),
    TaskState.DEAD: ("dead",),
}
BY_STATUS = {"gated": "list_gated", "held": "list_held", "history": "list_history"}
POSITION = re.compile(r"([a-z]+):([0-9a-f]{32}|[0-9]{1,18}\.[0-9]{1,18}|)")
BEGINNING = ""  # of a place

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_FIRST_ID, _LAST_ID = UUID(int=0), UUID(int=(1 << 128) - 1)
_FIRST_TIME, _LAST_TIME = (datetime(year, 1, 1, tzinfo=UTC) for year in (1, 9999))
_LAST_READY = ("999999999999999999", (1 << 63) - 1)


class Part(NamedTuple):
    """What one place has for a page, in its own order."""

    start: str  # where this page begins in it
    found: list[tuple[str, TaskRecord]]  # each with where a later page goes on behind it
    rest: str | None  # where it goes on behind all of them; None: there is nothing
    looked_back_to: datetime | None = None  # if it was not to look any further


class Listing:
    """The statements of one page, in a transaction of its own."""

    def __init__(self, sql: SqlFiles, connection: asyncpg.Connection, wanted: TaskFilter) -> None:
        self._sql = sql
        self._connection = connection
        self._wanted = wanted
        self._created = (wanted.created_from or _FIRST_TIME, wanted.created_until or _LAST_TIME)
        self._has_range = bool(wanted.created_from or wanted.created_until)
        self._kind = (wanted.type, wanted.queue)

    async def page(self) -> TaskPage:
        """Read every place that may hold what is wanted, and merge them."""
        starts = starts_of(self._wanted)
        await self._connection.execute(self._sql.statement("pin_listing_plans"))
        parts = {place: await self._read(place, start) for place, start in starts.items()}
        return await self._with_lineage(merged(parts, self._wanted.limit))

    async def _with_lineage(self, page: TaskPage) -> TaskPage:
        rows = await self._fetch("list_lineage", [UUID(record.id) for record in page.records])
        ancestors = {str(row["task_id"]): str(row["ancestor"]) for row in rows}
        records = [
            replace(record, replay_of=ancestors[record.id]) if record.id in ancestors else record
            for record in page.records
        ]
        return replace(page, records=records)

    async def _read(self, place: str, start: str) -> Part:
        statuses = [str(status) for status in self._wanted.statuses]
        match place:
            case "tagged":
                asked = (self._wanted.tag, statuses or None)
                return await self._walk("list_tagged", start, *asked, *self._kind)
            case "pending" | "scheduled":
                return await self._waiting(place, start)
            case "gated" | "held" | "history":
                those = statuses or [state for state in PLACES if place in PLACES[state]]
                return await self._walk(BY_STATUS[place], start, those, *self._kind)
            case "cancelled":
                return await self._walk("list_cancelled", start, *self._kind)
            case _:
                return await self._walk("list_dead", start, place, *self._kind)

    async def _waiting(self, place: str, start: str) -> Part:
        """Read lane by lane what is of one type or queue: there may be any number of others."""
        by_ready_order = "." in start
        lanes = None
        if by_ready_order or any(self._kind):
            lanes = [row["lane"] for row in await self._fetch("list_lanes", *self._kind)]
        is_lane_by_lane = lanes is not None and len(lanes) <= MOST_LANES
        if place == "scheduled":
            statement = "list_scheduled_lanes" if is_lane_by_lane else "list_scheduled"
            return await self._walk(statement, start, lanes)
        if by_ready_order:
            return await self._by_ready_order(start, lanes or [])
        if is_lane_by_lane and await self._has_few(lanes or []):
            return await self._walk("list_pending_few", start, lanes)
        if is_lane_by_lane and start == BEGINNING and not self._has_range:
            return await self._by_ready_order(start, lanes or [])
        return await self._walk("list_pending", start, lanes)

    async def _has_few(self, lanes: Sequence[int]) -> bool:
        """Whether to read all of these lanes, in which no index knows an id or a time."""
        (row,) = await self._fetch("count_ready", lanes, FEW)
        return bool(row["count"] < FEW)

    async def _by_ready_order(self, start: str, lanes: Sequence[int]) -> Part:
        x, n = start.split(".") if start else _LAST_READY
        limit = self._wanted.limit
        rows = await self._fetch("list_pending_lanes", lanes, x, int(n), *self._created, limit)
        keys = [f"{row['x']}.{row['n']}" for row in rows]
        return _part(start, rows, keys, limit)

    async def _walk(self, statement: str, start: str, *asked: Any) -> Part:
        """Read a place from its newest task on, by id."""
        limit = self._wanted.limit
        rows = await self._fetch(statement, *asked, *self._ids(start), *self._created, limit)
        part = _part(start, rows, [row["id"].hex for row in rows], limit)
        if rows and rows[-1]["is_last"] and not statement.endswith(("_lanes", "_few")):
            last = rows[-1]
            return part._replace(looked_back_to=last["created_at"] or _made_at(last["id"]))
        return part

    def _ids(self, start: str) -> tuple[UUID, UUID]:
        """The ids between which to look: below the first, and from the second on."""
        since, until = self._wanted.created_from, self._wanted.created_until
        before = _LAST_ID if until is None else _first_id_of(until, SLACK)
        if start:
            before = min(before, UUID(start))
        return before, _FIRST_ID if since is None else _first_id_of(since, -SLACK)

    async def _fetch(self, statement: str, *arguments: Any) -> list[asyncpg.Record]:
        return list(await self._connection.fetch(self._sql.statement(statement), *arguments))


def starts_of(wanted: TaskFilter) -> dict[str, str]:
    """The places to read, and where to begin in each."""
    if wanted.tag is not None:
        places = ["tagged"]
    else:
        asked = set(wanted.statuses or PLACES)
        found = (place for state in PLACES if state in asked for place in PLACES[state])
        places = list(dict.fromkeys(found))
        if TaskState.CANCELLED in asked and TaskState.COMPLETED not in asked:
            places[places.index("history")] = "cancelled"
    if wanted.after is None:
        return dict.fromkeys(places, BEGINNING)
    parts = [POSITION.fullmatch(text) for text in wanted.after.split(",")]
    starts = {part[1]: part[2] for part in parts if part is not None}
    by_id = [start for place, start in starts.items() if place != "pending"]
    if None in parts or not starts.keys() <= set(places) or any("." in start for start in by_id):
        raise ConfigurationError(
            f"position {shown(wanted.after)} is of no listing by this filter; give what a page "
            "said, as it is, and the same filter"
        )
    return starts


def merged(parts: dict[str, Part], limit: int) -> TaskPage:
    """Take the newest of all places, each in its own order, and say where each goes on."""
    taken = dict.fromkeys(parts, 0)

    def is_left(place: str) -> bool:
        return taken[place] < len(parts[place].found)

    def newest(place: str) -> str:
        return parts[place].found[taken[place]][1].id

    records: list[TaskRecord] = []
    while len(records) < limit and (left := list(filter(is_left, parts))):
        place = max(left, key=newest)
        records.append(parts[place].found[taken[place]][1])
        taken[place] += 1

    times = [
        part.looked_back_to
        for place, part in parts.items()
        if part.looked_back_to is not None and not is_left(place)
    ]
    is_over = not any(is_left(place) or part.rest for place, part in parts.items())
    records.sort(key=lambda record: record.id, reverse=True)
    rest = None if is_over else _rest(parts, taken, records, is_full=len(records) == limit)
    return TaskPage(records, rest, max(times, default=None))


def _rest(
    parts: dict[str, Part], taken: dict[str, int], records: Sequence[TaskRecord], *, is_full: bool
) -> str:
    """Say where each place goes on, also one that is at its end: a task may move there meanwhile."""
    stopped = {
        place: part.rest
        for place, part in parts.items()
        if part.rest is not None and taken[place] == len(part.found)
    }
    # Where all is in the order of ids, a page that is full has come down to one of them in every place,
    # but for those that stopped before, and for those that were further down as it began.
    is_by_id = not any("." in (part.rest or part.start) for part in parts.values())
    lowest = UUID(records[-1].id).hex if is_by_id and is_full else ""

    def goes_on(place: str, part: Part) -> str:
        if lowest:
            return min(part.start or _LAST_ID.hex, max(stopped.get(place, ""), lowest))
        last = part.found[taken[place] - 1][0] if taken[place] else part.start
        return stopped.get(place, last)

    return ",".join(f"{place}:{goes_on(place, part)}" for place, part in parts.items())


def _part(start: str, rows: list[asyncpg.Record], keys: list[str], limit: int) -> Part:
    found = [(key, task_record(row)) for key, row in zip(keys, rows, strict=True) if row["fits"]]
    may_have_more = bool(rows) and (rows[-1]["is_last"] or len(rows) >= limit)
    return Part(start, found, keys[-1] if may_have_more else None)


def _first_id_of(moment: datetime, later: timedelta) -> UUID:
    """The lowest id that a client makes whose clock is at this moment."""
    milliseconds = (moment - _EPOCH + later) // _MILLISECOND
    return UUID(int=min(max(milliseconds, 0), (1 << 48) - 1) << 80)


def _made_at(task_id: UUID) -> datetime:
    milliseconds = min(task_id.int >> 80, (_LAST_TIME - _EPOCH) // _MILLISECOND)
    return _EPOCH + milliseconds * _MILLISECOND
