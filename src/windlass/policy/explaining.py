"""Why a task is not running, by the rules of a claim: pure."""

import math
from collections import Counter
from collections.abc import Collection, Iterator
from datetime import datetime, timedelta
from typing import NamedTuple, assert_never

from windlass.model.explanation import (
    Behind,
    Buffered,
    CancellationAsked,
    Cause,
    Ended,
    Expires,
    Explanation,
    GateCalled,
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
from windlass.model.rule import RuleScope
from windlass.model.situation import COUNTED, LATELY, Ahead, GateState, LimitState, Situation
from windlass.model.task import (
    ALONE_IS_AN_OUTAGE_ABOVE,
    ENDS,
    TaskRecord,
    TaskState,
    WorkerRecord,
)

NAMED = 5  # workers in one sentence
SHORTEST = 5.0  # seconds over which completions are averaged


def explained(situation: Situation) -> Explanation:
    """Say all there is to say of a task, the most decisive first."""
    reasons = tuple(_reasons(situation))
    record = situation.record
    return Explanation(
        task_id=record.id,
        status=record.status,
        at=situation.now,
        claimable=not any(is_in_the_way(reason) for reason in reasons),
        has_worker=any(handles(worker, record) for worker in situation.workers),
        reasons=reasons,
    )


def is_in_the_way(reason: Reason) -> bool:
    """Whether no claim would return the task, whoever makes it and however many it asks for."""
    match reason:
        case Ended() | Running() | Buffered() | LeaseOver() | CancellationAsked():
            return True
        case WaitsForTime() | QueuePaused() | TypePaused() | NotListed():
            return True
        case LimitReached() | RateLimited():
            return True
        case KeyHeld() | ValueLimitReached() | ValueRateLimited():
            return True
        case RunsAlone(is_next=is_next):
            return not is_next
        case NobodyHandles() | WorkersBusy() | QueueBusy() | Behind() | Expires() | GateCalled():
            return False
        case _:
            assert_never(reason)


def handles(worker: WorkerRecord, record: TaskRecord) -> bool:
    """Whether a worker asks for tasks of this type and queue."""
    is_stopped = worker.paused_at is not None or worker.drained_at is not None
    return not is_stopped and record.type in worker.types and _serves(worker, record)


def competing(
    workers: Collection[WorkerRecord], record: TaskRecord
) -> tuple[list[str], list[str] | None]:
    """The types and queues (None: all) that workers look at which handle a task."""
    able = [worker for worker in workers if handles(worker, record)]
    if not able:
        return [record.type], [record.queue]
    types = sorted({name for worker in able for name in worker.types})
    if any(worker.queues is None for worker in able):
        return types, None
    return types, sorted({name for worker in able for name in worker.queues or ()})


def own_limits(record: TaskRecord) -> tuple[tuple[RuleScope, str], ...]:
    """Whose limits a task counts for, if they have one."""
    return (RuleScope.QUEUE, record.queue), (RuleScope.TYPE, record.type)


def closed_to_others(
    limits: Collection[LimitState], record: TaskRecord
) -> tuple[list[str], list[str]]:
    """Queues and types of which a claim takes nothing for a limit that the task has no part in."""
    closed = [one.key for one in limits if one.room <= 0 and one.key not in own_limits(record)]
    return (
        [name for scope, name in closed if scope is RuleScope.QUEUE],
        [name for scope, name in closed if scope is RuleScope.TYPE],
    )


def _reasons(situation: Situation) -> Iterator[Reason]:
    record = situation.record
    if record.status in ENDS:
        yield Ended(record.status, record.completed_at or record.updated_at, record.last_error)
        return
    if situation.lease_until is not None:
        yield from _held(situation)
        return
    if record.status is TaskState.SCHEDULED or _is_early(situation):
        yield _waiting(situation)
    if situation.queue_paused_at is not None:
        yield QueuePaused(record.queue, situation.queue_paused_at)
    if situation.type_paused_at is not None:
        yield TypePaused(record.type, situation.type_paused_at)
    if not situation.is_listed:
        yield NotListed()
    yield from _gated(situation)
    yield from _limited(situation)
    yield from _of_workers(situation)
    if record.status is TaskState.PENDING and situation.suspects is None:
        yield from _behind(situation.ahead, situation)
    if situation.expires_at is not None and not record.attempts:
        yield Expires(situation.expires_at, situation.expires_at <= situation.now)


def _held(situation: Situation) -> Iterator[Reason]:
    record, until = situation.record, situation.lease_until
    worker, claimed_at = record.worker_id, record.claimed_at
    if worker is None or claimed_at is None or until is None:
        return
    if until <= situation.now:
        yield LeaseOver(worker, until)
    elif record.started_at is not None:
        yield Running(worker, record.started_at, until)
    else:
        yield Buffered(worker, claimed_at, until)
    if situation.cancel_reason is not None:
        yield CancellationAsked(situation.cancel_reason)


def _is_early(situation: Situation) -> bool:
    """Whether it has to wait for its time as well, once it has passed its ordering key."""
    gate = situation.gate
    is_in_line = gate is not None and gate.type is None
    return is_in_line and situation.record.scheduled_for > situation.now


def _waiting(situation: Situation) -> WaitsForTime:
    record = situation.record
    last = record.errors[-1] if record.errors else None
    cause, error = Cause.ASKED, None
    # What is still in line for its ordering key has not begun since somebody asked for it.
    is_back = situation.gate is None
    # A failure is kept with the generation that failed, and what comes back is of the next one.
    if is_back and last is not None and last.get("generation") == record.generation - 1:
        cause, error = Cause.RETRY, record.last_error
    elif is_back and situation.put_off is not None:
        cause = Cause.PUT_OFF
    open_ones = {
        f"{name} ({state})"
        for worker in situation.workers
        if record.type in worker.types
        for name, state in worker.breakers.items()
        if state != "closed"
    }
    return WaitsForTime(
        record.scheduled_for,
        cause,
        is_due=record.scheduled_for <= situation.now,
        error=error,
        put_off=situation.put_off,
        breakers=() if cause is Cause.ASKED else tuple(sorted(open_ones)),
    )


class _Turn(NamedTuple):
    """Where a task stands when a claim comes to its lane."""

    taken: Counter[tuple[RuleScope, str]]  # of each limit
    granted: int  # in all
    place: int  # behind so many of its own lane
    others: int  # tasks of the lanes before, granted or not
    uncounted: frozenset[tuple[RuleScope, str]]  # limits of which more may be taken
    or_more: bool  # there are more others


def _turn(situation: Situation) -> _Turn:
    """Do as a claim does, lane by lane, until it is the task's own."""
    nothing = _Turn(Counter(), 0, 0, 0, frozenset(), or_more=False)
    if not any(lane.is_own for lane in situation.lanes):
        return nothing
    rooms = {limit.key: limit.room for limit in situation.limits}
    at_once = _at_once(situation)
    taken: Counter[tuple[RuleScope, str]] = Counter()
    uncounted: set[tuple[RuleScope, str]] = set()
    granted = others = 0
    or_more = False
    for lane in situation.lanes:
        if lane.is_own:
            break
        left = [rooms[key] - taken[key] for key in lane.keys if key in rooms]
        if at_once is not None:
            left.append(at_once - granted)
        number = max(0, min([lane.tasks, *left]))
        taken.update({key: number for key in lane.keys if key in rooms})
        granted += number
        others += lane.tasks
        if lane.or_more:
            or_more = True
            uncounted.update(lane.keys)
    place = situation.ahead.in_lane
    return _Turn(taken, granted, place, others, frozenset(uncounted), or_more)


def _counted(number: int, *, or_more: bool = False) -> tuple[int, bool]:
    """What is said of a number: no more than are counted, and whether there are more."""
    return min(number, COUNTED), or_more or number > COUNTED


def _at_once(situation: Situation) -> int | None:
    """How many suspects a claim takes, if the task is one."""
    if situation.suspects is None:
        return None
    if situation.suspects.number <= ALONE_IS_AN_OUTAGE_ABOVE:
        return 1
    return max(1, COUNTED >> min(situation.suspects.first_recoveries - 1, 20))


def _limited(situation: Situation) -> Iterator[Reason]:
    turn = _turn(situation)
    own = own_limits(situation.record)
    for limit in situation.limits:
        if limit.key not in own:
            continue
        rule, before = limit.rule, turn.taken[limit.key] + turn.place
        first, or_more = _counted(before, or_more=limit.key in turn.uncounted)
        if rule.concurrency is not None and rule.concurrency - limit.used <= before:
            yield LimitReached(
                rule.scope, rule.name, rule.concurrency, limit.used, first, limit.holders, or_more
            )
        if rule.rate is None or limit.tokens is None:
            continue
        if math.floor(limit.tokens + 1e-6) <= before:
            until = situation.now + timedelta(seconds=(first + 1 - limit.tokens) / rule.rate)
            yield RateLimited(rule.scope, rule.name, rule.rate, until, first, or_more)
    at_once = _at_once(situation)
    if at_once is not None:
        first, or_more = _counted(turn.others + turn.place, or_more=turn.or_more)
        is_next = turn.granted + turn.place < at_once
        yield RunsAlone(situation.recoveries, first, is_next, or_more)


def _gated(situation: Situation) -> Iterator[Reason]:
    gate = situation.gate
    if gate is not None and gate.has_room:
        yield GateCalled()
    for one in (gate, situation.next_gate):
        if one is not None and not one.has_room:
            yield from _closed(one, situation.now)


def _closed(gate: GateState, now: datetime) -> Iterator[Reason]:
    first, or_more = _counted(gate.first)
    if gate.type is None:
        yield KeyHeld(gate.name, first, next(iter(gate.holders), None), or_more)
    else:
        if gate.slots is not None and gate.used + gate.first >= gate.slots:
            yield ValueLimitReached(
                gate.type, gate.name, gate.slots, gate.used, first, gate.holders, or_more
            )
        if gate.rate and gate.tokens is not None and math.floor(gate.tokens + 1e-6) <= gate.first:
            until = now + timedelta(seconds=(first + 1 - gate.tokens) / gate.rate)
            yield ValueRateLimited(gate.type, gate.name, gate.rate, until, first, or_more)


def _of_workers(situation: Situation) -> Iterator[Reason]:
    record, workers = situation.record, situation.workers
    able = [worker for worker in workers if handles(worker, record)]
    if not able:
        yield NobodyHandles(
            record.type,
            record.queue,
            len(workers),
            _named([worker for worker in workers if record.type in worker.types]),
            _named([worker for worker in workers if _serves(worker, record)]),
        )
    elif record.status is TaskState.PENDING:
        yield from _busy(able, record)


def _busy(able: list[WorkerRecord], record: TaskRecord) -> Iterator[Reason]:
    free = [worker for worker in able if worker.running < worker.capacity]
    if not free:
        running = sum(worker.running for worker in able)
        capacity = sum(worker.capacity for worker in able)
        yield WorkersBusy(len(able), running, capacity)
    elif all(record.queue in worker.full_queues for worker in free):
        yield QueueBusy(record.queue, len(free))


def _behind(ahead: Ahead, situation: Situation) -> Iterator[Behind]:
    number, or_more = _counted(ahead.in_lane + ahead.elsewhere, or_more=ahead.or_more)
    if not number:
        return
    wait = None
    if ahead.completed and ahead.completed_since is not None:
        since = (situation.now - ahead.completed_since).total_seconds()
        per_second = ahead.completed / min(max(since, SHORTEST), LATELY)
        wait = timedelta(seconds=number / per_second)
    yield Behind(number, or_more, wait)


def _serves(worker: WorkerRecord, record: TaskRecord) -> bool:
    return worker.queues is None or record.queue in worker.queues


def _named(workers: list[WorkerRecord]) -> tuple[str, ...]:
    return tuple(f"{worker.id} on {worker.host}{_stopped(worker)}" for worker in workers[:NAMED])


def _stopped(worker: WorkerRecord) -> str:
    if worker.drained_at is not None:
        return " (draining)"
    return " (paused)" if worker.paused_at is not None else ""
