"""Limits by value: how many at once of each, turns that are fair, sizes that differ."""

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from windlass import App, ConfigurationError, Limit, TaskState
from windlass.cli import main
from windlass.model.rule import FAIR_WINDOW, ValueRule

APP = """
from windlass import App, Limit

app = App()

@app.task(limit=(Limit(concurrency=50), Limit(concurrency=3, rate="10/s", by="tenant")))
async def send(tenant: str) -> None: ...

@app.task(limit=Limit(by=("tenant", "region")))
async def export(tenant: str, region: str = "eu") -> None: ...

@app.task
async def plain(tenant: str) -> None: ...
"""


class Crowds:
    """Handlers that wait to be let go, and how many of each value were there at once."""

    def __init__(self) -> None:
        self.inside: Counter[Any] = Counter()
        self.most: Counter[Any] = Counter()
        self.begun: Counter[Any] = Counter()
        self.order: list[Any] = []
        self.go = asyncio.Event()
        self._changed = asyncio.Condition()

    async def enter(self, value: Any) -> None:
        self.inside[value] += 1
        self.begun[value] += 1
        self.order.append(value)
        self.most[value] = max(self.most[value], self.inside[value])
        async with self._changed:
            self._changed.notify_all()
        try:
            await self.go.wait()
        finally:
            self.inside[value] -= 1

    async def have_begun(self, **wanted: int) -> None:
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(lambda: Counter(wanted) <= self.begun)


@pytest.fixture
def crowds() -> Crowds:
    return Crowds()


def limited(app: App, crowds: Crowds, limit: Any) -> Any:
    @app.task(limit=limit)
    async def work(tenant: str = "a", region: str = "eu") -> None:
        await crowds.enter(tenant)

    return work


async def test_no_more_of_a_value_run_at_once_and_other_values_go_on(
    app: App, crowds: Crowds
) -> None:
    work = limited(app, crowds, Limit(concurrency=2, by="tenant"))
    handles = [await work.enqueue(tenant) for tenant in "aaaaabbbbc"]

    async with app.worker(concurrency=20), app.worker(concurrency=20):
        await crowds.have_begun(a=2, b=2, c=1)
        states = Counter([(await handle.get()).status for handle in handles])
        crowds.go.set()
        await asyncio.gather(*(handle.result(20) for handle in handles))

    assert states[TaskState.BLOCKED] == 5
    assert crowds.most == {"a": 2, "b": 2, "c": 1}


async def test_one_that_waits_for_its_time_gives_its_place_to_others(
    app: App, crowds: Crowds
) -> None:
    work = limited(app, crowds, Limit(concurrency=1, by="tenant"))
    later = await work.options(delay=3600).enqueue("a")
    now = await work.enqueue("a")

    async with app.worker():
        await crowds.have_begun(a=1)
        crowds.go.set()
        await now.result(20)
        assert (await later.get()).status is TaskState.SCHEDULED
        await later.change(delay=0)
        await later.result(20)

    assert crowds.most == {"a": 1}


async def test_an_argument_that_is_left_out_counts_with_its_default(
    app: App, crowds: Crowds
) -> None:
    work = limited(app, crowds, Limit(concurrency=1, by="region"))
    calls = [work.call(), work.call(region="eu"), work.call("b", "us"), work.call(tenant="c")]
    handles = await app.enqueue_many(calls)
    handles.append(await app.enqueue("work", {"tenant": "d"}))

    async with app.worker():
        await crowds.have_begun(a=1, b=1)
        states = [(await handle.get()).status for handle in handles]
        crowds.go.set()
        await asyncio.gather(*(handle.result(20) for handle in handles))

    assert [state is TaskState.BLOCKED for state in states] == [False, True, False, True, True]


async def test_several_arguments_count_together(app: App, crowds: Crowds) -> None:
    work = limited(app, crowds, Limit(concurrency=1, by=("tenant", "region")))
    given = [("a", "eu"), ("a", "eu"), ("a", "us"), ("b", "eu")]
    handles = [await work.enqueue(*arguments) for arguments in given]

    async with app.worker():
        await crowds.have_begun(a=2, b=1)
        second = (await handles[1].get()).status
        crowds.go.set()
        await asyncio.gather(*(handle.result(20) for handle in handles))

    assert second is TaskState.BLOCKED
    assert crowds.most["a"] == 2


async def test_a_limit_of_all_and_one_by_value_both_hold(app: App, crowds: Crowds) -> None:
    work = limited(app, crowds, [Limit(concurrency=3), Limit(concurrency=2, by="tenant")])
    handles = [await work.enqueue(tenant) for tenant in "aaabbb"]

    async with app.worker(concurrency=20):
        await crowds.have_begun(a=2, b=1)
        inside = crowds.inside.total()
        crowds.go.set()
        await asyncio.gather(*(handle.result(20) for handle in handles))

    assert inside == 3
    assert max(crowds.most.values()) <= 2


async def test_a_rate_by_value_lets_a_burst_through_and_the_rest_later(app: App) -> None:
    @app.task(limit=Limit(rate="50/s", burst=2, by="tenant"))
    async def work(tenant: str) -> None: ...

    handles = await app.enqueue_many(work.call(tenant) for tenant in "ab" * 12)

    async with app.worker():
        await asyncio.gather(*(handle.result(20) for handle in handles))

    for of_one in (handles[::2], handles[1::2]):
        records = [await handle.get() for handle in of_one]
        claimed = [one.claimed_at for one in records if one.claimed_at is not None]
        assert len(claimed) == 12
        # It was let through before it was claimed, so the first may have come later than by the rate.
        assert (max(claimed) - min(claimed)).total_seconds() >= 5 / 50


async def test_one_task_waits_behind_no_more_of_another_value_than_the_bound(app: App) -> None:
    ran: list[str] = []

    @app.task(limit=Limit(by="tenant"))
    async def work(tenant: str) -> None:
        ran.append(tenant)

    many = [work.call("big") for _ in range(3 * FAIR_WINDOW)]
    handles = await app.enqueue_many([*many, work.call("small")])
    await app.run_worker(until_idle=True, concurrency=1)

    assert {(await handle.get()).status for handle in handles[-2:]} == {TaskState.COMPLETED}
    assert len(ran) == len(handles)
    assert ran.index("small") <= FAIR_WINDOW


async def test_a_value_has_a_size_of_its_own_while_a_worker_runs(app: App, crowds: Crowds) -> None:
    work = limited(app, crowds, Limit(concurrency=1, by="tenant"))
    handles = [await work.enqueue(tenant) for tenant in "aaaaabb"]

    async with app.worker():
        await crowds.have_begun(a=1, b=1)
        await app.values.change("work", "a", concurrency=3)
        await crowds.have_begun(a=3, b=1)
        before = [(one.rule, one.by_operator) for one in await app.values.rules("work")]
        await app.values.change_each("work", concurrency=2)
        await crowds.have_begun(a=3, b=2)
        assert await app.values.reset("work", "a")
        assert await app.values.reset_each("work")
        after = [one.rule.concurrency for one in await app.values.rules()]
        crowds.go.set()
        await asyncio.gather(*(handle.result(20) for handle in handles))

    assert before == [(ValueRule("work", None, 1), False), (ValueRule("work", "a", 3), True)]
    assert after == [1]
    assert crowds.most["b"] == 2


async def test_a_size_is_found_by_several_values(app: App, crowds: Crowds) -> None:
    work = limited(app, crowds, Limit(concurrency=1, by=("tenant", "region")))
    handles = [await work.enqueue("a", "é") for _ in range(3)]

    async with app.worker():
        await app.values.change("work", ("a", "é"), concurrency=2)
        await crowds.have_begun(a=2)
        with pytest.raises(ConfigurationError, match="by tenant, region; give a tuple of 2"):
            await app.values.change("work", "a", concurrency=2)
        crowds.go.set()
        await asyncio.gather(*(handle.result(20) for handle in handles))

    assert crowds.most["a"] == 2


@pytest.mark.parametrize("value", ["x" * 500, "é" * 201, "x" * 200, "", 'a "quoted"\\one', "null"])
async def test_any_text_is_a_value(app: App, crowds: Crowds, value: str) -> None:
    work = limited(app, crowds, Limit(concurrency=1, by="tenant"))
    await app.values.change("work", value, concurrency=2)
    handles = [await work.enqueue(value) for _ in range(3)]

    async with app.worker():
        async with asyncio.timeout(20):
            while crowds.begun[value] < 2:
                await asyncio.sleep(0.01)
        crowds.go.set()
        await asyncio.gather(*(handle.result(20) for handle in handles))

    assert crowds.most[value] == 2


@pytest.mark.parametrize("value", [7, True, None, 1.5])
async def test_so_is_a_number_and_what_else_is_plain(app: App, crowds: Crowds, value: Any) -> None:
    @app.task(limit=Limit(concurrency=1, by=("tenant", "region")))
    async def work(tenant: Any, region: Any = None) -> None:
        await crowds.enter("all")

    await app.values.change("work", (value, None), concurrency=2)
    handles = [await work.enqueue(value) for _ in range(3)]

    async with app.worker():
        await crowds.have_begun(all=2)
        crowds.go.set()
        await asyncio.gather(*(handle.result(20) for handle in handles))

    assert crowds.most["all"] == 2


async def test_what_code_no_longer_limits_has_no_limit_after_the_next_start(app: App) -> None:
    @app.task(limit=Limit(concurrency=1, by="tenant"))
    async def work(tenant: str) -> None: ...

    async with app.worker():
        before = [record.rule.concurrency for record in await app.values.rules()]
    work.definition = replace(work.definition, value_limit=None)
    app.registry._definitions["work"] = work.definition
    async with app.worker():
        after = await app.values.rules()

    assert work.definition.defaults.limit_by is None
    assert (before, after) == ([1], [])


async def test_what_has_no_value_of_its_own_runs_as_before(app: App) -> None:
    @app.task
    async def work(tenant: str) -> None: ...

    await app.values.change("work", "a", concurrency=1)
    handles = [await work.enqueue("a") for _ in range(3)]
    await app.run_worker(until_idle=True)

    assert {(await handle.get()).status for handle in handles} == {TaskState.COMPLETED}


def test_all_of_it_is_there_for_synchronous_code(database_url: str) -> None:
    with App(database_url) as app:
        app.values.change_sync("send", "acme", concurrency=2, weight=3)
        app.values.change_each_sync("send", rate="1/s")

        found = [one.rule for one in app.values.rules_sync("send")]
        assert found == [
            ValueRule("send", None, None, 1.0, 1.0),
            ValueRule("send", "acme", 2, weight=3),
        ]
        assert app.values.reset_sync("send", "acme")
        assert app.values.reset_each_sync("send")
        assert not app.values.reset_each_sync("send")
        assert app.values.rules_sync() == []


class TestCommands:
    """The same by commands."""

    @pytest.fixture
    def windlass(
        self, tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[..., Result]:
        (tmp_path / "by_value.py").write_text(APP)
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        environment = {**os.environ, "WINDLASS_DATABASE_URL": database_url}

        def run(*arguments: str, code: int = 0) -> Result:
            done = CliRunner().invoke(main, arguments, env=environment)
            sys.modules.pop("by_value", None)  # a new process would not have it
            assert done.exit_code == code, done.output
            return done

        run("migrate", "by_value:app")
        return run

    def test_what_code_declares_is_listed(self, windlass: Callable[..., Result]) -> None:
        table = windlass("types", "list").output
        listed = {
            one["name"]: one for one in json.loads(windlass("types", "list", "--json").stdout)
        }

        assert "0 of 50 at once; each value: 3 at once, 10/s, bursts of 1 " in table
        assert "each value: takes turns" in table
        (each,) = listed["send"]["values"]
        assert each == {
            "value": None, "concurrency": 3, "rate": 10.0, "burst": 1.0, "weight": None,
            "by_operator": False,
        }  # fmt: skip
        assert listed["plain"]["values"] == []

    def test_a_value_has_a_size_of_its_own_until_it_is_reset(
        self, windlass: Callable[..., Result]
    ) -> None:
        changed = windlass(
            *("types", "limit", "send", "--value", "acme", "--concurrency", "10"),
            *("--rate", "5/s", "--burst", "2", "--weight", "3"),
        )
        listed = windlass("types", "list").output
        reset = windlass("types", "reset", "send", "--value", "acme")
        again = windlass("types", "reset", "send", "--value", "acme")

        said = "10 at once, 5/s, bursts of 2, weight 3 (set by hand)"
        as_each = "type 'send', value 'acme': as each value, 3 at once, 10/s, bursts of 1\n"
        assert changed.output == f"type 'send', value 'acme': {said}\n"
        assert f"; 'acme': {said}" in listed
        assert reset.output == as_each
        assert again.output == f"nothing was set by hand; {as_each}"

    def test_each_value_has_another_size_until_it_is_reset(
        self, windlass: Callable[..., Result]
    ) -> None:
        changed = windlass("types", "limit", "send", "--each-value", "--concurrency", "2")
        lifted = windlass("types", "limit", "send", "--each-value", "--concurrency", "none")
        reset = windlass("types", "reset", "send", "--each-value")

        assert changed.output == "type 'send', each value: 2 at once (set by hand)\n"
        assert lifted.output == "type 'send', each value: takes turns (set by hand)\n"
        assert reset.output == "type 'send', each value: 3 at once, 10/s, bursts of 1\n"

    def test_several_arguments_are_given_in_their_order(
        self, windlass: Callable[..., Result]
    ) -> None:
        several = ("types", "limit", "export", "--value", "acme", "--value", "us")
        changed = windlass(*several, "--weight", "3")
        one = windlass("types", "limit", "export", "--value", "acme", "--weight", "3", code=2)

        assert (
            changed.output == """type 'export', value '["acme", "us"]': weight 3 (set by hand)\n"""
        )
        assert "its limit is by tenant, region; give a tuple of 2" in one.output

    def test_many_values_are_counted_in_the_table(self, windlass: Callable[..., Result]) -> None:
        for number in range(6):
            windlass("types", "limit", "send", "--value", str(number), "--concurrency", "1")

        assert "; '2': 1 at once (set by hand); 3 more " in windlass("types", "list").output

    @pytest.mark.parametrize(
        ("name", "warned"),
        [
            ("plain", "type 'plain' has no limit by a value: this holds once it has one"),
            ("sned", "no worker has ever registered the type 'sned'"),
        ],
    )
    def test_a_size_that_holds_for_no_task_yet_is_told(
        self, windlass: Callable[..., Result], name: str, warned: str
    ) -> None:
        done = windlass("types", "limit", name, "--value", "acme", "--concurrency", "1")

        assert done.stderr.startswith(f"windlass: {warned}")
        assert done.stdout == f"type '{name}', value 'acme': 1 at once (set by hand)\n"

    @pytest.mark.parametrize(
        ("typed", "said"),
        [
            (("limit", "send", "--value", "a"), "give one of --concurrency, --rate, --burst, --we"),
            (
                ("limit", "send", "--weight", "3"),
                "--weight '3' is that of a value; give --value or",
            ),
            (
                ("limit", "send", "--value", "a", "--each-value", "--weight", "3"),
                "--value 'a' and --each-value exclude each other; give one",
            ),
            (("reset", "send", "--value", "a", "--each-value"), "exclude each other; give one"),
            (
                ("limit", "send", "--value", "a", "--weight", "x"),
                "value 'a': weight 'x': use a whole",
            ),
            (("limit", "send", "--each-value", "--concurrency", "few"), "concurrency 'few'"),
            (("limit", "send", "--value", "a\x00", "--weight", "3"), "holds the NUL character"),
            (("reset", "", "--each-value"), "type '' has 0 characters"),
        ],
        ids=lambda typed: " ".join(typed)[:50] if isinstance(typed, tuple) else "",
    )
    def test_what_makes_no_sense_is_refused(
        self, windlass: Callable[..., Result], typed: tuple[str, ...], said: str
    ) -> None:
        assert said in windlass("types", *typed, code=2).output
