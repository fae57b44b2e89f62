"""What is asked for, checked before anything is written."""

import os
import re
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import repeat
from typing import Any, Literal, TypedDict
from uuid import UUID

import msgspec

from windlass.model.cancellation import Cancellation, may_be_by
from windlass.model.errors import ConfigurationError, PayloadError
from windlass.model.limits import shown
from windlass.model.task import Change, NewTask, TypeDefaults, Window, WindowKind
from windlass.registry import (
    TaskDefinition,
    checked_name,
    checked_names,
    checked_priority,
    checked_seconds,
)
from windlass.store.port import TaskColumns

ENCODED_AT_ONCE = 100  # calls: meanwhile there are copies of their payloads, which may be large
LONGEST_REASON = 2000  # characters
LONGEST_WINDOW = (366 * 86_400.0, "at most 366 days")  # seconds
_DRAWN = struct.Struct(">HQ")  # bytes of chance for an id
_TAIL = 0xFFF << 64 | (1 << 62) - 1  # where it goes: around the version and the variant
# `UUID(int=…)` takes most of its time for checks.
_set_int, _set_safe = UUID.__dict__["int"].__set__, UUID.__dict__["is_safe"].__set__
_IS_SAFE = UUID(int=0).is_safe  # nobody knows
_UNSTORABLE = re.compile(r"[\x00\ud800-\udfff]")  # what PostgreSQL holds in no text


def new_task_id() -> UUID:
    """Make a UUID of version 7: ordered by time, so that keys made together lie together."""
    made = object.__new__(UUID)
    _set_int(made, _head() | int.from_bytes(os.urandom(_DRAWN.size), "big") & _TAIL)
    _set_safe(made, _IS_SAFE)
    return made


def new_task_ids(number: int) -> list[UUID]:
    """Make so many at once, each greater than the one before."""
    head = _head()
    drawn = os.urandom(_DRAWN.size * number)
    tails = [(high << 64 | low) & _TAIL for high, low in _DRAWN.iter_unpack(drawn)]
    tails.sort()
    ids = [object.__new__(UUID) for _ in tails]
    for made, tail in zip(ids, tails, strict=True):
        _set_int(made, head | tail)
        _set_safe(made, _IS_SAFE)
    return ids


def _head() -> int:
    milliseconds = time.time_ns() // 1_000_000
    return (milliseconds & (1 << 48) - 1) << 80 | 7 << 76 | 2 << 62


class Options(TypedDict, total=False):
    """What `options(...)` takes, for type checkers."""

    queue: str | None
    priority: int | str | None
    delay: float | timedelta | None
    at: datetime | None
    idempotency_key: str | None
    max_attempts: int | None
    tags: Collection[str] | None
    detached: bool
    expires: datetime | float | timedelta | None
    ordering_key: str | None
    on_dead: Literal["pass", "hold"] | None
    unique_for: float | timedelta | None
    throttle: float | timedelta | None
    debounce: float | timedelta | None
    dedupe_key: str | None
    connection: Any


class EnqueueOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The same, checked; None leaves the default of the type."""

    queue: str | None = None
    priority: int | str | None = None
    delay: float | timedelta | None = None
    at: datetime | None = None
    idempotency_key: str | None = None
    max_attempts: int | None = None
    tags: Collection[str] | None = None
    detached: bool = False
    expires: datetime | float | timedelta | None = None
    ordering_key: str | None = None
    on_dead: str | None = None
    unique_for: float | timedelta | None = None
    throttle: float | timedelta | None = None
    debounce: float | timedelta | None = None
    dedupe_key: str | None = None
    connection: Any = None

    def new_task(self, defaults: TypeDefaults, payload: str) -> NewTask:
        """Check the options and build the task they describe."""
        return NewTask(new_task_id(), defaults.name, payload, *self.checked(defaults))

    def checked(self, defaults: TypeDefaults) -> tuple[Any, ...]:
        """Check the options and return what comes after the payload of a task they describe."""
        if self.delay is not None and self.at is not None:
            raise ConfigurationError("options 'delay' and 'at' exclude each other; give one")
        attempts = self.max_attempts
        if attempts is not None and (type(attempts) is not int or not 1 <= attempts <= 30_000):
            raise ConfigurationError(
                f"max_attempts {shown(attempts)}: use an integer from 1 to 30000"
            )
        key = self.idempotency_key
        return (
            defaults.queue if self.queue is None else checked_name("queue", self.queue),
            defaults.priority if self.priority is None else checked_priority(self.priority),
            defaults.max_attempts if attempts is None else attempts,
            0.0 if self.delay is None else checked_seconds("delay", self.delay),
            None if self.at is None else checked_time("at", self.at),
            None if key is None else checked_name("idempotency_key", key),
            () if self.tags is None else checked_names("tags", "tag", self.tags),
            defaults.retention,
            None if self.expires is None else checked_expiry(self.expires),
            None if self.ordering_key is None else checked_name("ordering_key", self.ordering_key),
            self.on_dead is not None and _keeps_key(self.on_dead, self.ordering_key),
            defaults.limit_by,
            self._window(),
        )

    @property
    def waits_for_others(self) -> bool:
        """Whether what another call does at the same time may have to be waited for."""
        return self.idempotency_key is not None or any(
            getattr(self, kind) is not None for kind in WindowKind
        )

    def _window(self) -> Window | None:
        """Within which a call before it counts, or raise."""
        kinds = [kind for kind in WindowKind if getattr(self, kind) is not None]
        if not kinds:
            if self.dedupe_key is not None:
                raise ConfigurationError(
                    "option 'dedupe_key' says what a window is for; give unique_for, throttle or debounce too"
                )
            return None
        kind = kinds[0]
        excluded = [*kinds[1:], *_NOT_BESIDE[kind]]
        for other in excluded:
            if getattr(self, other) is not None:
                raise ConfigurationError(
                    f"options '{kind}' and '{other}' exclude each other; give one"
                )
        seconds = checked_seconds(
            kind, getattr(self, kind), above_zero=True, longest=LONGEST_WINDOW
        )
        key = self.dedupe_key
        return Window(kind, seconds, None if key is None else checked_name("dedupe_key", key))


_NOT_BESIDE = {
    WindowKind.UNIQUE: ("idempotency_key",),
    WindowKind.THROTTLE: ("idempotency_key",),
    WindowKind.DEBOUNCE: ("idempotency_key", "delay", "at", "ordering_key"),
}
NO_OPTIONS = EnqueueOptions()


def enqueue_options(options: Options) -> EnqueueOptions:
    """Check the names of what a call was given."""
    try:
        return EnqueueOptions(**options)
    except TypeError:
        known = EnqueueOptions.__struct_fields__
        unknown = ", ".join(f"'{name}'" for name in options if name not in known)
        raise ConfigurationError(
            f"option {unknown} is not known; options are: {', '.join(known)}"
        ) from None


# The collector would look at very many of them, again and again: 1 µs for each. What JSON can carry does
# not lead back to a call.
class Call(msgspec.Struct, frozen=True, gc=False):
    """One call of a task, ready to be enqueued."""

    definition: TaskDefinition
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: EnqueueOptions

    def within(self, connection: Any) -> "Call":
        """Return the same call as part of the caller's transaction."""
        if self.options.connection not in (None, connection):
            raise ConfigurationError(
                "option 'connection' differs between the calls of one enqueue; give all the same"
            )
        options = msgspec.structs.replace(self.options, connection=connection)
        return Call(self.definition, self.args, self.kwargs, options)

    def encode(self, max_payload_bytes: int) -> str:
        """Return the payload, or raise `PayloadError`."""
        return self.definition.codec.encode(self.args, self.kwargs, max_bytes=max_payload_bytes)


def distinct_options(calls: Sequence[Call]) -> Collection[EnqueueOptions]:
    """The options of calls, of which many share the same."""
    return {id(call.options): call.options for call in calls}.values()


def new_tasks(calls: Sequence[Call], *, max_payload_bytes: int, first: int) -> TaskColumns:
    """Check and encode calls; `first`: the index of the first one, by which a bad one is named."""
    payloads: list[str] = []
    kinds: list[tuple[Any, ...]] = []
    known: dict[tuple[int, int], tuple[Any, ...]] = {}  # what many calls have alike
    definition = options = None
    try:
        for call, encoded in zip(calls, _encoded(calls, max_payload_bytes), strict=True):
            payload = encoded or call.encode(max_payload_bytes)
            if call.options is not options or call.definition is not definition:
                definition, options = call.definition, call.options
                kind = (id(definition), id(options))
                known[kind] = checked = known.get(kind) or options.checked(definition.defaults)
            payloads.append(payload)
            kinds.append(checked)
    except (ConfigurationError, PayloadError) as error:
        raise type(error)(f"item {first + len(kinds)}: {error}") from error
    types = [call.definition.name for call in calls]
    return TaskColumns([new_task_ids(len(calls)), types, payloads, *zip(*kinds, strict=True)])


def _encoded(calls: Sequence[Call], max_bytes: int) -> Iterator[str | None]:
    """The payloads of calls that are alike; None for each that is to be encoded by itself."""
    for start in range(0, len(calls), ENCODED_AT_ONCE):
        some = calls[start : start + ENCODED_AT_ONCE]
        codec = some[0].definition.codec
        texts: Sequence[str] | None = None
        if all(call.definition.codec is codec for call in some):
            texts = codec.encode_alike([(call.args, call.kwargs) for call in some], max_bytes)
        yield from texts or repeat(None, len(some))


def checked_time(what: str, value: Any) -> datetime:
    """Return an aware datetime or raise."""
    if not isinstance(value, datetime):
        raise ConfigurationError(f"{what} {shown(value)}: use a datetime with a time zone")
    if value.tzinfo is None or value.utcoffset() is None:
        raise ConfigurationError(f"{what} {value!r} has no time zone; use an aware datetime")
    try:
        return value.astimezone(UTC)
    except OverflowError:
        # In UTC the first and the last hours of the calendar may lie in the years 0 and 10000.
        if value.year == 1:
            return datetime.min.replace(tzinfo=UTC)
        raise ConfigurationError(
            f"{what} {value!r} is after the year 9999; use an earlier time"
        ) from None


def _keeps_key(on_dead: Any, ordering_key: str | None) -> bool:
    """Whether a task that has failed is to hold its key, or raise."""
    if on_dead not in ("pass", "hold"):
        raise ConfigurationError(f'on_dead {shown(on_dead)}: use "hold" or "pass"')
    if ordering_key is None:
        raise ConfigurationError(
            "option 'on_dead' says what becomes of an ordering key; give ordering_key too"
        )
    return bool(on_dead == "hold")


def checked_expiry(value: Any) -> datetime | float:
    """Return until when a task has to have begun: a time, or seconds from its enqueue; or raise."""
    if isinstance(value, datetime):
        return checked_time("expires", value)
    try:
        return checked_seconds("expires", value)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}, or a datetime with a time zone") from None


def checked_change(*, priority: Any, queue: Any, at: Any, delay: Any) -> Change:
    """Return what is to be changed of a task, or raise."""
    if at is not None and delay is not None:
        raise ConfigurationError("options 'delay' and 'at' exclude each other; give one")
    if priority is None and queue is None and at is None and delay is None:
        raise ConfigurationError("nothing to change; give priority, queue, at or delay")
    return Change(
        priority=None if priority is None else checked_priority(priority),
        queue=None if queue is None else checked_name("queue", queue),
        at=None if at is None else checked_time("at", at),
        delay=None if delay is None else checked_seconds("delay", delay),
    )


def checked_reason(value: Any) -> str:
    """Return a text that says why, or raise."""
    if not isinstance(value, str):
        raise ConfigurationError(f"reason {shown(value)} must be a string")
    if len(value) > LONGEST_REASON:
        raise ConfigurationError(
            f"reason {shown(value)} has {len(value)} characters; use at most {LONGEST_REASON}"
        )
    if _UNSTORABLE.search(value):
        raise ConfigurationError(
            f"reason {shown(value)} holds a NUL character or half of a surrogate pair; remove it"
        )
    return value


def checked_cancellation(reason: Any, by: Any) -> Cancellation:
    """Return why a task is to be cancelled and who wants it, or raise."""
    checked_reason(reason)
    if Cancellation.read(reason).by is not None:
        raise ConfigurationError(f"reason {shown(reason)} ends with who asked; say that with by")
    if by is not None:
        checked_name("by", by)
        if not may_be_by(by):
            raise ConfigurationError(f"by {shown(by)} says itself who asked; name one of them")
    return Cancellation(reason, by)


def checked_calls(given: Any, connection: Any) -> list[Call]:
    """Return what `enqueue_many` was given as a list, or raise."""
    if isinstance(given, str | Call) or not isinstance(given, Iterable):
        kind = type(given).__name__
        raise PayloadError(
            f"enqueue_many was given a value of type {kind}; use [task.call(...), …]"
        )
    calls = list(given)
    for index, call in enumerate(calls):
        if not isinstance(call, Call):
            kind = type(call).__name__
            raise PayloadError(f"item {index} is of type {kind}; use task.call(...)")
    return calls if connection is None else [call.within(connection) for call in calls]
