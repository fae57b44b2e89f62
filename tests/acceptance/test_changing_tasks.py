"""A task changes while some of it wait: what fits runs, what does not fails clearly, nothing is lost."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any, NotRequired, TypedDict
from uuid import UUID

import pytest

from acceptance.quick import QUICK
from windlass import App, Context, PayloadError, Task, TaskRecord, TaskState


class OldColour(Enum):
    RED = "red"
    BLUE = "blue"


class NewColour(Enum):
    RED = "red"


class LenientColour(Enum):
    RED = "red"
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, _: object) -> "LenientColour":
        return cls.UNKNOWN


@dataclass
class OldImage:
    path: str


@dataclass
class NewImage:
    path: str
    taken: datetime


@dataclass
class LenientImage:
    path: str
    taken: datetime = datetime(2026, 1, 1, tzinfo=UTC)


class OldSize(TypedDict):
    width: int


class NewSize(TypedDict):
    width: int
    height: int


class LenientSize(TypedDict):
    width: int
    height: NotRequired[int]


@dataclass
class Change:
    """A task before and after, and after somebody has seen what came of it."""

    before: Callable[..., Any]
    after: Callable[..., Any]
    said: str | None = None  # of what fails; None: it fits
    mended: Callable[..., Any] | None = None
    result: Any = None


async def one(image: str) -> list[Any]:
    return [image]


async def added_with_default(image: str, width: int = 100) -> list[Any]:
    return [image, width]


async def added(image: str, width: int) -> list[Any]:
    return [image, width]


async def added_after(width: int = 1, *, image: str) -> list[Any]:
    return [image, width]


async def with_context(ctx: Context, image: str) -> list[Any]:
    return [image, ctx.attempt]


async def renamed(file: str) -> list[Any]:
    return [file]


async def renamed_with_both(file: str | None = None, image: str | None = None) -> list[Any]:
    return [file if image is None else image]


async def two(image: str, width: int = 5) -> list[Any]:
    return [image, width]


async def of_text(image: str, width: str = "5") -> list[Any]:
    return [image, width]


async def of_both(image: str, width: int | str = 5) -> list[Any]:
    return [image, str(width)]


async def old_colour(image: str, colour: OldColour) -> Any:
    return [image, colour]


async def new_colour(image: str, colour: NewColour) -> Any:
    return [image, colour]


async def lenient_colour(image: str, colour: LenientColour) -> Any:
    return [image, colour]


async def old_image(image: OldImage) -> Any:
    return image.path


async def new_image(image: NewImage) -> Any:
    return image.path


async def lenient_image(image: LenientImage) -> Any:
    return [image.path, image.taken.year]


async def old_size(size: OldSize) -> Any:
    return size


async def new_size(size: NewSize) -> Any:
    return size


async def lenient_size(size: LenientSize) -> Any:
    return size.get("height", size["width"])


async def of_ids(ids: list[UUID]) -> Any:
    return ids


MISSING = "argument 'width' is missing, and its parameter has no default; give it one, then retry"
UNKNOWN = "argument '{}' is not known to the code of this worker; update it, then retry the task"
GIVEN: dict[str, tuple[tuple[Any, ...], Change]] = {
    "the same": (("a",), Change(one, one, result=["a"])),
    "added with a default": (("a",), Change(one, added_with_default, result=["a", 100])),
    "added before": (("a",), Change(one, added_after, result=["a", 1])),
    "takes its context": (("a",), Change(one, with_context, result=["a", 1])),
    "added": (("a",), Change(one, added, MISSING, added_with_default, ["a", 100])),
    "renamed": (("a",), Change(one, renamed, UNKNOWN.format("image"), renamed_with_both, ["a"])),
    "renamed with both": (("a",), Change(one, renamed_with_both, result=["a"])),
    "removed": (("a", 7), Change(two, one, UNKNOWN.format("width"), two, ["a", 7])),
    "removed and not given": (("a",), Change(two, one, result=["a"])),
    "of another type": (
        ("a", 7),
        Change(two, of_text, "Expected `str`, got `int` - at `$.width`", of_both, ["a", "7"]),
    ),
    "a member less": (
        ("a", OldColour.BLUE),
        Change(
            old_colour,
            new_colour,
            "Invalid value - at `$.colour`; use one of 'red'",
            lenient_colour,
            ["a", "unknown"],
        ),
    ),
    "a member less and not given": (
        ("a", OldColour.RED), Change(old_colour, new_colour, result=["a", "red"])
    ),
    "a field more": (
        (OldImage("a"),),
        Change(old_image, new_image, "missing required field `taken` - at `$.image`", lenient_image, ["a", 2026]),
    ),
    "a field less": ((LenientImage("a"),), Change(lenient_image, old_image, result="a")),
    "a key more": (
        ({"width": 3},),
        Change(old_size, new_size, "missing required field `height` - at `$.size`", lenient_size, 3),
    ),
    "text that is no id": (
        (["a"],),
        Change(lambda ids: ids, of_ids, "Invalid UUID - at `$.ids[0]`", lambda ids: ids, ["a"]),
    ),
}  # fmt: skip


def version(url: str, choose: Callable[[Change], Callable[..., Any]]) -> App:
    app = App(url, **QUICK)
    for name, (_, change) in GIVEN.items():
        app.task(name=name)(choose(change))
    return app


async def test_what_was_enqueued_before_a_change_runs_or_fails_clearly_and_can_be_retried(
    database_url: str,
) -> None:
    before = version(database_url, lambda change: change.before)
    after = version(database_url, lambda change: change.after)
    mended = version(database_url, lambda change: change.mended or change.after)
    async with before, after, mended:
        handles = {
            task.name: await task.enqueue(*arguments)
            for task, (arguments, _) in zip(before.tasks, GIVEN.values(), strict=True)
        }
        asked = {name: (await handle.get()).payload for name, handle in handles.items()}
        await after.run_worker(until_idle=True)

        records: dict[str, TaskRecord] = {
            name: await handle.get() for name, handle in handles.items()
        }
        for name, (_, change) in GIVEN.items():
            record = records[name]
            if change.said is None:
                assert record.status is TaskState.COMPLETED, (name, record.last_error)
                continue
            assert (record.status, record.attempts) == (TaskState.FAILED, 1), name
            assert record.errors[0]["type"] == "PayloadError"
            assert str(record.last_error).startswith(f"task '{name}': the payload does not fit: ")
            assert change.said in str(record.last_error)
            assert record.payload == asked[name]
            await handles[name].retry()
        await mended.run_worker(until_idle=True)

        for name, (_, change) in GIVEN.items():
            assert await handles[name].result(5) == change.result, name


async def test_while_old_and_new_workers_run_side_by_side(database_url: str) -> None:
    """Workers first, then callers: an argument that nobody gives yet harms no old worker."""
    old, new = App(database_url, **QUICK), App(database_url, **QUICK)

    @old.task
    async def resize(image: str) -> list[Any]:
        return [image]

    @new.task(name="resize")
    async def resized(image: str, width: int = 100) -> list[Any]:
        return [image, width]

    async with old.worker(concurrency=2), new.worker(concurrency=2), asyncio.timeout(30):
        handles = [await task.enqueue("a") for task in (resize, resized) for _ in range(20)]
        for handle in handles:
            assert await handle.result(10) in (["a"], ["a", 100])
    handle = await resized.enqueue("a", width=3)  # a caller that came before the workers
    await old.run_worker(until_idle=True)
    failed = await handle.get()
    await handle.retry()
    await new.run_worker(until_idle=True)

    assert failed.status is TaskState.FAILED
    assert UNKNOWN.format("width") in str(failed.last_error)
    assert await handle.result(5) == ["a", 3]
    await old.close()
    await new.close()


async def test_a_task_of_another_name_waits_for_who_knows_it() -> None:
    old, new = App("memory:"), App("memory:")
    resize: Task[[str], Any] = old.task(name="resize")(one)
    handle = await resize.enqueue("a")
    new.task(name="image.resize")(one)
    with new.kept_at("memory:", memory=old.memory):
        await new.run_worker(until_idle=True)
        waiting = await handle.get()
        new.task(name="resize")(one)  # the old name, until none waits
        await new.run_worker(until_idle=True)
        await new.close()

    assert (waiting.status, waiting.attempts) == (TaskState.PENDING, 0)
    assert await handle.result(5) == ["a"]


async def test_a_model_of_pydantic_changes_like_a_dataclass() -> None:
    pydantic: Any = pytest.importorskip("pydantic")
    old = pydantic.create_model("Order", number=(int, ...))
    new = pydantic.create_model("Order", number=(int, ...), note=(str, ...))
    lenient = pydantic.create_model("Order", number=(int, ...), note=(str, "none"))

    def taking(model: Any) -> App:
        async def take(order: Any, others: Any) -> Any:
            assert isinstance(order, model)
            return [order, others]

        take.__annotations__.update(order=model, others=list[model])
        app = App("memory:")
        app.task(name="take")(take)
        return app

    app = taking(old)
    handle = await app.tasks[0].enqueue(old(number=1), [])
    for version, said in (
        (taking(new), "note: Field required - at `$.order`"),
        (taking(lenient), ""),
    ):
        with version.kept_at("memory:", memory=app.memory):
            await version.run_worker(until_idle=True)
            await version.close()
        if said:
            assert said in str((await handle.get()).last_error)
            await handle.retry()

    assert await handle.result(5) == [{"number": 1, "note": "none"}, []]
    for wrong in ({"number": "hidden"}, {"number": [{"hidden": 1}]}):
        with pytest.raises(PayloadError, match="number: Input should be a valid int") as refused:
            await app.enqueue("take", {"order": wrong, "others": []})
        assert "hidden" not in str(refused.value)


def test_a_direct_call_needs_no_app_and_no_binding() -> None:
    app = App("memory:")
    task = app.task(name="resize")(added_with_default)
    plain = app.task(name="plain")(lambda image, width=2: [image, width])

    assert asyncio.run(task("a")) == ["a", 100]
    assert asyncio.run(task(image="a", width=3)) == ["a", 3]
    assert plain("a") == ["a", 2]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'image'"):
        plain()
