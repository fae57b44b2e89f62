"""Handlers for processes, tame and wild: a process finds them here by their names."""

import asyncio
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from windlass import Context, Fail, RetryAfter, Snooze


class NoTextError(Exception):
    def __str__(self) -> str:
        raise LookupError("no text")


class OfTheBase(BaseException): ...


def pid() -> int:
    return os.getpid()


def double(n: int) -> int:
    return 2 * n


async def double_later(n: int) -> int:
    await asyncio.sleep(0)
    return 2 * n


def text_of(size: int) -> str:
    return "x" * size


def no_json() -> object:
    return object()


def told(ctx: Context) -> dict[str, Any]:
    deadline = None if ctx.deadline is None else ctx.deadline.isoformat()
    return {
        "task_id": ctx.task_id, "type": ctx.type, "attempt": ctx.attempt, "queue": ctx.queue,
        "max_attempts": ctx.max_attempts, "worker_id": ctx.worker_id, "fence": ctx.fence,
        "state": ctx.state, "cancelled": ctx.cancelled, "deadline": deadline,
    }  # fmt: skip


async def end_itself(ctx: Context) -> None:
    async with ctx.transaction():
        pass


RAISED: dict[str, Any] = {
    "value": lambda: ValueError("not that"),
    "exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
    "base": OfTheBase,
    "no text": NoTextError,
    "snooze": lambda: Snooze(7),
    "later": lambda: RetryAfter(9, "busy"),
    "fail": lambda: Fail("for good"),
}


def raising(name: str) -> None:
    error = RAISED[name]()
    raise error


# What ends a process


def segfault() -> None:
    ctypes.string_at(0)


def leave() -> None:
    os._exit(3)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def close_everything() -> None:
    os.closerange(3, 256)


# What a process has to bear


def fork() -> int:
    """Return here and in the copy."""
    os.fork()
    return os.getpid()


def fork_and_stay() -> int:
    """Leave a copy behind that holds every descriptor."""
    if not (copy := os.fork()):
        time.sleep(600)
    return copy


def leave_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(600,)).start()


def print_garbage() -> None:
    os.write(1, b"\xff\x00\x00\x01{" * 100)
    sys.stdout.write("\x00\ud800".encode("utf-8", "surrogatepass").decode("latin-1"))


def start_program(noted: str) -> None:
    """Start something that would outlive its process, and go on for ever."""
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(noted).write_text(str(program.pid))
    time.sleep(600)


def ignore_signals(noted: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Path(noted).write_text(str(os.getpid()))
    time.sleep(600)


def until_cancelled(ctx: Context, noted: str) -> str:
    Path(noted).write_text(str(os.getpid()))
    while not ctx.cancelled:
        time.sleep(0.01)
    return "gave way"


def note(noted: str) -> None:
    Path(noted).write_text(str(os.getpid()))


async def until_cancelled_in_a_coroutine(noted: str) -> None:
    note(noted)
    await asyncio.Event().wait()


def log(text: str) -> None:
    logger = logging.getLogger("shop.orders")
    logger.debug("not wanted")
    logger.info(text, extra={"order": 7, "basket": object()})
    try:
        os.environ["NO_SUCH_ORDER"]
    except LookupError:
        logger.exception("odd: %s", "\ud800")


def fail_to_start(*_: object) -> None:
    """Take the place of what a process does."""
    os._exit(7)


def never_ready(*_: object) -> None:
    time.sleep(600)
