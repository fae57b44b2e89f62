"""The PostgreSQL adapter: one method is one transaction, nearly always one statement file."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import msgspec

from windlass.model.errors import (
    ConfigurationError,
    IdempotencyConflict,
    StoreUnavailable,
    TaskNotFound,
    WrongState,
)
from windlass.model.task import (
    Answer,
    CancelAnswer,
    Change,
    Claim,
    ClaimAnswer,
    ClaimedTask,
    ClaimRequest,
    Ended,
    Enqueued,
    Fence,
    Leadership,
    NewTask,
    Pulse,
    PulseAnswer,
    QueueRecord,
    Rescued,
    Retained,
    Retention,
    Settlement,
    Started,
    TaskFilter,
    TaskRecord,
    TaskState,
    TypeDefaults,
    WorkerInfo,
    WorkerRecord,
)
from windlass.store.port import Store
from windlass.store.postgres.connection import connect, create_pool, translated
from windlass.store.postgres.cursors import Key, LaneCursors, LaneRead, Snapshot
from windlass.store.postgres.history import History
from windlass.store.postgres.listener import Listener
from windlass.store.postgres.records import task_record
from windlass.store.postgres.schema import Schema
from windlass.store.postgres.statements import Statements
from windlass.store.sqlfiles import SqlFiles

PACKAGE = "windlass.store.postgres"
ENQUEUE_CHUNK = 2000  # rows per statement of a large enqueue
LOOK_BEHIND_EVERY = 5.0  # seconds; and never more than a twentieth of the time
LOOK_AGAIN_AFTER = 0.2
RETIRE_LANES_AFTER = timedelta(hours=1)  # an empty lane; in use again it is listed anew


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresOptions:
    """Where the database is and how it is used."""

    url: str
    direct_url: str | None = None  # around a pooler, for LISTEN and for detaching partitions
    schema: str = "windlass"
    pool_size: int = 8
    auto_migrate: bool = True
    pooler: bool = False  # the URL leads through a pooler in transaction mode
    patience: timedelta = timedelta(seconds=10)  # how long a settlement waits for a lock
    retention: Retention = field(default_factory=Retention)


class PostgresStore(Store):
    """Tasks in PostgreSQL. Belongs to the event loop that opened it."""

    def __init__(self, options: PostgresOptions) -> None:
        self._options = options
        self._sql = SqlFiles(PACKAGE, options.schema)
        self._direct = options.direct_url or options.url
        self._direct_is_pooler = options.pooler and options.direct_url is None
        self._schema = Schema(self._direct, self._sql, pooler=self._direct_is_pooler)
        self._run = Statements(self._sql)
        self._history = History(self._sql, self._run, options.retention)
        self._cursors = {False: LaneCursors(), True: LaneCursors()}
        self._looking_behind: asyncio.Task[None] | None = None

    @property
    def schema(self) -> Schema:
        """The schema, for whoever migrates or checks it."""
        return self._schema

    async def open(self) -> None:
        if self._run.pool is not None:
            return
        if self._options.auto_migrate:
            await self._schema.migrate()
        elif pending := await self._schema.pending():
            raise ConfigurationError(
                f"the schema '{self._sql.schema}' lacks migration "
                f"{pending[0].number:04d}_{pending[0].name}; run: windlass migrate"
            )
        self._run.pool = await create_pool(
            self._options.url,
            size=self._options.pool_size,
            pooler=self._options.pooler,
            learn_types=self._sql.statement("learn_types"),
        )

    async def close(self) -> None:
        if self._looking_behind is not None:
            self._looking_behind.cancel()
            await asyncio.gather(self._looking_behind, return_exceptions=True)
            self._looking_behind = None
        pool, self._run.pool = self._run.pool, None
        if pool is not None:
            try:
                await asyncio.wait_for(pool.close(), 5)
            except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                pool.terminate()

    def beside(self) -> "PostgresStore":
        return PostgresStore(replace(self._options, pool_size=1, auto_migrate=False))

    # Enqueue

    async def enqueue(
        self,
        tasks: Sequence[NewTask],
        *,
        fence: Fence | None = None,
        repeated: bool = False,
    ) -> list[Enqueued]:
        try:
            return await self._enqueue(tasks, fence, repeated)
        except asyncpg.UniqueViolationError:
            if not repeated:
                raise
            # The first call was still under way; now it has ended and can be seen.
            return await self._enqueue(tasks, fence, repeated)

    async def _enqueue(
        self, tasks: Sequence[NewTask], fence: Fence | None, repeated: bool
    ) -> list[Enqueued]:
        answers = [Enqueued(task.id, created=True) for task in tasks]
        if len(tasks) <= ENQUEUE_CHUNK:
            rows = await self._run.fetch(
                "enqueue_tasks", *_enqueue_arguments(tasks, fence, repeated)
            )
            _mark_known(answers, rows, 0)
            return answers
        text = self._sql.statement("enqueue_tasks")
        async with self._run.transaction() as connection:
            await self._reserve_keys(connection, tasks)
            for start in range(0, len(tasks), ENQUEUE_CHUNK):
                chunk = tasks[start : start + ENQUEUE_CHUNK]
                arguments = _enqueue_arguments(chunk, fence, repeated)
                with _counted_from(start):
                    _mark_known(answers, await connection.fetch(text, *arguments), start)
        return answers

    async def _reserve_keys(self, connection: asyncpg.Connection, tasks: Sequence[NewTask]) -> None:
        """Take all keys of a large call in one order, or two such calls could deadlock."""
        keyed = sorted(
            (task for task in tasks if task.idempotency_key is not None),
            key=lambda task: (task.type, task.idempotency_key),
        )
        for start in range(0, len(keyed), ENQUEUE_CHUNK):
            chunk = keyed[start : start + ENQUEUE_CHUNK]
            await connection.execute(
                self._sql.statement("reserve_keys"),
                [task.id for task in chunk],
                [task.type for task in chunk],
                [task.payload for task in chunk],
                [task.idempotency_key for task in chunk],
            )

    async def type_defaults(self, name: str) -> TypeDefaults | None:
        rows = await self._run.fetch("read_type", name)
        if not rows:
            return None
        name, queue, priority, max_attempts, seconds = rows[0]
        kept = None if seconds is None else timedelta(seconds=seconds)
        return TypeDefaults(name, queue, priority, max_attempts, kept)

    async def register_types(self, types: Sequence[TypeDefaults]) -> None:
        await self._run.execute(
            "register_types",
            [one.name for one in types],
            [one.queue for one in types],
            [one.priority for one in types],
            [one.max_attempts for one in types],
            [_seconds(one.retention) for one in types],
        )

    # Claim

    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        cursors = self._cursors[request.alone]
        bounds, late = cursors.begin()
        token = uuid4()
        try:
            rows = await self._run.fetch(
                "claim_tasks",
                request.worker_id,
                token,
                request.types,
                request.queues,
                request.limit,
                request.lease,
                request.ageing,
                request.alone,
                list(bounds),
                [key.x for key in bounds.values()],
                [key.n for key in bounds.values()],
                late,
            )
        except BaseException:
            # Whether it was carried out is not known: read every lane from its beginning.
            self._cursors[request.alone] = LaneCursors()
            raise
        report = rows[0]
        cursors.advance(
            Snapshot.parse(report["snapshot"]),
            [
                LaneRead(lane, None if x is None else Key(x, n), to_end)
                for lane, x, n, to_end in zip(
                    report["read_lanes"],
                    report["last_x"],
                    report["last_n"],
                    report["read_to_end"],
                    strict=True,
                )
            ],
            asked_late=late,
            now=time.monotonic(),
        )
        self._look_behind_soon()
        claim = None
        if len(rows) > 1:
            claimed = tuple(ClaimedTask(*row[:9]) for row in rows[1:])
            claim = Claim(token, report["fence"], claimed, request.alone)
        return ClaimAnswer(claim, report["alone_waiting"], report["due_in"])

    def _look_behind_soon(self) -> None:
        if self._looking_behind is None or self._looking_behind.done():
            self._looking_behind = asyncio.create_task(
                self._look_behind(), name="windlass-look-behind"
            )

    async def _look_behind(self) -> None:
        """Find rows that a claim skipped because they were held, and that were then let go."""
        pause = LOOK_BEHIND_EVERY
        while True:
            await asyncio.sleep(pause)
            began = time.monotonic()
            again = False
            try:
                for cursors in self._cursors.values():
                    again |= await self._look_behind_once(cursors)
            except StoreUnavailable:
                return  # the next claim starts it anew
            took = time.monotonic() - began
            pause = LOOK_AGAIN_AFTER if again else max(LOOK_BEHIND_EVERY, 20 * took)

    async def _look_behind_once(self, cursors: LaneCursors) -> bool:
        bounds = cursors.bounds
        if not bounds:
            return False
        rows = await self._run.fetch(
            "look_behind",
            list(bounds),
            [key.x for key in bounds.values()],
            [key.n for key in bounds.values()],
        )
        return cursors.lower({row["lane"]: Key(row["x"], row["n"]) for row in rows})

    async def start(self, started: Sequence[Started]) -> frozenset[UUID]:
        if not started:
            return frozenset()
        rows = await self._run.fetch(
            "start_tasks", *(list(column) for column in zip(*started, strict=True))
        )
        return frozenset(row["task_id"] for row in rows)

    async def requested_cancellations(self, task_ids: Sequence[UUID]) -> dict[UUID, str]:
        rows = await self._run.fetch("read_cancel_requests", list(task_ids))
        return {row["task_id"]: row["reason"] for row in rows}

    # Settle

    async def settle(self, settlements: Sequence[Settlement]) -> list[Answer]:
        answers = [Answer.APPLIED] * len(settlements)
        if not settlements:
            return answers
        # Sorted, so that two settlements that meet take their tasks in the same order.
        order = sorted(range(len(settlements)), key=lambda place: settlements[place].task_id)
        tokens, ids, generations, outcomes, after, *rest = (
            list(column) for column in zip(*(settlements[place] for place in order), strict=True)
        )
        results, delays, errors, reported = rest
        kept = self._options.retention
        arguments = (
            tokens,
            ids,
            generations,
            outcomes,
            after,
            _used(results),
            delays if any(delays) else None,
            _used(errors),
            reported if any(reported) else None,
            kept.ended,
            kept.dead,
            kept.keys,
            self._options.patience,
        )
        rows = await self._history.with_places(
            [one.task_id for one in settlements],
            lambda: self._run.fetch("settle_tasks", *arguments),
        )
        for place, before in rows:
            answers[order[place]] = Answer.ALREADY if before else Answer.LOST
        return answers

    # Pulse

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
        )

    async def pulse(self, pulse: Pulse) -> PulseAnswer:
        rows = await self._run.fetch(
            "pulse", pulse.worker_id, list(pulse.tokens), pulse.lease, pulse.running, pulse.idle
        )
        return PulseAnswer(frozenset(rows[0]["kept"]), rows[0]["registered"])

    async def set_idle(self, worker_id: UUID, idle: bool) -> None:
        await self._run.execute("set_idle", worker_id, idle)

    async def deregister(self, worker_id: UUID) -> None:
        await self._run.execute("deregister_worker", worker_id)

    # Operate

    async def cancel(self, task_id: UUID, reason: str) -> CancelAnswer:
        kept = self._options.retention
        answer = await self._history.with_places(
            [task_id],
            lambda: self._run.fetchval("cancel_task", task_id, reason, kept.ended, kept.keys),
        )
        if answer is None:
            raise _not_found(task_id)
        return CancelAnswer(answer)

    async def change(self, task_id: UUID, change: Change) -> None:
        done = await self._run.fetchval(
            "change_task", task_id, change.priority, change.queue, change.at, change.delay
        )
        if not done:
            raise await self._wrong_state(task_id, "only a waiting task can be changed")

    async def retry(self, task_id: UUID) -> None:
        if not await self._run.fetchval("retry_task", task_id):
            raise await self._wrong_state(
                task_id, "only a failed, dead or cancelled task can be retried"
            )

    async def pause(self, queue: str) -> None:
        await self._run.execute("pause_queue", queue)

    async def resume(self, queue: str) -> None:
        await self._run.execute("resume_queue", queue)

    async def _wrong_state(self, task_id: UUID, rule: str) -> Exception:
        state = await self._run.fetchval("read_state", task_id)
        if state is None:
            return _not_found(task_id)
        return WrongState(f"task {task_id} is {state}: {rule}")

    # Read

    async def get(self, task_id: UUID) -> TaskRecord:
        rows = await self._run.fetch("read_task", task_id)
        if not rows:
            raise _not_found(task_id)
        return task_record(rows[0])

    async def ended(self, task_ids: Sequence[UUID]) -> tuple[list[Ended], list[UUID]]:
        rows = await self._run.fetch("read_ended", list(task_ids))
        unknown = [row["id"] for row in rows if row["status"] is None]
        ended = [
            Ended(row["id"], TaskState(row["status"]), row["result"], row["last_error"])
            for row in rows
            if row["status"] is not None
        ]
        return ended, unknown

    async def tasks(self, wanted: TaskFilter) -> list[TaskRecord]:
        found: list[TaskRecord] = []
        for status in wanted.statuses or tuple(_PLACES):
            if status is TaskState.BLOCKED:
                continue
            rows = await self._run.fetch(
                _PLACES[status],
                wanted.type,
                wanted.queue,
                wanted.tag,
                wanted.created_from,
                wanted.created_until,
                wanted.before,
                wanted.limit,
                status.value,
            )
            found += [task_record(row) for row in rows]
        found.sort(key=lambda record: record.id, reverse=True)
        return found[: wanted.limit]

    async def queues(self) -> list[QueueRecord]:
        queues: dict[str, QueueRecord] = {}
        for row in await self._run.fetch("list_queues"):
            known = queues.get(row["name"]) or QueueRecord(row["name"], row["paused"], {}, None)
            if row["status"] is not None:
                known.counts[TaskState(row["status"])] = row["tasks"]
            queues[known.name] = replace(
                known, oldest_ready_at=row["oldest"] or known.oldest_ready_at
            )
        return [queues[name] for name in sorted(queues)]

    async def workers(self) -> list[WorkerRecord]:
        rows = await self._run.fetch("list_workers")
        return [
            WorkerRecord(
                id=str(row["id"]),
                host=row["host"],
                pid=row["pid"],
                version=row["version"],
                capacity=row["capacity"],
                types=tuple(row["types"]),
                queues=None if row["queues"] is None else tuple(row["queues"]),
                started_at=row["started_at"],
                heartbeat_at=row["heartbeat_at"],
                running=row["running"],
                idle=row["idle"],
                leader=row["leader"],
            )
            for row in rows
        ]

    async def has_work(self, types: Sequence[str], queues: Sequence[str] | None) -> bool:
        return bool(await self._run.fetchval("has_work", list(types), queues and list(queues)))

    # Lead

    async def lead(
        self,
        candidate: UUID,
        *,
        current: Leadership | None,
        term: timedelta,
    ) -> Leadership | None:
        won = await self._run.fetchval("lead", candidate, current and current.term, term)
        return None if won is None else Leadership(candidate, won)

    async def resign(self, leadership: Leadership) -> None:
        await self._run.execute("resign", leadership.holder, leadership.term)

    # Chores

    async def promote(
        self, limit: int, *, leadership: Leadership | None = None, just_due: bool = False
    ) -> int:
        async with self._led(leadership) as connection:
            text = self._sql.statement("promote_due")
            return int(await connection.fetchval(text, limit, not just_due))

    async def rescue(self, limit: int, *, leadership: Leadership | None = None) -> Rescued:
        kept = self._options.retention

        async def rescue_once() -> Rescued:
            async with self._led(leadership) as connection:
                text = self._sql.statement("rescue_claims")
                row = await connection.fetchrow(text, limit, kept.dead, kept.ended, kept.keys)
                return Rescued(*row)

        return await self._history.with_places(None, rescue_once)

    async def remove_dead_workers(self, *, leadership: Leadership) -> list[UUID]:
        async with self._led(leadership) as connection:
            rows = await connection.fetch(self._sql.statement("remove_dead_workers"))
            return [row["id"] for row in rows]

    async def tidy(self, *, leadership: Leadership) -> int:
        async with self._led(leadership) as connection:
            came_back = await connection.fetch(self._sql.statement("list_returned_cancellations"))
            dropped = await connection.execute(self._sql.statement("drop_answered_cancellations"))
            retired = await connection.execute(
                self._sql.statement("retire_lanes"), RETIRE_LANES_AFTER
            )
            listed: int = await connection.fetchval(self._sql.statement("relist_busy_lanes"))
            doubles = await connection.execute(self._sql.statement("drop_double_lanes"))
            late = await connection.execute(self._sql.statement("drop_overtaken_reports"))
        for task_id, reason in came_back:
            await self.cancel(task_id, reason)
        return len(came_back) + listed + sum(map(_row_count, (dropped, retired, doubles, late)))

    async def prepare_history(self, *, leadership: Leadership) -> int:
        async with self._led(leadership):
            pass
        return await self._history.prepare()

    async def retain(self, *, leadership: Leadership) -> Retained:
        async with self._led(leadership) as connection:
            dead = await connection.fetchval(self._sql.statement("discard_old_dead"), 1000)
        # Detaching cannot be part of a transaction, so it cannot be fenced: it is harmless twice.
        direct = await connect(self._direct, pooler=self._direct_is_pooler)
        try:
            with translated():
                partitions, waiting = await self._history.retain(
                    direct, behind_pooler=self._direct_is_pooler
                )
        finally:
            await direct.close()
        return Retained(partitions, dead, tuple(waiting))

    # Wake

    def listen(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        listener = Listener(self._direct, self._sql, pooler=self._direct_is_pooler)
        return listener.listening(wake)

    @asynccontextmanager
    async def _led(self, leadership: Leadership | None) -> AsyncIterator[asyncpg.Connection]:
        """A transaction that nobody else can be elected during, if a leadership is shown."""
        async with self._run.transaction() as connection:
            if leadership is not None:
                text = self._sql.statement("assert_leader")
                await connection.execute(text, leadership.holder, leadership.term)
            yield connection


_PLACES = {
    TaskState.PENDING: "list_pending",
    TaskState.SCHEDULED: "list_scheduled",
    TaskState.CLAIMED: "list_claimed",
    TaskState.RUNNING: "list_claimed",
    TaskState.COMPLETED: "list_history",
    TaskState.CANCELLED: "list_history",
    TaskState.FAILED: "list_dead",
    TaskState.DEAD: "list_dead",
}


def _enqueue_arguments(
    tasks: Sequence[NewTask], fence: Fence | None, repeated: bool
) -> tuple[Any, ...]:
    token, holder, generation = fence or (None, None, None)
    return (
        [task.id for task in tasks],
        [task.type for task in tasks],
        [task.queue for task in tasks],
        [task.priority for task in tasks],
        [task.payload for task in tasks],
        [task.max_attempts for task in tasks],
        _used([task.delay or None for task in tasks]),
        _used([task.at for task in tasks]),
        _used([task.idempotency_key for task in tasks]),
        _used([_json_list(task.tags) if task.tags else None for task in tasks]),
        _used([_seconds(task.retention) for task in tasks]),
        token,
        holder,
        generation,
        repeated,
        False,
    )


def _used(column: list[Any]) -> list[Any] | None:
    """A column that no task uses is not sent."""
    return column if any(value is not None for value in column) else None


def _mark_known(answers: list[Enqueued], rows: list[asyncpg.Record], start: int) -> None:
    for place, task_id in rows:
        # A repeated call finds the task that it created itself.
        mine = answers[start + place].id == task_id
        answers[start + place] = Enqueued(task_id, created=mine)


@contextmanager
def _counted_from(start: int) -> Iterator[None]:
    try:
        with translated():
            yield
    except IdempotencyConflict as conflict:
        conflict.index += start
        raise


def _seconds(duration: timedelta | None) -> int | None:
    return None if duration is None else int(duration.total_seconds())


def _json_list(values: Sequence[str]) -> str:
    return msgspec.json.encode(values).decode()


def _not_found(task_id: UUID) -> TaskNotFound:
    return TaskNotFound(f"task {task_id} is not known: it never existed, or its retention is over")


def _row_count(status: str) -> int:
    return int(status.rsplit(" ", 1)[1])
