"""No statement waits for a user's transaction that was left open."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from contract.postgres_sessions import (
    AT_ONCE,
    DAY,
    ERROR,
    LEASE,
    OTHER_WORKER,
    TERM,
    WORKER,
    Session,
    Sessions,
    add,
    bury,
    claim,
    lead,
    new_task,
    request,
    settlements,
    worker_info,
)
from windlass.model.dead import DeadFilter, Replay
from windlass.model.examination import Unknown
from windlass.model.rule import LaneRule, RuleScope, ValueRule
from windlass.model.schedule import Schedule, Slot, SlotDecision, SlotState, Timing
from windlass.model.task import (
    CancelAnswer,
    Change,
    Claim,
    Completion,
    Fence,
    Leadership,
    Outcome,
    Pulse,
    Started,
    TaskFilter,
    TypeDefaults,
    WorkerOrder,
)
from windlass.store import port
from windlass.store.postgres import history
from windlass.store.postgres.examining import Examiner
from windlass.store.postgres.store import PostgresOptions, PostgresStore

# Users' transactions left open


NIGHTLY = Schedule(name="nightly", timing=Timing(cron="0 3 * * *"), task=new_task())


class Scene:
    """Something for every method of the store to do."""

    def __init__(self, store: PostgresStore, leadership: Leadership, sql_url: str) -> None:
        self.store = store
        self.leadership = leadership
        self.sql_url = sql_url
        self.ids: list[UUID] = []
        self.claims: list[Claim] = []
        self.buried: list[UUID] = []

    @classmethod
    async def set(cls, store: PostgresStore, sessions: Sessions) -> "Scene":
        await add(store, retention=timedelta(0))
        await store.settle(settlements(await claim(store), Outcome.COMPLETED))
        await claim_some(store, 2)  # to be rescued
        await sessions.advance(3 * DAY)  # the partition of the completed one is over
        scene = cls(store, await lead(store), sessions.sql_url)
        scene.buried = [await bury(store), await bury(store)]
        scene.claims = [await claim_some(store, 2), await claim_some(store, 2)]
        await add(store, 2, delay=0.001)
        scene.ids = await add(store, 4)
        await store.register(worker_info(), lease=LEASE)
        return scene

    def fence(self) -> Fence:
        (_, task), token = self.claims[1].tasks, self.claims[1].token
        return Fence(token, task.id, task.generation)

    async def complete(self) -> None:
        completion = Completion(fence=self.fence(), started_after=0.0)
        async with self.store.completing(completion, idle=LEASE):
            pass

    async def examine(self) -> None:
        examiner = Examiner(
            PostgresOptions(url=self.sql_url),
            lease=LEASE,
            sweep=LEASE,
            clock=lambda: datetime.now(UTC),
        )
        seen = await examiner.examine()
        parts = [getattr(seen, field.name) for field in dataclasses.fields(seen)]
        assert not any(isinstance(part, Unknown) for part in parts)

    async def claim_both_ways(self) -> None:
        lane = next(iter(self.store._cursors[False].bounds))
        await self.store.claim(dataclasses.replace(request(), lane=lane))
        await self.store.claim(request())

    async def claim_of_a_limit(self) -> None:
        await self.store.set_rule(LaneRule(RuleScope.QUEUE, "default", 9, 1.0, 5.0))
        held = await claim_some(self.store, 2)
        await self.store.settle(settlements(held, Outcome.COMPLETED))

    async def pass_gates(self) -> None:
        await self.store.set_value_rule(ValueRule("some", None, 1, 1.0, 5.0))
        gated = {"ordering_key": "k", "payload": '{"a": 1}', "limit_by": '[["a", null]]'}
        waiting = [new_task(type="some", **gated) for _ in range(4)]
        await self.store.enqueue(waiting)
        held = await claim(self.store, of="some")
        await self.store.settle(settlements(held, Outcome.COMPLETED))
        await self.store.change(waiting[2].id, Change(priority=20))
        await self.store.cancel(waiting[3].id, "waiting")
        await self.store.cancel(waiting[1].id, "let through")
        await self.store.retry(waiting[1].id)

    async def decide_slots(self) -> None:
        (due,) = await self.store.due_schedules(10)
        decision = SlotDecision(
            name=NIGHTLY.name,
            revision=due.revision,
            decided_until=due.decided_until,
            until=due.now + timedelta(seconds=1),
            next_at=due.now + DAY,
            slots=(Slot(due.now, SlotState.FIRED, new_task()),),
        )
        assert await self.store.decide_slots(decision, leadership=self.leadership)

    async def replay_and_discard(self) -> None:
        await self.store.replay([Replay(self.buried[1], new_task().id)])
        await self.store.discard([self.buried[1]])

    async def listen(self) -> None:
        async with self.store.listen(lambda *_: None):
            pass


async def claim_some(store: PostgresStore, number: int) -> Claim:
    await add(store, number, type="some")
    return await claim(store, limit=number, of="some")


# What is done on a connection of the user's own waits as the user's own statements do.
OF_GUESTS = (
    *("guest", "fetch", "commits_by_itself", "is_async", "discard"),
    *("enqueue_within", "complete_within"),
)

# In the order in which they are called.
CALLS: dict[str, Callable[[Scene], Awaitable[Any]]] = {
    "enqueue": lambda s: s.store.enqueue(
        [new_task(type="new", idempotency_key="k", tags=("red",)), new_task(delay=5.0)],
        fence=s.fence(),
    ),
    "type_defaults": lambda s: s.store.type_defaults("resize"),
    "register_types": lambda s: s.store.register_types([TypeDefaults("resize")]),
    "change": lambda s: s.store.change(s.ids[0], Change(priority=20, queue="other")),
    "cancel": lambda s: asyncio.gather(
        s.store.cancel(s.ids[1], "waiting"), s.store.cancel(s.claims[0].tasks[0].id, "claimed")
    ),
    "cancel_many": lambda s: s.store.cancel_many([s.ids[2], s.claims[1].tasks[0].id], "both"),
    "claim": lambda s: s.claim_both_ways(),
    "start": lambda s: s.store.start(
        [Started(s.claims[0].token, task.id, task.generation, 0.0) for task in s.claims[0].tasks]
    ),
    "requested_cancellations": lambda s: s.store.requested_cancellations(s.ids),
    "stop_retries": lambda s: s.store.stop_retries("resize", "stop"),
    "bury_scheduled": lambda s: s.store.bury_scheduled("resize", 10),
    "bury_ready": lambda s: s.store.bury_ready("resize", 10),
    "types": lambda s: s.store.types(),
    "allow_retries": lambda s: s.store.allow_retries("resize"),
    "expire": lambda s: s.store.expire(10, leadership=s.leadership),
    "unknown_types": lambda s: s.store.unknown_types(),
    "fail_unknown": lambda s: s.store.fail_unknown(
        "new", error=ERROR, ready_for=timedelta(0), limit=10, leadership=s.leadership
    ),
    "register": lambda s: s.store.register(worker_info(OTHER_WORKER), lease=LEASE),
    "pulse": lambda s: s.store.pulse(Pulse(WORKER, [s.claims[0].token], LEASE, 1, True)),
    "set_idle": lambda s: s.store.set_idle(WORKER, idle=False),
    "order_workers": lambda s: s.store.order_workers([WORKER], WorkerOrder.PAUSE),
    "open_breaker": lambda s: s.store.open_breaker("payments", epoch=0, recovery=timedelta(0)),
    "breakers": lambda s: s.store.breakers(["payments"]),
    "probe_breaker": lambda s: s.store.probe_breaker(
        "payments", epoch=1, holder=WORKER, lease=LEASE
    ),
    "leave_breaker": lambda s: s.store.leave_breaker("payments", holder=WORKER),
    "close_breaker": lambda s: s.store.close_breaker("payments", epoch=1),
    "check_completion": lambda s: s.store.check_completion(s.fence()),
    "completing": lambda s: s.complete(),
    "settle": lambda s: s.store.settle(
        settlements(s.claims[0], Outcome.COMPLETED, reported=True)
        + settlements(s.claims[1], Outcome.RETRIED)
    ),
    "held": lambda s: s.store.held(settlements(s.claims[0], Outcome.COMPLETED)),
    "deregister": lambda s: s.store.deregister(WORKER),
    "retry": lambda s: s.store.retry(s.buried[0]),
    "find_dead": lambda s: s.store.find_dead(DeadFilter()),
    "read_dead": lambda s: s.store.read_dead(s.buried),
    "surplus_dead": lambda s: s.store.surplus_dead(["default"], 0, 10),
    "crowded_queues": lambda s: s.store.crowded_queues(0),
    "expired_dead": lambda s: s.store.expired_dead(10),
    "replay": lambda s: s.replay_and_discard(),
    "pause": lambda s: s.store.pause("default"),
    "resume": lambda s: s.store.resume("default"),
    "declare_rules": lambda s: s.store.declare_rules(
        [LaneRule(RuleScope.TYPE, "resize", concurrency=1)], types=["resize"]
    ),
    "set_value_rule": lambda s: s.pass_gates(),
    "value_rules": lambda s: s.store.value_rules(),
    "open_gates": lambda s: s.store.open_gates(10),
    "reset_value_rule": lambda s: s.store.reset_value_rule("some", None),
    "set_rule": lambda s: s.claim_of_a_limit(),
    "rules": lambda s: s.store.rules(),
    "pause_type": lambda s: s.store.pause_type("resize"),
    "situation": lambda s: s.store.situation(s.ids[0], ageing=LEASE),
    "resume_type": lambda s: s.store.resume_type("resize"),
    "reset_rule": lambda s: s.store.reset_rule(RuleScope.QUEUE, "default"),
    "get": lambda s: s.store.get(s.ids[0]),
    "ended": lambda s: s.store.ended(s.ids),
    "tasks": lambda s: asyncio.gather(
        s.store.tasks(TaskFilter(type="resize")), s.store.tasks(TaskFilter(tag="red"))
    ),
    "queues": lambda s: s.store.queues(),
    "now": lambda s: s.store.now(),
    "due": lambda s: s.store.due(),
    "check": lambda s: s.store.check(),
    "workers": lambda s: s.store.workers(),
    "has_work": lambda s: s.store.has_work(["resize"], None),
    "lead": lambda s: s.store.lead(WORKER, current=s.leadership, term=TERM),
    "promote": lambda s: s.store.promote(100, leadership=s.leadership),
    "rescue": lambda s: s.store.rescue(100, leadership=s.leadership),
    "remove_dead_workers": lambda s: s.store.remove_dead_workers(leadership=s.leadership),
    "tidy": lambda s: s.store.tidy(leadership=s.leadership),
    "prepare_history": lambda s: s.store.prepare_history(leadership=s.leadership),
    "retain": lambda s: s.store.retain(leadership=s.leadership),
    "register_schedules": lambda s: s.store.register_schedules("shop:app", [NIGHTLY]),
    "schedules": lambda s: s.store.schedules(),
    "schedule_in": lambda s: s.store.schedule_in(),
    "due_schedules": lambda s: s.store.due_schedules(10),
    "decide_slots": lambda s: s.decide_slots(),
    "run_schedule": lambda s: s.store.run_schedule(NIGHTLY.name, new_task().id),
    "slots": lambda s: s.store.slots(NIGHTLY.name, 10),
    "prune_slots": lambda s: s.store.prune_slots(most=1, leadership=s.leadership),
    "pause_schedule": lambda s: s.store.pause_schedule(NIGHTLY.name),
    "resume_schedule": lambda s: s.store.resume_schedule(NIGHTLY.name),
    "examine": lambda s: s.examine(),
    "resign": lambda s: s.store.resign(s.leadership),
    "listen": lambda s: s.listen(),
}


def test_every_method_of_the_port_is_called_beside_a_users_transaction() -> None:
    protocols = [
        protocol
        for protocol in vars(port).values()
        if getattr(protocol, "_is_protocol", False) and protocol.__module__ == port.__name__
    ]
    methods = {name for protocol in protocols for name in vars(protocol) if name[0] != "_"}

    assert set(CALLS) == methods - {*("open", "close", "beside"), *OF_GUESTS, "trouble"}


async def open_reader(sessions: Sessions) -> Session:
    """A report that has looked at everything and is not done."""
    reader = Session(await sessions.connect(), sessions.sql_url)
    await reader.connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    tables = await reader.connection.fetch(
        "SELECT oid::regclass::text FROM pg_class "
        "WHERE relnamespace = 'windlass'::regnamespace AND relkind IN ('r', 'p', 'v')"
    )
    for (table,) in tables:
        await reader.connection.fetchval(f"SELECT count(*) FROM {table}")
    return reader


async def open_writer(sessions: Sessions) -> Session:
    """An application in the middle of something of its own."""
    await sessions.watcher.execute("CREATE TABLE public.orders (id integer)")
    writer = await sessions.begin()
    await writer.connection.execute("INSERT INTO public.orders VALUES (1)")
    await writer.xid()
    return writer


@pytest.mark.parametrize("open_transaction", [open_reader, open_writer])
async def test_no_method_waits_for_a_users_open_transaction(
    store: PostgresStore,
    sessions: Sessions,
    monkeypatch: pytest.MonkeyPatch,
    open_transaction: Callable[[Sessions], Awaitable[Session]],
) -> None:
    monkeypatch.setattr(history, "DETACH_WITHIN", 0.3)  # what retain waits for a reader
    scene = await Scene.set(store, sessions)
    user = await open_transaction(sessions)
    hung = []

    for name, call in CALLS.items():
        try:
            async with asyncio.timeout(AT_ONCE):
                await call(scene)
        except TimeoutError:
            hung.append(name)

    assert hung == []
    state = "SELECT state FROM pg_stat_activity WHERE pid = $1"
    assert await sessions.watcher.fetchval(state, user.pid) == "idle in transaction"


@pytest.mark.parametrize("open_transaction", [open_reader, open_writer])
async def test_a_store_opens_beside_a_users_open_transaction(
    sessions: Sessions, open_transaction: Callable[[Sessions], Awaitable[Session]]
) -> None:
    await open_transaction(sessions)

    async with asyncio.timeout(AT_ONCE):
        other = await sessions.open_store()
        beside = other.beside()
        await beside.open()
        await beside.close()


# Other defaults


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
async def test_a_stricter_default_isolation_of_the_database_changes_nothing(
    store: PostgresStore, sessions: Sessions, isolation: str
) -> None:
    database = await sessions.watcher.fetchval("SELECT current_database()")
    await sessions.watcher.execute(
        f"ALTER DATABASE {database} SET default_transaction_isolation TO '{isolation}'"
    )
    fresh = await sessions.open_store()
    (task_id,) = await add(store)
    claiming = await sessions.begin()
    await claim(claiming.store)

    cancelling = await sessions.blocked(fresh.cancel(task_id, "no need"), by=claiming)
    await claiming.commit()

    assert await cancelling is CancelAnswer.REQUESTED
