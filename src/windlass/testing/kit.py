"""An application in memory, for its own tests: no server, and a clock that moves when told to."""

import inspect
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

from windlass.app import App
from windlass.client import Task
from windlass.encoding import decode_json, encode_json
from windlass.model.errors import ConfigurationError, PayloadError
from windlass.model.limits import shown
from windlass.model.task import Rescued, TaskFilter, TaskRecord
from windlass.registry import TaskDefinition, checked_seconds
from windlass.service import run_now
from windlass.store.memory import MemoryStore

EVERYTHING = 1_000_000  # tasks, more than a test enqueues


class Clock:
    """The time of an application in memory: it goes on as ours does, and further when it is moved.

    Everything that depends on the store's time moves with it: what is scheduled, retries, snoozes,
    leases, retention.
    """

    def __init__(self, now: datetime | None = None) -> None:
        if now is not None and now.utcoffset() is None:
            raise ConfigurationError(f"clock {shown(now)} has no time zone; use an aware datetime")
        self._ahead = timedelta(0) if now is None else now - datetime.now(UTC)
        self._watchers: list[Callable[[], None]] = []

    def __call__(self) -> datetime:
        """The time now."""
        return datetime.now(UTC) + self._ahead

    def move(self, by: float | timedelta) -> None:
        """Let so much time pass, in seconds or as a timedelta; workers that run notice at once."""
        self._ahead += timedelta(seconds=checked_seconds("move", by))
        for watcher in self._watchers:
            watcher()

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call this whenever the clock was moved."""
        self._watchers.append(watcher)


class app_in_memory:  # noqa: N801 - reads as what it does
    """Let an application keep its tasks in memory while the block lasts; `with` or `async with`.

    It begins without a task, and whatever database it has is not touched. Its breakers are closed, and go by
    the same clock.
    """

    def __init__(self, app: App, *, clock: Clock | None = None) -> None:
        self._app = app
        self._clock = clock or Clock()
        self._inside = ExitStack()

    def __enter__(self) -> App:
        store = MemoryStore(retention=self._app.settings.kept_for(), clock=self._clock)
        self._clock.watch(store.wake)
        self._inside.enter_context(self._app.kept_at("memory:", memory=store))
        self._reset_breakers(lambda: self._clock().timestamp())
        self._inside.callback(self._reset_breakers, time.monotonic)
        return self._app

    def _reset_breakers(self, clock: Callable[[], float]) -> None:
        for breaker in self._app.registry.breakers.values():
            breaker.reset(clock)

    def __exit__(self, *_: object) -> None:
        self._inside.close()

    async def __aenter__(self) -> App:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        await self._app.close()
        self.__exit__()


def enqueued(app: App, task: Task[..., Any] | str, /, **arguments: Any) -> list[TaskRecord]:
    """Return the tasks of this type that were enqueued with these arguments, oldest first.

    They are compared as the handler will be given them, defaults included. Arguments that are not
    named may be anything.
    """
    definition = _definition_of(app, task)
    _check_names(definition, arguments)
    return [
        one
        for one in _all_of(app, task)
        if all(_is_given(definition, one.payload, *argument) for argument in arguments.items())
    ]


def assert_enqueued(app: App, task: Task[..., Any] | str, /, **arguments: Any) -> TaskRecord:
    """Return the newest task of this type that was enqueued with these arguments, or fail."""
    found = enqueued(app, task, **arguments)
    if found:
        return found[-1]
    definition = _definition_of(app, task)
    others = [_given(definition, one.payload) for one in _all_of(app, task)]
    raise AssertionError(
        f"task '{_name_of(task)}' was not enqueued with {arguments}, "
        + (f"but with {others}" if others else "and not at all")
    )


async def drain(app: App) -> None:
    """Run everything that is due, and what that enqueues, until nothing is left to run now."""
    store = _store_of(app, instead="`await app.run_worker(until_idle=True)` runs what is due")
    async with app:
        while True:
            # What a worker's leader would do in its own time.
            while await store.rescue(EVERYTHING) != Rescued():
                pass
            await store.promote(EVERYTHING)
            await app.run_worker(until_idle=True)
            if not await store.promote(EVERYTHING):
                return


def _name_of(task: Task[..., Any] | str) -> str:
    return task if isinstance(task, str) else task.name


def _definition_of(app: App, task: Task[..., Any] | str) -> TaskDefinition | None:
    return app.registry.find(task) if isinstance(task, str) else task.definition


def _all_of(app: App, task: Task[..., Any] | str) -> list[TaskRecord]:
    store = _store_of(app, instead="`await handle.get()` of what `enqueue` returned shows a task")
    found = run_now(store.tasks(TaskFilter(type=_name_of(task), limit=EVERYTHING)))
    return sorted(found.records, key=lambda one: one.created_at)


def _store_of(app: App, *, instead: str) -> MemoryStore:
    store = app.memory
    if store is None:
        raise ConfigurationError(
            "the app is not in memory; put this into `async with testing.app_in_memory(app):`; "
            f"on PostgreSQL {instead}"
        )
    return store


def _parameters(definition: TaskDefinition) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(definition.function).parameters
    return {name: parameters[name] for name in parameters if name != definition.codec.context_name}


def _check_names(definition: TaskDefinition | None, arguments: dict[str, Any]) -> None:
    if definition is None:
        return
    known = _parameters(definition)
    for name in arguments:
        if name not in known:
            raise TypeError(
                f"task '{definition.name}': argument '{name}' is not known; "
                f"arguments are: {', '.join(known) or 'none'}"
            )


def _given(definition: TaskDefinition | None, payload: dict[str, Any]) -> dict[str, Any]:
    """Return what the handler is given, or the payload if no code here can read it."""
    if definition is None:
        return payload
    try:
        arrived = definition.codec.decode(_as_json("payload", payload))
    except PayloadError:
        return payload
    every = _parameters(definition).values()
    return {one.name: one.default for one in every if one.default is not one.empty} | arrived


def _is_given(
    definition: TaskDefinition | None, payload: dict[str, Any], name: str, value: Any
) -> bool:
    given = _given(definition, payload)
    if name not in given:
        return False
    if given[name] == value:
        return True
    try:
        plain = decode_json(_as_json(f"argument '{name}'", value))
    except PayloadError:
        if definition is None:
            raise
        return False  # only as it is could it have been equal
    if name in payload and payload[name] == plain:
        return True
    # Read as the payload was: one instant has many forms, and a value may be given in that of JSON.
    return bool(given[name] == _given(definition, {**payload, name: plain})[name])


def _as_json(what: str, value: Any) -> str:
    return encode_json(value, what=what, max_bytes=1 << 30)
