"""Every task of a filter is found, though tasks move and come while page after page is read."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from uuid import UUID

from windlass.client.finding import find_all
from windlass.model.task import TaskFilter, TaskPage, TaskRecord, TaskState

BEGUN = datetime(2027, 3, 3, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
MOST_PAGES = 20


def record(number: int, status: TaskState, created_at: datetime = BEGUN - MINUTE) -> TaskRecord:
    return TaskRecord(
        id=str(UUID(int=number)),
        type="work",
        queue="default",
        payload={},
        status=status,
        priority=10,
        created_at=created_at,
        scheduled_for=created_at,
        updated_at=created_at,
        attempts=0,
        max_attempts=4,
        generation=1,
    )


class TwoPlaces:
    """A store that lists what workers hold, then what waits; something happens after each page."""

    def __init__(self, then: Callable[["TwoPlaces"], None]) -> None:
        self.held: list[TaskRecord] = []
        self.waiting = [record(number, TaskState.PENDING) for number in (3, 2, 1)]
        self.pages = 0
        self._then = then

    async def now(self) -> datetime:
        return BEGUN

    async def tasks(self, wanted: TaskFilter) -> TaskPage:
        self.pages += 1
        assert self.pages <= MOST_PAGES, "reads for ever"
        records = list(self.held if wanted.after is None else self.waiting)
        self._then(self)
        return TaskPage(records, "what waits" if wanted.after is None else None)


async def test_a_task_that_moved_behind_the_page_that_is_read_is_found() -> None:
    def claim_one(store: TwoPlaces) -> None:
        if store.pages == 1:
            store.held.append(record(2, TaskState.CLAIMED))
            del store.waiting[1]

    found = await find_all(TwoPlaces(claim_one), TaskFilter(type="work"))

    assert found == {
        UUID(int=1): TaskState.PENDING,
        UUID(int=2): TaskState.CLAIMED,
        UUID(int=3): TaskState.PENDING,
    }


async def test_tasks_that_are_enqueued_meanwhile_keep_nobody_searching() -> None:
    def enqueue_one(store: TwoPlaces) -> None:
        new = record(100 + store.pages, TaskState.PENDING, BEGUN + store.pages * MINUTE)
        store.waiting.insert(0, new)

    found = await find_all(TwoPlaces(enqueue_one), TaskFilter(type="work"))

    assert {UUID(int=number) for number in (1, 2, 3)} <= found.keys()
