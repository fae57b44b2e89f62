"""Tells systemd how a service fares, if it asks to be told: Type=notify, WatchdogSec=."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from windlass.service import Stop
from windlass.telemetry import emit

LISTEN_WITHIN = 1.0  # seconds: while it is waited for, nothing else is done


def notify(state: str, *, patience: float = LISTEN_WITHIN) -> None:
    """Tell a state, such as READY=1; nothing happens where nobody listens.

    If too much lies there unread it is waited for so many seconds, and then told of in the log.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]  # one without a file
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(patience)
            sender.sendto(state.encode(), address)
    except OSError as error:
        emit("systemd.deaf", state=state, error=error)


def watchdog_interval() -> float | None:
    """How many seconds may lie between two signs of life, twice within the limit; None: not asked."""
    limit, process = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID")
    if not limit.isdecimal() or process not in (None, str(os.getpid())):
        return None
    return int(limit) / 2_000_000


@asynccontextmanager
async def watchdog_told() -> AsyncIterator[None]:
    """Give systemd signs of life while the block lasts, if it wants some.

    From this event loop, for that is to turn.
    """
    left = Stop()
    telling = asyncio.create_task(_tell_watchdog(left), name="windlass-watchdog")
    try:
        yield
    finally:
        left.set()
        await telling


async def _tell_watchdog(left: Stop) -> None:
    while not await left.wait(watchdog_interval()):
        notify("WATCHDOG=1", patience=0)  # the next one says the same
