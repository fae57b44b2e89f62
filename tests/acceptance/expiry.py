"""Lets leases run out in the store, as if their worker had been silent for too long."""

from datetime import timedelta
from typing import Any

from windlass import App


async def expire_claims(app: App) -> None:
    store: Any = await app.store()
    if app.url == "memory:":
        past = store._clock() - timedelta(seconds=1)
        for claim in store._claims.values():
            claim.expires_at = past
        return
    async with store._run.transaction() as connection:
        await connection.execute("UPDATE windlass.claim SET expires_at = '-infinity'")
