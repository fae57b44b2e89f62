"""The one shape of a background loop: it runs until it is asked to stop, and waits for no one."""

import asyncio
import contextvars
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, cast

from windlass.model.errors import StoreUnavailable, WindlassError
from windlass.model.limits import shown

T = TypeVar("T")

SHORTEST_PATIENCE = 5.0  # seconds: a busy server must be able to answer within the shortest lease
LONGEST_PATIENCE = 30.0
LONGEST_BACKOFF = 5.0


class Stop:
    """A request to stop that any number of loops can wait for."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._told: list[asyncio.Event] = []

    def __bool__(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        """Ask to stop."""
        self._event.set()
        for event in self._told:
            event.set()

    def tell(self, event: asyncio.Event) -> None:
        """Set this one too when the request is made: a loop then has but one thing to wait for."""
        self._told.append(event)
        if self:
            event.set()

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait for the request, at most so long; return whether it was made."""
        return await is_set_within(self._event, seconds)


async def is_set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for an event, at most so long; return whether it is set."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
    return event.is_set()


def backoff(failures: int, *, longest: float = LONGEST_BACKOFF) -> float:
    """Seconds to wait after so many failures in a row: longer each time, and never all at once."""
    return min(0.1 * 2.0 ** min(failures, 10), longest) * random.uniform(0.5, 1.0)  # noqa: S311


def patience(lease: timedelta) -> float:
    """How many seconds a loop waits for an answer of the store: what it did is needed by then."""
    return min(max(lease.total_seconds(), SHORTEST_PATIENCE), LONGEST_PATIENCE)


class answered_within:  # noqa: N801 - as it is read. No generator: every claim would pay for one
    """Take a store that is silent for one that cannot be reached.

    A connection on which nothing passes any more fails nobody who waits, and they would for ever.
    """

    __slots__ = ("_limit", "_seconds")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._limit = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError as expired:
            raise self._silent() from expired
        if isinstance(error, TimeoutError):
            raise self._silent() from error

    def _silent(self) -> StoreUnavailable:
        return StoreUnavailable(f"the store gave no answer within {self._seconds:g} s")


class CalledInEventLoop(WindlassError, RuntimeError):  # noqa: N818 - says what happened
    """A `_sync` method was called where its async twin belongs."""


def check_no_event_loop(said: str, *, instead: str) -> None:
    """Raise where an event loop runs, which a synchronous call would block."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise CalledInEventLoop(f"{said} would block the running event loop; use: {instead}")


def run_now(call: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, without an event loop."""
    try:
        call.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    call.close()
    raise RuntimeError("a call that was to be done at once has suspended")


async def in_thread(call: Callable[..., T], *arguments: Any) -> T:
    """Run a call in a thread of its own: those of the event loop may all be lost to what hangs in them."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    here = contextvars.copy_context()

    def run() -> None:
        outcome = outcome_of(partial(here.run, call, *arguments))
        with suppress(RuntimeError):  # the event loop is closed, and nobody waits any more
            loop.call_soon_threadsafe(answer_with, answer, *outcome)

    threading.Thread(target=run, name="windlass-call", daemon=True).start()
    return await answer


def outcome_of(call: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Make a call, and return what it returned and what it raised."""
    try:
        return call(), None
    except (StopIteration, GeneratorExit) as error:
        # A future refuses the one and a coroutine takes the other for its own end: whoever waits
        # would do so for ever.
        wrapped = RuntimeError(f"the call raised {shown(error)}")
        wrapped.__cause__ = error
        return None, wrapped
    except BaseException as error:  # noqa: BLE001 - handed to whoever waits
        return None, error


def answer_with(answer: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    """Tell whoever waits for a call what became of it, if they still do. In their event loop."""
    if answer.done():
        return
    if error is None:
        answer.set_result(value)
    else:
        answer.set_exception(error)


async def first_of(*waits: Awaitable[object]) -> None:
    """Wait for whichever comes first, and stop waiting for the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def stop_task(task: asyncio.Task[None]) -> None:
    """Cancel a background task and wait until it is gone."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


@asynccontextmanager
async def cancelled_by(task: asyncio.Task[None]) -> AsyncIterator[None]:
    """Cancel the block if the task beside it fails; whoever awaits the task next gets its error."""
    block = cast("asyncio.Task[Any]", asyncio.current_task())
    inside, failed = True, False

    def tell_block(_: asyncio.Task[None]) -> None:
        nonlocal failed
        if inside and not task.cancelled() and task.exception() is not None:
            failed = True
            block.cancel()

    task.add_done_callback(tell_block)
    try:
        yield
    except asyncio.CancelledError:
        if not failed:
            raise
    finally:
        inside = False
        if failed:
            block.uncancel()
