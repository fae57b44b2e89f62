"""Connections to PostgreSQL, and the one place where driver errors become ours."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakSet

import asyncpg

from windlass.model.errors import (
    ConfigurationError,
    IdempotencyConflict,
    LeaseLost,
    NotLeader,
    PayloadError,
    StoreBusy,
    StoreUnavailable,
    TaskNotFound,
    WindlassError,
    WrongState,
)
from windlass.store.postgres.dial import Route, dial
from windlass.store.postgres.url import address, wanted_session

ISOLATION = "read committed"  # every statement relies on it
GIVE_UP_AFTER = 2.0  # seconds, on a server that does not answer to a cancellation
CONNECT_WITHIN = 10.0  # seconds until a server has let us in
LOOK_WITHIN = 10.0  # seconds for each look at a database that is opened
ANSWER_WITHIN = 60.0  # seconds for any statement: nobody waits for ever on a dead connection

# What a connection may raise that is of no use any more; a timeout is an OSError.
BROKEN = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)

_OURS = {
    "WL001": LeaseLost,
    "WL002": IdempotencyConflict,
    "WL003": WrongState,
    "WL004": NotLeader,
    "WL005": PayloadError,
    "WL006": ConfigurationError,
    "WL007": TaskNotFound,
}
# Classes of SQLSTATE that say: this server, now; not: this statement. 28 and 3D come from a pool
# that opens one more connection, long after the first was let in.
_UNAVAILABLE_CLASSES = ("28", "3D", "53", "57", "58", "XX")
_UNAVAILABLE_CODES = {
    "25006",  # a standby that takes no writes
    "25P03",  # the server gave up on an idle transaction
    "25P04",  # or on one that took too long
    "40001",
    "40P01",
}

# Types that every server has, by their fixed numbers. Of arrays the driver knows only text's, and would
# look the others up on each connection: that takes the server ten milliseconds or more, and changes
# a setting of the session, which behind a pooler is put back in another one.
_ARRAYS = [
    dict.fromkeys(("range_subtype", "attrtypoids", "basetype"))
    | {"oid": oid, "ns": "pg_catalog", "name": f"_{of}", "elemtype": element, "elemdelim": ","}
    for oid, of, element in (
        (1000, "bool", 16),
        (1005, "int2", 21),
        (1007, "int4", 23),
        (1016, "int8", 20),
        (1022, "float8", 701),
        (1185, "timestamptz", 1184),
        (1187, "interval", 1186),
        (2951, "uuid", 2950),
    )
]

_VALUE_CLASSES = ("22", "54")  # a value of the wrong form, or beyond a limit of the server


class translated:  # noqa: N801 - as it is read. No generator: every call would pay for one
    """Turn what the driver raises into what we promise; of the URL only the address is named."""

    __slots__ = ("_url",)

    def __init__(self, url: str | None = None) -> None:
        self._url = url

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            promised = promised_for(error, self._url)
            if promised is not None:
                raise promised from error


def promised_for(error: BaseException, url: str | None) -> WindlassError | None:
    """What is to be raised instead of an error, if it is the driver's."""
    if isinstance(error, asyncpg.PostgresError):
        state, said = error.sqlstate or "", _said(error)
        return ours(state, said, error.detail) or _for_state(state, said, type(error).__name__, url)
    if isinstance(
        error,
        OSError
        | asyncpg.InterfaceError
        | asyncpg.InternalClientError  # the server ended the session and the driver has not seen it yet
        | asyncio.IncompleteReadError,
    ):
        return StoreUnavailable(f"{_database(url)} {_unreachable(error)}")
    return None


def _for_state(state: str, said: str, name: str, url: str | None) -> WindlassError | None:
    if state == "55P03":
        return StoreBusy(f"somebody holds what this call needs: {said}")
    if state == "42501":
        return ConfigurationError(f"the database role lacks a right: {said}")
    if state[:2] == "08":
        return StoreUnavailable(f"the connection to {_database(url)} broke: {said}")
    if state[:2] in _UNAVAILABLE_CLASSES or state in _UNAVAILABLE_CODES:
        return StoreUnavailable(f"{_database(url)} did not carry out the call: {said}")
    if state[:2] in _VALUE_CLASSES:
        # Not the message of the driver: it repeats the value, which may be of a payload.
        return PayloadError(
            f"the database cannot hold a value of this call ({name}); nothing was written"
        )
    return None


def ours(state: str, said: str, detail: str | None) -> WindlassError | None:
    """What one of our own functions has raised."""
    kind = _OURS.get(state)
    if kind is None:
        return None
    promised = kind(said)
    if isinstance(promised, IdempotencyConflict):
        promised.index = int(detail or 0)
    return promised


def _database(url: str | None) -> str:
    where = "" if url is None else address(url)
    return f"the database at {where}" if where else "the database"


def _unreachable(error: Exception) -> str:
    if not isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        # A timeout says nothing but its name.
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        return f"cannot be reached: {reason}"
    if "'primary'" not in str(error) and "'read-write'" not in str(error):
        return f"is not what target_session_attrs of the URL asks for: {error}"
    return (
        "takes no writes: it is a standby, or set to read-only; give the URL of the primary or of "
        "all hosts, or, only to read, add target_session_attrs=any to it"
    )


def _said(error: asyncpg.PostgresError) -> str:
    # What the driver finds out by itself, as of a broken connection, has a text and no message.
    said = error.message or str(error).partition("\n")[0] or type(error).__name__
    if isinstance(error, asyncpg.DiskFullError) and "No space left" not in said:
        said = f"{said}: No space left on device"  # said by the server in a detail only
    return f"{said}; {error.hint}" if error.hint else said


class _Connection(asyncpg.Connection):  # type: ignore[misc]  # asyncpg has no types
    """A connection that a forked child leaves to its parent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _connections.add(self)
        self._unconfirmed = False
        # Undocumented: a driver without it asks the server, as it does for types it has not met.
        with suppress(AttributeError, KeyError):
            self.get_settings().register_data_types(_ARRAYS)

    async def close(self, *, timeout: float | None = None) -> None:  # noqa: ASYNC109 - the driver's
        """Take leave of the server; one that is silent or gone is left without a word.

        The driver's pool closes what is out of date in a task of which nobody hears.
        """
        with suppress(*BROKEN):
            await super().close(timeout=GIVE_UP_AFTER if timeout is None else timeout)

    def has_unconfirmed(self) -> bool:
        """Whether since the last question a commit was not confirmed by a synchronous standby.

        The server says so in a warning: by then the commit cannot be undone any more.
        """
        unconfirmed, self._unconfirmed = self._unconfirmed, False
        return unconfirmed

    def _process_log_message(self, fields: dict[str, str], last_query: str | None) -> None:
        # Not a listener: the pool wants none to be left on what is given back to it. The text is in
        # the server's language; the name of its function (R) is not.
        if fields.get("R") == "SyncRepWaitForLSN":
            self._unconfirmed = True
        super()._process_log_message(fields, last_query)


_connections: WeakSet[_Connection] = WeakSet()


def _leave_to_parent() -> None:
    """Cut a child off the sockets it shares with its parent.

    The driver takes its leave of the server when it forgets a connection, and the server would
    end the parent's session.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for connection in list(_connections):
        if not connection.is_closed():
            transport = connection._transport  # noqa: SLF001 - the one way to its socket
            descriptor = transport.get_extra_info("socket").fileno()
            if descriptor >= 0:  # not if its event loop has ended and closed it
                os.dup2(nowhere, descriptor, inheritable=False)
            connection._aborted = True  # noqa: SLF001 - or the driver complains that nobody closed it
    os.close(nowhere)


os.register_at_fork(after_in_child=_leave_to_parent)


def _session(route: Route) -> dict[str, Any]:
    """What each of our sessions asks of the server.

    A pooler in transaction mode hands each transaction to another session, so none may keep
    anything: no setting, no prepared statement.
    """
    asked = {
        "target_session_attrs": wanted_session(route.url, pooler=route.pooler),
        "timeout": CONNECT_WITHIN,
    }
    if route.pooler:
        return {"statement_cache_size": 0, **asked}
    settings = {
        "application_name": "windlass",
        "default_transaction_isolation": ISOLATION,
        "idle_in_transaction_session_timeout": "60s",
        "jit": "off",  # compiling a plan costs more than running any of ours
        # A client that is gone without a word is noticed within half a minute.
        "tcp_keepalives_idle": "15",
        "tcp_keepalives_interval": "5",
        "tcp_keepalives_count": "3",
    }
    return {"server_settings": settings, **asked}


async def connect(
    route: Route, *, answer_within: float | None = None, to_any: bool = False
) -> asyncpg.Connection:
    """Open one connection outside any pool of ours; `to_any`: to a server that takes no writes too."""
    options = {"command_timeout": answer_within, **_session(route)}
    if to_any:
        options["target_session_attrs"] = "any"
    with translated(route.url), _checked(route.url):
        return await dial(route.revive, route.url, connection_class=_Connection, **options)


@asynccontextmanager
async def connected(
    route: Route, *, answer_within: float | None = None
) -> AsyncIterator[asyncpg.Connection]:
    """Lend a connection outside any pool; one whose server is silent at the end is cut off."""
    connection = await connect(route, answer_within=answer_within)
    try:
        with translated(route.url):
            yield connection
    finally:
        await connection.close()


def looking(route: Route) -> AbstractAsyncContextManager[asyncpg.Connection]:
    """Lend a connection for short questions to a database that is opened.

    A pooler takes connections while its server is away, and keeps whoever asks waiting.
    """
    return connected(route, answer_within=LOOK_WITHIN)


@asynccontextmanager
async def transaction(connection: asyncpg.Connection, **kind: Any) -> AsyncIterator[None]:
    """Commit what is done within, or roll it back; the kind is as for the driver's own.

    Whoever gives up does not wait for a server that is silent: it rolls back by itself, once it
    finds that nobody is there.
    """
    begun = connection.transaction(**kind)
    await begun.__aenter__()
    try:
        yield
    except BaseException as error:
        await roll_back(connection, begun, error)
        raise
    await begun.__aexit__(None, None, None)


async def roll_back(
    connection: asyncpg.Connection, begun: asyncpg.transaction.Transaction, why: BaseException
) -> None:
    """Take back what was done; whatever goes wrong meanwhile, the reason is what is raised."""
    try:
        async with asyncio.timeout(GIVE_UP_AFTER):
            await begun.__aexit__(type(why), why, why.__traceback__)
    except Exception:  # noqa: BLE001 - what was raised before goes on, and is the cause
        _terminate(connection)
    except BaseException:
        _terminate(connection)
        raise


def _terminate(connection: asyncpg.Connection) -> None:
    # The pool takes a connection back by itself when its session ended meanwhile.
    with suppress(asyncpg.InterfaceError):
        connection.terminate()


async def check_isolation(route: Route, statement: str) -> None:
    """Refuse a pooler whose sessions are isolated otherwise: none of them takes it from us."""
    async with looking(route) as connection:
        level, role, database = await connection.fetchrow(statement)
    if level != ISOLATION:
        raise ConfigurationError(
            f"default_transaction_isolation is '{level}' for role '{role}' in database "
            f"'{database}', and windlass needs '{ISOLATION}', which it cannot ask for through a "
            f'pooler; run: ALTER ROLE "{role}" IN DATABASE "{database}" SET '
            f"default_transaction_isolation = '{ISOLATION}', and let the pooler reconnect"
        )


async def check_same_database(
    direct: Route, connection: asyncpg.Connection, route: Route, statement: str
) -> None:
    """Refuse a way around the pooler that leads to another database than the one that is used."""
    if direct is route:
        return
    async with looking(route) as through_pooler:
        used, other = await through_pooler.fetchrow(statement), await connection.fetchrow(statement)
    if used != other:
        raise ConfigurationError(
            f"direct_url leads to database '{other['name']}' at {address(direct.url)}, and the URL "
            f"of the app to database '{used['name']}' at {address(route.url)}; nothing was changed"
        )


async def create_pool(route: Route, *, size: int, forget: str | None = None) -> asyncpg.Pool:
    """Open a pool; `forget` is run between uses, if others than we use its connections.

    We ourselves keep nothing in a session, and spare the round trip.
    """

    async def reset(connection: asyncpg.Connection) -> None:
        if forget is None or route.pooler:  # behind a pooler it would be another session
            return
        try:
            await connection.execute(forget)
        except BROKEN:
            connection.terminate()  # whoever is next is given another

    with translated(route.url), _checked(route.url):
        return await asyncpg.create_pool(
            route.url,
            connection_class=_Connection,
            min_size=0,
            max_size=size,
            max_inactive_connection_lifetime=0,
            command_timeout=ANSWER_WITHIN,
            connect=partial(dial, route.revive),
            reset=reset,
            **_session(route),
        )


@contextmanager
def _checked(url: str) -> Iterator[None]:
    try:
        yield
    except asyncpg.InvalidCatalogNameError as error:
        raise ConfigurationError(f"{error}; create it, or correct the URL") from error
    except (
        asyncpg.InvalidAuthorizationSpecificationError,
        asyncpg.SyntaxOrAccessError,  # a parameter of the URL that the server does not know
        asyncpg.DataError,  # or one whose value it does not take
    ) as error:
        # The message of the server names the user, never the password.
        raise ConfigurationError(f"{_database(url)} refuses the connection: {error}") from error
    except asyncpg.ProtocolViolationError as error:
        if "startup parameter" not in str(error):  # whatever else a pooler has to say
            raise
        raise ConfigurationError(
            f"{_database(url)} refuses the connection: {error}; if it is a pooler in transaction "
            "mode set pooler=True, and if it is that of direct_url give one around it; if in "
            "session mode let it ignore this parameter"
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"the database URL is not valid: {error}") from error
