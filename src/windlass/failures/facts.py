"""What an exception says of itself, without importing the library that it comes from."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from math import isfinite
from typing import Any

from windlass.failures.describe import text_of
from windlass.model.failure import ErrorFacts, Plain

# Where the libraries that people use keep it: httpx, requests, aiohttp, botocore, urllib.
STATUS = (
    "response.status_code",
    "response.status",
    "status_code",
    "status",
    "response.ResponseMetadata.HTTPStatusCode",
)
HEADERS = ("response.headers", "headers", "response.ResponseMetadata.HTTPHeaders")
# asyncpg and psycopg; psycopg2; what SQLAlchemy wraps; what Django wraps.
SQLSTATE = ("sqlstate", "pgcode", "orig.sqlstate", "orig.pgcode", "__cause__.sqlstate")

LENGTH_OF_SQLSTATE = 5
LONGEST_RETRY_AFTER = 86_400.0  # seconds: whoever says more is wrong, or will not be missed
DEEPEST_GROUP = 3  # levels of exception groups
LARGEST_GROUP = 100  # members


def facts_of(error: BaseException, *, now: datetime, paths: Iterable[str] = ()) -> ErrorFacts:
    """Return what can be said of an exception, and what it has at these paths of attributes."""
    return _facts_of(error, now, tuple(paths), DEEPEST_GROUP)


def facts_of_class(cls: type[BaseException], paths: Iterable[str] = ()) -> ErrorFacts:
    """Return what a class says of all its exceptions: its names, and codes that it carries itself."""
    found = {path: _at(cls, path) for path in paths}
    return ErrorFacts(
        names=names_of(cls),
        sqlstate=_sqlstate(cls),
        attributes={path: value for path, value in found.items() if _is_plain(value)},
    )


def _facts_of(
    error: BaseException, now: datetime, paths: tuple[str, ...], levels: int
) -> ErrorFacts:
    members: tuple[ErrorFacts, ...] = ()
    if isinstance(error, BaseExceptionGroup) and levels:
        members = tuple(
            _facts_of(one, now, paths, levels - 1) for one in error.exceptions[:LARGEST_GROUP]
        )
    found = {path: _at(error, path) for path in paths}
    waits = [facts.retry_after for facts in members if facts.retry_after is not None]
    return ErrorFacts(
        names=names_of(type(error)),
        message=text_of(error),
        status=_status(error),
        sqlstate=_sqlstate(error),
        attributes={path: value for path, value in found.items() if _is_plain(value)},
        retry_after=max(waits, default=_retry_after(error, now)),
        members=members,
    )


def names_of(cls: type[BaseException]) -> frozenset[str]:
    """Every name by which a class or one of its bases goes.

    A class is often offered by a package above the module that defines it, so each of those counts.
    """
    return _names_of(cls)  # type: ignore[arg-type]  # classes can be hashed


@lru_cache(maxsize=1000)
def _names_of(cls: type) -> frozenset[str]:
    names = set()
    for base in cls.__mro__:
        module, name = base.__module__.split("."), base.__qualname__
        names |= {".".join((*module[:end], name)) for end in range(1, len(module) + 1)}
        if module == ["builtins"]:
            names.add(name)
    return frozenset(names)


def _status(error: BaseException) -> int | None:
    for path in STATUS:
        status = _at(error, path)
        if isinstance(status, int) and 100 <= status <= 599:
            return int(status)
    return None


def _sqlstate(error: BaseException | type[BaseException]) -> str | None:
    for path in SQLSTATE:
        code = _at(error, path)
        if isinstance(code, str) and len(code) == LENGTH_OF_SQLSTATE:
            return code
    return None


def _retry_after(error: BaseException, now: datetime) -> float | None:
    for path in HEADERS:
        headers = _at(error, path)
        said = _header(headers, "Retry-After")
        if (
            said is not None
            and (seconds := _seconds(said, _header(headers, "Date"), now)) is not None
        ):
            # At once, or some time ago, is no wish: the backoff of the task decides.
            return min(seconds, LONGEST_RETRY_AFTER) if seconds > 0 else None
    return None


def _header(headers: Any, name: str) -> str | None:
    for spelling in (name, name.lower()):
        try:
            value = headers.get(spelling)  # of a mapping, or of what urllib has for one
        except BaseException:  # noqa: BLE001 - what belongs to an error may itself raise
            return None
        if isinstance(value, str | int):
            return str(value).strip()
    return None


def _seconds(said: str, date: str | None, now: datetime) -> float | None:
    """Read either form of the header; a date is compared with the clock that it comes from, if known."""
    try:
        seconds = float(said)
    except ValueError:
        until = _time(said)
        return None if until is None else (until - (_time(date) or now)).total_seconds()
    return seconds if isfinite(seconds) else None


def _time(text: str | None) -> datetime | None:
    try:
        time = None if text is None else parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return time.replace(tzinfo=UTC) if time is not None and time.tzinfo is None else time


def _at(value: Any, path: str) -> Any:
    """Follow a path of attributes and keys; None if it leads nowhere."""
    for part in path.split("."):
        value = _step(value, part)
        if value is None:
            return None
    return value


def _step(value: Any, part: str) -> Any:
    try:
        return value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
    except BaseException:  # noqa: BLE001 - what belongs to an error may itself raise
        return None


def _is_plain(value: Any) -> bool:
    return value is not None and isinstance(value, Plain)
