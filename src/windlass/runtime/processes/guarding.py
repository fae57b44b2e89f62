"""The worker's side of its guardian: tells it which processes there are."""

import os
import subprocess
import sys
from contextlib import suppress

from windlass.model.limits import shown
from windlass.runtime.processes import guardian
from windlass.telemetry import emit

LEAVE_WITHIN = 1.0  # seconds


class Guarding:
    """Has a program that ends the groups of processes which a killed worker leaves behind.

    Without one the worker works all the same: its processes end by themselves, unless a handler keeps them
    from it, and what handlers have started goes on.
    """

    def __init__(self) -> None:
        self._program: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it. Takes a moment, so not in the event loop."""
        try:
            self._program = subprocess.Popen(  # noqa: S603 - our own file
                [sys.executable, "-I", "-S", guardian.__file__, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # whoever reads ours is to see its end when we end
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # signals of a terminal are not for it
            )
        except OSError as error:
            emit("process.failed", pid=None, reason=f"no guardian: {shown(error)}")

    def begin(self, group: int) -> None:
        """Say that there is a group. From any thread."""
        self._say(guardian.BEGIN, group)

    def end(self, group: int) -> None:
        """Say that there is none any more, while nobody else can have its number. From any thread."""
        self._say(guardian.END, group)

    def stop(self) -> None:
        """Let it end, and wait for that. From any thread."""
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

    def _say(self, kind: bytes, group: int) -> None:
        program = self._program
        if program is not None and program.stdin is not None:
            with suppress(
                BrokenPipeError, ValueError
            ):  # somebody has ended it, or is just doing so
                program.stdin.write(b"%b%d\n" % (kind, group))
