"""Read from PostgreSQL."""

from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

from windlass.model.errors import TaskNotFound
from windlass.model.task import (
    Ended,
    QueueRecord,
    TaskFilter,
    TaskPage,
    TaskRecord,
    TaskState,
    TypeRecord,
    WorkerRecord,
)
from windlass.store.postgres.listing import Listing
from windlass.store.postgres.parts import PostgresParts
from windlass.store.postgres.records import task_record, worker_record


class ReadVerbs(PostgresParts):
    """Tasks, queues and workers as records."""

    async def get(self, task_id: UUID) -> TaskRecord:
        rows = await self._run.fetch("read_task", task_id)
        if not rows:
            raise TaskNotFound.of(task_id)
        return task_record(rows[0])

    async def ended(self, task_ids: Sequence[UUID]) -> tuple[list[Ended], list[UUID]]:
        rows = await self._run.fetch("read_ended", list(task_ids))
        unknown = [row["id"] for row in rows if row["status"] is None]
        ended = [
            Ended(
                row["id"],
                TaskState(row["status"]),
                row["result"],
                row["last_error"],
                row["error_class"],
            )
            for row in rows
            if row["status"] is not None
        ]
        return ended, unknown

    async def tasks(self, wanted: TaskFilter) -> TaskPage:
        async with self._run.transaction("begin_listing") as connection:
            return await Listing(self._sql, connection, wanted).page()

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

    async def types(self) -> list[TypeRecord]:
        return [TypeRecord(*row) for row in await self._run.fetch("list_types")]

    async def workers(self) -> list[WorkerRecord]:
        return [worker_record(row) for row in await self._run.fetch("list_workers")]

    async def has_work(self, types: Sequence[str], queues: Sequence[str] | None) -> bool:
        return bool(await self._run.fetchval("has_work", list(types), queues and list(queues)))
