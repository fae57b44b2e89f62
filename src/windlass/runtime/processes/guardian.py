"""A program beside a worker, which outlives it: ends what the handlers in its processes have started.

A worker that was killed cannot do so any more, nor can its processes be relied on: each ends when it sees
that the worker is gone, but a handler may keep the lock of the interpreter, and then it sees nothing.
It is run by itself, with nothing but the standard library, so that it is small and soon there.
"""

import os
import select
import signal
import sys
from contextlib import suppress

LOOK_EVERY = 1.0  # seconds: what a handler has forked may hold the connection that tells of the end
BEGIN, END, LEAVE = b"+", b"-", b"."


def main(worker: int) -> None:
    """Take in which process groups there are until the worker is gone, and then end them."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # as long as the worker is there it may need us
    groups: set[int] = set()
    rest = b""
    while True:
        is_gone = os.getppid() != worker  # asked first: what it has said before is there to be read
        readable, _, _ = select.select([0], [], [], 0 if is_gone else LOOK_EVERY)
        said = os.read(0, 1 << 16) if readable else b""
        if not said and (readable or is_gone):
            break
        *lines, rest = (rest + said).split(b"\n")
        for line in lines:
            kind, number = line[:1], line[1:]
            if kind == LEAVE:
                return
            (groups.add if kind == BEGIN else groups.discard)(int(number))
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
