"""A flood of high priority, and two workers that claim by the hundred: nothing starves."""

import asyncio
import time
from pathlib import Path

import asyncpg
import pytest

from chaos.fleet import Fleet
from stress.aged_app import STEP, app, work

SECONDS = 20
EACH = 0.05  # seconds from one burst to the next
LOW, HIGH = 0, 20

# By claims: the first task of high priority that each took, although one of low priority waited that was
# ready before it by more than the bound. One that was claimed within the same second may have been in the hands of
# the other worker.
TOO_EARLY = """
WITH claimed AS (
    SELECT worker_id, claimed_at, min(scheduled_for) AS ready_at
    FROM windlass.tasks
    WHERE priority = $1
    GROUP BY worker_id, claimed_at
)
SELECT count(*)
FROM claimed c
WHERE EXISTS (
    SELECT
    FROM windlass.tasks t
    WHERE t.priority = $2 AND t.claimed_at > c.claimed_at + interval '1 second'
        AND t.scheduled_for + $3 * interval '1 second' < c.ready_at
)
"""
WAITS = """
SELECT priority, max(extract(epoch FROM claimed_at - scheduled_for))::float8 AS longest, count(*) AS tasks
FROM windlass.tasks GROUP BY priority ORDER BY priority
"""


@pytest.mark.stress
@pytest.mark.timeout(300)
async def test_a_flood_of_high_priority_holds_up_nobody_beyond_the_bound(
    database_url: str, tmp_path: Path
) -> None:
    fleet = Fleet(database_url, tmp_path, "stress.aged_app:app", 2)
    connection = await asyncpg.connect(database_url)
    number = 0
    try:
        with app.kept_at(database_url):
            began = time.monotonic()
            while time.monotonic() < began + SECONDS:
                # Nine in ten are of high priority, and a little more than two workers run.
                await app.enqueue_many(
                    work.options(priority=LOW if place % 10 == 0 else HIGH).call()
                    for place in range(110)
                )
                number += 110
                await asyncio.sleep(EACH)  # the pace of the flood
            await app.close()
        while await connection.fetchval("SELECT count(*) FROM windlass.task"):
            await asyncio.sleep(0.1)
        codes = await asyncio.to_thread(fleet.terminate)
    finally:
        fleet.end()

    bound = (HIGH - LOW) * STEP
    waits = {row["priority"]: row["longest"] for row in await connection.fetch(WAITS)}
    too_early = await connection.fetchval(TOO_EARLY, HIGH, LOW, bound)
    print(f"\n{number} tasks, longest waits {waits}, bound {bound:.1f} s")
    assert codes == [0, 0]
    assert too_early == 0
    # A claim that is under way may see what is ready a moment later than another.
    assert waits[LOW] <= waits[HIGH] + bound + 1
    await connection.close()
