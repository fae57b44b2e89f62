"""Complete on PostgreSQL: a handler's effects and its task's success in one commit."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta

import asyncpg

from windlass.model.errors import Fail, StoreUnavailable
from windlass.model.task import Completion, Fence
from windlass.store.port import Guest
from windlass.store.postgres.connection import roll_back, translated
from windlass.store.postgres.guests import guest_of
from windlass.store.postgres.parts import PostgresParts


class CompleteVerbs(PostgresParts):
    """What a handler needs that ends its task in a transaction of its own."""

    async def check_completion(self, fence: Fence) -> None:
        kept = self._options.retention
        has_place = await self._run.fetchval("check_completion", *fence, kept.ended, kept.keys)
        if not has_place:
            rows = await self._run.fetch("list_task_retentions", [fence.task_id])
            await self._history.prepare([timedelta(seconds=row[0]) for row in rows])

    @asynccontextmanager
    async def completing(
        self, completion: Completion, *, idle: timedelta
    ) -> AsyncIterator[asyncpg.Connection]:
        url = self._options.url
        async with self._handlers.lend() as connection:
            begun = connection.transaction()
            with translated(url):
                await begun.start()
            try:
                with translated(url):
                    begin = self._sql.statement("begin_completion")
                    begun_at = await connection.fetchval(begin, idle)
                yield connection
                with translated(url):
                    await self._check_unbroken(connection, begun_at, idle)
                    await self._complete(guest_of(connection, is_async=True), completion)
            except BaseException as error:
                await roll_back(connection, begun, error)
                raise
            completion.is_asked = True
            with translated(url):
                await begun.commit()

    async def _check_unbroken(
        self, connection: asyncpg.Connection, begun_at: datetime, idle: timedelta
    ) -> None:
        try:
            still = await connection.fetchval(self._sql.statement("limit_idling"))
        except (asyncpg.InterfaceError, asyncpg.ConnectionDoesNotExistError) as error:
            raise StoreUnavailable(
                "the session of ctx.transaction() has ended: it idled for longer than the lease "
                f"({idle.total_seconds():g} s), or somebody closed it; nothing was done"
            ) from error
        if still != begun_at:
            # What was done before may be committed: to repeat it is for a person to decide.
            raise Fail(
                "the transaction of ctx.transaction() was ended inside its block; leave COMMIT and "
                "ROLLBACK to the block, and take back parts in `async with connection.transaction():`"
            )

    async def complete_within(self, guest: Guest, completion: Completion) -> None:
        completion.is_asked = True
        await self._complete(guest, completion)

    async def _complete(self, guest: Guest, completion: Completion) -> None:
        kept, after = self._options.retention, completion.started_after
        statement = "complete_and_call" if completion.calls_back else "complete_task"
        await guest.fetch(
            self._sql.statement(statement),
            *map(str, completion.fence),
            None if after is None else repr(after),
            completion.result,
            f"{kept.ended.total_seconds()} seconds",
            f"{kept.keys.total_seconds()} seconds",
        )
