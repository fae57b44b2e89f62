"""What is asked for, checked before anything is written."""

import os
import re
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypedDict
from uuid import UUID

from windlass.model.errors import ConfigurationError, PayloadError
from windlass.model.limits import shown
from windlass.model.task import Change, NewTask, TypeDefaults
from windlass.registry import (
    TaskDefinition,
    checked_name,
    checked_names,
    checked_priority,
    checked_seconds,
)

NOT_BUILT = ("expires", "ordering_key", "on_dead")
LONGEST_REASON = 2000  # characters
_UNSTORABLE = re.compile(r"[\x00\ud800-\udfff]")  # what PostgreSQL holds in no text


def new_task_id() -> UUID:
    """Make a UUID of version 7: ordered by time, so that keys made together lie together."""
    milliseconds = time.time_ns() // 1_000_000
    tail = int.from_bytes(os.urandom(10), "big")
    value = (milliseconds & (1 << 48) - 1) << 80 | tail
    value = value & ~(0xF << 76) | 7 << 76
    value = value & ~(0x3 << 62) | 2 << 62
    return UUID(int=value)


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
    expires: Any
    ordering_key: Any
    on_dead: Any
    connection: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EnqueueOptions:
    """The same, checked; None leaves the default of the type."""

    queue: str | None = None
    priority: int | str | None = None
    delay: float | timedelta | None = None
    at: datetime | None = None
    idempotency_key: str | None = None
    max_attempts: int | None = None
    tags: Collection[str] | None = None
    detached: bool = False
    expires: Any = None
    ordering_key: Any = None
    on_dead: Any = None
    connection: Any = None

    def new_task(self, defaults: TypeDefaults, payload: str) -> NewTask:
        """Check the options and build the task they describe."""
        for name in NOT_BUILT:
            if getattr(self, name) is not None:
                raise ConfigurationError(f"option '{name}' is not built yet")
        if self.delay is not None and self.at is not None:
            raise ConfigurationError("options 'delay' and 'at' exclude each other; give one")
        attempts = self.max_attempts
        if attempts is not None and (type(attempts) is not int or not 1 <= attempts <= 30_000):
            raise ConfigurationError(
                f"max_attempts {shown(attempts)}: use an integer from 1 to 30000"
            )
        key = self.idempotency_key
        return NewTask(
            id=new_task_id(),
            type=defaults.name,
            payload=payload,
            queue=defaults.queue if self.queue is None else checked_name("queue", self.queue),
            priority=defaults.priority
            if self.priority is None
            else checked_priority(self.priority),
            max_attempts=defaults.max_attempts if attempts is None else attempts,
            delay=0.0 if self.delay is None else checked_seconds("delay", self.delay),
            at=None if self.at is None else checked_time("at", self.at),
            idempotency_key=None if key is None else checked_name("idempotency_key", key),
            tags=() if self.tags is None else checked_names("tags", "tag", self.tags),
            retention=defaults.retention,
        )


def enqueue_options(options: Options) -> EnqueueOptions:
    """Check the names of what a call was given."""
    try:
        return EnqueueOptions(**options)
    except TypeError:
        known = EnqueueOptions.__dataclass_fields__
        unknown = ", ".join(f"'{name}'" for name in options if name not in known)
        raise ConfigurationError(
            f"option {unknown} is not known; options are: {', '.join(known)}"
        ) from None


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a task, ready to be enqueued."""

    definition: TaskDefinition
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: EnqueueOptions

    def new_task(self, max_payload_bytes: int) -> NewTask:
        """Check and encode the call."""
        payload = self.definition.codec.encode(self.args, self.kwargs, max_bytes=max_payload_bytes)
        return self.options.new_task(self.definition.defaults, payload)

    def within(self, connection: Any) -> "Call":
        """Return the same call as part of the caller's transaction."""
        if self.options.connection not in (None, connection):
            raise ConfigurationError(
                "option 'connection' differs between the calls of one enqueue; give all the same"
            )
        return replace(self, options=replace(self.options, connection=connection))


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


def checked_calls(given: Any, connection: Any) -> list[Call]:
    """Return what `enqueue_many` was given as a list, or raise."""
    if isinstance(given, str) or not isinstance(given, Iterable):
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
