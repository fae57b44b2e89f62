"""The store as its users see it: one small Protocol per reader. One method is one transaction."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol, overload
from uuid import UUID

from windlass.model.breaker import SharedBreaker
from windlass.model.dead import (
    DeadFilter,
    DeadLetter,
    DiscardAnswer,
    FoundDead,
    QueuedLetter,
    Replay,
    Replayed,
)
from windlass.model.rule import LaneRule, RuleRecord, RuleScope, ValueRecord, ValueRule
from windlass.model.schedule import (
    DueSchedule,
    Schedule,
    ScheduleChanges,
    ScheduleRecord,
    SlotDecision,
    SlotRecord,
)
from windlass.model.situation import Situation
from windlass.model.task import (
    Answer,
    Buried,
    CancelAnswer,
    Change,
    ClaimAnswer,
    ClaimRequest,
    Completion,
    Due,
    Ended,
    Enqueued,
    Expired,
    Fence,
    Leadership,
    NewTask,
    Pulse,
    PulseAnswer,
    QueueRecord,
    Rescued,
    Retained,
    Settlement,
    Started,
    TaskFilter,
    TaskPage,
    TaskRecord,
    TypeDefaults,
    TypeRecord,
    WorkerInfo,
    WorkerOrder,
    WorkerRecord,
)

if TYPE_CHECKING:
    from windlass.model.examination import Examination


class Guest(Protocol):
    """A connection that a caller brings, to write in its own transaction.

    A synchronous one never suspends, so that `run_now` can run what is asked of it.
    """

    is_async: bool

    async def commits_by_itself(self) -> bool:
        """Say whether each statement is a transaction of its own, for none is open."""

    async def fetch(self, statement: str, *texts: str | None) -> Sequence[Sequence[Any]]:
        """Run a statement with texts for its parameters and return its rows."""

    async def discard(self) -> None:
        """Close it: nobody knows what is under way on it."""


class GuestStore(Protocol):
    """How callers bring their own connections."""

    def guest(self, connection: Any, *, is_async: bool) -> Guest:
        """Take in a connection of the caller, or raise `TypeError`."""


class TaskColumns(Sequence[NewTask]):
    """Many tasks by their fields: an object for each would cost as much as its payload."""

    def __init__(self, columns: Iterable[Iterable[Any]]) -> None:
        self._columns = [list(column) for column in columns]

    @classmethod
    def of(cls, tasks: Sequence[NewTask]) -> "TaskColumns":
        """Return tasks by their fields."""
        if isinstance(tasks, TaskColumns):
            return tasks
        return TaskColumns(zip(*tasks, strict=True) if tasks else _NO_COLUMNS)

    @property
    def columns(self) -> list[list[Any]]:
        """What all tasks have for each field, in the order of the fields."""
        return self._columns

    def __len__(self) -> int:
        return len(self._columns[0])

    @overload
    def __getitem__(self, place: int) -> NewTask: ...
    @overload
    def __getitem__(self, place: slice) -> "TaskColumns": ...

    def __getitem__(self, place: int | slice) -> "NewTask | TaskColumns":
        if isinstance(place, slice):
            return TaskColumns(column[place] for column in self._columns)
        return NewTask._make(column[place] for column in self._columns)

    def __iter__(self) -> Iterator[NewTask]:
        return map(NewTask._make, zip(*self.columns, strict=True))


_NO_COLUMNS = [()] * len(NewTask._fields)


class NewTasks(TaskColumns):
    """Very many, none of them with a key, each made when it is first read.

    A store may write the first ones while the others are not made yet. Making one may raise.
    """

    def __init__(self, number: int, make: Callable[[int, int], Sequence[NewTask]]) -> None:
        super().__init__(_NO_COLUMNS)
        self._number = number
        self._make = make  # those from one place until before another

    @property
    def columns(self) -> list[list[Any]]:
        """The same, with all of them made."""
        self._make_until(self._number)
        return self._columns

    def __len__(self) -> int:
        return self._number

    @overload
    def __getitem__(self, place: int) -> NewTask: ...
    @overload
    def __getitem__(self, place: slice) -> TaskColumns: ...

    def __getitem__(self, place: int | slice) -> NewTask | TaskColumns:
        # Counted from the beginning: the end is not made yet.
        if isinstance(place, int):
            place = range(self._number)[place]
            self._make_until(place + 1)
        else:
            start, end, step = place.indices(self._number)
            self._make_until(end if step == 1 else self._number)
            place = slice(start, end) if step == 1 else place
        return super().__getitem__(place)

    def _make_until(self, end: int) -> None:
        made = len(self._columns[0])
        if end > made:
            added = TaskColumns.of(self._make(made, end))
            for column, further in zip(self._columns, added.columns, strict=True):
                column.extend(further)


class EnqueueStore(GuestStore, Protocol):
    """What a producer needs."""

    async def enqueue_within(
        self, guest: Guest, tasks: Sequence[NewTask], *, fence: Fence | None = None
    ) -> list[Enqueued]:
        """Add all tasks or none as `enqueue` does, once the guest's transaction commits."""

    async def enqueue(
        self,
        tasks: Sequence[NewTask],
        *,
        fence: Fence | None = None,
        repeated: bool = False,
    ) -> list[Enqueued]:
        """Add all tasks or none, and answer in their order.

        A task whose (type, idempotency key) is known with an equal payload is answered with the
        first one; with another payload the whole call raises `IdempotencyConflict`. A fence that
        no longer holds raises `LeaseLost`. `repeated` says that the same call may have been
        carried out before: tasks whose id is already there are answered and not added again.
        Tasks may be `NewTasks`: what making one raises is raised, and none is added.
        """

    async def type_defaults(self, name: str) -> TypeDefaults | None:
        """Return what a worker registered for this type, if any did."""

    async def register_types(self, types: Sequence[TypeDefaults]) -> None:
        """Make types known; the last registration wins."""


class ClaimStore(Protocol):
    """What the fetcher needs: permission to run, granted to one worker at a time."""

    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """Grant up to `limit` ready tasks of the worker's types and queues under one lease.

        Lanes (queue, type, priority, kind) are taken in order of their head's ready time less
        the ageing step for each point of priority, each lane in the order in which its tasks
        became ready. Paused queues and types are left out. Where a queue or a type has a limit, no more
        are granted than it lets through; of a limit of concurrency no more than `at_most`, or a quarter of
        what it has left. What a claim holds of a limit comes
        back with the settlement or the rescue of each task. One that should have begun by now, and of which no
        attempt was made, is granted with that as the reason of its cancellation. With `alone`, only tasks recovered twice: one,
        or while there are more than a hundred, a batch halved with each recovery. With `lane`, a
        store may leave out all others, and with `task_id` all other tasks, and what it would say of
        them.
        """

    async def start(self, started: Sequence[Started]) -> frozenset[UUID]:
        """Record tasks as running and return the ids of those whose claim is lost."""

    async def requested_cancellations(self, task_ids: Sequence[UUID]) -> dict[UUID, str]:
        """Return the reasons of the cancellations asked for among these tasks."""


class SettleStore(Protocol):
    """What the committer needs."""

    async def settle(self, settlements: Sequence[Settlement]) -> list[Answer]:
        """Apply each settlement whose claim and generation still hold, and answer in order.

        A settlement that was applied before is answered so and changes nothing; one whose claim
        or generation is gone is lost and changes nothing. A task that would come back although
        its cancellation was asked for ends as cancelled. A retry ends the task as dead if it would
        begin when the task is older than `max_age`, or if retries of its type are stopped, and is
        answered so. What its type calls back is enqueued with the end of a task.
        """

    async def held(self, settlements: Sequence[Settlement]) -> list[bool]:
        """Say which of these somebody else's transaction holds, so that the others need not wait."""


class CompleteStore(GuestStore, Protocol):
    """What a handler needs that ends its task in a transaction of its own."""

    async def check_completion(self, fence: Fence) -> None:
        """Raise `LeaseLost` if the claim or the generation is gone; make room for the ended task."""

    def completing(
        self, completion: Completion, *, idle: timedelta
    ) -> AbstractAsyncContextManager[Any]:
        """Open a transaction that ends the task when it is left, if its claim still holds then.

        It may idle for so long between two statements. Whatever is raised within rolls it back.
        """

    async def complete_within(self, guest: Guest, completion: Completion) -> None:
        """End the task once the guest's transaction commits, or raise `LeaseLost`."""


class PulseStore(Protocol):
    """What the heartbeat needs."""

    async def register(self, worker: WorkerInfo, *, lease: timedelta) -> None:
        """Enter the worker into the registry."""

    async def pulse(self, pulse: Pulse) -> PulseAnswer:
        """Extend the claims that have not expired and note a sign of life, in one write.

        A claim that somebody holds for longer than its patience is skipped: ask again soon. The answer
        says what people ask of the worker.
        """

    async def set_idle(self, worker_id: UUID, idle: bool) -> None:
        """Say whether enqueues should notify this worker."""

    async def deregister(self, worker_id: UUID) -> None:
        """Leave the registry; claims are not touched."""


class OperateStore(Protocol):
    """What people and applications may do to tasks, queues and workers."""

    async def cancel(self, task_id: UUID, reason: str) -> CancelAnswer:
        """End a waiting task at once; ask the worker of a claimed one; raise `TaskNotFound`."""

    async def cancel_many(self, task_ids: Sequence[UUID], reason: str) -> list[CancelAnswer]:
        """Cancel tasks in one transaction, and answer in order; for unknown ones as well.

        Whoever holds one is gone round: ask again for what is answered as held.
        """

    async def change(self, task_id: UUID, change: Change) -> None:
        """Change a task that waits; raise `WrongState` or `TaskNotFound`."""

    async def retry(self, task_id: UUID) -> None:
        """Reopen an ended, unsuccessful task as a new generation with fresh attempts."""

    async def stop_retries(self, type: str, reason: str) -> None:  # noqa: A002 - as everywhere
        """End failed attempts of this type as dead from now on, however many are left."""

    async def bury_scheduled(self, type: str, limit: int, *, after: str | None = None) -> Buried:  # noqa: A002
        """End up to so many tasks that wait for the time of a retry, if those of the type are stopped.

        It looks at a bounded number of tasks, from where a part before it ended.
        """

    async def bury_ready(self, type: str, limit: int, *, after: str | None = None) -> Buried:  # noqa: A002
        """End up to so many tasks whose time for a retry has come, in the same way."""

    async def allow_retries(self, type: str) -> bool:  # noqa: A002
        """Try tasks of this type again; return whether that was stopped."""

    async def pause(self, queue: str) -> None:
        """Grant no more tasks of this queue."""

    async def resume(self, queue: str) -> bool:
        """Grant tasks of this queue again; return whether it was paused."""

    async def order_workers(
        self, worker_ids: Sequence[UUID], order: WorkerOrder
    ) -> frozenset[UUID]:
        """Ask registered workers to do something, and return the ids of those that are known.

        It holds until something else is asked, and goes with the worker. Whoever is to drain goes on to.
        """


class GateStore(Protocol):
    """What anybody may do for tasks that wait at gates."""

    async def open_gates(self, limit: int, *, if_allowed: bool = False) -> int:
        """Answer up to `limit` calls of gates: let through what they have room for; return how many.

        Every claim does so first, for those of the last moments. Whoever may only read does nothing
        instead, `if_allowed`.
        """


class RuleStore(Protocol):
    """Rules for all tasks of a queue or a type: what code declares, and what operators set instead."""

    async def declare_rules(
        self, rules: Sequence[LaneRule], *, types: Sequence[str], values: Sequence[ValueRule] = ()
    ) -> None:
        """Note what code says; of these types, those without a rule have none any more.

        `values` hold for each value of the arguments that the limit of a type is by.
        """

    async def set_value_rule(self, rule: ValueRule) -> None:
        """Let this stand for one value, or for each that has none of its own, instead of what code says."""

    async def reset_value_rule(self, type: str, value: str | None) -> bool:  # noqa: A002 - as everywhere
        """Take that back; return whether anything was set."""

    async def value_rules(self, type: str | None = None) -> list[ValueRecord]:  # noqa: A002
        """List such rules that are in force, by type and value, that for each value first."""

    async def set_rule(self, rule: LaneRule) -> None:
        """Let this stand instead of what code says."""

    async def reset_rule(self, scope: RuleScope, name: str) -> bool:
        """Let what code says stand again; return whether anything was set instead."""

    async def rules(self) -> list[RuleRecord]:
        """List the rules in force, by scope and name."""

    async def pause_type(self, type: str) -> None:  # noqa: A002 - as everywhere
        """Grant no more tasks of this type."""

    async def resume_type(self, type: str) -> bool:  # noqa: A002
        """Grant tasks of this type again; return whether it was paused."""


class ReadStore(Protocol):
    """What people look at. Read only."""

    async def get(self, task_id: UUID) -> TaskRecord:
        """Return the whole task or raise `TaskNotFound`."""

    async def ended(self, task_ids: Sequence[UUID]) -> tuple[list[Ended], list[UUID]]:
        """Return those that ended, and the ids that nobody knows."""

    async def tasks(self, wanted: TaskFilter) -> TaskPage:
        """List a page of tasks, as they are at one moment.

        Pages that follow one another hold every task that fits and stays in its state meanwhile,
        and hold it once. Raise `ConfigurationError` if `after` is not what a page said.
        """

    async def queues(self) -> list[QueueRecord]:
        """List every queue that has live tasks or is paused."""

    async def types(self) -> list[TypeRecord]:
        """List registered types, and those that are paused or whose retries are stopped."""

    async def workers(self) -> list[WorkerRecord]:
        """List registered workers."""

    async def situation(self, task_id: UUID, *, ageing: timedelta) -> Situation:
        """Return what a claim with this step of ageing would ask about a task, or raise `TaskNotFound`.

        It is read at one moment, and reads a bounded number of tasks, however many there are.
        """

    async def has_work(self, types: Sequence[str], queues: Sequence[str] | None) -> bool:
        """Whether a task of these is ready or claimed; paused and scheduled ones do not count."""


class DeadStore(Protocol):
    """What is done with dead letters, by people or by the leader, who shows a leadership."""

    async def find_dead(self, wanted: DeadFilter) -> FoundDead:
        """Find a page of dead letters, last ended first.

        Raise `ConfigurationError` if the pattern is none, or takes too long, or if `after` is not
        what a page said.
        """

    async def read_dead(self, task_ids: Sequence[UUID]) -> list[DeadLetter]:
        """Return those of these that are dead letters, in their order."""

    async def replay(
        self,
        replays: Sequence[Replay],
        *,
        again: bool = False,
        leadership: Leadership | None = None,
    ) -> list[Replayed]:
        """Make a new task of each dead letter, and answer in their order; each is named once.

        The new task is as the old one was enqueued, without its idempotency key. One that was replayed
        since it ended is left alone, unless `again` is said. The same call, repeated, makes no other
        tasks and is answered alike. Nobody is waited for.
        """

    async def discard(
        self, task_ids: Sequence[UUID], *, leadership: Leadership | None = None
    ) -> list[DiscardAnswer]:
        """Remove dead letters with all that is kept of them, and answer in their order."""

    async def crowded_queues(self, most: int) -> list[str]:
        """Return the queues that have more dead letters than `most`; all letters are counted for it."""

    async def surplus_dead(
        self, queues: Sequence[str], most: int, limit: int
    ) -> list[QueuedLetter]:
        """Return up to `limit` of the dead letters that these queues have above `most`, first ended first.

        It does not take the longer the more they have above it.
        """

    async def expired_dead(self, limit: int) -> list[QueuedLetter]:
        """Return up to `limit` dead letters whose time is over."""


class LeadStore(Protocol):
    """What a candidate needs: one seat, a term that only grows, the store's clock."""

    async def lead(
        self,
        candidate: UUID,
        *,
        current: Leadership | None,
        term: timedelta,
        steady_for: timedelta = timedelta(0),
    ) -> Leadership | None:
        """Renew `current` if it still holds, take the seat if it is free, or return None.

        It is free too if its holder is a worker that is lost although its time lies ahead: see
        `remove_dead_workers`.
        """

    async def resign(self, leadership: Leadership) -> None:
        """Free the seat at once if it is still held under this term."""


class ChoreStore(Protocol):
    """What the leader does. A call that shows a term that is over raises `NotLeader`."""

    async def due(self) -> Due:
        """Say what there may be to do, in one look that writes nothing."""

    async def promote(
        self, limit: int, *, leadership: Leadership | None = None, just_due: bool = False
    ) -> int:
        """Make up to `limit` due tasks ready; without a leadership when the leader is late.

        With `just_due` a store may pass over what has been due for longer than two seconds.
        """

    async def rescue(self, limit: int, *, leadership: Leadership | None = None) -> Rescued:
        """Return the tasks of up to `limit` expired claims.

        Those reported as running have used an attempt and may be dead by it: if none is left, if they
        are older than the registered `max_age` of their type, or if its retries are stopped. The others
        come back with one recovery more. None waits for a lock that somebody else holds.
        """

    async def expire(self, limit: int, *, leadership: Leadership) -> Expired:
        """Cancel up to so many tasks that wait although they should have begun by now.

        None waits for a lock that somebody else holds, and those who hold one hide no others for
        longer than a call.
        """

    async def unknown_types(self) -> list[str]:
        """Return the types of ready tasks that no registered worker knows, in order.

        Tasks in paused queues are not looked at.
        """

    async def fail_unknown(
        self,
        type: str,  # noqa: A002 - as everywhere
        *,
        error: str,
        ready_for: timedelta,
        limit: int,
        leadership: Leadership,
    ) -> list[UUID]:
        """Fail up to `limit` tasks of a type, if no registered worker knows it; return which.

        Only those that have been ready for so long, and are not in a paused queue. The error counts
        as an attempt that never began. None waits for a lock that somebody else holds.
        """

    async def remove_dead_workers(
        self, *, leadership: Leadership, steady_for: timedelta = timedelta(0)
    ) -> list[UUID]:
        """Remove workers that gave no sign of life for three leases.

        `steady_for`: how long the caller has seen this store's clock go evenly. If that is a lease
        of a worker whose last sign of life lies ahead by more than `UNNOTICED_STEP`, the clock was
        set back and the worker has been silent since. Of whoever is removed, what by this clock
        cannot have been granted yet is over first.
        """

    async def tidy(self, *, leadership: Leadership) -> int:
        """Finish cancellations whose task came back, drop idle rows; return how many."""

    async def prepare_history(self, *, leadership: Leadership) -> int:
        """Make the places where tasks of the coming days will rest; return how many."""

    async def retain(self, *, leadership: Leadership, keep_dead: bool = False) -> Retained:
        """Remove ended tasks whose time is over, with their idempotency keys.

        With `keep_dead`, not those that are failed or dead: whoever archives them removes them.
        """


class ScheduleStore(Protocol):
    """What applications and people do with schedules."""

    async def register_schedules(
        self, owner: str, schedules: Sequence[Schedule]
    ) -> ScheduleChanges:
        """Make these the schedules of an application, and retire the others of it.

        A name that another application has registered is taken over. A schedule begins with its registration, and
        its slots begin anew when their timing changes; a pause stays. A slot that was due and not decided on is
        recorded as skipped. An owner without a name retires nothing.
        """

    async def schedules(self) -> list[ScheduleRecord]:
        """List all schedules that are not retired, by name."""

    async def slots(self, name: str, limit: int) -> list[SlotRecord]:
        """Return what became of the last slots of a schedule, the latest first."""

    async def pause_schedule(self, name: str) -> bool:
        """Fire no more slots; return whether it was not paused; raise `ScheduleNotFound`."""

    async def resume_schedule(self, name: str) -> bool:
        """Fire slots from now on; return whether it was paused; raise `ScheduleNotFound`.

        Those of the time between are recorded as skipped.
        """

    async def run_schedule(self, name: str, task_id: UUID) -> None:
        """Enqueue the task of a schedule now, also if it is paused; raise `ScheduleNotFound`.

        It is recorded beside the slots. The same call, repeated, enqueues no other task.
        """


class FireStore(Protocol):
    """What the leader does for schedules."""

    async def schedule_in(self, *, without: Collection[str] = ()) -> float | None:
        """Return in how many seconds a schedule wants a decision; None: none does. But for some, by name."""

    async def due_schedules(
        self, limit: int, *, without: Collection[str] = ()
    ) -> list[DueSchedule]:
        """Return up to `limit` schedules that want a decision, the longest due first; but for some, by name.

        Those whose next slot has come, and those that were decided on ahead of a clock that was set back.
        """

    async def decide_slots(
        self, decision: SlotDecision, *, leadership: Leadership | None = None
    ) -> list[UUID] | None:
        """Write what became of slots, with the tasks that they enqueue; return which were.

        None if the schedule was changed or decided on since it was read: nothing is written. A slot that was
        decided on before stays as it is, and enqueues nothing, unless it was skipped and is not now. What somebody holds is not waited for: `StoreBusy`.
        """

    async def prune_slots(self, *, most: int, leadership: Leadership) -> int:
        """Forget what became of slots above so many for a schedule, or out of time; return how many.

        The last few are kept for as long as their schedule, and one that is retired as long as an ended task.
        """


class BreakerStore(Protocol):
    """What workers need that share what they find out about a dependency.

    `epoch` is that of the last look: if the breaker has opened or closed since, nothing is changed. Only the
    store's clock decides. What seems to last longer than it was to is over: the clock was set back.
    """

    async def breakers(self, names: Sequence[str]) -> list[SharedBreaker]:
        """Say how these are; those that never opened are left out."""

    async def open_breaker(self, name: str, *, epoch: int, recovery: timedelta) -> bool:
        """Open it for so long, and return whether this call did; 0 is the epoch of one that is not known.

        Its epoch is the next one then.
        """

    async def close_breaker(self, name: str, *, epoch: int) -> bool:
        """Close it, and return whether this call did; its epoch is the next one then."""

    async def probe_breaker(self, name: str, *, epoch: int, holder: UUID, lease: timedelta) -> bool:
        """Let this one make the trials while it is half-open, if no other does; again, to go on so.

        If it is not asked again within the lease another may.
        """

    async def leave_breaker(self, name: str, *, holder: UUID) -> None:
        """Let another make the trials at once, if this one makes them."""


class CheckStore(Protocol):
    """What tells whether a worker can work."""

    async def check(self) -> None:
        """Raise unless the store answers, and is as this version needs it."""


class ExamineStore(Protocol):
    """What the doctor needs. It may be of a store that cannot be opened. Read only."""

    async def examine(self) -> "Examination":
        """Look at everything that can be looked at; what cannot be is a value too."""


class ClockStore(Protocol):
    """By which clock leases and terms are measured."""

    async def now(self) -> datetime:
        """Return the store's time."""


class Listening(Protocol):
    """How the listening for new work goes."""

    @property
    def trouble(self) -> str:
        """Why it is broken and being repaired; nothing if it is not."""


class Wake(Protocol):
    """How a fetcher is told, from any thread, that there may be work."""

    def __call__(self, lane: int | None = None, task_id: UUID | None = None, /) -> None:
        """Tell it; `lane`, `task_id`: it is this and nothing else, see `ClaimRequest`."""


class WakeStore(Protocol):
    """How a fetcher hears of new work before it polls."""

    def listen(
        self,
        wake: Wake,
        *,
        ordered: Callable[[UUID], None] | None = None,
        scheduled: Callable[[], None] | None = None,
    ) -> AbstractAsyncContextManager[Listening]:
        """Call `wake` whenever there may be work, until the context is left.

        And `ordered`, from any thread, with the id of each worker of whom somebody asks something, and `scheduled`
        when there is a schedule that wants a first decision.
        """


class Store(
    EnqueueStore,
    ClaimStore,
    SettleStore,
    CompleteStore,
    PulseStore,
    OperateStore,
    RuleStore,
    GateStore,
    ReadStore,
    DeadStore,
    LeadStore,
    ChoreStore,
    ScheduleStore,
    FireStore,
    BreakerStore,
    CheckStore,
    ClockStore,
    WakeStore,
    Protocol,
):
    """Everything an adapter provides."""

    async def open(self) -> None:
        """Connect, and migrate if so configured."""

    async def close(self) -> None:
        """Give back every connection."""

    def beside(self) -> "Store":
        """Return a store on the same truth for another thread with an event loop of its own."""
