"""Worker processes that a test starts, and that do not outlive it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from faults.processes import WorkerProcess

Start = Callable[..., WorkerProcess]
QUICK: dict[str, Any] = {"lease": 1.5, "heartbeat": 0.4, "sweep": 0.2, "leader_term": 1.0}


@pytest.fixture
def start(tmp_path: Path, database_url: str) -> Iterator[Start]:
    """Start a worker of `life_app`, with failpoints if they are named."""
    with ExitStack() as ending:
        numbers = count(1)

        def start(failpoints: str = "", **options: Any) -> WorkerProcess:
            options = {"url": database_url, "settings": QUICK} | options
            worker = WorkerProcess(
                "faults.life_app:app",
                log=tmp_path / f"worker-{next(numbers)}.log",
                folder=tmp_path,
                failpoints=failpoints,
                **options,
            )
            ending.callback(worker.end)
            return worker

        yield start
