"""What must never happen: the invariants I1-I7, I9, I10 and I13 as functions of a history."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import TypeGuard, TypeVar

from windlass.testing.history_check.events import (
    Born,
    Changed,
    Claimed,
    Ended,
    Event,
    Extended,
    Forgotten,
    History,
    Led,
    Placed,
    Returned,
    Run,
    TaskEvent,
    Vanished,
    Violation,
)

E = TypeVar("E", bound=Event)
DEAD_STATES = frozenset({"failed", "dead"})
RESTING_STATES = {"history": frozenset({"completed", "cancelled"}), "dead": DEAD_STATES}


@dataclass(slots=True)
class Told:
    """A history by task, by token and by kind of event, so that each rule reads what it needs."""

    history: History
    by_task: dict[str, list[TaskEvent]] = field(init=False)
    claims: dict[tuple[str, str], list[Claimed]] = field(init=False)  # by task and token
    extensions: dict[str, list[Extended]] = field(init=False)  # by token
    runs: dict[str, list[Run]] = field(init=False)  # by task

    def __post_init__(self) -> None:
        self.by_task, self.claims = defaultdict(list), defaultdict(list)
        self.extensions, self.runs = defaultdict(list), defaultdict(list)
        for run in self.history.runs:
            self.runs[run.task].append(run)
        for event in sorted(self.history.events, key=lambda event: event.n):
            if isinstance(event, TaskEvent):
                self.by_task[event.task].append(event)
            if isinstance(event, Claimed):
                self.claims[event.task, event.token].append(event)
            if isinstance(event, Extended):
                self.extensions[event.token].append(event)

    def all(self, kind: type[E]) -> list[E]:
        """Return the events of one kind, in order."""
        found = [event for event in self.history.events if isinstance(event, kind)]
        return sorted(found, key=lambda event: event.n)

    def of(self, task: str, kind: type[E]) -> list[E]:
        """Return the events of one kind of one task, in order."""
        return [event for event in self.by_task[task] if isinstance(event, kind)]

    def releases(self, task: str) -> list[Returned | Ended]:
        """Return what ended the claims of a task, in order."""
        return [event for event in self.by_task[task] if isinstance(event, Returned | Ended)]

    def expiry(self, claim: Claimed) -> float:
        """Until when a claim was granted in the end."""
        extended = self.extensions[claim.token]
        return extended[-1].expires_at if extended else claim.expires_at


def no_loss(told: Told) -> Iterator[Violation]:
    """I1: what a caller was told is enqueued is there, in every state that was committed."""
    forgotten = {event.task for event in told.all(Forgotten)}
    for event in told.all(Vanished):
        yield Violation("I1", event.task, "its row went and it rests nowhere", (event,))
    for call in told.history.calls:
        task = call.task
        if call.outcome == "ok" and task not in told.history.places and task not in forgotten:
            yield Violation("I1", task, "was acknowledged and is nowhere", (call,))


def no_invention(told: Told) -> Iterator[Violation]:
    """I2: a task has one call that asked for it, and a key has one task."""
    calls = {call.intent: call for call in told.history.calls}
    forgotten = {event.task for event in told.all(Forgotten)}
    born = [event for event in told.all(Born) if not event.is_reopened]
    by_intent: dict[str, Born] = {}
    by_key: dict[tuple[str, str], Born] = {}
    for event in born:
        if event.intent is not None:
            call = calls.get(event.intent)
            if call is None or call.outcome == "fail":
                yield Violation(
                    "I2", event.task, "nobody asked for it, or was refused", (event, call)
                )
            if other := by_intent.get(event.intent):
                yield Violation(
                    "I2", event.task, "is the second for one call", (other, event, call)
                )
            by_intent[event.intent] = event
        if event.key is not None:
            twin = by_key.get((event.type, event.key))
            if twin is not None and twin.task not in forgotten:
                yield Violation("I2", event.task, "is the second of its key", (twin, event))
            by_key[event.type, event.key] = event
    owners = {event.task: event for event in born}
    for call in told.history.calls:
        owner = owners.get(call.task or "")
        if call.outcome != "ok" or owner is None:
            continue
        scope = None if call.key is None else (call.type, call.key)
        is_own = owner.intent == call.intent
        if not is_own and (scope is None or scope != (owner.type, owner.key)):
            yield Violation("I2", call.task, "was answered for somebody else's", (owner, call))


def single_lease(told: Told) -> Iterator[Violation]:
    """I3: no two leases on one task at once, and no run of a handler without one."""
    for task in told.by_task:
        claims = told.of(task, Claimed)
        given_up = _given_up(told, task)
        # Each generation is granted once, so this order needs no clock and no n.
        for one, other in pairwise(sorted(claims, key=lambda claim: (claim.generation, claim.n))):
            end = min(told.expiry(one), given_up.get((one.token, one.generation), inf))
            if one.generation == other.generation:
                yield Violation("I3", task, "one generation was granted twice", (one, other))
            elif other.granted_at < end:
                yield Violation("I3", task, "was granted while its lease held", (one, other))
        yield from _rescued_early(told, task)
    granted = {(c.task, c.fence, c.worker) for claims in told.claims.values() for c in claims}
    seen = set()
    for run in told.history.runs:
        if (run.task, run.fence, run.worker) not in granted:
            yield Violation("I3", run.task, "ran without a lease", (run,))
        if (run.task, run.fence) in seen:
            yield Violation("I3", run.task, "ran twice under one lease", (run,))
        seen.add((run.task, run.fence))


def _given_up(told: Told, task: str) -> dict[tuple[str, int], float]:
    """When the holder itself gave a lease up. A rescue is no such thing: it has to wait."""
    return {
        (event.token, generation_released(event)): event.at
        for event in told.releases(task)
        if event.token is not None
    }


def _rescued_early(told: Told, task: str) -> Iterator[Violation]:
    claims = {claim.generation: claim for claim in told.of(task, Claimed)}
    for event in told.releases(task):
        claim = claims.get(generation_released(event))
        if event.token is None and claim is not None and event.at < told.expiry(claim):
            yield Violation(
                "I3", task, "was taken from its holder before its lease ended", (claim, event)
            )


def fencing(told: Told) -> Iterator[Violation]:
    """I4: what shows a token changes a task only in the generation that was granted under it."""
    for task in told.by_task:
        for event in told.releases(task):
            if event.token is None:
                continue
            generation = generation_released(event)
            granted = told.claims.get((task, event.token), [])
            if not any(claim.generation == generation for claim in granted):
                says = f"generation {generation} was settled under a lease that was not on it"
                yield Violation("I4", task, says, (*granted, event))


def generation_released(event: Returned | Ended) -> int:
    """Return the generation that was claimed until this happened."""
    return event.generation - 1 if isinstance(event, Returned) else event.generation


def one_end(told: Told) -> Iterator[Violation]:
    """I5: a task ends once, and nothing happens to it afterwards unless somebody reopens it."""
    for task, events in told.by_task.items():
        end: Ended | None = None
        for event in events:
            if isinstance(event, Born):
                if end is not None and event.generation <= end.generation:
                    yield Violation("I5", task, "was reopened in an old generation", (end, event))
                end = None
            elif isinstance(event, Returned | Changed | Ended) and end is not None:
                yield Violation("I5", task, "changed after its end", (end, event))
            if isinstance(event, Ended):
                if not event.was_live:
                    yield Violation("I5", task, "ended and lives on", (event,))
                end = event


def attempts(told: Told) -> Iterator[Violation]:
    """I6: an attempt is counted when it ends, or when its worker is lost and had reported it."""
    for task, events in told.by_task.items():
        count, most = 0, 0
        used: dict[int, int] = {}  # before each generation
        for event in events:
            match event:
                case Born():
                    count, most = event.attempts, event.max_attempts
                    if count:
                        yield Violation("I6", task, "was born with attempts", (event,))
                case Changed() if event.attempts != count:
                    yield Violation("I6", task, "a change counted as an attempt", (event,))
                case Returned() | Ended():
                    if event.attempts != count + _is_attempt(event) or event.attempts > most:
                        says = f"{event.attempts} attempts after {count}, of {most}"
                        yield Violation("I6", task, says, (event,))
                    count = event.attempts
            if isinstance(event, Born | Returned):
                used[event.generation] = count
        yield from _told_otherwise(told, task, used)


def _is_attempt(event: Returned | Ended) -> bool:
    if _is_rescue(event):
        return event.was_running and not (isinstance(event, Ended) and event.state == "cancelled")
    if isinstance(event, Ended):
        return event.state != "cancelled"
    return event.is_attempt_noted


def _told_otherwise(told: Told, task: str, used: dict[int, int]) -> Iterator[Violation]:
    generations = {claim.fence: claim.generation for claim in told.of(task, Claimed)}
    for run in told.runs[task]:
        generation = generations.get(run.fence)
        if generation in used and run.attempt != used[generation] + 1:
            yield Violation("I6", task, "its handler was told another attempt", (run,))


def dead_letters(told: Told) -> Iterator[Violation]:
    """I7: failed and dead tasks, and no others, rest in `dead`, and nothing there can be claimed."""
    for events in told.by_task.values():
        yield from _claimable_after_end(events)
    for event in told.all(Ended):
        yield from _rests_rightly(event)
    for task, places in told.history.places.items():
        if len(places & {"history", "dead", "task"}) != 1 or len(places) > 2:
            yield Violation("I7", task, f"is in {', '.join(sorted(places))}")


def _claimable_after_end(events: Sequence[TaskEvent]) -> Iterator[Violation]:
    waiting: set[str] = set()
    end: Ended | None = None
    for event in events:
        match event:
            case Placed(is_there=False):
                waiting.discard(event.place)
            case Placed() | Claimed() if end is not None:
                yield Violation("I7", event.task, "can be claimed after its end", (end, event))
            case Placed():
                waiting.add(event.place)
            case Born():
                end = None
            case Ended():
                end = event
                if waiting:
                    yield Violation("I7", event.task, "ended and can be claimed", (event,))


def _rests_rightly(event: Ended) -> Iterator[Violation]:
    if event.state not in RESTING_STATES[event.place]:
        yield Violation("I7", event.task, f"{event.state} rests in {event.place}", (event,))
    if event.state == "dead" and event.attempts != event.max_attempts:
        yield Violation("I7", event.task, "is dead with attempts left", (event,))


def one_leader(told: Told) -> Iterator[Violation]:
    """I9: one holder for each term, terms that only grow, and no seat taken while it is held."""
    for before, after in pairwise(told.all(Led)):
        if after.term < before.term:
            yield Violation("I9", None, "a term fell", (before, after))
        elif after.term == before.term and after.holder != before.holder:
            yield Violation("I9", None, "two leaders in one term", (before, after))
        elif after.term > before.term and after.at < before.expires_at:
            yield Violation("I9", None, "the seat was taken while it was held", (before, after))


def leader_fencing(told: Told) -> Iterator[Violation]:
    """I10: a rescue is written in a transaction that holds the seat, under the latest term."""
    term: int | None = None
    for event in sorted(told.history.events, key=lambda event: event.n):
        if isinstance(event, Led):
            term = event.term
        elif _is_rescue(event):
            if event.term is None:
                yield Violation("I10", event.task, "was rescued by who holds no seat", (event,))
            elif term is not None and event.term != term:
                says = f"was rescued under term {event.term}, and it is {term}"
                yield Violation("I10", event.task, says, (event,))


def _is_rescue(event: Event) -> TypeGuard[Returned | Ended]:
    if isinstance(event, Returned):
        return event.token is None
    return isinstance(event, Ended) and event.token is None and event.worker is not None


def not_early(told: Told) -> Iterator[Violation]:
    """I13: nothing is granted before its time, or from a queue that is paused."""
    for task, events in told.by_task.items():
        due, queue = -inf, ""
        for event in events:
            match event:
                case Born() | Changed():
                    due, queue = event.due, event.queue
                case Returned():
                    due = event.due
                case Claimed():
                    if event.granted_at < due:
                        yield Violation("I13", task, f"was granted before {due}", (event,))
                    for pause in told.history.pauses:
                        if pause.queue == queue and pause.since < event.began < pause.until:
                            yield Violation(
                                "I13", task, "was granted from a paused queue", (pause, event)
                            )


RULES: Sequence[Callable[[Told], Iterator[Violation]]] = (
    no_loss,
    no_invention,
    single_lease,
    fencing,
    one_end,
    attempts,
    dead_letters,
    one_leader,
    leader_fencing,
    not_early,
)


def check(history: History) -> list[Violation]:
    """Return every violation of what must never happen."""
    told = Told(history)
    return [violation for rule in RULES for violation in rule(told)]
