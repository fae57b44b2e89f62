"""The PostgreSQL adapter: one method is one transaction, nearly always one statement file."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from uuid import UUID

from windlass.store.port import Listening, Store, Wake
from windlass.store.postgres.breaking import BreakerVerbs
from windlass.store.postgres.claiming import ClaimVerbs
from windlass.store.postgres.completing import CompleteVerbs
from windlass.store.postgres.connection import check_isolation, create_pool
from windlass.store.postgres.dead import DeadVerbs
from windlass.store.postgres.enqueueing import EnqueueVerbs
from windlass.store.postgres.explaining import ExplainVerbs
from windlass.store.postgres.listener import DEAF, Listener
from windlass.store.postgres.parts import PostgresOptions
from windlass.store.postgres.reading import ReadVerbs
from windlass.store.postgres.ruling import RuleVerbs
from windlass.store.postgres.scheduling import ScheduleVerbs
from windlass.store.postgres.schema import Schema
from windlass.store.postgres.settling import SettleVerbs
from windlass.telemetry import emit

__all__ = ["PostgresOptions", "PostgresStore"]

CLOSE_WITHIN = 5.0  # seconds for the server to take its leave of every connection


class PostgresStore(
    EnqueueVerbs,
    ClaimVerbs,
    SettleVerbs,
    CompleteVerbs,
    ReadVerbs,
    ExplainVerbs,
    DeadVerbs,
    BreakerVerbs,
    RuleVerbs,
    ScheduleVerbs,
    Store,
):
    """Tasks in PostgreSQL. Belongs to the event loop that opened it."""

    def __init__(self, options: PostgresOptions) -> None:
        super().__init__(options)
        self._schema = Schema(self._route, self._direct, self._sql)

    @property
    def schema(self) -> Schema:
        """The schema, for whoever migrates or checks it."""
        return self._schema

    async def open(self) -> None:
        if self._run.pool is not None:
            return
        if self._options.pooler:
            await check_isolation(self._route, self._sql.statement("read_isolation"))
        pending = await self._schema.pending()
        if pending and self._options.auto_migrate:
            await self._schema.migrate()
        else:
            self._schema.refuse_pending(pending)
        # Handlers may hold theirs for long: those of the worker itself are others.
        for statements, forget in ((self._run, None), (self._handlers, "forget_session")):
            statements.pool = await create_pool(
                self._route,
                size=self._options.pool_size,
                forget=forget and self._sql.statement(forget),
            )

    async def close(self) -> None:
        await self._stop_looking_behind()
        for statements in (self._run, self._handlers):
            await statements.close(CLOSE_WITHIN)

    def beside(self) -> "PostgresStore":
        return PostgresStore(replace(self._options, pool_size=1, auto_migrate=False))

    async def check(self) -> None:
        await self._schema.check(self._run)

    def listen(
        self,
        wake: Wake,
        *,
        ordered: Callable[[UUID], None] | None = None,
        scheduled: Callable[[], None] | None = None,
    ) -> AbstractAsyncContextManager[Listening]:
        if self._direct.pooler:
            return _deaf()
        return Listener(self._direct, self._sql, self._run, ordered, scheduled).listening(wake)


@asynccontextmanager
async def _deaf() -> AsyncIterator["_Deaf"]:
    """Listen to nothing: a LISTEN would stay in a session of the pooler, for nobody."""
    emit("listener.deaf", reason=DEAF.format("there is no way around the pooler"))
    yield _Deaf()


class _Deaf:
    trouble = ""  # nothing is broken: polling finds the work
