"""Moves the clock of a PostgreSQL store: its one clock function is replaced in the test's database."""

from datetime import datetime, timedelta

import asyncpg

REPLACE = """
CREATE TABLE IF NOT EXISTS public.test_clock (moved interval NOT NULL, frozen_at timestamptz);
TRUNCATE public.test_clock;
INSERT INTO public.test_clock VALUES ('0', NULL);
CREATE OR REPLACE FUNCTION windlass.clock() RETURNS timestamptz LANGUAGE sql VOLATILE AS
'SELECT coalesce(frozen_at, clock_timestamp() + moved) FROM public.test_clock';
"""


class PostgresClock:
    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    @classmethod
    async def install(cls, url: str) -> "PostgresClock":
        connection = await asyncpg.connect(url)
        await connection.execute(REPLACE)
        return cls(connection)

    async def advance(self, delta: timedelta) -> None:
        await self._connection.execute("UPDATE public.test_clock SET moved = moved + $1", delta)

    async def freeze(self, moment: datetime) -> None:
        await self._connection.execute("UPDATE public.test_clock SET frozen_at = $1", moment)

    async def close(self) -> None:
        await self._connection.close()
