"""Rows become the records that people see."""

from datetime import datetime
from typing import Any

import asyncpg
import msgspec

from windlass.model.cancellation import cancelled_by
from windlass.model.task import TaskRecord, TaskState, WorkerRecord


def task_record(row: asyncpg.Record) -> TaskRecord:
    """Build the record of one task from a row of `read_task`, `read_dead` or of a listing."""
    errors = tuple(_json(row["errors"]) or ())
    ancestor = row.get("replay_of")  # a listing asks for that by itself
    updated_at = row["updated_at"]
    if errors:
        updated_at = max(updated_at, datetime.fromisoformat(errors[-1]["ended_at"]))
    return TaskRecord(
        id=str(row["id"]),
        type=row["type"],
        queue=row["queue"],
        payload=_json(row["payload"]),
        status=TaskState(row["status"]),
        priority=row["priority"],
        created_at=row["created_at"],
        scheduled_for=row["scheduled_for"],
        updated_at=updated_at,
        attempts=row["attempts"],
        max_attempts=row["max_attempts"],
        generation=row["generation"],
        idempotency_key=row["idempotency_key"],
        worker_id=None if row["worker_id"] is None else str(row["worker_id"]),
        claimed_at=row["claimed_at"],
        started_at=row["started_at"],
        completed_at=row["completed_at"],
        last_error=row["last_error"],
        result=_json(row["result"]),
        tags=tuple(row["tags"] or ()),
        errors=errors,
        replay_of=None if ancestor is None else str(ancestor),
        cancelled_by=cancelled_by(row["status"], row["last_error"]),
    )


def worker_record(row: asyncpg.Record) -> WorkerRecord:
    """Build the record of one worker from a row of a list of them."""
    return WorkerRecord(
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
        breakers=msgspec.json.decode(row["breakers"] or "{}", type=dict[str, str]),
        paused_at=row["paused_at"],
        drained_at=row["drained_at"],
        full_queues=tuple(row["full_queues"] or ()),
    )


def _json(text: str | None) -> Any:
    return None if text is None else msgspec.json.decode(text)
