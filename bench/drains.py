"""A drain: tasks are enqueued, workers started, and the time taken until all have ended."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.contenders import Contender
from bench.ratios import Values
from bench.stage import Fleet, Stage, Workload

DRAIN_WITHIN = 900.0  # seconds
PARTS = 5  # of a run, whose rates show whether it slows down

Beside = Callable[[str], AbstractContextManager[None]]  # what happens beside, in this database


@contextmanager
def nothing(_: str) -> Iterator[None]:
    """Have nothing happen beside."""
    yield


class Sample(NamedTuple):
    """How many handlers had run, and when."""

    at: float  # seconds
    ran: int


@dataclass
class Watch:
    """Looks how far a fleet is, and keeps what it saw."""

    fleet: Fleet
    wanted: int
    samples: list[Sample] = field(default_factory=list)

    def is_done(self) -> bool:
        """Whether as many handlers have run as were wanted."""
        self.samples.append(Sample(time.monotonic(), self.fleet.ran()))
        return self.samples[-1].ran >= self.wanted


def drain(
    stage: Stage,
    contender: Contender,
    workload: Workload,
    *,
    processes: int = 1,
    beside: Beside = nothing,
) -> Values:
    """Measure a drain of a new database, from the first handler until every task has ended."""
    tasks = workload.tasks_for(contender)
    with stage.database(contender) as database:
        before = stage.counters.read(database)
        enqueued = stage.ask(contender, database, "bulk", tasks, workload)
        enqueueing = stage.counters.read(database).since(before)
        stage.settle_down(database)
        with (
            stage.server.connect(database) as connection,
            beside(database),
            stage.fleet(contender, database) as fleet,
        ):
            watch = Watch(fleet, tasks)
            before = stage.counters.read(database)
            for _ in range(processes):
                fleet.start(workload)
            fleet.wait(watch.is_done, DRAIN_WITHIN, f"{tasks} handlers")
            fleet.wait(
                lambda: connection.execute(contender.unfinished).fetchone() == (False,),
                DRAIN_WITHIN,
                "the end of every task",
            )
            ended, began = time.monotonic(), fleet.first() / 1e9
            drained = stage.counters.read(database).since(before)
            worker = {
                "worker_us": fleet.cpu_seconds() / tasks * 1e6,
                "rss_mb": fleet.peak_megabytes(),
            }
    return {
        "rate": tasks / (ended - began),
        **worker,
        **drained.each(tasks),
        "wal_all": (enqueueing.wal_bytes + drained.wal_bytes) / tasks,
        "enqueue_rate": tasks / enqueued["seconds"],
        **parts(watch.samples, began=began, tasks=tasks),
    }


def drain_in(stage: Stage, contender: Contender, database: str, workload: Workload) -> Values:
    """Measure how soon so many handlers have run, whatever else there is in the database."""
    tasks = workload.tasks_for(contender)
    with stage.fleet(contender, database) as fleet:
        watch = Watch(fleet, tasks)
        fleet.start(workload)
        before = stage.counters.read(database)
        fleet.wait(watch.is_done, DRAIN_WITHIN, f"{tasks} handlers")
        seconds = watch.samples[-1].at - fleet.first() / 1e9
        ran = watch.samples[-1].ran
        counted = stage.counters.read(database).since(before)
    return {"rate": ran / seconds, **counted.each(ran)}


def parts(samples: list[Sample], *, began: float, tasks: int) -> Values:
    """The rate in each fifth of the tasks, by what was seen from time to time."""
    moving = [Sample(began, 0), *(sample for sample in samples if sample.ran)]
    rates = {}
    for part in range(PARTS):
        low = _when(moving, tasks * part // PARTS)
        high = _when(moving, tasks * (part + 1) // PARTS)
        if high > low:
            rates[f"part_{part + 1}"] = tasks / PARTS / (high - low)
    return rates


def _when(samples: list[Sample], count: int) -> float:
    """When so many had run, between two samples by the straight line."""
    earlier = samples[0]
    for sample in samples:
        if sample.ran >= count:
            if sample.ran == earlier.ran:
                return sample.at
            share = max(0.0, count - earlier.ran) / (sample.ran - earlier.ran)
            return earlier.at + share * (sample.at - earlier.at)
        earlier = sample
    return samples[-1].at
