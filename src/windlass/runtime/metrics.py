"""Counts and distributions of what the stages tell, kept cheaply and written out when asked for.

A batch of one type and queue that went well is taken in as a whole; what Prometheus wants of it is worked
out when Prometheus asks.
"""

import threading
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from http import HTTPStatus
from itertools import accumulate
from operator import attrgetter
from typing import Any

from prometheus_client.core import (
    CollectorRegistry,
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from windlass.breaker import BreakerReport
from windlass.model.breaker import BreakerState
from windlass.model.task import (
    Answer,
    ClaimedTask,
    NewTask,
    Outcome,
    QueueRecord,
)
from windlass.registry import PRIORITIES
from windlass.runtime.measuring import Counts
from windlass.runtime.monitor import Page
from windlass.store.port import TaskColumns
from windlass.telemetry import counted

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
SORTED_AT_ONCE = 500  # values
TASKS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
MOST_LABELS = 1000  # of types and queues together: who enqueues by name may make up any number
OTHERS = ("others", "others")

LEVELS = sorted(PRIORITIES, key=lambda name: PRIORITIES[name])
LEVEL_BOUNDS = [PRIORITIES[name] for name in LEVELS]

Labels = tuple[str, str]  # type, queue

_is_new = attrgetter("created")
_TYPE, _QUEUE = NewTask._fields.index("type"), NewTask._fields.index("queue")


class Distribution:
    """How many values lie in each bucket, and their sum. Values are sorted in when there are many."""

    __slots__ = ("_bounds", "_counts", "_lock", "_new", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._new: list[float] = []
        self._lock = threading.Lock()  # who asks for it comes from another thread

    def add(self, values: Iterable[float]) -> None:
        """Count values."""
        with self._lock:
            self._new += values
            if len(self._new) > SORTED_AT_ONCE:
                self._sort_in()

    def _sort_in(self) -> None:
        values, self._new = self._new, []
        if not values:
            return
        self._total += sum(values)
        values.sort()  # first, for its comparisons of numbers are far cheaper than those of max
        if (only := self._bucket(values[-1])) == self._bucket(values[0]):
            self._counts[only] += len(values)
            return
        below = 0
        for place, bound in enumerate(self._bounds):
            until = bisect_right(values, bound, below)
            self._counts[place] += until - below
            below = until
        self._counts[-1] += len(values) - below

    def _bucket(self, value: float) -> int:
        return bisect_left(self._bounds, value)

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Return how many values are at most as large as each bound, and the sum of all."""
        with self._lock:
            self._sort_in()
            counts, total = list(self._counts), self._total
        names = (*(repr(float(bound)) for bound in self._bounds), "+Inf")
        return list(zip(names, accumulate(counts), strict=True)), total


class Sizes:
    """How many batches there were of each size. There are few sizes: each is counted for itself."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, size: int) -> None:
        """Count a batch."""
        self._counts[size] += 1

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Return how many batches are at most as large as each bound, and the sum of all sizes."""
        counts = list(self._counts.items())  # a copy: the worker's thread goes on counting
        bounds = (*map(float, TASKS), float("inf"))
        below = [sum(count for size, count in counts if size <= bound) for bound in bounds]
        names = (*map(repr, bounds[:-1]), "+Inf")
        return list(zip(names, below, strict=True)), float(
            sum(size * count for size, count in counts)
        )


class Metrics(Collector):
    """What one process did. A watcher of the telemetry, and a collector of Prometheus."""

    def __init__(
        self,
        slots: Callable[[], tuple[int, int]],
        is_leader: Callable[[], bool],
        *,
        processes: Counts | None = None,
        breakers: Callable[[], Sequence[BreakerReport]] = tuple,
        stuck_threads: Callable[[], int] = int,
    ) -> None:
        self._slots = slots
        self._stuck_threads = stuck_threads
        self._processes = processes
        self._is_leader = is_leader
        self._breakers = breakers
        self._known: dict[Labels, Labels] = {}
        self._enqueued: Counter[Labels] = Counter()
        self._claimed: Counter[Labels] = Counter()
        self._ended: Counter[tuple[str, str, str]] = Counter()
        self._errors: Counter[tuple[str, str, str]] = Counter()
        self._waits: dict[Labels, Distribution] = defaultdict(lambda: Distribution(SECONDS))
        self._queue_waits: dict[Labels, Distribution] = defaultdict(lambda: Distribution(SECONDS))
        self._durations: dict[Labels, Distribution] = defaultdict(lambda: Distribution(SECONDS))
        self._claims = Sizes()
        self._settlements = Sizes()
        self._told: dict[str, Callable[[Any], None]] = {
            "enqueued": self._count_enqueued,
            "claimed": self._count_claimed,
            "settled": self._count_settled,
            "lost": self._count_lost,
            "counted": self._keep_queues,
        }
        self._queues: Sequence[QueueRecord] = ()

    def __call__(self, event: str, batch: Any) -> None:
        """Take in what a stage tells."""
        self._told[event](batch)

    def page(self) -> Page:
        """All of it as Prometheus reads it."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return Page(HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(registry))

    def _labels(self, type_: str, queue: str) -> Labels:
        labels = (type_, queue)
        known = self._known.get(labels)
        if known is None:
            known = labels if len(self._known) < MOST_LABELS else OTHERS
            self._known[labels if known is labels else OTHERS] = known
        return known

    # Nearly every batch is of one type and queue and went well: it is not taken apart.

    def _count_enqueued(self, added: Any) -> None:
        columns = TaskColumns.of(added.tasks).columns
        kind = _only(columns[_TYPE], columns[_QUEUE])
        if kind and all(map(_is_new, added.answers)):
            self._enqueued[self._labels(*kind)] += len(added.tasks)
            return
        for task, answer in zip(added.tasks, added.answers, strict=True):
            if answer.created:
                self._enqueued[self._labels(task.type, task.queue)] += 1

    def _count_claimed(self, claim: Any) -> None:
        tasks = claim.tasks
        self._claims.add(len(tasks))
        if claim.kind:
            labels = self._labels(*claim.kind)
            self._claimed[labels] += len(tasks)
            waits = [task.waited for task in tasks]
            self._waits[labels].add(waits)
            if len({task.priority for task in tasks}) == 1:
                self._queue_waits[labels[1], _level(tasks[0].priority)].add(waits)
                return
            for task in tasks:
                self._queue_waits[labels[1], _level(task.priority)].add((task.waited,))
            return
        for task in tasks:
            labels = self._labels(task.type, task.queue)
            self._claimed[labels] += 1
            self._waits[labels].add((task.waited,))
            self._queue_waits[labels[1], _level(task.priority)].add((task.waited,))

    def _count_settled(self, settled: Any) -> None:
        batch, answers = settled.batch, settled.answers
        self._settlements.add(len(batch))
        kinds = {claim.kind for claim in settled.claims}
        kind = kinds.pop() if len(kinds) == 1 else None
        completed = settled.outcomes.count(Outcome.COMPLETED)
        if kind and completed == len(batch) == answers.count(Answer.APPLIED):
            labels = self._labels(*kind)
            self._ended[*labels, "completed"] += completed
            self._durations[labels].add([done.job.took for done in batch])
            return
        for done, answer in zip(batch, answers, strict=True):
            job = done.job
            labels = self._labels(job.task.type, job.task.queue)
            self._ended[*labels, _shown(done, answer)] += 1
            if done.settlement.error_class is not None and answer is not Answer.LOST:
                self._errors[*labels, done.settlement.error_class] += 1
            if job.took is not None:
                self._durations[labels].add((job.took,))

    def _count_lost(self, tasks: Sequence[ClaimedTask]) -> None:
        for task in tasks:
            self._ended[*self._labels(task.type, task.queue), "lost"] += 1

    def _keep_queues(self, queues: Sequence[QueueRecord]) -> None:
        self._queues = queues

    def collect(self) -> Iterator[Metric]:
        """Yield everything, for Prometheus."""
        both = ["type", "queue"]
        yield _counter("tasks_enqueued", "Tasks that this process enqueued", both, self._enqueued)
        yield _counter(
            "tasks_claimed", "Tasks that workers of this process were granted", both, self._claimed
        )
        said = "Attempts of workers of this process by what became of them"
        yield _counter("tasks_ended", said, [*both, "outcome"], self._ended)
        said = "Failed attempts of workers of this process by the class of their error"
        yield _counter("task_errors", said, [*both, "class"], self._errors)
        said = "From ready to granted"
        yield _histogram("task_wait_seconds", said, both, list(self._waits.items()))
        said = "From ready to granted, by queue and level of priority"
        waits = list(self._queue_waits.items())
        yield _histogram("queue_wait_seconds", said, ["queue", "priority"], waits)
        said = "From the start of a handler to its end"
        yield _histogram("task_duration_seconds", said, both, list(self._durations.items()))
        yield _histogram("claim_tasks", "Tasks granted at once", [], [((), self._claims)])
        yield _histogram("settle_tasks", "Ends written at once", [], [((), self._settlements)])
        running, size = self._slots()
        yield GaugeMetricFamily("windlass_slots", "Tasks that may run at once", value=size)
        yield GaugeMetricFamily("windlass_slots_busy", "Tasks that run", value=running)
        said = "Threads whose handlers were given up and have not returned"
        yield GaugeMetricFamily("windlass_stuck_threads", said, value=self._stuck_threads())
        if self._processes is not None:
            yield from _of_processes(self._processes)
        depth = GaugeMetricFamily(
            "windlass_queue_tasks", "Live tasks, shown by the leader", labels=["queue", "status"]
        )
        if self._is_leader():  # or another worker shows it by now
            for (name, status), tasks in _depths(self._queues).items():
                depth.add_metric([name, status], tasks)
        yield depth
        yield from _of_breakers(self._breakers())
        for event, name, meaning in (
            ("lease.lost", "leases_lost", "Leases that were not kept"),
            ("settlement.lost", "settlements_lost", "Outcomes that came too late"),
            ("listener.repaired", "listener_repairs", "Wake-ups that were lost and came back"),
            ("store.unavailable", "store_failures", "Calls that the database did not carry out"),
            ("loop.blocked", "loop_blocks", "Times that a handler blocked the event loop"),
        ):
            yield CounterMetricFamily(f"windlass_{name}", meaning, value=counted(event))


def _level(priority: int) -> str:
    """The highest named priority that is not above this one: there may be a hundred others."""
    return LEVELS[bisect_right(LEVEL_BOUNDS, priority) - 1]


def _only(types: Sequence[str], queues: Sequence[str]) -> Labels | None:
    """The type and the queue, if there is one of each."""
    is_one = types.count(types[0]) == queues.count(queues[0]) == len(types)
    return (types[0], queues[0]) if is_one else None


def _of_processes(processes: Counts) -> Iterator[Metric]:
    busy, number = processes.filled
    yield GaugeMetricFamily("windlass_processes", "Processes for handlers", value=number)
    yield GaugeMetricFamily("windlass_processes_busy", "Those that run a handler", value=busy)
    said = "Processes that were replaced"
    restarts = Counter({(reason,): count for reason, count in list(processes.restarts.items())})
    yield _counter("process_restarts", said, ["reason"], restarts)


def _shown(done: Any, answer: Answer) -> str:
    if answer is Answer.LOST:
        return "lost"
    if answer is Answer.GIVEN_UP:
        return Outcome.DEAD
    outcome: Outcome = done.settlement.outcome
    return Outcome.COMPLETED if done.was_completed(answer) else outcome


def _depths(queues: Sequence[QueueRecord]) -> Counter[tuple[str, str]]:
    depths: Counter[tuple[str, str]] = Counter()
    for place, queue in enumerate(queues):
        name = queue.name if place < MOST_LABELS else OTHERS[1]
        depths.update({(name, status): tasks for status, tasks in queue.counts.items()})
    return depths


def _of_breakers(reports: Sequence[BreakerReport]) -> Iterator[Metric]:
    said = "1 for the state that a breaker is in, 0 for the others"
    state = GaugeMetricFamily("windlass_breaker_state", said, labels=["breaker", "state"])
    for report in reports:
        for one in BreakerState:
            state.add_metric([report.name, one], one is report.state)
    yield state
    opened = Counter({(report.name,): report.opened for report in reports})
    yield _counter("breaker_opened", "Times that a breaker opened", ["breaker"], opened)
    refused = Counter({(report.name,): report.refused for report in reports})
    said = "Calls that a breaker did not let through"
    yield _counter("breaker_refused", said, ["breaker"], refused)


def _counter(
    name: str, meaning: str, labels: Sequence[str], counts: Counter[Any]
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"windlass_{name}", meaning, labels=labels)
    for values, count in list(counts.items()):  # a copy: the worker's thread goes on counting
        family.add_metric([str(value) for value in values], count)
    return family


def _histogram(
    name: str,
    meaning: str,
    labels: Sequence[str],
    found: Iterable[tuple[Sequence[str], Distribution | Sizes]],
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"windlass_{name}", meaning, labels=labels)
    for values, distribution in found:
        buckets, total = distribution.read()
        family.add_metric(list(values), buckets, total)
    return family
