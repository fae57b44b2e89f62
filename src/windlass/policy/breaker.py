"""Which calls to a dependency are let through, given how others ended. `now` and chance are passed in.

Closed, a circuit counts failures and opens at its threshold. Open, it lets nothing through for `recovery`
seconds. Then it is half-open: so many trials at a time are let through, and decide.

How many calls are begun before the first one has failed? As many as may be in flight, if nothing else is said:
all fifty of fifty that start together against a dependency that is dead. So a closed circuit bounds the calls
that nothing speaks for. There may be so many more in flight than there were at the last success as failures open
it; after a failure, and until a success, there may be only as many in flight as failures are left. A call above
that waits a moment for the verdict of the others. Then it is let through, unless one has failed. Each success
moves the bound along, so that a dependency that answers is soon given all that it can take, and fifty calls at a
time that go well are not held up. After a pause nothing is in flight, and the bound is the threshold again.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum
from itertools import count
from math import ceil, inf
from typing import Literal, NamedTuple, Protocol

from windlass.model.breaker import BreakerState, CallOutcome, Trials
from windlass.model.failure import ErrorClass

Mode = Literal["consecutive", "rate"]

COUNTED = (ErrorClass.TRANSIENT, ErrorClass.RATE_LIMITED, ErrorClass.UNKNOWN)

SOONEST, LATEST = 0.1, 0.5  # parts of a span, between which calls that were refused come back
LONGEST_SPAN = 30.0  # seconds
SHORTEST_SPAN = 2.0  # seconds: a verdict is near
SPAN_OF_EACH = 0.02  # seconds that each further refusal adds, so that a crowd does not come at once
VERDICT_WITHIN = 1.0  # seconds: so long a call waits for how others end
LONGEST_WAIT = 10.0  # seconds, for those that are cut off by a time limit
STEPS = 20  # in which the time that a rate is taken over goes by


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSettings:
    """How a breaker judges; durations are seconds."""

    name: str
    failures: int = 5
    within: float = 60.0
    recovery: float = 30.0
    trials: int = 1
    mode: Mode = "consecutive"
    rate: float = 0.5
    minimum: int = 10
    counts: frozenset[ErrorClass] = frozenset(COUNTED)
    timeout: float | None = None
    shared: bool = False

    @property
    def threshold(self) -> int:
        """How many failures open it if nothing but failures is known."""
        return self.failures if self.mode == "consecutive" else self.minimum

    @property
    def patience(self) -> float:
        """For how long a call waits for how others end: those that hang do so by their time limit."""
        by_limit = 0.0 if self.timeout is None else self.timeout * 1.1
        return max(VERDICT_WITHIN, min(by_limit, LONGEST_WAIT))


class Asking(Enum):
    """How a call asks to be let through."""

    FIRST = "may wait for how others end"
    AGAIN = "has waited"
    ONCE = "cannot wait"  # so it is bounded only as long as nothing is known of the dependency


class Permit(NamedTuple):
    """A call that was let through."""

    number: int
    epoch: int  # of the circuit: what began under an older one decides nothing


class Refusal(NamedTuple):
    """A call that was not let through."""

    seconds: float  # for which nothing will be; 0: until one of those in flight has ended
    span: float  # seconds over which those that were refused come back
    is_near: bool = False  # a verdict that may change this, so that it is worth a moment's wait

    def pause(self, draw: float) -> float:
        """Seconds after which to come back; `draw` is random in [0, 1)."""
        return self.seconds + self.span * (SOONEST + (LATEST - SOONEST) * draw)


class Circuit:
    """The state of one breaker."""

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._state = BreakerState.CLOSED
        self.epoch = 0  # grows with every change of state
        self._half_open_at = 0.0
        self._numbers = count(1)
        self._calls: dict[
            int, float
        ] = {}  # of this epoch, not ended: when they began, oldest first
        self._due: dict[int, float] = {}  # when their time is over, if there is a limit
        self._overdue: set[int] = set()  # those that were counted when it was
        self._tally = _tally(settings)
        self._bound = settings.threshold  # of calls in flight, while none has failed
        self._succeeded_at = -inf
        self._successes = 0  # of trials in a row
        self._refused = 0  # in a row

    def state(self, now: float) -> BreakerState:
        """Whether it lets calls through."""
        if self._state is BreakerState.OPEN and now >= self._half_open_at:
            self._change(BreakerState.HALF_OPEN)
        return self._state

    def half_open_in(self, now: float) -> float:
        """Seconds until trials are let through, if it is open."""
        return self._half_open_at - now if self.state(now) is BreakerState.OPEN else 0.0

    def is_trying(self, now: float) -> bool:
        """Whether a trial is under way that may still answer."""
        if self.state(now) is not BreakerState.HALF_OPEN:
            return False
        self._give_up_silent(now)
        return bool(self._calls)

    def count_overdue(self, now: float) -> BreakerState | None:
        """Count calls in flight whose time is over; return the state that this changes to, if it does.

        A coroutine in a block is cut off then. Plain functions and tasks go on.
        """
        while self._due:
            number, due = next(iter(self._due.items()))
            if due > now:
                return None
            permit = Permit(number, self.epoch)
            if changed := self.end(permit, CallOutcome.FAILED, now):
                return changed
            self._overdue.add(number)
        return None

    def admit(
        self, now: float, asking: Asking = Asking.FIRST, trials: Trials = Trials.OURS
    ) -> Permit | Refusal:
        """Let a call through, or not; as a trial, if those are ours.

        As long as that is undecided a call waits for the decision. One that has, or cannot, is let through.
        """
        state = self.state(now)
        longest = min(self._settings.recovery, LONGEST_SPAN)
        if state is BreakerState.OPEN:
            return Refusal(self._half_open_at - now, longest)
        self._give_up_silent(now)
        is_trial = state is BreakerState.HALF_OPEN
        has_place = len(self._calls) < self._places(now, asking)
        is_undecided = is_trial and trials is Trials.UNDECIDED
        is_for_others = is_trial and trials is Trials.THEIRS
        if has_place and not is_for_others and not (is_undecided and asking is Asking.FIRST):
            self._refused = 0
            permit = Permit(next(self._numbers), self.epoch)
            self._calls[permit.number] = now
            if self._settings.timeout is not None:
                self._due[permit.number] = now + self._settings.timeout
            return permit
        if is_trial:
            return Refusal(0.0, longest, is_near=has_place and is_undecided)
        if asking is not Asking.FIRST:
            self._refused += 1
        span = max(SHORTEST_SPAN, self._refused * SPAN_OF_EACH)
        return Refusal(0.0, min(span, longest), is_near=True)

    def end(self, permit: Permit, outcome: CallOutcome, now: float) -> BreakerState | None:
        """Take in how a call ended; return the state that it changes to, if it does."""
        state = self.state(now)
        if permit.epoch != self.epoch or permit.number in self._overdue:
            self._overdue.discard(permit.number)
            return None
        self._calls.pop(permit.number, None)
        self._due.pop(permit.number, None)
        match outcome:
            case CallOutcome.NO_VERDICT:
                return None
            case CallOutcome.SUCCEEDED if state is BreakerState.HALF_OPEN:
                self._successes += 1
                return self.close() if self._successes >= self._settings.trials else None
            case CallOutcome.SUCCEEDED:
                self._succeed(now)
                return None
            case CallOutcome.FAILED if state is BreakerState.HALF_OPEN:
                return self.open(now + self._settings.recovery)
            case CallOutcome.FAILED:
                self._tally.fail(now)
                return self.open(now + self._settings.recovery) if self._tally.is_full() else None

    def open(self, until: float) -> BreakerState:
        """Let nothing through until then."""
        self._half_open_at = until
        return self._change(BreakerState.OPEN)

    def close(self) -> BreakerState:
        """Let calls through, and know nothing of the dependency yet."""
        self._tally = _tally(self._settings)
        self._bound = self._settings.threshold
        self._succeeded_at = -inf
        return self._change(BreakerState.CLOSED)

    def _change(self, state: BreakerState) -> BreakerState:
        self._state = state
        self.epoch += 1
        for known in (self._calls, self._due, self._overdue):
            known.clear()
        self._successes = self._refused = 0
        return state

    def _succeed(self, now: float) -> None:
        self._tally.succeed(now)
        # Two at least: with one more there would never be more than one at a time.
        self._bound = len(self._calls) + max(2, self._settings.threshold)
        self._succeeded_at = now

    def _places(self, now: float, asking: Asking = Asking.FIRST) -> float:
        """How many calls may be in flight."""
        if self._state is BreakerState.HALF_OPEN:
            return self._settings.trials - self._successes
        if self._tally.is_failing(now):
            return self._tally.left(now)
        is_cold = now - self._succeeded_at > self._settings.recovery
        if asking is Asking.AGAIN or (asking is Asking.ONCE and not is_cold):
            return inf
        if is_cold:
            self._bound = self._settings.threshold  # those of then have not answered since
        return self._bound

    def _give_up_silent(self, now: float) -> None:
        """Keep no place for calls that have not ended for long: who knows whether they ever will."""
        while self._calls:
            number, began = next(iter(self._calls.items()))
            if now - began < self._settings.recovery:
                return
            del self._calls[number]


class _Tally(Protocol):
    """How calls ended lately, while a circuit is closed."""

    def succeed(self, now: float) -> None:
        """Count a success."""

    def fail(self, now: float) -> None:
        """Count a failure."""

    def is_full(self) -> bool:
        """Whether the failure that was counted just now opens the circuit."""

    def is_failing(self, now: float) -> bool:
        """Whether nothing has succeeded since a failure that still counts."""

    def left(self, now: float) -> int:
        """How many failures more, and nothing else, would open it; at least one."""


def _tally(settings: BreakerSettings) -> _Tally:
    if settings.mode == "consecutive":
        return _InARow(settings.failures, settings.within)
    return _Share(settings.rate, settings.minimum, settings.within)


class _InARow:
    """So many failures in a row, all within so many seconds of the first."""

    def __init__(self, failures: int, within: float) -> None:
        self._failures = failures
        self._within = within
        self._counted = 0
        self._first_at = 0.0

    def succeed(self, now: float) -> None:  # noqa: ARG002 - whenever it was
        self._counted = 0

    def fail(self, now: float) -> None:
        if not self.is_failing(now):
            self._counted, self._first_at = 0, now
        self._counted += 1

    def is_full(self) -> bool:
        return self._counted >= self._failures

    def is_failing(self, now: float) -> bool:
        return self._counted > 0 and now - self._first_at <= self._within

    def left(self, now: float) -> int:
        counted = self._counted if self.is_failing(now) else 0
        return max(1, self._failures - counted)


class _Share:
    """So large a part of the calls of the last seconds, which pass in steps."""

    def __init__(self, rate: float, minimum: int, within: float) -> None:
        self._rate = rate
        self._minimum = minimum
        self._step = within / STEPS
        self._steps: deque[list[int]] = deque()  # number of the step, calls, failures
        self._calls = self._failures = 0
        self._has_failed = False  # the last one did

    def succeed(self, now: float) -> None:
        self._count(now, failures=0)

    def fail(self, now: float) -> None:
        self._count(now, failures=1)

    def _count(self, now: float, *, failures: int) -> None:
        self._drop_old(now)
        number = int(now // self._step)
        if not self._steps or self._steps[-1][0] != number:
            self._steps.append([number, 0, 0])
        self._steps[-1][1] += 1
        self._steps[-1][2] += failures
        self._calls += 1
        self._failures += failures
        self._has_failed = bool(failures)

    def _drop_old(self, now: float) -> None:
        oldest = int(now // self._step) - STEPS
        while self._steps and self._steps[0][0] <= oldest:
            _, calls, failures = self._steps.popleft()
            self._calls -= calls
            self._failures -= failures

    def is_full(self) -> bool:
        return self._calls >= self._minimum and self._failures >= self._needed(self._calls)

    def _needed(self, calls: int) -> float:
        return self._rate * calls - 1e-9  # or three tenths of ten would be more than three

    def is_failing(self, now: float) -> bool:
        self._drop_old(now)
        return self._has_failed and self._failures > 0

    def left(self, now: float) -> int:
        self._drop_old(now)
        for_minimum = self._minimum - self._calls
        lacking = self._needed(self._calls) - self._failures
        if lacking <= 0:
            return max(1, for_minimum)
        # With a rate of one nothing opens it while a success counts.
        for_rate = ceil(lacking / (1 - self._rate)) if self._rate < 1 else self._minimum
        return max(1, for_minimum, for_rate)
