"""Breakers that workers share, on PostgreSQL."""

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from windlass.model.breaker import SharedBreaker
from windlass.store.postgres.parts import PostgresParts

PATIENCE = timedelta(seconds=1)  # with a row that somebody holds


class BreakerVerbs(PostgresParts):
    """What one worker has found out, for the others."""

    async def breakers(self, names: Sequence[str]) -> list[SharedBreaker]:
        rows = await self._run.fetch("read_breakers", list(names))
        return [
            SharedBreaker(row["name"], row["epoch"], None if row["is_closed"] else row["open_for"])
            for row in rows
        ]

    async def open_breaker(self, name: str, *, epoch: int, recovery: timedelta) -> bool:
        return bool(await self._run.fetchval("open_breaker", name, epoch, recovery, PATIENCE))

    async def close_breaker(self, name: str, *, epoch: int) -> bool:
        return bool(await self._run.fetchval("close_breaker", name, epoch, PATIENCE))

    async def probe_breaker(self, name: str, *, epoch: int, holder: UUID, lease: timedelta) -> bool:
        arguments = (name, epoch, holder, lease, PATIENCE)
        return bool(await self._run.fetchval("probe_breaker", *arguments))

    async def leave_breaker(self, name: str, *, holder: UUID) -> None:
        await self._run.execute("leave_breaker", name, holder, PATIENCE)
