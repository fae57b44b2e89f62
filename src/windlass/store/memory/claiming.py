"""Claim in memory."""

from collections.abc import Sequence
from datetime import datetime
from itertools import islice
from uuid import UUID, uuid4

from windlass.model.task import (
    ALONE_IS_AN_OUTAGE_ABOVE,
    Claim,
    ClaimAnswer,
    ClaimRequest,
    Fence,
    LaneKind,
    Started,
    TaskState,
)
from windlass.store.memory.ruling import Allowance, RuledTables
from windlass.store.memory.state import ClaimEntry, LaneKey, TaskEntry, after, claimed_task
from windlass.store.memory.tables import transaction


class ClaimVerbs(RuledTables):
    """Leases on ready tasks."""

    @transaction
    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        now = self._clock()
        self._answer_calls(now)
        lanes = self._ranked(
            list(self._lanes(request.types, request.queues, request.other_than)), request.ageing
        )
        suspects = [lane for lane in lanes if lane.kind is LaneKind.ALONE]
        limit = self._alone_limit(suspects, request.limit) if request.alone else request.limit
        chosen: list[TaskEntry] = []
        allowance = Allowance(request.at_most)
        for lane in lanes:
            self._room(lane, allowance, now)
        for lane in lanes:
            if (lane.kind is LaneKind.ALONE) is not request.alone or len(chosen) >= limit:
                continue
            room = self._room(lane, allowance, now)
            most = limit - len(chosen) if room is None else min(room, limit - len(chosen))
            taken = list(islice(self._ready[lane].values(), most))
            for rule in self._limits(lane):
                allowance.take(rule, len(taken))
            chosen.extend(taken)
        self._buckets |= {key: allowance.buckets[key][1] for key in allowance.spent}
        return ClaimAnswer(
            claim=self._grant(chosen, request, now) if chosen else None,
            alone_waiting=bool(suspects) and not request.alone,
            due_in=self._due_in(now),
            more_in=allowance.more_in,
            is_capped=allowance.is_capped,
        )

    def _due_in(self, now: datetime) -> float | None:
        times = [task.scheduled_for for task in self._scheduled.values()]
        times += [call.due for call in self._gates.calls]
        waits = [(time - now).total_seconds() for time in times]
        return min((wait for wait in waits if wait > -2), default=None)

    def _alone_limit(self, suspects: list[LaneKey], limit: int) -> int:
        waiting = sum(
            len(tasks) for lane, tasks in self._ready.items() if lane.kind is LaneKind.ALONE
        )
        if not suspects or waiting <= ALONE_IS_AN_OUTAGE_ABOVE:
            return 1
        first = next(iter(self._ready[suspects[0]].values()))
        return max(1, limit >> (first.recoveries - 1))

    def _grant(self, tasks: list[TaskEntry], request: ClaimRequest, now: datetime) -> Claim:
        token = uuid4()
        fence = next(self._fences)
        for task in tasks:
            self._take_ready(task)
            task.status = TaskState.CLAIMED
            task.worker_id = request.worker_id
            task.claimed_at = now
        held = {task.asked.id: task.generation for task in tasks}
        self._claims[token] = ClaimEntry(
            fence,
            request.worker_id,
            now + request.lease,
            held,
            {
                task.asked.id: tuple(
                    rule.key for rule in self._limits(task.lane) if rule.concurrency is not None
                )
                for task in tasks
            },
        )
        kinds = {(task.asked.type, task.asked.queue) for task in tasks}
        kind = kinds.pop() if len(kinds) == 1 else None
        claimed = tuple(claimed_task(task, now) for task in tasks)
        return Claim(token, fence, claimed, request.alone, kind)

    @transaction
    async def start(self, started: Sequence[Started]) -> frozenset[UUID]:
        lost = set()
        for token, task_id, generation, started_after in started:
            task = self._held(Fence(token, task_id, generation))
            if task is None:
                lost.add(task_id)
            else:
                task.status = TaskState.RUNNING
                task.started_at = after(task.claimed_at, started_after)
        return frozenset(lost)

    @transaction
    async def requested_cancellations(self, task_ids: Sequence[UUID]) -> dict[UUID, str]:
        tasks = {each: self._tasks[each] for each in task_ids if each in self._tasks}
        return {
            task_id: task.cancel_reason
            for task_id, task in tasks.items()
            if task.cancel_reason is not None
        }
