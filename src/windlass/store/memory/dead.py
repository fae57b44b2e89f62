"""Dead letters in memory."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from uuid import UUID

from windlass.model.dead import (
    DeadFilter,
    DeadLetter,
    DiscardAnswer,
    FoundDead,
    QueuedLetter,
    Replay,
    ReplayAnswer,
    Replayed,
    class_of,
    parse_position,
    position_of,
)
from windlass.model.errors import ConfigurationError
from windlass.model.limits import shown
from windlass.model.task import Leadership
from windlass.store.memory.leading import LeadVerbs
from windlass.store.memory.state import Lineage, TaskEntry, task_record
from windlass.store.memory.tables import DEAD, transaction


class DeadVerbs(LeadVerbs):
    """Finds, replays and removes dead letters."""

    @transaction
    async def find_dead(self, wanted: DeadFilter) -> FoundDead:
        before = None if wanted.after is None else parse_position(wanted.after)
        pattern = None if wanted.error is None else _compiled(wanted.error)
        found = [
            key
            for key in sorted(map(_order, self._dead()), reverse=True)
            if (before is None or key < before) and self._fits(key[1], wanted, pattern)
        ]
        page = found[: wanted.limit]
        rest = position_of(*page[-1]) if len(page) < len(found) else None
        return FoundDead([task_id for _, task_id in page], rest)

    def _fits(self, task_id: UUID, wanted: DeadFilter, pattern: re.Pattern[str] | None) -> bool:
        task = self._tasks[task_id]
        ended, _ = _order(task)
        return (
            (not wanted.statuses or task.status in wanted.statuses)
            and wanted.queue in (None, task.queue)
            and wanted.type in (None, task.asked.type)
            and wanted.error_class in (None, class_of(task.errors))
            and (pattern is None or pattern.search(_error_of(task)) is not None)
            and (wanted.ended_from is None or ended >= wanted.ended_from)
            and (wanted.ended_until is None or ended < wanted.ended_until)
            and not (wanted.unreplayed and self._replays(task))
            and (wanted.depth_below is None or self._depth(task_id) < wanted.depth_below)
        )

    @transaction
    async def read_dead(self, task_ids: Sequence[UUID]) -> list[DeadLetter]:
        tasks = [self._tasks[task_id] for task_id in task_ids if task_id in self._tasks]
        return [self._letter(task) for task in tasks if task.status in DEAD]

    @transaction
    async def replay(
        self,
        replays: Sequence[Replay],
        *,
        again: bool = False,
        leadership: Leadership | None = None,
    ) -> list[Replayed]:
        if leadership is not None:
            self._assert_leader(leadership)
        return [self._replay(one, again) for one in replays]

    def _replay(self, replay: Replay, again: bool) -> Replayed:
        if replay.id in self._lineage:
            return Replayed(ReplayAnswer.REPLAYED, replay.id)
        task = self._tasks.get(replay.ancestor)
        if task is None or task.status not in DEAD:
            return Replayed(ReplayAnswer.ABSENT)
        before = self._replays(task)
        if before and not again:
            return Replayed(ReplayAnswer.BEFORE, before[-1])
        new = task.asked._replace(
            id=replay.id,
            payload=task.asked.payload if replay.payload is None else replay.payload,
            queue=task.queue,
            priority=task.priority,
            delay=replay.delay,
            at=None,
            idempotency_key=None,
        )
        now = self._clock()
        self._gates.hand_over(task, new.id)
        self._add(new, now)
        depth = self._depth(replay.ancestor) + 1
        self._lineage[replay.id] = Lineage(replay.ancestor, task.generation, depth, now)
        return Replayed(ReplayAnswer.REPLAYED, replay.id)

    @transaction
    async def discard(
        self, task_ids: Sequence[UUID], *, leadership: Leadership | None = None
    ) -> list[DiscardAnswer]:
        if leadership is not None:
            self._assert_leader(leadership)
        dead = {task.asked.id for task in self._dead()}
        self._forget(dead.intersection(task_ids))
        return [
            DiscardAnswer.DISCARDED if task_id in dead else DiscardAnswer.ABSENT
            for task_id in task_ids
        ]

    @transaction
    async def crowded_queues(self, most: int) -> list[str]:
        counts = Counter(task.queue for task in self._dead())
        return sorted(queue for queue, number in counts.items() if number > most)

    @transaction
    async def surplus_dead(
        self, queues: Sequence[str], most: int, limit: int
    ) -> list[QueuedLetter]:
        seen: dict[str, int] = {}
        surplus = []
        for _, task_id in sorted(map(_order, self._dead()), reverse=True):
            queue = self._tasks[task_id].queue
            seen[queue] = seen.get(queue, 0) + 1
            if seen[queue] > most and queue in queues:
                surplus.append(QueuedLetter(task_id, queue))
        return surplus[::-1][:limit]

    @transaction
    async def expired_dead(self, limit: int) -> list[QueuedLetter]:
        today = self._clock().astimezone(UTC).date()
        over = sorted(
            (task.drop_on, task_id)
            for task_id, task in self._tasks.items()
            if task.status in DEAD and task.drop_on < today
        )
        return [QueuedLetter(task_id, self._tasks[task_id].queue) for _, task_id in over[:limit]]

    def _dead(self) -> Iterable[TaskEntry]:
        return (task for task in self._tasks.values() if task.status in DEAD)

    def _replays(self, task: TaskEntry) -> list[UUID]:
        """What was made of it since it ended, oldest first."""
        made = [
            (lineage.replayed_at, task_id)
            for task_id, lineage in self._lineage.items()
            if (lineage.ancestor, lineage.generation) == (task.asked.id, task.generation)
        ]
        return [task_id for _, task_id in sorted(made)]

    def _depth(self, task_id: UUID) -> int:
        lineage = self._lineage.get(task_id)
        return lineage.depth if lineage else 0

    def _letter(self, task: TaskEntry) -> DeadLetter:
        return DeadLetter.of(
            task_record(task, self._lineage.get(task.asked.id)),
            depth=self._depth(task.asked.id),
            replayed_as=tuple(map(str, self._replays(task))),
        )


def _order(task: TaskEntry) -> tuple[datetime, UUID]:
    assert task.completed_at is not None  # noqa: S101 - it has ended
    return task.completed_at, task.asked.id


def _error_of(task: TaskEntry) -> str:
    if not task.errors:
        return task.last_error or ""
    return f"{task.errors[-1].get('type')}: {task.errors[-1].get('message')}"


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)  # as PostgreSQL reads it
    except re.error as error:
        raise ConfigurationError(
            f"error {shown(pattern)} is not a regular expression: {error}"
        ) from None
