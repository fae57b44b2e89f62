"""What an application does with its dead letters, on each store, with a real worker."""

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from acceptance.quick import QUICK
from windlass import (
    App,
    ConfigurationError,
    Fail,
    PayloadError,
    TaskNotFound,
    TaskState,
    WrongState,
)
from windlass.client.replaying import ReplayReport

MAIL = {"to": "a@example.com", "copies": 1}


class Gateway:
    """Something outside that is down until somebody mends it."""

    def __init__(self) -> None:
        self.is_up = False
        self.up_for: set[str] = set()
        self.sent: list[tuple[str, int]] = []


@pytest.fixture
def gateway(app: App) -> Gateway:
    gateway = Gateway()

    @app.task(name="mail", queue="mails", retry=1)
    async def mail(to: str, copies: int = 1) -> str:
        if not gateway.is_up and to not in gateway.up_for:
            raise TimeoutError(f"gateway of {to} is silent")
        gateway.sent.append((to, copies))
        return to

    @app.task(name="parse", retry=1)
    async def parse(text: str) -> None:
        raise Fail(f"no number: {text}")

    return gateway


async def work(app: App) -> None:
    await app.run_worker(until_idle=True)


async def bury(app: App, number: int = 1, name: str = "mail") -> list[str]:
    """Let tasks fail for good, one after another."""
    ids = []
    for place in range(number):
        payload = {"to": f"{place}@example.com"} if name == "mail" else {"text": f"{place}"}
        ids.append((await app.enqueue(name, payload, tags=[f"no-{place}"])).id)
        await work(app)
    return ids


async def test_a_letter_says_what_happened(app: App, gateway: Gateway) -> None:
    (task_id,) = await bury(app)

    letter = await app.dead.get(task_id)

    assert (letter.id, letter.type, letter.queue) == (task_id, "mail", "mails")
    assert (letter.status, letter.tags) == (TaskState.DEAD, ("no-0",))
    assert letter.error_type == "TimeoutError"
    assert letter.last_error == "gateway of 0@example.com is silent"
    (attempt,) = letter.errors
    assert attempt["worker_id"] == letter.worker_id
    assert 'raise TimeoutError(f"gateway' in attempt["traceback"]
    assert attempt["started_at"] <= attempt["ended_at"]


async def test_letters_are_listed_last_ended_first(app: App, gateway: Gateway) -> None:
    ids = [*await bury(app, 2), *await bury(app, 1, "parse")]

    assert [letter.id for letter in await app.dead.list()] == ids[::-1]
    assert [letter.id for letter in await app.dead.list(limit=1)] == ids[2:]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"queue": "mails"}, {0, 1}),
        ({"type": "parse"}, {2}),
        ({"status": "failed"}, {2}),
        ({"status": ["failed", "dead"]}, {0, 1, 2}),
        ({"error": "^TimeoutError: .* of 1@"}, {1}),
        ({"error_class": "rate-limited"}, set()),
        ({"error_class": "transient"}, {0, 1}),
        ({"error_class": "permanent-input"}, {2}),
        ({"ended_from": datetime(2000, 1, 1, tzinfo=UTC)}, {0, 1, 2}),
        ({"ended_until": datetime(2000, 1, 1, tzinfo=UTC)}, set()),
    ],
)
async def test_letters_are_searched(
    app: App, gateway: Gateway, filters: dict[str, Any], expected: set[int]
) -> None:
    ids = [*await bury(app, 2), *await bury(app, 1, "parse")]

    found = await app.dead.list(**filters)

    assert {ids.index(letter.id) for letter in found} == expected


@pytest.mark.parametrize(
    ("filters", "said"),
    [
        ({"error": "((gate"}, r"'\(\(gate' is not a regular expression"),
        ({"error": ""}, "regular expression of 1 to 1000"),
        ({"error_class": "odd"}, "'odd' is not known; use one of .*transient"),
        ({"status": "completed"}, "a dead letter is failed or dead"),
        ({"queu": "mails"}, "filter 'queu' is not known"),
        ({"ended_from": "yesterday"}, "ended_from 'yesterday'"),
        ({"limit": 0}, "limit 0"),
    ],
)
async def test_a_search_that_makes_no_sense_is_refused(
    app: App, gateway: Gateway, filters: dict[str, Any], said: str
) -> None:
    await bury(app)

    with pytest.raises(ConfigurationError, match=said):
        await app.dead.list(**filters)


async def test_what_is_no_letter_is_not_shown_as_one(app: App, gateway: Gateway) -> None:
    gateway.is_up = True
    (task_id,) = await bury(app)

    with pytest.raises(WrongState, match="is completed"):
        await app.dead.get(task_id)
    with pytest.raises(TaskNotFound):
        await app.dead.get("01999999-aaaa-7bbb-8ccc-000000000001")
    with pytest.raises(TaskNotFound, match="not the id"):
        await app.dead.get("x")


async def test_a_letter_is_replayed_as_a_new_task(app: App, gateway: Gateway) -> None:
    (task_id,) = await bury(app)
    gateway.is_up = True

    report = await app.dead.replay(task_id)
    await work(app)

    new_id = report.replayed[task_id]
    assert new_id is not None
    record = await app.handle(new_id).get()
    assert (record.status, record.replay_of, record.tags) == (
        *(TaskState.COMPLETED, task_id),
        ("no-0",),
    )
    assert (await app.dead.get(task_id)).replayed_as == (new_id,)
    assert gateway.sent == [("0@example.com", 1)]


async def test_a_letter_is_replayed_once_unless_told_again(app: App, gateway: Gateway) -> None:
    (task_id,) = await bury(app)
    first = (await app.dead.replay(task_id)).replayed[task_id]

    with pytest.raises(WrongState, match=f"was replayed as {first}"):
        await app.dead.replay(task_id)
    again = await app.dead.replay(task_id, again=True)

    assert (await app.dead.get(task_id)).replayed_as == (first, again.replayed[task_id])


async def test_a_filter_passes_by_what_was_replayed(app: App, gateway: Gateway) -> None:
    ids = await bury(app, 3)
    await app.dead.replay(ids[1])

    report = await app.dead.replay(type="mail")

    assert list(report.replayed) == [ids[0], ids[2]]
    assert (await app.dead.replay(type="mail")).replayed == {}
    assert list((await app.dead.replay(type="mail", again=True)).replayed) == ids


async def test_a_dry_run_says_what_would_happen(app: App, gateway: Gateway) -> None:
    ids = [*await bury(app, 3), *await bury(app, 1, "parse")]
    await app.dead.replay(ids[0])

    foreseen = await app.dead.replay(error="gateway", dry_run=True)
    unchanged = await app.dead.get(ids[1])
    report = await app.dead.replay(error="gateway")

    assert unchanged.replayed_as == ()
    assert foreseen == ReplayReport(dict.fromkeys(ids[1:3]))
    assert list(report.replayed) == list(foreseen.replayed)


async def test_a_dry_run_by_id_is_refused_what_the_replay_would_be(
    app: App, gateway: Gateway
) -> None:
    ids = await bury(app, 2)
    await app.dead.replay(ids[0])
    waiting = (await app.enqueue("mail", MAIL)).id
    asked = [*ids, waiting, "01999999-aaaa-7bbb-8ccc-000000000001"]

    foreseen = await app.dead.replay(*asked, dry_run=True)
    report = await app.dead.replay(*asked)

    assert list(foreseen.replayed) == list(report.replayed) == [ids[1]]
    said = [{key: str(error) for key, error in one.refused.items()} for one in (foreseen, report)]
    assert said[0] == said[1]
    assert list(said[0]) == [ids[0], *asked[2:]]


async def test_an_edited_payload_is_what_the_replay_gets(app: App, gateway: Gateway) -> None:
    ids = await bury(app, 2)
    gateway.is_up = True

    await app.dead.replay(ids[0], payload={"to": "b@example.com", "copies": 3})
    await app.dead.replay(type="mail", changes={"copies": 7})
    await work(app)

    assert gateway.sent == [("b@example.com", 3), ("1@example.com", 7)]


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"changes": {"copies": "many"}},
        {"changes": {"cc": 1}},
        {"changes": {"to": "x" * (1 << 20)}},
        {"changes": 7},
    ],
)
async def test_a_payload_that_does_not_fit_replays_nothing(
    app: App, gateway: Gateway, options: dict[str, Any], dry_run: bool
) -> None:
    ids = await bury(app, 2)

    with pytest.raises(PayloadError):
        await app.dead.replay(type="mail", dry_run=dry_run, **options)

    assert [(await app.dead.get(task_id)).replayed_as for task_id in ids] == [(), ()]


async def test_a_whole_payload_is_for_one_letter(app: App, gateway: Gateway) -> None:
    ids = await bury(app, 2)

    with pytest.raises(ConfigurationError, match="one letter"):
        await app.dead.replay(*ids, payload=MAIL)
    with pytest.raises(ConfigurationError, match="one letter"):
        await app.dead.replay(type="mail", payload=MAIL)
    with pytest.raises(ConfigurationError, match="exclude each other"):
        await app.dead.replay(ids[0], payload=MAIL, changes={"copies": 1})


async def test_replays_are_spread_over_time(app: App, gateway: Gateway) -> None:
    ids = await bury(app, 3)

    report = await app.dead.replay(type="mail", rate="30/m")

    made = [await app.handle(str(report.replayed[task_id])).get() for task_id in ids]
    delays = [(one.scheduled_for - one.created_at).total_seconds() for one in made]
    assert delays == [0, 2, 4]


@pytest.mark.parametrize("rate", ["10", "0/s", "-1/s", "ten/s", "1/y", ""])
async def test_a_rate_that_is_none_is_refused(app: App, rate: Any) -> None:
    with pytest.raises(ConfigurationError, match=r'rate .*write it as "10/s"'):
        await app.dead.replay(type="mail", rate=rate)


async def test_a_canary_that_fails_again_stops_the_rest(app: App, gateway: Gateway) -> None:
    ids = await bury(app, 5)

    async with app.worker():
        report = await app.dead.replay(type="mail", canary=2, canary_timeout=30)

    assert list(report.replayed) == ids[:2]
    assert list(report.left) == ids[2:]
    assert report.stopped == "2 of the first 2 replays failed again, and 0 % at most may"


async def test_a_canary_that_fares_well_lets_the_rest_follow(app: App, gateway: Gateway) -> None:
    ids = await bury(app, 5)
    gateway.is_up = True

    async with app.worker():
        report = await app.dead.replay(type="mail", canary=2, canary_timeout=30)

    assert list(report.replayed) == ids
    assert (report.stopped, report.left) == (None, ())


@pytest.mark.parametrize(("most", "is_stopped"), [(49, True), (50, False)])
async def test_some_of_a_canary_may_fail(
    app: App, gateway: Gateway, most: float, is_stopped: bool
) -> None:
    ids = await bury(app, 3)
    gateway.up_for = {"0@example.com"}

    async with app.worker():
        report = await app.dead.replay(type="mail", canary=2, max_failures=most, canary_timeout=30)

    assert (report.stopped is not None) is is_stopped
    assert list(report.replayed) == (ids[:2] if is_stopped else ids)


async def test_a_canary_that_does_not_end_stops_the_rest(app: App, gateway: Gateway) -> None:
    ids = await bury(app, 2)

    report = await app.dead.replay(type="mail", canary=1, canary_timeout=0.05)

    assert list(report.left) == ids[1:]
    assert report.stopped == "1 of the first 1 replays have not ended within 0.05 s"


async def test_discarded_letters_are_gone(app: App, gateway: Gateway) -> None:
    ids = [*await bury(app, 2), *await bury(app, 1, "parse")]

    foreseen = await app.dead.discard(type="mail", dry_run=True)
    assert len(await app.dead.list()) == 3
    report = await app.dead.discard(type="mail")

    assert report.discarded == foreseen.discarded == ids[:2]
    assert [letter.id for letter in await app.dead.list()] == ids[2:]
    with pytest.raises(TaskNotFound):
        await app.dead.discard(ids[0])


@pytest.mark.parametrize("verb", ["replay", "discard"])
async def test_letters_are_named_either_way(app: App, gateway: Gateway, verb: str) -> None:
    (task_id,) = await bury(app)
    act = getattr(app.dead, verb)

    for ids, filters in (((), {}), ((), {"queue": None}), ((task_id,), {"type": "mail"})):
        with pytest.raises(ConfigurationError, match="either by id or by filter"):
            await act(*ids, **filters)


async def test_a_wrong_search_costs_no_file(app: App, tmp_path: Path) -> None:
    kept = tmp_path / "letters.jsonl"
    kept.write_text("before")
    with pytest.raises(ConfigurationError):
        await app.dead.export(kept, error="(")

    assert kept.read_text() == "before"


async def test_letters_are_exported_as_json_lines(
    app: App, gateway: Gateway, tmp_path: Path
) -> None:
    ids = await bury(app, 2)
    new_id = (await app.dead.replay(ids[0])).replayed[ids[0]]

    number = await app.dead.export(tmp_path / "letters.jsonl", type="mail")

    lines = [json.loads(line) for line in (tmp_path / "letters.jsonl").read_text().splitlines()]
    assert (number, [line["id"] for line in lines]) == (2, ids)
    assert lines[0]["payload"] == {"to": "0@example.com"}
    assert lines[0]["replayed_as"] == [new_id]
    assert lines[0]["error_class"] == "transient"
    assert "TimeoutError" in lines[0]["errors"][0]["traceback"]


def test_synchronous_code_has_the_same(database_url: str, tmp_path: Path) -> None:
    app = App(database_url, **QUICK)

    @app.task(name="mail", retry=1)
    async def mail(to: str) -> None:
        raise Fail("no")

    ids = [app.enqueue_sync("mail", {"to": "a"}).id for _ in range(3)]
    asyncio.run(app.run_worker(until_idle=True))
    with app:
        assert {letter.id for letter in app.dead.list_sync(type="mail")} == set(ids)
        assert app.dead.get_sync(ids[0]).id == ids[0]
        assert list(app.dead.replay_sync(ids[0]).replayed) == [ids[0]]
        assert app.dead.export_sync(tmp_path / "x", type="mail") == 3
        assert len(app.dead.discard_sync(type="mail").discarded) == 3
