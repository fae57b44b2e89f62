"""Whatever a handler raises or returns: the worker lives, and what is kept of it can be read."""

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import psycopg
import pytest

from acceptance.quick import QUICK
from windlass import App, Context, Fail, RetryAfter, Snooze, TaskRecord, TaskState
from windlass.failures.describe import LONGEST_MESSAGE, LONGEST_TRACEBACK, LONGEST_TYPE
from windlass.model.task import NewTask

MORE = 40  # characters that say how many were left out


class NoTextError(Exception):
    def __str__(self) -> str:
        raise LookupError("no text")

    __repr__ = __str__


class ExitsInItsTextError(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class EndlessTextError(Exception):
    def __str__(self) -> str:
        return str(self)


class TextThatBites(str):
    __slots__ = ()

    def __len__(self) -> int:
        raise LookupError("no length")

    replace = __getitem__ = encode = __len__  # type: ignore[assignment]  # on purpose


class BitingTextError(Exception):
    def __str__(self) -> str:
        return TextThatBites("bites")


class NoCauseError(Exception):
    @property
    def __cause__(self) -> Any:
        raise SystemExit(4)

    @__cause__.setter
    def __cause__(self, _: Any) -> None: ...


class FailWithoutReason(Fail):
    def __init__(self) -> None: ...


class SnoozeWithoutSeconds(Snooze):
    def __init__(self) -> None: ...


class RetryWithoutReason(RetryAfter):
    def __init__(self) -> None:
        self.seconds = 0


def cyclic() -> Exception:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__ = one.__context__ = other
    other.__cause__ = other.__context__ = one
    return one


def chained(length: int) -> Exception:
    error = ValueError("first")
    for number in range(length):
        later = ValueError(f"number {number}")
        later.__cause__, error = error, later
    return error


def grouped(levels: int) -> Exception:
    error: Exception = ValueError("inside")
    for _ in range(levels):
        error = ExceptionGroup("a group", [error])
    return error


def noted() -> Exception:
    error = ValueError("noted")
    for _ in range(1000):
        error.add_note("note\x00 " * 1000)
    return error


def recursive() -> Exception:
    def deeper() -> int:
        return deeper() + 1

    try:
        deeper()
    except RecursionError as error:
        return error
    raise AssertionError


def odd(name: str) -> Exception:
    kind = type("Odd", (Exception,), {})
    kind.__qualname__ = name
    error: Exception = kind()
    return error


RAISED: dict[str, tuple[Callable[[], BaseException], str, str]] = {
    "exit": (lambda: SystemExit(3), "SystemExit", "3"),
    "interrupt": (KeyboardInterrupt, "KeyboardInterrupt", "KeyboardInterrupt"),
    "cancelled": (asyncio.CancelledError, "CancelledError", "CancelledError"),
    "generator": (GeneratorExit, "GeneratorExit|RuntimeError", "GeneratorExit"),
    "stop": (lambda: StopIteration(5), "RuntimeError", "StopIteration"),
    "async stop": (lambda: StopAsyncIteration(5), "StopAsyncIteration", "5"),
    "no text": (NoTextError, "NoTextError", "<its text raised LookupError>"),
    "exits in its text": (ExitsInItsTextError, "ExitsInItsTextError", "<its text raised SystemExit>"),
    "endless text": (EndlessTextError, "EndlessTextError", "<its text raised RecursionError>"),
    "biting text": (BitingTextError, "BitingTextError", "bites"),
    "10 MB": (lambda: ValueError("x" * 10_000_000), "ValueError", f"x … {10_000_000 - LONGEST_MESSAGE} characters"),
    "no text of unicode": (lambda: ValueError("a\x00b\ud800\udfffc"), "ValueError", "a\\x00b??c"),
    "bytes": (lambda: ValueError(b"\xff\x00"), "ValueError", r"b'\xff\x00'"),
    "undecodable": (lambda: UnicodeDecodeError("utf8", b"\xff" * 10**6, 0, 1, "bad"), "UnicodeDecodeError", "bad"),
    "cyclic": (cyclic, "ValueError", "one"),
    "no cause": (NoCauseError, "NoCauseError", "NoCauseError"),
    "chained": (lambda: chained(3000), "ValueError", "number 2999"),
    "grouped": (lambda: grouped(2000), "ExceptionGroup", "a group"),
    "wide": (lambda: ExceptionGroup("w", [ValueError("x" * 1000)] * 5000), "ExceptionGroup", "w (5000"),
    "of the base": (lambda: BaseExceptionGroup("b", [SystemExit(3)]), "BaseExceptionGroup", "b (1"),
    "noted": (noted, "ValueError", "noted"),
    "recursive": (recursive, "RecursionError", "maximum recursion depth"),
    "odd name": (lambda: odd("Od\x00d\ud800"), "Od\\x00d?", "Od\\x00d?"),
    "long name": (lambda: odd("L" * 100_000), "LLL", "L … "),
    "no seconds": (SnoozeWithoutSeconds, "SnoozeWithoutSeconds", "SnoozeWithoutSeconds None: use"),
    "no reason to retry": (RetryWithoutReason, "RetryWithoutReason", "to be retried after 0 s"),
    "no reason": (FailWithoutReason, "Fail", "no reason was given"),
}  # fmt: skip


def add_raising(app: App, name: str, make: Callable[[], BaseException]) -> None:
    @app.task(name=f"{name} in a coroutine", retry=1)
    async def in_coroutine() -> None:
        raise make()

    @app.task(name=f"{name} in a thread", retry=1)
    def in_thread() -> None:
        raise make()

    @app.task(name=f"{name} with a time limit", retry=1, timeout=30)
    async def limited() -> None:
        await asyncio.sleep(0)
        raise make()


async def test_whatever_is_raised_is_kept_and_the_worker_goes_on(app_url: str) -> None:
    async with App(app_url, **QUICK) as app, asyncio.timeout(60):

        @app.task
        async def tame() -> str:
            return "fine"

        for name, (make, *_) in RAISED.items():
            add_raising(app, name, make)
        wild = [task for task in app.tasks if task is not tame]
        handles = {task.name: await task.enqueue() for task in wild}
        last = await tame.options(priority="low").enqueue()
        await app.run_worker(until_idle=True, concurrency=2)

        assert await last.result(5) == "fine"
        for name, (_, kinds, said) in RAISED.items():
            for way in ("in a coroutine", "in a thread", "with a time limit"):
                task_name = f"{name} {way}"
                record = await handles[task_name].get()
                (error,) = record.errors
                fails_at_once = error["class"] in ("code-bug", "permanent-input")
                ended = TaskState.FAILED if fails_at_once else TaskState.DEAD
                assert record.status is ended, task_name
                assert fails_at_once or kinds != "Fail", task_name
                assert any(error["type"].startswith(kind) for kind in kinds.split("|")), task_name
                assert said in error["message"], task_name
                assert record.last_error == error["message"]
                assert len(error["type"]) <= LONGEST_TYPE + MORE
                assert len(error["message"]) <= LONGEST_MESSAGE + MORE
                assert len(error.get("traceback", "")) <= LONGEST_TRACEBACK + MORE


async def test_middleware_that_raises_is_no_worse_than_a_handler(app_url: str) -> None:
    async with App(app_url, **QUICK) as app, asyncio.timeout(30):

        @app.middleware
        async def wild(ctx: Context, _: Any) -> None:
            error = RAISED[ctx.type][0]()
            raise error

        for name in RAISED:

            @app.task(name=name, retry=1)
            async def work() -> None: ...

        handles = [await task.enqueue() for task in app.tasks]
        await app.run_worker(until_idle=True)

        ended = [(await handle.get()).status for handle in handles]
        assert set(ended) == {TaskState.FAILED, TaskState.DEAD}


class Dumped:
    """A value that ends the process when it is to be written or read."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def model_dump(self, *, mode: str, **_: Any) -> Any:
        if self.number:
            raise SystemExit(mode)
        return {}

    @classmethod
    def model_validate(cls, _: Any) -> Any:
        raise SystemExit(7)


def endless_list() -> list[Any]:
    value: list[Any] = []
    value.append([value])
    return value


def endless_dict() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


RETURNED: dict[str, tuple[Callable[[], Any], str]] = {
    "object": (object, "a value of type object cannot be carried as JSON"),
    "generator": (lambda: (n for n in range(3)), "a value of type generator cannot be carried as JSON"),
    "cyclic list": (endless_list, "it is nested deeper than 200 levels"),
    "cyclic dict": (endless_dict, "it is nested deeper than 200 levels"),
    "deep": (lambda: nested(201), "it is nested deeper than 200 levels"),
    "very deep": (lambda: nested(100_000), "it is nested deeper than 200 levels"),
    "long number": (lambda: 10**5000, "a number has more digits than can be read back"),
    "nan": (lambda: {"a": [float("nan")]}, "nan at ['a'][0] is no number of JSON"),
    "nul": (lambda: ["\x00"], "a string holds the NUL character, which PostgreSQL refuses, at [0]"),
    "surrogate": (lambda: "\ud800", "a string holds half of a surrogate pair"),
    "key": (lambda: {1: 2}, "key 1 of the dict is no string"),
    "large": (lambda: "x" * 999, "1001 bytes are more than the limit of 1000"),
    "very large": (lambda: "x" * (20 << 20), "bytes are more than the limit of 1000"),
}  # fmt: skip


def check_failed(record: TaskRecord, said: str) -> None:
    assert (record.status, record.attempts) == (TaskState.FAILED, 1), record.type
    assert record.last_error is not None
    assert record.last_error.startswith("result of task '"), record.type
    assert said in record.last_error, record.type
    assert record.errors[0]["type"] == "PayloadError"
    assert record.result is None


async def test_a_result_that_cannot_be_kept_fails_its_task_for_good(app_url: str) -> None:
    async with App(app_url, max_result_bytes=1000) as app, asyncio.timeout(30):
        handles = {}
        for name in RETURNED:

            @app.task(name=name)
            async def give(name: str) -> Any:
                return RETURNED[name][0]()

            @app.task(name=f"{name} in a thread")
            def give_by_thread(name: str) -> Any:
                return RETURNED[name][0]()

            @app.task(name=f"{name} not kept", keep_result=False)
            async def give_nothing(name: str) -> Any:
                return RETURNED[name][0]()

            for task in (give, give_by_thread, give_nothing):
                handles[task.name] = await task.enqueue(name)

        @app.task
        async def longest() -> Any:
            return ["x" * 996]

        @app.task
        async def deepest() -> Any:
            return nested(200)

        fitting = [await longest.enqueue(), await deepest.enqueue()]
        await app.run_worker(until_idle=True)

        for name, (_, said) in RETURNED.items():
            check_failed(await handles[name].get(), said)
            check_failed(await handles[f"{name} in a thread"].get(), said)
            assert await handles[f"{name} not kept"].result(5) is None
        assert [await one.result(5) for one in fitting] == [["x" * 996], nested(200)]


async def test_a_value_whose_own_code_exits_costs_its_task_and_not_the_worker() -> None:
    async with App("memory:") as app, asyncio.timeout(10):

        @app.task
        async def gives() -> Any:
            return Dumped(1)

        @app.task
        async def takes(value: Dumped) -> None: ...

        handles = [await gives.enqueue(), app.handle(uuid4())]
        await (await app.store()).enqueue([NewTask(UUID(handles[1].id), "takes", '{"value": {}}')])
        await app.run_worker(until_idle=True)

        records = [await handle.get() for handle in handles]
        assert [record.status for record in records] == [TaskState.FAILED] * 2
        assert [record.errors[0]["type"] for record in records] == ["SystemExit"] * 2


async def test_a_result_that_cannot_be_completed_with_fails_for_good_and_is_taken_back(
    database_url: str, sql_url: str
) -> None:
    look = await asyncpg.connect(sql_url)
    await look.execute("CREATE TABLE effects (n integer)")
    async with App(database_url, max_result_bytes=1000) as app, asyncio.timeout(30):

        @app.task
        async def in_our_transaction(ctx: Context, name: str) -> None:
            async with ctx.transaction() as connection:
                await connection.execute("INSERT INTO effects VALUES (1)")
                ctx.complete(RETURNED[name][0]())

        @app.task
        async def in_its_own(ctx: Context, name: str) -> None:
            connection = await asyncpg.connect(sql_url)
            try:
                async with connection.transaction():
                    await connection.execute("INSERT INTO effects VALUES (2)")
                    await ctx.complete(RETURNED[name][0](), connection=connection)
            finally:
                await connection.close()

        @app.task
        def in_a_thread(ctx: Context, name: str) -> None:
            with psycopg.connect(sql_url) as connection:
                connection.execute("INSERT INTO effects VALUES (3)")
                ctx.complete_sync(RETURNED[name][0](), connection=connection)

        @app.task
        async def with_another(ctx: Context) -> None:
            async with ctx.transaction() as connection:
                await connection.execute("INSERT INTO effects VALUES (4)")
                with pytest.raises(Exception, match="result of task"):
                    ctx.complete(object())
                ctx.complete("instead")

        ways = (in_our_transaction, in_its_own, in_a_thread)
        handles = [
            (said, await way.enqueue(name)) for way in ways for name, (_, said) in RETURNED.items()
        ]
        instead = await with_another.enqueue()
        await app.run_worker(until_idle=True, concurrency=5)

        for said, handle in handles:
            check_failed(await handle.get(), said)
        assert await instead.result(5) == "instead"
        assert [row[0] for row in await look.fetch("SELECT n FROM effects")] == [4]
    await look.close()
