"""What all parts of the PostgreSQL adapter share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from windlass.model.errors import StoreBusy
from windlass.model.task import Retention
from windlass.store.postgres.dial import Revive, Route
from windlass.store.postgres.history import History
from windlass.store.postgres.statements import Statements
from windlass.store.sqlfiles import SqlFiles

PACKAGE = "windlass.store.postgres"


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresOptions:
    """Where the database is and how it is used."""

    url: str
    direct_url: str | None = None  # around a pooler, for LISTEN and for detaching partitions
    schema: str = "windlass"
    pool_size: int = 8
    auto_migrate: bool = True
    pooler: bool = False  # the URL leads through a pooler in transaction mode
    patience: timedelta = timedelta(seconds=1)  # how long a settlement or a report waits for a lock
    retention: Retention = field(default_factory=Retention)
    max_payload_bytes: int = 1 << 20
    revive: Revive | None = None  # brings up a server of our own that has ended


class PostgresParts:
    """Options, statements and history. Belongs to the event loop that opened it."""

    def __init__(self, options: PostgresOptions) -> None:
        self._options = options
        self._sql = SqlFiles(PACKAGE, options.schema)
        self._route = Route(options.url, options.pooler, options.revive)
        self._direct = self._route if options.direct_url is None else Route(options.direct_url)
        self._run = Statements(self._sql, options.url)
        self._handlers = Statements(self._sql, options.url)  # those of handlers' transactions
        self._history = History(self._sql, self._run, options.retention)


@contextmanager
def named_if_held(what: str) -> Iterator[None]:
    """Name what somebody's transaction holds, where one waits for no longer."""
    try:
        yield
    except StoreBusy as error:
        raise StoreBusy(
            f"{what} is held by a transaction that has not ended, and was left as it is; try again when it has"
        ) from error


def used(column: list[Any]) -> list[Any] | None:
    """A column that no task uses is not sent."""
    return column if any(value is not None for value in column) else None
