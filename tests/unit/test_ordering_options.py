"""Ordering keys: what is asked for with a task, and what cannot be."""

from collections.abc import Sequence
from typing import Any

import pytest

from windlass import App, ConfigurationError, Limit, TaskSet
from windlass.client import checked_schedule, enqueue_options
from windlass.client.asking import NO_OPTIONS, new_tasks
from windlass.model.task import Enqueued, NewTask, TypeDefaults

DEFAULTS = TypeDefaults("send", limit_by='[["tenant", null]]')


def asked(**options: Any) -> NewTask:
    checked = enqueue_options(options)  # type: ignore[arg-type]  # some are wrong on purpose
    return checked.new_task(DEFAULTS, "{}")


@pytest.mark.parametrize(
    ("options", "key", "keeps_key"),
    [
        ({}, None, False),
        ({"ordering_key": None, "on_dead": None}, None, False),
        ({"ordering_key": "k"}, "k", False),
        ({"ordering_key": "é" * 200}, "é" * 200, False),
        ({"ordering_key": "k", "on_dead": "pass"}, "k", False),
        ({"ordering_key": "k", "on_dead": "hold"}, "k", True),
    ],
)
def test_a_task_has_the_key_that_it_was_asked_for_with(
    options: dict[str, Any], key: str | None, keeps_key: bool
) -> None:
    task = asked(**options)

    assert (task.ordering_key, task.keeps_key) == (key, keeps_key)


def test_a_task_has_what_its_type_is_limited_by() -> None:
    assert asked().limit_by == DEFAULTS.limit_by
    assert NO_OPTIONS.new_task(TypeDefaults("other"), "{}").limit_by is None


@pytest.mark.parametrize("key", ["", "x" * 201, "a\nb", "\x00", "\ud800", 5, True, b"k", ["k"]])
def test_what_can_be_no_key_is_refused(key: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"ordering_key .*(characters|character|string)"):
        asked(ordering_key=key)


@pytest.mark.parametrize("on_dead", ["", "keep", "HOLD", True, False, 5, ["hold"]])
@pytest.mark.parametrize("key", ["k", None])
def test_what_becomes_of_a_key_is_one_of_two(on_dead: Any, key: str | None) -> None:
    with pytest.raises(ConfigurationError) as raised:
        asked(ordering_key=key, on_dead=on_dead)

    assert str(raised.value) == f'on_dead {on_dead!r}: use "hold" or "pass"'


@pytest.mark.parametrize("on_dead", ["hold", "pass"])
def test_without_a_key_there_is_none_to_hold(on_dead: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"'on_dead' .*; give ordering_key too"):
        asked(on_dead=on_dead)


def test_options_may_be_given_one_after_the_other() -> None:
    tasks = TaskSet()

    @tasks.task
    async def send() -> None: ...

    call = send.options(on_dead="hold").options(ordering_key="k").call()
    task = call.options.new_task(call.definition.defaults, "{}")

    assert (task.ordering_key, task.keeps_key) == ("k", True)


def test_a_bad_key_among_many_is_named_by_its_index() -> None:
    tasks = TaskSet()

    @tasks.task(limit=Limit(by="tenant"))
    async def send(tenant: str) -> None: ...

    good, bad = send.options(ordering_key="k").call("a"), send.options(on_dead="hold").call("a")

    found = list(new_tasks([good, send.call("b")], max_payload_bytes=1000, first=0))
    with pytest.raises(ConfigurationError, match="item 7: option 'on_dead'"):
        new_tasks([good, bad], max_payload_bytes=1000, first=6)

    assert [one.ordering_key for one in found] == ["k", None]
    assert {one.limit_by for one in found} == {'[["tenant", null]]'}


def test_what_follows_a_task_may_have_a_key() -> None:
    tasks = TaskSet()

    @tasks.task
    async def after(result: None) -> None: ...

    @tasks.task(on_success=after.options(ordering_key="k", on_dead="hold"))
    async def before() -> None: ...

    callback = before.definition.defaults.on_success
    assert callback is not None
    assert (callback.task.ordering_key, callback.task.keeps_key) == ("k", True)


def test_what_follows_a_task_is_checked_where_it_is_defined() -> None:
    tasks = TaskSet()

    @tasks.task
    async def after() -> None: ...

    with pytest.raises(ConfigurationError, match="give ordering_key too"):
        tasks.task(on_failure=after.options(on_dead="hold"))(after.definition.function)


def test_the_tasks_of_a_schedule_may_have_a_key() -> None:
    tasks = TaskSet()

    @tasks.task(limit=Limit(by="tenant"))
    async def clean(tenant: str) -> None: ...

    def scheduled(**options: Any) -> NewTask:
        return checked_schedule(
            clean.options(**options).call("a"),
            cron="0 3 * * *",
            every=None,
            timezone=None,
            name=None,
            overlap="skip",
            catch_up="one",
            jitter=0,
            max_payload_bytes=1000,
        ).task

    task = scheduled(ordering_key="k", on_dead="hold")

    assert (task.ordering_key, task.keeps_key) == ("k", True)
    assert task.limit_by == '[["tenant", null]]'
    with pytest.raises(ConfigurationError, match="schedule 'clean': on_dead 'x'"):
        scheduled(ordering_key="k", on_dead="x")


async def test_by_name_a_task_has_what_is_defined_or_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[NewTask] = []

    async def enqueue(tasks: Sequence[NewTask], **_: Any) -> list[Enqueued]:
        written.extend(tasks)
        return [Enqueued(one.id, True) for one in tasks]

    async def type_defaults(name: str) -> TypeDefaults | None:
        return DEFAULTS

    async with App("memory:") as app:

        @app.task(limit=Limit(by="region"))
        async def known(region: str = "eu") -> None: ...

        store = await app.store()
        monkeypatch.setattr(store, "enqueue", enqueue)
        monkeypatch.setattr(store, "type_defaults", type_defaults)
        await app.enqueue("known", {}, ordering_key="k")
        await app.enqueue("send", {"tenant": "a"}, ordering_key="k", on_dead="hold")

    assert [(one.ordering_key, one.keeps_key, one.limit_by) for one in written] == [
        ("k", False, '[["region", "eu"]]'),
        ("k", True, '[["tenant", null]]'),
    ]
