"""Every statement of every method of a store, refused by the server once."""

from typing import Any

import asyncpg
import pytest

from faults.courses import check_all_or_nothing, check_repeated, prepared, undisturbed
from faults.scenarios import ON_THE_STREET, SCENARIOS, Scenario
from faults.scene import Scene
from slowly import slowly
from windlass.model.errors import StoreUnavailable
from windlass.store.postgres.connection import _Connection

VERBS = ("execute", "fetch", "fetchrow", "fetchval")
# One of several that are translated alike.
REFUSAL = asyncpg.DeadlockDetectedError("deadlock detected")


class Refusing:
    """Stands in for the server at one statement: the driver raises what it would have said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed = 0
        self.refuse_at = 0  # none
        for name in VERBS:
            monkeypatch.setattr(_Connection, name, self._wrapped(getattr(_Connection, name)))

    def _wrapped(self, verb: Any) -> Any:
        async def asked(connection: Any, *args: Any, **kwargs: Any) -> Any:
            if self.refuse_at:
                self.passed += 1
                if self.passed == self.refuse_at:
                    raise REFUSAL
            return await verb(connection, *args, **kwargs)

        return asked


@pytest.mark.parametrize(
    "scenario",
    slowly(SCENARIOS, lambda scenario: scenario.name not in ON_THE_STREET),
    ids=lambda scenario: scenario.name,
)
async def test_a_statement_that_the_server_refuses_leaves_nothing_half_done(
    scene: Scene, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = await undisturbed(scene, scenario)
    refusing = Refusing(monkeypatch)

    for number in range(1, 50):
        call = await prepared(scene, scenario)
        refusing.passed, refusing.refuse_at = 0, number
        told: Any = StoreUnavailable
        try:
            told = await call(scene.store, False)
        except StoreUnavailable:
            pass
        finally:
            refusing.refuse_at = 0
        await check_all_or_nothing(scene, scenario, course, told)
        if refusing.passed < number:
            break  # there are no more statements
        await check_repeated(scene, scenario, course, call)
    assert number > 1
