"""Which calls a circuit lets through, given how others ended."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.model.breaker import BreakerState, CallOutcome, Trials
from windlass.policy.breaker import (
    LATEST,
    SOONEST,
    STEPS,
    Asking,
    BreakerSettings,
    Circuit,
    Permit,
    Refusal,
)

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
SUCCEEDED, FAILED, NO_VERDICT = CallOutcome


def circuit(**settings: Any) -> Circuit:
    return Circuit(BreakerSettings(name="payments", **settings))


def permit(circuit: Circuit, now: float, asking: Asking = Asking.FIRST) -> Permit:
    admitted = circuit.admit(now, asking)
    assert isinstance(admitted, Permit)
    return admitted


def refusal(circuit: Circuit, now: float, asking: Asking = Asking.FIRST) -> Refusal:
    admitted = circuit.admit(now, asking)
    assert isinstance(admitted, Refusal)
    return admitted


def call(circuit: Circuit, outcome: CallOutcome, now: float) -> BreakerState:
    circuit.end(permit(circuit, now), outcome, now)
    return circuit.state(now)


def opened(now: float = 0.0, **settings: Any) -> Circuit:
    made = circuit(**settings)
    while made.state(now) is CLOSED:
        call(made, FAILED, now)
    return made


def begun(circuit: Circuit, now: float, asking: Asking = Asking.FIRST) -> list[Permit]:
    """As many calls at once as it lets through, of a hundred."""
    asked = [circuit.admit(now, asking) for _ in range(100)]
    return [one for one in asked if isinstance(one, Permit)]


# Closed


def test_so_many_failures_in_a_row_open_it() -> None:
    made = circuit(failures=3)

    assert [call(made, FAILED, now) for now in (0, 1, 2)] == [CLOSED, CLOSED, OPEN]


def test_a_success_begins_the_row_anew() -> None:
    made = circuit(failures=2)

    ended = [call(made, outcome, 0) for outcome in (FAILED, SUCCEEDED, FAILED, FAILED)]

    assert ended == [CLOSED, CLOSED, CLOSED, OPEN]


def test_what_says_nothing_is_neither_success_nor_failure() -> None:
    made = circuit(failures=2)

    ended = [call(made, outcome, 0) for outcome in (FAILED, NO_VERDICT, FAILED)]

    assert ended == [CLOSED, CLOSED, OPEN]


def test_failures_that_lie_too_far_apart_do_not_count_together() -> None:
    made = circuit(failures=3, within=10)

    assert [call(made, FAILED, now) for now in (0, 5, 11, 20, 21)] == [CLOSED] * 4 + [OPEN]


def test_a_share_of_many_opens_it() -> None:
    made = circuit(mode="rate", rate=0.3, minimum=10)
    outcomes = [SUCCEEDED] * 7 + [FAILED] * 3

    assert [call(made, outcome, 0) for outcome in outcomes] == [CLOSED] * 9 + [OPEN]


def test_a_share_of_few_does_not() -> None:
    made = circuit(mode="rate", rate=0.1, minimum=10)

    assert {call(made, FAILED, 0) for _ in range(9)} == {CLOSED}


def test_a_rate_is_taken_over_the_last_seconds() -> None:
    made = circuit(mode="rate", rate=0.5, minimum=4, within=20)
    for _ in range(100):
        call(made, SUCCEEDED, 0)

    assert [call(made, FAILED, now) for now in (15, 16, 17, 18)] == [CLOSED] * 4
    assert call(made, FAILED, 25) is OPEN


# How many at once


@pytest.mark.parametrize("settings", [{"failures": 5}, {"mode": "rate", "minimum": 5}])
def test_of_many_calls_at_once_so_many_begin_as_open_it(settings: dict[str, Any]) -> None:
    made = circuit(**settings)

    first = begun(made, 0)
    changes = [made.end(one, FAILED, 0) for one in first]

    assert len(first) == 5
    assert changes == [None] * 4 + [OPEN]
    assert refusal(made, 0).seconds == 30


def test_a_call_that_may_wait_is_told_that_a_verdict_is_near() -> None:
    made = circuit(failures=2)
    begun(made, 0)

    assert refusal(made, 0).is_near


def test_a_call_that_has_waited_is_let_through_while_none_has_failed() -> None:
    made = circuit(failures=2)
    first = begun(made, 0)

    assert permit(made, 1, Asking.AGAIN)

    made.end(first[0], FAILED, 1)
    assert refusal(made, 2, Asking.AGAIN)


def test_each_success_lets_more_calls_begin() -> None:
    made = circuit(failures=5)
    first = begun(made, 0)

    made.end(first[0], SUCCEEDED, 1)

    assert len(begun(made, 1)) == 5


def test_calls_that_go_well_are_not_held_up() -> None:
    made = circuit(failures=1)
    flying: list[Permit] = []
    for _ in range(50):
        flying += begun(made, 0)
        made.end(flying.pop(0), SUCCEEDED, 0)

    for _ in range(1000):  # one ends, and another begins
        made.end(flying.pop(0), SUCCEEDED, 0)
        flying.append(permit(made, 0))

    assert len(flying) >= 40


def test_after_a_pause_it_is_careful_again() -> None:
    made = circuit(failures=5)
    first = begun(made, 0)
    made.end(first[0], SUCCEEDED, 0)
    first += begun(made, 0)
    for one in first[1:]:
        made.end(one, SUCCEEDED, 0)

    assert len(begun(made, 0)) == 5


def test_what_answered_long_ago_speaks_for_nothing() -> None:
    made = circuit(failures=2, recovery=30)
    first = begun(made, 0)
    made.end(first[0], SUCCEEDED, 0)
    begun(made, 0)

    assert len(begun(made, 31)) == 2


def test_after_a_failure_so_many_begin_as_are_left_until_it_opens() -> None:
    made = circuit(failures=5)
    call(made, SUCCEEDED, 0)
    call(made, FAILED, 0)
    call(made, FAILED, 0)

    assert len(begun(made, 0, Asking.AGAIN)) == 3


def test_a_rate_bounds_what_begins_after_a_failure() -> None:
    made = circuit(mode="rate", rate=0.5, minimum=4)
    for _ in range(10):
        call(made, SUCCEEDED, 0)
    call(made, FAILED, 0)

    first = begun(made, 0, Asking.AGAIN)
    changes = [made.end(one, FAILED, 0) for one in first]

    assert len(first) == 9
    assert changes == [None] * 8 + [OPEN]


def test_a_rate_of_one_lets_calls_through_after_a_failure() -> None:
    made = circuit(mode="rate", rate=1.0, minimum=4)
    call(made, SUCCEEDED, 0)

    assert call(made, FAILED, 0) is CLOSED
    assert begun(made, 0)


def test_who_cannot_wait_is_bounded_only_while_nothing_is_known() -> None:
    made = circuit(failures=2)

    cold = begun(made, 0, Asking.ONCE)
    made.end(cold[0], SUCCEEDED, 0)

    assert (len(cold), len(begun(made, 1, Asking.ONCE))) == (2, 100)


@pytest.mark.parametrize("asking", Asking)
def test_calls_that_never_end_keep_no_place(asking: Asking) -> None:
    made = circuit(failures=2, recovery=30)
    begun(made, 0)

    assert permit(made, 30, asking)


# Open and half-open


def test_an_open_circuit_says_how_long_it_stays_so() -> None:
    made = opened(recovery=30)

    assert refusal(made, 10).seconds == 20
    assert made.half_open_in(10) == 20
    assert made.half_open_in(30) == 0


def test_those_that_are_put_off_come_after_the_half_open_moment_and_not_at_once() -> None:
    refused = refusal(opened(recovery=20), 5)

    assert refused.pause(0.0) == 15 + 20 * SOONEST
    assert refused.pause(1.0) == 15 + 20 * LATEST


def test_a_crowd_that_waits_for_a_verdict_comes_back_over_a_longer_time() -> None:
    made = circuit(failures=2, recovery=1000)
    call(made, FAILED, 0)
    begun(made, 0)

    spans = [refusal(made, 0, Asking.AGAIN).span for _ in range(2000)]

    assert (spans[0], spans[-1]) == (2, 30)


def test_half_open_lets_through_so_many_trials_at_a_time() -> None:
    made = opened(trials=2, recovery=30)

    assert len(begun(made, 30)) == 2
    assert made.state(30) is HALF_OPEN


def test_trials_that_others_make_are_refused_at_once() -> None:
    made = opened(recovery=30)

    refusals = [made.admit(30, asking, Trials.THEIRS) for asking in Asking]

    assert [isinstance(one, Refusal) and not one.is_near for one in refusals] == [True] * 3


def test_a_call_waits_for_who_makes_the_trials() -> None:
    made = opened(recovery=30)

    refusal = made.admit(30, Asking.FIRST, Trials.UNDECIDED)

    assert isinstance(refusal, Refusal)
    assert refusal.is_near


@pytest.mark.parametrize("asking", [Asking.AGAIN, Asking.ONCE])
def test_a_call_that_has_waited_for_that_or_cannot_is_a_trial(asking: Asking) -> None:
    made = opened(recovery=30)

    assert isinstance(made.admit(30, asking, Trials.UNDECIDED), Permit)

    for again in Asking:
        refusal = made.admit(30, again, Trials.UNDECIDED)
        assert isinstance(refusal, Refusal)
        assert not refusal.is_near  # whoever has the trials, the place is taken


@pytest.mark.parametrize("trials", Trials)
def test_who_makes_the_trials_is_nothing_to_a_closed_circuit(trials: Trials) -> None:
    assert isinstance(circuit().admit(0, Asking.FIRST, trials), Permit)


def test_a_trial_is_under_way_until_it_ends_or_was_silent_for_long() -> None:
    made = opened(recovery=30)
    assert not made.is_trying(30)

    (trial,) = begun(made, 30)

    assert made.is_trying(59)
    assert not made.is_trying(60)
    (trial,) = begun(made, 60)
    made.end(trial, NO_VERDICT, 61)
    assert not made.is_trying(61)


def test_so_many_trials_that_succeed_close_it() -> None:
    made = opened(trials=2, recovery=30)
    first, second = begun(made, 30)

    assert made.end(first, SUCCEEDED, 30) is None
    assert made.end(second, SUCCEEDED, 30) is CLOSED


def test_a_trial_that_fails_opens_it_for_as_long_again() -> None:
    made = opened(trials=2, recovery=30)
    first, second = begun(made, 31)

    made.end(first, SUCCEEDED, 31)

    assert made.end(second, FAILED, 32) is OPEN
    assert refusal(made, 32).seconds == 30


def test_a_trial_without_a_verdict_frees_its_place() -> None:
    made = opened(recovery=30)

    made.end(permit(made, 30), NO_VERDICT, 31)

    assert made.state(31) is HALF_OPEN
    assert permit(made, 31)


def test_a_trial_that_never_ends_frees_its_place_after_a_while() -> None:
    made = opened(recovery=30)
    permit(made, 30)

    assert refusal(made, 59)
    assert permit(made, 60)


@pytest.mark.parametrize("outcome", CallOutcome)
@pytest.mark.parametrize("ends_at", [1, 31])
def test_calls_from_before_it_opened_decide_nothing(outcome: CallOutcome, ends_at: float) -> None:
    made = circuit(failures=2, recovery=30)
    late, one, other = (permit(made, 0, Asking.AGAIN) for _ in range(3))
    made.end(one, FAILED, 0)
    made.end(other, FAILED, 0)
    before = made.state(ends_at)

    assert made.end(late, outcome, ends_at) is None
    assert made.state(ends_at) is before


def test_one_that_closed_knows_nothing_of_before() -> None:
    made = opened(failures=2, recovery=30)
    call(made, SUCCEEDED, 30)

    assert call(made, FAILED, 30) is CLOSED
    assert call(made, FAILED, 30) is OPEN


def test_it_can_be_told_to_open_and_to_close() -> None:
    made = circuit()

    made.open(10)
    assert (made.state(9), made.state(10)) == (OPEN, HALF_OPEN)
    made.close()
    assert made.state(10) is CLOSED


# Against a model that keeps everything


class Model:
    """What every call said, and when: the rules said over again, without a thought to what they cost."""

    def __init__(self, settings: BreakerSettings) -> None:
        self.settings = settings
        self.state = CLOSED
        self.said: list[tuple[float, CallOutcome]] = []  # since it closed, or became half-open
        self.half_open_at = 0.0

    def at(self, now: float) -> BreakerState:
        if self.state is OPEN and now >= self.half_open_at:
            self.state, self.said = HALF_OPEN, []
        return self.state

    def hear(self, now: float, outcome: CallOutcome) -> None:
        self.said.append((now, outcome))
        if self.state is HALF_OPEN:
            good = [one for _, one in self.said if one is SUCCEEDED]
            if outcome is FAILED:
                self.state, self.half_open_at = OPEN, now + self.settings.recovery
            elif len(good) >= self.settings.trials:
                self.state, self.said = CLOSED, []
        elif outcome is FAILED and self.opens(now):
            self.state, self.half_open_at = OPEN, now + self.settings.recovery

    def opens(self, now: float) -> bool:
        settings = self.settings
        said = [one for one in self.said if one[1] is not NO_VERDICT]
        if settings.mode == "rate":
            step = settings.within / STEPS
            recent = [one for at, one in said if at // step > now // step - STEPS]
            share = recent.count(FAILED) / len(recent)
            return len(recent) >= settings.minimum and share >= settings.rate - 1e-9
        row: list[float] = []
        for at, outcome in said:
            row = [] if outcome is SUCCEEDED or (row and at - row[0] > settings.within) else row
            row += [at] if outcome is FAILED else []
        return len(row) >= settings.failures


SETTINGS = st.builds(
    BreakerSettings,
    name=st.just("payments"),
    failures=st.integers(1, 4),
    within=st.sampled_from([1.0, 5.0, 20.0]),
    recovery=st.sampled_from([1.0, 7.0]),
    trials=st.integers(1, 3),
    mode=st.sampled_from(["consecutive", "rate"]),
    rate=st.sampled_from([0.1, 0.3, 0.5, 1.0]),
    minimum=st.integers(1, 6),
)
STEPS_OF_A_RUN = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", SUCCEEDED, FAILED, FAILED, NO_VERDICT]),
        st.integers(0, 9),  # which of the calls in flight
        st.sampled_from([0.0, 0.0, 0.1, 0.5, 3.0]),  # seconds that pass
    ),
    max_size=120,
)


@given(settings=SETTINGS, steps=STEPS_OF_A_RUN)
def test_a_circuit_does_what_its_rules_say(
    settings: BreakerSettings, steps: list[tuple[Any, int, float]]
) -> None:
    made, model, now = Circuit(settings), Model(settings), 0.0
    flying: list[tuple[Permit, float]] = []
    for what, which, passes in steps:
        now += passes
        assert made.state(now) is model.at(now)
        if what == "begin":
            asked = made.admit(now)
            current = [(one, at) for one, at in flying if one.epoch == made.epoch]
            young = [one for one, began in current if now - began < settings.recovery]
            if isinstance(asked, Permit):
                flying.append((asked, now))
                assert model.state is not OPEN
                assert model.state is CLOSED or len(young) < settings.trials
            else:  # there is always something to wait for
                assert model.state is OPEN or young
        elif flying:
            one, _ = flying.pop(which % len(flying))
            is_current = one.epoch == made.epoch
            made.end(one, what, now)
            if is_current:
                model.hear(now, what)
        assert made.state(now) is model.at(now)


@given(
    failures=st.integers(1, 8),
    trials=st.integers(1, 3),
    before=st.integers(0, 20),
    waits=st.lists(st.floats(0, 3), min_size=1, max_size=200),
)
def test_an_outage_costs_the_threshold_and_the_trials_of_each_recovery(
    failures: int, trials: int, before: int, waits: list[float]
) -> None:
    made = circuit(failures=failures, trials=trials, recovery=2.0)
    for _ in range(before):
        call(made, SUCCEEDED, 0)
    now, calls = 0.0, 0

    for wait in waits:  # each time a crowd comes, and all that were let through fail
        flying = begun(made, now)
        calls += len(flying)
        for one in flying:
            made.end(one, FAILED, now)
        now += wait

    threshold = max(failures, 2) if before else failures
    assert calls <= threshold + trials * int(now / 2.0)


# Calls whose time is over


def test_a_call_that_goes_on_counts_when_its_time_is_over_and_only_then() -> None:
    made = circuit(failures=2, timeout=5)
    first, second = permit(made, 0), permit(made, 1)

    assert made.count_overdue(5.5) is None
    assert made.end(first, SUCCEEDED, 5.6) is None  # it has been counted
    assert made.count_overdue(6) is OPEN
    assert made.end(second, SUCCEEDED, 7) is None
    assert made.state(7) is OPEN


def test_a_call_that_ends_in_time_is_not_counted_again() -> None:
    made = circuit(failures=1, timeout=5)
    made.end(permit(made, 0), SUCCEEDED, 4)

    assert made.count_overdue(100) is None
    assert made.state(100) is CLOSED


def test_a_trial_that_goes_on_when_its_time_is_over_has_failed() -> None:
    made = opened(failures=1, recovery=30, timeout=5)
    trial = permit(made, 30)

    assert made.count_overdue(34) is None
    assert made.count_overdue(35) is OPEN
    assert made.half_open_in(35) == 30
    assert made.end(trial, SUCCEEDED, 36) is None
    assert made.state(36) is OPEN
