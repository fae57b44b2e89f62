"""What a page of a listing reads depends on what it shows, and is bounded, whatever there is."""

import json
import re
import runpy
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import windlass
from architecture.plan_costs import Subject
from windlass.model.task import TaskFilter, TaskPage, TaskState
from windlass.store.postgres.listing import Listing
from windlass.store.sqlfiles import SqlFiles

QUERIES = Path(windlass.__file__).parent / "store" / "postgres" / "queries"
BENCH = Path(__file__).parents[2] / "bench" / "listing.py"
SQL = SqlFiles("windlass.store.postgres", "windlass")
LIVE, ENDED = 40_000, 80_000
LIMIT = 50
LOOK = 10_000  # tasks of a place, for one page
DAY = timedelta(days=1)

ROWS_READ = """
SELECT relname, seq_tup_read + coalesce(idx_tup_fetch, 0) AS rows
FROM pg_stat_xact_user_tables
WHERE schemaname = 'windlass'
"""

# Besides the partitions of history: task, ready, scheduled, running, dead.
PLACES = "SELECT 5 + count(*) FROM pg_inherits WHERE inhparent = 'windlass.history'::regclass"
TAGGED = "SELECT least(count(*), 1000) FROM windlass.task_tag WHERE tag = $1"


class Probe:
    """Stands in for a connection: each statement is explained, and then carried out."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self.nodes: list[dict[str, Any]] = []
        self.rows: Counter[str] = Counter()
        self.buffers = 0

    async def execute(self, text: str) -> None:
        await self._connection.execute(text)

    async def fetch(self, text: str, *arguments: Any) -> list[asyncpg.Record]:
        explained = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {text}"
        top = json.loads(await self._connection.fetchval(explained, *arguments))[0]["Plan"]
        self.nodes += _nodes(top)
        self.buffers += top["Shared Hit Blocks"] + top["Shared Read Blocks"]
        before = dict(await self._connection.fetch(ROWS_READ))
        rows = list(await self._connection.fetch(text, *arguments))
        for table, number in await self._connection.fetch(ROWS_READ):
            name = "history" if table.startswith("history_") else table
            self.rows[name] += number - before.get(table, 0)
        return rows

    @property
    def indexes(self) -> set[str]:
        return {re.sub(r"_\d{8}_\d{8}", "", node.get("Index Name", "")) for node in self.nodes}


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for below in node.get("Plans", ()):
        yield from _nodes(below)


@pytest.fixture
async def filled(sql_url: str) -> AsyncIterator[asyncpg.Connection]:
    """Many tasks in every place: see `bench/listing.py`."""
    await runpy.run_path(str(BENCH))["seed"](sql_url, LIVE, ENDED)
    connection = await asyncpg.connect(sql_url)
    yield connection
    await connection.close()


async def look(connection: asyncpg.Connection, wanted: TaskFilter) -> tuple[TaskPage, Probe]:
    probe = Probe(connection)
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        page = await Listing(SQL, probe, wanted).page()
    return page, probe


def of(state: TaskState, **more: Any) -> TaskFilter:
    return TaskFilter(statuses=(state,), **more)


async def test_a_page_reads_what_it_shows_or_a_bounded_part_by_an_index(
    filled: asyncpg.Connection,
) -> None:
    middle = datetime.now(UTC) - 4 * DAY
    exact = {
        of(TaskState.PENDING): "ready_task",
        of(TaskState.PENDING, type="unheard-of"): "ready_order",
        of(TaskState.PENDING, queue="rare"): "ready_order",
        of(TaskState.PENDING, type="rare", created_from=middle): "ready_order",
        of(TaskState.SCHEDULED): "scheduled_pkey",
        of(TaskState.SCHEDULED, type="old"): "scheduled_lane",
        of(TaskState.SCHEDULED, queue="rare"): "scheduled_lane",
        of(TaskState.SCHEDULED, type="old", created_until=middle + 3.5 * DAY): "scheduled_lane",
        of(TaskState.COMPLETED): "history_id_idx",
        of(TaskState.COMPLETED, created_until=middle): "history_id_idx",
        of(TaskState.CANCELLED): "history_id_idx1",
        of(TaskState.FAILED): "dead_status",
        of(TaskState.DEAD): "dead_status",
        TaskFilter(tag="rare"): "task_tag_pkey",
        TaskFilter(): "ready_task",
    }
    bounded = {
        of(TaskState.PENDING, type="old"): "ready_order",
        of(TaskState.PENDING, queue="default"): "ready_order",
        of(TaskState.PENDING, queue="default", created_until=middle + 3.5 * DAY): "ready_task",
        of(TaskState.COMPLETED, type="unheard-of"): "history_id_idx",
        of(TaskState.CANCELLED, type="unheard-of"): "history_id_idx1",
        of(TaskState.DEAD, queue="unheard-of"): "dead_status",
        TaskFilter(type="unheard-of", created_until=middle): "dead_status",
        TaskFilter(tag="usual", type="unheard-of"): "task_tag_pkey",
    }

    places: int = await filled.fetchval(PLACES)

    for plans in ("force_custom_plan", "force_generic_plan"):
        await filled.execute(f"SET plan_cache_mode = {plans}")
        for wanted, index in (exact | bounded).items():
            page, probe = await look(filled, wanted)

            # What is ready of a lane is counted first.
            most = 2 * LOOK + LIMIT if wanted in bounded else 500
            assert max(probe.rows.values()) <= most, (wanted, plans, probe.rows)
            # A task with a tag is looked for in every place: on servers before 17 a search for each.
            tagged = await filled.fetchval(TAGGED, wanted.tag)
            assert probe.buffers < (3 * places * tagged if wanted.tag else 10 * most), wanted
            assert len(page.records) == LIMIT or wanted in bounded or page.rest is None, wanted
            assert index in probe.indexes, (wanted, probe.indexes)
            for node in probe.nodes:
                kind = node["Node Type"]
                # The lists of lanes are short, and have no index for all that is asked of them.
                is_whole = kind == "Seq Scan" and not node["Relation Name"].endswith("lane")
                assert not is_whole, (wanted, node["Relation Name"])
                assert "Bitmap" not in kind, wanted
                assert "Sort" not in kind or node["Actual Rows"] <= 2000, wanted


@pytest.mark.parametrize("plans", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("analyzed", [False, True])
async def test_what_workers_hold_is_found_by_their_claims(
    subject: Subject, analyzed: bool, plans: str
) -> None:
    """And not among all tasks there are, each compared with each that is held."""
    await subject.fill(20_000)
    await subject.claim(500)
    if analyzed:
        await subject.analyze()
    await subject.connection.execute(f"SET plan_cache_mode = {plans}")

    page, probe = await look(subject.connection, of(TaskState.CLAIMED))

    assert len(page.records) == LIMIT
    assert probe.rows["task"] <= 500


def test_the_view_of_all_tasks_is_asked_for_one_task_only() -> None:
    """By status it would be read whole: a status is not a column of it but where a row is."""
    readers = {
        path.stem: path.read_text()
        for path in QUERIES.glob("*.sql")
        if re.search(r"\bwindlass\.tasks\b", path.read_text())
    }

    assert set(readers) == {"read_task", "read_state"}
    for text in readers.values():
        assert re.search(r"FROM windlass\.tasks( v)?\nWHERE (v\.)?id = \$1\s*\Z", text)
