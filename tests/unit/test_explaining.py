"""What is said of a task: which reasons stand in its way, and their sentences."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, get_args
from uuid import UUID

import pytest

from windlass.model.explanation import (
    Behind,
    Buffered,
    CancellationAsked,
    Cause,
    Ended,
    Expires,
    GateCalled,
    GateHolder,
    Holder,
    KeyHeld,
    LeaseOver,
    LimitReached,
    NobodyHandles,
    NotListed,
    QueueBusy,
    QueuePaused,
    RateLimited,
    Reason,
    Running,
    RunsAlone,
    TypePaused,
    ValueLimitReached,
    ValueRateLimited,
    WaitsForTime,
    WorkersBusy,
)
from windlass.model.rule import LaneRule, RuleScope
from windlass.model.situation import (
    COUNTED,
    Ahead,
    GateState,
    LaneState,
    LimitState,
    Situation,
    Suspects,
)
from windlass.model.task import TaskRecord, TaskState, WorkerRecord
from windlass.policy.explaining import competing, explained, is_in_the_way

NOON = datetime(2026, 11, 18, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
QUEUE, TYPE = RuleScope.QUEUE, RuleScope.TYPE
HOLDER = Holder(UUID(int=7), UUID(int=1), NOON)
RECORD = TaskRecord(
    id=str(UUID(int=9)),
    type="send",
    queue="mail",
    payload={},
    status=TaskState.PENDING,
    priority=10,
    created_at=NOON,
    scheduled_for=NOON,
    updated_at=NOON,
    attempts=0,
    max_attempts=4,
    generation=1,
)
WORKER = WorkerRecord(
    id=str(UUID(int=1)),
    host="a.example",
    pid=7,
    version="0.1.0",
    capacity=10,
    types=("send", "call"),
    queues=("mail",),
    started_at=NOON,
    heartbeat_at=NOON,
    running=0,
    idle=False,
    leader=False,
)
GATE_HOLDER = GateHolder(UUID(int=7), TaskState.SCHEDULED, until=NOON)
DEAD_HOLDER = GateHolder(UUID(int=7), TaskState.DEAD)
READY = Situation(now=NOON, record=RECORD, workers=(WORKER,))
SAID: list[tuple[Reason, bool, str]] = [
    (Ended(TaskState.DEAD, NOON, "no"), True, "it ended as dead at 2026-11-18 12:00:00 UTC: no"),
    (Running("w", NOON, NOON), True, "it runs since 2026-11-18 12:00:00 UTC, on worker w"),
    (Buffered("w", NOON, NOON), True, "worker w took it at 2026-11-18 12:00:00 UTC"),
    (LeaseOver("w", NOON), True, "its lease is over since 2026-11-18 12:00:00 UTC"),
    (CancellationAsked("too late"), True, "its cancellation was asked for: too late"),
    (WaitsForTime(NOON, Cause.ASKED), True, "it waits for its time, 2026-11-18 12:00:00 UTC"),
    (WaitsForTime(NOON, Cause.ASKED, is_due=True), True, "it is due since 2026-11-18 12:00:00"),
    (WaitsForTime(NOON, Cause.RETRY, error="no"), True, "it is a retry after: no"),
    (WaitsForTime(NOON, Cause.PUT_OFF, put_off="no"), True, "UTC; it was put off: no"),
    (WaitsForTime(NOON, Cause.PUT_OFF, breakers=("a (open)",)), True, "handled: a (open)"),
    (QueuePaused("mail", NOON), True, "queue 'mail' is paused since 2026-11-18 12:00:00 UTC"),
    (TypePaused("send", NOON), True, "type 'send' is paused since 2026-11-18 12:00:00 UTC"),
    (LimitReached(QUEUE, "mail", 3, 3, 0, (HOLDER,)), True, "'mail' has 3 of 3 tasks at once"),
    (LimitReached(TYPE, "send", 3, 1, 2), True, "what is left goes to others that come first (2)"),
    (RateLimited(TYPE, "send", 0.5, NOON, 0), True, "not before 2026-11-18 12:00:00.000 UTC"),
    (KeyHeld("k", 0, GATE_HOLDER), True, "ordering key 'k' is held by 00000000-0000-0000-0000-"),
    (KeyHeld("k", 2, DEAD_HOLDER), True, "until it is retried, replayed or discarded; 2 others"),
    (KeyHeld("k", 2), True, "is held by the first of 2 that came before it"),
    (ValueLimitReached("send", "acme", 3, 3, 1, (GATE_HOLDER,)), True, "3 of 3 tasks of 'acme'"),
    (LimitReached(TYPE, "send", 3, 1, 9, or_more=True), True, "come first (more than 9)"),
    (RateLimited(TYPE, "send", 0.5, NOON, 2), True, "12:00:00.000 UTC, 2 others first"),
    (RateLimited(TYPE, "send", 0.5, NOON, 9, or_more=True), True, "UTC, and later: more than 9"),
    (KeyHeld("k", 9, or_more=True), True, "the first of more than 9 that came before it"),
    (KeyHeld("k", 9, GATE_HOLDER, or_more=True), True, "; more than 9 others come first"),
    (ValueLimitReached("send", "acme", 3, 3, 1, or_more=True), True, "more than 1 others come"),
    (ValueRateLimited("send", "acme", 0.5, NOON, 9, or_more=True), True, "and later: more than 9"),
    (RunsAlone(2, 9, is_next=False, or_more=True), True, "more than 9 others like it come first"),
    (ValueRateLimited("send", "acme", 0.5, NOON, 0), True, "not before 2026-11-18 12:00:00.000"),
    (GateCalled(), False, "it is let through by the next worker or leader that looks"),
    (RunsAlone(2, 0, is_next=True), False, "it was recovered from 2 lost workers"),
    (RunsAlone(2, 3, is_next=False), True, "3 others like it come first"),
    (NotListed(), True, "the leader lists it again"),
    (NobodyHandles("send", "mail", 0), False, "no worker is alive"),
    (NobodyHandles("send", "mail", 2), False, "none of 2 live workers handles type 'send'"),
    (WorkersBusy(2, 20, 20), False, "2 of them, with 20 tasks for 20 slots"),
    (QueueBusy("mail", 2), False, "has room for queue 'mail': 2 of them run as many of its tasks"),
    (Behind(1), False, "it is behind 1 task: nobody knows how long"),
    (Behind(9, wait=40 * SECOND), False, "it is behind 9 tasks: about 40 s at the rate"),
    (Behind(9, or_more=True, wait=7200 * SECOND), False, "more than 9 tasks: at least 2 hours"),
    (Expires(NOON, is_over=False), False, "it is cancelled unless it begins by 2026-11-18"),
    (Expires(NOON, is_over=True), False, "it should have begun by 2026-11-18"),
]


@pytest.mark.parametrize(("reason", "is_hindrance", "text"), SAID, ids=lambda one: str(one)[:40])
def test_each_reason_has_a_sentence_and_hinders_a_claim_or_not(
    reason: Reason, is_hindrance: bool, text: str
) -> None:
    assert text in str(reason)
    assert is_in_the_way(reason) is is_hindrance


def test_all_reasons_are_tested_and_have_names_of_their_own() -> None:
    kinds = get_args(Reason)

    assert {type(reason) for reason, *_ in SAID} == set(kinds)
    assert len({kind.kind for kind in kinds}) == len(kinds)


def limit(scope: RuleScope, name: str, room: int, **more: Any) -> LimitState:
    return LimitState(
        LaneRule(scope, name, concurrency=room), room=room, used=0, tokens=None, **more
    )


@pytest.mark.parametrize(
    ("lanes", "place", "is_claimable"),
    [
        ([], 1, True),
        ([], 2, False),
        ([LaneState("mail", "call", 1)], 0, True),
        ([LaneState("mail", "call", 1)], 1, False),
        ([LaneState("mail", "call", 2)], 0, False),
        ([LaneState("bulk", "call", 9)], 1, True),
    ],
)
def test_what_is_left_of_a_limit_goes_to_the_lanes_before(
    lanes: list[LaneState], place: int, is_claimable: bool
) -> None:
    situation = replace(
        READY,
        limits=(limit(QUEUE, "mail", 2),),
        lanes=(*lanes, LaneState("mail", "send", place + 1, is_own=True)),
        ahead=Ahead(in_lane=place),
    )

    assert explained(situation).claimable is is_claimable


def test_many_suspects_are_an_outage_and_claimed_in_batches() -> None:
    lanes = (LaneState("mail", "send", 200, is_own=True),)
    situation = replace(
        READY, recoveries=2, lanes=lanes, suspects=Suspects(101, 2), ahead=Ahead(in_lane=99)
    )

    assert explained(situation).claimable
    assert not explained(replace(situation, suspects=Suspects(100, 2))).claimable


def test_no_more_are_counted_than_can_be() -> None:
    (reason,) = explained(replace(READY, ahead=Ahead(in_lane=COUNTED + 1))).reasons

    assert reason == Behind(COUNTED, or_more=True)


@pytest.mark.parametrize("kind", [LimitReached, RateLimited])
@pytest.mark.parametrize("in_lane", [COUNTED, COUNTED + 1])
def test_a_limit_says_whether_all_that_come_first_were_counted(
    kind: type[LimitReached | RateLimited], in_lane: int
) -> None:
    rule = LaneRule(QUEUE, "mail", concurrency=5, rate=10.0, burst=5.0)
    state = LimitState(rule, room=5, used=0, tokens=5.0)
    lane = LaneState("mail", "send", COUNTED, is_own=True)
    situation = replace(READY, limits=(state,), lanes=(lane,), ahead=Ahead(in_lane=in_lane))

    (reason,) = [one for one in explained(situation).reasons if isinstance(one, kind)]

    assert (reason.first, reason.or_more) == (COUNTED, in_lane > COUNTED)
    if isinstance(reason, RateLimited):
        assert reason.until == NOON + (COUNTED + 1 - 5) / 10 * SECOND


def test_a_lane_that_was_not_counted_to_its_end_leaves_open_how_many_come_first() -> None:
    before = LaneState("mail", "call", 50, or_more=True)
    lanes = (before, LaneState("mail", "send", 1, is_own=True))
    situation = replace(READY, limits=(limit(QUEUE, "mail", 20),), lanes=lanes)
    suspect = replace(situation, recoveries=2, suspects=Suspects(100, 2), limits=())

    (reached,) = explained(situation).reasons
    (alone,) = explained(suspect).reasons

    assert isinstance(reached, LimitReached)
    assert isinstance(alone, RunsAlone)
    assert (reached.or_more, alone.first, alone.or_more) == (True, 50, True)


@pytest.mark.parametrize("first", [COUNTED, COUNTED + 1])
def test_a_gate_says_whether_all_that_come_first_were_counted(first: int) -> None:
    record = replace(RECORD, status=TaskState.BLOCKED)
    key = GateState(None, "k", 1, 1, first)
    value = GateState("send", "acme", 3, 3, first, rate=10.0, tokens=0.0)
    situation = replace(READY, record=record, gate=key, next_gate=value)

    held, reached, limited = explained(situation).reasons

    assert isinstance(held, KeyHeld)
    assert isinstance(reached, ValueLimitReached)
    assert isinstance(limited, ValueRateLimited)
    said = {(one.first, one.or_more) for one in (held, reached, limited)}
    assert said == {(COUNTED, first > COUNTED)}
    assert limited.until == NOON + (COUNTED + 1) / 10 * SECOND


def test_what_is_left_of_a_value_goes_to_those_that_come_first() -> None:
    record = replace(RECORD, status=TaskState.BLOCKED)
    gate = GateState("send", "acme", 3, used=1, first=1)

    (open_one,) = explained(replace(READY, record=record, gate=gate)).reasons
    (closed,) = explained(replace(READY, record=record, gate=replace(gate, first=2))).reasons

    assert open_one == GateCalled()
    assert closed == ValueLimitReached("send", "acme", 3, 1, 2)


def test_the_rate_of_a_value_says_when_there_is_a_token_for_it() -> None:
    record = replace(RECORD, status=TaskState.BLOCKED)
    gate = GateState("send", "acme", None, used=0, first=2, rate=0.5, tokens=0.5)

    (reason,) = explained(replace(READY, record=record, gate=gate)).reasons

    assert reason == ValueRateLimited("send", "acme", 0.5, NOON + 5 * SECOND, 2)


def test_the_rate_is_that_of_the_time_in_which_tasks_completed() -> None:
    ahead = Ahead(in_lane=30, completed=60, completed_since=NOON - 20 * SECOND)

    (reason,) = explained(replace(READY, ahead=ahead)).reasons

    assert reason == Behind(30, wait=10 * SECOND)


def test_breakers_are_named_with_what_was_put_off() -> None:
    record = replace(RECORD, status=TaskState.SCHEDULED, generation=2)
    worker = replace(WORKER, breakers={"bank": "open", "post": "closed"})
    situation = replace(READY, record=record, workers=(worker,), put_off="no")

    (reason,) = explained(situation).reasons

    assert reason == WaitsForTime(
        NOON, Cause.PUT_OFF, is_due=True, put_off="no", breakers=("bank (open)",)
    )


BUSY = replace(WORKER, running=10)
FULL = replace(WORKER, running=1, full_queues=("bulk", "mail"))


@pytest.mark.parametrize(
    ("workers", "reasons"),
    [
        ((FULL,), (QueueBusy("mail", 1),)),
        ((FULL, FULL, BUSY), (QueueBusy("mail", 2),)),
        ((FULL, WORKER), ()),
        ((replace(FULL, running=10),), (WorkersBusy(1, 10, 10),)),
        ((replace(FULL, full_queues=("bulk",)),), ()),
        ((FULL, replace(WORKER, drained_at=NOON)), (QueueBusy("mail", 1),)),
    ],
)
def test_workers_that_have_no_room_for_its_queue_are_told(
    workers: tuple[WorkerRecord, ...], reasons: tuple[Reason, ...]
) -> None:
    told = explained(replace(READY, workers=workers))

    assert told.reasons == reasons
    assert told.claimable


def test_lanes_compete_that_are_read_by_workers_which_handle_the_task() -> None:
    everywhere = replace(WORKER, types=("send",), queues=None)
    elsewhere = replace(WORKER, types=("print",))

    assert competing([WORKER, elsewhere], RECORD) == (["call", "send"], ["mail"])
    assert competing([WORKER, everywhere], RECORD) == (["call", "send"], None)
    assert competing([elsewhere], RECORD) == (["send"], ["mail"])
