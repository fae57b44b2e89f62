"""Connections that a caller brings: our statements, run in its own transaction by its own driver.

None of the drivers is a dependency. Whoever has such a connection has loaded its driver.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import asyncpg

from windlass.model.errors import ConfigurationError
from windlass.store.port import Guest
from windlass.store.postgres.connection import ours

KINDS = "psycopg 3, asyncpg, SQLAlchemy 2 (connection or session) or Django"
_PLACE = re.compile(r"\$(\d)")
_COMMENT = re.compile(r"^--.*\n", re.MULTILINE)


def guest_of(connection: Any, *, is_async: bool) -> Guest:
    """Wrap a connection of the caller, or raise `TypeError`."""
    guest = _guest_of(connection)
    if guest.is_async and not is_async:
        raise TypeError(
            "connection is asynchronous, and this call is not: await its twin without _sync, or "
            "give a synchronous one"
        )
    if is_async and not guest.is_async:
        raise TypeError(
            "connection is synchronous, and this call is not: use its twin with _sync "
            "(enqueue_sync, ctx.complete_sync), from a thread, or give an asynchronous one"
        )
    return guest


def _guest_of(connection: Any) -> Guest:
    for module, kinds in _KINDS.items():
        if module in sys.modules:
            for path, wrap in kinds.items():
                kind = _found(module, path)
                if kind is not None and isinstance(connection, kind):
                    return wrap(connection)
    raise TypeError(
        f"connection is of type {type(connection).__module__}.{type(connection).__qualname__}; "
        f"give one of {KINDS}"
    )


def _found(module: str, path: str) -> type | None:
    found: Any = sys.modules[module]
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, type) else None


@cache  # there are few statements
def _written(statement: str, place: str) -> str:
    """The statement as a driver wants it, with its parameters in order and each used once."""
    return _PLACE.sub(place, _COMMENT.sub("", statement))


@cache
def _has_rows(statement: str) -> bool:
    """Whether it answers with rows: in a pipeline the driver cannot tell before they are fetched."""
    return _COMMENT.sub("", statement).casefold().startswith("select")


class _Psycopg:
    is_async = False

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def commits_by_itself(self) -> bool:
        is_idle = self._connection.info.transaction_status == 0
        return bool(self._connection.autocommit and is_idle)

    async def fetch(self, statement: str, *texts: str | None) -> Sequence[Sequence[Any]]:
        psycopg = sys.modules["psycopg"]  # its own cursors and rows, whatever the caller's are
        with told(), psycopg.Cursor(self._connection, row_factory=psycopg.rows.tuple_row) as cursor:
            cursor.execute(_written(statement, "%s"), texts)
            rows: list[Any] = cursor.fetchall() if _has_rows(statement) else []
            return rows

    async def discard(self) -> None:
        self._connection.close()


class _AsyncPsycopg(_Psycopg):
    is_async = True

    async def fetch(self, statement: str, *texts: str | None) -> Sequence[Sequence[Any]]:
        psycopg = sys.modules["psycopg"]
        plain = psycopg.rows.tuple_row
        with told():
            async with psycopg.AsyncCursor(self._connection, row_factory=plain) as cursor:
                await cursor.execute(_written(statement, "%s"), texts)
                fetched: list[Any] = await cursor.fetchall() if _has_rows(statement) else []
                return fetched

    async def discard(self) -> None:
        await self._connection.close()


class _Asyncpg:
    is_async = True

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def commits_by_itself(self) -> bool:
        return not self._connection.is_in_transaction()

    async def fetch(self, statement: str, *texts: str | None) -> Sequence[Sequence[Any]]:
        statement = _written(statement, r"$\1::text")  # whatever codecs the caller has set
        with told():
            fetched: list[Any] = await self._connection.fetch(statement, *texts)
            return fetched

    async def discard(self) -> None:
        self._connection.terminate()


class _Sqlalchemy:
    is_async = False

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        dialect = _dialect(connection)
        if dialect != "postgresql":
            raise TypeError(f"connection is to a database of {dialect}; give one to PostgreSQL")

    async def commits_by_itself(self) -> bool:
        own = self._connection.connection  # of a session, it is a call
        pooled = own().connection if callable(own) else own
        return _is_autocommit(pooled)

    async def fetch(self, statement: str, *texts: str | None) -> Sequence[Sequence[Any]]:
        with told():
            return _rows(self._connection.execute(*_named(statement, texts)))

    async def discard(self) -> None:
        self._connection.invalidate()


class _AsyncSqlalchemy(_Sqlalchemy):
    is_async = True

    async def commits_by_itself(self) -> bool:
        own = self._connection
        if not hasattr(own, "get_raw_connection"):  # a session, which may have to dial
            own = await own.connection()
        return _is_autocommit(await own.get_raw_connection())

    async def fetch(self, statement: str, *texts: str | None) -> Sequence[Sequence[Any]]:
        with told():
            return _rows(await self._connection.execute(*_named(statement, texts)))

    async def discard(self) -> None:
        await self._connection.invalidate()


def _is_autocommit(pooled: Any) -> bool:
    return bool(getattr(pooled.dbapi_connection, "autocommit", False))


def _dialect(connection: Any) -> str:
    try:
        bound = connection.get_bind() if hasattr(connection, "get_bind") else connection
    except sys.modules["sqlalchemy"].exc.UnboundExecutionError as error:
        raise TypeError(
            "connection is a session whose database depends on the mapper (binds=); give "
            "session.connection(bind_arguments={'bind': engine}) instead"
        ) from error
    name: str = bound.dialect.name
    return name


def _named(statement: str, texts: Sequence[str | None]) -> tuple[Any, dict[str, str | None]]:
    sqlalchemy = sys.modules["sqlalchemy"]
    given = {f"text{place}": value for place, value in enumerate(texts, 1)}
    named = sqlalchemy.text(_written(statement, r":text\1"))
    return named.bindparams(
        *(sqlalchemy.bindparam(one, type_=sqlalchemy.String) for one in given)
    ), given


def _rows(result: Any) -> list[Any]:
    return list(result.all()) if result.returns_rows else []


class _Django:
    is_async = False

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        if connection.vendor != "postgresql":
            raise TypeError(
                f"connection is to a database of {connection.vendor}; give one to PostgreSQL"
            )

    async def commits_by_itself(self) -> bool:
        return bool(self._connection.get_autocommit())

    async def fetch(self, statement: str, *texts: str | None) -> Sequence[Sequence[Any]]:
        with told(), self._connection.cursor() as cursor:
            cursor.execute(_written(statement, "%s"), texts)
            rows: list[Any] = cursor.fetchall() if cursor.description else []
            return rows

    async def discard(self) -> None:
        self._connection.close()


_KINDS: dict[str, dict[str, Callable[[Any], Guest]]] = {
    "psycopg": {"Connection": _Psycopg, "AsyncConnection": _AsyncPsycopg},
    "asyncpg": {"Connection": _Asyncpg},
    "sqlalchemy": {"Connection": _Sqlalchemy},
    "sqlalchemy.orm": {"Session": _Sqlalchemy, "scoped_session": _Sqlalchemy},
    "sqlalchemy.ext.asyncio": {
        "AsyncConnection": _AsyncSqlalchemy,
        "AsyncSession": _AsyncSqlalchemy,
        "async_scoped_session": _AsyncSqlalchemy,
    },
    "django.db": {
        "backends.base.base.BaseDatabaseWrapper": _Django,
        "ConnectionProxy": _Django,
    },
}


@contextmanager
def told() -> Iterator[None]:
    """Turn what our functions raise into what we promise; every other error is the caller's.

    A failure to serialise is among those: it is the caller's transaction that has to be repeated.
    """
    try:
        yield
    except Exception as error:
        state, said, detail = _said_by_server(error)
        if state in ("3F000", "42883"):
            raise ConfigurationError(
                f"the database of this connection lacks what windlass needs ({said}); "
                "give a connection to the database of the app, or run: windlass migrate"
            ) from error
        if state == "42501":
            raise ConfigurationError(
                f"the role of this connection lacks a right: {said}; let an administrator grant "
                f"{'USAGE' if 'schema' in said else 'EXECUTE'} on it"
            ) from error
        promised = ours(state, said, detail)
        if promised is None:
            raise
        raise promised from error


def _said_by_server(error: BaseException | None) -> tuple[str, str, str | None]:
    """State, message and detail of what the server raised, however many drivers have wrapped it."""
    while error is not None:
        if isinstance(error, asyncpg.PostgresError):
            said = [error.sqlstate, error.message, error.detail, error.hint]
        elif (given := getattr(error, "diag", None)) is not None:
            said = [given.sqlstate, given.message_primary, given.message_detail, given.message_hint]
        else:
            said = [None]
        if said[0] is not None:
            state, message, detail, hint = said
            return state, f"{message}; {hint}" if hint else message, detail
        error = getattr(error, "orig", None) or error.__cause__
    return "", "", None
