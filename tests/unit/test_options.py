"""Bad input is refused with an error that names the thing, and nothing is written."""

import inspect
import pickle
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from functools import partial
from typing import Any
from uuid import RFC_4122, UUID

import pytest

from windlass import (
    App,
    ConfigurationError,
    Context,
    PayloadError,
    TaskCancelled,
    TaskSet,
    WindlassError,
)
from windlass.client import new_task_id
from windlass.client.asking import EnqueueOptions, Options, new_task_ids
from windlass.client.tasks import TaskSettings
from windlass.model.errors import StoreUnavailable
from windlass.model.task import Enqueued, NewTask
from windlass.registry import TaskOptions

EAST = timezone(timedelta(hours=5))


class Nowhere(tzinfo):
    """A time zone that does not know how far from UTC it is."""

    def utcoffset(self, _: datetime | None) -> None:
        return None

    dst = tzname = utcoffset


@pytest.fixture
def app() -> App:
    return App("memory:")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"queue": ""}, "queue"),
        ({"queue": "a\nb"}, "queue"),
        ({"queue": "x" * 201}, "queue"),
        ({"queue": 5}, "queue"),
        ({"priority": -1}, "priority"),
        ({"priority": 101}, "priority"),
        ({"priority": "urgent"}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"delay": -1}, "delay"),
        ({"delay": float("nan")}, "delay"),
        ({"delay": float("inf")}, "delay"),
        ({"delay": "soon"}, "delay"),
        ({"delay": 1e12}, "delay"),
        ({"delay": 10**5000}, "delay"),
        ({"delay": timedelta.max}, "delay"),
        ({"priority": "x" * 10_000_000}, "priority"),
        ({"at": datetime(2030, 1, 1)}, "at"),  # noqa: DTZ001 - naive on purpose
        ({"at": datetime(2030, 1, 1, tzinfo=Nowhere())}, "at .*no time zone"),
        ({"at": "2030-01-01"}, "at"),
        ({"at": datetime(2030, 1, 1, tzinfo=UTC), "delay": 1}, "exclude"),
        ({"idempotency_key": ""}, "idempotency_key"),
        ({"idempotency_key": "x" * 201}, "idempotency_key"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"max_attempts": 30_001}, "max_attempts"),
        ({"max_attempts": True}, "max_attempts"),
        ({"max_attempts": 1.0}, "max_attempts"),
        ({"tags": "mail"}, "tags"),
        ({"tags": 5}, "tags"),
        ({"tags": {"mail": 1}}, "tags"),
        ({"tags": b"mail"}, "tags"),
        ({"tags": iter(["mail"])}, "tags"),
        ({"tags": ["mail", 5]}, "tag 5"),
        ({"tags": ["a\x00"]}, "tag"),
        ({"nonsense": 1}, "nonsense"),
        ({"detached": "no"}, "detached"),
        ({"expires": -5}, "expires -5"),
        ({"expires": "soon"}, "expires 'soon'"),
        ({"expires": datetime(2030, 1, 1)}, "expires"),  # noqa: DTZ001 - on purpose
        ({"ordering_key": ""}, "ordering_key"),
        ({"on_dead": "hold"}, "ordering_key"),
        ({"on_dead": "later", "ordering_key": "k"}, "on_dead 'later'"),
        ({"connection": object()}, "connection"),
    ],
)
async def test_a_wrong_option_is_named_and_nothing_is_written(
    app: App, options: dict[str, Any], named: str
) -> None:
    @app.task
    async def work() -> None: ...

    with pytest.raises(ConfigurationError, match=named) as raised:
        await work.options(**options).enqueue()
    assert len(str(raised.value)) < 300
    with pytest.raises(ConfigurationError, match=named):
        await app.enqueue("work", {}, **options)

    assert await (await app.store()).queues() == []


async def test_options_are_added_to_those_before(app: App) -> None:
    @app.task
    async def work() -> None: ...

    some = work.options(queue="mail", max_attempts=30_000)
    handle = await some.options(at=datetime(2200, 1, 1, tzinfo=EAST), queue="bulk").enqueue()

    record = await handle.get()
    assert (record.queue, record.max_attempts) == ("bulk", 30_000)
    assert record.scheduled_for.isoformat() == "2199-12-31T19:00:00+00:00"
    with pytest.raises(ConfigurationError, match="'nonsense' is not known"):
        some.options(nonsense=1)  # type: ignore[call-arg]  # on purpose


async def test_the_retention_of_a_task_goes_with_it_and_is_registered(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task(retention=60)
    async def brief() -> None: ...

    store = await app.store()
    asked: list[NewTask] = []
    enqueue = store.enqueue

    async def noted(tasks: Sequence[NewTask], **options: Any) -> list[Enqueued]:
        asked.extend(tasks)
        return await enqueue(tasks, **options)

    monkeypatch.setattr(store, "enqueue", noted)
    await brief.enqueue()
    await app.enqueue("brief")
    await app.run_worker(until_idle=True)
    registered = await store.type_defaults("brief")

    assert [one.retention for one in asked] == [timedelta(seconds=60)] * 2
    assert registered is not None
    assert registered.retention == timedelta(seconds=60)


async def test_a_set_that_two_apps_include_enqueues_in_the_last(app: App) -> None:
    mails, other = TaskSet(), App("memory:")

    @mails.task
    async def send() -> None: ...

    app.include(mails)
    other.include(mails)
    handle = await send.enqueue()
    await app.run_worker(until_idle=True)
    await other.run_worker(until_idle=True)

    assert (await other.handle(handle.id).get()).status == "completed"
    assert await (await app.store()).queues() == []


def test_a_task_looks_like_its_function(app: App) -> None:
    @app.task
    async def resize(image: str, width: int = 100) -> None:
        """Make it smaller."""

    assert (resize.__name__, resize.__doc__) == ("resize", "Make it smaller.")
    assert str(inspect.signature(resize)) == "(image: str, width: int = 100) -> None"


def test_ids_are_ordered_by_time_to_the_millisecond() -> None:
    before = time.time_ns() // 1_000_000
    one = new_task_id()
    after = time.time_ns() // 1_000_000

    assert (one.version, one.variant) == (7, RFC_4122)
    assert before <= one.int >> 80 <= after
    assert new_task_id() != new_task_id()


def test_ids_that_are_made_together_grow() -> None:
    ids = new_task_ids(1000)

    assert ids == sorted(set(ids))
    assert {(one.version, one.variant) for one in ids} == {(7, RFC_4122)}
    assert all(UUID(str(one)) == one and hash(UUID(str(one))) == hash(one) for one in ids)
    assert pickle.loads(pickle.dumps(ids[0])) == ids[0]
    for bit in {*range(76)} - {62, 63}:
        assert {one.int >> bit & 1 for one in ids} == {0, 1}  # there is chance in each


@pytest.mark.parametrize("name", ["", "a\n", "x" * 201, "\x7f", "\x85", "\ud800", 5, None])
async def test_a_name_that_cannot_be_one_is_refused(app: App, name: Any) -> None:
    with pytest.raises(ConfigurationError, match="task name"):
        await app.enqueue(name, {})


async def test_the_longest_and_lowest_are_allowed(app: App) -> None:
    handle = await app.enqueue("x" * 200, {}, priority=0, queue="q" * 200)

    assert (await handle.get()).priority == 0


@pytest.mark.parametrize("payload", [[1], "text", 5, {"a": {1}}, {1: 2}, {"a": float("nan")}])
async def test_a_payload_by_name_must_be_an_object_that_json_carries(
    app: App, payload: Any
) -> None:
    with pytest.raises(PayloadError, match="unknown"):
        await app.enqueue("unknown", payload)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"run": "thread"}, "coroutine"),
        ({"run": "fiber"}, "fiber"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"retry": "often"}, "retry"),
        ({"retry": True}, "retry"),
        ({"timeout": True}, "timeout"),
        ({"priority": "urgent"}, "priority"),
        ({"retention": -1}, "retention"),
        ({"retention": timedelta(days=69 * 366)}, "68 years"),
        ({"timeout": 10**5000}, "timeout"),
        ({"limit": 3}, "limit"),
        ({"nonsense": 1}, "nonsense"),
        ({"name": "a\tb"}, "name"),
        ({"name": ""}, "name"),
        ({"keep_result": "no"}, "keep_result"),
        ({"keep_result": None}, "keep_result"),
    ],
)
def test_a_wrong_task_option_is_named(app: App, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):

        @app.task(**options)
        async def work() -> None: ...


def items() -> Iterator[int]:
    yield 1


async def async_items() -> AsyncIterator[int]:
    yield 1


def with_argument(app: App) -> None: ...


class Functor:
    async def __call__(self) -> None: ...


@pytest.mark.parametrize("function", [items, async_items, staticmethod(items)])
def test_a_generator_function_is_no_task(app: App, function: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"'list\.all'.*items is a generator.*return a list"
    ):
        app.task(name="list.all")(function)

    assert app.registry.names() == ()


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (Functor(), "Functor object.*write one"),
        (Functor, "class.*write one"),
        (partial(with_argument), "partial.*write one"),
        (int, "int.*write one"),
        (max, "max"),
        (5, "5"),
    ],
)
def test_what_is_no_function_is_no_task(app: App, function: Any, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        app.task(name="work")(function)


async def test_a_static_method_is_a_task(app: App) -> None:
    class Mails:
        @app.task
        @staticmethod
        async def send() -> str:
            return "sent"

    handle = await Mails.send.enqueue()
    await app.run_worker(until_idle=True)

    assert await handle.result(5) == "sent"


def test_a_plain_function_is_no_coroutine(app: App) -> None:
    with pytest.raises(ConfigurationError, match="a plain function"):
        app.task(run="async")(with_argument)


def test_two_contexts_are_refused(app: App) -> None:
    with pytest.raises(ConfigurationError, match="'first' and 'second'"):

        @app.task
        async def work(first: Context, second: Context) -> None: ...


@pytest.mark.parametrize("given", [5, None, [TaskSet()], TaskSet, pytest, App("memory:")])
def test_only_a_set_of_tasks_is_included(app: App, given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"include .*TaskSet"):
        app.include(given)


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (5, "5: give a function"),
        ("timing", "'timing': give a function"),
        (with_argument, "with_argument: too many.*ctx, call_next"),
        (async_items, "async_items is a generator"),
    ],
)
def test_middleware_that_no_worker_could_call_is_refused(
    app: App, function: Any, named: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"middleware .*{named}"):
        app.middleware(function)

    assert app.registry.middleware == []


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (5, "5: give a function of no arguments"),
        (with_argument, "with_argument: missing.*'app'; it is called with no arguments"),
        (items, "items is a generator"),
        (async_items, "async_items is a generator"),
    ],
)
def test_a_hook_that_no_worker_could_call_is_refused(app: App, function: Any, named: str) -> None:
    with pytest.raises(ConfigurationError, match=f"start-up hook .*{named}"):
        app.on_startup(function)
    with pytest.raises(ConfigurationError, match=f"shut-down hook .*{named}"):
        app.on_shutdown(function)


async def test_anything_that_can_be_called_may_be_a_hook(app: App) -> None:
    app.on_startup(Functor())
    app.on_startup(dict)
    app.on_shutdown(partial(with_argument, app))

    async with app.worker():
        pass


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"queue": ["mail"]}, "'queue' is not known.*queues"),
        ({"lease": 5}, "'lease' is not known"),
        ({"concurrency": 0}, "concurrency"),
        ({"concurrency": "5"}, "concurrency"),
        ({"shutdown_timeout": "x"}, "shutdown_timeout"),
        ({"shutdown_timeout": -1}, "shutdown_timeout"),
    ],
)
async def test_a_wrong_option_of_a_worker_is_named(
    app: App, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        await app.run_worker(until_idle=True, **options)
    with pytest.raises(ConfigurationError, match=named):
        async with app.worker(**options):
            pass


async def test_idle_is_yes_or_no(app: App) -> None:
    with pytest.raises(ConfigurationError, match="until_idle 'no'"):
        await app.run_worker(until_idle="no")  # type: ignore[arg-type]  # on purpose


async def test_a_worker_is_not_idle_because_the_store_cannot_be_asked(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await app.store()
    has_work, answers = store.has_work, list[bool | None]()

    async def unavailable_once(*wanted: Any) -> bool:
        answers.append(await has_work(*wanted) if answers else None)
        if answers == [None]:
            raise StoreUnavailable("gone")
        return bool(answers[-1])

    monkeypatch.setattr(store, "has_work", unavailable_once)
    await app.run_worker(until_idle=True)

    assert answers == [None, False]


async def test_the_shutdown_timeout_of_a_worker_may_be_a_timedelta(app: App) -> None:
    await app.run_worker(until_idle=True, shutdown_timeout=timedelta(seconds=1))


@pytest.mark.parametrize("verb", ["workflow", "saga"])
def test_what_is_not_built_yet_says_so(app: App, verb: str) -> None:
    with pytest.raises(ConfigurationError, match=verb):
        getattr(app, verb)("x")


async def test_a_sync_call_in_an_event_loop_names_its_twin(app: App) -> None:
    @app.task
    async def work() -> None: ...

    with pytest.raises(WindlassError, match="await enqueue"):
        work.enqueue_sync()


def test_sync_calls_work_without_an_event_loop(app: App) -> None:
    @app.task
    async def work(n: int) -> None: ...

    handle = work.options(idempotency_key="k").enqueue_sync(1)

    assert handle.get_sync().status == "pending"
    assert app.enqueue_sync("work", {"n": 2}).created
    assert len(app.enqueue_many_sync([work.call(3), work.call(4)])) == 2
    handle.change_sync(priority="high")
    assert handle.get_sync().priority == 20
    assert handle.cancel_sync("enough") is True
    with pytest.raises(TaskCancelled, match="enough"):
        handle.result_sync(timeout=5)
    handle.retry_sync()
    assert handle.get_sync().status == "pending"
    with pytest.raises(TimeoutError):
        handle.result_sync(timeout=0.01)


async def test_tags_may_be_any_collection_of_names_or_none(app: App) -> None:
    @app.task
    async def work() -> None: ...

    handles = [await work.options(tags=tags).enqueue() for tags in (["a"], ("a",), {"a"}, None)]

    assert [(await one.get()).tags for one in handles] == [("a",), ("a",), ("a",), ()]


@pytest.mark.parametrize(
    ("calls", "named"),
    [(5, "int"), (None, "None"), ("ab", "str"), ("", "str"), ([1], "item 0 is of type int")],
)
async def test_many_calls_are_a_list_of_calls(app: App, calls: Any, named: str) -> None:
    with pytest.raises(PayloadError, match=named):
        await app.enqueue_many(calls)
    assert await app.enqueue_many([]) == []


async def test_one_call_is_not_taken_for_many(app: App) -> None:
    @app.task
    async def work(n: int) -> None: ...

    with pytest.raises(PayloadError, match="a value of type Call; use"):
        await app.enqueue_many(work.call(1))  # type: ignore[arg-type]  # on purpose


async def test_an_error_of_a_value_s_own_is_not_taken_for_a_wrong_call(app: App) -> None:
    class Odd:
        def model_dump(self, **_: Any) -> Any:
            raise AttributeError("its own")

    @app.task
    async def work(value: Any) -> None: ...

    with pytest.raises(PayloadError, match="its own"):
        await work.enqueue(Odd())


@pytest.mark.parametrize(
    ("queues", "named"), [("mail", "'mail'"), (5, "5"), ([], "empty"), ([5], "5")]
)
async def test_the_queues_of_a_worker_are_a_list_of_names(
    app: App, queues: Any, named: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"queues?.*{named}"):
        await app.new_worker(queues=queues)


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "x", "", "1.5", "1001", "9" * 40, "³"])
async def test_a_weight_that_is_none_is_named_with_the_way_out(app: App, weight: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'mail:{weight}'.*weight.*from 1 to 1000.*a:b:1"):
        await app.new_worker(queues=[f"mail:{weight}"])


async def test_a_queue_cannot_weigh_two_things(app: App) -> None:
    with pytest.raises(ConfigurationError, match=r"'mail'.*3 and none; name it once"):
        await app.new_worker(queues=["mail:3", "mail"])


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        (5, "5: give a dict"),
        ({"mail": 0}, "'mail' is 0; use a whole number"),
        ({"mail": True}, "'mail' is True"),
        ({"mail": 1.5}, "'mail' is 1.5"),
        ({"mail": "5"}, "'mail' is '5'"),
        ({"bulk": 5}, "'bulk'.*is told to serve; name all"),
        ({5: 5}, "queue 5 must be a string"),
    ],
)
async def test_a_limit_of_a_queue_that_is_none_is_named(app: App, limits: Any, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        await app.new_worker(queues=["mail"], queue_concurrency=limits)


def test_a_name_in_place_of_the_function_is_told_how_to_give_it(app: App) -> None:
    with pytest.raises(ConfigurationError, match=r"'mail\.send'.*name="):
        app.task("mail.send")  # type: ignore[call-overload]  # on purpose


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, "nothing to change"),
        ({"priority": "x"}, "priority"),
        ({"priority": True}, "priority"),
        ({"queue": ""}, "queue"),
        ({"at": "soon"}, "at"),
        ({"at": datetime(2030, 1, 1, tzinfo=UTC), "delay": 1}, "exclude"),
        ({"delay": float("nan")}, "delay"),
        ({"delay": 10**5000}, "delay"),
    ],
)
async def test_a_wrong_change_is_named(app: App, change: dict[str, Any], named: str) -> None:
    @app.task
    async def work() -> None: ...

    handle = await work.options(delay=60).enqueue()
    before = await handle.get()

    with pytest.raises(ConfigurationError, match=named):
        await handle.change(**change)

    assert await handle.get() == before


@pytest.mark.parametrize("limit", ["x", float("nan"), float("inf"), -1, True, 10**400])
async def test_a_wrong_timeout_is_named(app: App, limit: Any) -> None:
    @app.task
    async def work() -> None: ...

    handle = await work.enqueue()

    with pytest.raises(ConfigurationError, match="timeout"):
        await handle.result(limit)


def test_type_checkers_know_the_options_that_there_are() -> None:
    assert set(Options.__annotations__) == set(EnqueueOptions.__struct_fields__)
    assert set(TaskSettings.__annotations__) == {*TaskOptions.__dataclass_fields__, "limit"}
