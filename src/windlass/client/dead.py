"""What applications do with dead letters: look, search, replay, discard, export."""

import asyncio
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, Any, Protocol, TypedDict, TypeVar, Unpack
from uuid import UUID

import msgspec

from windlass.client.asking import checked_time
from windlass.client.replaying import (
    BATCH,
    READ_AT_ONCE,
    Replayer,
    ReplayPlan,
    ReplayReport,
    ReplayStore,
    Tell,
    absent,
    checked_plan,
    held_by_somebody,
    read_all,
    until_free,
)
from windlass.model.dead import (
    DEAD_STATES,
    DeadFilter,
    DeadLetter,
    DiscardAnswer,
    FoundDead,
    ReplayRule,
)
from windlass.model.errors import ConfigurationError, TaskNotFound, WindlassError
from windlass.model.limits import shown
from windlass.model.task import TaskState
from windlass.policy.classification import checked_class
from windlass.registry import Registry, checked_flag, checked_name, checked_seconds

T = TypeVar("T")

PAGE = 1000  # letters found at once for whoever wants them all
MOST_LISTED = 10_000
LONGEST_PATTERN = 1000  # characters
MOST_TIMES = 100  # that a rule replays along one lineage

Letters = list[DeadLetter]
TaskId = str | UUID


class DeadFilters(TypedDict, total=False):
    """How dead letters are searched, for type checkers."""

    queue: str | None
    type: str | None
    error_class: str | None
    error: str | None
    ended_from: datetime | None
    ended_until: datetime | None
    status: str | Collection[str] | None


class ReplayOptions(DeadFilters, total=False):
    """What `replay(...)` takes, for type checkers."""

    again: bool
    dry_run: bool
    payload: Mapping[str, Any] | None
    changes: Mapping[str, Any] | None
    rate: str | None
    canary: int | None
    max_failures: float
    canary_timeout: float | timedelta


@dataclass(frozen=True, slots=True)
class DiscardReport:
    """What became of letters that were to be discarded, in their order."""

    discarded: list[str] = field(default_factory=list)
    refused: dict[str, WindlassError] = field(default_factory=dict)


def dead_filter(filters: DeadFilters) -> DeadFilter:
    """Check what letters are searched by."""
    for name in filters:
        if name not in DeadFilters.__annotations__:
            known = ", ".join(DeadFilters.__annotations__)
            raise ConfigurationError(f"filter '{name}' is not known; filters are: {known}")
    queue, kind, of = (filters.get(name) for name in ("queue", "type", "error_class"))
    since, until = filters.get("ended_from"), filters.get("ended_until")
    return DeadFilter(
        statuses=_checked_statuses(filters.get("status")),
        queue=None if queue is None else checked_name("queue", queue),
        type=None if kind is None else checked_name("type", kind),
        error_class=None if of is None else checked_class("error_class", of),
        error=checked_pattern(filters.get("error")),
        ended_from=None if since is None else checked_time("ended_from", since),
        ended_until=None if until is None else checked_time("ended_until", until),
    )


def replay_rule(filters: DeadFilters, *, after: Any, times: Any, within: Any) -> ReplayRule:
    """Check a rule by which dead letters are replayed."""
    wanted = dead_filter(filters)
    if type(times) is not int or not 1 <= times <= MOST_TIMES:
        raise ConfigurationError(f"times {shown(times)}: use an integer from 1 to {MOST_TIMES}")
    if not any(value is not None for value in filters.values()):
        raise ConfigurationError(
            "a rule for all dead letters would hide every failure; "
            "say which with error_class, error, type or queue"
        )
    return ReplayRule(
        queue=wanted.queue,
        type=wanted.type,
        error_class=wanted.error_class,
        error=wanted.error,
        after=timedelta(seconds=checked_seconds("after", after)),
        times=times,
        within=timedelta(seconds=checked_seconds("within", within, above_zero=True)),
    )


def checked_pattern(value: Any) -> str | None:
    """Return a pattern that may be a regular expression, or raise; only the store knows."""
    if value is None:
        return None
    if not isinstance(value, str) or not 1 <= len(value) <= LONGEST_PATTERN or "\0" in value:
        raise ConfigurationError(
            f"error {shown(value)}: use a regular expression of 1 to {LONGEST_PATTERN} characters"
        )
    return value


def _checked_statuses(value: Any) -> tuple[TaskState, ...]:
    given = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    for one in given:
        if one not in DEAD_STATES:
            raise ConfigurationError(f"status {shown(one)}: a dead letter is failed or dead")
    return tuple(TaskState(one) for one in given)


def checked_id(task_id: Any) -> UUID:
    """Return the id of a task, or raise."""
    try:
        return task_id if isinstance(task_id, UUID) else UUID(task_id)
    except (ValueError, AttributeError, TypeError):
        raise TaskNotFound(f"{shown(task_id)} is not the id of a task; ids are UUIDs") from None


class DeadClient:
    """The verbs on dead letters, on a store that is open."""

    def __init__(self, *, store: ReplayStore, registry: Registry, max_payload_bytes: int) -> None:
        self._store = store
        self._registry = registry
        self._max_payload_bytes = max_payload_bytes

    async def find(self, wanted: DeadFilter) -> FoundDead:
        """Find as many as are wanted, from as many pages as it takes.

        A page that came to the end of its looking is the last one, unless it was said how far to look.
        """
        ids: list[UUID] = []
        while True:
            page = await self._store.find_dead(replace(wanted, limit=wanted.limit - len(ids)))
            ids += page.ids
            is_far_enough = page.looked_back_to is not None and wanted.ended_from is None
            if len(ids) >= wanted.limit or page.rest is None or is_far_enough:
                return replace(page, ids=ids)
            wanted = replace(wanted, after=page.rest)

    async def find_all(self, wanted: DeadFilter) -> list[UUID]:
        """Find all, first ended first."""
        ids: list[UUID] = []
        wanted = replace(wanted, limit=PAGE)
        while True:
            page = await self._store.find_dead(wanted)
            ids += page.ids
            if page.rest is None:
                return ids[::-1]
            wanted = replace(wanted, after=page.rest)

    async def read(self, task_ids: Sequence[UUID]) -> Letters:
        """Read letters in their order."""
        return [letter async for letter in read_all(self._store, task_ids)]

    async def get(self, task_id: UUID) -> DeadLetter:
        """Return one letter, or raise."""
        for letter in await self._store.read_dead([task_id]):
            return letter
        raise await absent(self._store, task_id, "looked at here")

    async def replay(
        self,
        chosen: Sequence[UUID] | DeadFilter,
        plan: ReplayPlan,
        tell: Tell = lambda _id, _outcome: None,
    ) -> ReplayReport:
        """Replay letters by id, or those of a filter, and tell of each."""
        found = isinstance(chosen, DeadFilter)
        if isinstance(chosen, DeadFilter):
            chosen = await self.find_all(replace(chosen, unreplayed=not plan.again))
        if plan.payload is not None and (found or len(chosen) != 1):
            raise ConfigurationError(
                "option 'payload' is for one letter, named by its id; "
                "to change arguments of many, give changes"
            )
        replayer = Replayer(
            store=self._store,
            registry=self._registry,
            max_payload_bytes=self._max_payload_bytes,
            plan=plan,
            tell=tell,
        )
        return await replayer.run(chosen, found=found)

    async def discard(
        self,
        chosen: Sequence[UUID] | DeadFilter,
        *,
        dry_run: bool,
        tell: Callable[[UUID, WindlassError | None], None] = lambda _id, _error: None,
    ) -> DiscardReport:
        """Discard letters by id, or those of a filter, and tell of each."""
        act = self._foresee if dry_run else self._discard
        if isinstance(chosen, DeadFilter):
            chosen = await self.find_all(chosen)
            act = _discarded if dry_run else act  # they were found just now
        chosen = list(dict.fromkeys(chosen))
        report = DiscardReport()
        for start in range(0, len(chosen), BATCH):
            batch = chosen[start : start + BATCH]
            for task_id, answer in zip(batch, await act(batch), strict=True):
                error = await self._refusal(task_id, answer)
                if error is None:
                    report.discarded.append(str(task_id))
                else:
                    report.refused[str(task_id)] = error
                tell(task_id, error)
        return report

    async def _discard(self, batch: Sequence[UUID]) -> list[DiscardAnswer]:
        return await until_free(
            self._store.discard, batch, lambda answer: answer is DiscardAnswer.HELD
        )

    async def _foresee(self, batch: Sequence[UUID]) -> list[DiscardAnswer]:
        known = {letter.id for letter in await self.read(batch)}
        return [
            DiscardAnswer.DISCARDED if str(task_id) in known else DiscardAnswer.ABSENT
            for task_id in batch
        ]

    async def _refusal(self, task_id: UUID, answer: DiscardAnswer) -> WindlassError | None:
        match answer:
            case DiscardAnswer.DISCARDED:
                return None
            case DiscardAnswer.HELD:
                return held_by_somebody(task_id)
            case DiscardAnswer.ABSENT:
                return await absent(self._store, task_id, "discarded")

    async def lines(self, wanted: DeadFilter) -> AsyncIterator[bytes]:
        """Yield all letters of a filter as JSON Lines, some at a time, first ended first."""
        ids = await self.find_all(wanted)
        for start in range(0, len(ids), READ_AT_ONCE):
            yield msgspec.json.Encoder().encode_lines(
                await self._store.read_dead(ids[start : start + READ_AT_ONCE])
            )


async def _discarded(batch: Sequence[UUID]) -> list[DiscardAnswer]:
    return [DiscardAnswer.DISCARDED] * len(batch)


class DeadHolder(Protocol):
    """Whoever has the verbs on dead letters."""

    @property
    def dead(self) -> DeadClient:
        """The verbs."""


class DeadAccess(Protocol):
    """How dead letters are reached, whatever event loop they are asked for from."""

    def using(self) -> AbstractAsyncContextManager[DeadHolder]:
        """Yield the client of the running event loop, which stays open while the block lasts."""

    def run_sync(self, name: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine for a caller that has no event loop."""


class DeadLetters:
    """The dead letters of an application: `app.dead`."""

    def __init__(self, access: DeadAccess) -> None:
        self._access = access

    async def list(self, *, limit: int = 50, **filters: Unpack[DeadFilters]) -> Letters:
        """Return letters, last ended first.

        Of those that fit no index it looks at the last 10,000, unless `ended_from` says how far.
        """
        if type(limit) is not int or not 1 <= limit <= MOST_LISTED:
            raise ConfigurationError(f"limit {shown(limit)}: use an integer from 1 to 10000")
        wanted = replace(dead_filter(filters), limit=limit)
        async with self._access.using() as client:
            return await client.dead.read((await client.dead.find(wanted)).ids)

    async def get(self, task_id: TaskId) -> DeadLetter:
        """Return one letter with every attempt and its lineage."""
        async with self._access.using() as client:
            return await client.dead.get(checked_id(task_id))

    async def replay(
        self,
        *task_ids: TaskId,
        again: bool = False,
        dry_run: bool = False,
        payload: Mapping[str, Any] | None = None,
        changes: Mapping[str, Any] | None = None,
        rate: str | None = None,
        canary: int | None = None,
        max_failures: float = 0.0,
        canary_timeout: float | timedelta = 300.0,
        **filters: Unpack[DeadFilters],
    ) -> ReplayReport:
        """Make new tasks of letters, by id or by filter; of a filter, of those not replayed yet.

        One letter that cannot be replayed raises; of several, the report says which could not.
        """
        plan = checked_plan(
            again=again,
            dry_run=dry_run,
            payload=payload,
            changes=changes,
            rate=rate,
            canary=canary,
            max_failures=max_failures,
            canary_timeout=canary_timeout,
        )
        chosen = _chosen(task_ids, filters)
        async with self._access.using() as client:
            report = await client.dead.replay(chosen, plan)
        _raise_for_one(task_ids, report.refused)
        return report

    async def discard(
        self, *task_ids: TaskId, dry_run: bool = False, **filters: Unpack[DeadFilters]
    ) -> DiscardReport:
        """Remove letters for good, by id or by filter.

        One letter that cannot be discarded raises; of several, the report says which could not.
        """
        chosen = _chosen(task_ids, filters)
        async with self._access.using() as client:
            report = await client.dead.discard(chosen, dry_run=checked_flag("dry_run", dry_run))
        _raise_for_one(task_ids, report.refused)
        return report

    async def export(self, path: str | Path, **filters: Unpack[DeadFilters]) -> int:
        """Write letters to a file as JSON Lines, first ended first; return how many."""
        wanted = dead_filter(filters)
        number = 0
        async with self._access.using() as client:
            await client.dead.find(
                replace(wanted, limit=1)
            )  # a wrong filter must not cost the file
            file: IO[bytes] = await asyncio.to_thread(Path(path).open, "wb")
            try:
                async for lines in client.dead.lines(wanted):
                    await asyncio.to_thread(file.write, lines)
                    number += lines.count(b"\n")
            finally:
                await asyncio.to_thread(file.close)
        return number

    def list_sync(self, *, limit: int = 50, **filters: Unpack[DeadFilters]) -> Letters:
        """`list` for synchronous code."""
        return self._access.run_sync("dead.list", lambda: self.list(limit=limit, **filters))

    def get_sync(self, task_id: TaskId) -> DeadLetter:
        """`get` for synchronous code."""
        return self._access.run_sync("dead.get", lambda: self.get(task_id))

    def replay_sync(self, *task_ids: TaskId, **options: Unpack[ReplayOptions]) -> ReplayReport:
        """`replay` for synchronous code."""
        return self._access.run_sync("dead.replay", lambda: self.replay(*task_ids, **options))

    def discard_sync(
        self, *task_ids: TaskId, dry_run: bool = False, **filters: Unpack[DeadFilters]
    ) -> DiscardReport:
        """`discard` for synchronous code."""
        return self._access.run_sync(
            "dead.discard", lambda: self.discard(*task_ids, dry_run=dry_run, **filters)
        )

    def export_sync(self, path: str | Path, **filters: Unpack[DeadFilters]) -> int:
        """`export` for synchronous code."""
        return self._access.run_sync("dead.export", lambda: self.export(path, **filters))


def _chosen(task_ids: Sequence[TaskId], filters: DeadFilters) -> Sequence[UUID] | DeadFilter:
    wanted = dead_filter(filters)
    if bool(task_ids) == any(value is not None for value in filters.values()):
        raise ConfigurationError("name dead letters either by id or by filter")
    return [checked_id(task_id) for task_id in task_ids] if task_ids else wanted


def _raise_for_one(task_ids: Sequence[TaskId], refused: Mapping[str, WindlassError]) -> None:
    if len(task_ids) == 1:
        for error in refused.values():
            raise error
