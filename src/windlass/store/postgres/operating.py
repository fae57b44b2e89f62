"""Operate on PostgreSQL: cancel, change, retry, pause."""

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from windlass.model.errors import StoreBusy, TaskNotFound, WrongState
from windlass.model.task import CancelAnswer, Change
from windlass.store.postgres.parts import PostgresParts


class OperateVerbs(PostgresParts):
    """What people do to tasks and queues."""

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

    async def bury_retries(self, type: str, limit: int) -> int:  # noqa: A002
        kept = self._options.retention
        return int(await self._run.fetchval("bury_retries", type, limit, kept.dead, kept.keys))

    async def allow_retries(self, type: str) -> bool:  # noqa: A002
        return bool(await self._run.fetchval("allow_retries", type))

    async def pause(self, queue: str) -> None:
        await self._run.execute("pause_queue", queue)

    async def resume(self, queue: str) -> bool:
        return bool(await self._run.fetchval("resume_queue", queue))

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
        raise StoreBusy(
            f"task {task_id} is held by a transaction that has not ended; try again when it has"
        ) from error
