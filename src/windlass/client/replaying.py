"""Replaying many dead letters: edited, spread over time, the first few of them to see how they fare."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, TypeVar
from uuid import UUID

from windlass.client.asking import new_task_ids
from windlass.codec import check_plain
from windlass.model.dead import DEAD_STATES, DeadLetter, Replay, ReplayAnswer, Replayed
from windlass.model.errors import (
    ConfigurationError,
    PayloadError,
    StoreBusy,
    StoreUnavailable,
    TaskNotFound,
    WindlassError,
    WrongState,
)
from windlass.model.limits import shown
from windlass.policy.limit import per_second
from windlass.registry import Registry, checked_flag, checked_seconds
from windlass.service import backoff
from windlass.store.port import DeadStore, ReadStore

A = TypeVar("A")
B = TypeVar("B")

BATCH = 500  # letters in one transaction
READ_AT_ONCE = 100  # letters, which may be large
BATCH_BYTES = 16 << 20  # of edited payloads in one transaction
REPEAT_AT_MOST = 3  # times, a call whose connection broke
HELD_WITHIN = 1.0  # seconds; whoever holds a letter for longer is told of
LONGEST_PAUSE = 0.5  # seconds between two looks at a canary
LARGEST_CANARY = 10_000


Tell = Callable[
    [UUID, "str | WindlassError | None"], None
]  # the new task; why none; None: it would be


class ReplayStore(DeadStore, ReadStore, Protocol):
    """What replaying asks of the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """How to replay."""

    again: bool = False
    dry_run: bool = False
    payload: Mapping[str, Any] | None = None  # instead of what it was
    changes: Mapping[str, Any] = field(default_factory=dict)  # arguments, instead of what they were
    rate: float | None = None  # replays in a second
    canary: int = 0  # so many first
    max_failures: float = 0.0  # percent of the canary
    canary_timeout: float = 300.0  # seconds

    @property
    def edits(self) -> bool:
        """Whether payloads are other than they were."""
        return self.payload is not None or bool(self.changes)


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay did, by the ids of the letters in the order of their replay."""

    replayed: dict[str, str | None] = field(
        default_factory=dict
    )  # as which task; None: it would be
    refused: dict[str, WindlassError] = field(default_factory=dict)
    stopped: str | None = None  # why the rest was not replayed
    left: tuple[str, ...] = ()  # the rest


def checked_plan(
    *,
    again: Any,
    dry_run: Any,
    payload: Any,
    changes: Any,
    rate: Any,
    canary: Any,
    max_failures: Any,
    canary_timeout: Any,
) -> ReplayPlan:
    """Return how to replay, or raise."""
    if payload is not None and changes:
        raise ConfigurationError("options 'payload' and 'changes' exclude each other; give one")
    for name, given in (("payload", payload), ("changes", changes)):
        if given is not None and not isinstance(given, Mapping):
            raise PayloadError(f"{name} is a {type(given).__name__}; give a dict of arguments")
    if canary is not None and (type(canary) is not int or not 1 <= canary <= LARGEST_CANARY):
        raise ConfigurationError(f"canary {shown(canary)}: use an integer from 1 to 10000")
    is_number = isinstance(max_failures, int | float) and not isinstance(max_failures, bool)
    if not is_number or not 0 <= max_failures <= 100:
        raise ConfigurationError(f"max_failures {shown(max_failures)}: use percent, from 0 to 100")
    if max_failures and canary is None:
        raise ConfigurationError(
            f"max_failures {shown(max_failures)} is of the canary; say how large that is, with canary"
        )
    return ReplayPlan(
        again=checked_flag("again", again),
        dry_run=checked_flag("dry_run", dry_run),
        payload=payload,
        changes=changes or {},
        rate=None if rate is None else per_second("rate", rate),
        canary=canary or 0,
        max_failures=float(max_failures),
        canary_timeout=checked_seconds("canary_timeout", canary_timeout, above_zero=True),
    )


class Replayer:
    """Replays letters by a plan, and tells of each as it goes."""

    def __init__(
        self,
        *,
        store: ReplayStore,
        registry: Registry,
        max_payload_bytes: int,
        plan: ReplayPlan,
        tell: Tell,
    ) -> None:
        self._store = store
        self._registry = registry
        self._max_payload_bytes = max_payload_bytes
        self._plan = plan
        self._tell = tell
        self._report = ReplayReport()

    async def run(self, task_ids: Sequence[UUID], *, found: bool) -> ReplayReport:
        """Replay these, in their order; `found`: a search has said that they can be."""
        task_ids = list(dict.fromkeys(task_ids))
        if self._plan.edits:
            await self._check_payloads(task_ids)
        if self._plan.dry_run:
            await self._foresee(task_ids, found=found)
            return self._report
        first, rest = task_ids[: self._plan.canary], task_ids[self._plan.canary :]
        if first:
            made = await self._replay(first)
            if rest and (stopped := await self._failed(made)) is not None:
                left = tuple(map(str, rest))
                report = self._report
                return ReplayReport(report.replayed, report.refused, stopped, left)
        await self._replay(rest)
        return self._report

    async def _foresee(self, task_ids: Sequence[UUID], *, found: bool) -> None:
        if found:
            for task_id in task_ids:
                self._note(task_id, None)
            return
        letters = {UUID(letter.id): letter async for letter in read_all(self._store, task_ids)}
        for task_id in task_ids:
            letter = letters.get(task_id)
            if letter is None:
                self._note(task_id, await absent(self._store, task_id, "replayed"))
            elif letter.replayed_as and not self._plan.again:
                self._note(task_id, _replayed_before(task_id, letter.replayed_as[-1]))
            else:
                self._note(task_id, None)

    async def _replay(self, task_ids: Sequence[UUID]) -> list[UUID]:
        """Write replays batch by batch; return the tasks that were made."""
        made: list[UUID] = []
        async for batch in self._batches(task_ids):
            for replay, replayed in zip(batch, await self._write(batch), strict=True):
                outcome = await self._outcome(replay, replayed)
                self._note(replay.ancestor, outcome)
                if isinstance(outcome, str):
                    made.append(replay.id)
        return made

    async def _batches(self, task_ids: Sequence[UUID]) -> AsyncIterator[list[Replay]]:
        rate = self._plan.rate
        new_ids = new_task_ids(len(task_ids))
        replays = (
            Replay(task_id, new_id, 0.0 if rate is None else place / rate)
            for place, (task_id, new_id) in enumerate(zip(task_ids, new_ids, strict=True))
        )
        if not self._plan.edits:
            while batch := list(islice(replays, BATCH)):
                yield batch
            return
        while some := list(islice(replays, READ_AT_ONCE)):
            letters = await self._store.read_dead([replay.ancestor for replay in some])
            payloads = {UUID(letter.id): self._edited(letter) for letter in letters}
            for replay in some:
                if replay.ancestor not in payloads:
                    gone = await absent(self._store, replay.ancestor, "replayed")
                    self._note(replay.ancestor, gone)
            edited = [
                one._replace(payload=payloads[one.ancestor])
                for one in some
                if one.ancestor in payloads
            ]
            for batch in _by_bytes(edited):
                yield batch

    def _write(self, batch: Sequence[Replay]) -> Awaitable[list[Replayed]]:
        return until_free(self._asked, batch, lambda one: one.answer is ReplayAnswer.HELD)

    async def _asked(self, batch: Sequence[Replay]) -> list[Replayed]:
        """Ask the store; if the connection broke, again: by their ids none is made twice."""
        failures = 0
        while True:
            try:
                return await self._store.replay(batch, again=self._plan.again)
            except StoreUnavailable:
                failures += 1
                if failures > REPEAT_AT_MOST:
                    raise
                await asyncio.sleep(backoff(failures, longest=HELD_WITHIN))

    async def _outcome(self, replay: Replay, replayed: Replayed) -> str | WindlassError:
        match replayed.answer:
            case ReplayAnswer.REPLAYED:
                return str(replayed.task_id)
            case ReplayAnswer.BEFORE:
                return _replayed_before(replay.ancestor, str(replayed.task_id))
            case ReplayAnswer.HELD:
                return held_by_somebody(replay.ancestor)
            case ReplayAnswer.ABSENT:
                return await absent(self._store, replay.ancestor, "replayed")

    def _note(self, task_id: UUID, outcome: str | WindlassError | None) -> None:
        if isinstance(outcome, WindlassError):
            self._report.refused[str(task_id)] = outcome
        else:
            self._report.replayed[str(task_id)] = outcome
        self._tell(task_id, outcome)

    # Payloads

    async def _check_payloads(self, task_ids: Sequence[UUID]) -> None:
        """Edit every payload before anything is written; none is kept: there may be very many."""
        async for letter in read_all(self._store, task_ids):
            self._edited(letter)

    def _edited(self, letter: DeadLetter) -> str:
        plan, limit = self._plan, self._max_payload_bytes
        payload = dict(letter.payload if plan.payload is None else plan.payload) | dict(
            plan.changes
        )
        definition = self._registry.find(letter.type)
        try:
            if definition is not None:
                return definition.codec.encode_named(payload, max_bytes=limit)
            return check_plain(letter.type, payload, max_bytes=limit)
        except PayloadError as error:
            raise PayloadError(f"letter {letter.id}: {error}; nothing was replayed") from error

    # Canaries

    async def _failed(self, made: Sequence[UUID]) -> str | None:
        """Wait until these have ended; say why the others are not to follow."""
        if not made:
            return "none of the first letters could be replayed"
        ended, is_over = await self._ends(made)
        waiting = len(made) - len(ended)
        if not is_over:
            return (
                f"{waiting} of the first {len(made)} replays have not ended within "
                f"{self._plan.canary_timeout:g} s"
            )
        failed = sum(ended.values())
        if 100 * failed > self._plan.max_failures * len(made):
            return (
                f"{failed} of the first {len(made)} replays failed again, and "
                f"{self._plan.max_failures:g} % at most may"
            )
        return None

    async def _ends(self, made: Sequence[UUID]) -> tuple[dict[UUID, bool], bool]:
        """For each that has ended, whether it failed again; and whether all of them have."""
        until = time.monotonic() + self._plan.canary_timeout
        ended: dict[UUID, bool] = {}
        pause = 0.02
        while True:
            left = [task_id for task_id in made if task_id not in ended]
            if not left:
                return ended, True
            try:
                found, unknown = await self._store.ended(left)
            except StoreUnavailable:
                found, unknown = [], []  # it is waited for as long as for the tasks
            ended |= dict.fromkeys(unknown, False)
            ended |= {one.id: one.status in DEAD_STATES for one in found}
            if time.monotonic() > until:
                return ended, len(ended) == len(made)
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, pause * 1.5)


async def until_free(
    ask: Callable[[Sequence[A]], Awaitable[list[B]]],
    batch: Sequence[A],
    is_held: Callable[[B], bool],
) -> list[B]:
    """Ask about a batch, and for a moment again about those that somebody holds."""
    answers = await ask(batch)
    until = time.monotonic() + HELD_WITHIN
    turn = 0
    while time.monotonic() < until:
        places = [place for place, answer in enumerate(answers) if is_held(answer)]
        if not places:
            break
        turn += 1
        await asyncio.sleep(backoff(turn, longest=HELD_WITHIN / 4))
        tried = await ask([batch[place] for place in places])
        for place, answer in zip(places, tried, strict=True):
            answers[place] = answer
    return answers


async def read_all(store: DeadStore, task_ids: Sequence[UUID]) -> AsyncIterator[DeadLetter]:
    """Read letters a few at a time: they may be large."""
    for start in range(0, len(task_ids), READ_AT_ONCE):
        for letter in await store.read_dead(task_ids[start : start + READ_AT_ONCE]):
            yield letter


async def absent(store: ReadStore, task_id: UUID, done: str) -> WindlassError:
    """Say why a task is no dead letter."""
    try:
        record = await store.get(task_id)
    except TaskNotFound as error:
        return error
    return WrongState(f"task {task_id} is {record.status}: only a failed or dead one can be {done}")


def held_by_somebody(task_id: UUID) -> StoreBusy:
    """Say that nothing was done to a letter."""
    return StoreBusy(
        f"task {task_id}: somebody's transaction holds it; nothing was done, try again"
    )


def _replayed_before(task_id: UUID, replay: str) -> WrongState:
    return WrongState(
        f"task {task_id} was replayed as {replay}; to replay it once more say so, with again"
    )


def _by_bytes(replays: Sequence[Replay]) -> Iterator[list[Replay]]:
    batch: list[Replay] = []
    size = 0
    for replay in replays:
        added = len(replay.payload or "")
        if batch and size + added > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(replay)
        size += added
    if batch:
        yield batch
