"""An application in memory, for its own tests: no server, and a clock that moves when told to."""

from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

from windlass.app import App
from windlass.client import Task
from windlass.encoding import decode_json, encode_json
from windlass.model.errors import ConfigurationError
from windlass.model.limits import shown
from windlass.model.task import Rescued, TaskFilter, TaskRecord
from windlass.registry import checked_seconds
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

    It begins without a task, and whatever database it has is not touched.
    """

    def __init__(self, app: App, *, clock: Clock | None = None) -> None:
        self._app = app
        self._clock = clock or Clock()
        self._inside = ExitStack()

    def __enter__(self) -> App:
        store = MemoryStore(retention=self._app.settings.kept_for(), clock=self._clock)
        self._clock.watch(store.wake)
        self._inside.enter_context(self._app.kept_at("memory:", memory=store))
        return self._app

    def __exit__(self, *_: object) -> None:
        self._inside.close()

    async def __aenter__(self) -> App:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        await self._app.close()
        self.__exit__()


def enqueued(app: App, task: Task[..., Any] | str, **arguments: Any) -> list[TaskRecord]:
    """Return the tasks of this type that were enqueued with these arguments, oldest first.

    Arguments that are not named may be anything.
    """
    name = task if isinstance(task, str) else task.name
    wanted = {key: _as_payload(key, value) for key, value in arguments.items()}
    return [
        one
        for one in _all_of(app, name)
        if all(key in one.payload and one.payload[key] == wanted[key] for key in wanted)
    ]


def assert_enqueued(app: App, task: Task[..., Any] | str, **arguments: Any) -> TaskRecord:
    """Return the newest task of this type that was enqueued with these arguments, or fail."""
    found = enqueued(app, task, **arguments)
    if found:
        return found[-1]
    name = task if isinstance(task, str) else task.name
    others = [one.payload for one in _all_of(app, name)]
    raise AssertionError(
        f"task '{name}' was not enqueued with {arguments}, "
        + (f"but with {others}" if others else "and not at all")
    )


async def drain(app: App) -> None:
    """Run everything that is due, and what that enqueues, until nothing is left to run now."""
    store = _store_of(app)
    async with app:
        while True:
            # What a worker's leader would do in its own time.
            while await store.rescue(EVERYTHING) != Rescued():
                pass
            await store.promote(EVERYTHING)
            await app.run_worker(until_idle=True)
            if not await store.promote(EVERYTHING):
                return


def _all_of(app: App, name: str) -> list[TaskRecord]:
    store = _store_of(app)
    found = run_now(store.tasks(TaskFilter(type=name, limit=EVERYTHING)))
    return sorted(found.records, key=lambda one: one.created_at)


def _store_of(app: App) -> MemoryStore:
    store = app.memory
    if store is None:
        raise ConfigurationError(
            "the app is not in memory; put this into `async with testing.app_in_memory(app):`"
        )
    return store


def _as_payload(name: str, value: Any) -> Any:
    return decode_json(encode_json(value, what=f"argument '{name}'", max_bytes=1 << 30))
