"""Tasks of one ordering key run one at a time, in their order, whatever happens to them."""

import asyncio
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from click.testing import CliRunner

from acceptance.quick import QUICK
from windlass import App, Context, Fail, Handle, Retry, Snooze, TaskFailed, TaskState
from windlass.cli import main
from windlass.model.task import TaskFilter
from windlass.testing import Clock, app_in_memory

APP = """
from windlass import App

app = App()

@app.task
async def work(n: int) -> None: ...
"""


class Diary:
    """What ran, in its order, and how many at once; some of it waits to be let go."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.inside = 0
        self.most = 0
        self.go = asyncio.Event()
        self.failing: set[Any] = set()
        self._changed = asyncio.Condition()

    async def note(self, what: Any) -> None:
        self.begun.append(what)
        self.inside += 1
        self.most = max(self.most, self.inside)
        async with self._changed:
            self._changed.notify_all()
        try:
            await asyncio.sleep(0)
        finally:
            self.inside -= 1

    async def note_and_wait(self, what: Any) -> None:
        await self.note(what)
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await self.go.wait()
        finally:
            self.inside -= 1

    async def has_begun(self, *wanted: Any) -> None:
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(lambda: set(wanted) <= set(self.begun))


@pytest.fixture
def diary(app: App) -> Diary:
    diary = Diary()

    @app.task(retry=1)
    async def work(n: int) -> int:
        await diary.note(n)
        if n in diary.failing:
            raise Fail("not yet")
        return n

    @app.task
    async def wait(n: int) -> None:
        await diary.note_and_wait(n)

    return diary


def task(app: App, name: str = "work", **options: Any) -> Any:
    (found,) = [one for one in app.tasks if one.name == name]
    return found.options(**options)


async def ended(*handles: Handle) -> list[TaskState]:
    """Wait until tasks have ended, however; return how."""
    for handle in handles:
        try:
            await handle.result(20)
        except TaskFailed:
            continue
    return [(await handle.get()).status for handle in handles]


async def until(handle: Handle, status: TaskState) -> None:
    async with asyncio.timeout(20):
        while (await handle.get()).status is not status:
            await asyncio.sleep(0.01)


async def ids_of(app: App, name: str) -> list[str]:
    page = await (await app.store()).tasks(TaskFilter(type=name))
    return [one.id for one in page.records]


async def test_they_run_one_at_a_time_in_the_order_of_their_enqueue(app: App, diary: Diary) -> None:
    keyed = task(app, ordering_key="k")
    handles = [await keyed.enqueue(n) for n in range(10)]
    handles += await app.enqueue_many([keyed.call(n) for n in range(10, 30)])

    async with app.worker(), app.worker():
        await asyncio.gather(*(handle.result(20) for handle in handles))

    assert diary.begun == list(range(30))
    assert diary.most == 1


async def test_they_keep_their_order_while_workers_run(app: App, diary: Diary) -> None:
    keyed = task(app, ordering_key="k")

    async with app.worker(), app.worker():
        handles = [await keyed.enqueue(n) for n in range(30)]
        await asyncio.gather(*(handle.result(20) for handle in handles))

    assert diary.begun == list(range(30))
    assert diary.most == 1


async def test_priority_does_not_change_the_order_within_a_key(app: App, diary: Diary) -> None:
    handles = [
        await task(app, ordering_key="k", priority=priority).enqueue(n)
        for n, priority in enumerate((0, 100, 50))
    ]

    await app.run_worker(until_idle=True)

    assert await ended(*handles) == [TaskState.COMPLETED] * 3
    assert diary.begun == [0, 1, 2]


async def test_tasks_of_other_keys_and_of_none_run_beside(app: App, diary: Diary) -> None:
    handles = [
        await task(app, "wait", ordering_key="a").enqueue(1),
        await task(app, "wait", ordering_key="a").enqueue(2),
        await task(app, "wait", ordering_key="b").enqueue(3),
        await task(app, "wait").enqueue(4),
    ]

    async with app.worker():
        await diary.has_begun(1, 3, 4)
        second = (await handles[1].get()).status
        diary.go.set()
        await ended(*handles)

    assert second is TaskState.BLOCKED
    assert diary.begun[-1] == 2


async def test_a_key_is_one_across_types_and_queues(app: App, diary: Diary) -> None:
    first = await task(app, "wait", ordering_key="k", queue="slow").enqueue(1)
    second = await task(app, "work", ordering_key="k", queue="quick").enqueue(2)

    async with app.worker():
        await diary.has_begun(1)
        await until(second, TaskState.BLOCKED)
        diary.go.set()
        await ended(first, second)

    assert diary.begun == [1, 2]


async def test_a_retry_keeps_its_place(app: App, diary: Diary) -> None:
    @app.task(retry=Retry(max_attempts=3, backoff="fixed", base=0.1, jitter="none"))
    async def unsure(ctx: Context, n: int) -> None:
        await diary.note((n, ctx.attempt))
        if ctx.attempt < 3:
            raise ConnectionError("again")

    handles = [await unsure.options(ordering_key="k").enqueue(n) for n in range(2)]

    async with app.worker():
        await ended(*handles)

    assert diary.begun == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]


async def test_a_snooze_keeps_its_place(app: App, diary: Diary) -> None:
    slept: set[int] = set()

    @app.task
    async def sleepy(n: int) -> None:
        await diary.note(n)
        if n not in slept:
            slept.add(n)
            raise Snooze(0.1)

    handles = [await sleepy.options(ordering_key="k").enqueue(n) for n in range(2)]

    async with app.worker():
        await ended(*handles)

    assert diary.begun == [0, 0, 1, 1]


async def test_one_that_waits_for_its_time_holds_those_behind_it(app: App, diary: Diary) -> None:
    first = await task(app, ordering_key="k", delay=3600).enqueue(1)
    second = await task(app, ordering_key="k").enqueue(2)

    async with app.worker():
        await until(first, TaskState.SCHEDULED)
        await until(second, TaskState.BLOCKED)
        await first.change(delay=0)
        await ended(first, second)

    assert diary.begun == [1, 2]


@pytest.mark.parametrize("place", [0, 1])
async def test_one_that_is_cancelled_lets_the_next_one_run(
    app: App, diary: Diary, place: int
) -> None:
    handles = [
        await task(app, ordering_key="k", delay=3600).enqueue(1),
        await task(app, ordering_key="k", delay=3600).enqueue(2),
        await task(app, ordering_key="k").enqueue(3),
    ]

    async with app.worker():
        await until(handles[2], TaskState.BLOCKED)
        assert await handles[place].cancel()
        assert await handles[1 - place].cancel()
        await ended(handles[2])

    assert diary.begun == [3]


async def test_one_that_has_expired_lets_the_next_one_run(app: App, diary: Diary) -> None:
    first = await task(app, ordering_key="k", delay=3600, expires=0.2).enqueue(1)
    second = await task(app, ordering_key="k").enqueue(2)

    async with app.worker():
        await ended(second)

    assert (await first.get()).status is TaskState.CANCELLED
    assert diary.begun == [2]


@pytest.mark.parametrize("options", [{}, {"on_dead": "pass"}])
async def test_one_that_fails_passes_its_key_on(
    app: App, diary: Diary, options: dict[str, str]
) -> None:
    diary.failing.add(1)
    first = await task(app, ordering_key="k", **options).enqueue(1)
    second = await task(app, ordering_key="k").enqueue(2)

    await app.run_worker(until_idle=True)

    assert await ended(first, second) == [TaskState.FAILED, TaskState.COMPLETED]


class TestHeld:
    """A key that a task holds which has failed."""

    @pytest.fixture
    async def held(self, app: App, diary: Diary) -> tuple[Handle, Handle]:
        diary.failing.add(1)
        first = await task(app, ordering_key="k", on_dead="hold").enqueue(1)
        second = await task(app, ordering_key="k").enqueue(2)
        await app.run_worker(until_idle=True)
        diary.failing.clear()
        assert (await first.get()).status is TaskState.FAILED
        assert (await second.get()).status is TaskState.BLOCKED
        return first, second

    async def test_nothing_else_of_the_key_runs(
        self, app: App, diary: Diary, held: tuple[Handle, Handle]
    ) -> None:
        other = await task(app).enqueue(3)
        third = await task(app, ordering_key="k").enqueue(4)
        await app.run_worker(until_idle=True)

        assert diary.begun == [1, 3]
        assert (await other.get()).status is TaskState.COMPLETED
        assert (await third.get()).status is TaskState.BLOCKED

    async def test_a_retry_runs_it_in_its_place(
        self, app: App, diary: Diary, held: tuple[Handle, Handle]
    ) -> None:
        first, second = held
        await first.retry()
        await app.run_worker(until_idle=True)

        assert await ended(first, second) == [TaskState.COMPLETED] * 2
        assert diary.begun == [1, 1, 2]

    async def test_a_replay_takes_its_place(
        self, app: App, diary: Diary, held: tuple[Handle, Handle]
    ) -> None:
        first, second = held
        report = await app.dead.replay(first.id)
        await app.run_worker(until_idle=True)

        replay = app.handle(report.replayed[first.id] or "")
        assert await ended(replay, second) == [TaskState.COMPLETED] * 2
        assert diary.begun == [1, 1, 2]

    async def test_once_it_is_discarded_the_next_one_runs(
        self, app: App, diary: Diary, held: tuple[Handle, Handle]
    ) -> None:
        first, second = held
        await app.dead.discard(first.id)

        async with app.worker():
            await ended(second)

        assert diary.begun == [1, 2]


async def test_what_follows_a_task_has_its_key(app: App, diary: Diary) -> None:
    @app.task(on_success=task(app, ordering_key="k").partial(n=2))
    async def before() -> None: ...

    first = await task(app, "wait", ordering_key="k").enqueue(1)

    async with app.worker():
        await diary.has_begun(1)
        await (await before.enqueue()).result(20)
        (second,) = await ids_of(app, "work")
        await until(app.handle(second), TaskState.BLOCKED)
        diary.go.set()
        await ended(first, app.handle(second))

    assert diary.begun == [1, 2]


async def test_the_tasks_of_a_schedule_have_its_key(app_url: str) -> None:
    app = App(app_url, service="shop", **QUICK)
    diary = Diary()

    @app.task
    async def wait(n: int) -> None:
        await diary.note_and_wait(n)

    app.schedule(wait.options(ordering_key="k").call(2), cron="0 0 1 1 *", name="yearly")

    async with app, app.worker():
        first = await wait.options(ordering_key="k").enqueue(1)
        await diary.has_begun(1)
        second = app.handle(await app.schedules.run("yearly"))
        await until(second, TaskState.BLOCKED)
        diary.go.set()
        await ended(first, second)

    assert diary.begun == [1, 2]


async def test_a_repeated_enqueue_does_not_wait_behind_itself(app: App, diary: Diary) -> None:
    once = task(app, ordering_key="k", idempotency_key="once")
    first, again = await once.enqueue(1), await once.enqueue(1)

    await app.run_worker(until_idle=True)

    assert (again.id, again.created) == (first.id, False)
    assert diary.begun == [1]


async def test_a_clock_that_moves_brings_one_after_the_other() -> None:
    app, clock, ran = App("memory:"), Clock(), list[int]()

    @app.task
    async def work(n: int) -> None:
        ran.append(n)

    async with app_in_memory(app, clock=clock):
        await work.options(ordering_key="k", delay=timedelta(hours=1)).enqueue(1)
        await work.options(ordering_key="k").enqueue(2)
        await app.run_worker(until_idle=True)
        before = list(ran)
        clock.move(timedelta(hours=2))
        await app.run_worker(until_idle=True)

    assert (before, ran) == ([], [1, 2])


async def test_a_transaction_takes_part_once_it_commits(database_url: str, sql_url: str) -> None:
    ran: list[int] = []
    app = App(database_url, **QUICK)

    @app.task
    async def work(n: int) -> None:
        ran.append(n)

    keyed = work.options(ordering_key="k")
    connection = await asyncpg.connect(sql_url)
    async with app, app.worker():
        begun = connection.transaction()
        await begun.start()
        late = await keyed.options(connection=connection).enqueue(1)
        await (await keyed.enqueue(2)).result(20)
        await begun.commit()
        await late.result(20)
    await connection.close()

    assert ran == [2, 1]


async def test_of_open_transactions_the_order_is_that_of_their_begin(
    database_url: str, sql_url: str
) -> None:
    ran: list[int] = []
    app = App(database_url, **QUICK)

    @app.task
    async def work(n: int) -> None:
        ran.append(n)

    keyed = work.options(ordering_key="k")
    connections = [await asyncpg.connect(sql_url) for _ in range(2)]
    async with app:
        transactions = [one.transaction() for one in connections]
        for number, transaction in enumerate(transactions):
            await transaction.start()
            await keyed.options(connection=connections[number]).enqueue(number)
        for transaction in reversed(transactions):
            await transaction.commit()
        await app.run_worker(until_idle=True)
    for one in connections:
        await one.close()

    assert ran == [0, 1]


def test_a_command_gives_a_key(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ordered.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("WINDLASS_DATABASE_URL", database_url)

    def windlass(*arguments: str) -> str:
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 0, done.output
        return done.stdout.strip()

    def enqueue(n: int, *options: str) -> str:
        payload = json.dumps({"n": n})
        return windlass("enqueue", "ordered:app", "work", payload, "--ordering-key", "k", *options)

    first = enqueue(1, "--delay", "3600", "--on-dead", "hold")
    second = enqueue(2)
    listed = json.loads(windlass("tasks", "list", "--json"))

    states = {one["id"]: one["status"] for one in listed}
    assert set(states) == {first, second}
    assert states[second] == "blocked"
