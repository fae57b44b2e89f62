"""What must happen in the end: L1-L5 after the last fault, and how soon lost work is granted again."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf

from windlass.testing.history_check.events import (
    Born,
    Changed,
    Claimed,
    Ended,
    Event,
    History,
    Led,
    Placed,
    Returned,
    Violation,
)
from windlass.testing.history_check.safety import Told, generation_released


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiet:
    """The time without faults at the end of a run, and what may be expected of it, in seconds.

    It begins once the last fault is over and whoever is to work has been started again, and ends
    before anybody is stopped; for L4, when all is expected to be done. Both ends are seconds since
    1970 by the database's clock. What would be late only after `until` is not decided: a quiet time
    that is shorter than the limits finds nothing late, and none at all says nothing but L4.

    Of the other values `sweep` and `term` are settings of the app, `queueing` and `slack` depend on
    how busy the workers and the machine are, and the rest is only for the rules that it names.
    """

    since: float
    until: float
    sweep: float  # the setting `sweep`: L1 and L3
    term: float  # the setting `leader_term`: L2
    queueing: float = 1.0  # how long a ready task may wait for a free slot: L1
    backoff: float = 5.0  # the longest pause of a worker that could not reach the database: L5
    slack: float = 1.0  # for what is done on time and takes a moment: L1, L2, L3 and L5
    workers: frozenset[str] = frozenset()  # ids of who was to work all that time, with enough: L5
    types: frozenset[str] | None = None  # that they know; None: all: L1 and L4


def check_liveness(history: History, quiet: Quiet) -> list[Violation]:
    """Return every violation of what had to happen once the faults were over."""
    told = Told(history)
    rules = (granted_in_time, somebody_leads, promoted_in_time, all_ended, all_workers_came_back)
    return [violation for rule in rules for violation in rule(told, quiet)]


def granted_in_time(told: Told, quiet: Quiet) -> Iterator[Violation]:
    """L1: a ready task is granted, and one whose holder is lost comes back and is granted."""
    for task in told.by_task:
        if not _may_run(told, quiet, task):
            continue
        for placed in told.of(task, Placed):
            late = max(placed.at, quiet.since) + quiet.queueing + quiet.slack
            is_ready = placed.place == "ready" and placed.is_there
            if is_ready and quiet.until > late and _taken(told, placed) > late:
                yield Violation("L1", task, "was ready and not granted in time", (placed,))
        released = {generation_released(event): event.at for event in told.releases(task)}
        for claim in told.of(task, Claimed):
            late = max(told.expiry(claim), quiet.since) + quiet.sweep + quiet.slack
            if quiet.until > late and released.get(claim.generation, inf) > late:
                yield Violation("L1", task, "its lease is over and it did not come back", (claim,))


def _taken(told: Told, placed: Placed) -> float:
    """When a row was taken from its place, by a claim or otherwise."""
    return min(
        (
            event.at
            for event in told.of(placed.task, Placed)
            if event.place == placed.place and event.n > placed.n and not event.is_there
        ),
        default=inf,
    )


def somebody_leads(told: Told, quiet: Quiet) -> Iterator[Violation]:
    """L2: a leader is there within a term and one try to be elected, which is a third of it."""
    late = quiet.since + quiet.term * 4 / 3 + quiet.slack
    led = any(event.at <= late and event.expires_at > quiet.since for event in told.all(Led))
    if not led and quiet.until > late:
        yield Violation("L2", None, f"nobody leads from {quiet.since} to {late}")


def promoted_in_time(told: Told, quiet: Quiet) -> Iterator[Violation]:
    """L3: a task whose time has come is made ready by the next sweep."""
    for task in told.by_task:
        due = {
            event.generation: event.due
            for event in told.by_task[task]
            if isinstance(event, Born | Changed | Returned)
        }
        waiting: dict[int, Event] = {}
        for placed in told.of(task, Placed):
            if placed.place != "scheduled":
                continue
            if placed.is_there:
                waiting[placed.generation] = placed
                continue
            waiting.pop(placed.generation, None)
            late = max(due.get(placed.generation, inf), quiet.since) + quiet.sweep + quiet.slack
            if placed.at > late:
                yield Violation("L3", task, "was made ready late", (placed,))
        for generation, event in waiting.items():
            late = max(due.get(generation, inf), quiet.since) + quiet.sweep + quiet.slack
            if quiet.until > late:
                yield Violation("L3", task, "is due and was not made ready", (event,))


def all_ended(told: Told, quiet: Quiet) -> Iterator[Violation]:
    """L4: in the end each task has ended, or waits for its time, its queue or its type."""
    for task, places in told.history.places.items():
        if places & {"history", "dead"} or not _may_run(told, quiet, task):
            continue
        due = max(
            (e.due for e in told.by_task[task] if isinstance(e, Born | Changed | Returned)),
            default=-inf,
        )
        if due <= quiet.until:
            yield Violation("L4", task, f"is left in {', '.join(sorted(places))}")


def all_workers_came_back(told: Told, quiet: Quiet) -> Iterator[Violation]:
    """L5: each worker that lives claims again."""
    late = quiet.since + quiet.backoff + quiet.slack
    back = {event.worker for event in told.all(Claimed) if quiet.since <= event.at <= late}
    if quiet.until > late:
        for worker in sorted(quiet.workers - back):
            yield Violation(
                "L5", None, f"worker {worker} did not claim from {quiet.since} to {late}"
            )


def _may_run(told: Told, quiet: Quiet, task: str) -> bool:
    born = next(iter(told.of(task, Born)), None)
    paused = {pause.queue for pause in told.history.pauses if pause.until > quiet.until}
    return born is None or (
        (quiet.types is None or born.type in quiet.types) and born.queue not in paused
    )


@dataclass(frozen=True, slots=True)
class Recovery:
    """A task that a dead worker held, and how long it took until it was granted again or ended."""

    task: str
    worker: str
    seconds: float  # from the death to the next grant; inf: never
    overdue: float  # from when it could be taken back to when it was; not above 0: at once


def recoveries(
    history: History,
    deaths: Mapping[str, float],
    *,
    lease: float,
    within: float,
    outages: Iterable[tuple[float, float]] = (),
) -> list[Recovery]:
    """Measure from the death of each worker, whose tasks can be taken back a lease later.

    An outage at that moment, or one that begins less than `within` seconds after it, puts it off to
    its end: nobody could have helped before.
    """
    told, found = Told(history), []
    outages = sorted(outages)
    for claim in told.all(Claimed):
        died = deaths.get(claim.worker)
        if died is None or claim.granted_at > died:
            continue
        over, again = _next_owner(told, claim)
        if over <= died:
            continue
        possible = died + lease
        for began, ended in outages:
            if began < over and possible < ended and began <= possible + within:
                possible = ended
        found.append(Recovery(claim.task, claim.worker, again - died, over - possible))
    return found


def _next_owner(told: Told, claim: Claimed) -> tuple[float, float]:
    """When a claim's hold on its task was over, and when somebody else held it or it had ended."""
    over = again = inf
    for event in told.by_task[claim.task]:
        match event:
            case Ended(generation=generation) if generation == claim.generation:
                over = again = min(again, event.at)
            case Returned(generation=generation) if generation == claim.generation + 1:
                over = event.at
            case Claimed(generation=generation) if generation == claim.generation + 1:
                again = event.granted_at
    if over is not inf and again is inf:  # cancelled while it waited, or put off
        later = [e.at for e in told.of(claim.task, Ended) if e.at > over]
        again = min(later, default=inf)
    return over, again
