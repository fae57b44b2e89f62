"""The schema: its migrations, applied in order, forward only, under a lock."""

import asyncio
from functools import partial

import asyncpg

from windlass.model.errors import ConfigurationError, StoreBusy, StoreUnavailable
from windlass.store.postgres.connection import check_same_database, connected, looking, transaction
from windlass.store.postgres.dial import Route
from windlass.store.postgres.statements import Statements
from windlass.store.sqlfiles import Migration, SqlFiles
from windlass.telemetry import emit

MINIMUM_SERVER = 15
ENCODING = "UTF8"
TELL_AFTER = 5.0  # seconds of waiting for another session that migrates


class Schema:
    """What the code needs of the database, and what the database has."""

    def __init__(self, route: Route, direct: Route, sql: SqlFiles) -> None:
        self._route = route
        self._direct = direct  # only what is to be applied needs it: an app can open without
        self._sql = sql

    @property
    def up_to_date(self) -> str:
        """What is said of a schema that lacks nothing."""
        return f"schema '{self._sql.schema}' is up to date: {self._sql.migrations()[-1]}"

    async def pending(self) -> list[Migration]:
        """Return the migrations that were not applied yet; refuse a schema newer than the code."""
        async with looking(self._route) as connection:
            self._check_server(connection)
            return await self._pending(connection)

    async def migrate(self) -> list[Migration]:
        """Apply what is pending, each migration in a transaction of its own; return what was."""
        try:
            async with connected(self._direct) as connection:
                self._check_server(connection)
                text = self._sql.statement("which_database")
                await check_same_database(self._direct, connection, self._route, text)
                return await self._apply(connection)
        except StoreUnavailable as error:
            if self._direct is self._route or isinstance(error, StoreBusy):
                raise
            raise StoreUnavailable(f"direct_url, over which migrations go: {error}") from error

    def script(self, migrations: list[Migration]) -> str:
        """Return SQL that an administrator can run by hand."""
        prelude = [self._sql.statement("create_schema")]
        steps = [
            f"BEGIN;\n{migration.sql}\n{self._note(migration)};\nCOMMIT;"
            for migration in migrations
        ]
        return "\n\n".join([*prelude, *steps])

    async def _apply(self, connection: asyncpg.Connection) -> list[Migration]:
        if not await self._pending(connection):
            return []
        await self._check_name(connection)
        try:
            async with transaction(connection):
                await self._lock(connection)
                await connection.execute(self._sql.statement("create_schema"))
            return [
                migration
                for migration in self._sql.migrations()
                if await self._apply_one(connection, migration)
            ]
        except asyncpg.InsufficientPrivilegeError as error:
            raise ConfigurationError(
                f"this database role may not migrate the schema '{self._sql.schema}' ({error}); "
                "let an administrator run: windlass migrate"
            ) from error

    async def _apply_one(self, connection: asyncpg.Connection, migration: Migration) -> bool:
        try:
            async with transaction(connection):
                await self._lock(connection)
                # Whoever held the lock before may have applied it meanwhile.
                if migration.number in await self._applied(connection):
                    return False
                await connection.execute(migration.sql)
                await connection.execute(self._note(migration))
                return True
        except asyncpg.LockNotAvailableError as error:
            raise StoreBusy(await self._who_holds(connection, migration, error)) from error

    async def _who_holds(
        self, connection: asyncpg.Connection, migration: Migration, error: asyncpg.PostgresError
    ) -> str:
        rows = await connection.fetch(self._sql.statement("list_lock_holders"))
        holders = ", ".join(f"{pid} ({program or 'unnamed'})" for pid, program in rows)
        return (
            f"migration {migration} was not applied: another session "
            f"holds a lock that it needs in the schema '{self._sql.schema}' ({error.message}); "
            f"sessions with locks there: {holders or 'none any more'}; let them finish, stop the "
            "workers, or end one with pg_terminate_backend(); then run: windlass migrate"
        )

    async def check(self, run: Statements) -> None:
        """Raise if the schema of a store that is open lacks what the code needs.

        A newer one is no trouble: what runs goes on during a rolling deploy, until it is replaced.
        """
        applied = {row["number"] for row in await run.fetch("list_migrations")}
        self.refuse_pending(self._lacking(applied))

    def refuse_pending(self, pending: list[Migration]) -> None:
        """Raise if something is pending."""
        if pending:
            raise ConfigurationError(
                f"the schema '{self._sql.schema}' lacks migration {pending[0]}; "
                "run: windlass migrate"
            )

    async def _pending(self, connection: asyncpg.Connection) -> list[Migration]:
        return self._missing(await self._applied(connection))

    def _missing(self, applied: set[int]) -> list[Migration]:
        newest, known = max(applied, default=0), self._sql.migrations()[-1].number
        if newest > known:
            raise ConfigurationError(
                f"the schema '{self._sql.schema}' has migration {newest:04d}, newer than this "
                f"version of windlass knows ({known:04d}); upgrade windlass"
            )
        return self._lacking(applied)

    def _lacking(self, applied: set[int]) -> list[Migration]:
        return [one for one in self._sql.migrations() if one.number not in applied]

    async def _applied(self, connection: asyncpg.Connection) -> set[int]:
        if await connection.fetchval(self._sql.statement("has_migrations")) is None:
            return set()
        rows = await connection.fetch(self._sql.statement("list_migrations"))
        return {row["number"] for row in rows}

    async def _lock(self, connection: asyncpg.Connection) -> None:
        # The other migration may take as long as it needs, but nobody waits for it unknowingly.
        waiting = partial(emit, "migration.waiting", schema=self._sql.schema, behind="another one")
        telling = asyncio.get_running_loop().call_later(TELL_AFTER, waiting)
        try:
            await connection.execute(self._sql.statement("lock_migrations"))
        finally:
            telling.cancel()

    def _note(self, migration: Migration) -> str:
        text = self._sql.statement("note_migration")
        return text.replace("NUMBER", str(migration.number)).replace("NAME", migration.name)

    async def _check_name(self, connection: asyncpg.Connection) -> None:
        if await connection.fetchval(self._sql.statement("is_keyword"), self._sql.schema):
            raise ConfigurationError(
                f"schema '{self._sql.schema}' is a word of SQL; choose another name"
            )

    def _check_server(self, connection: asyncpg.Connection) -> None:
        version = connection.get_server_version()
        if version.major < MINIMUM_SERVER:
            raise ConfigurationError(
                f"PostgreSQL {version.major} is too old; windlass needs {MINIMUM_SERVER} or newer"
            )
        encoding = getattr(connection.get_settings(), "server_encoding", ENCODING)
        if encoding != ENCODING:
            raise ConfigurationError(
                f"the encoding of the database is {encoding}, and windlass needs {ENCODING}; make "
                f"another: CREATE DATABASE name ENCODING '{ENCODING}' TEMPLATE template0"
            )
