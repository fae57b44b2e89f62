"""Schedules as an application defines them, and as people look at them."""

from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, Protocol, TypeVar
from uuid import UUID

from windlass.client.asking import Call, new_task_id
from windlass.model.errors import ConfigurationError
from windlass.model.limits import shown
from windlass.model.schedule import Overlap, Schedule, ScheduleRecord, SlotRecord, Timing
from windlass.model.task import NewTask, WindowKind
from windlass.policy.cron import parse_cron, parse_zone
from windlass.policy.schedule import ALL, slots_after
from windlass.registry import checked_name, checked_seconds
from windlass.store.port import ScheduleStore

SHOWN = 5  # coming slots of a schedule
SHORTEST = timedelta(seconds=1)
LONGEST_JITTER = (86_400.0, "a day at most")
LONGEST_CRON = 200  # characters
MOST_CAUGHT_UP = 1000

# What has to differ from one slot to the next, or is decided by the schedule.
_NOT_IN_A_SCHEDULE = ("delay", "at", "idempotency_key", "connection", "detached")
_WINDOWS = (*WindowKind, "dedupe_key")

T = TypeVar("T")
Records = list[ScheduleRecord]
Slots = list[SlotRecord]


def checked_schedule(
    call: Any,
    *,
    cron: Any,
    every: Any,
    timezone: Any,
    name: Any,
    overlap: Any,
    catch_up: Any,
    jitter: Any,
    max_payload_bytes: int,
) -> Schedule:
    """Return what `app.schedule` was given, or raise."""
    if not isinstance(call, Call):
        raise ConfigurationError(
            f"schedule {shown(call)}: give a call of a task, as in task.call(...)"
        )
    name = checked_name("schedule name", call.definition.name if name is None else name)
    try:
        caught_up = _checked_catch_up(catch_up)
        timing = _checked_timing(cron, every, timezone)
        return Schedule(
            name=name,
            timing=timing,
            task=_template(call, max_payload_bytes),
            overlap=_checked_overlap(overlap, caught_up),
            catch_up=caught_up,
            jitter=_checked_jitter(jitter, timing),
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"schedule '{name}': {error}") from None


def _checked_timing(cron: Any, every: Any, timezone: Any) -> Timing:
    if (cron is None) == (every is None):
        given = "neither cron nor every was" if cron is None else "both cron and every were"
        raise ConfigurationError(f"{given} given; give one of them")
    if every is not None:
        if timezone is not None:
            raise ConfigurationError(
                f"timezone {shown(timezone)}: intervals have none; leave it out, or use cron"
            )
        interval = timedelta(seconds=checked_seconds("every", every))
        if interval < SHORTEST:
            raise ConfigurationError(f"every {shown(every)}: use one second at least")
        return Timing(every=interval)
    if not isinstance(cron, str) or len(cron) > LONGEST_CRON:
        raise ConfigurationError(
            f"cron {shown(cron)}: use a string of at most {LONGEST_CRON} characters"
        )
    zone = "UTC" if timezone is None else timezone
    if not isinstance(zone, str):
        raise ConfigurationError(f"timezone {shown(zone)}: use a name like 'Europe/Zurich'")
    parse_zone(zone)
    parse_cron(cron, zone)
    return Timing(cron=cron, timezone=zone)


def _checked_jitter(value: Any, timing: Timing) -> timedelta:
    jitter = timedelta(seconds=checked_seconds("jitter", value, longest=LONGEST_JITTER))
    if timing.every is not None and jitter >= timing.every:
        raise ConfigurationError(
            f"jitter {shown(value)}: a task would be due after the next slot ({timing.every} later); use less than "
            "every, or leave it out"
        )
    return jitter


def _checked_overlap(value: Any, caught_up: int) -> Overlap:
    if value is None:
        return Overlap.QUEUE if caught_up > 1 else Overlap.SKIP
    try:
        overlap = Overlap(value)
    except ValueError:
        raise ConfigurationError(
            f"overlap {shown(value)}: use {', '.join(map(repr, map(str, Overlap)))}"
        ) from None
    if overlap is Overlap.SKIP and caught_up > 1:
        raise ConfigurationError(
            f"overlap 'skip': of {caught_up} slots that are caught up with it would fire one and skip the others; use "
            "overlap='queue' to fire them one after another, or 'allow' to fire them at once"
        )
    return overlap


def _checked_catch_up(value: Any) -> int:
    named = {"none": 0, "one": 1, "all": ALL}
    number = named.get(value) if isinstance(value, str) else value
    if type(number) is not int or not 0 <= number <= MOST_CAUGHT_UP:
        raise ConfigurationError(
            f"catch_up {shown(value)}: use 'none', 'one', 'all', or how many, from 0 to {MOST_CAUGHT_UP}"
        )
    return number


def _template(call: Call, max_payload_bytes: int) -> NewTask:
    for option in _NOT_IN_A_SCHEDULE:
        if getattr(call.options, option) not in (None, False):
            raise ConfigurationError(
                f"option '{option}' cannot be the same for every slot; leave it out"
            )
    for option in _WINDOWS:
        if getattr(call.options, option) is not None:
            raise ConfigurationError(
                f"option '{option}' is for calls, and each slot has a task of its own; leave it out"
            )
    if isinstance(call.options.expires, datetime):
        raise ConfigurationError(
            f"option 'expires' {shown(call.options.expires)}: use seconds from each slot"
        )
    payload = call.encode(max_payload_bytes)
    task = call.options.new_task(call.definition.defaults, payload)
    return task._replace(id=UUID(int=0))


class SchedulingStore(ScheduleStore, Protocol):
    """What is asked of the store."""

    async def now(self) -> datetime:
        """Return the store's time."""


class ScheduleAccess(Protocol):
    """An application that can be opened."""

    def using(self) -> AbstractAsyncContextManager[Any]:
        """Keep it open while the block lasts."""

    async def store(self) -> SchedulingStore:
        """Return the store of the running event loop."""

    def run_sync(self, name: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine for a caller that has no event loop."""


class Schedules:
    """`app.schedules`: what people do with those that workers have registered."""

    def __init__(self, access: ScheduleAccess) -> None:
        self._access = access

    async def list(self) -> Records:
        """Return all schedules by name, each with its next five slots."""
        async with self._access.using():
            store = await self._access.store()
            records = await store.schedules()
            now = await store.now()
        return [replace(one, next_slots=_coming(one, now)) for one in records]

    async def slots(self, name: str, *, limit: int = 50) -> Slots:
        """Return what became of the last slots of a schedule, the latest first."""
        if type(limit) is not int or not 1 <= limit <= 10_000:
            raise ConfigurationError(f"limit {shown(limit)}: use an integer from 1 to 10000")
        async with self._access.using():
            store = await self._access.store()
            return await store.slots(checked_name("schedule name", name), limit)

    async def pause(self, name: str) -> bool:
        """Fire no more slots until it is resumed; return whether it was not paused."""
        async with self._access.using():
            store = await self._access.store()
            return await store.pause_schedule(checked_name("schedule name", name))

    async def resume(self, name: str) -> bool:
        """Fire slots from now on; return whether it was paused. Those between were skipped."""
        async with self._access.using():
            store = await self._access.store()
            return await store.resume_schedule(checked_name("schedule name", name))

    async def run(self, name: str) -> str:
        """Enqueue its task now, whatever its slots are and also if it is paused; return the task's id."""
        task_id = new_task_id()
        async with self._access.using():
            store = await self._access.store()
            await store.run_schedule(checked_name("schedule name", name), task_id)
        return str(task_id)

    def list_sync(self) -> Records:
        """`list` for synchronous code."""
        return self._access.run_sync("schedules.list", self.list)

    def slots_sync(self, name: str, *, limit: int = 50) -> Slots:
        """`slots` for synchronous code."""
        return self._access.run_sync("schedules.slots", lambda: self.slots(name, limit=limit))

    def pause_sync(self, name: str) -> bool:
        """`pause` for synchronous code."""
        return self._access.run_sync("schedules.pause", lambda: self.pause(name))

    def resume_sync(self, name: str) -> bool:
        """`resume` for synchronous code."""
        return self._access.run_sync("schedules.resume", lambda: self.resume(name))

    def run_sync(self, name: str) -> str:
        """`run` for synchronous code."""
        return self._access.run_sync("schedules.run", lambda: self.run(name))


def _coming(record: ScheduleRecord, now: datetime) -> tuple[datetime, ...]:
    try:
        return tuple(islice(slots_after(record.timing, now), SHOWN))
    except ConfigurationError:  # a time zone that is not known here
        return ()
