"""Schedules with real workers, by Python and by the command line; and what is refused."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import asyncpg
import pytest
from click.testing import CliRunner

from windlass import App, ConfigurationError, ScheduleNotFound
from windlass.cli import main as cli
from windlass.model.schedule import Overlap, SlotRecord, SlotState
from windlass.testing import Clock, app_in_memory

DEADLINE = 60.0
APPS: list[App] = []  # of a test, to be closed after it


def an_app(url: str, **settings: Any) -> App:
    app = App(url, **({"service": "shop"} | settings))

    @app.task
    async def cleanup(days: int = 1) -> int:
        return days

    APPS.append(app)
    return app


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    yield
    for app in APPS:
        await app.close()
    APPS.clear()


async def worked(app: App) -> None:
    """Run a worker until there is nothing to do, and give back what it opened."""
    async with app:
        await app.run_worker(until_idle=True)


def call(app: App, **arguments: int) -> Any:
    (task,) = app.tasks
    return task.call(**arguments)


async def fired(app: App, number: int, name: str = "cleanup") -> list[SlotRecord]:
    """Wait until so many slots were fired; return them, the oldest first."""
    async with asyncio.timeout(DEADLINE):
        while True:
            slots = [one for one in await app.schedules.slots(name) if one.state is SlotState.FIRED]
            if len(slots) >= number:
                return slots[::-1]
            await asyncio.sleep(0.05)


async def until_it_leads(app: App) -> None:
    """Wait until a worker leads that has found no schedule."""
    store = await app.store()
    async with asyncio.timeout(DEADLINE):
        while not any(one.leader for one in await store.workers()):
            await asyncio.sleep(0.05)


async def test_a_worker_fires_each_slot_within_a_second(database_url: str) -> None:
    app = an_app(database_url)
    app.schedule(call(app, days=7), every=timedelta(seconds=1), overlap="allow", catch_up="all")

    async with app.worker():
        slots = await fired(app, 3)
        results = [await app.handle(one.task_id or "").result(timeout=30) for one in slots]

    late = sorted(one.decided_at - one.slot_at for one in slots)
    assert results == [7] * len(slots)
    assert late[0] >= timedelta(0)
    # By the clock of the database. One of them may have met a machine that is busy with other tests.
    assert late[len(late) // 2] < timedelta(seconds=1), late
    gaps = {later.slot_at - one.slot_at for one, later in pairwise(slots)}
    assert gaps == {timedelta(seconds=1)}


@pytest.mark.needs_direct("there is no listener without one")
async def test_a_leader_without_schedules_notices_the_first_one_at_once(
    database_url: str,
) -> None:
    leading = an_app(database_url, service="mail", sweep=3600.0)
    app = an_app(database_url)
    app.schedule(call(app), every=1, overlap="allow")

    async with leading.worker():
        await until_it_leads(leading)
        async with app.worker():
            await fired(app, 2)
            slots = (await app.schedules.slots("cleanup"))[::-1]
            (schedule,) = await app.schedules.list()

    assert {one.state for one in slots} == {SlotState.FIRED}
    assert slots[0].slot_at - schedule.registered_at < timedelta(seconds=1)


async def test_workers_share_the_slots(database_url: str) -> None:
    apps = [an_app(database_url, leader_term=1.0) for _ in range(2)]
    for app in apps:
        app.schedule(call(app), cron="* * * * * *", overlap="allow", catch_up="all")

    async with apps[1].worker():
        async with apps[0].worker():
            await fired(apps[0], 2)
        # Whoever led has gone, or has not: slots go on.
        before = len(await fired(apps[1], 2))
        slots = await fired(apps[1], before + 2)

    times = [one.slot_at for one in slots]
    assert len(set(times)) == len(times)
    every = [times[0] + timedelta(seconds=k) for k in range(len(times))]
    assert times == every


async def test_a_worker_starts_while_somebody_holds_its_schedules(
    database_url: str, sql_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = an_app(database_url)
    app.schedule(call(app), every=3600)
    await worked(app)
    app = an_app(database_url)
    app.schedule(call(app), every=1800)
    connection = await asyncpg.connect(sql_url)
    held = connection.transaction()
    await held.start()
    await connection.execute("UPDATE windlass.schedule SET jitter = jitter")

    async with app.worker(), asyncio.timeout(DEADLINE):
        result = await (await app.enqueue("cleanup", {"days": 9})).result(timeout=30)
        before = [one.every for one in await app.schedules.list()]
        await held.rollback()
        while (await app.schedules.list())[0].every != 1800:
            await asyncio.sleep(0.05)

    assert (result, before) == (9, [3600])
    assert caplog.text.count("schedule.held owner=shop") == 1
    await connection.close()


async def test_code_that_changes_changes_the_schedules_of_its_application(
    database_url: str,
) -> None:
    first, other, second = (
        an_app(database_url),
        an_app(database_url, service="mail"),
        an_app(database_url),
    )
    for name in ("a", "b"):
        first.schedule(call(first, days=1), cron="0 3 * * *", name=name)
    other.schedule(call(other), every=3600, name="c")
    second.schedule(call(second, days=2), cron="0 4 * * *", name="b")

    for app in (first, other):
        await app.run_worker(until_idle=True)
    before = await second.schedules.list()
    await second.run_worker(until_idle=True)

    records = {one.name: one for one in await second.schedules.list()}
    assert [one.name for one in before] == ["a", "b", "c"]
    assert list(records) == ["b", "c"]
    assert (records["b"].cron, records["b"].payload) == ("0 4 * * *", {"days": 2})


async def test_a_moved_clock_fires_what_was_missed_and_records_the_rest() -> None:
    app = an_app("memory:", sweep=0.1)
    app.schedule(call(app, days=3), cron="30 2 * * *", timezone="Europe/Zurich", name="nightly")
    clock = Clock(datetime(2026, 3, 27, 12, tzinfo=UTC))

    async with app_in_memory(app, clock=clock), app.worker():
        async with asyncio.timeout(DEADLINE):
            while not (await app.schedules.list())[0].next_slots:
                await asyncio.sleep(0.01)
        (record,) = await app.schedules.list()
        clock.move(timedelta(days=3))
        slots = await fired(app, 1, "nightly")
        (after,) = await app.schedules.list()

    zone = ZoneInfo("Europe/Zurich")
    shown = [f"{one.astimezone(zone):%d %H:%M}" for one in record.next_slots]
    assert shown == ["28 02:30", "29 03:00", "30 02:30", "31 02:30", "01 02:30"]
    assert f"{slots[0].slot_at.astimezone(zone):%d %H:%M}" == "30 02:30"
    assert after.last_skipped is not None
    assert (after.last_skipped.slots, after.last_skipped.state) == (2, SlotState.SKIPPED)


def test_schedules_by_the_command_line(database_url: str) -> None:
    app = an_app(database_url)
    app.schedule(call(app), cron="0 3 * * *", timezone="Europe/Zurich", name="nightly")
    app.schedule(call(app), every=90, name="often")
    asyncio.run(worked(app))

    def run(*words: str) -> Any:
        return CliRunner().invoke(cli, words, env={"WINDLASS_DATABASE_URL": database_url})

    listed = json.loads(run("schedules", "list", "--json").stdout)
    paused = run("schedules", "pause", "nightly").stdout
    again = run("schedules", "pause", "nightly").stdout
    ran = run("schedules", "run", "nightly").stdout.strip()
    table = run("schedules", "list").stdout
    resumed = run("schedules", "resume", "nightly").stdout
    not_paused = run("schedules", "resume", "nightly").stdout
    unknown = run("schedules", "run", "nightyl")

    assert [one["name"] for one in listed] == ["nightly", "often"]
    assert [len(one["next_slots"]) for one in listed] == [5, 5]
    assert paused == "schedule 'nightly' is paused; its slots are skipped\n"
    assert again == "schedule 'nightly' was paused already\n"
    assert app.schedules.slots_sync("nightly")[0].task_id == ran
    assert "0 3 * * * (Europe/Zurich)" in table
    assert "every 0:01:30" in table
    assert "since 20" in table
    assert resumed == "schedule 'nightly' is resumed\n"
    assert not_paused == "schedule 'nightly' was not paused\n"
    assert unknown.exit_code == 1
    app.close_sync()


def test_schedules_by_python_without_an_event_loop(database_url: str) -> None:
    app = an_app(database_url)
    app.schedule(call(app, days=5), every=3600)
    asyncio.run(worked(app))

    answers = [app.schedules.pause_sync("cleanup"), app.schedules.resume_sync("cleanup")]
    task_id = app.schedules.run_sync("cleanup")
    (record,) = app.schedules.list_sync()

    assert answers == [True, True]
    assert record.last_fired is not None
    assert record.last_fired.task_id == task_id
    assert app.handle(task_id).get_sync().payload == {"days": 5}
    with pytest.raises(ScheduleNotFound, match="schedule 'x' is not known"):
        app.schedules.run_sync("x")
    app.close_sync()


def wrong(**options: Any) -> dict[str, Any]:
    """What no type checker would let pass."""
    return options


def wrong_call(value: Any) -> tuple[Any]:
    return (value,)


BAD: dict[str, tuple[Callable[[App], Any], str]] = {
    "neither": (lambda app: app.schedule(call(app)), "neither cron nor every was given; give one"),
    "both": (lambda app: app.schedule(call(app), cron="* * * * *", every=5), "both cron and every"),
    "cron": (
        lambda app: app.schedule(call(app), cron="61 * * * *"),
        "'cleanup': cron '61 .*minute",
    ),
    "cron of another kind": (
        lambda app: app.schedule(call(app), **wrong(cron=5)),
        "cron 5: use a string",
    ),
    "never": (lambda app: app.schedule(call(app), cron="0 0 31 2 *"), "cron '0 0 31 2"),
    "zone": (
        lambda app: app.schedule(call(app), cron="* * * * *", timezone="Mars"),
        "timezone 'Mars' is not known here; use",
    ),
    "zone of an interval": (
        lambda app: app.schedule(call(app), every=5, timezone="UTC"),
        "intervals have none",
    ),
    "short": (lambda app: app.schedule(call(app), every=0.5), "every 0.5: use one second"),
    "negative": (lambda app: app.schedule(call(app), every=-5), "every -5"),
    "overlap": (
        lambda app: app.schedule(call(app), every=5, overlap="no"),
        "overlap 'no': use 'skip', 'queue', 'allow'",
    ),
    "catch_up": (lambda app: app.schedule(call(app), every=5, catch_up=-1), "catch_up -1: use"),
    "skip with catch_up": (
        lambda app: app.schedule(call(app), every=5, catch_up=2, overlap="skip"),
        "overlap 'skip': of 2 slots .* use overlap='queue'",
    ),
    "jitter": (lambda app: app.schedule(call(app), every=5, jitter=-1), "jitter -1"),
    "jitter as long as the interval": (
        lambda app: app.schedule(call(app), every=5, jitter=5),
        "'cleanup': jitter 5: .* use less than every",
    ),
    "jitter of days": (
        lambda app: app.schedule(call(app), cron="0 0 1 * *", jitter=timedelta(days=1, seconds=1)),
        "use a day at most",
    ),
    "name": (lambda app: app.schedule(call(app), every=5, name=""), "schedule name '' has 0"),
    "no call": (lambda app: app.schedule(*wrong_call("cleanup"), every=5), "give a call of a task"),
    "delay": (
        lambda app: app.schedule(app.tasks[0].options(delay=5).call(), every=5),
        "option 'delay' cannot be the same for every slot",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_schedule_is_refused_at_once(kind: str) -> None:
    define, said = BAD[kind]

    with pytest.raises(ConfigurationError, match=said):
        define(an_app("memory:"))


@pytest.mark.parametrize(
    ("catch_up", "overlap"),
    [("none", Overlap.SKIP), ("one", Overlap.SKIP), (2, Overlap.QUEUE), ("all", Overlap.QUEUE)],
)
async def test_slots_that_are_caught_up_with_wait_for_each_other_unless_told_otherwise(
    catch_up: int | str, overlap: Overlap
) -> None:
    app = an_app("memory:")
    app.schedule(call(app), every=5, catch_up=catch_up)
    await app.run_worker(until_idle=True)

    (schedule,) = await app.schedules.list()

    assert schedule.overlap is overlap


def test_two_schedules_of_one_name_are_an_error() -> None:
    app = an_app("memory:")
    app.schedule(call(app), every=5)

    with pytest.raises(ConfigurationError, match="schedule 'cleanup' is defined twice; give"):
        app.schedule(call(app), every=6)


async def test_a_schedule_cannot_be_defined_once_a_worker_has_started() -> None:
    app = an_app("memory:")
    await app.run_worker(until_idle=True)

    with pytest.raises(ConfigurationError, match="after a worker had started"):
        app.schedule(call(app), every=5)
