"""Settle and pulse in memory."""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from uuid import UUID

from windlass.model.rule import RuleScope
from windlass.model.situation import SNOOZED
from windlass.model.task import (
    Answer,
    Fence,
    LaneKind,
    Outcome,
    Pulse,
    PulseAnswer,
    Settlement,
    TaskState,
    WorkerInfo,
    WorkerOrder,
)
from windlass.store.memory.state import TaskEntry, WorkerEntry, after, worker_record
from windlass.store.memory.tables import DEAD, MemoryTables, transaction

_COMES_BACK = frozenset({Outcome.RETRIED, Outcome.SNOOZED, Outcome.RELEASED})
_APPLIED = frozenset({Answer.APPLIED, Answer.GIVEN_UP})
_USES_AN_ATTEMPT = frozenset({Outcome.COMPLETED, Outcome.FAILED, Outcome.DEAD, Outcome.RETRIED})


class SettleVerbs(MemoryTables):
    """What a worker says of its claims, and of itself."""

    @transaction
    async def settle(self, settlements: Sequence[Settlement]) -> list[Answer]:
        now = self._clock()
        # By id: what comes back in one call does so oldest first.
        order = sorted(range(len(settlements)), key=lambda place: settlements[place].task_id)
        answers = {place: self._settle(settlements[place], now) for place in order}
        settled = [settlements[place].task_id for place in order if answers[place] in _APPLIED]
        self._leave_now([self._tasks[task_id] for task_id in settled], now)
        return [answers[place] for place in range(len(settlements))]

    async def held(self, settlements: Sequence[Settlement]) -> list[bool]:
        return [False] * len(settlements)

    def _settle(self, settlement: Settlement, now: datetime) -> Answer:
        fence = Fence(settlement.token, settlement.task_id, settlement.generation)
        task = self._held(fence)
        if task is None:
            known = self._tasks.get(settlement.task_id)
            return Answer.ALREADY if known and known.settled_by == fence else Answer.LOST
        self._let_go(fence)
        task.settled_by = fence
        task.started_at = after(task.claimed_at, settlement.started_after)
        outcome = settlement.outcome
        error = json.loads(settlement.error) if settlement.error else {}
        if outcome in _COMES_BACK and task.cancel_reason is not None:
            outcome, error = Outcome.CANCELLED, {"message": task.cancel_reason}
        elif outcome is Outcome.RETRIED and (
            why := self._why_not_again(task, settlement.max_age, settlement.delay, now)
        ):
            outcome, error = Outcome.DEAD, error | {"given_up": why}
        task.attempts += outcome in _USES_AN_ATTEMPT
        if outcome in _USES_AN_ATTEMPT - {Outcome.COMPLETED}:
            self._note_failure(task, error, now)
        if outcome not in _COMES_BACK:
            status = TaskState(outcome)
            task.result = None if status in DEAD else settlement.result
            self._end(task, status, error.get("message"), now)
            given_up = outcome is Outcome.DEAD and settlement.outcome is Outcome.RETRIED
            return Answer.GIVEN_UP if given_up else Answer.APPLIED
        if outcome is Outcome.RETRIED:
            task.recoveries = 0
        if outcome is not Outcome.RELEASED:
            task.scheduled_for = now + timedelta(seconds=settlement.delay)
        if settlement.started_after is not None:
            task.expires_at = None
        released = outcome is Outcome.RELEASED
        self._give_back(task, LaneKind.RETURNED if released else LaneKind.NORMAL, now)
        task.put_off = error.get("message", SNOOZED) if outcome is Outcome.SNOOZED else None
        return self._again(task, settlement, now)

    def _again(self, task: TaskEntry, settlement: Settlement, now: datetime) -> Answer:
        """Give up a retry that was put off if it is not to begin any more by then."""
        was_put_off = task.put_off is not None and settlement.error is not None
        if not was_put_off or not task.attempts:
            return Answer.APPLIED
        why = self._why_not_again(task, settlement.max_age, settlement.delay, now)
        if why is None:
            return Answer.APPLIED
        self._take_waiting(task)
        self._give_up(task, f"{why}; put off: {task.put_off}", now)
        return Answer.GIVEN_UP

    def _let_go(self, fence: Fence) -> None:
        claim = self._claims[fence.token]
        del claim.held[fence.task_id]
        if claim.limits.pop(fence.task_id, None):
            self._has_news = True  # whoever was turned away sleeps
        if not claim.held:
            del self._claims[fence.token]

    @transaction
    async def register(self, worker: WorkerInfo, *, lease: timedelta) -> None:
        now = self._clock()
        known = self._workers.get(worker.id)
        record = replace(known.record, heartbeat_at=now) if known else worker_record(worker, now)
        self._workers[worker.id] = WorkerEntry(record, lease)

    @transaction
    async def pulse(self, pulse: Pulse) -> PulseAnswer:
        now = self._clock()
        claims = {token: self._claims[token] for token in pulse.tokens if token in self._claims}
        kept = frozenset(
            token for token, claim in claims.items() if claim.expires_at > now or pulse.trusted
        )
        for token in kept:
            claims[token].expires_at = now + pulse.lease
        known = self._workers.get(pulse.worker_id)
        order = WorkerOrder.RESUME if known is None else _asked_of(known)
        if known is not None:
            record = replace(
                known.record,
                heartbeat_at=now,
                running=pulse.running,
                idle=pulse.idle,
                breakers=dict(pulse.breakers or {}),
                drained_at=known.record.drained_at or (now if pulse.drains else None),
                full_queues=tuple(pulse.full_queues),
            )
            self._workers[pulse.worker_id] = WorkerEntry(record, pulse.lease)
        rules = (self._declared | self._set_by_operator).values()
        weights = {
            rule.name: rule.weight
            for rule in rules
            if rule.scope is RuleScope.QUEUE and rule.weight is not None
        }
        return PulseAnswer(kept, registered=known is not None, order=order, weights=weights)

    @transaction
    async def set_idle(self, worker_id: UUID, idle: bool) -> None:
        known = self._workers.get(worker_id)
        if known is not None:
            self._workers[worker_id] = known._replace(record=replace(known.record, idle=idle))

    @transaction
    async def deregister(self, worker_id: UUID) -> None:
        self._workers.pop(worker_id, None)


def _asked_of(worker: WorkerEntry) -> WorkerOrder:
    if worker.record.drained_at is not None:
        return WorkerOrder.DRAIN
    return WorkerOrder.RESUME if worker.record.paused_at is None else WorkerOrder.PAUSE
