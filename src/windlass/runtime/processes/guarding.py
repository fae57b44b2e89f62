"""The worker's side of its guardian: tells it which processes there are, and puts another in its place when it ends."""

import os
import subprocess
import sys
import threading
from contextlib import suppress

from windlass.model.limits import shown
from windlass.runtime.processes import guardian
from windlass.service import backoff
from windlass.telemetry import emit

LEAVE_WITHIN = 1.0  # seconds


class Guarding:
    """Has a program that ends the groups of processes which a killed worker leaves behind.

    Without one the worker works all the same: its processes end by themselves, unless a handler keeps them
    from it, and what handlers have started goes on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # around what the program is told, and which one that is
        self._groups: set[int] = set()
        self._program: subprocess.Popen[bytes] | None = None
        self._is_over = threading.Event()

    def start(self) -> None:
        """Start it, and another whenever that has ended. Takes a moment, so not in the event loop."""
        self._begin()
        threading.Thread(target=self._keep, name="windlass-guardian", daemon=True).start()

    def begin(self, group: int) -> None:
        """Say that there is a group. From any thread."""
        with self._lock:
            self._groups.add(group)
            self._say(guardian.BEGIN, group)

    def end(self, group: int) -> None:
        """Say that there is none any more, while nobody else can have its number. From any thread."""
        with self._lock:
            self._groups.discard(group)
            self._say(guardian.END, group)

    def stop(self) -> None:
        """Let it end, and wait for that. From any thread."""
        self._is_over.set()
        with self._lock:
            program, self._program = self._program, None
        if program is None or program.stdin is None:
            return
        with suppress(BrokenPipeError), program.stdin:
            program.stdin.write(guardian.LEAVE + b"\n")
        try:
            program.wait(LEAVE_WITHIN)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()

    def _keep(self) -> None:
        ends = 0
        while True:
            program = self._program
            if program is not None:
                code = program.wait()
                if self._is_over.is_set():
                    return
                emit("process.failed", pid=program.pid, reason=f"no guardian: it ended with {code}")
            ends += 1
            if self._is_over.wait(backoff(ends)):
                return
            self._begin()

    def _begin(self) -> None:
        with self._lock:
            if self._program is not None and self._program.stdin is not None:
                self._program.stdin.close()
            self._program = None if self._is_over.is_set() else _started()
            for group in self._groups:
                self._say(guardian.BEGIN, group)

    def _say(self, kind: bytes, group: int) -> None:
        if self._program is not None and self._program.stdin is not None:
            with suppress(BrokenPipeError):  # it has ended, and the next one is told of all
                self._program.stdin.write(b"%b%d\n" % (kind, group))


def _started() -> subprocess.Popen[bytes] | None:
    try:
        return subprocess.Popen(  # noqa: S603 - our own file
            [sys.executable, "-I", "-S", guardian.__file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # whoever reads ours is to see its end when we end
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # signals of a terminal are not for it
        )
    except OSError as error:
        emit("process.failed", pid=None, reason=f"no guardian: {shown(error)}")
        return None
