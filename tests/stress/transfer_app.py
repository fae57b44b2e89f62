"""The application whose transfers happen once each: money moves with the success of its task."""

import asyncio
import os

import asyncpg
import psycopg

from windlass import App, Context

URL = os.environ["WINDLASS_DATABASE_URL"]
MOVE = """
WITH taken AS (UPDATE account SET balance = balance - 1 WHERE id = least({0}, {1})),
    other AS (UPDATE account SET balance = balance + 1 WHERE id = greatest({0}, {1}))
INSERT INTO transfer VALUES ({2})
"""

app = App(lease=4, heartbeat=1, sweep=1, leader_term=3, concurrency=10, buffer=20)


def statement(n: int) -> str:
    return MOVE.format(n % 50, n * 7 % 50 + 50, n)


@app.task(retry=100)
async def on_a_connection_of_ours(ctx: Context, n: int) -> None:
    async with ctx.transaction() as connection:
        await connection.execute(statement(n))
        await asyncio.sleep(n % 10 / 100)
        ctx.complete(n)


@app.task(retry=100)
async def on_its_own_connection(ctx: Context, n: int) -> None:
    connection = await asyncpg.connect(URL, timeout=10)
    try:
        async with connection.transaction():
            # As ours does: a worker that stands still must not hold the accounts.
            await connection.execute("SET LOCAL idle_in_transaction_session_timeout = '4s'")
            await connection.execute(statement(n))
            await asyncio.sleep(n % 10 / 100)
            await ctx.complete(n, connection=connection)
    finally:
        await connection.close(timeout=2)


@app.task(retry=100)
def in_a_thread(ctx: Context, n: int) -> None:
    with psycopg.connect(URL, connect_timeout=10) as connection:
        connection.execute("SET LOCAL idle_in_transaction_session_timeout = '4s'")
        connection.execute(statement(n))
        ctx.complete_sync(n, connection=connection)
