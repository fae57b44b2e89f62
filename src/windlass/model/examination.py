"""What the doctor sees of a database, and what it says about it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import date
from enum import StrEnum
from typing import Generic, NamedTuple, Never, TypeVar

from windlass.model.errors import WindlassError

T = TypeVar("T")


class Level(StrEnum):
    """How bad it is. Only an error means that something does not work now, or is already wrong."""

    OK = "ok"
    NOTE = "note"  # good to know
    WARNING = "warning"  # will hurt, or hurts already a little
    ERROR = "error"
    UNKNOWN = "unknown"  # could not be checked


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has found, and what to do about it."""

    check: str
    level: Level
    found: str
    advice: str | None = None


class NotMeasured(WindlassError):  # noqa: N818 - what it says is a finding
    """Something could not be looked at."""


@dataclass(frozen=True, slots=True)
class Known(Generic[T]):
    """Something that was looked at."""

    value: T

    def get(self) -> T:
        """Return it."""
        return self.value


@dataclass(frozen=True, slots=True)
class Unknown:
    """Something that could not be looked at."""

    why: str
    is_absent: bool = False  # because something in the schema is not there, or is something else

    def get(self) -> Never:
        """Raise `NotMeasured`."""
        raise NotMeasured(self.why)


Measured = Known[T] | Unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What the server says of itself, and of the role that asks."""

    version: str
    major: int
    database: str
    encoding: str
    role: str  # whose rights count
    login: str  # whose settings count: that which logged in, and may have changed its role
    session: int  # its process
    is_standby: bool
    is_read_only: bool
    isolation: str
    fsync: bool
    full_page_writes: bool
    synchronous_commit: str
    synchronous_standby_names: str
    autovacuum: bool
    statement_timeout_ms: int  # 0: none, as for the next two
    transaction_timeout_ms: int
    idle_timeout_ms: int
    connections: int
    max_connections: int  # for roles that are not superusers
    sees_others: bool  # sessions of other roles


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How the database was reached."""

    address: str
    refusal: str | None = None  # why an app is not let in; there may be a connection all the same
    is_connected: bool = True
    is_broken: bool = False  # the connection, before everything was looked at
    session: int = 0  # the process that was told when connecting; a pooler invents one
    pooler: bool = False  # whether the settings say that there is one
    has_direct: bool = False  # and a way around it
    direct_trouble: str | None = None


class ClockOffset(NamedTuple):
    """How far the server's clock is ahead of this host's, and how far that may be wrong."""

    seconds: float
    give_or_take: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaState:
    """The schema, and whether it may be used."""

    owner: str
    is_usable: bool
    is_begun: bool  # there is a table of migrations


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """What the role may not do, by name of table or function."""

    is_usable: bool  # the schema
    unreadable: Sequence[str]
    closed: Sequence[str]  # of those that an enqueue writes
    not_owned: Sequence[str]
    not_callable: Sequence[str]
    relations: int
    owner: str | None  # of the history
    may_create: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What a worker registered for a type; retention in seconds."""

    queue: str
    priority: int
    max_attempts: int
    retention: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredWorker:
    """A worker in the registry; durations in seconds by the schema's clock."""

    id: str
    host: str
    pid: int
    version: str
    types: Sequence[str]
    queues: Sequence[str] | None
    defaults: Mapping[str, Defaults] | None  # None: it is too old to say
    up_for: float
    silent_for: float
    lease: float

    @property
    def is_alive(self) -> bool:
        """Whether its last sign of life is of the last lease."""
        return self.silent_for < self.lease

    def serves(self, queue: str) -> bool:
        """Whether it takes tasks of this queue."""
        return self.queues is None or queue in self.queues

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Who leads, and for how many seconds more."""

    holder: str | None
    term: int
    expires_in: float | None  # None: it was given up


@dataclass(frozen=True, slots=True, kw_only=True)
class OverdueClaims:
    """The claims of one worker that nobody has rescued in time."""

    worker_id: str
    host: str | None  # None: it is not registered any more
    pid: int | None
    claims: int
    tasks: int
    overdue: float  # seconds since the expiry of the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Tasks that could run."""

    queue: str
    type: str
    tasks: int
    waited: float  # seconds, of the first
    is_paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """Scheduled tasks that should be ready."""

    tasks: int
    overdue: float  # seconds, of the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A table of the history."""

    name: str
    is_attached: bool
    is_pending: bool  # half detached
    is_ours: bool
    first: date | None = None  # None: not one of ours
    past: date | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """How many rows of a table are dead."""

    name: str
    live: int
    dead: int
    vacuumed_ago: float | None  # seconds; None: never
    autovacuum: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """How large an index is."""

    name: str
    bytes: int
    rows: int
    is_valid: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTransaction:
    """A transaction that is open for long."""

    pid: int
    role: str | None
    program: str
    client: str
    state: str | None
    open_for: float  # seconds
    holds_back: bool  # dead rows of all tables
    locked: Sequence[str]  # tables of ours

    def __str__(self) -> str:
        program = f" ({self.program})" if self.program else ""
        return f"session {self.pid}{program} of role '{self.role}' from {self.client}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTransaction:
    """A transaction that was prepared for a commit in two phases."""

    gid: str
    role: str
    open_for: float  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A replication slot."""

    name: str
    is_active: bool
    wal_status: str | None
    retained_bytes: int
    held_back: int  # transactions


@dataclass(frozen=True, slots=True, kw_only=True)
class Standby:
    """A connected standby."""

    name: str
    held_back: int  # transactions
    is_synchronous: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Misplaced:
    """Tasks that are not where they should be."""

    kind: str
    tasks: int
    some: Sequence[str]  # of their ids


@dataclass(frozen=True, slots=True, kw_only=True)
class LostKey:
    """An idempotency key whose task is gone."""

    task_id: str
    type: str


_NOT_REACHED = Unknown("the database was not reached")


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Everything that was looked at. What could not be is `Unknown`, with the reason."""

    access: Access
    schema_name: str = "windlass"
    migrations: Sequence[tuple[int, str]] = field(default=())  # those that the code knows
    server: Measured[Server] = _NOT_REACHED
    clock: Measured[ClockOffset] = _NOT_REACHED
    moved_clock: Measured[float] = _NOT_REACHED  # seconds that the schema's is ahead
    schema: Measured[SchemaState | None] = _NOT_REACHED
    applied: Measured[frozenset[int]] = _NOT_REACHED
    missing: Measured[Sequence[str]] = _NOT_REACHED  # of what the migrations make
    rights: Measured[Rights] = _NOT_REACHED
    workers: Measured[Sequence[RegisteredWorker]] = _NOT_REACHED
    seat: Measured[Seat] = _NOT_REACHED
    claims: Measured[Sequence[OverdueClaims]] = _NOT_REACHED
    types: Measured[Mapping[str, Defaults]] = _NOT_REACHED
    waiting: Measured[Sequence[Waiting]] = _NOT_REACHED
    due: Measured[Due] = _NOT_REACHED
    today: Measured[date] = _NOT_REACHED
    partitions: Measured[Sequence[Partition]] = _NOT_REACHED
    retentions: Measured[Sequence[float]] = _NOT_REACHED  # seconds
    tables: Measured[Sequence[Table]] = _NOT_REACHED
    indexes: Measured[Sequence[Index]] = _NOT_REACHED
    transactions: Measured[Sequence[OpenTransaction]] = _NOT_REACHED
    prepared: Measured[Sequence[PreparedTransaction]] = _NOT_REACHED
    slots: Measured[Sequence[Slot]] = _NOT_REACHED
    standbys: Measured[Sequence[Standby]] = _NOT_REACHED
    misplaced: Measured[Sequence[Misplaced]] = _NOT_REACHED
    ended: Measured[Sequence[Misplaced]] = _NOT_REACHED
    lost_keys: Measured[Sequence[LostKey]] = _NOT_REACHED

    def absences(self) -> list[str]:
        """Return why looks failed that the schema should have allowed, each reason once."""
        looks = (getattr(self, one.name) for one in fields(self))
        reasons = [one.why for one in looks if isinstance(one, Unknown) and one.is_absent]
        return list(dict.fromkeys(reasons))
