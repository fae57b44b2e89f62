"""Operate on PostgreSQL: cancel, change, retry, pause, and orders to workers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from uuid import UUID

from windlass.model.errors import StoreBusy, TaskNotFound, WrongState
from windlass.model.task import Buried, CancelAnswer, Change, WorkerOrder
from windlass.store.postgres.parts import PostgresParts, named_if_held

LOOKS = 10_000  # waiting tasks that one statement passes over

_FIRST_LANE = -(2**63)  # the lowest there can be
_FIRST_TASK = "00000000-0000-0000-0000-000000000000"


class OperateVerbs(PostgresParts):
    """What people do to tasks, queues and workers."""

    async def cancel(self, task_id: UUID, reason: str) -> CancelAnswer:
        kept = self._options.retention
        with _held(task_id):
            answer = await self._history.with_places(
                [task_id],
                lambda: self._run.fetchval("cancel_task", task_id, reason, kept.ended, kept.keys),
            )
        if answer is None:
            raise TaskNotFound.of(task_id)
        return CancelAnswer(answer)

    async def cancel_many(self, task_ids: Sequence[UUID], reason: str) -> list[CancelAnswer]:
        kept = self._options.retention
        wanted = sorted(set(task_ids))
        rows = await self._history.with_places(
            wanted,
            lambda: self._run.fetch("cancel_tasks", wanted, reason, kept.ended, kept.keys),
        )
        answers = {row["task_id"]: CancelAnswer(row["answer"] or "absent") for row in rows}
        return [answers[task_id] for task_id in task_ids]

    async def change(self, task_id: UUID, change: Change) -> None:
        with _held(task_id):
            done = await self._run.fetchval(
                "change_task", task_id, change.priority, change.queue, change.at, change.delay
            )
        if not done:
            raise await self._wrong_state(task_id, "only a waiting task can be changed")

    async def retry(self, task_id: UUID) -> None:
        with _held(task_id):
            is_reopened = await self._run.fetchval("retry_task", task_id)
        if not is_reopened:
            raise await self._wrong_state(
                task_id, "only a failed, dead or cancelled task can be retried"
            )

    async def stop_retries(self, type: str, reason: str) -> None:  # noqa: A002
        await self._run.execute("stop_retries", type, reason)

    async def bury_scheduled(self, type: str, limit: int, *, after: str | None = None) -> Buried:  # noqa: A002
        lane, task_id = (_FIRST_LANE, _FIRST_TASK) if after is None else after.split(":")
        return await self._bury("bury_scheduled", type, int(lane), UUID(task_id), limit=limit)

    async def bury_ready(self, type: str, limit: int, *, after: str | None = None) -> Buried:  # noqa: A002
        position = (_FIRST_LANE, 0, 0) if after is None else map(int, after.split(":"))
        return await self._bury("bury_ready", type, *position, limit=limit)

    async def _bury(self, statement: str, *where: object, limit: int) -> Buried:
        kept = self._options.retention
        (row,) = await self._run.fetch(statement, *where, LOOKS, limit, kept.dead, kept.keys)
        buried, *rest = row
        return Buried(buried, None if rest[0] is None else ":".join(map(str, rest)))

    async def allow_retries(self, type: str) -> bool:  # noqa: A002
        return bool(await self._run.fetchval("allow_retries", type))

    async def pause(self, queue: str) -> None:
        with named_if_held(f"queue '{queue}'"):
            await self._run.execute("pause_queue", queue)

    async def resume(self, queue: str) -> bool:
        with named_if_held(f"queue '{queue}'"):
            return bool(await self._run.fetchval("resume_queue", queue))

    async def order_workers(
        self, worker_ids: Sequence[UUID], order: WorkerOrder
    ) -> frozenset[UUID]:
        try:
            rows = await self._run.fetch("order_workers", list(worker_ids), order)
        except StoreBusy as error:
            raise StoreBusy(
                "a worker is held by a transaction that has not ended, and none was asked; "
                "try again when it has"
            ) from error
        return frozenset(row["id"] for row in rows)

    async def _wrong_state(self, task_id: UUID, rule: str) -> Exception:
        state = await self._run.fetchval("read_state", task_id)
        if state is None:
            return TaskNotFound.of(task_id)
        return WrongState(f"task {task_id} is {state}: {rule}")


@contextmanager
def _held(task_id: UUID) -> Iterator[None]:
    """Name the task that somebody's transaction holds."""
    try:
        yield
    except StoreBusy as error:
        raise StoreBusy.of(task_id) from error
