"""Limits, ageing and pauses of queues and types, as users meet them."""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from windlass import App, ConfigurationError, Limit, TaskState
from windlass.cli import main

APP = """
from windlass import App, Limit

app = App()
app.queue("mail", concurrency=50, rate="100/s")

@app.task(queue="mail", limit=Limit(concurrency=3))
async def send(to: str) -> None: ...
"""


class Crowd:
    """Handlers that wait to be let go, and how many were there at once."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0
        self.begun = 0
        self.go = asyncio.Event()
        self._changed = asyncio.Condition()

    async def enter(self) -> None:
        self.inside += 1
        self.begun += 1
        self.most = max(self.most, self.inside)
        async with self._changed:
            self._changed.notify_all()
        try:
            await self.go.wait()
        finally:
            self.inside -= 1

    async def has_begun(self, number: int) -> None:
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(lambda: self.begun >= number)


@pytest.fixture
def crowd() -> Crowd:
    return Crowd()


@pytest.mark.parametrize("scope", ["queue", "type"])
async def test_no_more_run_at_once_than_a_limit_lets_through(
    app: App, crowd: Crowd, scope: str
) -> None:
    limit = Limit(concurrency=3)

    @app.task(queue="mail", limit=limit if scope == "type" else None)
    async def work() -> None:
        await crowd.enter()

    if scope == "queue":
        app.queue("mail", concurrency=3)
    handles = [await work.enqueue() for _ in range(10)]

    async with app.worker(concurrency=20), app.worker(concurrency=20):
        await crowd.has_begun(3)
        states = [(await handle.get()).status for handle in handles]
        crowd.go.set()
        await asyncio.gather(*(handle.result(20) for handle in handles))

    assert states.count(TaskState.PENDING) == 7
    assert crowd.most == 3


async def test_a_worker_with_few_slots_leaves_the_rest_of_a_limit_to_others(
    app: App, crowd: Crowd
) -> None:
    app.queue("default", concurrency=4)

    @app.task
    async def work() -> None:
        await crowd.enter()

    handles = [await work.enqueue() for _ in range(8)]

    async with app.worker(concurrency=2), app.worker(concurrency=2):
        await crowd.has_begun(4)
        crowd.go.set()
        await asyncio.gather(*(handle.result(20) for handle in handles))


async def test_one_worker_goes_on_as_slots_come_free(app: App) -> None:
    app.queue("default", concurrency=50, rate="100000/s")

    @app.task
    async def work() -> None:
        await asyncio.sleep(0.001)

    handles = await app.enqueue_many(work.call() for _ in range(300))

    async with app.worker(concurrency=5):
        await asyncio.gather(*(handle.result(30) for handle in handles))


async def test_a_rate_lets_a_burst_through_and_the_rest_later(app: App) -> None:
    @app.task(limit=Limit(rate="50/s", burst=2))
    async def work() -> None: ...

    async with app.worker():
        handles = await app.enqueue_many(work.call() for _ in range(12))
        await asyncio.gather(*(handle.result(20) for handle in handles))

    records = [await handle.get() for handle in handles]
    claimed = [one.claimed_at for one in records if one.claimed_at is not None]
    assert len(claimed) == 12
    # A bucket counts at the beginning of a claim, and what it grants is claimed at its end.
    assert (max(claimed) - records[0].created_at).total_seconds() >= 10 / 50


async def test_idle_means_that_what_has_a_limit_is_done_too(app: App) -> None:
    app.queue("default", concurrency=1)

    @app.task
    async def work() -> None: ...

    handles = await app.enqueue_many(work.call() for _ in range(5))
    await app.run_worker(until_idle=True)

    assert {(await handle.get()).status for handle in handles} == {TaskState.COMPLETED}


async def test_a_limit_is_changed_while_a_worker_runs(app: App, crowd: Crowd) -> None:
    @app.task(limit=Limit(concurrency=1))
    async def work() -> None:
        await crowd.enter()

    handles = [await work.enqueue() for _ in range(4)]

    async with app.worker():
        await crowd.has_begun(1)
        await app.types.change("work", concurrency=3)
        await crowd.has_begun(3)
        (record,) = await app.types.rules()
        assert (record.used, record.by_operator) == (3, True)
        assert await app.types.reset("work")
        crowd.go.set()
        await asyncio.gather(*(handle.result(20) for handle in handles))

    assert crowd.most == 3


async def test_what_code_no_longer_limits_has_no_limit_after_the_next_start(app: App) -> None:
    @app.task(limit=Limit(concurrency=1))
    async def work() -> None: ...

    async with app.worker():
        before = [record.rule.concurrency for record in await app.types.rules()]
    work.definition = replace(work.definition, limit=None)
    app.registry._definitions["work"] = work.definition
    async with app.worker():
        after = await app.types.rules()

    assert (before, after) == ([1], [])


async def test_a_paused_type_waits_and_a_resumed_one_runs(app: App) -> None:
    @app.task
    async def paused() -> None: ...

    @app.task
    async def other() -> None: ...

    await app.types.pause("paused")
    waiting = await paused.enqueue()

    async with app.worker():
        await (await other.enqueue()).result(20)
        still = (await waiting.get()).status
        was_paused = await app.types.resume("paused")
        await waiting.result(20)

    assert (still, was_paused) == (TaskState.PENDING, True)


async def test_a_paused_queue_waits_and_a_resumed_one_runs(app: App) -> None:
    @app.task
    async def work() -> None: ...

    await app.queues.pause("mail")
    waiting = await work.options(queue="mail").enqueue()

    async with app.worker():
        await (await work.enqueue()).result(20)
        still = (await waiting.get()).status
        was_paused = await app.queues.resume("mail")
        await waiting.result(20)

    assert (still, was_paused) == (TaskState.PENDING, True)


def test_all_of_it_is_there_for_synchronous_code(database_url: str) -> None:
    with App(database_url) as app:
        app.queues.change_sync("mail", concurrency=2, ageing="strict")
        app.types.change_sync("send", rate="1/s")
        app.queues.pause_sync("mail")
        app.types.pause_sync("send")

        assert [one.rule.concurrency for one in app.queues.rules_sync()] == [2]
        assert [one.rule.rate for one in app.types.rules_sync()] == [1.0]
        assert app.queues.resume_sync("mail")
        assert app.types.resume_sync("send")
        assert app.queues.reset_sync("mail")
        assert app.types.reset_sync("send")
        assert app.queues.rules_sync() == app.types.rules_sync() == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"concurrency": 0}, "queue 'mail': concurrency 0"),
        ({"rate": "soon"}, "queue 'mail': rate 'soon' is not a rate"),
        ({"burst": 3}, "queue 'mail': burst 3 is part of a rate"),
        ({"ageing": "slow"}, "queue 'mail': ageing 'slow'"),
        ({"ageing": -1}, "queue 'mail': ageing -1"),
        ({"weight": 0}, "queue 'mail': weight 0"),
        ({"size": 1}, "option 'size' is not known; options are: concurrency, rate, burst"),
    ],
)
async def test_what_makes_no_sense_is_refused(options: Any, said: str) -> None:
    app = App("memory:")
    with pytest.raises(ConfigurationError, match=said):
        app.queue("mail", **options)
    with pytest.raises(ConfigurationError, match=said):
        await app.queues.change("mail", **options)

    assert await app.queues.rules() == []


async def test_a_change_that_says_nothing_lifts_no_limit() -> None:
    app = App("memory:")
    said = "nothing was given to set; options are: concurrency, rate, burst.*None lifts a limit"

    with pytest.raises(ConfigurationError, match=f"queue 'mail': {said}"):
        await app.queues.change("mail")
    with pytest.raises(ConfigurationError, match=f"type 'send': {said}"):
        await app.types.change("send")
    with pytest.raises(ConfigurationError, match=f"type 'send', value 'acme': {said}"):
        await app.values.change("send", "acme")
    with pytest.raises(ConfigurationError, match=f"type 'send', each value: {said}"):
        await app.values.change_each("send")

    await app.queues.change("mail", concurrency=None)
    assert [one.rule.name for one in await app.queues.rules()] == ["mail"]


def test_a_queue_is_declared_once() -> None:
    app = App("memory:")
    app.queue("mail", concurrency=3)
    app.queue("mail", concurrency=3)

    with pytest.raises(ConfigurationError, match="queue 'mail' is declared twice, and not alike"):
        app.queue("mail", concurrency=4)


@pytest.mark.parametrize("limit", [3, "3", {"concurrency": 3}])
def test_what_is_no_limit_is_refused(limit: Any) -> None:
    app = App("memory:")

    with pytest.raises(ConfigurationError, match=r"task 'work': limit .* give one as in Limit"):

        @app.task(limit=limit)
        async def work() -> None: ...


class TestCommands:
    """The same by commands."""

    @pytest.fixture
    def windlass(
        self, tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[..., Result]:
        (tmp_path / "limiting.py").write_text(APP)
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        environment = {**os.environ, "WINDLASS_DATABASE_URL": database_url}

        def run(*arguments: str, code: int = 0) -> Result:
            done = CliRunner().invoke(main, arguments, env=environment)
            sys.modules.pop("limiting", None)  # a new process would not have it
            assert done.exit_code == code, done.output
            return done

        return run

    def test_what_code_declares_is_listed(self, windlass: Callable[..., Result]) -> None:
        windlass("migrate", "limiting:app")

        assert "0 of 50 at once, 100/s, bursts of 10" in windlass("queues", "list").output
        assert "0 of 3 at once" in windlass("types", "list").output

    def test_a_limit_is_set_and_reset(self, windlass: Callable[..., Result]) -> None:
        windlass("migrate", "limiting:app")

        changed = windlass("queues", "limit", "mail", "--concurrency", "2", "--ageing", "strict")
        listed = windlass("queues", "list", "--json")
        reset = windlass("queues", "reset", "mail")
        again = windlass("queues", "reset", "mail")

        assert changed.output == "queue 'mail': 0 of 2 at once, strict (set by hand)\n"
        (mail,) = json.loads(listed.output)
        assert (mail["rule"]["ageing"], mail["rule"]["by_operator"]) == ("strict", True)
        assert reset.output.startswith("queue 'mail': 0 of 50 at once")
        assert again.output.startswith("nothing was set by hand; queue 'mail'")

    @pytest.mark.parametrize(
        ("typed", "said"),
        [
            (("queues", "pause", "mial"), "no registered type has the queue 'mial'"),
            (("queues", "limit", "mial", "--rate", "1/s"), "no worker serves it by name"),
            (("types", "limit", "sned", "--rate", "1/s"), "has ever registered the type 'sned'"),
        ],
    )
    def test_a_name_that_nobody_knows_is_taken_and_told(
        self, windlass: Callable[..., Result], typed: tuple[str, ...], said: str
    ) -> None:
        windlass("migrate", "limiting:app")

        assert said in windlass(*typed).stderr
        known = [{"mial": "mail", "sned": "send"}.get(word, word) for word in typed]
        assert windlass(*known).stderr == ""

    def test_a_limit_of_a_type_is_lifted(self, windlass: Callable[..., Result]) -> None:
        windlass("migrate", "limiting:app")

        lifted = windlass("types", "limit", "send", "--concurrency", "none")

        assert lifted.output == "type 'send' has no limits\n"

    def test_a_type_is_paused_and_resumed(self, windlass: Callable[..., Result]) -> None:
        paused = windlass("types", "pause", "sned")
        listed = windlass("types", "list")
        resumed = windlass("types", "resume", "sned")
        again = windlass("types", "resume", "sned")

        assert "type 'sned' is paused" in paused.output
        assert "no worker has ever registered the type 'sned'" in paused.output
        assert "since " in listed.output
        assert resumed.output == "type 'sned' is resumed\n"
        assert again.output == "type 'sned' was not paused\n"

    @pytest.mark.parametrize(
        ("typed", "said"),
        [
            ((), "nothing is said of it: give one of --concurrency"),
            (("--concurrency", "few"), "concurrency 'few'"),
            (("--rate", "5"), "rate '5' is not a rate"),
            (("--ageing", "never"), "ageing 'never'"),
            (("--weight", "-1"), "weight -1"),
        ],
    )
    def test_what_makes_no_sense_is_refused(
        self, windlass: Callable[..., Result], typed: tuple[str, ...], said: str
    ) -> None:
        assert said in windlass("queues", "limit", "mail", *typed, code=2).output
