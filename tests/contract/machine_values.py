"""What the store machine draws: tasks, claims and endings from few values, so that they meet."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Generic, NamedTuple, TypeVar
from uuid import UUID

from hypothesis import strategies as st

from windlass.model.task import Change, ClaimedTask, Fence, NewTask, Outcome, Settlement

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

    def task(self, task_id: UUID, now: datetime) -> NewTask:
        values = self._asdict()
        starts_in = values.pop("starts_in")
        if starts_in is not None:
            values |= {"delay": 0.0, "at": now + starts_in}
        return NewTask(id=task_id, **values)


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
