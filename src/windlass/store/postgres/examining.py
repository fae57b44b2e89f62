"""Look at a database for the doctor: it may be away, empty, older or newer, or closed to the role."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

import asyncpg
import msgspec

from windlass.model.errors import StoreUnavailable, WindlassError
from windlass.model.examination import (
    Access,
    ClockOffset,
    Defaults,
    Due,
    Examination,
    Index,
    Known,
    LostKey,
    Measured,
    Misplaced,
    OpenTransaction,
    OverdueClaims,
    Partition,
    PreparedTransaction,
    RegisteredWorker,
    Rights,
    SchemaState,
    Seat,
    Server,
    Slot,
    Standby,
    Table,
    Unknown,
    Waiting,
)
from windlass.store.port import ExamineStore
from windlass.store.postgres.connection import (
    check_same_database,
    connect,
    connected,
    transaction,
)
from windlass.store.postgres.history import span_of
from windlass.store.postgres.parts import PostgresOptions, PostgresParts
from windlass.store.postgres.url import address
from windlass.store.sqlfiles import Migration, SqlFiles

SOON = 5.0  # seconds for a look at a few rows
IN_A_WHILE = 15.0  # seconds for one at every task
ANSWER_WITHIN = 20.0  # seconds; a server that is silent for longer is given up
MENTION_AFTER = 10.0  # seconds that a transaction is open
DUE_FOR = 60.0  # seconds that a scheduled task is due before it is counted
CLOCK_LOOKS = 3  # the quickest answer tells the time best

T = TypeVar("T")

_FAILURES = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncio.IncompleteReadError,
    OSError,  # a timeout is one
)
_NOT_THERE = (
    asyncpg.InvalidSchemaNameError,
    asyncpg.UndefinedTableError,
    asyncpg.UndefinedColumnError,
    asyncpg.UndefinedFunctionError,
    asyncpg.UndefinedObjectError,
)
_MAKES = re.compile(
    r"^(CREATE|DROP) (?:OR REPLACE )?(TABLE|VIEW|FUNCTION|PROCEDURE) "
    r"(?:IF (?:NOT )?EXISTS )?\w+\.(\w+)",
    re.MULTILINE,
)


class Examiner(PostgresParts, ExamineStore):
    """Reads only, within limits, on a connection of its own; migrates nothing."""

    def __init__(
        self,
        options: PostgresOptions,
        *,
        lease: timedelta,
        sweep: timedelta,
        clock: Callable[[], datetime],
    ) -> None:
        super().__init__(options)
        self._lease, self._sweep = lease.total_seconds(), sweep.total_seconds()
        self._clock = clock

    async def examine(self) -> Examination:
        refusal = None
        try:
            connection, refusal = await self._connect()
        except (WindlassError, asyncpg.PostgresError) as error:
            return Examination(access=self._access(refusal=str(error), is_connected=False))
        try:
            access = self._access(
                refusal=refusal,
                session=connection.get_server_pid(),
                direct_trouble=await self._direct_trouble(),
            )
            seen = await self._look_at_all(access, _Looks(connection, self._sql))
            broke = connection.is_closed()
            return replace(seen, access=replace(access, is_broken=True)) if broke else seen
        finally:
            await connection.close()

    async def _connect(self) -> tuple[asyncpg.Connection, str | None]:
        """Connect; to a standby too, but then with the reason why no app is let in there."""
        try:
            return await connect(self._route, answer_within=ANSWER_WITHIN), None
        except StoreUnavailable as error:
            if not isinstance(error.__cause__, asyncpg.TargetServerAttributeNotMatched):
                raise
            refusal = str(error)
        return await connect(self._route, answer_within=ANSWER_WITHIN, to_any=True), refusal

    async def _direct_trouble(self) -> str | None:
        if self._direct is self._route:
            return None
        try:
            async with connected(self._direct, answer_within=SOON) as direct:
                text = self._sql.statement("which_database")
                await check_same_database(self._direct, direct, self._route, text)
        except (WindlassError, asyncpg.PostgresError) as error:
            return str(error)
        return None

    def _access(self, **details: Any) -> Access:
        return Access(
            address=address(self._route.url),
            pooler=self._options.pooler,
            has_direct=self._options.direct_url is not None,
            **details,
        )

    async def _look_at_all(self, access: Access, look: "_Looks") -> Examination:
        return Examination(
            access=access,
            schema_name=self._sql.schema,
            migrations=[(one.number, str(one)) for one in self._sql.migrations()],
            server=await look.one(Server, "examine_server"),
            clock=await look.clock(self._clock),
            moved_clock=await look.value("examine_moved_clock"),
            schema=await look.schema(),
            applied=await look.applied(),
            missing=await look.missing(),
            rights=await look.one(Rights, "examine_rights"),
            workers=await look.workers(),
            seat=await look.one(Seat, "examine_leadership"),
            claims=await look.many(OverdueClaims, "examine_claims", self._lease, self._sweep),
            types=await look.types(),
            waiting=await look.many(Waiting, "examine_waiting", within=IN_A_WHILE),
            due=await look.one(Due, "examine_due", DUE_FOR),
            today=await look.value("read_today"),
            partitions=await look.partitions(),
            retentions=await look.column("examine_retentions"),
            tables=await look.many(Table, "examine_tables"),
            indexes=await look.many(Index, "examine_indexes"),
            transactions=await look.many(OpenTransaction, "examine_sessions", MENTION_AFTER),
            prepared=await look.many(PreparedTransaction, "examine_prepared"),
            slots=await look.many(Slot, "examine_slots"),
            standbys=await look.many(Standby, "examine_standbys"),
            misplaced=await look.many(Misplaced, "examine_places", within=IN_A_WHILE),
            ended=await look.many(Misplaced, "examine_ended", within=IN_A_WHILE),
            lost_keys=await look.lost_keys(),
        )


class _Looks:
    """One statement each, in a transaction that cannot write; a failure is a value too."""

    def __init__(self, connection: asyncpg.Connection, sql: SqlFiles) -> None:
        self._connection = connection
        self._sql = sql

    async def many(
        self, kind: type[T], name: str, *arguments: Any, within: float = SOON
    ) -> Measured[Sequence[T]]:
        """Look at rows of this kind, whose columns are its fields."""
        return await self._measured(
            within,
            lambda: self._rows(name, *arguments, within=within),
            lambda rows: _all(kind, rows),
        )

    async def one(self, kind: type[T], name: str, *arguments: Any) -> Measured[T]:
        """Look at the only row."""
        return await self._measured(
            SOON, lambda: self._rows(name, *arguments), lambda rows: _all(kind, rows)[0]
        )

    async def value(self, name: str) -> Measured[Any]:
        """Look at the only value."""
        return await self._measured(SOON, lambda: self._rows(name), lambda rows: rows[0][0])

    async def column(self, name: str, *arguments: Any) -> Measured[Sequence[Any]]:
        """Look at the first value of each row."""
        return await self._measured(
            SOON, lambda: self._rows(name, *arguments), lambda rows: [row[0] for row in rows]
        )

    async def schema(self) -> Measured[SchemaState | None]:
        """Look at the schema; there may be none."""
        return await self._measured(
            SOON,
            lambda: self._rows("examine_schema"),
            lambda rows: _all(SchemaState, rows)[0] if rows else None,
        )

    async def applied(self) -> Measured[frozenset[int]]:
        """Look at which migrations were applied."""
        return await self._measured(
            SOON,
            lambda: self._rows("list_migrations"),
            lambda rows: frozenset(row[0] for row in rows),
        )

    async def missing(self) -> Measured[Sequence[str]]:
        """Look for what the migrations make and somebody took away."""
        made = made_by(self._sql.migrations())
        kinds, names = [kind for kind, _ in made], [name for _, name in made]
        return await self.column("examine_missing", kinds, names)

    async def workers(self) -> Measured[Sequence[RegisteredWorker]]:
        """Look at the registry."""
        return await self._measured(
            SOON, lambda: self._rows("examine_workers"), lambda rows: [_worker(row) for row in rows]
        )

    async def types(self) -> Measured[Mapping[str, Defaults]]:
        """Look at what was registered last."""

        def by_name(rows: Sequence[asyncpg.Record]) -> Mapping[str, Defaults]:
            named = [dict(row) for row in rows]
            return {row.pop("name"): Defaults(**row) for row in named}

        return await self._measured(SOON, lambda: self._rows("examine_types"), by_name)

    async def partitions(self) -> Measured[Sequence[Partition]]:
        """Look at the tables of the history."""
        return await self._measured(
            SOON,
            lambda: self._rows("examine_partitions"),
            lambda rows: [_partition(row) for row in rows],
        )

    async def lost_keys(self) -> Measured[Sequence[LostKey]]:
        """Look for keys whose task is gone, twice.

        The partitions of a statement are those of its beginning: a task may have moved to a newer one.
        """
        name = "examine_keys"
        found = await self.many(LostKey, name, None, within=IN_A_WHILE)
        if isinstance(found, Unknown) or not found.value:
            return found
        suspects = [UUID(key.task_id) for key in found.value]
        return await self.many(LostKey, name, suspects, within=IN_A_WHILE)

    async def clock(self, here: Callable[[], datetime]) -> Measured[ClockOffset]:
        """Compare the server's clock with ours."""

        async def compared() -> list[ClockOffset]:
            offsets = []
            for _ in range(CLOCK_LOOKS):
                before = here()
                there = await self._connection.fetchval(self._sql.statement("examine_clock"))
                half = (here() - before) / 2
                ahead = (there - (before + half)).total_seconds()
                offsets.append(ClockOffset(ahead, half.total_seconds()))
            return offsets

        return await self._measured(
            SOON, compared, lambda offsets: min(offsets, key=lambda offset: offset.give_or_take)
        )

    async def _rows(
        self, name: str, *arguments: Any, within: float = SOON
    ) -> Sequence[asyncpg.Record]:
        # One snapshot for the statement, and proof that nothing is written.
        async with transaction(self._connection, isolation="repeatable_read", readonly=True):
            limits = self._sql.statement("limit_examination")
            await self._connection.execute(limits, str(round(within * 1000)))
            rows: Sequence[asyncpg.Record] = await self._connection.fetch(
                self._sql.statement(name), *arguments
            )
            return rows

    async def _measured(
        self, within: float, ask: Callable[[], Awaitable[Any]], build: Callable[[Any], T]
    ) -> Measured[T]:
        try:
            return Known(build(await ask()))
        except IndexError:
            return Unknown("a row that belongs there is missing")
        except _FAILURES as error:
            return Unknown(_why(error, within), is_absent=isinstance(error, _NOT_THERE))


def made_by(migrations: Sequence[Migration]) -> list[tuple[str, str]]:
    """Return the tables, views, functions and procedures that are there after these, by kind and name."""
    made: dict[tuple[str, str], bool] = {}
    for migration in migrations:
        for verb, kind, name in _MAKES.findall(migration.sql):
            made[kind, name] = verb == "CREATE"
    return [thing for thing, is_there in made.items() if is_there]


def _why(error: Exception, within: float) -> str:
    if isinstance(error, _NOT_THERE):
        return f"the schema is not what this version needs: {error.message}"
    if isinstance(error, asyncpg.InsufficientPrivilegeError):
        return f"the role may not look: {error.message}"
    if isinstance(error, asyncpg.LockNotAvailableError):
        return "somebody holds a lock that keeps out even readers"
    if isinstance(error, asyncpg.QueryCanceledError | TimeoutError):
        return f"it could not be finished within {within:g} s"
    if isinstance(error, asyncpg.InterfaceError | asyncio.IncompleteReadError | OSError):
        return "the connection broke"
    # Its first line: what follows may quote the statement.
    return f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")


def _all(kind: type[T], rows: Sequence[asyncpg.Record]) -> list[T]:
    return [kind(**row) for row in rows]


def _worker(row: asyncpg.Record) -> RegisteredWorker:
    columns = dict(row)
    said = columns.pop("defaults")
    try:
        defaults = None if said is None else msgspec.json.decode(said, type=dict[str, Defaults])
    except msgspec.ValidationError:  # it is of a version that says something else
        defaults = None
    return RegisteredWorker(**columns, defaults=defaults)


def _partition(row: asyncpg.Record) -> Partition:
    columns = dict(row)
    if columns["is_ours"]:
        try:
            first, past = span_of(columns["name"])
        except ValueError:  # digits that are no day
            columns["is_ours"] = False
        else:
            return Partition(**columns, first=first, past=past)
    return Partition(**columns)
