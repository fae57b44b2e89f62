"""What has ended stays as it is."""

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from contract.postgres_keeper import DAY, NOON, Keeper, history_name
from windlass.model.task import (
    Outcome,
)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE windlass.{table} SET last_error = 'x' WHERE id = $1",
        "UPDATE windlass.{table} SET drop_on = drop_on + 1 WHERE id = $1",
        "DELETE FROM windlass.{table} WHERE id = $1",
    ],
)
@pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.CANCELLED, Outcome.DEAD])
async def test_an_ended_task_takes_no_update_and_no_delete(
    keeper: Keeper, outcome: Outcome, statement: str
) -> None:
    task_id = await keeper.end(outcome)
    before = await keeper.store.get(task_id)
    tables = ["dead"]
    if outcome is not Outcome.DEAD:
        tables = ["history", history_name(await keeper.place_of(task_id))]

    for table in tables:
        with pytest.raises(asyncpg.PostgresError) as refused:
            await keeper.watcher.execute(statement.format(table=table), task_id)
        assert refused.value.sqlstate == "WL003"

    assert await keeper.store.get(task_id) == before


@pytest.mark.parametrize(
    "changed", ["generation = generation - 1", "id = gen_random_uuid()", "generation = 0"]
)
async def test_a_generation_never_falls(keeper: Keeper, changed: str) -> None:
    task_id = (await keeper.enqueue()).id
    rise = "UPDATE windlass.task SET generation = generation + 1 WHERE id = $1"
    await keeper.watcher.execute(rise, task_id)

    with pytest.raises(asyncpg.PostgresError) as refused:
        await keeper.watcher.execute(f"UPDATE windlass.task SET {changed} WHERE id = $1", task_id)

    assert refused.value.sqlstate == "WL003"
    assert (await keeper.store.get(task_id)).generation == 2


REMOVALS: dict[str, Callable[[Keeper, UUID], Awaitable[Any]]] = {
    "retry": lambda keeper, task_id: keeper.store.retry(task_id),
    "retention": lambda keeper, _: keeper.retain(),
}


@pytest.mark.parametrize("removal", REMOVALS)
async def test_the_right_to_remove_ends_with_its_transaction(keeper: Keeper, removal: str) -> None:
    single = await keeper.open_store(pool_size=1)
    dead = await keeper.end(Outcome.DEAD, retention=timedelta(0))
    other = await keeper.end(Outcome.DEAD, retention=400 * DAY)
    await keeper.at(NOON + DAY)
    keeper.store = single

    await REMOVALS[removal](keeper, dead)

    with pytest.raises(asyncpg.PostgresError) as refused:
        await single._run.pool.execute("DELETE FROM windlass.dead")  # type: ignore[union-attr]  # open
    assert refused.value.sqlstate == "WL003"
    assert await keeper.is_known(other)
