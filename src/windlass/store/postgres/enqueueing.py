"""Enqueue on PostgreSQL."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from datetime import datetime, timedelta
from itertools import repeat
from operator import itemgetter
from typing import Any
from uuid import UUID

import asyncpg
import msgspec

from windlass.model.errors import IdempotencyConflict, StoreUnavailable
from windlass.model.task import Callback, Enqueued, Fence, NewTask, TypeDefaults, Window
from windlass.store.port import Guest, NewTasks, TaskColumns
from windlass.store.postgres.connection import translated
from windlass.store.postgres.guests import guest_of
from windlass.store.postgres.parts import PostgresParts, used

ENQUEUE_CHUNK = 1000  # rows per statement of a large enqueue
# Per statement on a connection of the caller: as jsonb, of 256 MB at most, it may be six times as large.
GUEST_CHUNK_BYTES = 32 << 20
GUEST_CHUNK_TASKS = 10_000
TASK_BYTES = 200  # of a task as JSON, besides its payload, its names and its tags
LOOK_AGAIN_AT_MOST = 5  # times, at what a call did that is being repeated


_NOTHING_ELSE = (None, None, None, None)


class _Overtaken(Exception):  # noqa: N818 - says what happened
    """What was added has ended before: the first call came through while this one waited for it."""


class EnqueueVerbs(PostgresParts):
    """New tasks, and the defaults of their types."""

    async def enqueue(
        self,
        tasks: Sequence[NewTask],
        *,
        fence: Fence | None = None,
        repeated: bool = False,
    ) -> list[Enqueued]:
        if not repeated:
            return await self._enqueue(tasks, fence, repeated)
        for _ in range(LOOK_AGAIN_AT_MOST):
            try:
                return await self._enqueue(tasks, fence, repeated)
            except (asyncpg.UniqueViolationError, _Overtaken):
                continue  # the first call was still under way; now it has ended and can be seen
        raise StoreUnavailable("an enqueue was repeated while its first call was under way")

    async def _enqueue(
        self, tasks: Sequence[NewTask], fence: Fence | None, repeated: bool
    ) -> list[Enqueued]:
        if len(tasks) == 1 and fence is None and not repeated and _is_plain(tasks[0]):
            task = tasks[0]
            kind = (task.type, task.queue, task.priority, task.max_attempts)
            one = (task.id, task.payload, *kind, _seconds(task.retention))
            await self._run.fetch("enqueue_now", *one, confirmed=True)
            return [Enqueued(task.id, created=True)]
        if len(tasks) <= ENQUEUE_CHUNK and not repeated:
            name, arguments = enqueue_statement(tasks, fence, repeated)
            rows = await self._run.fetch(name, *arguments, confirmed=True)
            return _answers(tasks, {} if name == "enqueue_alike" else _found(rows, 0))
        async with self._run.transaction(confirmed=True) as connection:
            await self._reserve_keys(connection, tasks)
            if len(tasks) > ENQUEUE_CHUNK:
                await self._reserve_windows(connection, tasks, repeated)
            known = await self._write(connection, tasks, fence, repeated)
            if repeated:
                added = [task.id for place, task in enumerate(tasks) if place not in known]
                if await connection.fetchval(self._sql.statement("any_ended"), added):
                    raise _Overtaken
        return _answers(tasks, known)

    async def _write(
        self,
        connection: asyncpg.Connection,
        tasks: Sequence[NewTask],
        fence: Fence | None,
        repeated: bool,
    ) -> dict[int, UUID]:
        """Write a large call chunk by chunk; return which tasks were there before, by their place.

        While the server is busy with a chunk, the next one is read: tasks may be made only then.
        """
        known: dict[int, UUID] = {}
        writing: asyncio.Task[dict[int, UUID]] | None = None
        try:
            for start in range(0, len(tasks), ENQUEUE_CHUNK):
                statement = enqueue_statement(tasks[start : start + ENQUEUE_CHUNK], fence, repeated)
                if writing is not None:
                    known |= await writing
                writing = asyncio.create_task(self._write_chunk(connection, start, *statement))
                await asyncio.sleep(0)  # so that it goes out
            if writing is not None:
                known |= await writing
        except BaseException:
            # Perhaps a task that could not be made, or the caller gave up: it is to be rolled back.
            if writing is not None:
                writing.cancel()
                await asyncio.wait([writing])
            raise
        return known

    async def _write_chunk(
        self, connection: asyncpg.Connection, start: int, name: str, arguments: tuple[Any, ...]
    ) -> dict[int, UUID]:
        with counted_from(start), translated(self._options.url):
            rows = await connection.fetch(self._sql.statement(name), *arguments)
        return {} if name == "enqueue_alike" else _found(rows, start)

    def guest(self, connection: Any, *, is_async: bool) -> Guest:
        return guest_of(connection, is_async=is_async)

    async def enqueue_within(
        self, guest: Guest, tasks: Sequence[NewTask], *, fence: Fence | None = None
    ) -> list[Enqueued]:
        if len(tasks) == 1 and fence is None and _is_plain(tasks[0]) and tasks[0].retention is None:
            return [await self._enqueue_plain_within(guest, tasks[0])]
        statement = self._sql.statement("enqueue_within")
        shown = None if fence is None else msgspec.json.encode(fence._asdict()).decode()
        chunks = list(_chunks(tasks))
        by_itself = len(chunks) > 1 and await guest.commits_by_itself()
        answers: list[Enqueued] = []
        async with _in_one_transaction(guest) if by_itself else nullcontext():
            for chunk in chunks:
                with counted_from(len(answers)):
                    rows = await guest.fetch(statement, _as_json(chunk), shown)
                answers += [_answer(task, row[0]) for task, row in zip(chunk, rows, strict=True)]
        return answers

    async def _enqueue_plain_within(self, guest: Guest, task: NewTask) -> Enqueued:
        """Add a task under an id of the server: only one that comes from elsewhere has to be looked for."""
        rows = await guest.fetch(
            self._sql.statement("enqueue_plain_within"),
            *(task.type, task.payload, task.queue, str(task.priority), str(task.max_attempts)),
        )
        return Enqueued(UUID(str(rows[0][0])), created=True)

    async def _reserve_keys(self, connection: asyncpg.Connection, tasks: Sequence[NewTask]) -> None:
        """Take all keys of a large call in one order, or two such calls could deadlock."""
        if isinstance(tasks, NewTasks):
            return
        columns = dict(zip(NewTask._fields, TaskColumns.of(tasks).columns, strict=True))
        ids, types, payloads = columns["id"], columns["type"], columns["payload"]
        keys = columns["idempotency_key"]
        rows = zip(ids, types, payloads, keys, strict=True)
        keyed = sorted((row for row in rows if row[3] is not None), key=itemgetter(1, 3))
        for start in range(0, len(keyed), ENQUEUE_CHUNK):
            chunk = zip(*keyed[start : start + ENQUEUE_CHUNK], strict=True)
            await connection.execute(self._sql.statement("reserve_keys"), *chunk)

    async def _reserve_windows(
        self, connection: asyncpg.Connection, tasks: Sequence[NewTask], repeated: bool
    ) -> None:
        """Take all windows of a large call in one order, each for the first task that has it."""
        if isinstance(tasks, NewTasks):
            return
        windowed = [task for task in tasks if task.window is not None]
        firsts: dict[tuple[bytes, bytes], tuple[str, str, UUID, float]] = {}
        for start in range(0, len(windowed), ENQUEUE_CHUNK):
            chunk = windowed[start : start + ENQUEUE_CHUNK]
            kinds, _, names = _window_columns([task.window for task in chunk])
            payloads = [task.payload for task in chunk]
            rows = await connection.fetch(
                self._sql.statement("window_keys"), kinds, names, payloads
            )
            for task, (key,) in zip(chunk, rows, strict=True):
                seconds = 0.0 if task.window is None else task.window.seconds
                place = task.type.encode(), key.encode()
                firsts.setdefault(place, (task.type, key, task.id, seconds))
        in_order = [firsts[place] for place in sorted(firsts)]
        for start in range(0, len(in_order), ENQUEUE_CHUNK):
            columns = zip(*in_order[start : start + ENQUEUE_CHUNK], strict=True)
            await connection.execute(self._sql.statement("reserve_windows"), *columns, repeated)

    async def type_defaults(self, name: str) -> TypeDefaults | None:
        rows = await self._run.fetch("read_type", name)
        if not rows:
            return None
        name, queue, priority, max_attempts, seconds, limit_by = rows[0]
        kept = None if seconds is None else timedelta(seconds=seconds)
        return TypeDefaults(name, queue, priority, max_attempts, kept, limit_by=limit_by)

    async def register_types(self, types: Sequence[TypeDefaults]) -> None:
        await self._run.execute(
            "register_types",
            [one.name for one in types],
            [one.queue for one in types],
            [one.priority for one in types],
            [one.max_attempts for one in types],
            [_seconds(one.retention) for one in types],
            self._options.retention.ended,
            self._options.retention.keys,
            self._options.max_payload_bytes,
            [_callback(one.on_success) for one in types],
            [_callback(one.on_failure) for one in types],
            [one.max_age for one in types],
            [one.limit_by for one in types],
        )


def enqueue_statement(
    tasks: Sequence[NewTask], fence: Fence | None, repeated: bool
) -> tuple[str, tuple[Any, ...]]:
    """The statement that adds these tasks, with its arguments."""
    ids, types, payloads, *others = TaskColumns.of(tasks).columns
    queues, priorities, max_attempts, delays, times, keys, tags, retentions, *special = others
    expiries, ordering_keys, keeps_keys, limit_bys, windows = special
    if tasks and fence is None and not repeated and _are_alike(types, *others):
        first = tasks[0]
        if _is_plain(first):
            kind = (first.type, first.queue, first.priority, first.max_attempts)
            return "enqueue_alike", (ids, payloads, *kind, _seconds(first.retention))
    token, holder, generation = fence or (None, None, None)
    arguments = (
        ids,
        types,
        queues,
        priorities,
        payloads,
        max_attempts,
        used([delay or None for delay in delays]),
        used(times),
        used(keys),
        used([_json_list(few) if few else None for few in tags]),
        used([_seconds(retention) for retention in retentions]),
        token,
        holder,
        generation,
        repeated,
        False,
    )
    gates = (used(ordering_keys), used(limit_bys))
    has_windows = used(windows) is not None
    if used(expiries) is None and gates == (None, None) and not has_windows:
        return "enqueue_tasks", arguments
    by_time = [one if isinstance(one, datetime) else None for one in expiries]
    after = [None if isinstance(one, datetime) else one for one in expiries]
    if gates == (None, None) and not has_windows:
        return "enqueue_expiring", (*arguments, by_time, after)
    gated = (*arguments, used(by_time), used(after), gates[0], keeps_keys, gates[1])
    if not has_windows:
        return "enqueue_gated", gated
    kinds, lengths, names = _window_columns(windows)
    return "enqueue_windowed", (*gated, kinds, names, lengths)


def _is_plain(task: NewTask) -> bool:
    """Whether it is due now, and nothing else has to be looked at or written for it."""
    others = (task.idempotency_key, task.ordering_key, task.limit_by, task.window)
    special = (task.delay, task.at, task.tags, task.expires, *others)
    return special == (0, None, (), None, *_NOTHING_ELSE)


def _window_columns(windows: Sequence[Window | None]) -> list[list[Any]]:
    """Kinds, seconds and keys, with nothing for tasks that have no window."""
    rows = [window or (None, None, None) for window in windows]
    return [list(column) for column in zip(*rows, strict=True)]


def _are_alike(*columns: list[Any]) -> bool:
    return all(column.count(column[0]) == len(column) for column in columns)


def _found(rows: list[asyncpg.Record], start: int) -> dict[int, UUID]:
    """The tasks that were there before, by their place in the call."""
    return {start + place: task_id for place, task_id, _ in rows}


def _answer(task: NewTask, found: Any) -> Enqueued:
    """The answer with an id as whatever driver has read it."""
    if found == task.id:
        return Enqueued(task.id, created=True)
    task_id = UUID(str(found))
    return Enqueued(task_id, created=task_id == task.id)


def _answers(tasks: Sequence[NewTask], known: dict[int, UUID]) -> list[Enqueued]:
    ids, *_ = TaskColumns.of(tasks).columns
    answers = list(map(Enqueued, ids, repeat(True)))
    for place, task_id in known.items():
        # A repeated call finds the task that it created itself.
        answers[place] = Enqueued(task_id, created=answers[place].id == task_id)
    return answers


@contextmanager
def counted_from(start: int) -> Iterator[None]:
    """Count the index of a conflict from the beginning of the call, not of its chunk."""
    try:
        yield
    except IdempotencyConflict as conflict:
        conflict.index += start
        raise


def _chunks(tasks: Sequence[NewTask]) -> Iterator[Sequence[NewTask]]:
    """Parts of a call that are small enough for one value of jsonb."""
    start, size = 0, 0
    for place, task in enumerate(tasks):
        added = _json_bytes(task)
        is_full = size + added > GUEST_CHUNK_BYTES or place - start == GUEST_CHUNK_TASKS
        if is_full and place > start:
            yield tasks[start:place]
            start, size = place, 0
        size += added
    yield tasks[start:]


def _json_bytes(task: NewTask) -> int:
    keys: tuple[str, ...] = (
        task.idempotency_key or "",
        task.ordering_key or "",
        task.limit_by or "",
    )
    if task.window is not None and task.window.key is not None:
        keys = (*keys, task.window.key)
    texts = (task.payload, task.type, task.queue, *keys, *task.tags)
    # With two quotes and a comma each.
    sizes = [3 + (len(text) if text.isascii() else len(text.encode())) for text in texts]
    return TASK_BYTES + sum(sizes)


@asynccontextmanager
async def _in_one_transaction(guest: Guest) -> AsyncIterator[None]:
    """Several statements on a connection on which each would be a transaction of its own."""
    try:
        await guest.fetch("BEGIN")
    except BaseException as error:
        if not isinstance(error, Exception):  # whoever gave up does not know whether it has begun
            await _roll_back(guest)
        raise
    try:
        yield
        await guest.fetch("COMMIT")
    except BaseException:
        await _roll_back(guest)
        raise


async def _roll_back(guest: Guest) -> None:
    """Take back what was done; where that cannot be, the connection is of no use any more.

    Whoever used it on would write into a transaction that nobody commits.
    """
    try:
        await guest.fetch("ROLLBACK")
    except Exception:  # noqa: BLE001 - what was raised before goes on
        await guest.discard()
    except BaseException:
        await guest.discard()
        raise


class TaskItem(msgspec.Struct, omit_defaults=True):
    """A task as `windlass.enqueue_many` reads it; what is null is left out."""

    id: UUID
    type: str
    payload: msgspec.Raw
    queue: str
    priority: int
    max_attempts: int
    delay: float | None = None
    at: datetime | None = None
    expires: datetime | float | None = None
    idempotency_key: str | None = None
    ordering_key: str | None = None
    on_dead: str | None = None
    limit_by: msgspec.Raw | None = None
    tags: Sequence[str] | None = None
    retention: int | None = None
    unique_for: float | None = None
    throttle: float | None = None
    debounce: float | None = None
    dedupe_key: str | None = None


def _as_json(tasks: Sequence[NewTask]) -> str:
    return msgspec.json.encode([task_item(task) for task in tasks]).decode()


def task_item(task: NewTask) -> TaskItem:
    """A task as SQL takes it."""
    return TaskItem(
        id=task.id,
        type=task.type,
        payload=msgspec.Raw(task.payload.encode()),
        queue=task.queue,
        priority=task.priority,
        max_attempts=task.max_attempts,
        delay=task.delay or None,
        at=task.at,
        expires=task.expires,
        idempotency_key=task.idempotency_key,
        ordering_key=task.ordering_key,
        on_dead="hold" if task.keeps_key else None,
        limit_by=None if task.limit_by is None else msgspec.Raw(task.limit_by.encode()),
        tags=task.tags or None,
        retention=_seconds(task.retention),
        **_window_item(task.window),
    )


def _window_item(window: Window | None) -> dict[str, Any]:
    return {} if window is None else {str(window.kind): window.seconds, "dedupe_key": window.key}


def _callback(callback: Callback | None) -> str | None:
    """What is enqueued at the end of a task, as `windlass.call_back` reads it."""
    if callback is None:
        return None
    call = msgspec.json.decode(msgspec.json.encode(task_item(callback.task)))
    del call["id"]
    return msgspec.json.encode({"call": call, "takes": callback.takes}).decode()


def _seconds(duration: timedelta | None) -> int | None:
    return None if duration is None else int(duration.total_seconds())


def _json_list(values: Sequence[str]) -> str:
    return msgspec.json.encode(values).decode()
