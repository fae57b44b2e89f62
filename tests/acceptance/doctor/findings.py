"""A database in good health, and what the doctor says of one."""

from datetime import timedelta
from uuid import UUID, uuid4

from acceptance.doctor.conditions import WORKER
from contract.pgbouncer import store_options
from windlass import App
from windlass.model.examination import Finding, Level
from windlass.model.task import NewTask, TypeDefaults, WorkerInfo
from windlass.store.postgres.store import PostgresStore

LONG = timedelta(hours=1)  # a lease that outlives the tests


async def nurse(url: str) -> None:
    store = PostgresStore(store_options(url, pooler=False))
    await store.open()
    await store.enqueue([NewTask(uuid4(), "resize", "{}")])
    await store.register_types([TypeDefaults("resize")])
    await store.register(worker(WORKER), lease=LONG)
    leadership = await store.lead(WORKER, current=None, term=LONG)
    assert leadership is not None
    await store.prepare_history(leadership=leadership)
    async with store._run.lend() as connection:
        await connection.execute("UPDATE windlass.worker SET started_at = now() - interval '1 day'")
    await store.close()


def worker(worker_id: UUID, priority: int = 10) -> WorkerInfo:
    registered = (TypeDefaults("resize", priority=priority),)
    return WorkerInfo(
        worker_id, f"host{worker_id.int}", 7, "0.1.0", 1, ("resize",), None, registered
    )


async def findings(url: str) -> list[Finding]:
    return await App(url).diagnosis()


async def said(url: str, check: str) -> list[tuple[Level, str]]:
    return [(one.level, one.found) for one in await findings(url) if one.check == check]


def tells(found: list[tuple[Level, str]], level: Level, words: str) -> bool:
    return any(one == level and words in text for one, text in found)
