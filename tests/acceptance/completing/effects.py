"""What handlers did, and what is left of their tasks."""

from typing import Any

import asyncpg

from acceptance.quick import QUICK
from windlass import App, Handle

PATIENT = {**QUICK, "lease": 30, "heartbeat": 10}


async def effects(look: asyncpg.Connection) -> int:
    count: int = await look.fetchval("SELECT count(*) FROM effects")
    return count


async def check_nothing_left(look: asyncpg.Connection) -> None:
    for table in ("task", "claim", "claim_task", "completed_within", "running", "attempt"):
        assert await look.fetch(f"SELECT FROM windlass.{table}") == [], table


async def done(app: App, handle: Handle) -> Any:
    await app.run_worker(until_idle=True)
    return await handle.get()
