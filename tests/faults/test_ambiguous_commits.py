"""A commit whose answer is lost may have happened: what callers are told, and what comes of it."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

import asyncpg
import pytest

from acceptance.quick import QUICK
from faults.messages import COMMIT
from faults.proxy import Effect, Point, Proxy, after, before
from faults.scene import DEADLINE, OTHER_WORKER, Scene, request
from windlass import App, Context, Retry, StoreUnavailable
from windlass.model.task import Rescued

Side = Callable[[str, int], Point]
COUNT = "SELECT count(*) FROM windlass.task"
TAKEN_SEAT = """
UPDATE windlass.leadership
SET holder = gen_random_uuid(), expires_at = clock_timestamp() + interval '1 minute'
"""
ENDS = "SELECT status::text, attempts, count(*) FROM windlass.history GROUP BY 1, 2"


@pytest.fixture
def app(proxy: Proxy, database_url: str, direct_url: str | None) -> App:
    return App(proxy.url(database_url), direct_url=direct_url, **QUICK)


# Enqueue


@pytest.mark.parametrize("key", [None, "a.png"])
@pytest.mark.parametrize("side", [before, after])
async def test_an_enqueue_whose_answer_was_lost_is_repeated_and_written_once(
    app: App, proxy: Proxy, watcher: asyncpg.Connection, side: Side, key: str | None
) -> None:
    @app.task
    async def resize(name: str) -> None: ...

    async with app:
        rule = proxy.at(side(COMMIT, 1), text="-- enqueue_")
        handle = await resize.options(idempotency_key=key).enqueue("a.png")

        assert rule.reached.is_set()
        assert handle.created
        assert (await handle.get()).payload == {"name": "a.png"}
    assert await watcher.fetchval(COUNT) == 1


@pytest.mark.parametrize("side", [before, after])
async def test_enqueues_that_went_together_are_repeated_and_each_written_once(
    app: App, proxy: Proxy, watcher: asyncpg.Connection, side: Side
) -> None:
    @app.task
    async def resize(n: int) -> None: ...

    async with app:
        await resize.enqueue(0)
        rules = [proxy.at(side(COMMIT, 1), text="-- enqueue_") for _ in range(2)]
        handles = await asyncio.gather(*(resize.enqueue(n) for n in range(1, 31)))

        assert all(rule.reached.is_set() for rule in rules)  # of the first one, and of the group
        assert [(await handle.get()).payload["n"] for handle in handles] == list(range(1, 31))
    assert await watcher.fetchval(COUNT) == 31


@pytest.mark.parametrize("side", [before, after])
async def test_an_enqueue_whose_database_stays_away_says_so_and_is_written_once_at_most(
    app: App, proxy: Proxy, watcher: asyncpg.Connection, side: Side
) -> None:
    @app.task
    async def resize(name: str) -> None: ...

    async with app:
        keyed = resize.options(idempotency_key="a.png")
        for enqueue in (resize.enqueue, keyed.enqueue):
            rule = proxy.at(side(COMMIT, 1), text="-- enqueue_")
            enqueuing = asyncio.create_task(enqueue("a.png"))
            await rule.reached.wait()
            proxy.refusing = True
            with pytest.raises(StoreUnavailable):
                await enqueuing
            proxy.refusing = False
        assert await watcher.fetchval(COUNT) == (2 if side is after else 0)
        handle = await keyed.enqueue("a.png")

        assert handle.created is (side is before)
    assert await watcher.fetchval(COUNT) == (2 if side is after else 1)


# Claim


async def test_tasks_of_a_claim_whose_answer_was_lost_come_back_and_are_held_by_one(
    scene: Scene,
) -> None:
    ids = await scene.add(3)
    scene.proxy.at(after(COMMIT), text="-- claim_tasks")
    with pytest.raises(StoreUnavailable):
        await scene.store.claim(request())
    assert (await scene.store.claim(request())).claim is None
    assert (await scene.around.claim(request(worker=OTHER_WORKER))).claim is None

    await scene.pass_time(60)
    assert await scene.around.rescue(10) == Rescued(claims=1, returned=3)
    first = await scene.store.claim(request(2))
    second = await scene.around.claim(request(worker=OTHER_WORKER))

    assert first.claim is not None
    assert second.claim is not None
    granted = [task for claim in (first.claim, second.claim) for task in claim.tasks]
    assert sorted(task.id for task in granted) == ids
    assert {task.attempts for task in granted} == {0}
    assert not await scene.misplaced()


async def test_a_task_that_became_ready_behind_a_lost_claim_is_found(scene: Scene) -> None:
    """Where the reader of a lane stands is not known after a claim that was lost."""
    await scene.add(2)
    await scene.store.claim(request())
    late = await scene.add(1)
    scene.proxy.at(before(COMMIT), text="-- claim_tasks")
    with pytest.raises(StoreUnavailable):
        await scene.store.claim(request())

    answer = await scene.store.claim(request())

    assert answer.claim is not None
    assert [task.id for task in answer.claim.tasks] == late


async def test_a_worker_runs_what_a_lost_claim_held_exactly_once(
    app: App, proxy: Proxy, watcher: asyncpg.Connection
) -> None:
    runs: Counter[int] = Counter()

    @app.task
    async def count_up(number: int) -> None:
        runs[number] += 1

    async with app:
        handles = await app.enqueue_many([count_up.call(number) for number in range(5)])
        rule = proxy.at(after(COMMIT), text="-- claim_tasks")
        async with app.worker():
            await asyncio.gather(*(handle.result(DEADLINE) for handle in handles))

    assert rule.reached.is_set()
    assert runs == Counter(range(5))
    assert [tuple(row) for row in await watcher.fetch(ENDS)] == [("completed", 1, 5)]


# Extend


@pytest.mark.parametrize("side", [before, after])
async def test_a_lease_whose_extension_was_not_answered_is_kept(
    app: App, proxy: Proxy, caplog: pytest.LogCaptureFixture, side: Side
) -> None:
    finish = asyncio.Event()

    @app.task
    async def wait() -> str:
        await finish.wait()
        return "done"

    async with app, app.worker():
        handle = await wait.enqueue()
        cut = proxy.at(side(COMMIT, 1), text="-- pulse")
        async with asyncio.timeout(DEADLINE):
            await cut.reached.wait()
            # Two more: the second is asked for once the first was answered.
            seen = proxy.at(after(COMMIT, 2), Effect.DELAY, text="-- pulse")
            await seen.reached.wait()
        finish.set()

        assert await handle.result(DEADLINE) == "done"
        assert (await handle.get()).attempts == 1
    assert warnings(caplog) == {"store.unavailable"}
    assert "doing=heartbeat" in caplog.text


# Settle


@pytest.mark.parametrize("side", [before, after])
async def test_a_worker_whose_settlement_was_not_answered_completes_each_task_once(
    app: App,
    proxy: Proxy,
    watcher: asyncpg.Connection,
    caplog: pytest.LogCaptureFixture,
    side: Side,
) -> None:
    runs: Counter[int] = Counter()

    @app.task
    async def count_up(number: int) -> int:
        runs[number] += 1
        return number

    async with app:
        handles = await app.enqueue_many([count_up.call(number) for number in range(50)])
        for number in (1, 2):
            proxy.at(side(COMMIT, number), text="-- settle_tasks")
        async with app.worker():
            results = await asyncio.gather(*(handle.result(DEADLINE) for handle in handles))

    assert results == list(range(50))
    assert runs == Counter(range(50))
    assert [tuple(row) for row in await watcher.fetch(ENDS)] == [("completed", 1, 50)]
    assert warnings(caplog) == {"store.unavailable"}
    assert caplog.text.count("doing=settle") == 2


@pytest.mark.parametrize("side", [before, after])
async def test_an_attempt_whose_failure_was_not_answered_counts_once(
    app: App, proxy: Proxy, side: Side
) -> None:
    @app.task
    async def fail() -> None:
        raise ValueError("no such image")

    async with app:
        handle = await fail.enqueue()
        proxy.at(side(COMMIT, 1), text="-- settle_tasks")
        async with app.worker(), asyncio.timeout(DEADLINE):
            while not (record := await handle.get()).errors:
                await asyncio.sleep(0.01)

    assert record.attempts == 1
    assert len(record.errors) == 1
    assert record.generation == 2


def warnings(caplog: pytest.LogCaptureFixture) -> set[str]:
    """The events that a worker warned of."""
    said = [one for one in caplog.records if one.name == "windlass"]
    return {one.message.split()[0] for one in said if one.levelno >= logging.WARNING}


# A handler's own transaction


@pytest.mark.parametrize("then", ["raises", "returns"])
@pytest.mark.parametrize("side", [before, after])
async def test_a_handlers_transaction_whose_commit_was_not_answered_happens_once(
    proxy: Proxy,
    database_url: str,
    direct_url: str,
    watcher: asyncpg.Connection,
    side: Side,
    then: str,
) -> None:
    """Whether its handler lets the error pass or not: it knows no more than we do."""
    url, settings = proxy.url(database_url), {**QUICK, "leader_term": 60}
    app = App(url, direct_url=direct_url, **settings)
    await watcher.execute("CREATE TABLE effects (attempt integer)")
    await watcher.execute(TAKEN_SEAT)  # a leader has transactions of its own
    told: list[type[BaseException]] = []

    @app.task(retry=Retry(max_attempts=3, base=0))
    async def move(ctx: Context) -> None:
        try:
            async with ctx.transaction() as connection:
                if ctx.attempt == 1:
                    proxy.at(side(COMMIT, 1), text="COMMIT")
                await connection.execute("INSERT INTO effects VALUES ($1)", ctx.attempt)
                ctx.complete("moved")
        except Exception as error:
            told.append(type(error))
            if then == "raises":
                raise

    async with app:
        handle = await move.enqueue()
        await app.run_worker(until_idle=True)
        task = await handle.get()

    assert told == [StoreUnavailable]
    assert (task.status, task.result) == ("completed", "moved")
    assert task.attempts == (1 if side is after else 2)
    assert await watcher.fetchval("SELECT count(*) FROM effects") == 1
    assert await watcher.fetch("SELECT FROM windlass.claim") == []
