"""Task name → handler and the policy it was registered with."""

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal

from windlass.breaker import Breaker, BreakerReport
from windlass.codec import ArgumentCodec
from windlass.context import Context
from windlass.failures.classifier import Classifier
from windlass.model.errors import ConfigurationError
from windlass.model.limits import LONGEST_RETENTION, LONGEST_SECONDS, shown
from windlass.model.rule import LaneRule, RuleScope, ValueRule
from windlass.model.task import Callback, TypeDefaults
from windlass.policy.breaker import BreakerSettings
from windlass.policy.classification import checked_class
from windlass.policy.limit import Limit, per_second, usual_burst
from windlass.policy.retry import Retry, age_limit

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


def checked_seconds(
    what: str,
    value: Any,
    *,
    above_zero: bool = False,
    longest: tuple[float, str] = (LONGEST_SECONDS, "less than a hundred years"),
) -> float:
    """Return a duration in seconds, given as a number or a timedelta, or raise."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise ConfigurationError(f"{what} {shown(value)}: use seconds or a timedelta")
    if not 0 <= seconds < float("inf") or (above_zero and seconds == 0):
        least = "above 0" if above_zero else "not below 0"
        raise ConfigurationError(f"{what} {shown(value)}: use a finite number of seconds, {least}")
    if seconds > longest[0]:
        raise ConfigurationError(f"{what} {shown(value)}: use {longest[1]}")
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
    breaker: str | None = None  # the name of the one that protects it
    fallback: Callable[..., Any] | None = None  # called instead while that lets nothing through
    limit: Limit | None = None  # of all its tasks together
    value_limit: Limit | None = None  # of those with one value of the arguments that it is by
    defaults: TypeDefaults = field(init=False)  # what the store should know of it
    is_special: bool = field(init=False)  # it may have to wait, or does not run in this process

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
            age_limit(self.retry),
            _limit_by(self.value_limit, self.codec),
        )
        object.__setattr__(self, "defaults", defaults)  # it is frozen
        is_guarded = self.breaker is not None or self.retry.budget is not None
        object.__setattr__(self, "is_special", is_guarded or self.run == "process")


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
    breaker: str | Breaker | None = None
    fallback: Callable[..., Any] | None = None
    limit: Limit | Sequence[Limit] | None = None


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
    breaker = _checked_breaker(name, options.breaker)
    if options.fallback is not None:
        if breaker is None:
            raise ConfigurationError(
                f"task '{name}': fallback is called while a breaker is open; give breaker= too"
            )
        check_fallback(f"task '{name}': fallback", options.fallback, function)
    codec = ArgumentCodec(name, function)
    limit, value_limit = _checked_limits(name, options.limit, codec)
    return TaskDefinition(
        name=name,
        function=function,
        codec=codec,
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
        breaker=breaker,
        fallback=options.fallback,
        limit=limit,
        value_limit=value_limit,
    )


def _checked_limits(
    name: str, given: Any, codec: ArgumentCodec
) -> tuple[Limit | None, Limit | None]:
    """Return the limit of all tasks of a type together, and that by value."""
    limits = given if isinstance(given, list | tuple) else () if given is None else (given,)
    for limit in limits:
        if not isinstance(limit, Limit):
            raise ConfigurationError(
                f"task '{name}': limit {shown(limit)}: give one as in Limit(concurrency=3, rate='10/s')"
            )
    together = [limit for limit in limits if limit.by is None]
    by_value = [limit for limit in limits if limit.by is not None]
    if len(together) > 1 or len(by_value) > 1:
        raise ConfigurationError(
            f"task '{name}': limit {shown(given)}: give one Limit without by= and one with it at most; "
            "one by several arguments is Limit(by=('tenant', 'region'))"
        )
    for limit in by_value:
        _check_arguments(name, limit, codec)
    return (together or [None])[0], (by_value or [None])[0]


def _check_arguments(name: str, limit: Limit, codec: ArgumentCodec) -> None:
    for argument in limit.arguments:
        if argument not in codec.names:
            reason = "is not an argument"
            if argument == codec.context_name:
                reason = "is filled in by the worker and is not part of the payload"
            raise ConfigurationError(
                f"task '{name}': limit by {shown(argument)}, which {reason}; "
                f"arguments are: {', '.join(codec.names) or 'none'}"
            )


def _limit_by(limit: Limit | None, codec: ArgumentCodec) -> str | None:
    """What a store has to know to find the value of a task: names, and what stands if they are left out."""
    if limit is None:
        return None
    known = [f"[{json.dumps(one)}, {codec.encoded_default(one)}]" for one in limit.arguments]
    return f"[{', '.join(known)}]"


def _checked_breaker(name: str, breaker: Any) -> str | None:
    if breaker is None:
        return None
    if isinstance(breaker, Breaker):
        return breaker.name
    if not isinstance(breaker, str):
        raise ConfigurationError(
            f"task '{name}': breaker {shown(breaker)}: give what app.breaker(...) returned, or its name"
        )
    return checked_name(f"task '{name}': breaker", breaker)


def check_fallback(what: str, fallback: Any, function: Callable[..., Any]) -> None:
    """Raise unless one function can be called as another is."""
    if not inspect.isroutine(fallback):
        raise ConfigurationError(f"{what} {shown(fallback)}: give a function")
    _refuse_generator(what, fallback, "write one that returns")
    parameters = inspect.signature(function).parameters.values()
    positional = [one.name for one in parameters if one.kind is one.POSITIONAL_ONLY]
    named = {one.name: one for one in parameters if one.name not in positional}
    try:
        inspect.signature(fallback).bind(*positional, **named)
    except TypeError as error:
        raise ConfigurationError(
            f"{what} {_place(fallback)}: {error}; it is called with the arguments of {_place(function)}"
        ) from error


def breaker_settings(name: Any, options: dict[str, Any]) -> BreakerSettings:
    """Check what a breaker is made with."""
    what = f"breaker '{checked_name('breaker', name)}':"
    mode, rate, timeout = options["mode"], options["rate"], options["timeout"]
    if mode not in ("consecutive", "rate"):
        raise ConfigurationError(
            f"{what} mode {shown(mode)} is not known; use consecutive (failures in a row) or rate"
        )
    if type(rate) not in (int, float) or not 0 < rate <= 1:
        raise ConfigurationError(f"{what} rate {shown(rate)}: use a number above 0 and up to 1")
    counts = options["counts"]
    if not isinstance(counts, list | tuple | set | frozenset) or not counts:
        raise ConfigurationError(
            f"{what} counts {shown(counts)}: give a list of classes of errors, one at least"
        )
    return BreakerSettings(
        name=name,
        failures=_checked_number(f"{what} failures", options["failures"]),
        within=checked_seconds(f"{what} within", options["within"], above_zero=True),
        recovery=checked_seconds(f"{what} recovery", options["recovery"], above_zero=True),
        trials=_checked_number(f"{what} trials", options["trials"]),
        mode=mode,
        rate=float(rate),
        minimum=_checked_number(f"{what} minimum", options["minimum"]),
        counts=frozenset(checked_class(f"{what} counts", one) for one in counts),
        timeout=None
        if timeout is None
        else checked_seconds(f"{what} timeout", timeout, above_zero=True),
        shared=checked_flag(f"{what} shared", options["shared"]),
    )


def _checked_number(what: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= 1_000_000:
        raise ConfigurationError(f"{what} {shown(value)}: use an integer from 1 to 1000000")
    return value


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


def type_rule(name: str, limit: Limit) -> LaneRule:
    """What a limit says of a type."""
    return LaneRule(RuleScope.TYPE, name, limit.concurrency, *_rate_and_burst(limit))


def value_rule(name: str, limit: Limit) -> ValueRule:
    """What a limit by value says of the tasks of a type that have one value, whichever."""
    return ValueRule(name, None, limit.concurrency, *_rate_and_burst(limit))


def _rate_and_burst(limit: Limit) -> tuple[float | None, float | None]:
    if limit.rate is None:
        return None, None
    rate = per_second("rate", limit.rate)
    return rate, usual_burst(rate) if limit.burst is None else limit.burst


class Registry:
    """The task types of an application, with what wraps their handlers and judges their errors."""

    def __init__(self, classifier: Classifier | None = None) -> None:
        self._definitions: dict[str, TaskDefinition] = {}
        self.classifier = classifier or Classifier()
        self.middleware: list[Middleware] = []
        self.breakers: dict[str, Breaker] = {}
        self._fallbacks: dict[str, TaskDefinition | None] = {}
        self._queues: dict[str, LaneRule] = {}

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

    def add_queue(self, rule: LaneRule) -> None:
        """Declare what holds for a queue; twice and not alike is an error."""
        if self._queues.setdefault(rule.name, rule) != rule:
            raise ConfigurationError(
                f"queue '{rule.name}' is declared twice, and not alike; leave out one app.queue(...)"
            )

    def rules(self) -> list[LaneRule]:
        """What the application declares for its queues and types."""
        limits = [type_rule(one.name, one.limit) for one in self if one.limit is not None]
        return [*self._queues.values(), *limits]

    def value_rules(self) -> list[ValueRule]:
        """What the application declares for each value of the arguments that a type is limited by."""
        return [
            value_rule(one.name, one.value_limit) for one in self if one.value_limit is not None
        ]

    def add_breaker(
        self, settings: BreakerSettings, fallback: Callable[..., Any] | None
    ) -> Breaker:
        """Make a breaker, or return the one that was made alike; two that differ are an error."""
        known = self.breakers.get(settings.name)
        if known is None:
            known = Breaker(settings, classifier=self.classifier, fallback=fallback)
            self.breakers[settings.name] = known
        elif (known.settings, known.fallback) != (settings, fallback):
            raise ConfigurationError(
                f"breaker '{settings.name}' is made twice, and not alike; give one of them another "
                "name, or use the one that app.breaker(...) returned"
            )
        return known

    def reports(self) -> list[BreakerReport]:
        """What each breaker shows of itself. Other threads may ask."""
        return [breaker.report() for breaker in list(self.breakers.values())]

    def check_breakers(self) -> None:
        """Raise unless every breaker that a task names is there, and its fallback fits."""
        for definition in self:
            if definition.breaker is None:
                continue
            if definition.breaker not in self.breakers:
                known = ", ".join(f"'{name}'" for name in self.breakers) or "none"
                raise ConfigurationError(
                    f"task '{definition.name}': breaker '{definition.breaker}' is not known; make it "
                    f"with app.breaker({definition.breaker!r}); there is: {known}"
                )
            fallback = self.breakers[definition.breaker].fallback
            if definition.fallback is None and fallback is not None:
                what = f"breaker '{definition.breaker}': fallback"
                check_fallback(what, fallback, definition.function)

    def fallback_of(self, definition: TaskDefinition) -> TaskDefinition | None:
        """What is run while the breaker of a task lets nothing through, if anything is."""
        name = definition.name
        if name not in self._fallbacks:
            breaker = self.breakers[str(definition.breaker)]
            function = definition.fallback or breaker.fallback
            self._fallbacks[name] = function and replace(
                definition,
                function=function,
                run="async" if inspect.iscoroutinefunction(function) else "thread",
                breaker=None,
            )
        return self._fallbacks[name]

    def __iter__(self) -> Iterator[TaskDefinition]:
        return iter(self._definitions.values())

    def names(self) -> tuple[str, ...]:
        """The names of all types."""
        return tuple(self._definitions)


def _place(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", None)
    return shown(function) if name is None else f"{function.__module__}.{name}"
