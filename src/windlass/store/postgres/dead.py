"""Dead letters on PostgreSQL."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from uuid import UUID

import asyncpg

from windlass.model.dead import (
    DeadFilter,
    DeadLetter,
    DiscardAnswer,
    FoundDead,
    QueuedLetter,
    Replay,
    ReplayAnswer,
    Replayed,
    parse_position,
    position_of,
)
from windlass.model.errors import ConfigurationError
from windlass.model.limits import shown
from windlass.model.task import Leadership
from windlass.store.postgres.leading import LeadVerbs
from windlass.store.postgres.parts import used
from windlass.store.postgres.records import task_record

SEARCH_WITHIN = 10.0  # seconds, the letters of one page

_FIRST_ID = UUID(int=0)
_FIRST_TIME, _LAST_TIME = (datetime(year, 1, 1, tzinfo=UTC) for year in (1, 9999))


class DeadVerbs(LeadVerbs):
    """Finds, replays and removes dead letters."""

    async def find_dead(self, wanted: DeadFilter) -> FoundDead:
        before = (wanted.ended_until or _LAST_TIME, _FIRST_ID)
        if wanted.after is not None:
            before = min(before, parse_position(wanted.after))
        asked = (
            [str(status) for status in wanted.statuses] or None,
            *(wanted.queue, wanted.type, wanted.error_class, wanted.error),
            *(wanted.unreplayed, wanted.depth_below),
            *(*before, wanted.ended_from or _FIRST_TIME, wanted.limit),
        )
        async with self._run.transaction("begin_listing") as connection:
            await connection.execute(self._sql.statement("pin_listing_plans"))
            limit = self._sql.statement("limit_search")
            with _named(wanted.error):
                await connection.execute(limit, round(SEARCH_WITHIN * 1000), wanted.error)
                rows = await connection.fetch(self._sql.statement("find_dead"), *asked)
        return _found(rows, wanted.limit)

    async def read_dead(self, task_ids: Sequence[UUID]) -> list[DeadLetter]:
        rows = await self._run.fetch("read_dead", list(task_ids))
        return [
            DeadLetter.of(
                task_record(row), depth=row["depth"], replayed_as=tuple(row["replayed_as"])
            )
            for row in rows
        ]

    async def replay(
        self,
        replays: Sequence[Replay],
        *,
        again: bool = False,
        leadership: Leadership | None = None,
    ) -> list[Replayed]:
        if not replays:
            return []
        ancestors, new_ids, delays, payloads = map(list, zip(*replays, strict=True))
        async with self._led(leadership, confirmed=True) as connection:
            rows = await connection.fetch(
                self._sql.statement("replay_dead"),
                *(ancestors, new_ids, delays, used(payloads), again),
            )
        return [Replayed(ReplayAnswer(answer), task_id) for answer, task_id, _ in rows]

    async def discard(
        self, task_ids: Sequence[UUID], *, leadership: Leadership | None = None
    ) -> list[DiscardAnswer]:
        wanted = list(task_ids)
        async with self._led(leadership) as connection:
            gone = await connection.fetch(self._sql.statement("remove_dead"), wanted)
            left = await connection.fetch(self._sql.statement("which_dead"), wanted)
        answers = dict.fromkeys(wanted, DiscardAnswer.ABSENT)
        answers |= {row["id"]: DiscardAnswer.HELD for row in left}
        answers |= {row["id"]: DiscardAnswer.DISCARDED for row in gone}
        return [answers[task_id] for task_id in task_ids]

    async def crowded_queues(self, most: int) -> list[str]:
        return [row["queue"] for row in await self._run.fetch("crowded_queues", most)]

    async def surplus_dead(
        self, queues: Sequence[str], most: int, limit: int
    ) -> list[QueuedLetter]:
        async with self._run.transaction("pin_listing_plans") as connection:
            text = self._sql.statement("surplus_dead")
            return [QueuedLetter(*row) for row in await connection.fetch(text, queues, most, limit)]

    async def expired_dead(self, limit: int) -> list[QueuedLetter]:
        return [QueuedLetter(*row) for row in await self._run.fetch("expired_dead", limit)]


@contextmanager
def _named(pattern: str | None) -> Iterator[None]:
    """Let what goes wrong with a pattern name it."""
    try:
        yield
    except asyncpg.InvalidRegularExpressionError as error:
        raise ConfigurationError(
            f"error {shown(pattern)} is not a regular expression: {error.message}"
        ) from error
    except asyncpg.QueryCanceledError as error:
        if pattern is None:
            raise
        raise ConfigurationError(
            f"error {shown(pattern)} could not be looked for within {SEARCH_WITHIN:g} s; "
            "use a simpler pattern, or say more of what is wanted"
        ) from error


def _found(rows: Sequence[asyncpg.Record], limit: int) -> FoundDead:
    ids = [row["id"] for row in rows if row["fits"]]
    if not rows:
        return FoundDead(ids)
    last = rows[-1]
    rest = position_of(last["completed_at"], last["id"])
    if last["is_last"]:
        return FoundDead(ids, rest, last["completed_at"])
    return FoundDead(ids, rest if len(rows) >= limit else None)
