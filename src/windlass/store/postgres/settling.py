"""Settle and pulse on PostgreSQL."""

from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from windlass.model.errors import StoreBusy
from windlass.model.task import (
    Answer,
    Outcome,
    Pulse,
    PulseAnswer,
    Settlement,
    TypeDefaults,
    WorkerInfo,
    WorkerOrder,
)
from windlass.store.postgres.parts import PostgresParts

T = TypeVar("T")

_COMES_BACK = frozenset({Outcome.RETRIED, Outcome.SNOOZED, Outcome.RELEASED})


class SettleVerbs(PostgresParts):
    """What a worker says of its claims, and of itself."""

    async def settle(self, settlements: Sequence[Settlement]) -> list[Answer]:
        answers = [Answer.APPLIED] * len(settlements)
        if not settlements:
            return answers
        # Sorted, so that two settlements that meet take their tasks in the same order.
        order = sorted(
            range(len(settlements)), key=[one.task_id for one in settlements].__getitem__
        )
        ordered = [settlements[place] for place in order]
        tokens = _distinct([one.token for one in ordered])
        kept = self._options.retention
        arguments: tuple[Any, ...] = (
            tokens,
            _places(tokens, ordered),
            [one.task_id for one in ordered],
            _unless_all(1, [one.generation for one in ordered]),
            [one.started_after for one in ordered],
            _unless_all(Outcome.COMPLETED, [one.outcome for one in ordered]),
            _unless_all(None, [one.result for one in ordered]),
            _unless_all(0.0, [one.delay for one in ordered]),
            _unless_all(None, [one.error for one in ordered]),
            _unless_all(False, [one.reported for one in ordered]),
            kept.ended,
            kept.dead,
            kept.keys,
            self._options.patience,
        )
        calls_back = any(one.calls_back for one in ordered)
        statement = "settle_tasks"
        if calls_back or not _COMES_BACK.isdisjoint(arguments[5] or ()):
            statement = "settle_failures"
            ages = _unless_all(None, [one.max_age for one in ordered])
            arguments = (*arguments, ages, calls_back)
        rows = await self._history.with_places(
            arguments[2],
            lambda: self._run.fetch(statement, *arguments),
        )
        for place, before, given_up in rows:
            other = Answer.ALREADY if before else Answer.LOST
            answers[order[place]] = Answer.GIVEN_UP if given_up else other
        return answers

    async def held(self, settlements: Sequence[Settlement]) -> list[bool]:
        tokens, ids = [one.token for one in settlements], [one.task_id for one in settlements]
        rows = await self._run.fetch("find_held", tokens, ids)
        return [row["held"] for row in rows]

    async def register(self, worker: WorkerInfo, *, lease: timedelta) -> None:
        await self._run.execute(
            "register_worker",
            worker.id,
            worker.host,
            worker.pid,
            worker.version,
            worker.capacity,
            worker.types,
            worker.queues,
            lease,
            _as_json(worker.defaults),
        )

    async def pulse(self, pulse: Pulse) -> PulseAnswer:
        tokens = list(pulse.tokens)
        try:
            (row,) = await self._run.fetch(
                "pulse",
                pulse.worker_id,
                tokens,
                pulse.lease,
                pulse.running,
                pulse.idle,
                pulse.patience or None,
                pulse.trusted,
                msgspec.json.encode(pulse.breakers).decode() if pulse.breakers else None,
                pulse.drains,
                list(pulse.full_queues) or None,
            )
        except StoreBusy:
            return PulseAnswer(frozenset(), registered=True, skipped=frozenset(tokens), order=None)
        kept, skipped = frozenset(row["kept"]), frozenset(row["skipped"])
        order = WorkerOrder(row["ordered"] or WorkerOrder.RESUME)
        weights = dict(zip(row["weighed"], row["weights"], strict=True))
        return PulseAnswer(kept, row["registered"], skipped, order, weights)

    async def set_idle(self, worker_id: UUID, idle: bool) -> None:
        await self._run.execute("set_idle", worker_id, idle)

    async def deregister(self, worker_id: UUID) -> None:
        await self._run.execute("deregister_worker", worker_id)


def _places(tokens: Sequence[UUID], settlements: Sequence[Settlement]) -> list[int] | None:
    """Which of the tokens is that of each settlement, from 1; nothing if there is but one."""
    if len(tokens) == 1:
        return None
    numbers = {token: number for number, token in enumerate(tokens, start=1)}
    return [numbers[one.token] for one in settlements]


def _distinct(tokens: list[UUID]) -> list[UUID]:
    """The different ones. Those of one claim are one object, and mostly come together: few are hashed."""
    changes = [b for a, b in pairwise(tokens) if b is not a]
    return list(dict.fromkeys([tokens[0], *changes]))


def _unless_all(usual: T, column: list[T]) -> list[T] | None:
    """A column that says nothing is not sent."""
    return None if column.count(usual) == len(column) else column


def _as_json(defaults: Sequence[TypeDefaults]) -> str:
    """Every type with what was registered for it, a retention in seconds."""
    said = {}
    for one in defaults:
        kept = None if one.retention is None else int(one.retention.total_seconds())
        said[one.name] = {
            "queue": one.queue,
            "priority": one.priority,
            "max_attempts": one.max_attempts,
            "retention": kept,
        }
    return msgspec.json.encode(said).decode()
