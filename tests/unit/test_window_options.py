"""Windows: what is asked for with a task, and what cannot be."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest

from windlass import ConfigurationError, TaskSet
from windlass.client import checked_schedule, enqueue_options
from windlass.client.asking import new_tasks
from windlass.model.task import NewTask, TypeDefaults, Window, WindowKind
from windlass.store.postgres.enqueueing import enqueue_statement, task_item

EVERY_KIND = pytest.mark.parametrize("kind", list(WindowKind))


def asked(**options: Any) -> NewTask:
    checked = enqueue_options(options)  # type: ignore[arg-type]  # some are wrong on purpose
    return checked.new_task(TypeDefaults("send"), "{}")


@EVERY_KIND
@pytest.mark.parametrize("length", [5, 5.0, timedelta(seconds=5)])
def test_a_task_has_the_window_that_it_was_asked_for_with(kind: WindowKind, length: Any) -> None:
    assert asked().window is None
    assert asked(**{kind: None}).window is None
    assert asked(**{kind: length}).window == Window(kind, 5.0)
    assert asked(**{kind: length}, dedupe_key="k").window == Window(kind, 5.0, "k")


@EVERY_KIND
def test_a_window_lasts_up_to_a_leap_year(kind: WindowKind) -> None:
    assert asked(**{kind: timedelta(days=366)}).window == Window(kind, 366 * 86400.0)
    with pytest.raises(ConfigurationError, match=f"{kind} .*: use at most 366 days"):
        asked(**{kind: timedelta(days=366, seconds=1)})


@EVERY_KIND
@pytest.mark.parametrize("length", [0, -1, 0.0, float("nan"), float("inf"), "5", True, [5]])
def test_what_is_no_length_is_refused(kind: WindowKind, length: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"^{kind} .*: use .*seconds"):
        asked(**{kind: length})


@pytest.mark.parametrize("key", ["", "x" * 201, "a\nb", "\x00", 5, True, ["k"]])
def test_what_can_be_no_key_is_refused(key: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^dedupe_key "):
        asked(throttle=5, dedupe_key=key)


@EVERY_KIND
@pytest.mark.parametrize(
    ("option", "value", "is_of_debounce"),
    [
        ("idempotency_key", "k", False),
        ("delay", 0, True),
        ("at", datetime(2030, 1, 1, tzinfo=UTC), True),
        ("ordering_key", "k", True),
    ],
)
def test_what_goes_with_a_window_and_what_does_not(
    kind: WindowKind, option: str, value: Any, is_of_debounce: bool
) -> None:
    if is_of_debounce and kind is not WindowKind.DEBOUNCE:
        assert asked(**{kind: 5, option: value}).window == Window(kind, 5.0)
        return
    with pytest.raises(ConfigurationError) as raised:
        asked(**{kind: 5, option: value})

    assert str(raised.value) == f"options '{kind}' and '{option}' exclude each other; give one"


def test_neither_a_schedule_nor_what_follows_a_task_has_a_window() -> None:
    tasks = TaskSet()

    @tasks.task
    async def clean() -> None: ...

    several: list[Any] = [{"unique_for": 5}, {"throttle": 5}, {"debounce": 5}, {"dedupe_key": "k"}]
    for options in several:
        chosen = clean.options(**options)
        (name,) = options
        with pytest.raises(ConfigurationError, match=f"option '{name}' is for calls"):
            checked_schedule(
                chosen.call(),
                cron="0 3 * * *",
                every=None,
                timezone=None,
                name=None,
                overlap="skip",
                catch_up="one",
                jitter=0,
                max_payload_bytes=1000,
            )
        with pytest.raises(ConfigurationError, match=f"on_success: option '{name}' is for calls"):
            tasks.task(name="other", on_success=chosen)(clean.definition.function)


def test_a_bad_window_among_many_is_named_by_its_index() -> None:
    tasks = TaskSet()

    @tasks.task
    async def send() -> None: ...

    good, bad = send.options(throttle=5).call(), send.options(dedupe_key="k").call()

    found = list(new_tasks([good, send.call()], max_payload_bytes=1000, first=0))
    with pytest.raises(ConfigurationError, match="item 7: option 'dedupe_key'"):
        new_tasks([good, bad], max_payload_bytes=1000, first=6)

    assert [one.window for one in found] == [Window(WindowKind.THROTTLE, 5.0), None]


def test_only_tasks_with_a_window_go_by_its_statement() -> None:
    plain, windowed = NewTask(UUID(int=1), "send", "{}"), asked(throttle=5)

    assert enqueue_statement([plain], None, repeated=False)[0] == "enqueue_alike"
    assert enqueue_statement([plain], None, repeated=True)[0] == "enqueue_tasks"
    name, arguments = enqueue_statement([plain, windowed], None, repeated=False)
    assert (name, arguments[-3:]) == (
        "enqueue_windowed",
        ([None, "throttle"], [None, None], [None, 5.0]),
    )


def test_a_guest_is_given_it_by_its_name() -> None:
    item = json.loads(msgspec.json.encode(task_item(asked(debounce=5, dedupe_key="k"))))

    assert (item["debounce"], item["dedupe_key"]) == (5.0, "k")
    assert "throttle" not in item
    assert b"dedupe_key" not in msgspec.json.encode(task_item(asked()))
