"""How long `windlass tasks list` takes among very many tasks, filter by filter.

Half of the live tasks are pending and half scheduled; those of the type `old` are all older than
any other, `rare` is the type, the queue and the tag of twenty of each. Ended ones are spread over
eight days. Each listing is asked of the store, then through the command line in this process, which
adds what it takes to open an application. The first answer of each is left out: it reads the disk.

    python bench/listing.py [--live 100000] [--ended 1000000] [--turns 20] [--database URL]
"""

import argparse
import asyncio
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import asyncpg
from click.testing import CliRunner

from windlass import App
from windlass.cli.main import main as windlass
from windlass.cli.tasks import list_pages, task_filter
from windlass.model.task import TaskPage
from windlass.store.postgres.embedded import EmbeddedServer

DAYS = 8

# Ids are made from a time, as a client's are, and from a number.
KINDS = """
CREATE FUNCTION pg_temp.seed_id(at timestamptz, n bigint) RETURNS uuid LANGUAGE sql IMMUTABLE AS $$
SELECT (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || '70008000'
    || lpad(to_hex(n), 12, '0'))::uuid
$$;
CREATE FUNCTION pg_temp.seed_type(n bigint, total bigint) RETURNS text LANGUAGE sql IMMUTABLE AS $$
SELECT CASE WHEN n % (total / 20) = 7 THEN 'rare' WHEN n <= total / 5 THEN 'old'
    ELSE 'common' || n % 5 END
$$
"""
# $1 number, $2 the table, $3 the first number
LIVE = """
WITH made AS MATERIALIZED (
    SELECT
        now() - (1 - n::float8 / $1) * interval '1 day' AS at, n,
        pg_temp.seed_type(n, $1) AS type
    FROM generate_series(1, $1::bigint) AS n
), named AS MATERIALIZED (
    SELECT pg_temp.seed_id(at, $3 + n) AS id, at, n, type,
        CASE WHEN type = 'rare' THEN 'rare' ELSE 'default' END AS queue
    FROM made
), tasks AS (
    INSERT INTO windlass.task (
        id, type, queue, priority, max_attempts, created_at, scheduled_for, payload, tags
    )
    SELECT id, type, queue, 10, 4, at, CASE WHEN $2 = 'ready' THEN at ELSE at + interval '2 days' END,
        '{"image": "a.png", "width": 100}',
        CASE WHEN type = 'rare' THEN '{rare}' WHEN n % 10 = 0 THEN '{usual}' END::text[]
    FROM named
), later AS (
    INSERT INTO windlass.scheduled (lane, task_id, generation, due)
    SELECT windlass.lane_number(queue, type, 10::smallint, 0::smallint), id, 1, at + interval '2 days'
    FROM named WHERE $2 = 'scheduled'
)
INSERT INTO windlass.ready (lane, task_id, generation, ready_at)
SELECT windlass.lane_number(queue, type, 10::smallint, 0::smallint), id, 1, at
FROM named WHERE $2 = 'ready'
ORDER BY n
"""
# $1 number, $2 the first number, $3 days ago
HISTORY = """
INSERT INTO windlass.history (
    id, type, queue, status, priority, max_attempts, attempts, generation, drop_on, created_at,
    scheduled_for, claimed_at, started_at, completed_at, worker_id, token, payload, tags, result
)
SELECT
    pg_temp.seed_id(at, $2 + n), type, CASE WHEN type = 'rare' THEN 'rare' ELSE 'default' END,
    (CASE WHEN n % 50000 = 3 THEN 'cancelled' ELSE 'completed' END)::windlass.task_status,
    10, 4, 1, 1, (now() AT TIME ZONE 'UTC')::date + 7 - $3::integer, at, at, at, at,
    at + interval '1 second', gen_random_uuid(), gen_random_uuid(),
    '{"image": "a.png", "width": 100}',
    CASE WHEN type = 'rare' THEN '{rare}' WHEN n % 10 = 0 THEN '{usual}' END::text[], '{"pixels": 10000}'
FROM (
    SELECT n, now() - ($3::integer + 1 - n::float8 / $1) * interval '1 day' AS at,
        pg_temp.seed_type(n, $1) AS type
    FROM generate_series(1, $1::bigint) AS n
) s
"""
# $1 number, $2 the first number
DEAD = """
INSERT INTO windlass.dead (
    id, type, queue, status, priority, max_attempts, attempts, generation, drop_on, created_at,
    scheduled_for, claimed_at, started_at, completed_at, worker_id, token, payload, tags, last_error
)
SELECT
    pg_temp.seed_id(at, $2 + n), type, CASE WHEN type = 'rare' THEN 'rare' ELSE 'default' END,
    (CASE WHEN n % 5000 = 3 THEN 'failed' ELSE 'dead' END)::windlass.task_status,
    10, 4, 4, 4, (now() AT TIME ZONE 'UTC')::date + 30, at, at, at, at, at,
    gen_random_uuid(), gen_random_uuid(), '{"image": "a.png", "width": 100}',
    CASE WHEN type = 'rare' THEN '{rare}' END::text[], 'no such image'
FROM (
    SELECT n, now() - (8 - 8 * n::float8 / $1) * interval '1 day' AS at,
        pg_temp.seed_type(n, $1) AS type
    FROM generate_series(1, $1::bigint) AS n
) s
"""
REST = """
INSERT INTO windlass.lane (lane, queue, type, priority, kind)
SELECT DISTINCT windlass.lane_number(queue, type, priority, 0::smallint), queue, type, priority, 0
FROM windlass.task;
INSERT INTO windlass.task_tag (tag, task_id)
SELECT unnest(tags), id FROM windlass.task WHERE tags IS NOT NULL
UNION ALL SELECT unnest(tags), id FROM windlass.history WHERE tags IS NOT NULL
UNION ALL SELECT unnest(tags), id FROM windlass.dead WHERE tags IS NOT NULL
"""


async def seed(url: str, live: int, ended: int) -> None:
    """Put tasks straight into their places."""
    async with App(url) as app:
        await app.store()  # migrates
    connection = await asyncpg.connect(url)
    await connection.execute("SET synchronous_commit = off")
    await connection.execute(KINDS)
    for number, place in enumerate(("ready", "scheduled")):
        await connection.execute(LIVE, live // 2, place, number * live)
    for day in range(DAYS):
        await connection.execute(
            "SELECT windlass.add_history_partition(today + $1::integer, today + $1 + 1) "
            "FROM (SELECT (now() AT TIME ZONE 'UTC')::date + 7 AS today) d",
            -day,
        )
        await connection.execute(HISTORY, ended // DAYS, (10 + day) << 32, day)
    await connection.execute(DEAD, ended // 100, 30 << 32)
    await connection.execute(REST)
    await connection.execute("VACUUM ANALYZE")
    await connection.close()


def listings() -> list[list[str]]:
    """What is asked for, as it is typed."""
    now = datetime.now(UTC)
    two_days_ago, a_bit_later = (
        (now - timedelta(days=2) + timedelta(minutes=minutes)).isoformat() for minutes in (0, 10)
    )
    states = ("pending", "scheduled", "running", "completed", "cancelled", "failed", "dead")
    return [
        [],
        *(["--status", state] for state in states),
        *(["--type", name] for name in ("common1", "old", "rare", "unheard-of")),
        *(["--queue", name] for name in ("default", "rare")),
        *(["--tag", name] for name in ("usual", "rare")),
        ["--status", "pending", "--type", "old"],
        ["--status", "pending", "--type", "rare", "--since", two_days_ago],
        ["--status", "scheduled", "--type", "old"],
        ["--status", "completed", "--type", "rare"],
        ["--status", "dead", "--queue", "rare"],
        ["--tag", "usual", "--status", "pending"],
        ["--tag", "usual", "--type", "rare"],
        ["--until", two_days_ago],
        ["--since", two_days_ago, "--until", a_bit_later],
        ["--since", two_days_ago, "--until", a_bit_later, "--type", "rare"],
    ]


def measure(call: Callable[[], Any], turns: int) -> tuple[float, float]:
    """Milliseconds of the middle and the slowest of some calls."""
    call()
    times = []
    for _ in range(turns):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times), max(times)


def by_store(loop: asyncio.AbstractEventLoop, app: App, asked: list[str]) -> Callable[[], TaskPage]:
    options = dict(zip(asked[::2], asked[1::2], strict=True))
    status = options.get("--status")
    wanted = task_filter(
        statuses=[status] if status else [],
        type_name=options.get("--type"),
        in_queue=options.get("--queue"),
        tag=options.get("--tag"),
        since=options.get("--since"),
        until=options.get("--until"),
        limit=50,
    )
    return lambda: loop.run_until_complete(list_pages(app, wanted))


def run(url: str, turns: int) -> None:
    os.environ["WINDLASS_DATABASE_URL"] = url
    loop = asyncio.new_event_loop()
    app = App(url)
    loop.run_until_complete(app.__aenter__())
    print("milliseconds: median and worst of the store, of the command")
    for asked in listings():
        ask = by_store(loop, app, asked)
        page = ask()
        found = f"{len(page.records)} found" + (", not all" if page.rest else "")
        store = measure(ask, turns)
        command = measure(partial(_command, asked), turns)
        print(
            f"{store[0]:7.1f} {store[1]:7.1f}  {command[0]:7.1f} {command[1]:7.1f}  "
            f"{found:<18}  {' '.join(asked) or 'everything'}",
            flush=True,
        )
    loop.run_until_complete(app.__aexit__(None, None, None))
    loop.close()


def _command(asked: list[str]) -> None:
    done = CliRunner().invoke(windlass, ["tasks", "list", *asked])
    if done.exit_code:
        sys.exit(done.output)


def main() -> None:
    parser = argparse.ArgumentParser(description="List tasks.")
    parser.add_argument("--live", type=int, default=100_000)
    parser.add_argument("--ended", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--database", help="an empty one; without it an embedded server is started")
    asked = parser.parse_args()
    if asked.database:
        asyncio.run(seed(asked.database, asked.live, asked.ended))
        run(asked.database, asked.turns)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server would be left behind
    with TemporaryDirectory() as folder:
        server = EmbeddedServer.acquire(
            Path(folder) / "postgres", settings={"fsync": "off", "max_wal_size": "4GB"}
        )
        try:
            asyncio.run(seed(server.url, asked.live, asked.ended))
            run(server.url, asked.turns)
        finally:
            server.release()


if __name__ == "__main__":
    main()
