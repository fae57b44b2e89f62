"""How a call of a scenario goes undisturbed, and what has to hold of one that was disturbed."""

import asyncio
from typing import Any

from faults.proxy import Point
from faults.scenarios import ANYTHING, SAME, Call, Scenario
from faults.scene import DEADLINE, Scene, State
from windlass.model.errors import StoreUnavailable


class Course:
    """How a call goes when nothing is in its way."""

    def __init__(self, points: list[Point], before: State, after: State, told: Any) -> None:
        self.points = points
        self.before = before
        self.after = after
        self.told = told


async def prepared(scene: Scene, scenario: Scenario) -> Call:
    await scene.reset()
    call = await scenario.prepare(scene)
    await scene.pass_time(scenario.seconds_later)
    await (scene.chill() if scenario.is_first else scene.warm())
    return call


async def undisturbed(scene: Scene, scenario: Scenario) -> Course:
    # Once before, so that handlers have their connection when it is recorded.
    await (await prepared(scene, scenario))(scene.store, False)
    call = await prepared(scene, scenario)
    before = await scene.state()
    with scene.proxy.recording() as recording:
        told = await call(scene.store, False)
    assert not await scene.misplaced()
    return Course(recording.points(scenario.about), before, await scene.state(), told)


async def check_all_or_nothing(scene: Scene, scenario: Scenario, course: Course, told: Any) -> None:
    assert not await scene.misplaced()
    state = await scene.state()
    if told is not StoreUnavailable:
        assert told == course.told
        assert state == course.after
    elif not scenario.in_steps:
        assert state in (course.before, course.after)


async def check_repeated(scene: Scene, scenario: Scenario, course: Course, call: Call) -> None:
    was_done = await scene.state() == course.after
    is_other = scenario.if_done is ANYTHING or (was_done and scenario.if_done is not SAME)
    expected = scenario.if_done if is_other else course.told
    async with asyncio.timeout(DEADLINE):
        try:
            told = await call(scene.store, True)
        except Exception as error:
            if type(error) is not expected:
                raise
            told = type(error)
    assert expected is ANYTHING or told == expected
    assert await scene.state() == course.after
    assert not await scene.misplaced()
