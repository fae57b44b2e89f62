"""One process of the pool, as the event loop of the worker sees it."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess

import msgspec

from windlass.model.limits import shown
from windlass.runtime.processes import child
from windlass.runtime.processes.finding import Program
from windlass.runtime.processes.guarding import Guarding
from windlass.runtime.processes.logs import levels, relog
from windlass.runtime.processes.messages import (
    HEADER,
    Answer,
    Cancel,
    Died,
    FromProcess,
    Leave,
    Logged,
    Raised,
    Ready,
    Returned,
    Run,
    ToProcess,
    frame,
    length,
    read_by_worker,
)

READY_WITHIN = 60.0  # seconds, to import what handlers need
LEAVE_WITHIN = 1.0  # for one that was asked to end; a thread that a handler left may hold it up
READ_ON = 0.5  # for what it had sent before it ended


class Process:
    """A process that runs one handler at a time."""

    def __init__(
        self, *, program: Program, guarding: Guarding, answered: Callable[["Process"], None]
    ) -> None:
        self._program = program
        self._guarding = guarding
        self._answered = answered
        self._loop = asyncio.get_running_loop()
        self._process: SpawnProcess | None = None
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._answer: asyncio.Future[Answer] | None = None
        self._is_over = asyncio.Event()
        self._replace = asyncio.Event()
        self._is_cut = False
        self._closing: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.begun_at = self._loop.time()
        self.begun = 0  # tasks
        self.tasks = 0  # that have ended in it
        self.resident = 0  # bytes, after the last of them
        self.why = ""  # it is to be replaced, or was: died, killed, tasks, age, memory
        self.how = ""  # it ended

    # From its start to its end

    async def start(self, spawner: Executor) -> bool:
        """Start it; return whether it is ready. If not, `how` says what became of it."""
        try:
            reader = await self._launch(spawner)
        except Exception as error:  # noqa: BLE001 - the worker lives, and says why it has none
            if self._writer is not None:
                self._writer.close()
            self._is_over.set()
            self.how = f"could not be started: {shown(error)}"
            return False
        if self.pid is not None:
            self._guarding.begin(self.pid)
        if self.why:  # meanwhile
            self._signal(signal.SIGKILL)
        self._reading = asyncio.create_task(self._read(reader), name="windlass-process")
        threading.Thread(target=self._watch, name="windlass-process-end", daemon=True).start()
        await asyncio.wait([self._ready], timeout=READY_WITHIN)
        if self._is_over.is_set():
            self.how += " before it was ready; standard error may say why"
            return False
        if not self._ready.done():
            self.kill()
            await self._is_over.wait()
            self.how = f"was not ready within {READY_WITHIN:g} s"
            return False
        return True

    async def _launch(self, spawner: Executor) -> asyncio.StreamReader:
        """Start it, and return where it answers."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = get_context("spawn").Process(
                target=child.main,
                args=(theirs, os.getpid(), tuple(self._program), levels()),
                name="windlass-process",
            )
            # Before it runs: whenever it ends, there is a connection to close.
            try:
                reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            except BaseException:
                ours.close()
                raise
            # Always to its end: one that nobody knows of could not be ended.
            starting = self._loop.run_in_executor(spawner, process.start)
            self._process = process
            await asyncio.wait([starting])
            starting.result()
        return reader

    @property
    def pid(self) -> int | None:
        """Its number, if it was started."""
        return None if self._process is None else self._process.pid

    @property
    def is_busy(self) -> bool:
        """Whether it runs a handler."""
        return self._answer is not None

    def run(self, message: Run) -> asyncio.Future[Answer]:
        """Run a handler; the answer never raises, and is not to be cancelled."""
        self.begun += 1
        answer = self._answer = self._loop.create_future()
        self._send(message)
        return answer

    def cancel(self) -> None:
        """Tell the handler that it should give way."""
        self._send(Cancel())

    def kill(self) -> None:
        """End it now, with whatever its handlers have started."""
        self.replace("killed")
        self._signal(signal.SIGKILL)

    def replace(self, why: str) -> None:
        """Say that another should take its place, and why."""
        self.why = self.why or why
        self._replace.set()

    async def until_replaced(self) -> None:
        """Wait until another should take its place."""
        await self._replace.wait()

    async def leave(self) -> None:
        """Let it end, and insist."""
        if not self._is_over.is_set():
            self._send(Leave())
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_WITHIN):
                    await self._is_over.wait()
        if not self._is_over.is_set():
            self._signal(signal.SIGKILL)
            await self._is_over.wait()
        if self._closing is not None:
            await asyncio.wait([self._closing])

    def _signal(self, number: int) -> None:
        pid = self.pid
        if pid is None or self._is_over.is_set():
            return
        with suppress(ProcessLookupError, PermissionError):  # it has just ended
            os.kill(pid, number)
        with suppress(ProcessLookupError, PermissionError):  # or has no group of its own yet
            os.killpg(pid, number)

    # What it says

    def _send(self, message: ToProcess) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(EOFError, OSError, ValueError, msgspec.MsgspecError):
            while True:
                size = length(await reader.readexactly(HEADER.size))
                self._hear(read_by_worker(await reader.readexactly(size)))
        self._loop.call_later(READ_ON, self._cut)

    def _cut(self) -> None:
        """End it, if it has not ended by itself: it cannot be talked to any more."""
        if not self._is_over.is_set():
            self._is_cut = True
            self._signal(signal.SIGKILL)

    def _hear(self, message: FromProcess) -> None:
        match message:
            case Ready():
                if not self._ready.done():
                    self._ready.set_result(None)
            case Logged():
                with suppress(Exception):  # of whoever takes in the log
                    relog(message)
            case Returned() | Raised():
                self.tasks += 1
                self.resident = message.resident
                self._end(message)
                self._answered(self)

    def _end(self, answer: Answer) -> None:
        waiting, self._answer = self._answer, None
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    # Its end, seen from a thread: a descriptor that tells of it may be held by what a handler forked

    def _watch(self) -> None:
        process, pid = self._process, self.pid
        assert process is not None and pid is not None  # noqa: S101, PT018 - it was started
        can_look = hasattr(os, "waitid")
        if can_look:
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            # Before its number is free for others: what handlers have left behind in its group.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            self._guarding.end(pid)
        process.join()
        if not can_look:
            self._guarding.end(pid)
        with suppress(RuntimeError):  # the event loop is closed, and nobody waits any more
            self._loop.call_soon_threadsafe(self._ended, process.exitcode)

    def _ended(self, code: int | None) -> None:
        is_killed = self.why == "killed"
        self.how = _how(code, is_expected=is_killed, is_cut=self._is_cut)
        self.replace("died")
        self._is_over.set()
        if not self._ready.done():
            self._ready.set_result(None)
        self._closing = asyncio.create_task(self._close(), name="windlass-process-close")

    async def _close(self) -> None:
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=READ_ON)
            self._reading.cancel()
        self._end(Died(self.how))
        if self._writer is not None:
            self._writer.close()
            with suppress(OSError):  # it had written to a process that was gone
                await self._writer.wait_closed()


def _how(code: int | None, *, is_expected: bool, is_cut: bool) -> str:
    if code is None:
        return "ended in a way that is not known"
    if is_cut or code == child.CUT_OFF:
        return "lost the connection to its worker"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:
        name = ""
    said = f"was ended by signal {-code}{name}"
    if -code != signal.SIGKILL or is_expected:
        return said
    return f"{said}, which its worker did not send: perhaps the system was out of memory"
