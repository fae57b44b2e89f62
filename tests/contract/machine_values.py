"""What the store machine draws: tasks, claims and endings from few values, so that they meet."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Generic, NamedTuple, TypeVar
from uuid import UUID

from hypothesis import strategies as st

from windlass.model.rule import STRICT, LaneRule, RuleScope, ValueRule
from windlass.model.task import (
    Change,
    ClaimedTask,
    Fence,
    NewTask,
    Outcome,
    Settlement,
    Window,
    WindowKind,
)

T = TypeVar("T")

BEGINNING = datetime(2026, 11, 15, 20, tzinfo=UTC)
TICK = timedelta(milliseconds=1)
LEASE = timedelta(seconds=30)
TERM = timedelta(seconds=15)
TYPES = ("mail", "resize")
QUEUES = ("bulk", "default")
WORKERS = tuple(UUID(int=number) for number in (1, 2, 3))
PAYLOAD = '{"a": 1, "b": 2}'
EQUAL_PAYLOAD = '{"b": 2.0, "a": 1}'
OTHER_PAYLOAD = '{"a": true, "b": 2}'
ERROR = '{"type": "ValueError", "message": "no such image", "traceback": "line 1"}'
NEEDS_AN_ERROR = {Outcome.FAILED, Outcome.DEAD, Outcome.RETRIED}


class Pair(NamedTuple, Generic[T]):
    """One thing as the model and as the subject know it."""

    model: T
    subject: T


@dataclass(frozen=True)
class Held:
    """One task of a claim; kept for ever, so that it is also shown long after it was lost."""

    tokens: Pair[UUID]
    task: ClaimedTask

    def fences(self) -> Pair[Fence]:
        model, subject = (Fence(token, self.task.id, self.task.generation) for token in self.tokens)
        return Pair(model, subject)


seconds = st.sampled_from([0.0, 0.0, 0.0, 5.0, 60.0])
leases = st.sampled_from([timedelta(seconds=10), LEASE])
some_types = st.sampled_from([TYPES, TYPES, ("mail",), ("resize",)])
some_queues = st.sampled_from([None, None, QUEUES, ("bulk",), ("default",)])
workers = st.sampled_from(WORKERS)


@st.composite
def _lane_rule(draw: st.DrawFn) -> LaneRule:
    scope = draw(st.sampled_from(RuleScope))
    is_queue = scope is RuleScope.QUEUE
    rate, burst = draw(st.sampled_from([(None, None), (None, None), (0.5, 1.0), (1.0, 3.0)]))
    return LaneRule(
        scope,
        draw(st.sampled_from(QUEUES if is_queue else TYPES)),
        draw(st.sampled_from([None, 1, 2, 5])),
        rate,
        burst,
        draw(st.sampled_from([None, None, 1.0, STRICT])) if is_queue else None,
    )


lane_rules = _lane_rule()
value_rules = st.builds(
    lambda type_, value, concurrency, rate: ValueRule(type_, value, concurrency, *rate),
    st.sampled_from(TYPES),
    st.sampled_from([None, None, "1", '["1", "2"]']),
    st.sampled_from([None, 1, 1, 2]),
    st.sampled_from([(None, None), (None, None), (0.1, 1.0), (0.5, 3.0)]),
)


class NewTaskOptions(NamedTuple):
    """A task before it has an id, and its time relative to the clock."""

    type: str
    payload: str
    queue: str
    priority: int
    max_attempts: int
    delay: float
    starts_in: timedelta | None
    idempotency_key: str | None
    tags: tuple[str, ...]
    retention: timedelta | None
    ordering_key: str | None
    keeps_key: bool
    limit_by: str | None
    window: Window | None

    def task(self, task_id: UUID, now: datetime) -> NewTask:
        values = self._asdict()
        starts_in = values.pop("starts_in")
        if starts_in is not None:
            values |= {"delay": 0.0, "at": now + starts_in}
        if self.window is not None:
            values["idempotency_key"] = None
        if self.window is not None and self.window.kind is WindowKind.DEBOUNCE:
            values |= {"delay": 0.0, "at": None, "ordering_key": None}
        values["keeps_key"] = self.keeps_key and values["ordering_key"] is not None
        return NewTask(id=task_id, **values)


windows = st.builds(
    Window,
    kind=st.sampled_from(WindowKind),
    seconds=st.sampled_from([5.0, 30.0, 3600.0]),
    key=st.sampled_from([None, None, "w"]),
)


# Few lanes, so that tasks meet in them.
new_tasks = st.builds(
    NewTaskOptions,
    type=st.sampled_from(["mail", "mail", "resize"]),
    payload=st.sampled_from([PAYLOAD, PAYLOAD, EQUAL_PAYLOAD, OTHER_PAYLOAD]),
    queue=st.sampled_from(["default", "default", "bulk"]),
    priority=st.sampled_from([10, 10, 0, 20]),
    max_attempts=st.sampled_from([1, 2, 4, 4]),
    delay=seconds,
    starts_in=st.sampled_from([*[None] * 6, timedelta(days=-1), timedelta(seconds=9)]),
    idempotency_key=st.sampled_from([*[None] * 4, "x", "y"]),
    tags=st.sampled_from([(), ("red",), ("red", "blue")]),
    retention=st.sampled_from([None, None, timedelta(0), timedelta(days=2)]),
    ordering_key=st.sampled_from([*[None] * 3, "k", "k", "j"]),
    keeps_key=st.sampled_from([False, True]),
    limit_by=st.sampled_from([*[None] * 3, '[["a", null]]', '[["a", 1], ["b", "2"]]']),
    window=st.none() | st.none() | windows,
)
new_calls = st.lists(new_tasks, min_size=1, max_size=5) | st.builds(
    lambda options, number: [options] * number, new_tasks, st.integers(2, 5)
)
changes = st.builds(
    Change,
    priority=st.none() | st.sampled_from([0, 10, 20]),
    queue=st.none() | st.sampled_from(QUEUES),
    delay=st.none() | seconds,
)


class Ending(NamedTuple):
    """How an attempt is to end."""

    outcome: Outcome
    started_after: float | None
    delay: float


endings = st.builds(
    Ending,
    outcome=st.sampled_from(Outcome),
    started_after=st.sampled_from([None, 0.0, 0.5]),
    delay=seconds,
)


def some_of(several: list[Held]) -> st.SearchStrategy[list[Held]]:
    return st.lists(
        st.sampled_from(several), min_size=1, max_size=5, unique_by=lambda each: each.task.id
    )


def settlements(held: Held, ending: Ending, *, reported: bool) -> Pair[Settlement]:
    outcome = ending.outcome
    if outcome is Outcome.RETRIED and held.task.attempts + 1 >= held.task.max_attempts:
        outcome = Outcome.DEAD  # what the policy decides; stores only apply
    model, subject = (
        Settlement(
            *fence,
            outcome,
            started_after=ending.started_after,
            result='{"width": [7, null]}' if outcome is Outcome.COMPLETED else None,
            delay=0.0 if outcome is Outcome.RELEASED else ending.delay,
            error=ERROR if outcome in NEEDS_AN_ERROR else None,
            reported=reported,
        )
        for fence in held.fences()
    )
    return Pair(model, subject)
