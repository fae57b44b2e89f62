"""Named places in the life of a task at which a worker process kills, stops or pauses itself.

A place is `<what>.before` or `<what>.after`, where `what` is a method of the store or a stage of the
worker (`PLACES`). Arming one wraps that method in this process alone; what is not armed is not there,
so it costs nothing. `FAILPOINTS` in the environment arms them for a worker that a test starts:

    FAILPOINTS="settle.before=stop handler.after=kill" FAILPOINT_FOLDER=/folder

A place that is reached makes a file of its name in the folder. It acts once; a pause lasts until the
file `<place>.go` is there.
"""

import asyncio
import functools
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal, get_args

from windlass.runtime.executor import Executor
from windlass.runtime.slots import Slots
from windlass.runtime.worker import Worker
from windlass.store.port import Store
from windlass.store.postgres.store import PostgresStore

Act = Literal["kill", "stop", "pause"]
STAGES: dict[str, tuple[type, str]] = {
    "take": (Slots, "take"),  # a claim was granted, nothing of it has begun
    "handler": (Executor, "run"),
    "drain": (Worker, "_finish_or_release"),
    "leave": (Worker, "_leave"),
}
VERBS: dict[str, tuple[type, str]] = {
    name: (PostgresStore, name)
    for name in dir(Store)
    if not name.startswith("_") and asyncio.iscoroutinefunction(getattr(PostgresStore, name))
}
PLACES = {**VERBS, **STAGES}


def arm(place: str, act: Act, folder: Path) -> None:
    """Act the first time that this process reaches the place."""
    what, _, moment = place.rpartition(".")
    owner, name = PLACES[what]
    method: Callable[..., Awaitable[Any]] = getattr(owner, name)
    acted = False

    async def reach() -> None:
        nonlocal acted
        if not acted:
            acted = True
            (folder / place).touch()
            await _act(act, folder / f"{place}.go")

    @functools.wraps(method)
    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        if moment == "before":
            await reach()
        result = await method(*args, **kwargs)
        if moment == "after":
            await reach()
        return result

    setattr(owner, name, wrapped)


async def _act(act: Act, go: Path) -> None:
    if act == "pause":
        while not go.exists():  # noqa: ASYNC240 - the worker is to stand still
            await asyncio.sleep(0.01)
    else:
        os.kill(os.getpid(), signal.SIGKILL if act == "kill" else signal.SIGSTOP)


def arm_from_environment() -> None:
    """Arm what FAILPOINTS names."""
    for asked in os.environ.get("FAILPOINTS", "").split():
        place, _, act = asked.partition("=")
        assert act in get_args(Act), asked
        arm(place, act, Path(os.environ["FAILPOINT_FOLDER"]))  # type: ignore[arg-type]  # checked
