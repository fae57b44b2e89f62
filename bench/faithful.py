"""The yardstick: a bare loop over bare tables that keeps our promises and has no features.

Kept are UUID keys in the order of time, a lane read on from where the last claim ended, one claim
row for each batch, token and generation as a fence, claims that are flushed, and a move of each
task to history. Left out is everything else: retries, schedules, keys, heartbeats, results, rescue.
An adapter like those of the peers; keep it in step with what our statements promise.
"""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import asyncpg

from bench.peers.adapter import Order, Payload, Tally, chunked, main
from windlass.service import run_now

CLAIM_AT_MOST = 500
SETTLE_AT_MOST = 1000
IN_FLIGHT = 2000
POLL = 0.05  # seconds, when there is nothing to do
CHUNK = 5000  # tasks of one transaction

SCHEMA = """
CREATE SCHEMA faithful;
CREATE TABLE faithful.task (
    id uuid PRIMARY KEY,
    type text NOT NULL,
    queue text NOT NULL,
    priority smallint NOT NULL,
    max_attempts smallint NOT NULL,
    attempts smallint NOT NULL DEFAULT 0,
    generation integer NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    payload jsonb NOT NULL
);
CREATE TABLE faithful.ready (
    lane bigint NOT NULL,
    x xid8 NOT NULL DEFAULT pg_current_xact_id(),
    n bigint NOT NULL GENERATED ALWAYS AS IDENTITY (CACHE 100),
    task_id uuid NOT NULL,
    generation integer NOT NULL
);
CREATE INDEX ready_order ON faithful.ready (lane, x, n);
CREATE TABLE faithful.claim (
    token uuid PRIMARY KEY,
    fence bigint NOT NULL GENERATED ALWAYS AS IDENTITY,
    worker_id uuid NOT NULL,
    claimed_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    remaining integer NOT NULL
) WITH (fillfactor = 50);
CREATE TABLE faithful.claim_task (
    token uuid PRIMARY KEY,
    task_ids uuid[] NOT NULL,
    generations integer[] NOT NULL
);
CREATE TABLE faithful.history (
    id uuid NOT NULL,
    type text NOT NULL,
    queue text NOT NULL,
    priority smallint NOT NULL,
    max_attempts smallint NOT NULL,
    attempts smallint NOT NULL,
    generation integer NOT NULL,
    created_at timestamptz NOT NULL,
    claimed_at timestamptz NOT NULL,
    completed_at timestamptz NOT NULL,
    worker_id uuid NOT NULL,
    token uuid NOT NULL,
    payload jsonb NOT NULL,
    result jsonb,
    drop_on date NOT NULL
) PARTITION BY RANGE (drop_on);
CREATE TABLE faithful.history_now PARTITION OF faithful.history
    FOR VALUES FROM (MINVALUE) TO (MAXVALUE);
CREATE UNIQUE INDEX ON faithful.history_now (id);
"""
ENQUEUE = """
WITH added AS (
    INSERT INTO faithful.task (id, type, queue, priority, max_attempts, payload)
    SELECT u.id, 'note', 'default', 50, 4, u.payload::jsonb
    FROM unnest($1::uuid[], $2::text[]) AS u (id, payload)
)
INSERT INTO faithful.ready (lane, task_id, generation)
SELECT 1, u.id, 1 FROM unnest($1::uuid[]) AS u (id)
"""
# $1 and $2 the lower bound, $3 token, $4 worker. The limit is a literal: a plan is made for it.
CLAIM = f"""
WITH head AS MATERIALIZED (
    SELECT r.ctid AS place, r.task_id, r.generation, r.x, r.n
    FROM faithful.ready r
    WHERE r.lane = 1 AND (r.x, r.n) > ($1::text::xid8, $2)
    ORDER BY r.x, r.n
    LIMIT {CLAIM_AT_MOST}
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM faithful.ready r USING head h
    WHERE r.ctid = h.place
    RETURNING h.task_id, h.generation, h.x, h.n
), batch AS (
    SELECT array_agg(task_id) AS ids, array_agg(generation) AS generations
    FROM gone HAVING count(*) > 0
), granted AS (
    INSERT INTO faithful.claim (token, worker_id, claimed_at, expires_at, remaining)
    SELECT $3, $4, clock_timestamp(), clock_timestamp() + interval '30 seconds', cardinality(ids)
    FROM batch
), held AS (
    INSERT INTO faithful.claim_task (token, task_ids, generations)
    SELECT $3, ids, generations FROM batch
)
SELECT t.id, g.generation, t.payload, t.attempts, t.max_attempts, g.x::text AS x, g.n
FROM gone g
JOIN faithful.task t ON t.id = g.task_id
ORDER BY g.x, g.n
"""
# $1 tokens of the batch, once each; $2 token, $3 id, $4 generation and $5 result of each task.
SETTLE = """
WITH held AS MATERIALIZED (
    SELECT c.token, c.worker_id, c.claimed_at, c.remaining
    FROM faithful.claim c
    WHERE c.token = ANY ($1::uuid[])
    ORDER BY c.token
    FOR NO KEY UPDATE
), ended AS (
    DELETE FROM faithful.task t
    USING unnest($2::uuid[], $3::uuid[], $4::integer[], $5::text[])
        AS u (token, task_id, generation, result)
    JOIN held h ON h.token = u.token
    WHERE t.id = u.task_id AND t.generation = u.generation
    RETURNING t.*, h.token, h.worker_id, h.claimed_at, u.result
), kept AS (
    INSERT INTO faithful.history
    SELECT
        id, type, queue, priority, max_attempts, attempts + 1, generation, created_at, claimed_at,
        clock_timestamp(), worker_id, token, payload, result::jsonb, current_date + 7
    FROM ended
), counted AS MATERIALIZED (
    SELECT h.token, h.remaining - count(*)::integer AS remaining
    FROM ended e
    JOIN held h ON h.token = e.token
    GROUP BY h.token, h.remaining
), reduced AS (
    UPDATE faithful.claim c SET remaining = k.remaining
    FROM counted k WHERE c.token = k.token AND k.remaining > 0
), emptied AS (
    DELETE FROM faithful.claim c USING counted k WHERE c.token = k.token AND k.remaining = 0
)
DELETE FROM faithful.claim_task b USING counted k WHERE b.token = k.token AND k.remaining = 0
"""
# Or it would scan whole tables, which it believes to be small still.
PLANS = {"enable_hashjoin": "off", "enable_mergejoin": "off", "enable_seqscan": "off"}


class Ended(NamedTuple):
    """What became of a task."""

    token: UUID
    task_id: UUID
    generation: int
    result: str


class FaithfulLoop:
    """Claims on one connection, settles on another, and runs what ends at once at once."""

    def __init__(self, order: Order, tally: Tally) -> None:
        self._order = order
        self._tally = tally
        self._ended: list[Ended] = []
        self._in_flight = 0
        self._has_ended = asyncio.Event()
        self._has_room = asyncio.Event()

    async def setup(self) -> None:
        connection = await asyncpg.connect(self._order.url)
        await connection.execute(SCHEMA)
        await connection.close()

    async def open(self) -> None:
        self._connection = await asyncpg.connect(self._order.url)

    async def close(self) -> None:
        await self._connection.close()

    async def bulk(self, payloads: Sequence[Payload]) -> None:
        for chunk in chunked(self._order, payloads, CHUNK):
            encoded = [json.dumps(payload) for payload in chunk]
            await self._connection.execute(ENQUEUE, [_new_id() for _ in chunk], encoded)

    async def single(self, payload: Payload) -> None:
        await self.bulk([payload])

    async def work(self) -> None:
        claiming = await asyncpg.connect(self._order.url, server_settings=PLANS)
        settling = await asyncpg.connect(self._order.url, server_settings=PLANS)
        await asyncio.gather(self._claim(claiming), self._settle(settling))

    async def _claim(self, connection: Any) -> None:
        worker = uuid4()
        x, n = "0", -1
        claim = await connection.prepare(CLAIM)
        while True:
            if self._in_flight > IN_FLIGHT:
                self._has_room.clear()
                await self._has_room.wait()
            token = uuid4()
            rows = await claim.fetch(x, n, token, worker)
            if not rows:
                await asyncio.sleep(POLL)
                continue
            x, n = rows[-1]["x"], rows[-1]["n"]
            self._in_flight += len(rows)
            for row in rows:
                self._run(token, row)
            self._has_ended.set()
            await asyncio.sleep(0)

    def _run(self, token: UUID, row: Any) -> None:
        result = json.dumps(run_now(self._note(**json.loads(row["payload"]))))
        self._ended.append(Ended(token, row["id"], row["generation"], result))

    async def _note(self, n: int, t: int = 0, filler: str = "") -> None:
        self._tally.hit(t)

    async def _settle(self, connection: Any) -> None:
        settle = await connection.prepare(SETTLE)
        while True:
            await self._has_ended.wait()
            batch = self._ended[:SETTLE_AT_MOST]
            del self._ended[:SETTLE_AT_MOST]
            if not self._ended:
                self._has_ended.clear()
            tokens, ids, generations, results = map(list, zip(*batch, strict=True))
            await settle.fetch(list(set(tokens)), tokens, ids, generations, results)
            self._in_flight -= len(batch)
            self._has_room.set()


def _new_id() -> UUID:
    """A UUID of version 7: its first bits are the time."""
    milliseconds = time.time_ns() // 1_000_000
    chance = random.getrandbits(12) << 64 | 2 << 62 | random.getrandbits(62)
    return UUID(int=milliseconds << 80 | 7 << 76 | chance)


if __name__ == "__main__":
    main(FaithfulLoop)
