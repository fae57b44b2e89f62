"""Drives the executable specification and another store with the same commands, and compares.

Both clocks stand still and are moved together, so every time must be equal. Tokens and terms
differ, so whatever names one is kept as a pair: what the model gave, and what the subject gave.
"""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import count
from typing import Any, Protocol, TypeVar
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from contract.machine_plain import milliseconds, plain, value, without_error_times, without_zeros
from contract.machine_values import (
    BEGINNING,
    LEASE,
    QUEUES,
    TERM,
    TICK,
    TYPES,
    Held,
    NewTaskOptions,
    Pair,
    changes,
    endings,
    lane_rules,
    leases,
    new_calls,
    new_tasks,
    seconds,
    settlements,
    some_of,
    some_queues,
    some_types,
    value_rules,
    workers,
)
from windlass.model.errors import WindlassError
from windlass.model.rule import LaneRule, ValueRule
from windlass.model.task import (
    Change,
    ClaimRequest,
    Fence,
    Leadership,
    NewTask,
    Pulse,
    Settlement,
    Started,
    TaskFilter,
    TaskRecord,
    TaskState,
    WorkerInfo,
)
from windlass.store.memory import MemoryStore
from windlass.store.port import Store
from windlass.testing.store_contract.steps import all_pages

T = TypeVar("T")


class Subject(Protocol):
    """The store that is compared with the model, with one event loop for all its examples."""

    @property
    def store(self) -> Store:
        """The open store."""

    def reset(self) -> None:
        """Empty the store: no task, key, claim, worker, pause; nobody leads."""

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call of the store to its end."""

    def set_clock(self, now: datetime) -> None:
        """Let the store's clock stand at this time; it may also go back."""


@dataclass(frozen=True)
class Command:
    """Something a step may do: how often, with what, and which list must not be empty for it."""

    weight: int
    needs: str
    arguments: dict[str, st.SearchStrategy[Any]]


COMMANDS: dict[str, Command] = {}
_Method = TypeVar("_Method", bound=Callable[..., None])


def command(
    weight: int, *, needs: str = "known", **arguments: st.SearchStrategy[Any]
) -> Callable[[_Method], _Method]:
    def enlist(method: _Method) -> _Method:
        COMMANDS[method.__name__] = Command(weight, needs, arguments)
        return method

    return enlist


class StoreMachine(RuleBasedStateMachine):
    """The commands; `machine_for` names the subject."""

    subject: Subject

    def __init__(self) -> None:
        super().__init__()
        self.now = BEGINNING
        self.model = MemoryStore(clock=lambda: self.now)
        self.ids = count(1 << 80)
        self.calls: list[tuple[NewTask, ...]] = []
        self.known: list[UUID] = []
        self.held: list[Held] = []
        self.settlements: list[tuple[Pair[Settlement], ...]] = []
        self.leaderships: list[Pair[Leadership]] = []
        self.started: set[Held] = set()
        self.fences = Pair(0, 0)
        self.alone_waiting = False
        self.steps = count()
        self.subject_now: datetime | None = None
        self.subject.reset()

    def both(
        self,
        call: Callable[[Store], Coroutine[Any, Any, T]],
        for_subject: Callable[[Store], Coroutine[Any, Any, T]] | None = None,
    ) -> Pair[Any]:
        """Make a call on both stores; what they raise is an answer too."""
        if self.subject_now != self.now:
            self.subject.set_clock(self.now)
            self.subject_now = self.now
        return Pair(
            _answer(lambda: _run_at_once(call(self.model))),
            _answer(lambda: self.subject.run((for_subject or call)(self.subject.store))),
        )

    def same(
        self,
        call: Callable[[Store], Coroutine[Any, Any, T]],
        for_subject: Callable[[Store], Coroutine[Any, Any, T]] | None = None,
        *,
        by: Callable[[T], object] = lambda answer: answer,
    ) -> bool:
        """Make a call on both stores; see that both did the same, and whether they did it."""
        model, subject = self.both(call, for_subject)
        if isinstance(model, type) or isinstance(subject, type):
            assert model == subject, f"model: {model}, subject: {subject}"
            return False
        seen = Pair(by(model), by(subject))
        assert seen.model == seen.subject, f"model:   {seen.model}\nsubject: {seen.subject}"
        return True

    def move_clock(self, delta: timedelta) -> None:
        self.now += delta

    @command(4, options=new_calls, newest_first=st.booleans())
    def enqueue(
        self, data: st.DataObject, options: list[NewTaskOptions], newest_first: bool
    ) -> None:
        # The order within a call and the order of the ids must not be taken for each other.
        ids = sorted((UUID(int=next(self.ids)) for _ in options), reverse=newest_first)
        call = tuple(
            each.task(task_id, self.now) for each, task_id in zip(options, ids, strict=True)
        )
        self._enqueue(call, Pair(None, None))

    @command(1, needs="calls")
    def enqueue_again(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(self.calls))
        self.same(
            lambda store: store.enqueue(call, repeated=True),
            by=lambda answers: [answer.id for answer in answers],
        )

    @command(2, needs="held", options=new_tasks)
    def enqueue_child(self, data: st.DataObject, options: NewTaskOptions) -> None:
        fences = data.draw(st.sampled_from(self.held)).fences()
        task = options.task(UUID(int=next(self.ids)), self.now)
        self._enqueue((task,), fences)

    def _enqueue(self, call: tuple[NewTask, ...], fences: Pair[Fence] | Pair[None]) -> None:
        was_done = self.same(
            lambda store: store.enqueue(call, fence=fences.model),
            lambda store: store.enqueue(call, fence=fences.subject),
        )
        self.calls.append(call)
        if was_done or not self.known:
            self.known += [task.id for task in call]

    @command(
        4,
        worker_id=workers,
        types=some_types,
        queues=some_queues,
        limit=st.integers(1, 6),
        lease=leases,
        ageing=st.sampled_from([timedelta(0), timedelta(seconds=1), timedelta(seconds=6)]),
        alone=st.sampled_from([False, False, True]),
        at_most=st.sampled_from([None, None, 0, 1, 3]),
        other_than=st.sampled_from([(), (), (), (QUEUES[0],)]),
    )
    def claim(self, data: st.DataObject, **asked: Any) -> None:
        self._claim(ClaimRequest(**asked))

    @command(5, worker_id=workers)
    def work(self, data: st.DataObject, worker_id: UUID) -> None:
        """Claim whatever there is, start some of it, and settle some of it."""
        if granted := self._claim_everything(worker_id):
            self._start(data.draw(some_of(granted)), 0.5)
            if data.draw(st.sampled_from([True, False, False])):
                self._cancel(data.draw(st.sampled_from(granted)).task.id, "too late")
            self._settle_as_drawn(data.draw(some_of(granted)), data)

    @command(4, worker_id=workers, times=st.sampled_from([1, 1, 2, 3]))
    def lose_worker(self, data: st.DataObject, worker_id: UUID, times: int) -> None:
        """Claim whatever there is, start and settle some of it or nothing, and be heard no more."""
        for _ in range(times):
            if granted := self._claim_everything(worker_id):
                act = data.draw(
                    st.sampled_from(["nothing", "nothing", "start", "settle", "cancel"])
                )
                some = data.draw(some_of(granted))
                match act:
                    case "start":
                        self._start(some, 0.5)
                    case "settle":
                        self._settle_as_drawn(some, data)
                    case "cancel":
                        self._cancel(some[0].task.id, "too late")
            self.move_clock(LEASE)
            self.same(lambda store: store.rescue(100))

    def _claim_everything(self, worker_id: UUID) -> list[Held]:
        request = ClaimRequest(worker_id, TYPES, 10, LEASE, timedelta(seconds=6))
        granted = self._claim(request)
        if self.alone_waiting:
            granted += self._claim(replace(request, alone=True))
        return granted

    def _claim(self, request: ClaimRequest) -> list[Held]:
        # Claims that expire at the same time would be rescued in the order of their tokens.
        self.move_clock(TICK)
        # Of calls that are older than a moment a store may leave those to its leader.
        self._answer_calls()
        model, subject = self.both(lambda store: store.claim(request))
        assert plain(model.claim) == plain(subject.claim)
        assert model.alone_waiting == subject.alone_waiting
        self.alone_waiting = model.alone_waiting
        assert milliseconds(model.due_in) == milliseconds(subject.due_in)
        assert model.is_capped == subject.is_capped
        if model.claim is None:
            return []
        before, self.fences = self.fences, Pair(model.claim.fence, subject.claim.fence)
        assert self.fences.model > before.model
        assert self.fences.subject > before.subject
        tokens = Pair(model.claim.token, subject.claim.token)
        granted = [Held(tokens, task) for task in model.claim.tasks]
        self.held += granted
        return granted

    def _answer_calls(self) -> None:
        """How many there are is a store's own matter: a gate may be called twice."""
        self.same(lambda store: store.open_gates(1000), by=lambda _: None)

    def _draw_held(self, data: st.DataObject) -> list[Held]:
        """Draw as often from those just claimed as from those that may be lost long ago."""
        return data.draw(some_of(data.draw(st.sampled_from([self.held[-6:], self.held]))))

    @command(2, needs="held", after=seconds)
    def start(self, data: st.DataObject, after: float) -> None:
        self._start(self._draw_held(data), after)

    def _start(self, several: list[Held], after: float) -> None:
        fences = [each.fences() for each in several]
        self.started.update(several)
        self.same(
            lambda store: store.start([Started(*each.model, after) for each in fences]),
            lambda store: store.start([Started(*each.subject, after) for each in fences]),
        )

    @command(
        3,
        needs="held",
        worker_id=workers,
        lease=leases,
        silent_for=st.sampled_from([0, 0, 9, 11, 29, 31]),
        running=st.integers(0, 3),
        trusted=st.booleans(),
    )
    def pulse(
        self,
        data: st.DataObject,
        *,
        worker_id: UUID,
        lease: timedelta,
        silent_for: int,
        running: int,
        trusted: bool,
    ) -> None:
        self.move_clock(timedelta(seconds=silent_for) + TICK)
        tokens = self._at_most_one_alive([each.tokens for each in self._draw_held(data)])
        asked = Pulse(worker_id, [], lease, running, idle=not running, trusted=trusted)
        model, subject = self.both(
            lambda store: store.pulse(asked._replace(tokens=[each.model for each in tokens])),
            lambda store: store.pulse(asked._replace(tokens=[each.subject for each in tokens])),
        )
        assert model.registered == subject.registered
        assert {each for each in tokens if each.model in model.kept} == {
            each for each in tokens if each.subject in subject.kept
        }

    def _at_most_one_alive(self, tokens: list[Pair[UUID]]) -> list[Pair[UUID]]:
        """Leave out the others: two that are extended at once would expire at the same time."""
        alive = [each for each in tokens if each.model in self.model._claims]
        return [each for each in tokens if each not in alive or each == alive[0]]

    @command(4, needs="held")
    def settle(self, data: st.DataObject) -> None:
        self._settle_as_drawn(self._draw_held(data), data)

    def _settle_as_drawn(self, several: list[Held], data: st.DataObject) -> None:
        pairs = tuple(
            settlements(each, data.draw(endings), reported=each in self.started) for each in several
        )
        if pairs:
            self._settle(pairs)
            self.settlements.append(pairs)

    @command(2, needs="settlements")
    def settle_again(self, data: st.DataObject) -> None:
        self._settle(data.draw(st.sampled_from(self.settlements)))

    def _settle(self, pairs: tuple[Pair[Settlement], ...]) -> None:
        self.same(
            lambda store: store.settle([each.model for each in pairs]),
            lambda store: store.settle([each.subject for each in pairs]),
        )

    @command(2, reason=st.sampled_from(["too late", "too early"]))
    def cancel(self, data: st.DataObject, reason: str) -> None:
        self._cancel(self._draw_task(data, TaskState.CLAIMED, TaskState.RUNNING), reason)

    @command(1, reason=st.sampled_from(["too late", "too early"]))
    def cancel_many(self, data: st.DataObject, reason: str) -> None:
        task_ids = data.draw(st.lists(st.sampled_from(self.known), max_size=4))
        self.same(lambda store: store.cancel_many(task_ids, reason))
        self.same(lambda store: store.requested_cancellations(self.known))

    def _draw_task(self, data: st.DataObject, *states: TaskState) -> UUID:
        """Draw mostly from the tasks in these states, sometimes from all that were ever known."""
        fitting = [each for each, task in self.model._tasks.items() if task.status in states]
        pool = data.draw(st.sampled_from([fitting or self.known] * 3 + [self.known]))
        return data.draw(st.sampled_from(pool))

    def _cancel(self, task_id: UUID, reason: str) -> None:
        self.same(lambda store: store.cancel(task_id, reason))
        self.same(lambda store: store.requested_cancellations(self.known))

    @command(3, change=changes, starts_in=st.sampled_from([None, None, -60, 0, 9]))
    def change(self, data: st.DataObject, change: Change, starts_in: int | None) -> None:
        task_id = self._draw_task(data, TaskState.PENDING, TaskState.SCHEDULED)
        if starts_in is not None:
            change = replace(change, delay=None, at=self.now + timedelta(seconds=starts_in))
        self.same(lambda store: store.change(task_id, change))

    @command(2)
    def retry(self, data: st.DataObject) -> None:
        task_id = self._draw_task(data, TaskState.FAILED, TaskState.DEAD, TaskState.CANCELLED)
        self.same(lambda store: store.retry(task_id))

    @command(1, queue=st.sampled_from(QUEUES), paused=st.sampled_from([True, False, False]))
    def pause_or_resume(self, data: st.DataObject, queue: str, paused: bool) -> None:
        self.same(lambda store: store.pause(queue) if paused else store.resume(queue))

    @command(1, kind=st.sampled_from(TYPES), paused=st.sampled_from([True, False, False]))
    def pause_or_resume_type(self, data: st.DataObject, kind: str, paused: bool) -> None:
        self.same(lambda store: store.pause_type(kind) if paused else store.resume_type(kind))

    @command(2, rule=value_rules, act=st.sampled_from(["set", "set", "reset", "declare"]))
    def set_or_reset_value_rule(self, data: st.DataObject, rule: ValueRule, act: str) -> None:
        match act:
            case "set":
                self.same(lambda store: store.set_value_rule(rule))
            case "reset":
                self.same(lambda store: store.reset_value_rule(rule.type, rule.value))
            case _:
                each = replace(rule, value=None)
                self.same(lambda store: store.declare_rules([], types=TYPES, values=[each]))
        self.same(lambda store: store.value_rules())

    @command(1)
    def open_gates(self, data: st.DataObject) -> None:
        self._answer_calls()

    @command(2, rule=lane_rules, act=st.sampled_from(["set", "set", "reset", "declare"]))
    def set_or_reset_rule(self, data: st.DataObject, rule: LaneRule, act: str) -> None:
        match act:
            case "set":
                self.same(lambda store: store.set_rule(rule))
            case "reset":
                self.same(lambda store: store.reset_rule(*rule.key))
            case _:
                self.same(lambda store: store.declare_rules([rule], types=TYPES))
        self.same(lambda store: store.rules())

    @command(
        1, worker_id=workers, lease=leases, act=st.sampled_from(["enter", "leave", "rest", "work"])
    )
    def register_or_leave(
        self, data: st.DataObject, worker_id: UUID, lease: timedelta, act: str
    ) -> None:
        info = WorkerInfo(worker_id, "a.example", 7, "0.1.0", 100, TYPES, None)
        match act:
            case "enter":
                self.same(lambda store: store.register(info, lease=lease))
            case "leave":
                self.same(lambda store: store.deregister(worker_id))
            case _:
                self.same(lambda store: store.set_idle(worker_id, act == "rest"))
        self._compare_workers()

    def _compare_workers(self) -> None:
        self.same(
            lambda store: store.workers(),
            by=lambda found: sorted(found, key=lambda worker: worker.id),
        )

    @command(1, candidate=workers)
    def lead_or_resign(self, data: st.DataObject, candidate: UUID) -> None:
        before: list[Pair[Leadership] | None] = [None, *self.leaderships]
        current = data.draw(st.sampled_from(before))
        if current is None:
            self._lead(candidate, Pair(None, None))
        elif data.draw(st.booleans()):
            self._lead(current.model.holder, current)
        else:
            self._led(lambda store, shown: store.resign(shown), current)
        self._compare_workers()

    def _lead(self, candidate: UUID, current: Pair[Leadership] | Pair[None]) -> None:
        model, subject = self.both(
            lambda store: store.lead(candidate, current=current.model, term=TERM),
            lambda store: store.lead(candidate, current=current.subject, term=TERM),
        )
        assert (model is None) == (subject is None)
        assert (model == current.model) == (subject == current.subject)
        if model is not None:
            self.leaderships.append(Pair(model, subject))

    def _led(
        self,
        chore: Callable[[Store, Leadership], Coroutine[Any, Any, T]],
        leadership: Pair[Leadership],
        *,
        by: Callable[[T], object] = lambda answer: answer,
    ) -> None:
        self.same(
            lambda store: chore(store, leadership.model),
            lambda store: chore(store, leadership.subject),
            by=by,
        )

    @command(1, candidate=workers)
    def do_chores(self, data: st.DataObject, candidate: UUID) -> None:
        self._lead(candidate, Pair(None, None))
        # Mostly the leader, sometimes one that may have been deposed long ago.
        leader = data.draw(st.sampled_from([*self.leaderships[-1:] * 3, *self.leaderships]))
        self._led(lambda store, shown: store.promote(100, leadership=shown), leader)
        self._led(lambda store, shown: store.rescue(100, leadership=shown), leader)
        self._led(
            lambda store, shown: store.remove_dead_workers(leadership=shown), leader, by=sorted
        )
        self._led(lambda store, shown: store.tidy(leadership=shown), leader, by=lambda _: None)
        if data.draw(st.sampled_from([True, False, False])):
            self._retain(leader)
        self._compare_workers()

    @command(1, needs="settlements", days=st.sampled_from([1, 3, 8, 31]), candidate=workers)
    def let_days_pass_and_retain(self, data: st.DataObject, days: int, candidate: UUID) -> None:
        self.move_clock(timedelta(days=days))
        self._lead(candidate, Pair(None, None))
        self._retain(self.leaderships[-1])

    def _retain(self, leader: Pair[Leadership]) -> None:
        # A call is repeated within minutes: never after its tasks were kept for their time.
        self.calls.clear()
        self._led(
            lambda store, shown: store.retain(leadership=shown),
            leader,
            by=lambda retained: retained.dead,
        )

    @command(
        4,
        seconds=st.sampled_from([0.0, 0.5, 1.5, 5.0, 10.0, 31.0, 40.0]),
        rescues=st.sampled_from([0, 0, 1, 100]),
        promotes=st.sampled_from([True, True, False]),
    )
    def let_time_pass(
        self, data: st.DataObject, seconds: float, rescues: int, promotes: bool
    ) -> None:
        self.move_clock(timedelta(seconds=seconds))
        if promotes:
            self.same(lambda store: store.promote(100))
        if rescues:
            self.same(lambda store: store.rescue(rescues))

    @command(
        1,
        types=some_types,
        queues=some_queues,
        statuses=st.lists(st.sampled_from(TaskState), unique=True).map(tuple),
        tag=st.none() | st.sampled_from(["red", "blue"]),
        limit=st.sampled_from([1, 3, 50]),
    )
    def look(
        self,
        data: st.DataObject,
        types: tuple[str, ...],
        queues: tuple[str, ...] | None,
        **wanted: Any,
    ) -> None:
        queue = queues[0] if queues else None
        asked = TaskFilter(type=data.draw(st.sampled_from([types[0], None])), queue=queue, **wanted)
        self.same(lambda store: store.has_work(types, queues))
        self.same(lambda store: listed(store, asked), by=without_error_times)

    @initialize(
        data=st.data(),
        left_out=st.sets(st.sampled_from(sorted(COMMANDS)), max_size=4),
        options=new_calls,
    )
    def begin(self, data: st.DataObject, left_out: set[str], options: list[NewTaskOptions]) -> None:
        self.left_out = left_out
        self.enqueue(data, options, newest_first=False)

    # One rule and weights of our own: left to itself, Hypothesis mutes half of the rules in an
    # example, and few tasks get as far as being rescued twice.
    @rule(
        name=st.sampled_from(
            [each for each, known in COMMANDS.items() for _ in range(known.weight)]
        ),
        data=st.data(),
    )
    def step(self, name: str, data: st.DataObject) -> None:
        if name in self.left_out or not getattr(self, COMMANDS[name].needs):
            name = "work"
        arguments = {
            label: data.draw(strategy, label)
            for label, strategy in COMMANDS[name].arguments.items()
        }
        getattr(self, name)(data, **arguments)

    @invariant()
    def tasks_and_queues_are_the_same(self) -> None:
        # A look at all of them costs more than a step: in turns, and each task again at the end.
        turn = next(self.steps) % 4
        if turn == 0:
            self.same(lambda store: listed(store, TaskFilter(limit=1000)), by=without_error_times)
        elif turn == 2:
            self.same(lambda store: store.queues(), by=without_zeros)

    def teardown(self) -> None:
        self.same(lambda store: store.queues(), by=without_zeros)
        for task_id in self.known:
            self._look_at(task_id)
        self.same(
            lambda store: store.ended(self.known),
            by=lambda answer: (
                sorted((*each[:2], value(each.result), each.last_error) for each in answer[0]),
                sorted(answer[1]),
            ),
        )

    def _look_at(self, task_id: UUID) -> None:
        self.same(
            lambda store: store.get(task_id),
            by=lambda record: without_error_times([record]),
        )


async def listed(store: Store, asked: TaskFilter) -> list[TaskRecord]:
    """Return what all pages hold together: those of the stores may end at other tasks."""
    pages = await all_pages(store, asked)
    return sorted((record for page in pages for record in page.records), key=lambda one: one.id)


def machine_for(subject: Subject) -> type[StoreMachine]:
    """Return the machine that compares this subject with the model."""
    return type("StoreMachineForSubject", (StoreMachine,), {"subject": subject})


def _run_at_once(call: Coroutine[Any, Any, T]) -> T:
    """Run a call of the model, which never suspends, without an event loop."""
    try:
        call.send(None)
    except StopIteration as stop:
        answer: T = stop.value
        return answer
    raise AssertionError("the model suspended")


def _answer(call: Callable[[], T]) -> T | type[WindlassError]:
    try:
        return call()
    except WindlassError as error:
        return type(error)
