"""What the leader does with dead letters: replay them by rules, and keep no more than is wanted."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Protocol
from uuid import UUID

from windlass.maintenance.archive import Archive
from windlass.model.dead import (
    DiscardAnswer,
    QueuedLetter,
    Replay,
    ReplayAnswer,
    ReplayRule,
)
from windlass.model.errors import ConfigurationError
from windlass.model.task import Leadership
from windlass.store.port import DeadStore
from windlass.telemetry import emit

REPLAY_BATCH = 500  # letters
REMOVE_BATCH = 1000  # letters that are dropped
ARCHIVE_BATCH = 100  # letters that are archived
ARCHIVED_AT_ONCE = (
    10  # of those, which may be large: what is done is done, should a turn be cut off
)


class DeadChoreStore(DeadStore, Protocol):
    """What these chores ask of the store."""

    async def now(self) -> datetime:
        """Return the store's time."""


class Replaying:
    """Replays by the rules of this process, a page of letters for one rule at a time."""

    def __init__(
        self,
        store: DeadChoreStore,
        rules: Sequence[ReplayRule],
        new_ids: Callable[[int], list[UUID]],
    ) -> None:
        self._store = store
        self._rules = rules
        self._new_ids = new_ids
        self._turn = 0  # which rule is next
        self._after: str | None = None  # where its last look ended
        self._refused: set[ReplayRule] = set()  # of which it was said

    async def __call__(self, leadership: Leadership) -> bool:
        """Replay what one page finds; say whether there is more of this rule, or another rule."""
        if not self._rules:
            return False
        rule = self._rules[self._turn]
        try:
            self._after = await self._apply(rule, leadership)
        except ConfigurationError as error:  # its pattern; the other rules are in order
            self._after = None
            if rule not in self._refused:
                self._refused.add(rule)
                emit("replay.refused", rule=rule, error=error)
        if self._after is not None:
            return True
        self._turn = (self._turn + 1) % len(self._rules)
        return self._turn > 0

    async def _apply(self, rule: ReplayRule, leadership: Leadership) -> str | None:
        now = await self._store.now()
        wanted = rule.wanted(now, after=self._after, limit=REPLAY_BATCH)
        found = await self._store.find_dead(wanted)
        if found.ids:
            replays = map(Replay, found.ids, self._new_ids(len(found.ids)))
            answers = await self._store.replay(list(replays), leadership=leadership)
            done = sum(one.answer is ReplayAnswer.REPLAYED for one in answers)
            if done:
                emit("dead.replayed", letters=done, rule=rule)
        return found.rest


class Removing:
    """Removes letters above a limit or out of time, into the archive if there is one; says so."""

    def __init__(self, store: DeadChoreStore, *, most: int, archive: Archive | None) -> None:
        self._store = store
        self._most = most
        self._archive = archive
        self._crowded: list[str] = []  # queues with too many, counted once for all batches

    async def __call__(self, leadership: Leadership) -> bool:
        """Remove a batch of each kind; say whether there may be more."""
        limit = REMOVE_BATCH if self._archive is None else ARCHIVE_BATCH
        has_more = False
        if self._most:
            has_more = await self._remove_surplus(limit, leadership)
        if self._archive is not None:  # or retention removes them by itself
            expired = await self._store.expired_dead(limit)
            reason = "retention is over"
            has_more |= await self._remove(expired, reason, leadership) >= limit
        return has_more

    async def _remove_surplus(self, limit: int, leadership: Leadership) -> bool:
        crowded, self._crowded = self._crowded, []  # to be counted anew if this turn fails
        if not crowded:
            crowded = await self._store.crowded_queues(self._most)
        if not crowded:
            return False
        # Each batch looks for itself how much is too much: people discard letters meanwhile.
        surplus = await self._store.surplus_dead(crowded, self._most, limit)
        reason = f"more than {self._most} in the queue"
        has_more = await self._remove(surplus, reason, leadership) >= limit
        self._crowded = crowded if has_more else []
        return has_more

    async def _remove(
        self, letters: Sequence[QueuedLetter], reason: str, leadership: Leadership
    ) -> int:
        """Remove letters queue by queue, and return how many."""
        queues: defaultdict[str, list[UUID]] = defaultdict(list)
        for task_id, queue in letters:
            queues[queue].append(task_id)
        removed = 0
        for queue, task_ids in queues.items():
            if self._archive is None:
                removed += await self._drop(queue, task_ids, reason, leadership)
            else:
                removed += await self._put_away(self._archive, queue, task_ids, reason, leadership)
        return removed

    async def _drop(
        self, queue: str, task_ids: Sequence[UUID], reason: str, leadership: Leadership
    ) -> int:
        gone = await self._discard(task_ids, leadership)
        if gone:
            emit("dead.dropped", queue=queue, letters=gone, reason=reason)
        return gone

    async def _put_away(
        self,
        archive: Archive,
        queue: str,
        task_ids: Sequence[UUID],
        reason: str,
        leadership: Leadership,
    ) -> int:
        now = await self._store.now()
        gone: Counter[Path] = Counter()
        try:
            for start in range(0, len(task_ids), ARCHIVED_AT_ONCE):
                some = task_ids[start : start + ARCHIVED_AT_ONCE]
                letters = await self._store.read_dead(some)
                if letters:
                    file = await archive.append(queue, letters, now)
                    # Those that were read, and none that died since.
                    written = [UUID(letter.id) for letter in letters]
                    gone[file] += await self._discard(written, leadership)
        finally:  # also if the turn is cut off
            for file, number in gone.items():
                if number:
                    emit("dead.archived", queue=queue, letters=number, reason=reason, file=file)
        return gone.total()

    async def _discard(self, task_ids: Sequence[UUID], leadership: Leadership) -> int:
        answers = await self._store.discard(task_ids, leadership=leadership)
        return answers.count(DiscardAnswer.DISCARDED)
