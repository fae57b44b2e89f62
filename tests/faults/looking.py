"""Looks into the database from tests that have no event loop."""

import asyncio

import asyncpg

LEFT = """
SELECT sum(rows) FROM (
    SELECT count(*) FROM windlass.task UNION ALL SELECT count(*) FROM windlass.ready
    UNION ALL SELECT count(*) FROM windlass.claim UNION ALL SELECT count(*) FROM windlass.claim_task
    UNION ALL SELECT count(*) FROM windlass.running UNION ALL SELECT count(*) FROM windlass.attempt
) AS places (rows)
"""


def run(url: str, statement: str, *arguments: object) -> list[asyncpg.Record]:
    async def ask() -> list[asyncpg.Record]:
        connection = await asyncpg.connect(url)
        try:
            return list(await connection.fetch(statement, *arguments))
        finally:
            await connection.close()

    return asyncio.run(ask())
