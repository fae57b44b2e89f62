"""How a worker is to work, and what it may have to itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Never, Protocol

from windlass.model.schedule import Schedule
from windlass.model.task import WorkerInfo
from windlass.runtime.processes.options import ProcessOptions
from windlass.runtime.serving import Serving


class OwnProcess(Protocol):
    """The process of a worker that has one to itself."""

    def times_asked(self) -> int:
        """How often it was asked to stop, whether or not the event loop has heard of it. From any thread."""

    def replace(self) -> Never:
        """Begin anew, or end if it was asked to stop. From any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How a worker works; durations are seconds."""

    info: WorkerInfo
    concurrency: int
    lease: float
    heartbeat: float
    poll: float
    ageing: float
    shutdown_timeout: float
    buffer: int
    buffer_bytes: int
    buffer_seconds: float
    max_result_bytes: int
    processes: ProcessOptions
    stuck_threads: int
    serving: Serving = field(default_factory=Serving)
    process: OwnProcess | None = None
    on_startup: Sequence[Callable[[], Any]] = ()
    on_shutdown: Sequence[Callable[[], Any]] = ()
    schedules: Sequence[Schedule] = ()
    owner: str = ""  # of these; without a name nothing is retired
