"""Every method of a store, cut off at every point of its conversation with the server."""

import asyncio
import inspect
from contextlib import suppress
from typing import Any

import pytest

from faults.courses import Course, check_all_or_nothing, check_repeated, prepared, undisturbed
from faults.messages import COMMIT
from faults.proxy import Effect, Point, after, before
from faults.scenarios import ON_THE_STREET, SCENARIOS, Scenario
from faults.scene import DEADLINE, Scene
from slowly import slowly
from windlass.model.errors import StoreUnavailable
from windlass.store.port import Store
from windlass.store.postgres import connection as connection_module
from windlass.store.postgres import statements

# Methods whose breaking is another test's business.
ELSEWHERE = {
    "open": "test_cut_opening.py, with the migrations",
    "close": "test_cut_opening.py",
    "beside": "asks nothing of the server",
    "listen": "the tests of the listener",
    "guest": "asks nothing of the server",
    "enqueue_within": "all or nothing by the caller's own transaction: test_transactions.py",
    "complete_within": "all or nothing by the handler's own transaction: acceptance/completing",
}
# A few of each kind: one statement or several, on a connection of the pool or its own.
PARTED = [
    scenario
    for scenario in SCENARIOS
    if scenario.name in {"enqueue", "claim", "settle", "pulse_with_patience", "rescue", "retain"}
]


def test_every_method_of_a_store_is_cut_somewhere() -> None:
    protocols = [one for one in Store.__mro__ if getattr(one, "_is_protocol", False)]
    methods = {
        name
        for protocol in protocols
        for name, member in vars(protocol).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }

    assert "settle" in methods
    assert methods - ELSEWHERE.keys() == {scenario.method for scenario in SCENARIOS}


@pytest.mark.parametrize(
    "scenario",
    slowly(SCENARIOS, lambda scenario: scenario.name not in ON_THE_STREET),
    ids=lambda scenario: scenario.name,
)
async def test_a_cut_at_any_point_leaves_all_or_nothing_and_the_call_can_be_repeated(
    scene: Scene, scenario: Scenario
) -> None:
    course = await undisturbed(scene, scenario)

    for point in course.points:
        try:
            await cut_at(scene, scenario, course, point)
        except BaseException as error:
            error.add_note(f"at {point}")
            raise


@pytest.mark.parametrize("point", [before("Parse"), before(COMMIT), after(COMMIT)], ids=str)
@pytest.mark.parametrize("scenario", PARTED, ids=lambda scenario: scenario.name)
async def test_who_gives_up_on_a_server_that_is_silent_ends_and_can_ask_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, scenario: Scenario, point: Point
) -> None:
    monkeypatch.setattr(statements, "GIVE_UP_AFTER", 0.05)
    monkeypatch.setattr(connection_module, "GIVE_UP_AFTER", 0.05)
    course = await undisturbed(scene, scenario)
    call = await prepared(scene, scenario)
    scene.proxy.pass_cancellations = False
    rule = scene.proxy.at(point, Effect.HALF_OPEN)

    asking = asyncio.ensure_future(call(scene.store, False))
    async with asyncio.timeout(DEADLINE):
        await rule.reached.wait()
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
        await scene.store.queues()

    (connection,) = rule.connections
    connection.cut()  # as the server does, whose keepalives are not answered
    await scene.gone(connection)
    await check_all_or_nothing(scene, scenario, course, StoreUnavailable)
    await check_repeated(scene, scenario, course, call)


async def test_no_call_has_the_driver_look_up_what_its_types_are(scene: Scene) -> None:
    rule = scene.proxy.at(before("Parse"), text="typeinfo_tree")
    for scenario in SCENARIOS:
        call = await prepared(scene, scenario)

        await call(scene.store, False)

        assert not rule.reached.is_set(), scenario.name


async def cut_at(scene: Scene, scenario: Scenario, course: Course, point: Point) -> None:
    call = await prepared(scene, scenario)
    rule = scene.proxy.at(point, Effect.CUT)
    told: Any = StoreUnavailable
    with suppress(StoreUnavailable):
        async with asyncio.timeout(DEADLINE):
            told = await call(scene.store, False)
    scene.proxy.drop(rule)
    assert rule.reached.is_set(), "the call went another way than before"
    for connection in rule.connections:
        await scene.gone(connection)

    await check_all_or_nothing(scene, scenario, course, told)
    await check_repeated(scene, scenario, course, call)
