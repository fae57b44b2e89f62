"""What a worker that leads does with dead letters by itself: rules, limits, the archive."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from acceptance.quick import QUICK
from windlass import App, ConfigurationError, Fail, TaskNotFound, TaskState


async def test_a_worker_that_leads_replays_by_the_rules_of_its_app(app: App) -> None:
    @app.task(name="mail", retry=1)
    async def mail() -> None:
        raise TimeoutError("gateway is silent")

    @app.task(name="parse", retry=1)
    async def parse() -> None:
        raise Fail("no number")

    app.replay_dead(error="gateway", after=0)
    other, handle = await parse.enqueue(), await mail.enqueue()

    async with app.worker():
        while len(await app.dead.list(type="mail")) < 2:
            await asyncio.sleep(0.02)

    (second,) = (await app.dead.get(handle.id)).replayed_as
    letter = await app.dead.get(second)
    assert (letter.depth, letter.replay_of, letter.replayed_as) == (1, handle.id, ())
    assert (await app.dead.get(other.id)).replayed_as == ()


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({}, "say which with error_class"),
        ({"error_class": "odd"}, "'odd' is not known"),
        ({"type": "mail", "times": 0}, "times 0"),
        ({"type": "mail", "after": -1}, "after -1"),
        ({"type": "mail", "within": 0}, "within 0"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(rule: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        App("memory:").replay_dead(**rule)


@pytest.mark.parametrize("archived", [False, True])
async def test_a_queue_keeps_as_many_letters_as_are_wanted(
    app_url: str, tmp_path: Path, archived: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "archive" if archived else None
    settings = QUICK | {"dead_limit": 2, "dead_archive": str(folder or "")}
    async with App(app_url, **settings) as app:

        @app.task(name="parse", queue="texts/ä", retry=1)
        async def parse(text: str) -> None:
            raise Fail(text)

        handles = [await app.enqueue("parse", {"text": str(place)}) for place in range(5)]
        async with app.worker():
            while not all([await has_ended(app, one.id) for one in handles]):
                await asyncio.sleep(0.02)
            while len(left := await app.dead.list()) > 2:
                await asyncio.sleep(0.02)
    event = "dead.archived" if archived else "dead.dropped"
    said = [record.getMessage() for record in caplog.records if event in record.getMessage()]
    assert sum(int(line.partition("letters=")[2].split()[0]) for line in said) == 3
    assert all("queue=texts/ä" in line for line in said)
    if folder is not None:
        lines = [line for file in folder.iterdir() for line in file.read_text().splitlines()]
        kept = {json.loads(line)["id"] for line in lines}
        assert kept == {one.id for one in handles} - {letter.id for letter in left}


async def has_ended(app: App, task_id: str) -> bool:
    try:
        return (await app.handle(task_id).get()).status is TaskState.FAILED
    except TaskNotFound:
        return True
