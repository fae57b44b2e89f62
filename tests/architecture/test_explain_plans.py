"""To explain a task reads a bounded number of rows, however many there are."""

import runpy
from collections.abc import AsyncIterator
from datetime import timedelta

import asyncpg
import pytest

from architecture.test_listing_plans import BENCH, ENDED, LIVE, SQL, Probe
from windlass.store.postgres import explaining

COUNTED = 100  # instead of many more, so that there is more than is counted

LAST = """
SELECT r.task_id
FROM windlass.ready r
WHERE r.lane = (SELECT k.lane FROM windlass.ready k GROUP BY k.lane ORDER BY count(*) DESC LIMIT 1)
ORDER BY r.x DESC, r.n DESC
LIMIT 1
"""
LIMITED = """
INSERT INTO windlass.lane_rule (scope, name, by_operator, concurrency, changed_at)
SELECT 'queue', q.queue, true, 1000000, now() FROM (SELECT DISTINCT l.queue FROM windlass.lane l) q
"""
WORKER = """
WITH new AS (
    INSERT INTO windlass.worker (id, host, pid, version, capacity, types, started_at)
    SELECT gen_random_uuid(), 'a.example', 7, '0', 10, array_agg(DISTINCT l.type), now() FROM windlass.lane l
    RETURNING id
)
INSERT INTO windlass.worker_pulse (worker_id, heartbeat_at, expires_at, running, idle)
SELECT n.id, now(), now() + interval '1 day', 0, false FROM new n
"""
LANES = "SELECT count(*) FROM windlass.lane"


@pytest.fixture
async def filled(sql_url: str) -> AsyncIterator[asyncpg.Connection]:
    await runpy.run_path(str(BENCH))["seed"](sql_url, LIVE, ENDED)
    connection = await asyncpg.connect(sql_url)
    yield connection
    await connection.close()


def rows_of(probe: Probe, relation: str) -> float:
    """What the scans of a table returned, also those of an index alone."""
    return sum(
        float(node["Actual Rows"] * node["Actual Loops"])
        for node in probe.nodes
        if node.get("Relation Name", "").startswith(relation)
    )


async def test_a_bounded_number_of_rows_is_read(
    filled: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explaining, "COUNTED", COUNTED)
    await filled.execute(WORKER)
    await look(filled, limited=False)
    await filled.execute(LIMITED)
    await look(filled, limited=True)


async def look(filled: asyncpg.Connection, *, limited: bool) -> None:
    task_id = await filled.fetchval(LAST)
    lanes = await filled.fetchval(LANES)
    probe = Probe(filled)

    async with filled.transaction(isolation="repeatable_read", readonly=True):
        looks = explaining.Looks(SQL, probe, timedelta(seconds=6))
        situation = await looks.situation(task_id)

    # Of every lane its head, and of each as many as are counted; of the own one once more.
    assert COUNTED < rows_of(probe, "ready") <= (1 + limited) * lanes * (COUNTED + 1) + COUNTED + 2
    # Of each partition one more than is taken of all, to merge them by id.
    assert rows_of(probe, "history") <= COUNTED + 100
    assert rows_of(probe, "task") <= 10
    assert situation.ahead.in_lane == COUNTED + 1
