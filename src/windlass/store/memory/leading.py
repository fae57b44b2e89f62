"""Lead in memory: elections, and the chores of whoever won."""

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from uuid import UUID

from windlass.model.errors import NotLeader
from windlass.model.limits import EXPIRED, UNNOTICED_STEP
from windlass.model.task import (
    ENDS,
    Due,
    Expired,
    LaneKind,
    Leadership,
    Rescued,
    Retained,
    TaskState,
    WindowKind,
)
from windlass.store.memory.state import LaneKey, TaskEntry, WindowEntry, WindowKey, WorkerEntry
from windlass.store.memory.tables import DEAD, MemoryTables, transaction

_WAITING = frozenset({TaskState.SCHEDULED, TaskState.BLOCKED, TaskState.PENDING})


class LeadVerbs(MemoryTables):
    """A term of office, and the writes of its holder."""

    @transaction
    async def lead(
        self,
        candidate: UUID,
        *,
        current: Leadership | None,
        term: timedelta,
        steady_for: timedelta = timedelta(0),
    ) -> Leadership | None:
        now = self._clock()
        is_over = self._leader is None or self._term_ends_at <= now
        is_mine = self._leader == current is not None and current.holder == candidate
        if is_over or (not is_mine and self._leader_is_lost(now, term, steady_for)):
            self._term += 1
            self._leader = Leadership(candidate, self._term)
        elif not is_mine:
            return None
        self._term_ends_at = now + term
        return self._leader

    def _leader_is_lost(self, now: datetime, term: timedelta, steady_for: timedelta) -> bool:
        worker = self._leader and self._workers.get(self._leader.holder)
        lives = worker is not None and worker.record.heartbeat_at + worker.lease > now
        if not lives and self._term_ends_at > now + term:
            return True
        return worker is not None and _is_lost_ahead(worker, now, steady_for)

    @transaction
    async def resign(self, leadership: Leadership) -> None:
        if self._leader == leadership:
            self._leader = None

    @transaction
    async def now(self) -> datetime:
        return self._clock()

    async def due(self) -> Due:
        return Due(self._clock(), schedule_in=self._schedule_in(), gates=bool(self._gates.calls))

    def _assert_leader(self, leadership: Leadership) -> None:
        if self._leader != leadership or self._term_ends_at <= self._clock():
            raise NotLeader(f"term {leadership.term} is over")

    @transaction
    async def promote(
        self,
        limit: int,
        *,
        leadership: Leadership | None = None,
        just_due: bool = False,  # noqa: ARG002 - only a hint
    ) -> int:
        if leadership is not None:
            self._assert_leader(leadership)
        now = self._clock()
        due = sorted(
            (task.scheduled_for, task_id)
            for task_id, task in self._scheduled.items()
            if task.scheduled_for <= now
        )[:limit]
        for _, task_id in due:
            self._place(self._scheduled.pop(task_id), now)
        return len(due)

    @transaction
    async def open_gates(
        self,
        limit: int,
        *,
        if_allowed: bool = False,  # noqa: ARG002 - everybody may write
    ) -> int:
        return self._answer_calls(self._clock(), limit)

    @transaction
    async def rescue(self, limit: int, *, leadership: Leadership | None = None) -> Rescued:
        if leadership is not None:
            self._assert_leader(leadership)
        now = self._clock()
        expired = sorted(
            (claim.expires_at, claim.fence, token)
            for token, claim in self._claims.items()
            if claim.expires_at <= now
        )[:limit]
        fates: Counter[str] = Counter()
        died = []
        for _, _, token in expired:
            for task_id in self._claims.pop(token).held:
                fate = self._rescue(self._tasks[task_id], now)
                fates[fate] += 1
                if fate == "dead":
                    died.append(task_id)
        return Rescued(
            claims=len(expired),
            returned=fates["returned"] + fates["lost"],
            lost_attempts=fates["lost"] + fates["dead"],
            dead=fates["dead"],
            cancelled=fates["cancelled"],
            died=tuple(sorted(died)),
        )

    def _rescue(self, task: TaskEntry, now: datetime) -> str:
        task.settled_by = None
        due_by = max(now, task.scheduled_for)  # it was due once, whatever the clock was set to
        if task.cancel_reason is not None:
            self._end(task, TaskState.CANCELLED, task.cancel_reason, now)
            return "cancelled"
        if task.status is TaskState.CLAIMED:
            task.recoveries += 1
            self._give_back(task, LaneKind.RETURNED, due_by)
            return "returned"
        message = f"worker {task.worker_id} was lost"
        error = {"type": "WorkerLost", "message": message, "class": "transient"}
        is_last = task.attempts + 1 >= task.asked.max_attempts
        known = self._types.get(task.asked.type)
        why = self._why_not_again(task, None if known is None else known.max_age, 0.0, now)
        if why is not None and not is_last:
            is_last = True
            error["given_up"] = why
        task.attempts += 1
        self._note_failure(task, error, now)
        if is_last:
            self._end(task, TaskState.DEAD, message, now)
            return "dead"
        self._give_back(task, LaneKind.RETURNED, due_by)
        return "lost"

    @transaction
    async def expire(self, limit: int, *, leadership: Leadership) -> Expired:
        self._assert_leader(leadership)
        now = self._clock()
        late = sorted(
            (task.expires_at, task_id)
            for task_id, task in self._tasks.items()
            if task.status in _WAITING and task.is_late(now)
        )[:limit]
        for task in [self._tasks[task_id] for _, task_id in late]:
            self._take_waiting(task)
            task.settled_by = None
            self._end(task, TaskState.CANCELLED, EXPIRED, now)
        return Expired(len(late), len(late) == limit)

    @transaction
    async def unknown_types(self) -> list[str]:
        return sorted({lane.type for lane in self._unknown_lanes()})

    @transaction
    async def fail_unknown(
        self,
        type: str,  # noqa: A002
        *,
        error: str,
        ready_for: timedelta,
        limit: int,
        leadership: Leadership,
    ) -> list[UUID]:
        self._assert_leader(leadership)
        now = self._clock()
        waiting = [
            task
            for lane in self._unknown_lanes()
            if lane.type == type
            for task in self._ready[lane].values()
            if task.scheduled_for <= now - ready_for
        ][:limit]
        said = json.loads(error)
        for task in waiting:
            self._take_waiting(task)
            task.settled_by = None
            task.attempts += 1
            self._note_failure(task, said, now)
            self._end(task, TaskState.FAILED, said["message"], now)
        return [task.asked.id for task in waiting]

    def _unknown_lanes(self) -> list[LaneKey]:
        known = {name for worker in self._workers.values() for name in worker.record.types}
        return [
            lane
            for lane in self._ready
            if lane.type not in known | set(self._paused_types) and lane.queue not in self._paused
        ]

    @transaction
    async def remove_dead_workers(
        self, *, leadership: Leadership, steady_for: timedelta = timedelta(0)
    ) -> list[UUID]:
        self._assert_leader(leadership)
        now = self._clock()
        silent = [
            worker_id
            for worker_id, worker in self._workers.items()
            if (
                worker.record.heartbeat_at + 3 * worker.lease <= now
                or _is_lost_ahead(worker, now, steady_for)
            )
            and not self._end_ahead(worker, now)
        ]
        for worker_id in silent:
            del self._workers[worker_id]
        return silent

    def _end_ahead(self, worker: WorkerEntry, now: datetime) -> int:
        """End the claims of a lost worker that by this clock cannot have been granted yet."""
        ahead = [
            claim
            for claim in self._claims.values()
            if str(claim.worker_id) == worker.record.id and claim.expires_at - worker.lease > now
        ]
        for claim in ahead:
            claim.expires_at = now
        return len(ahead)

    @transaction
    async def tidy(self, *, leadership: Leadership) -> int:
        self._assert_leader(leadership)
        now = self._clock()
        past = [key for key, entry in self._windows.items() if self._is_past(key, entry, now)]
        for key in past:
            del self._windows[key]
        return len(past)

    def _is_past(self, key: WindowKey, entry: WindowEntry, now: datetime) -> bool:
        is_kept = key[1] is WindowKind.DEBOUNCE and self._still_waits(entry.task_id)
        return entry.until <= now and not is_kept

    @transaction
    async def prepare_history(self, *, leadership: Leadership) -> int:
        self._assert_leader(leadership)
        return 0

    @transaction
    async def retain(self, *, leadership: Leadership, keep_dead: bool = False) -> Retained:
        self._assert_leader(leadership)
        removed = ENDS - DEAD if keep_dead else ENDS
        today = self._clock().astimezone(UTC).date()
        over = {
            task_id: task
            for task_id, task in self._tasks.items()
            if task.status in removed and task.drop_on < today
        }
        self._forget(over)
        dead = [task for task in over.values() if task.status in DEAD]
        days = {task.drop_on for task in over.values() if task.status not in DEAD}
        return Retained(partitions=len(days), dead=len(dead))


def _is_lost_ahead(worker: WorkerEntry, now: datetime, steady_for: timedelta) -> bool:
    """Whether the clock was set back, and went on for one lease without a sign of life."""
    is_ahead = worker.record.heartbeat_at > now + UNNOTICED_STEP
    return is_ahead and worker.lease <= steady_for
