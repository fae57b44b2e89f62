"""Read from PostgreSQL."""

from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

from windlass.model.errors import TaskNotFound
from windlass.model.task import Ended, QueueRecord, TaskFilter, TaskRecord, TaskState, WorkerRecord
from windlass.store.postgres.parts import PostgresParts
from windlass.store.postgres.records import task_record

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
