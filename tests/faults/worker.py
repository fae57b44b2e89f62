"""A worker in a process of its own, and what it ran."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import windlass

APP = """
import asyncio
from windlass import App

app = App()

@app.task
async def note(n: int, ballast: str = "") -> None:
    with open("ran", "a") as ran:
        ran.write(f"{n}\\n")
    await asyncio.sleep(0.02)
"""


class WorkerProcess:
    """Its folder is the working directory of the process."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder = folder
        self.process = process

    def ran(self) -> list[int]:
        """The numbers of the tasks it ran, in order, each as often as it ran."""
        path = self.folder / "ran"
        return [int(n) for n in path.read_text().split()] if path.exists() else []

    def said(self) -> str:
        return (self.folder / "said").read_text()

    def stop(self) -> None:
        """Drain it; it has to end well."""
        self.process.terminate()
        assert self.process.wait(60) == 0, self.said()
        assert "Traceback" not in self.said()


@contextmanager
def worker_process(folder: Path, url: str, **settings: float) -> Iterator[WorkerProcess]:
    """Run `windlass worker` on this database until the context is left."""
    (folder / "shop.py").write_text(APP)
    path = os.pathsep.join([str(Path(windlass.__file__).parents[1]), *filter(None, sys.path)])
    variables = {f"WINDLASS_{name.upper()}": str(value) for name, value in settings.items()}
    with (folder / "said").open("a") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "windlass.cli", "worker", "shop:app"],
            cwd=folder,
            env=os.environ | variables | {"WINDLASS_DATABASE_URL": url, "PYTHONPATH": path},
            stderr=said,
            text=True,
        )
    try:
        yield WorkerProcess(folder, process)
    finally:
        process.kill()
        process.wait()
