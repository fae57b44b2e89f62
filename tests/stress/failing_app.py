"""The application of tasks that fail in every way there is, and what has to become of each."""

import asyncio
import ctypes
import os
import signal
import time

from windlass import App, Context, Fail, Retry, RetryAfter, Snooze

app = App(
    lease=3,
    heartbeat=0.75,
    sweep=0.5,
    leader_term=3,
    concurrency=20,
    buffer=50,
    processes=1,
    stuck_threads=30,
)
SOON = Retry(max_attempts=3, backoff="fixed", base=0.05, jitter="none")
MANY = Retry(max_attempts=30, backoff="fixed", base=0.05, jitter="none")
LIMIT = 0.2  # seconds
FOR_EVER = 1e6


class Odd(Exception):  # noqa: N818 - no rule knows it
    pass


# What works


@app.task(retry=MANY)
async def good(n: int) -> int:
    await asyncio.sleep(0.001 * (n % 10))
    return n


@app.task(retry=MANY)
def good_thread(n: int) -> int:
    time.sleep(0.001 * (n % 10))
    return n


@app.task(run="process", retry=MANY)
def good_process(n: int) -> int:
    return n


@app.task(retry=MANY)
async def recovers(ctx: Context) -> str:
    if ctx.attempt < 3:
        raise ConnectionError("not yet")
    return "in the end"


@app.task(retry=MANY)
async def asks_for_time(ctx: Context) -> None:
    if ctx.attempt == 1:
        raise RetryAfter(0.1, "too many requests")


@app.task(retry=MANY)
async def snoozes(until: float) -> None:
    if time.time() < until:
        raise Snooze(0.2)


# What uses up its attempts


@app.task(retry=SOON)
async def unreachable() -> None:
    raise ConnectionError("nobody is there")


@app.task(retry=SOON)
async def odd() -> None:
    raise Odd("whatever that is")


@app.task(retry=SOON, timeout=LIMIT)
async def sleeps() -> None:
    await asyncio.sleep(FOR_EVER)


@app.task(retry=SOON, timeout=LIMIT)
def sleeps_in_a_thread() -> None:
    time.sleep(1.0)


@app.task(retry=SOON, timeout=LIMIT)
async def blocks() -> None:
    while True:
        pass


@app.task(run="process", retry=SOON, timeout=LIMIT)
def hangs_in_a_process() -> None:
    time.sleep(FOR_EVER)


@app.task(run="process", retry=SOON)
def crashes_its_process() -> None:
    ctypes.string_at(0)


@app.task(run="process", retry=SOON)
def exits() -> None:
    os._exit(7)


# What fails at once


@app.task(retry=SOON)
async def wrong_program() -> None:
    raise KeyError("no such thing")


@app.task(retry=SOON)
async def refuses() -> None:
    raise Fail("never")


@app.task(retry=SOON)
async def wants_a_number(n: int) -> int:
    return n


@app.task(retry=SOON)
async def returns_nonsense() -> object:
    return object()


# What is not even begun


@app.task(retry=MANY)
async def too_late() -> None:
    await asyncio.sleep(0)


# What takes its worker with it, in each kind of handler. The first two end the process, the others make it useless.


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def deadlock() -> None:
    """Wait in the C library, which no signal ends, without the lock of the interpreter."""
    mutex = ctypes.create_string_buffer(64)
    library = ctypes.CDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


@app.task(retry=SOON)
async def kills() -> None:
    die()


@app.task(retry=SOON)
def kills_in_a_thread() -> None:
    die()


@app.task(retry=SOON)
async def crashes() -> None:
    ctypes.string_at(0)


@app.task(retry=SOON, timeout=LIMIT)
async def deadlocks() -> None:
    deadlock()


@app.task(retry=SOON, timeout=LIMIT)
def deadlocks_in_a_thread() -> None:
    deadlock()
