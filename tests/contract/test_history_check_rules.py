"""Each rule of the history checker finds what it is for in what a database recorded, and nothing else."""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from contract.pgbouncer import store_options
from contract.postgres_clock import PostgresClock
from contract.postgres_keeper import NOON
from contract.postgres_sessions import (
    OTHER_WORKER,
    TERM,
    WORKER,
    claim,
    new_task,
    settlements,
)
from windlass.model.task import Answer, Outcome
from windlass.store.postgres.store import PostgresStore
from windlass.testing.history_check import (
    ClientLog,
    Event,
    History,
    Quiet,
    check,
    check_liveness,
    read_history,
    record,
)
from windlass.testing.history_check.events import Claimed, Ended, Led, Placed, Returned

FAULTS_END = 40.0  # seconds after noon
QUIET = Quiet(
    since=NOON.timestamp() + FAULTS_END,
    until=NOON.timestamp() + 3600,
    sweep=5,
    term=TERM.total_seconds(),
    workers=frozenset({str(WORKER)}),
)
COMPLETED, DEAD, LATER = "completed", "dead", "later"  # a task for each that is to be broken


class Told:
    """A recorded run, and what its tasks are called."""

    def __init__(self, history: History, tasks: Mapping[str, str]) -> None:
        self.history = history
        self._tasks = tasks

    def id(self, task: str) -> str:
        return self._tasks[task]

    def with_event(
        self, kind: type[Event], change: Callable[[Any], dict[str, Any]], **where: Any
    ) -> History:
        """The same run, but for each event of a kind in which this is so."""
        if "task" in where:
            where["task"] = self.id(where["task"])

        def is_meant(event: Event) -> bool:
            return isinstance(event, kind) and all(
                getattr(event, name) == value for name, value in where.items()
            )

        assert any(map(is_meant, self.history.events))
        events = [
            replace(event, **change(event)) if is_meant(event) else event
            for event in self.history.events
        ]
        return replace(self.history, events=events)

    def with_places(self, task: str, *places: str) -> History:
        kept = {one: where for one, where in self.history.places.items() if one != self.id(task)}
        return replace(
            self.history, places=kept | ({self.id(task): frozenset(places)} if places else {})
        )


@pytest.fixture
async def told(database_url: str, sql_url: str, tmp_path: Path) -> AsyncIterator[Told]:
    """A worker is lost with a task; the next one takes it over, and ends that and three more."""
    watcher = await asyncpg.connect(sql_url)
    clock = await PostgresClock.install(sql_url)
    await clock.freeze(NOON)
    store = PostgresStore(store_options(database_url))
    await store.open()
    await store._history.prepare()
    await record(watcher)
    calls = tmp_path / "calls.jsonl"
    try:
        tasks = await run(store, clock, calls)
        yield Told(await read_history(watcher, calls=[calls]), tasks)
    finally:
        await store.close()
        await clock.close()
        await watcher.close()


async def run(store: PostgresStore, clock: PostgresClock, calls: Path) -> dict[str, str]:
    client = ClientLog(calls)

    async def at(seconds: float) -> None:
        await clock.freeze(NOON + timedelta(seconds=seconds))

    async def add(**options: Any) -> str:
        intent = client.invoke("resize")
        task = new_task(tags=(intent,), **options)
        await store.enqueue([task])
        client.ok(intent, task.id)
        return str(task.id)

    async def end(outcomes: Mapping[str, Outcome]) -> None:
        held = await claim(store, limit=1)
        outcome = outcomes.get(str(held.tasks[0].id), Outcome.COMPLETED)
        assert await store.settle(settlements(held, outcome)) == [Answer.APPLIED]

    deposed = await store.lead(OTHER_WORKER, current=None, term=TERM)
    assert deposed is not None
    lost = await add()
    await claim(store, worker=OTHER_WORKER)
    await at(FAULTS_END)
    leading = await store.lead(WORKER, current=None, term=TERM)
    assert leading is not None
    assert (await store.rescue(10, leadership=leading)).returned == 1
    tasks = {
        "lost": lost,
        COMPLETED: await add(),
        DEAD: await add(max_attempts=1),
        LATER: await add(delay=10.0),
    }
    for _ in range(3):
        await end({tasks[DEAD]: Outcome.DEAD})
    await at(FAULTS_END + 11)
    leading = await store.lead(WORKER, current=leading, term=TERM)
    assert leading is not None
    assert await store.promote(10, leadership=leading) == 1
    await end({})
    client.close()
    return tasks


def later(seconds: float) -> Callable[[Event], dict[str, float]]:
    return lambda event: {"at": event.at + seconds}


def refuse(told: Told, task: str) -> History:
    calls = [
        replace(call, outcome="fail") if call.task == told.id(task) else call
        for call in told.history.calls
    ]
    return replace(told.history, calls=calls)


def lost_token(told: Told) -> str:
    (token,) = {
        event.token
        for event in told.history.events
        if isinstance(event, Claimed) and event.worker == str(OTHER_WORKER)
    }
    return token


def put_off_leaders(told: Told) -> History:
    return told.with_event(
        Led,
        lambda event: {"at": event.at + 1000, "expires_at": event.expires_at + 1000},
        holder=str(WORKER),
    )


BROKEN: dict[str, Callable[[Told], History]] = {
    "I1": lambda told: told.with_places(COMPLETED),
    "I2": lambda told: refuse(told, COMPLETED),
    "I3": lambda told: told.with_event(Returned, later(-20), token=None),
    "I4": lambda told: told.with_event(Ended, lambda _: {"token": lost_token(told)}, task="lost"),
    "I5": lambda told: told.with_event(Ended, lambda _: {"was_live": False}, task=COMPLETED),
    "I6": lambda told: told.with_event(Ended, lambda _: {"attempts": 2}, task=COMPLETED),
    "I7": lambda told: told.with_event(Ended, lambda _: {"place": "history"}, task=DEAD),
    "I9": lambda told: told.with_event(
        Led, lambda event: {"expires_at": event.at + 100}, holder=str(OTHER_WORKER)
    ),
    "I10": lambda told: told.with_event(Returned, lambda _: {"term": None}, token=None),
    "I13": lambda told: told.with_event(
        Claimed, lambda event: {"granted_at": event.granted_at - 2}, task=LATER
    ),
    "L1": lambda told: told.with_event(
        Placed, later(10), task=COMPLETED, place="ready", is_there=False
    ),
    "L2": put_off_leaders,
    "L3": lambda told: told.with_event(
        Placed, later(10), task=LATER, place="scheduled", is_there=False
    ),
    "L4": lambda told: told.with_places(COMPLETED, "task", "ready"),
    "L5": lambda told: told.with_event(Claimed, later(10), worker=str(WORKER)),
}


def broken_rules(history: History) -> set[str]:
    return {violation.rule for violation in [*check(history), *check_liveness(history, QUIET)]}


async def test_a_recorded_run_that_keeps_every_promise_is_clean(told: Told) -> None:
    assert broken_rules(told.history) == set()


@pytest.mark.parametrize("rule", BROKEN)
async def test_a_recorded_run_that_breaks_one_promise_is_found_by_its_rule_alone(
    told: Told, rule: str
) -> None:
    assert broken_rules(BROKEN[rule](told)) == {rule}


async def test_in_a_quiet_time_that_is_too_short_nothing_can_be_late(told: Told) -> None:
    moment = replace(QUIET, until=QUIET.since)

    for rule in ("L1", "L2", "L5"):
        assert check_liveness(BROKEN[rule](told), moment) == []
