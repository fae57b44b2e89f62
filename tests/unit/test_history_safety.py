"""Each rule of the history checker: a history that keeps it, and those that break it."""

import pytest

from unit.told_history import Story
from windlass.testing.history_check import Pause, check


def told(story: Story) -> list[str]:
    return [violation.rule for violation in check(story.history())]


KEPT = {
    "a task completes": Story()
    .asked()
    .born()
    .placed()
    .placed(is_there=False)
    .claimed("t")
    .ran(3)
    .extended("t")
    .ended("t"),
    "unknown, and not there": Story().asked("unknown", task=None),
    "unknown, and there": Story().asked("unknown", task=None).born(),
    "refused, and not there": Story().asked("fail", task=None),
    "forgotten after its time": Story().asked().born().claimed("t").ended("t").forgotten(),
    "the same key twice": Story().asked(key="k").born(key="k").asked(intent="j", key="k"),
    "a key again after its task was forgotten": Story()
    .asked(key="k")
    .born(key="k")
    .claimed("t")
    .ended("t")
    .forgotten()
    .asked(intent="j", key="k", task="b")
    .born("b", key="k", intent="j"),
    "a key of two types": Story()
    .asked(key="k")
    .born(key="k")
    .asked(intent="j", key="k", type="mail", task="b")
    .born("b", key="k", type="mail", intent="j"),
    "rescued and granted again": Story()
    .asked()
    .born()
    .claimed("t")
    .wait(10)
    .led(1)
    .returned(None)
    .claimed("u", 2, worker="v")
    .ended("u", generation=2, worker="v"),
    "settled after expiry, before a rescue": Story()
    .asked()
    .born()
    .claimed("t")
    .wait(10)
    .ended("t"),
    "released and granted at once": Story()
    .asked()
    .born()
    .claimed("t")
    .returned("t")
    .claimed("u", 2)
    .ended("u", generation=2),
    "an attempt that failed": Story()
    .asked()
    .born()
    .claimed("t")
    .ran(1)
    .returned("t", attempts=1, is_attempt_noted=True)
    .claimed("u", 2)
    .ran(3, attempt=2)
    .ended("u", generation=2, attempts=2),
    "an attempt that was lost": Story()
    .asked()
    .born()
    .claimed("t")
    .wait(10)
    .led(1)
    .returned(None, attempts=1, was_running=True)
    .claimed("u", 2)
    .ended("u", "dead", generation=2, attempts=2),
    "lost with its last attempt": Story()
    .asked()
    .born(max_attempts=1)
    .claimed("t")
    .wait(10)
    .led(1)
    .ended(None, "dead", worker="w", max_attempts=1, was_running=True, term=1),
    "reopened": Story()
    .asked()
    .born()
    .claimed("t")
    .ended("t", "failed")
    .born(generation=2, is_reopened=True)
    .placed(generation=2)
    .placed(generation=2, is_there=False)
    .claimed("u", 2)
    .ended("u", generation=2),
    "cancelled while it waits": Story()
    .asked()
    .born()
    .placed()
    .placed(is_there=False)
    .ended(None, "cancelled", attempts=0),
    "terms that follow each other": Story().led(1).led(1).wait(20).led(2, "v").led(2, "v"),
    "resigned": Story().led(1).led(1, seconds=-100).led(2, "v"),
    "lost while it ran, and cancelled": Story()
    .asked()
    .born()
    .claimed("t")
    .wait(10)
    .led(1)
    .ended(None, "cancelled", worker="w", attempts=0, was_running=True, term=1),
    "put off": Story().asked().born(due=50).changed(due=9).wait(20).claimed("t").ended("t"),
}

BROKEN = {
    "acknowledged and not there": (Story().asked(), ["I1"]),
    "gone without a trace": (Story().asked().born().vanished(), ["I1", "I1"]),
    "nobody asked": (Story().born(), ["I2"]),
    "refused, and there": (Story().asked("fail", task=None).born(), ["I2"]),
    "two for one call": (Story().asked().born().born("b"), ["I2"]),
    "two for one key": (
        Story()
        .asked(key="k")
        .born(key="k")
        .asked(intent="j", key="k", task="b")
        .born("b", key="k", intent="j"),
        ["I2"],
    ),
    "answered with that of another key": (
        Story().asked(key="k").born(key="k").asked(intent="j", key="other"),
        ["I2"],
    ),
    "answered with another's": (Story().asked().born().asked(intent="j"), ["I2"]),
    "granted while its lease held": (
        Story()
        .asked()
        .born()
        .claimed("t")
        .extended("t")
        .wait(-1)
        .returned(None, term=1)
        .claimed("u", 2),
        ["I3", "I3"],
    ),
    "rescued too early": (Story().asked().born().claimed("t").led(1).returned(None), ["I3"]),
    "rescued after its first lease, and before the end of the next": (
        Story().asked().born().claimed("t").wait(3).extended("t").wait(1).returned(None),
        ["I3"],
    ),
    "rescued after it was extended once, and before the end of the next": (
        Story()
        .asked()
        .born()
        .claimed("t")
        .wait(3)
        .extended("t")
        .wait(3)
        .extended("t")
        .wait(3)
        .returned(None),
        ["I3"],
    ),
    "ran by who has no lease on it": (
        Story().asked().born().claimed("t").ran(1, worker="v"),
        ["I3"],
    ),
    "one generation granted twice": (
        Story().asked().born().claimed("t").wait(10).claimed("u"),
        ["I3"],
    ),
    "ran without a lease": (Story().asked().born().ran(7), ["I3"]),
    "ran twice under one lease": (Story().asked().born().claimed("t").ran(1).ran(1), ["I3"]),
    "settled by who had lost it": (
        Story()
        .asked()
        .born()
        .claimed("t")
        .wait(10)
        .led(1)
        .returned(None)
        .claimed("u", 2)
        .ended("t", generation=2),
        ["I4"],
    ),
    "returned by who had lost it": (
        Story().asked().born().claimed("t").returned("t").claimed("u", 2).wait(10).returned("t", 3),
        ["I4"],
    ),
    "settled by who never had it": (Story().asked().born().ended("t"), ["I4"]),
    "two ends": (
        Story().asked().born().claimed("t").ended("t").ended("t", "cancelled", attempts=1),
        ["I5"],
    ),
    "returned after its end": (
        Story().asked().born().claimed("t").ended("t").returned("t", attempts=1),
        ["I5"],
    ),
    "changed after its end": (
        Story().asked().born().claimed("t").ended("t").changed(due=9, attempts=1),
        ["I5"],
    ),
    "an end beside a live row": (
        Story().asked().born().claimed("t").ended("t", was_live=False),
        ["I5"],
    ),
    "reopened in an old generation": (
        Story().asked().born().claimed("t").ended("t", "failed").born(is_reopened=True),
        ["I5"],
    ),
    "born with an attempt": (Story().asked().born(attempts=1), ["I6"]),
    "a change that counted": (Story().asked().born().changed(due=0, attempts=1), ["I6"]),
    "an attempt that was not counted": (
        Story().asked().born().claimed("t").returned("t", is_attempt_noted=True),
        ["I6"],
    ),
    "a recovery that counted": (
        Story().asked().born().claimed("t").wait(10).led(1).returned(None, attempts=1),
        ["I6"],
    ),
    "more attempts than it may have": (
        Story()
        .asked()
        .born(max_attempts=1)
        .claimed("t")
        .returned("t", attempts=1, is_attempt_noted=True)
        .claimed("u", 2)
        .ended("u", generation=2, attempts=2, max_attempts=1),
        ["I6"],
    ),
    "a handler told another attempt": (
        Story().asked().born().claimed("t").ran(1, attempt=2).ended("t"),
        ["I6"],
    ),
    "dead in the history": (
        Story().asked().born().claimed("t").ended("t", "failed", place="history"),
        ["I7"],
    ),
    "dead with attempts left": (
        Story().asked().born().claimed("t").ended("t", "dead", attempts=1),
        ["I7"],
    ),
    "ended and still ready": (Story().asked().born().placed().claimed("t").ended("t"), ["I7"]),
    "claimed after its end": (
        Story().asked().born().claimed("t").ended("t").claimed("u", 2),
        ["I7"],
    ),
    "dead and ready": (
        Story().asked().born().claimed("t").ended("t", "failed").placed(),
        ["I7"],
    ),
    "two leaders in one term": (Story().led(1).led(1, "v"), ["I9"]),
    "elected during a term": (Story().led(1).led(2, "v"), ["I9"]),
    "a term that fell": (Story().led(2).wait(20).led(1), ["I9"]),
    "a rescue by who holds no seat": (
        Story().asked().born().claimed("t").wait(10).led(1).returned(None, term=None),
        ["I10"],
    ),
    "buried by who holds no seat": (
        Story()
        .asked()
        .born(max_attempts=1)
        .claimed("t")
        .wait(10)
        .led(1)
        .ended(None, "dead", worker="w", max_attempts=1, was_running=True),
        ["I10"],
    ),
    "a rescue by a deposed leader": (
        Story().asked().born().claimed("t").wait(20).led(1).wait(20).led(2, "v").returned(None),
        ["I10"],
    ),
    "granted before its time": (Story().asked().born(due=50).claimed("t"), ["I13"]),
    "tried again before its time": (
        Story()
        .asked()
        .born()
        .claimed("t")
        .returned("t", due=50, attempts=1, is_attempt_noted=True)
        .claimed("u", 2),
        ["I13"],
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_history_that_keeps_the_promises_is_clean(name: str) -> None:
    assert check(KEPT[name].history()) == []


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_found_by_its_rule_and_no_other(name: str) -> None:
    story, rules = BROKEN[name]

    assert told(story) == rules


def test_a_claim_from_a_paused_queue_is_found() -> None:
    story = Story().asked().born().claimed("t").ended("t")
    story.pauses.append(Pause(queue="q", since=1.5, until=2.5))

    assert told(story) == ["I13"]


def test_a_claim_before_or_after_a_pause_is_clean() -> None:
    story = Story().asked().born().claimed("t").ended("t")
    story.pauses += [Pause(queue="q", since=2.5), Pause(queue="q", since=0, until=1.5)]
    story.pauses.append(Pause(queue="other", since=0))

    assert told(story) == []


@pytest.mark.parametrize("places", [{"task", "dead"}, {"task", "ready", "claim"}])
def test_a_task_in_two_places_is_found(places: set[str]) -> None:
    story = Story().asked().born()
    story.places["a"] = frozenset(places)

    assert told(story) == ["I7"]


def test_a_violation_names_the_rule_the_task_and_what_shows_it() -> None:
    (violation,) = check(BROKEN["settled by who had lost it"][0].history())

    assert str(violation).startswith("I4 task a: generation 2 was settled under a lease that was")
    assert "Claimed" in str(violation)
    assert "Ended" in str(violation)
