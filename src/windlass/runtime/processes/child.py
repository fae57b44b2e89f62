"""The side of the process: imports what handlers need, and runs one after the other."""

import asyncio
import contextlib
import contextvars
import inspect
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Never

from windlass.context import Context, current_job
from windlass.encoding import encode_json
from windlass.model.errors import ConfigurationError
from windlass.model.failure import ErrorClass
from windlass.model.task import Fence
from windlass.runtime.processes.finding import Place, Program, find
from windlass.runtime.processes.logs import Forwarder
from windlass.runtime.processes.messages import (
    HEADER,
    Cancel,
    FromProcess,
    Leave,
    Raised,
    Ready,
    Returned,
    Run,
    ToProcess,
    frame,
    length,
    read_by_process,
)
from windlass.runtime.processes.raising import certain, raised

MEMORY = "memory:"
CUT_OFF = 113  # the exit code of a process that cannot answer


def main(
    connection: socket.socket,
    worker: int,
    program: tuple[str, str, tuple[str, ...]],
    levels: dict[str, int],
) -> None:
    """Be one of a worker's processes, until it says so or is gone."""
    _stand_apart(worker)
    Child(connection, Program(*program)).run(levels)


def _stand_apart(worker: int) -> None:
    """Leave it to the worker when to end, and end with it."""
    # Signals from a terminal go to a group. What handlers start is in this one, and ends with it.
    os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stay)  # not ignored: what handlers start would inherit that
    if (
        os.getppid() != worker
    ):  # it is gone already, and perhaps before it could name us to its guardian
        os._exit(1)


def _stay(*_: object) -> None:
    """Go on."""


class Child:
    """A process of the pool, as it sees itself."""

    def __init__(self, connection: socket.socket, program: Program) -> None:
        self._program = program
        connection.set_inheritable(False)
        self._connection = connection
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._work: SimpleQueue[Run | None] = SimpleQueue()
        self._give_way: Callable[[], object] | None = None  # tells the handler that runs
        self._placed: list[Any] = []  # applications that use the worker's database
        self._lasting = contextlib.ExitStack()

    def run(self, levels: dict[str, int]) -> None:
        """Get ready, then run what the worker sends."""
        Forwarder(self._send).install(levels)
        threading.Thread(target=self._listen, name="windlass-worker", daemon=True).start()
        self._program.load()
        self._send(Ready())
        while (asked := self._work.get()) is not None:
            answer = contextvars.copy_context().run(self._perform, asked)
            if os.getpid() != self._pid:
                os._exit(0)  # a handler has forked, and this is the copy
            answer.resident = _resident()
            _flush()
            try:
                self._send(answer)
            except OSError:  # a handler has closed what is not its own
                os._exit(CUT_OFF)

    # From and to the worker

    def _listen(self) -> None:
        try:
            while True:
                self._hear(read_by_process(self._read(length(self._read(HEADER.size)))))
        finally:
            # The worker is gone, or the connection to it: whatever runs here runs for nobody.
            if os.getpgrp() == self._pid:
                os.killpg(self._pid, signal.SIGKILL)
            os._exit(1)

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            part = self._connection.recv(min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _hear(self, message: ToProcess) -> None:
        match message:
            case Run():
                self._work.put(message)
            case Cancel():
                give_way = self._give_way
                if give_way is not None:
                    give_way()
            case Leave():
                self._work.put(None)

    def _send(self, message: FromProcess) -> None:
        if os.getpid() == self._pid:
            sent = frame(message)
            with self._sending:
                self._connection.sendall(sent)

    # A handler

    def _perform(self, asked: Run) -> Returned | Raised:
        try:
            found = find(Place(asked.module, asked.qualname), asked.type, self._program.app())
            self._place(found.app)
        except BaseException as error:  # noqa: BLE001 - the module brings its own code
            return certain(error, ErrorClass.TRANSIENT)  # another release may be on its way
        codec = found.definition.codec
        try:
            arguments = codec.decode(asked.payload)
        except BaseException as error:  # noqa: BLE001 - the types of arguments bring their own
            return certain(error, ErrorClass.PERMANENT_INPUT)
        context = _context(asked)
        self._give_way = context.cancel
        current_job.set((getattr(found.app, "registry", None), _Here(asked)))
        try:
            if codec.context_name is not None:
                arguments[codec.context_name] = context
            value = codec.call(found.definition.function, arguments)
            if inspect.iscoroutine(value):
                value = asyncio.run(self._to_end(value, context, found.app))
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything
            return raised(error, found.definition, asked.error_paths)
        finally:
            self._give_way = None
        try:
            return Returned(_encoded(value, asked))
        except BaseException as error:  # noqa: BLE001 - what was returned brings its own code
            return certain(error, ErrorClass.CODE_BUG)

    def _place(self, app: Any) -> None:
        """Have an application use the database of the worker: a test may have given it another."""
        if app is None or any(app is one for one in self._placed):
            return
        url = self._program.url
        if url == MEMORY:
            self._lasting.enter_context(app.kept_at(url, memory=_OutOfReach()))
        elif app.url != url:
            self._lasting.enter_context(app.kept_at(url))
        self._placed.append(app)

    async def _to_end(self, call: Coroutine[Any, Any, Any], context: Context, app: Any) -> Any:
        loop, handler = asyncio.get_running_loop(), asyncio.ensure_future(call)

        def give_way() -> None:
            context.cancel()
            loop.call_soon_threadsafe(handler.cancel)

        self._give_way = give_way
        try:
            return await handler
        finally:
            if app is not None:
                await app.close()  # what this event loop holds of it


def _context(asked: Run) -> Context:
    deadline = None
    if asked.timeout is not None:
        deadline = datetime.now(UTC) + timedelta(seconds=asked.timeout)
    return Context(
        task_id=str(asked.task_id),
        type=asked.type,
        attempt=asked.attempt,
        max_attempts=asked.max_attempts,
        queue=asked.queue,
        worker_id=asked.worker_id,
        fence=asked.fence,
        deadline=deadline,
        state=None,  # it is in the worker's process
        _own_end=_NoOwnEnd(),
    )


def _encoded(value: Any, asked: Run) -> str | None:
    if value is None or not asked.keep_result:
        return None
    what = f"result of task '{asked.type}'"
    return encode_json(value, what=what, max_bytes=asked.max_result_bytes)


class _Here(NamedTuple):
    """What runs in this process, for the enqueues of its handler."""

    asked: Run

    @property
    def fence(self) -> Fence:
        return Fence(self.asked.token, self.asked.task_id, self.asked.generation)

    def overran(self, since: float) -> bool:  # noqa: ARG002 - whatever the time
        """No: this process is killed when its time is over."""
        return False

    def awaiting(self, *_: object, **__: object) -> contextlib.AbstractContextManager[None]:
        """Nobody is told: the worker does not see what its processes wait for."""
        return contextlib.nullcontext()


class _OutOfReach:
    """Stands for a store that is in the memory of the worker."""

    def __getattr__(self, name: str) -> Never:
        raise ConfigurationError(
            "this runs in a process, from where 'memory:' cannot be reached: it is inside the worker; use "
            "postgresql://… or embedded:, or define the task with run='thread'"
        )


class _NoOwnEnd:
    """A task that runs in a process is ended by its worker alone."""

    def _refuse(self, *_: object, **__: object) -> Never:
        raise ConfigurationError(
            "ctx.transaction() and ctx.complete() are not there in a process; return the result, or define "
            "the task with run='async' or run='thread'"
        )

    transaction = set_result = complete = complete_sync = _refuse


def _resident() -> int:
    """How many bytes of memory this process holds."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource  # noqa: PLC0415 - where there is no /proc; the most it has held

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a handler may have closed or replaced it
            stream.flush()
