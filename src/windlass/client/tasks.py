"""Functions that can be enqueued."""

import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import (
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import msgspec

from windlass.breaker import Breaker
from windlass.client.asking import (
    NO_OPTIONS,
    Call,
    EnqueueOptions,
    Options,
    enqueue_options,
)
from windlass.client.verbs import Handle
from windlass.context import Context
from windlass.model.errors import ConfigurationError, PayloadError
from windlass.model.limits import shown
from windlass.model.task import FILLED_IN, Callback, WindowKind
from windlass.policy.limit import Limit
from windlass.policy.retry import Retry
from windlass.registry import TaskDefinition, TaskOptions, define

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Outlet(Protocol):
    """Where calls go: an open application."""

    async def send(self, calls: Sequence["Call"]) -> list["Handle"]:
        """Enqueue calls, all or none."""

    def send_sync(self, name: str, calls: Sequence["Call"]) -> list["Handle"]:
        """`send` for a caller that has no event loop."""


class Task(Generic[P, R]):
    """A task type: call it to run the function, enqueue it to have a worker do so."""

    def __init__(self, definition: TaskDefinition) -> None:
        self.definition = definition
        self.outlet: Outlet | None = None
        self.__name__ = definition.name
        self.__doc__ = definition.function.__doc__
        self.__wrapped__ = definition.function

    @property
    def name(self) -> str:
        """The name of the type."""
        return self.definition.name

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Simply run the function."""
        result: R = self.definition.function(*args, **kwargs)
        return result

    def __repr__(self) -> str:
        return f"<Task {self.name!r}>"

    def options(self, **options: Unpack[Options]) -> "TaskWithOptions[P, R]":
        """Set options for the calls that follow."""
        return TaskWithOptions(self, enqueue_options(options))

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call:
        """Describe a call, for `enqueue_many`."""
        return Call(self.definition, args, kwargs, NO_OPTIONS)

    def partial(self, *args: Any, **kwargs: Any) -> Call:
        """Describe a call that may lack what is filled in, for `on_success` and `on_failure`."""
        return Call(self.definition, args, kwargs, NO_OPTIONS)

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> "Handle":
        """Hand the call to the workers."""
        return (await self._bound().send([self.call(*args, **kwargs)]))[0]

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> "Handle":
        """Hand the call to the workers, from synchronous code."""
        return self._bound().send_sync("enqueue", [self.call(*args, **kwargs)])[0]

    def _bound(self) -> Outlet:
        if self.outlet is None:
            raise ConfigurationError(
                f"task '{self.name}' belongs to no app yet; call app.include(...) first"
            )
        return self.outlet


class ContextTask(Task[P, R]):
    """A task whose function takes the context first: a worker brings it, or who calls it directly."""

    def __call__(self, ctx: Context, /, *args: P.args, **kwargs: P.kwargs) -> R:  # type: ignore[override]  # enqueues are the same, calls are not
        """Simply run the function."""
        result: R = self.definition.function(ctx, *args, **kwargs)
        return result


class TaskWithOptions(Generic[P, R]):
    """A task with options set for its next calls."""

    def __init__(self, task: Task[P, R], options: EnqueueOptions) -> None:
        self._task = task
        self._options = options

    def options(self, **options: Unpack[Options]) -> "TaskWithOptions[P, R]":
        """Set further options."""
        enqueue_options(options)
        return TaskWithOptions(self._task, msgspec.structs.replace(self._options, **options))

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call:
        """Describe a call, for `enqueue_many`."""
        return Call(self._task.definition, args, kwargs, self._options)

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> "Handle":
        """Hand the call to the workers."""
        return (await self._task._bound().send([self.call(*args, **kwargs)]))[0]  # noqa: SLF001 - its own task

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> "Handle":
        """Hand the call to the workers, from synchronous code."""
        outlet = self._task._bound()  # noqa: SLF001 - its own task
        return outlet.send_sync("enqueue", [self.call(*args, **kwargs)])[0]

    def partial(self, *args: Any, **kwargs: Any) -> Call:
        """Describe a call that may lack what is filled in, for `on_success` and `on_failure`."""
        return Call(self._task.definition, args, kwargs, self._options)


class TaskSettings(TypedDict, total=False):
    """What `@app.task(...)` takes, for type checkers."""

    name: str | None
    queue: str
    priority: int | str
    retry: Retry | int | None
    timeout: float | timedelta | None
    run: str | None
    keep_result: bool
    retention: timedelta | float | None
    on_success: "Callee | None"
    on_failure: "Callee | None"
    breaker: str | Breaker | None
    fallback: Callable[..., Any] | None
    limit: Limit | Sequence[Limit] | None


class TaskDecorator(Protocol):
    """What `@app.task(...)` with options returns."""

    @overload
    def __call__(self, function: Callable[Concatenate[Context, P], R], /) -> ContextTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...


class TaskSet:
    """Tasks of a library, for an application to include."""

    def __init__(self) -> None:
        self.tasks: list[Task[..., Any]] = []

    @overload
    def task(self, function: Callable[Concatenate[Context, P], R], /) -> ContextTask[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(self, function: None = None, /, **options: Unpack[TaskSettings]) -> TaskDecorator: ...

    def task(self, function: Any = None, /, **options: Any) -> Any:
        """Define a task; used as `@tasks.task` or `@tasks.task(...)`."""
        checked = task_options(options)
        if function is None:
            return lambda decorated: self._add(_made(decorated, checked))
        return self._add(_made(function, checked))

    def _add(self, task: Task[..., Any]) -> Task[..., Any]:
        """Take in a task; an application also registers it."""
        self.tasks.append(task)
        return task


Callee = Task[..., Any] | TaskWithOptions[..., Any] | Call


def _callback(what: str, given: Any) -> Callback | None:
    """What is enqueued when a task has ended: a task, or a call of one that may lack what is filled in."""
    match given:
        case None:
            return None
        case Call():
            call = given
        case Task():
            call = given.partial()
        case TaskWithOptions():
            call = given.partial()
        case _:
            raise ConfigurationError(
                f"{what} {shown(given)}: give a task, or a call of one as in alert.partial(level=3)"
            )
    for name in ("connection", "idempotency_key", "at"):
        if getattr(call.options, name) is not None:
            raise ConfigurationError(
                f"{what}: option '{name}' belongs to a single task; leave it out"
            )
    for name in (*WindowKind, "dedupe_key"):
        if getattr(call.options, name) is not None:
            raise ConfigurationError(
                f"{what}: option '{name}' is for calls, and each end has a task of its own; leave it out"
            )
    definition = call.definition
    try:
        payload, takes = definition.codec.encode_part(call.args, call.kwargs, FILLED_IN)
        return Callback(call.options.new_task(definition.defaults, payload), takes)
    except PayloadError as error:
        raise ConfigurationError(f"{what}: {error}") from error


def _made(function: Callable[..., Any], options: TaskOptions) -> Task[..., Any]:
    definition = define(function, options, _callback)
    first = next(iter(inspect.signature(definition.function).parameters), None)
    takes_context = first is not None and first == definition.codec.context_name
    return (ContextTask if takes_context else Task)(definition)


def task_options(options: dict[str, Any]) -> TaskOptions:
    """Check the names of what a task was defined with."""
    try:
        return TaskOptions(**options)
    except TypeError:
        known = TaskOptions.__dataclass_fields__
        unknown = ", ".join(f"'{name}'" for name in options if name not in known)
        raise ConfigurationError(
            f"task option {unknown} is not known; options are: {', '.join(known)}"
        ) from None
