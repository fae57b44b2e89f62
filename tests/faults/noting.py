"""A worker of `noting_app`, what it ran, and tasks for it."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from faults.processes import DEADLINE, WorkerProcess
from windlass import App, StoreUnavailable


class NotingWorker(WorkerProcess):
    """Its folder is the working directory of the process."""

    def __init__(self, folder: Path, url: str, settings: dict[str, float]) -> None:
        self._ran = folder / "ran"
        log = folder / "worker.log"
        super().__init__(
            "faults.noting_app:app", url=url, log=log, folder=folder, settings=settings
        )

    def ran(self) -> list[int]:
        """The numbers of the tasks it ran, in order, each as often as it ran."""
        return [int(n) for n in self._ran.read_text().split()] if self._ran.exists() else []

    def drain(self) -> None:
        """Stop it; it has to end well."""
        assert self.stop() == 0, self.said()
        assert "Traceback" not in self.said()


@contextmanager
def noting_worker(folder: Path, url: str, **settings: float) -> Iterator[NotingWorker]:
    """Run a worker on this database until the context is left."""
    worker = NotingWorker(folder, url, settings)
    try:
        yield worker
    finally:
        worker.end()


async def enqueue_in_the_end(app: App, n: int) -> None:
    """Enqueue again and again until the database takes it."""
    deadline = time.monotonic() + DEADLINE
    while True:
        try:
            await app.enqueue("note", {"n": n})
        except StoreUnavailable:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        else:
            return
