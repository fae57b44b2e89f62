"""The application of workers that a handler makes useless."""

import asyncio
import ctypes
import faulthandler
import os
import signal
import threading
import time
from contextlib import suppress

from windlass import App, Retry

app = App()
faulthandler.register(signal.SIGTERM)  # as an application may do
if "THREAD_AT_IMPORT" in os.environ:
    threading.Thread(target=time.sleep, args=(1e6,)).start()
FOR_EVER = 1e6
AT_ONCE = Retry(max_attempts=2, base=0.0)


@app.task(retry=3)
async def good(n: int) -> int:
    await asyncio.sleep(0)
    return n


@app.task(retry=3, keep_result=False)
async def waits(seconds: float) -> None:
    """Runs beside one that blocks, and is none of its business."""
    await asyncio.sleep(seconds)


def go_on_whatever_is_raised() -> None:
    while True:
        with suppress(BaseException):
            time.sleep(FOR_EVER)


@app.task(retry=AT_ONCE, timeout=0.3)
async def stubborn() -> None:
    go_on_whatever_is_raised()


@app.task(retry=1, timeout=0.3)
async def calls_back() -> None:
    """Blocks in what the event loop calls for it."""
    asyncio.get_running_loop().call_soon(go_on_whatever_is_raised)
    await asyncio.sleep(FOR_EVER)


@app.task(retry=1, timeout=0.3)
async def abandoned() -> None:
    """Blocks after it was given up."""
    with suppress(BaseException):
        await asyncio.sleep(FOR_EVER)
    with suppress(BaseException):
        await asyncio.sleep(6)
    go_on_whatever_is_raised()


@app.task(retry=3)
async def computes() -> None:
    """Blocks for as long as it likes: it has no time limit."""
    while True:
        with suppress(Exception):
            time.sleep(0.01)


@app.task(retry=3)
async def computes_in_c() -> None:
    """Blocks where no handler of a signal in Python runs."""
    wait_in_c()


@app.task(retry=3)
async def leaves_block() -> None:
    """Ends, and something that it has started blocks."""
    asyncio.get_running_loop().call_soon(wait_in_c)


@app.task(retry=1, timeout=0.3)
async def blocks_at_last() -> None:
    """Blocks when it is cancelled for the last time: when everything else has ended."""
    while not is_leaving.is_set():
        with suppress(BaseException):
            await asyncio.sleep(FOR_EVER)
    go_on_whatever_is_raised()


@app.task(retry=1, timeout=0.3)
async def blocks_the_end() -> None:
    """Blocks while the worker leaves."""
    with suppress(BaseException):
        await asyncio.sleep(FOR_EVER)
    with suppress(BaseException):
        await is_leaving.wait()
    go_on_whatever_is_raised()


is_leaving = asyncio.Event()


@app.on_shutdown
async def leave() -> None:
    is_leaving.set()
    await asyncio.sleep(0.1)
    if fails_at_last:
        raise RuntimeError("the last hook")


fails_at_last: list[bool] = []


@app.task(retry=1)
async def fails_the_end() -> None:
    """Leaves a thread behind, and lets the worker end with an error."""
    fails_at_last.append(True)
    threading.Thread(target=time.sleep, args=(FOR_EVER,)).start()


@app.task(retry=1, timeout=0.3)
async def to_thread() -> None:
    """Leaves a thread behind that the event loop has given it."""
    await asyncio.to_thread(time.sleep, FOR_EVER)


@app.task(retry=1, timeout=0.3)
async def starts_thread() -> None:
    """Leaves a thread of its own behind, for which the interpreter would wait."""
    threading.Thread(target=time.sleep, args=(FOR_EVER,)).start()
    await asyncio.sleep(FOR_EVER)


@app.task(retry=1)
def forks() -> int:
    """Ends a copy of the worker by the signal that asks the worker to stop."""
    told, telling = os.pipe()
    copy = os.fork()
    if copy == 0:
        os.write(telling, b"here")
        time.sleep(FOR_EVER)
    os.read(told, 4)
    os.kill(copy, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])


@app.task
async def look_up() -> str:
    """Needs one of the same threads."""
    return await asyncio.to_thread(str.upper, "found")


def wait_in_c() -> None:
    """Wait in the C library, which no signal ends, without the lock of the interpreter."""
    mutex = ctypes.create_string_buffer(64)
    library = ctypes.CDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


@app.task(retry=AT_ONCE, timeout=0.3)
async def deadlocked() -> None:
    """Waits there, in something that it has started."""

    async def part() -> None:
        wait_in_c()

    await asyncio.gather(part())


@app.task(retry=1, timeout=0.2)
def hung(n: int) -> None:
    """A thread that never ends."""
    time.sleep(FOR_EVER + n)
