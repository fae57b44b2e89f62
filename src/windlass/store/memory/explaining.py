"""What a claim would ask about one task, in memory."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from uuid import UUID

from windlass.model.explanation import GateHolder, Holder
from windlass.model.rule import STRICT, RuleScope
from windlass.model.situation import (
    HOLDERS,
    LATELY,
    Ahead,
    GateState,
    LaneState,
    LimitState,
    Situation,
    Suspects,
)
from windlass.model.task import (
    ENDS,
    RECOVERIES_BEFORE_ALONE,
    LaneKind,
    TaskRecord,
    TaskState,
    WorkerRecord,
)
from windlass.policy.explaining import closed_to_others, competing, own_limits
from windlass.store.memory.ruling import Allowance, RuledTables
from windlass.store.memory.state import LaneKey, RuleKey, TaskEntry
from windlass.store.memory.tables import transaction


class ExplainVerbs(RuledTables):
    """One task, and all that stands before it."""

    @transaction
    async def situation(self, task_id: UUID, *, ageing: timedelta) -> Situation:
        now, task = self._clock(), self._known(task_id)
        record = self._record(task)
        workers = tuple(
            worker.record
            for worker in self._workers.values()
            if worker.record.heartbeat_at + worker.lease > now
        )
        if task.status in ENDS:
            return Situation(now=now, record=record, workers=workers)
        limits = tuple(self._limit_states(record, now))
        is_suspect = task.recoveries >= RECOVERIES_BEFORE_ALONE
        lanes = [
            lane
            for lane in self._ranked(list(self._all_lanes()), ageing)
            if (lane.kind is LaneKind.ALONE) is is_suspect
        ]
        is_ready = task.status is TaskState.PENDING
        gate, next_gate = self._next_gates(task, now)
        return Situation(
            now=now,
            record=record,
            recoveries=task.recoveries,
            lease_until=next(
                (claim.expires_at for claim in self._claims.values() if task_id in claim.held), None
            ),
            cancel_reason=task.cancel_reason,
            expires_at=task.expires_at,
            put_off=task.put_off,
            queue_paused_at=self._paused.get(task.queue),
            type_paused_at=self._paused_types.get(task.asked.type),
            workers=workers,
            limits=limits,
            lanes=tuple(
                LaneState(
                    lane.queue, lane.type, len(self._ready[lane]), is_ready and lane == task.lane
                )
                for lane in lanes
            ),
            suspects=self._suspects(lanes) if is_suspect else None,
            ahead=self._ahead(task, record, workers, limits, ageing) if is_ready else Ahead(),
            gate=gate,
            next_gate=next_gate,
        )

    def _next_gates(
        self, task: TaskEntry, now: datetime
    ) -> tuple[GateState | None, GateState | None]:
        """The one at which it waits, and the one to which it comes then."""
        if task.status not in (TaskState.BLOCKED, TaskState.SCHEDULED):
            return None, None
        found = [
            replace(state, holders=tuple(map(self._gate_holder, holders)))
            for state, holders in self._gates.states_of(task, now)
        ]
        if task.status is TaskState.SCHEDULED:
            return None, next(iter(found), None)
        return found[0], next(iter(found[1:]), None)

    def _gate_holder(self, task_id: UUID) -> GateHolder:
        task = self._tasks[task_id]
        status = self._seen(task)
        until = task.scheduled_for if status is TaskState.SCHEDULED else None
        return GateHolder(task_id, status, task.worker_id, until)

    def _all_lanes(self) -> Iterable[LaneKey]:
        return self._lanes([lane.type for lane in self._ready], None)

    def _limit_states(self, record: TaskRecord, now: datetime) -> Iterable[LimitState]:
        for key in sorted({**self._declared, **self._set_by_operator}):
            rule = self._rule(key)
            if rule is None or not rule.is_limit:
                continue
            used, bucket = self._used(key), self._bucket(rule, now)
            yield LimitState(
                rule,
                room=Allowance(None).meet(rule, used, bucket),
                used=used,
                tokens=None if bucket is None else bucket.tokens,
                holders=tuple(self._holders(key))[:HOLDERS] if key in own_limits(record) else (),
            )

    def _holders(self, key: RuleKey) -> Iterable[Holder]:
        for claim in sorted(self._claims.values(), key=lambda claim: claim.fence):
            for task_id in sorted(claim.held):
                since = self._tasks[task_id].claimed_at
                if key in claim.limits.get(task_id, ()) and since is not None:
                    yield Holder(task_id, claim.worker_id, since)

    def _suspects(self, lanes: list[LaneKey]) -> Suspects:
        number = sum(
            len(tasks) for lane, tasks in self._ready.items() if lane.kind is LaneKind.ALONE
        )
        first = next(iter(self._ready[lanes[0]].values())).recoveries if lanes else 0
        return Suspects(number, first)

    def _ahead(
        self,
        task: TaskEntry,
        record: TaskRecord,
        workers: tuple[WorkerRecord, ...],
        limits: tuple[LimitState, ...],
        ageing: timedelta,
    ) -> Ahead:
        types, queues = competing(workers, record)
        closed_queues, closed_types = closed_to_others(limits, record)
        closed_queues += [name for name in self._paused if name != task.queue]
        closed_types += [name for name in self._paused_types if name != task.asked.type]
        lately = [
            one.completed_at
            for one in self._tasks.values()
            if one.status is TaskState.COMPLETED
            and one.completed_at is not None
            and one.completed_at > self._clock() - timedelta(seconds=LATELY)
            and one.asked.type in types
            and (queues is None or one.queue in queues)
        ]
        return Ahead(
            in_lane=list(self._ready[task.lane]).index(task.asked.id),
            elsewhere=sum(
                self._is_before(other, task, ageing)
                for lane, tasks in self._ready.items()
                if lane != task.lane
                and lane.kind is not LaneKind.ALONE
                and lane.type in types
                and (queues is None or lane.queue in queues)
                and lane.queue not in closed_queues
                and lane.type not in closed_types
                for other in tasks.values()
            ),
            completed=len(lately),
            completed_since=min(lately, default=None),
        )

    def _is_before(self, other: TaskEntry, task: TaskEntry, ageing: timedelta) -> bool:
        rule = self._rule((RuleScope.QUEUE, task.queue))
        if other.queue == task.queue and rule is not None and rule.ageing == STRICT:
            rank = (-other.priority, other.scheduled_for)
            return rank < (-task.priority, task.scheduled_for)
        return self._rank(other, ageing) < self._rank(task, ageing)

    def _rank(self, task: TaskEntry, ageing: timedelta) -> datetime:
        rule = self._rule((RuleScope.QUEUE, task.queue))
        step = rule.ageing if rule is not None else None
        own = ageing if step is None or step == STRICT else timedelta(seconds=step)
        return task.scheduled_for - task.priority * own
