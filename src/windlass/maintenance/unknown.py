"""Fails tasks of types that no worker knows, once that was so for long enough."""

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol
from uuid import UUID

from windlass.model.failure import ErrorClass
from windlass.model.limits import PROMOTE_BATCH
from windlass.model.task import Due, Leadership
from windlass.telemetry import emit


class UnknownStore(Protocol):
    """What is asked of the store."""

    async def unknown_types(self) -> list[str]:
        """Return the types of ready tasks that no registered worker knows."""

    async def fail_unknown(
        self,
        type: str,  # noqa: A002 - as everywhere
        *,
        error: str,
        ready_for: timedelta,
        limit: int,
        leadership: Leadership,
    ) -> list[UUID]:
        """Fail tasks of a type that no registered worker knows; return which."""


class Look(Protocol):
    """How the chores of a turn look at the store."""

    async def look(self) -> tuple[Due, bool]:
        """Return what there may be to do, and whether workers that seem to be lost are so."""


class UnknownTypes:
    """Counts for how long each type was unknown, at every look of one leadership."""

    def __init__(
        self,
        store: UnknownStore,
        lookout: Look,
        *,
        grace: float,
        every: float,
        died: Callable[[Sequence[UUID]], None],
    ) -> None:
        self._store = store
        self._lookout = lookout
        self._grace = grace  # seconds
        self._every = every
        self._died = died
        self._leadership: Leadership | None = None
        self._seen: dict[str, float] = {}  # type → for how many seconds
        self._looked_at = 0.0  # monotonic

    async def __call__(self, leadership: Leadership) -> bool:
        """Look, and fail what is unknown for too long; true if there may be more of it."""
        over = await self._unknown_too_long(leadership)
        has_more = False
        for name in over:
            failed = await self._store.fail_unknown(
                name,
                error=_error(name, self._grace),
                ready_for=timedelta(seconds=self._grace),
                limit=PROMOTE_BATCH,
                leadership=leadership,
            )
            if failed:
                emit("task.unknown_type", type=name, tasks=len(failed), grace=f"{self._grace:g}s")
                self._died(failed)
            has_more = has_more or len(failed) >= PROMOTE_BATCH
        return has_more

    async def _unknown_too_long(self, leadership: Leadership) -> list[str]:
        _, is_believed = await self._lookout.look()
        if leadership != self._leadership or not is_believed:
            # Nobody knows what was before; or a worker that lives may have been taken for lost.
            self._leadership, self._seen = leadership, {}
            if not is_believed:
                return []
        began = time.monotonic()
        unknown = await self._store.unknown_types()
        # What happened in a long pause between two looks nobody has seen.
        passed = min(began - self._looked_at, 2 * self._every)
        self._looked_at = time.monotonic()
        self._seen = {
            name: self._seen[name] + passed if name in self._seen else 0.0 for name in unknown
        }
        return [name for name, seconds in self._seen.items() if seconds >= self._grace]


def _error(name: str, grace: float) -> str:
    said = (
        f"no worker has known the type '{name}' for over {grace:g} s; start a worker that defines it, "
        "or correct the name where it is enqueued, then replay the task"
    )
    return json.dumps({"type": "UnknownTask", "message": said, "class": ErrorClass.CODE_BUG})
