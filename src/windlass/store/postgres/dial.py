"""Opening a connection: the host of several that will do, and a server of our own brought back."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import asyncpg

from windlass.store.postgres.url import several_hosts

Revive = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """A way to the database."""

    url: str
    pooler: bool = False  # it leads through a pooler in transaction mode
    revive: Revive | None = None  # brings up a server of our own that has ended


NEXT_HOST_AFTER = 1.0  # seconds without an answer before the next host is tried as well
# What says that another host may do, or that nobody is there.
_ELSEWHERE = (
    OSError,
    asyncpg.CannotConnectNowError,
    asyncpg.ConnectionDoesNotExistError,
    asyncpg.TargetServerAttributeNotMatched,
)


async def dial(revive: Revive | None, url: str, **options: Any) -> asyncpg.Connection:
    """Connect; if nobody is there, let the server be started again and try once more."""
    hosts = several_hosts(url)
    if hosts:
        return await _dial_any(url, hosts, options)
    try:
        return await asyncpg.connect(url, **options)
    except (TimeoutError, asyncpg.TargetServerAttributeNotMatched):  # somebody is there
        raise
    except _ELSEWHERE:
        if revive is None:
            raise
    await revive()
    return await asyncpg.connect(url, **options)


async def _dial_any(
    url: str, hosts: Iterable[tuple[str, int]], options: dict[str, Any]
) -> asyncpg.Connection:
    """Try the hosts in their order; one that is silent does not keep us from the next.

    The driver by itself would wait for it as long as for all of them.
    """
    attempts: list[asyncio.Task[asyncpg.Connection]] = []
    chosen = None
    try:
        for host, port in hosts:
            dialling = asyncpg.connect(url, host=host, port=port, **options)
            attempts.append(asyncio.ensure_future(dialling))
            chosen = await _first_to_succeed(attempts, NEXT_HOST_AFTER)
            if chosen is not None:
                return chosen.result()
        chosen = await _first_to_succeed(attempts, None)
        if chosen is not None:
            return chosen.result()
    finally:
        await _give_up(attempt for attempt in attempts if attempt is not chosen)
    raise _most_telling([attempt.exception() for attempt in attempts])


async def _first_to_succeed(
    attempts: list[asyncio.Task[asyncpg.Connection]], seconds: float | None
) -> asyncio.Task[asyncpg.Connection] | None:
    """Wait until one has succeeded, all have failed, or so long."""
    deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
    while True:
        for attempt in attempts:
            if attempt.done() and attempt.exception() is None:
                return attempt
        waiting = [attempt for attempt in attempts if not attempt.done()]
        left = None if deadline is None else deadline - asyncio.get_running_loop().time()
        if not waiting or (left is not None and left <= 0):
            return None
        await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)


async def _give_up(attempts: Iterable[asyncio.Task[asyncpg.Connection]]) -> None:
    others = list(attempts)
    for attempt in others:
        attempt.cancel()
    for outcome in await asyncio.gather(*others, return_exceptions=True):
        if not isinstance(outcome, BaseException):
            outcome.terminate()  # as good as the chosen one, and a moment late


def _most_telling(errors: list[BaseException | None]) -> BaseException:
    """A refusal that no other host explains, then a host that is there and will not do."""
    found = [error for error in errors if error is not None]
    refusals = [error for error in found if not isinstance(error, _ELSEWHERE)]
    standbys: list[BaseException] = [
        error for error in found if isinstance(error, asyncpg.TargetServerAttributeNotMatched)
    ]
    return [*refusals, *standbys, *found][0]
