"""Handlers that run in processes, which find them here by their names."""

import os
import time
from pathlib import Path
from typing import Any

from windlass import Context, Fail, RetryAfter, Snooze


def square(n: int) -> int:
    return n * n


async def square_later(ctx: Context, n: int) -> dict[str, Any]:
    return {"square": n * n, "worker": ctx.worker_id, "state": ctx.state}


def die_at_first(ctx: Context) -> str:
    if ctx.attempt == 1:
        os._exit(3)
    return "survived"


def steer(ctx: Context, how: str) -> str:
    if ctx.attempt == 1 and how == "retry":
        raise RetryAfter(0, "busy")
    if how == "snooze" and not Path(ctx.queue).exists():
        raise Snooze(3600)
    if how == "fail":
        raise Fail("no use")
    return "done"


class OddError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"odd\ud800: {code}")
        self.code = code
        self.far = 10**40


def be_odd(code: int) -> None:
    raise OddError(code)


def note(noted: str) -> int:
    """Write down where it runs."""
    Path(noted).write_text(str(os.getpid()))
    return os.getpid()


def hang(noted: str) -> None:
    """Say that it runs, and never end."""
    note(noted)
    time.sleep(600)


def wait_for(noted: str, let_go: str) -> int:
    """Run until there is a file."""
    note(noted)
    while not Path(let_go).exists():
        time.sleep(0.01)
    return os.getpid()


def give_way(ctx: Context, noted: str) -> None:
    note(noted)
    while not ctx.cancelled:
        time.sleep(0.01)


class Kept:
    @staticmethod
    def cube(n: int) -> int:
        return n**3
