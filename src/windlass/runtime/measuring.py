"""Metrics if there is something to write them with: the official client is an extra."""

from collections import Counter
from collections.abc import Callable, Sequence
from http import HTTPStatus
from importlib.util import find_spec
from typing import Any, Protocol

from windlass.breaker import BreakerReport
from windlass.runtime.monitor import Page

HOW_TO_INSTALL = "metrics need the extra 'metrics': pip install prometheus-client\n"


class Measures(Protocol):
    """Takes in what the stages tell, and shows it."""

    def __call__(self, event: str, batch: Any) -> None:
        """Take in what a stage tells."""

    def page(self) -> Page:
        """Show everything."""


class Counts(Protocol):
    """What is to be known of the processes of a worker. Another thread may ask."""

    @property
    def filled(self) -> tuple[int, int]:
        """How many processes run a handler, and how many there are."""

    @property
    def restarts(self) -> Counter[str]:
        """How many were replaced, by the reason."""


def new_metrics(
    slots: Callable[[], tuple[int, int]],
    is_leader: Callable[[], bool],
    *,
    processes: Counts | None = None,
    breakers: Callable[[], Sequence[BreakerReport]] = tuple,
    stuck_threads: Callable[[], int] = int,
) -> Measures:
    """Make metrics, or what says that none are made."""
    if find_spec("prometheus_client") is None:
        return _NotInstalled()
    from windlass.runtime.metrics import Metrics  # noqa: PLC0415 - needs the extra

    return Metrics(
        slots, is_leader, processes=processes, breakers=breakers, stuck_threads=stuck_threads
    )


class _NotInstalled:
    def __call__(self, event: str, batch: Any) -> None:
        """Forget it."""

    def page(self) -> Page:
        return Page(HTTPStatus.NOT_IMPLEMENTED, "text/plain", HOW_TO_INSTALL.encode())
