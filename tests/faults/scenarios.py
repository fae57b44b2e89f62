"""For each method of a store a call to break, prepared around the proxy."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from uuid import UUID

from faults.scene import (
    ERROR,
    LEASE,
    NOON,
    OTHER_WORKER,
    TERM,
    WORKER,
    Scene,
    request,
    settlements,
    worker_info,
)
from windlass.model.dead import DeadFilter, DiscardAnswer, Replay
from windlass.model.errors import LeaseLost, WrongState
from windlass.model.rule import LaneRule, RuleScope, ValueRule
from windlass.model.schedule import Schedule, ScheduleChanges, Slot, SlotDecision, SlotState, Timing
from windlass.model.task import (
    Answer,
    CancelAnswer,
    Change,
    Claim,
    ClaimAnswer,
    Completion,
    Expired,
    Fence,
    NewTask,
    Outcome,
    Pulse,
    Rescued,
    Started,
    TaskFilter,
    TaskState,
    TypeDefaults,
    Window,
    WindowKind,
    WorkerOrder,
)
from windlass.store.postgres import enqueueing
from windlass.store.postgres.store import PostgresStore

# A call, told whether it is the second of its kind.
Call = Callable[[PostgresStore, bool], Awaitable[Any]]
Prepare = Callable[[Scene], Awaitable[Call]]


class _Same:
    """Stands for: the repeated call is answered like the first."""

    def __repr__(self) -> str:
        return "the same"


SAME = _Same()
ANYTHING = object()  # counts of what was left to do


@dataclass(frozen=True, slots=True)
class Scenario:
    """A call of one method, and what the same call is told once the first was carried out."""

    name: str
    method: str
    prepare: Prepare
    if_done: Any  # a value, or an exception type
    seconds_later: float  # than what was prepared
    is_first: bool  # of a connection that it opens
    about: str  # the statements to cut; the others are cut in another scenario
    in_steps: bool  # several transactions: what is seen between them is allowed


SCENARIOS: list[Scenario] = []
# What a task passes on its way, and what brings it back: tried at every run of the tests, the others by `make slow`.
ON_THE_STREET = {
    *("enqueue", "enqueue_with_a_key_alone", "enqueue_with_windows", "enqueue_for_a_handler"),
    *(
        "enqueue_at_gates",
        "claim",
        "claim_a_suspect",
        "claim_of_a_limited_queue",
        "claim_through_gates",
    ),
    *(
        "start",
        "settle",
        "settle_of_a_limited_queue",
        "settle_at_gates",
        "completing",
        "check_completion",
    ),
    *(
        "pulse",
        "pulse_with_patience",
        "lead",
        "promote",
        "rescue",
        "cancel_a_waiting_task",
        "retry",
    ),
}


def scenario(
    method: str,
    *,
    if_done: Any = SAME,
    seconds_later: float = 10.0,
    is_first: bool = False,
    about: str = "",
    in_steps: bool = False,
) -> Callable[[Prepare], Prepare]:
    def register(prepare: Prepare) -> Prepare:
        name = getattr(prepare, "__name__", method)
        one = Scenario(name, method, prepare, if_done, seconds_later, is_first, about, in_steps)
        SCENARIOS.append(one)
        return prepare

    return register


def fence_of(claim: Claim) -> Fence:
    """What a handler of the first task of a claim shows."""
    return Fence(claim.token, claim.tasks[0].id, claim.tasks[0].generation)


# Producers


BY_TENANT = {"payload": '{"tenant": "acme"}', "limit_by": '[["tenant", null]]'}


@scenario("enqueue")
async def enqueue(scene: Scene) -> Call:
    tasks = [
        scene.new_task(tags=("red", "blue")),
        scene.new_task(delay=60.0),
        scene.new_task(idempotency_key="a"),
    ]
    return lambda store, again: store.enqueue(tasks, repeated=again)


@scenario("enqueue")
async def enqueue_with_a_key_alone(scene: Scene) -> Call:
    tasks = [scene.new_task(idempotency_key="a")]
    return lambda store, again: store.enqueue(tasks, repeated=again)


@scenario("enqueue")
async def enqueue_with_windows(scene: Scene) -> Call:
    def debounced(number: int, key: str) -> NewTask:
        window = Window(WindowKind.DEBOUNCE, 60.0, key)
        return scene.new_task(payload=f'{{"n": {number}}}', window=window)

    throttle = Window(WindowKind.THROTTLE, 60.0)
    await scene.around.enqueue([scene.new_task(window=throttle), debounced(1, "old")])
    tasks = [
        scene.new_task(window=Window(WindowKind.UNIQUE, 60.0)),
        scene.new_task(window=throttle),
        debounced(2, "old"),
        debounced(3, "new"),
    ]
    return lambda store, again: store.enqueue(tasks, repeated=again)


@scenario("enqueue")
async def enqueue_for_a_handler(scene: Scene) -> Call:
    await scene.add()
    claim = await scene.claim()
    fence = fence_of(claim)
    child = scene.new_task()
    return lambda store, again: store.enqueue([child], fence=fence, repeated=again)


@scenario("enqueue")
async def enqueue_more_than_one_statement_takes(scene: Scene) -> Call:
    tasks = [scene.new_task(idempotency_key=key) for key in ("b", "c", "a")]

    async def call(store: PostgresStore, again: bool) -> Any:
        whole, enqueueing.ENQUEUE_CHUNK = enqueueing.ENQUEUE_CHUNK, 2
        try:
            return await store.enqueue(tasks, repeated=again)
        finally:
            enqueueing.ENQUEUE_CHUNK = whole

    return call


@scenario("type_defaults")
async def type_defaults(scene: Scene) -> Call:
    await scene.around.register_types([TypeDefaults("resize", "bulk", 5)])
    return lambda store, again: store.type_defaults("resize")


@scenario("register_types")
async def register_types(scene: Scene) -> Call:
    types = [TypeDefaults("resize", retention=timedelta(days=1)), TypeDefaults("crop")]
    return lambda store, again: store.register_types(types)


# Fetchers


async def _claim(store: PostgresStore, *, alone: bool = False) -> Any:
    answer = await store.claim(request(alone=alone))
    tasks = None if answer.claim is None else answer.claim.tasks
    return tasks, *answer[1:]


# The claim whose answer was lost holds the tasks until its lease is over.
@scenario("claim", if_done=tuple(ClaimAnswer(None)))
async def claim(scene: Scene) -> Call:
    await scene.add(3)
    await scene.add(1, priority=50)
    return lambda store, again: _claim(store)


@scenario("claim", if_done=tuple(ClaimAnswer(None)), is_first=True)
async def claim_on_a_new_connection(scene: Scene) -> Call:
    return await claim(scene)


@scenario("claim", if_done=tuple(ClaimAnswer(None)))
async def claim_a_suspect(scene: Scene) -> Call:
    await scene.add()
    for turn in (1, 2):
        await scene.claim()
        await scene.at(60 * turn)
        await scene.around.rescue(10)
    return lambda store, again: _claim(store, alone=True)


@scenario("start")
async def start(scene: Scene) -> Call:
    await scene.add(2)
    claim = await scene.claim()
    started = [Started(claim.token, task.id, task.generation, 0.5) for task in claim.tasks]
    return lambda store, again: store.start(started)


@scenario("requested_cancellations")
async def requested_cancellations(scene: Scene) -> Call:
    ids = await scene.add(2)
    await scene.claim()
    await scene.around.cancel(ids[0], "no more")
    return lambda store, again: store.requested_cancellations(ids)


# Committers


@scenario("settle", if_done=[Answer.ALREADY] * 4)
async def settle(scene: Scene) -> Call:
    await scene.add(4)
    claim = await scene.claim()
    outcomes = (Outcome.COMPLETED, Outcome.RETRIED, Outcome.DEAD, Outcome.RELEASED)
    ends = [
        settlements(claim, outcome, delay=5.0 if outcome is Outcome.RETRIED else 0.0)[place]
        for place, outcome in enumerate(outcomes)
    ]
    return lambda store, again: store.settle(ends)


@scenario("settle", if_done=[Answer.ALREADY], about="settle_tasks", in_steps=True)
async def settle_where_there_is_no_place_yet(scene: Scene) -> Call:
    await scene.add(retention=timedelta(days=40))
    claim = await scene.claim()
    await _drop_partitions(scene, beyond=timedelta(days=10))
    return lambda store, again: store.settle(settlements(claim, Outcome.COMPLETED))


@scenario("held")
async def held(scene: Scene) -> Call:
    await scene.add(2)
    ends = settlements(await scene.claim(), Outcome.COMPLETED)
    return lambda store, again: store.held(ends)


# Handlers that end their tasks themselves


@scenario("check_completion")
async def check_completion(scene: Scene) -> Call:
    await scene.add(1)
    fence = fence_of(await scene.claim())
    return lambda store, again: store.check_completion(fence)


@scenario("check_completion", about="check_completion", in_steps=True)
async def check_completion_where_there_is_no_place_yet(scene: Scene) -> Call:
    await scene.add(retention=timedelta(days=40))
    fence = fence_of(await scene.claim())
    await _drop_partitions(scene, beyond=timedelta(days=10))
    return lambda store, again: store.check_completion(fence)


@scenario("completing", if_done=LeaseLost)
async def completing(scene: Scene) -> Call:
    await scene.add(2)
    fence = fence_of(await scene.claim())

    async def complete(store: PostgresStore, again: bool) -> None:
        completion = Completion(fence=fence, started_after=1.0, result="1")
        async with store.completing(completion, idle=LEASE):
            pass  # what is said here has the errors of the driver

    return complete


# Hearts


@scenario("check")
async def check(scene: Scene) -> Call:
    return lambda store, again: store.check()


@scenario("register")
async def register(scene: Scene) -> Call:
    return lambda store, again: store.register(worker_info(), lease=LEASE)


@scenario("pulse")
async def pulse(scene: Scene) -> Call:
    return await _pulse(scene, timedelta(0))


@scenario("pulse")
async def pulse_with_patience(scene: Scene) -> Call:
    return await _pulse(scene, timedelta(seconds=1))


async def _pulse(scene: Scene, patience: timedelta) -> Call:
    await scene.around.register(worker_info(), lease=LEASE)
    await scene.add()
    token = (await scene.claim()).token
    asked = Pulse(WORKER, [token], LEASE, 1, idle=False, patience=patience)

    async def call(store: PostgresStore, again: bool) -> Any:
        answer = await store.pulse(asked)
        return answer.kept == {token}, answer.registered, answer.skipped

    return call


@scenario("set_idle")
async def set_idle(scene: Scene) -> Call:
    await scene.around.register(worker_info(), lease=LEASE)
    return lambda store, again: store.set_idle(WORKER, True)


@scenario("deregister")
async def deregister(scene: Scene) -> Call:
    await scene.around.register(worker_info(), lease=LEASE)
    return lambda store, again: store.deregister(WORKER)


# Breakers that are shared


@scenario("breakers")
async def breakers(scene: Scene) -> Call:
    await scene.around.open_breaker("payments", epoch=0, recovery=LEASE)
    return lambda store, again: store.breakers(["payments", "mail"])


@scenario("open_breaker", if_done=False)
async def open_breaker(scene: Scene) -> Call:
    return lambda store, again: store.open_breaker("payments", epoch=0, recovery=LEASE)


@scenario("close_breaker", if_done=False)
async def close_breaker(scene: Scene) -> Call:
    await scene.around.open_breaker("payments", epoch=0, recovery=LEASE)
    return lambda store, again: store.close_breaker("payments", epoch=1)


@scenario("probe_breaker", seconds_later=60.0)
async def probe_breaker(scene: Scene) -> Call:
    await scene.around.open_breaker("payments", epoch=0, recovery=LEASE)
    return lambda store, again: store.probe_breaker("payments", epoch=1, holder=WORKER, lease=LEASE)


@scenario("leave_breaker")
async def leave_breaker(scene: Scene) -> Call:
    await scene.around.open_breaker("payments", epoch=0, recovery=timedelta(0))
    await scene.around.probe_breaker("payments", epoch=1, holder=WORKER, lease=LEASE)
    return lambda store, again: store.leave_breaker("payments", holder=WORKER)


# Schedules

NIGHTLY = Schedule(
    name="nightly",
    timing=Timing(cron="0 3 * * *"),
    task=NewTask(UUID(int=0), "resize", '{"width": 1.0}'),
)
OFTEN = replace(NIGHTLY, name="often", timing=Timing(every=timedelta(seconds=1)))


@scenario("register_schedules", if_done=ScheduleChanges())
async def register_schedules(scene: Scene) -> Call:
    await scene.around.register_schedules("shop:app", [OFTEN, replace(NIGHTLY, name="old")])
    changed = replace(OFTEN, timing=Timing(every=timedelta(seconds=2)))
    return lambda store, again: store.register_schedules("shop:app", [NIGHTLY, changed])


@scenario("schedules")
async def schedules(scene: Scene) -> Call:
    await scene.around.register_schedules("shop:app", [NIGHTLY, OFTEN])
    return lambda store, again: store.schedules()


@scenario("slots")
async def slots(scene: Scene) -> Call:
    await scene.around.register_schedules("shop:app", [NIGHTLY])
    await scene.around.run_schedule("nightly", scene.new_task().id)
    return lambda store, again: store.slots("nightly", 10)


@scenario("pause_schedule", if_done=False)
async def pause_schedule(scene: Scene) -> Call:
    await scene.around.register_schedules("shop:app", [NIGHTLY])
    return lambda store, again: store.pause_schedule("nightly")


@scenario("resume_schedule", if_done=False)
async def resume_schedule(scene: Scene) -> Call:
    await scene.around.register_schedules("shop:app", [NIGHTLY])
    await scene.around.pause_schedule("nightly")
    return lambda store, again: store.resume_schedule("nightly")


@scenario("run_schedule")
async def run_schedule(scene: Scene) -> Call:
    await scene.around.register_schedules("shop:app", [NIGHTLY])
    task_id = scene.new_task().id
    return lambda store, again: store.run_schedule("nightly", task_id)


@scenario("schedule_in", if_done=ANYTHING)
async def schedule_in(scene: Scene) -> Call:
    await scene.around.register_schedules("shop:app", [NIGHTLY])
    return lambda store, again: store.schedule_in()


@scenario("due_schedules", if_done=ANYTHING)
async def due_schedules(scene: Scene) -> Call:
    await scene.around.register_schedules("shop:app", [NIGHTLY])
    return lambda store, again: store.due_schedules(10)


@scenario("decide_slots", if_done=None)
async def decide_slots(scene: Scene) -> Call:
    await scene.around.register_schedules("shop:app", [NIGHTLY])
    (due,) = await scene.around.due_schedules(10)
    fired = Slot(due.now, SlotState.FIRED, scene.new_task())
    skipped = Slot(due.now - timedelta(days=1), SlotState.SKIPPED, reason="missed")
    decision = SlotDecision(
        name="nightly",
        revision=due.revision,
        decided_until=due.decided_until,
        until=due.now + timedelta(seconds=1),
        next_at=due.now + timedelta(days=1),
        slots=(skipped, fired),
    )
    leadership = await scene.lead()
    return lambda store, again: store.decide_slots(decision, leadership=leadership)


@scenario("prune_slots", if_done=0)
async def prune_slots(scene: Scene) -> Call:
    await scene.around.register_schedules("shop:app", [NIGHTLY])
    for _ in range(3):
        await scene.around.run_schedule("nightly", scene.new_task().id)
    leadership = await scene.lead()
    return lambda store, again: store.prune_slots(most=2, leadership=leadership)


# People


@scenario("cancel", if_done=CancelAnswer.ENDED)
async def cancel_a_waiting_task(scene: Scene) -> Call:
    (task_id,) = await scene.add()
    return lambda store, again: store.cancel(task_id, "no more")


@scenario("cancel")
async def cancel_a_claimed_task(scene: Scene) -> Call:
    (task_id,) = await scene.add()
    await scene.claim()
    return lambda store, again: store.cancel(task_id, "no more")


@scenario("cancel_many", if_done=[CancelAnswer.ENDED, CancelAnswer.ENDED, CancelAnswer.REQUESTED])
async def cancel_many(scene: Scene) -> Call:
    (claimed,) = await scene.add()
    await scene.claim()
    ids = [*await scene.add(2), claimed]
    return lambda store, again: store.cancel_many(ids, "no more")


@scenario("change")
async def change(scene: Scene) -> Call:
    (task_id,) = await scene.add()
    return lambda store, again: store.change(task_id, Change(priority=90, queue="bulk", delay=60))


@scenario("retry", if_done=WrongState)
async def retry(scene: Scene) -> Call:
    task_id = await scene.bury(Outcome.DEAD)
    return lambda store, again: store.retry(task_id)


@scenario("stop_retries")
async def stop_retries(scene: Scene) -> Call:
    return lambda store, again: store.stop_retries("resize", "stop")


@scenario("allow_retries", if_done=False)
async def allow_retries(scene: Scene) -> Call:
    await scene.around.stop_retries("resize", "stop")
    return lambda store, again: store.allow_retries("resize")


@scenario("bury_scheduled", if_done=ANYTHING)
async def bury_scheduled(scene: Scene) -> Call:
    await scene.add(2)
    claim = await scene.claim()
    await scene.around.settle(settlements(claim, Outcome.RETRIED, delay=3600.0))
    await scene.around.stop_retries("resize", "stop")
    return lambda store, again: store.bury_scheduled("resize", 10)


@scenario("bury_ready", if_done=ANYTHING)
async def bury_ready(scene: Scene) -> Call:
    await scene.add(2)
    claim = await scene.claim()
    await scene.around.settle(settlements(claim, Outcome.RETRIED))
    await scene.around.stop_retries("resize", "stop")
    return lambda store, again: store.bury_ready("resize", 10)


@scenario("find_dead")
async def find_dead(scene: Scene) -> Call:
    await scene.bury(Outcome.DEAD)
    return lambda store, again: store.find_dead(DeadFilter(error="image"))


@scenario("read_dead")
async def read_dead(scene: Scene) -> Call:
    ids = [await scene.bury(Outcome.DEAD)]
    return lambda store, again: store.read_dead(ids)


@scenario("replay")
async def replay(scene: Scene) -> Call:
    replays = [
        Replay(await scene.bury(Outcome.DEAD), scene.new_task().id),
        Replay(await scene.bury(Outcome.FAILED), scene.new_task().id, delay=60.0),
    ]
    return lambda store, again: store.replay(replays)


@scenario("replay")
async def replay_as_a_leader(scene: Scene) -> Call:
    replays = [Replay(await scene.bury(Outcome.DEAD), scene.new_task().id)]
    leadership = await scene.lead()
    return lambda store, again: store.replay(replays, leadership=leadership)


@scenario("discard", if_done=[DiscardAnswer.ABSENT] * 2)
async def discard(scene: Scene) -> Call:
    ids = [await scene.bury(Outcome.DEAD), await scene.bury(Outcome.FAILED)]
    return lambda store, again: store.discard(ids)


@scenario("surplus_dead")
async def surplus_dead(scene: Scene) -> Call:
    await scene.bury(Outcome.DEAD)
    return lambda store, again: store.surplus_dead(["default"], 0, 10)


@scenario("crowded_queues")
async def crowded_queues(scene: Scene) -> Call:
    await scene.bury(Outcome.DEAD)
    return lambda store, again: store.crowded_queues(0)


@scenario("expired_dead")
async def expired_dead(scene: Scene) -> Call:
    await scene.bury(Outcome.DEAD)
    return lambda store, again: store.expired_dead(10)


@scenario("pause")
async def pause(scene: Scene) -> Call:
    return lambda store, again: store.pause("default")


@scenario("resume", if_done=False)
async def resume(scene: Scene) -> Call:
    await scene.around.pause("default")
    return lambda store, again: store.resume("default")


@scenario("pause_type")
async def pause_type(scene: Scene) -> Call:
    return lambda store, again: store.pause_type("resize")


@scenario("resume_type", if_done=False)
async def resume_type(scene: Scene) -> Call:
    await scene.around.pause_type("resize")
    return lambda store, again: store.resume_type("resize")


@scenario("declare_rules")
async def declare_rules(scene: Scene) -> Call:
    await scene.around.declare_rules([LaneRule(RuleScope.TYPE, "resize", 1)], types=["resize"])
    rules = [LaneRule(RuleScope.QUEUE, "default", concurrency=2)]
    return lambda store, again: store.declare_rules(rules, types=["resize"])


@scenario("set_rule")
async def set_rule(scene: Scene) -> Call:
    return lambda store, again: store.set_rule(LaneRule(RuleScope.QUEUE, "default", 2))


@scenario("reset_rule", if_done=False)
async def reset_rule(scene: Scene) -> Call:
    await scene.around.set_rule(LaneRule(RuleScope.QUEUE, "default", concurrency=2))
    return lambda store, again: store.reset_rule(RuleScope.QUEUE, "default")


@scenario("rules")
async def rules(scene: Scene) -> Call:
    await scene.around.set_rule(LaneRule(RuleScope.QUEUE, "default", concurrency=2))
    return lambda store, again: store.rules()


@scenario("claim", if_done=tuple(ClaimAnswer(None)))
async def claim_of_a_limited_queue(scene: Scene) -> Call:
    await scene.around.set_rule(LaneRule(RuleScope.QUEUE, "default", 2, 1.0, 5.0))
    await scene.add()
    return lambda store, again: _claim(store)


@scenario("settle", if_done=[Answer.ALREADY, Answer.ALREADY])
async def settle_of_a_limited_queue(scene: Scene) -> Call:
    await scene.around.set_rule(LaneRule(RuleScope.QUEUE, "default", concurrency=2))
    await scene.add(2)
    claim = await scene.claim()
    return lambda store, again: store.settle(settlements(claim, Outcome.COMPLETED))


@scenario("set_value_rule")
async def set_value_rule(scene: Scene) -> Call:
    await scene.add(2, **BY_TENANT)
    await scene.claim()
    return lambda store, again: store.set_value_rule(ValueRule("resize", "acme", 2))


@scenario("reset_value_rule", if_done=False)
async def reset_value_rule(scene: Scene) -> Call:
    await scene.around.set_value_rule(ValueRule("resize", None, 2))
    return lambda store, again: store.reset_value_rule("resize", None)


@scenario("value_rules")
async def value_rules(scene: Scene) -> Call:
    await scene.around.set_value_rule(ValueRule("resize", None, 2))
    return lambda store, again: store.value_rules()


@scenario("enqueue")
async def enqueue_at_gates(scene: Scene) -> Call:
    tasks = [
        scene.new_task(ordering_key="k", **BY_TENANT),
        scene.new_task(ordering_key="k", delay=5.0),
    ]
    return lambda store, again: store.enqueue(tasks, repeated=again)


@scenario("open_gates", if_done=0)
async def open_gates(scene: Scene) -> Call:
    await scene.add(2, ordering_key="k")
    return lambda store, again: store.open_gates(10)


# A claim may leave to the leader what is called for long.
@scenario("claim", if_done=tuple(ClaimAnswer(None)), seconds_later=0.0)
async def claim_through_gates(scene: Scene) -> Call:
    await scene.add(2, ordering_key="k", **BY_TENANT)
    return lambda store, again: _claim(store)


@scenario("settle", if_done=[Answer.ALREADY])
async def settle_at_gates(scene: Scene) -> Call:
    await scene.add(2, ordering_key="k", **BY_TENANT)
    claim = await scene.claim()
    return lambda store, again: store.settle(settlements(claim, Outcome.COMPLETED))


@scenario("order_workers")
async def order_workers(scene: Scene) -> Call:
    await scene.around.register(worker_info(), lease=LEASE)
    return lambda store, again: store.order_workers([WORKER], WorkerOrder.PAUSE)


@scenario("types")
async def types(scene: Scene) -> Call:
    await scene.around.stop_retries("resize", "stop")
    return lambda store, again: store.types()


@scenario("get")
async def get(scene: Scene) -> Call:
    (task_id,) = await scene.add()
    return lambda store, again: store.get(task_id)


@scenario("situation")
async def situation(scene: Scene) -> Call:
    await scene.around.set_rule(LaneRule(RuleScope.TYPE, "resize", concurrency=1))
    await scene.add()
    await scene.claim()
    (task_id,) = await scene.add()
    return lambda store, again: store.situation(task_id, ageing=timedelta(seconds=6))


@scenario("ended")
async def ended(scene: Scene) -> Call:
    ids = [await scene.bury(Outcome.COMPLETED), await scene.bury(Outcome.DEAD), *await scene.add()]
    return lambda store, again: store.ended(ids)


@scenario("tasks")
async def tasks(scene: Scene) -> Call:
    await scene.bury(Outcome.FAILED)
    await scene.add(2)
    wanted = TaskFilter((TaskState.PENDING, TaskState.FAILED))
    return lambda store, again: store.tasks(wanted)


@scenario("queues")
async def queues(scene: Scene) -> Call:
    await scene.add(2)
    return lambda store, again: store.queues()


@scenario("now")
async def now(scene: Scene) -> Call:
    return lambda store, again: store.now()


@scenario("due")
async def due(scene: Scene) -> Call:
    return lambda store, again: store.due()


@scenario("workers")
async def workers(scene: Scene) -> Call:
    await scene.around.register(worker_info(), lease=LEASE)
    return lambda store, again: store.workers()


@scenario("has_work")
async def has_work(scene: Scene) -> Call:
    await scene.add()
    return lambda store, again: store.has_work(["resize"], None)


# Leaders


# Whoever does not know that it was elected is not: the seat is free again when the term is over.
@scenario("lead", if_done=None)
async def lead(scene: Scene) -> Call:
    return lambda store, again: store.lead(WORKER, current=None, term=TERM)


@scenario("lead")
async def lead_on(scene: Scene) -> Call:
    leadership = await scene.lead()
    return lambda store, again: store.lead(WORKER, current=leadership, term=TERM)


@scenario("resign")
async def resign(scene: Scene) -> Call:
    leadership = await scene.lead()
    return lambda store, again: store.resign(leadership)


@scenario("promote", if_done=0, seconds_later=10.0)
async def promote(scene: Scene) -> Call:
    await scene.add(2, delay=5.0)
    leadership = await scene.lead()
    return lambda store, again: store.promote(10, leadership=leadership)


@scenario("promote", if_done=0, seconds_later=5.5)
async def promote_for_a_leader_that_is_late(scene: Scene) -> Call:
    await scene.add(2, delay=5.0)
    return lambda store, again: store.promote(10, just_due=True)


@scenario("rescue", if_done=Rescued(), seconds_later=60.0)
async def rescue(scene: Scene) -> Call:
    await scene.add(3)
    claim = await scene.claim()
    await scene.around.start(
        [Started(claim.token, task.id, task.generation, 0.5) for task in claim.tasks[:1]]
    )
    await scene.around.cancel(claim.tasks[1].id, "no more")
    leadership = await scene.lead()
    return lambda store, again: store.rescue(10, leadership=leadership)


@scenario("expire", if_done=Expired(), seconds_later=100.0)
async def expire(scene: Scene) -> Call:
    await scene.add(2, expires=5.0)
    leadership = await scene.lead()
    await scene.pass_time(6)
    return lambda store, again: store.expire(10, leadership=leadership)


@scenario("unknown_types")
async def unknown_types(scene: Scene) -> Call:
    await scene.add(2)
    return lambda store, again: store.unknown_types()


@scenario("fail_unknown", if_done=[], seconds_later=100.0)
async def fail_unknown(scene: Scene) -> Call:
    await scene.add(2)
    leadership = await scene.lead()
    await scene.pass_time(6)
    return lambda store, again: store.fail_unknown(
        "resize", error=ERROR, ready_for=timedelta(seconds=5), limit=10, leadership=leadership
    )


@scenario("remove_dead_workers", if_done=[], seconds_later=600.0)
async def remove_dead_workers(scene: Scene) -> Call:
    await scene.around.register(worker_info(), lease=LEASE)
    await scene.around.register(worker_info(OTHER_WORKER), lease=LEASE)
    leadership = await scene.lead()
    return lambda store, again: store.remove_dead_workers(leadership=leadership)


@scenario("tidy", if_done=ANYTHING, seconds_later=3500.0, in_steps=True)
async def tidy(scene: Scene) -> Call:
    leadership = await scene.lead()
    ids = await scene.add(2)
    # Asked for, and yet it came back: what a crash between the two leaves behind.
    await scene.watcher.execute(
        "INSERT INTO windlass.cancel_request VALUES ($1, 'no more', windlass.clock())", ids[0]
    )
    await scene.watcher.execute(
        "INSERT INTO windlass.lane SELECT lane, queue, type, priority, kind FROM windlass.lane"
    )
    await scene.watcher.execute("UPDATE windlass.lane SET listed_at = $1", NOON)
    return lambda store, again: store.tidy(leadership=leadership)


@scenario("prepare_history", if_done=ANYTHING, in_steps=True)
async def prepare_history(scene: Scene) -> Call:
    leadership = await scene.lead()
    await _drop_partitions(scene, beyond=timedelta(days=8))
    return lambda store, again: store.prepare_history(leadership=leadership)


@scenario("retain", if_done=ANYTHING, in_steps=True)
async def retain(scene: Scene) -> Call:
    leadership = await scene.lead()
    await scene.bury(Outcome.DEAD)
    await scene.watcher.execute(
        "SET session_replication_role = replica; "
        "UPDATE windlass.dead SET drop_on = '2027-01-01'; "
        "SET session_replication_role = DEFAULT"
    )
    await scene.watcher.execute("SELECT windlass.add_history_partition('2027-01-01', '2027-01-02')")
    return lambda store, again: store.retain(leadership=leadership)


async def _drop_partitions(scene: Scene, *, beyond: timedelta) -> None:
    first = (NOON + beyond).strftime("history_%Y%m%d")
    names = await scene.watcher.fetch(
        "SELECT relname FROM pg_class WHERE relnamespace = 'windlass'::regnamespace "
        "AND relkind = 'r' AND relname LIKE 'history_%' AND relname >= $1",
        first,
    )
    for (name,) in names:
        await scene.watcher.execute(f"DROP TABLE windlass.{name}")
