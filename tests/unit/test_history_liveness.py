"""What has to happen after the last fault, and how long lost work was lost."""

from dataclasses import replace
from math import inf

import pytest

from unit.told_history import Story
from windlass.testing.history_check import Pause, Quiet, Recovery, check_liveness, recoveries

QUIET = Quiet(since=100, until=200, sweep=1, term=3)


def told(story: Story, quiet: Quiet = QUIET) -> list[str]:
    return [violation.rule for violation in check_liveness(story.history(), quiet)]


def led() -> Story:
    return Story().wait(100).led(1)


def test_a_run_that_drains_is_clean() -> None:
    story = led().born().placed().placed(is_there=False).claimed("t").ended("t")

    assert told(story) == []


def test_a_ready_task_that_is_not_granted_is_found() -> None:
    assert told(led().born().placed()) == ["L1", "L4"]


def test_a_ready_task_that_was_granted_late_is_found() -> None:
    story = led().born().placed().wait(5).placed(is_there=False).claimed("t").ended("t")

    assert told(story) == ["L1"]


def test_what_would_be_late_after_the_end_is_not_decided() -> None:
    quiet = replace(QUIET, until=104)

    assert told(led().born().placed(), quiet) == ["L4"]


def test_a_lost_claim_that_nobody_rescues_is_found() -> None:
    story = Story().led(1).born().placed().placed(is_there=False).claimed("t").wait(97).led(2)

    assert told(story) == ["L1", "L4"]


def test_a_lost_claim_that_was_rescued_in_time_is_clean() -> None:
    story = Story().born().placed().placed(is_there=False).wait(94).claimed("t").led(1).wait(4)
    story.returned(None).placed(generation=2).placed(generation=2, is_there=False)

    assert told(story.claimed("u", 2).ended("u", generation=2)) == []


def test_what_was_late_before_the_quiet_time_is_forgiven() -> None:
    story = Story().born().placed().wait(96).led(1).placed(is_there=False).claimed("t").ended("t")

    assert told(story) == []
    story = Story().born().claimed("t").wait(97).led(1).returned(None)
    story.placed(generation=2).placed(generation=2, is_there=False)
    assert told(story.claimed("u", 2).ended("u", generation=2)) == []


def test_a_ready_task_may_wait_for_a_slot_as_long_as_is_said() -> None:
    story = led().born().placed().wait(1.5).placed(is_there=False).claimed("t").ended("t")

    assert told(story) == ["L1"]
    assert told(story, replace(QUIET, queueing=2)) == []


def test_a_seat_that_stays_empty_is_found() -> None:
    assert told(Story().led(1)) == ["L2"]
    assert told(Story().wait(104).led(1)) == []
    assert told(Story().wait(105).led(1)) == ["L2"]
    assert told(Story().led(1), replace(QUIET, until=104)) == []  # it may still be taken in time


def test_a_task_that_is_due_and_not_made_ready_is_found() -> None:
    story = led().born(due=150).placed("scheduled")

    assert told(story) == ["L3", "L4"]
    assert told(story, replace(QUIET, until=149)) == []


def test_a_task_that_was_made_ready_late_is_found() -> None:
    story = led().born(due=150).placed("scheduled").wait(50)
    story.placed("scheduled", is_there=False).placed().placed(is_there=False)

    assert told(story.claimed("t").ended("t")) == ["L3"]


def test_a_task_may_wait_for_its_queue_or_its_type() -> None:
    story = led().born().placed()

    assert told(story, replace(QUIET, types=frozenset({"mail"}))) == []
    story.pauses.append(Pause(queue="q", since=0))
    assert told(story) == []


def test_a_task_of_a_queue_that_was_resumed_waits_for_nothing() -> None:
    story = led().born().placed()
    story.pauses.append(Pause(queue="q", since=0, until=50))

    assert told(story) == ["L1", "L4"]


def test_a_worker_that_does_not_claim_again_is_found() -> None:
    story = led().born().claimed("t", worker="w").ended("t")
    quiet = replace(QUIET, workers=frozenset({"w", "v"}))

    (violation,) = check_liveness(story.history(), quiet)

    assert violation.rule == "L5"
    assert "worker v" in violation.says


@pytest.mark.parametrize(("claims_at", "rules"), [(98, ["L5"]), (104, []), (120, ["L5"])])
def test_a_worker_has_to_claim_within_its_longest_pause(claims_at: float, rules: list[str]) -> None:
    quiet = replace(QUIET, workers=frozenset({"w"}))
    story = Story().born().wait(claims_at - 2).claimed("t").ended("t")
    story.now = 100
    story.led(1)

    assert told(story, quiet) == rules
    assert told(story, replace(quiet, until=105)) == []


def recovered(story: Story, *outages: tuple[float, float]) -> list[Recovery]:
    return recoveries(story.history(), {"w": 4.0}, lease=5.0, within=2.0, outages=outages)


def test_a_recovery_is_measured_from_the_death_to_the_next_grant() -> None:
    story = Story().born().claimed("t").wait(6).led(1).returned(None).claimed("u", 2, worker="v")

    (recovery,) = recovered(story)

    assert (recovery.seconds, recovery.overdue) == (7.0, 1.0)


@pytest.mark.parametrize(
    ("outages", "overdue"),
    [
        ([(5.0, 8.0)], 1.0),  # while the lease lasted: it cost nothing
        ([(8.0, 9.5)], 0.5),  # when it ended
        ([(9.25, 9.75)], 0.25),  # a little later
        ([(8.0, 9.25), (9.5, 9.75)], 0.25),
        ([(11.5, 12.0)], 1.0),  # after it was all over
    ],
)
def test_an_outage_puts_off_a_recovery_only_if_it_stands_in_the_way(
    outages: list[tuple[float, float]], overdue: float
) -> None:
    story = Story().born().claimed("t").wait(6).led(1).returned(None).claimed("u", 2, worker="v")

    (recovery,) = recovered(story, *outages)

    assert recovery.overdue == overdue


def test_an_outage_that_begins_when_it_was_too_late_already_excuses_nothing() -> None:
    story = Story().born().claimed("t").wait(20).led(1).returned(None).claimed("u", 2, worker="v")

    (recovery,) = recovered(story, (12.0, 24.0))

    assert recovery.overdue > 10


def test_what_a_worker_had_settled_before_its_death_needs_no_recovery() -> None:
    story = Story().born().claimed("t").ended("t")

    assert recovered(story) == []


def test_a_task_that_never_came_back_took_for_ever() -> None:
    (recovery,) = recovered(Story().born().claimed("t"))

    assert recovery.seconds == inf
