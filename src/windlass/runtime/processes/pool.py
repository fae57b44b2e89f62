"""As many processes as a worker may use, started ahead, and replaced when they end or are used up."""

import asyncio
import atexit
import multiprocessing.util  # noqa: F401 - at the end of the program it waits for all that it knows of
import os
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from windlass.runtime.processes.finding import Program
from windlass.runtime.processes.guarding import Guarding
from windlass.runtime.processes.messages import Answer, Died, Run
from windlass.runtime.processes.options import Wear
from windlass.runtime.processes.process import Process
from windlass.service import Stop, backoff
from windlass.telemetry import emit


class Running:
    """A handler that runs in a process."""

    def __init__(self, process: Process, run: Run) -> None:
        self._process = process
        self.answer: asyncio.Future[Answer] = process.run(run)

    def cancel(self) -> None:
        """Tell the handler that it should give way."""
        if not self.answer.done():
            self._process.cancel()

    def kill(self) -> None:
        """End its process, unless it has answered."""
        if not self.answer.done():
            self._process.kill()


class Pool:
    """Processes of one worker. Belongs to its event loop."""

    def __init__(self, *, size: int, program: Program, wear: Wear) -> None:
        self._size = size
        self._program = program
        self._wear = wear
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        # One thread for all starts: multiprocessing keeps its books for one at a time.
        self._spawner = ThreadPoolExecutor(1, "windlass-process-start")
        self._guarding = Guarding()
        self._all: set[Process] = set()
        self._free: list[Process] = []
        self._waiting: deque[asyncio.Future[Process | Died]] = deque()
        self._keeping: list[asyncio.Task[None]] = []
        self._stop = Stop()
        self.restarts: Counter[str] = Counter()  # by reason

    @property
    def filled(self) -> tuple[int, int]:
        """How many processes run a handler, and how many there are. Another thread may ask."""
        known = list(self._all)
        return sum(process.is_busy for process in known), len(known)

    async def start(self) -> None:
        """Start all, and wait until each is ready, or has failed to be."""
        atexit.register(self.kill)  # whatever happens: what is registered last is called first
        await self._loop.run_in_executor(self._spawner, self._guarding.start)
        tried = [self._loop.create_future() for _ in range(self._size)]
        self._keeping = [
            asyncio.create_task(self._keep(one), name="windlass-process-keeper") for one in tried
        ]
        await asyncio.wait(tried)

    async def stop(self) -> None:
        """End all: those that run something at once."""
        if self._stop:
            return
        self._stop.set()
        for process in list(self._all):
            if process.is_busy or process not in self._free:
                process.kill()
            else:
                process.replace("stopped")
        while self._answer_waiting(Died("is not there: the worker stops")):
            continue
        if self._keeping:
            await asyncio.wait(self._keeping)
        await self._loop.run_in_executor(self._spawner, self._guarding.stop)
        self._spawner.shutdown(wait=False)
        atexit.unregister(self.kill)

    def kill(self) -> None:
        """End all at once, whatever they run, for good. Another thread may ask."""
        if os.getpid() != self._pid:
            return  # a handler has forked, and this is the end of the copy
        for process in list(self._all):
            process.kill()
        self._guarding.stop()

    async def begin(self, run: Run) -> Running | Died:
        """Run a handler in the next process that is free."""
        process = await self._next()
        return process if isinstance(process, Died) else Running(process, run)

    async def _next(self) -> Process | Died:
        while True:
            process = self._free.pop() if self._free else await self._handed()
            if isinstance(process, Died) or not process.why:  # it may have ended meanwhile
                return process

    async def _handed(self) -> Process | Died:
        waiting: asyncio.Future[Process | Died] = self._loop.create_future()
        self._waiting.append(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                given = waiting.result()
                if isinstance(given, Process):
                    self._offer(given)
            raise

    def _offer(self, process: Process) -> None:
        """Hand a process to whoever waits, or keep it."""
        if process.why:
            return  # it is on its way out
        if not self._answer_waiting(process):
            self._free.append(process)

    def _answer_waiting(self, given: Process | Died) -> bool:
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(given)
                return True
        return False

    def _answered(self, process: Process) -> None:
        wear = self._wear
        if wear.age and self._loop.time() >= process.begun_at + wear.age:
            process.replace("age")
        elif wear.tasks and process.tasks >= wear.tasks:
            process.replace("tasks")
        elif wear.memory and process.resident > wear.memory:
            process.replace("memory")
        self._offer(process)

    async def _keep(self, tried: asyncio.Future[None]) -> None:
        """Have one process at any time, and put another in its place when it ends."""
        failures = 0
        while not self._stop:
            process = Process(
                program=self._program, guarding=self._guarding, answered=self._answered
            )
            self._all.add(process)
            is_ready = await process.start(self._spawner)
            if not tried.done():
                tried.set_result(None)
            if is_ready and not self._stop:
                await self._use(process)
            await process.leave()
            self._all.discard(process)
            if self._stop:
                return
            is_failed = not is_ready or (process.why == "died" and not process.begun)
            failures = failures + 1 if is_failed else 0
            self._tell(process, is_ready=is_ready)
            if failures:  # it would be no better at once
                await self._stop.wait(backoff(failures))

    async def _use(self, process: Process) -> None:
        """Offer a process until another is to take its place."""
        ageing = None
        if self._wear.age:
            ageing = self._loop.call_later(self._wear.age, self._age, process)
        self._offer(process)
        await process.until_replaced()
        if ageing is not None:
            ageing.cancel()
        with suppress(ValueError):
            self._free.remove(process)

    def _age(self, process: Process) -> None:
        if process in self._free:  # or it is looked at when it has answered
            process.replace("age")

    def _tell(self, process: Process, *, is_ready: bool) -> None:
        if not is_ready:
            emit("process.failed", pid=process.pid, reason=process.how)
            self._answer_waiting(Died(process.how))
            return
        self.restarts[process.why] += 1
        if process.why == "died":
            emit("process.died", pid=process.pid, reason=process.how)
        else:
            emit("process.replaced", pid=process.pid, reason=process.why, tasks=process.tasks)
