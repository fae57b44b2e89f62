"""Programs that are right: no type checker has anything to say."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import TypedDict
from uuid import UUID

from windlass import App, Context, DeadLetter, Handle, Retry, TaskSet, testing

app = App("memory:")
mails = TaskSet()


class Size(Enum):
    SMALL = "small"


class Address(TypedDict):
    city: str


@dataclass
class Order:
    id: UUID
    at: datetime


@app.task
async def resize(image: str, width: int = 100) -> dict[str, int]:
    return {"width": width}


@app.task(name="order.ship", queue="orders", retry=Retry(max_attempts=3), timeout=timedelta(30))
async def ship(ctx: Context, order: Order, to: Address, size: Size = Size.SMALL) -> str:
    async with ctx.transaction() as connection:
        await connection.execute("SELECT 1")
        ctx.complete("shipped")
    return ctx.task_id


@mails.task(run="thread")
def send(ctx: Context, to: str) -> None:
    ctx.complete_sync(None, connection=object())


async def call(ctx: Context, order: Order) -> str:
    send(ctx, "a@example.com")
    return await ship(ctx, order, {"city": "Bern"})


async def use(handles: Sequence[Handle]) -> None:
    order = Order(UUID(int=1), datetime.now(UTC))
    handle: Handle = await resize.enqueue("a.png", width=200)
    handle = await resize.options(priority="low", delay=60, tags=["a"]).enqueue("a.png")
    handle = await ship.enqueue(order, {"city": "Bern"}, size=Size.SMALL)
    handle = send.enqueue_sync("a@example.com")
    many: list[Handle] = await app.enqueue_many([resize.call("a.png"), send.call("b@example.com")])
    width: dict[str, int] = await resize("a.png")
    text: str = handle.id
    handle.change_sync(queue="mail", delay=timedelta(5))
    await handle.change(priority=30, at=datetime.now(UTC))
    letters: list[DeadLetter] = await app.dead.list(queue="mail", error_class="transient", limit=5)
    report = await app.dead.replay(letters[0].id, changes={"width": 2}, rate="10/s")
    replayed: str | None = report.replayed[letters[0].id]
    app.dead.replay_sync(type="mail", ended_from=datetime.now(UTC), canary=5, dry_run=True)
    app.dead.discard_sync(letters[0].id)
    await handle.cancel("no longer needed", by="ops")
    cancelled: list[str] = (await app.cancel_tasks("late", by="ops", tag="night")).cancelled
    app.cancel_tasks_sync("late", queue="mail", status=["pending"], dry_run=True)
    app.replay_dead(error="gateway", after=timedelta(minutes=10))
    app.include(mails)
    async with testing.app_in_memory(app):
        testing.assert_enqueued(app, resize, image="a.png")
        await testing.drain(app)
    print(many, width, text, handles, replayed, cancelled)
