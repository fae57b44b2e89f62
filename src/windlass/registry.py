"""Task name → handler and the policy it was registered with."""

import inspect
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from windlass.codec import ArgumentCodec
from windlass.context import Context
from windlass.failures.classifier import Classifier
from windlass.model.errors import ConfigurationError
from windlass.model.limits import LONGEST_RETENTION, LONGEST_SECONDS, shown
from windlass.model.task import Callback, TypeDefaults
from windlass.policy.retry import Retry

RunKind = Literal["async", "thread", "process"]
Middleware = Callable[[Context, Callable[[], Awaitable[Any]]], Awaitable[Any]]

PRIORITIES = {"low": 0, "normal": 10, "high": 20, "critical": 30}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def checked_name(what: str, value: Any) -> str:
    """Return a name that may be a type, queue, tag or key, or raise."""
    if not isinstance(value, str):
        raise ConfigurationError(f"{what} {shown(value)} must be a string")
    if not 1 <= len(value) <= 200:
        raise ConfigurationError(f"{what} {value[:40]!r} has {len(value)} characters; use 1 to 200")
    if _CONTROL.search(value):
        raise ConfigurationError(f"{what} {value!r} holds a control character; remove it")
    return value


def checked_names(what: str, each: str, values: Any) -> tuple[str, ...]:
    """Return names given as a list, tuple or set, or raise."""
    if not isinstance(values, list | tuple | set | frozenset):
        raise ConfigurationError(f"{what} {shown(values)}: give a list of strings")
    return tuple(checked_name(each, value) for value in values)


def checked_priority(value: Any) -> int:
    """Return a priority given by name or number, or raise."""
    if isinstance(value, str) and value in PRIORITIES:
        return PRIORITIES[value]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 100:
        raise ConfigurationError(
            f"priority {shown(value)}: use an integer from 0 to 100 or one of {', '.join(PRIORITIES)}"
        )
    return value


def checked_flag(what: str, value: Any) -> bool:
    """Return a truth value or raise: a text that says no would count as yes."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{what} {shown(value)} must be True or False")
    return value


def checked_seconds(what: str, value: Any, *, above_zero: bool = False) -> float:
    """Return a duration in seconds, given as a number or a timedelta, or raise."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise ConfigurationError(f"{what} {shown(value)}: use seconds or a timedelta")
    if not 0 <= seconds < float("inf") or (above_zero and seconds == 0):
        least = "above 0" if above_zero else "not below 0"
        raise ConfigurationError(f"{what} {shown(value)}: use a finite number of seconds, {least}")
    if seconds > LONGEST_SECONDS:
        raise ConfigurationError(f"{what} {shown(value)}: use less than a hundred years")
    return float(seconds)


def checked_retention(what: str, value: Any) -> timedelta:
    """Return how long something is kept, given as seconds or a timedelta, or raise."""
    seconds = checked_seconds(what, value)
    if seconds > LONGEST_RETENTION:
        raise ConfigurationError(f"{what} {shown(value)}: use at most 68 years")
    return timedelta(seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDefinition:
    """A task type as the application defined it."""

    name: str
    function: Callable[..., Any]
    codec: ArgumentCodec
    run: RunKind
    queue: str
    priority: int
    retry: Retry
    timeout: float | None
    keep_result: bool
    retention: timedelta | None
    on_success: Callback | None = None
    on_failure: Callback | None = None
    defaults: TypeDefaults = field(init=False)  # what the store should know of it

    def __post_init__(self) -> None:
        attempts = self.retry.max_attempts
        defaults = TypeDefaults(
            self.name,
            self.queue,
            self.priority,
            attempts,
            self.retention,
            self.on_success,
            self.on_failure,
        )
        object.__setattr__(self, "defaults", defaults)  # it is frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """What `@app.task(...)` takes."""

    name: str | None = None
    queue: str = "default"
    priority: int | str = "normal"
    retry: Retry | int | None = None
    timeout: float | timedelta | None = None
    run: str | None = None
    keep_result: bool = True
    retention: timedelta | float | None = None
    on_success: Any = None
    on_failure: Any = None


def define(
    function: Callable[..., Any],
    options: TaskOptions,
    called_back: Callable[[str, Any], Callback | None],
) -> TaskDefinition:
    """Check a function and its options, and make a definition of them.

    `called_back` reads what is to be enqueued when a task has ended.
    """
    if isinstance(function, staticmethod):
        function = function.__func__
    if not callable(function):
        raise ConfigurationError(
            f"a task is made of a function, not of {shown(function)}; options need their names, "
            "as in @app.task(name=…)"
        )
    if not inspect.isroutine(function):
        raise ConfigurationError(
            f"a task is made of a function, not of {shown(function)}; write one that calls it"
        )
    own_name = getattr(function, "__name__", None)
    name = checked_name("task name", own_name if options.name is None else options.name)
    _refuse_generator(f"task '{name}':", function, "return a list, or enqueue a task for each item")
    is_coroutine = inspect.iscoroutinefunction(function)
    return TaskDefinition(
        name=name,
        function=function,
        codec=ArgumentCodec(name, function),
        run=_checked_run(name, options.run, is_coroutine),
        queue=checked_name("queue", options.queue),
        priority=checked_priority(options.priority),
        retry=_checked_retry(name, options.retry),
        timeout=None
        if options.timeout is None
        else checked_seconds(f"task '{name}': timeout", options.timeout, above_zero=True),
        keep_result=checked_flag(f"task '{name}': keep_result", options.keep_result),
        retention=None
        if options.retention is None
        else checked_retention(f"task '{name}': retention", options.retention),
        on_success=called_back(f"task '{name}': on_success", options.on_success),
        on_failure=called_back(f"task '{name}': on_failure", options.on_failure),
    )


def check_callback(what: str, function: Any, *parameters: str) -> None:
    """Raise unless a worker can call this with these arguments."""
    wanted = ", ".join(parameters) or "no arguments"
    if not callable(function):
        raise ConfigurationError(f"{what} {shown(function)}: give a function of {wanted}")
    _refuse_generator(what, function, "write one that returns")
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        raise ConfigurationError(
            f"{what} {_place(function)}: {error}; it is called with {wanted}"
        ) from error
    except ValueError:
        return  # built in, and says nothing of its parameters


def _refuse_generator(what: str, function: Callable[..., Any], way_out: str) -> None:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"{what} {_place(function)} is a generator function, which would not be run; {way_out}"
        )


def _checked_run(name: str, run: str | None, is_coroutine: bool) -> RunKind:
    match run:
        case None:
            return "async" if is_coroutine else "thread"
        case "async" if is_coroutine:
            return "async"
        case "thread" if not is_coroutine:
            return "thread"
        case "process":
            return "process"  # of either kind
        case "async" | "thread":
            kind = "a coroutine function" if is_coroutine else "a plain function"
            raise ConfigurationError(f"task '{name}': run='{run}' does not fit {kind}")
        case _:
            raise ConfigurationError(
                f"task '{name}': run={shown(run)} is not known; use async, thread or process"
            )


def _checked_retry(name: str, retry: Retry | int | None) -> Retry:
    if retry is None:
        return Retry()
    if isinstance(retry, Retry):
        return retry
    if isinstance(retry, bool) or not isinstance(retry, int):
        raise ConfigurationError(
            f"task '{name}': retry={shown(retry)}: use Retry(...) or the number of attempts"
        )
    return Retry(max_attempts=retry)


class Registry:
    """The task types of an application, with what wraps their handlers and judges their errors."""

    def __init__(self, classifier: Classifier | None = None) -> None:
        self._definitions: dict[str, TaskDefinition] = {}
        self.classifier = classifier or Classifier()
        self.middleware: list[Middleware] = []

    def add(self, definition: TaskDefinition) -> None:
        """Register a type; two of one name are an error."""
        known = self._definitions.get(definition.name)
        if known is definition:
            return
        if known is not None:
            raise ConfigurationError(
                f"task '{definition.name}' is defined twice, in {_place(known.function)} and in "
                f"{_place(definition.function)}; give one of them another name"
            )
        self._definitions[definition.name] = definition

    def find(self, name: str) -> TaskDefinition | None:
        """Return the definition of a type, if this application has it."""
        return self._definitions.get(name)

    def __iter__(self) -> Iterator[TaskDefinition]:
        return iter(self._definitions.values())

    def names(self) -> tuple[str, ...]:
        """The names of all types."""
        return tuple(self._definitions)


def _place(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", None)
    return shown(function) if name is None else f"{function.__module__}.{name}"
