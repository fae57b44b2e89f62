"""The shape of a case, and what all of them are given."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bench.contenders import Contender
from bench.ratios import Values
from bench.stage import Stage

COSTS = ("rate", "worker_us", "postgres_us", "statements", "wal", "wal_all", "buffers", "rss_mb")


@dataclass(frozen=True)
class Sizes:
    """How much is done in a run."""

    tasks: int = 50_000
    singles: int = 1_000
    computing: int = 200
    failing_seconds: float = 15.0
    latency_seconds: float = 5.0
    idle_seconds: float = 30.0  # some heartbeats and terms, of which each comes every few seconds
    pending: int = 1_000_000
    finished: int = 10_000_000
    snapshot_tasks: int = 300_000


@dataclass(frozen=True)
class Contest:
    """Who takes part, where, and with how much."""

    stage: Stage
    ours: Contender
    yardstick: Contender
    peers: tuple[Contender, ...]
    sizes: Sizes

    @property
    def queues(self) -> tuple[Contender, ...]:
        """Windlass, then its peers."""
        return (self.ours, *self.peers)


@dataclass(frozen=True)
class Run:
    """What is measured again in every round."""

    label: str
    measure: Callable[[], Values]


@dataclass(frozen=True)
class Case:
    """Runs that take turns; `pairs` are divided by each other, in each of the values compared."""

    name: str
    about: str
    runs: tuple[Run, ...]
    pairs: tuple[tuple[str, str], ...]
    compared: tuple[str, ...] = ("rate",)
    shown: tuple[str, ...] = COSTS


def against(label: str, others: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Compare one with each of the others."""
    return tuple((label, other) for other in others if other != label)
