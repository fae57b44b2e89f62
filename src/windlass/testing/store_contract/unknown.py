"""The rules of a store about tasks whose type no worker knows."""

# ruff: noqa: S101 - tests assert

from datetime import timedelta
from typing import Any
from uuid import UUID

from windlass.model.task import (
    Answer,
    Callback,
    LaneKind,
    NewTask,
    Outcome,
    TaskState,
    TypeDefaults,
)
from windlass.store.port import Store
from windlass.testing.store_contract.steps import (
    LEASE,
    OTHER_WORKER,
    SECOND,
    Steps,
    new_id,
    without_times,
)

MINUTE = timedelta(minutes=1)
UNKNOWN = '{"type": "UnknownTask", "message": "nobody knows it", "class": "code-bug"}'


class UnknownTypeRules(Steps):
    """Tasks of a type that no registered worker knows can be failed by the leader, and no others."""

    async def fail_lost(self, store: Store, type: str = "lost", **options: Any) -> list[UUID]:  # noqa: A002
        """Fail, as a leader, those that have been ready for a minute."""
        leadership = await self.elect(store)
        asked: dict[str, Any] = {"error": UNKNOWN, "ready_for": MINUTE, "limit": 100}
        failed = await store.fail_unknown(type, **(asked | options), leadership=leadership)
        await store.resign(leadership)
        return failed

    async def add_lost(self, store: Store, number: int = 1, **options: Any) -> list[UUID]:
        """Enqueue tasks of a type that nobody knows, over a minute ago."""
        ids = await self.add_many(store, number, **({"type": "lost"} | options))
        await self.advance(store, MINUTE + SECOND)
        return ids

    async def test_types_are_unknown_while_no_registered_worker_knows_them(
        self, store: Store
    ) -> None:
        await store.register(self.worker(), lease=LEASE)  # knows resize and mail
        for name in ("resize", "lost", "astray", "lost"):
            await self.add(store, type=name)

        assert await store.unknown_types() == ["astray", "lost"]
        await store.deregister(self.worker().id)
        assert await store.unknown_types() == ["astray", "lost", "resize"]

    async def test_a_silent_worker_knows_its_types_until_it_is_removed(self, store: Store) -> None:
        await store.register(self.worker(), lease=LEASE)
        await self.add(store)
        await self.advance(store, 3 * LEASE + SECOND)

        assert await store.unknown_types() == []
        assert await self.fail_lost(store, "resize") == []
        await store.remove_dead_workers(leadership=await self.elect(store, OTHER_WORKER))
        assert await store.unknown_types() == ["resize"]

    async def test_a_type_without_ready_tasks_is_not_named(self, store: Store) -> None:
        await self.add(store, type="later", delay=60.0)
        await self.add(store, type="held")
        await self.claim(store, types=("held",))
        await self.add(store, type="paused", queue="slow")
        await store.pause("slow")

        assert await store.unknown_types() == []
        await store.resume("slow")
        await self.advance(store, MINUTE + SECOND)
        await store.promote(10)
        assert await store.unknown_types() == ["later", "paused"]

    async def test_a_task_fails_with_the_error_as_an_attempt_that_never_began(
        self, store: Store
    ) -> None:
        (task_id,) = await self.add_lost(store, idempotency_key="k", tags=("night",))

        assert await self.fail_lost(store) == [task_id]

        record = await store.get(task_id)
        assert record.status is TaskState.FAILED
        assert (record.attempts, record.generation) == (1, 1)
        assert (record.last_error, record.error_class) == ("nobody knows it", "code-bug")
        assert (record.worker_id, record.claimed_at, record.started_at) == (None, None, None)
        assert record.completed_at == record.updated_at
        assert (record.idempotency_key, record.tags) == ("k", ("night",))
        assert [without_times(error) for error in record.errors] == [
            {
                "type": "UnknownTask",
                "message": "nobody knows it",
                "class": "code-bug",
                "attempt": 1,
                "generation": 1,
                "worker_id": None,
            }
        ]
        assert record.errors[0]["started_at"] is None
        assert await self.granted(store, types=("lost",)) == []
        ((ended,), _) = await store.ended([task_id])
        assert (ended.status, ended.error_class) == (TaskState.FAILED, "code-bug")

    async def test_earlier_attempts_stay_with_it(self, store: Store) -> None:
        task_id = await self.add(store, type="lost")
        claim, task = await self.claim_one(store, types=("lost",))
        await self.settle(store, claim, task, Outcome.RETRIED)
        await self.advance(store, MINUTE + SECOND)

        assert await self.fail_lost(store) == [task_id]

        record = await store.get(task_id)
        assert record.attempts == 2
        assert [error["message"] for error in record.errors] == ["no such image", "nobody knows it"]
        assert [error["generation"] for error in record.errors] == [1, 2]

    async def test_a_failed_one_can_be_reopened(self, store: Store) -> None:
        (task_id,) = await self.add_lost(store)
        await self.fail_lost(store)

        await store.retry(task_id)

        claim, task = await self.claim_one(store, types=("lost",))
        assert (task.id, task.attempts, task.generation) == (task_id, 0, 2)
        assert await self.settle(store, claim, task, Outcome.COMPLETED) is Answer.APPLIED
        assert [error["type"] for error in (await store.get(task_id)).errors] == ["UnknownTask"]

    async def test_only_what_is_due_for_so_long_fails(self, store: Store) -> None:
        (old,) = await self.add_lost(store)
        await self.add(store, type="lost")
        await self.add(store, type="lost", delay=3600.0)
        await self.add(store, type="other")

        assert await self.fail_lost(store) == [old]
        assert await self.fail_lost(store, ready_for=timedelta(hours=1)) == []

    async def test_what_a_worker_knows_does_not_fail(self, store: Store) -> None:
        (task_id,) = await self.add_lost(store, type="resize")
        await store.register(self.worker(), lease=LEASE)

        assert await self.fail_lost(store, "resize") == []
        assert await self.granted(store) == [task_id]

    async def test_what_is_claimed_does_not_fail(self, store: Store) -> None:
        (task_id,) = await self.add_lost(store)
        claim, task = await self.claim_one(store, types=("lost",))

        assert await self.fail_lost(store) == []
        assert await self.settle(store, claim, task, Outcome.COMPLETED) is Answer.APPLIED
        assert await self.status(store, task_id) is TaskState.COMPLETED

    async def test_what_is_in_a_paused_queue_does_not_fail(self, store: Store) -> None:
        await self.add_lost(store, queue="slow")
        (other,) = await self.add_lost(store)
        await store.pause("slow")

        assert await self.fail_lost(store) == [other]

    async def test_no_more_fail_than_were_asked_for(self, store: Store) -> None:
        ids = await self.add_lost(store, 3)
        ids += await self.add_lost(store, 2, queue="other", priority=20)

        counts = [len(await self.fail_lost(store, limit=2)) for _ in range(4)]

        assert counts == [2, 2, 1, 0]
        assert {await self.status(store, task_id) for task_id in ids} == {TaskState.FAILED}

    async def test_suspects_and_what_came_back_fail_too(self, store: Store) -> None:
        suspect = await self.suspect(store, type="lost")
        released = await self.add(store, type="lost")
        claim, task = await self.claim_one(store, types=("lost",))
        assert task.id == released, LaneKind.ALONE
        await self.settle(store, claim, task, Outcome.RELEASED)
        await self.advance(store, MINUTE + SECOND)

        assert sorted(await self.fail_lost(store)) == sorted([suspect, released])

    async def test_a_failure_is_called_back(self, store: Store) -> None:
        follows = Callback(NewTask(new_id(), "alert", "{}"), ("task_id", "error"))
        await store.register_types([TypeDefaults("lost", on_failure=follows)])
        (task_id,) = await self.add_lost(store)

        await self.fail_lost(store)

        page = await self.listed(store, type="alert")
        (record,) = [await store.get(each) for each in page]
        assert record.payload == {
            "task_id": str(task_id),
            "error": {"type": "UnknownTask", "message": "nobody knows it", "class": "code-bug"},
        }
