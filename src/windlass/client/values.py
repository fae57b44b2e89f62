"""What is said of the values that tasks of a type have: limits of their own, changed while they hold."""

from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar, Unpack

from windlass.client.rules import (
    LimitOptions,
    check_known,
    check_some,
    checked_limits,
    checked_weight,
)
from windlass.encoding import decode_json, encode_json
from windlass.model.errors import ConfigurationError, PayloadError
from windlass.model.limits import shown
from windlass.model.rule import RuleScope, ValueRecord, ValueRule
from windlass.model.task import TypeDefaults
from windlass.policy.limit import value_text
from windlass.registry import checked_name
from windlass.store.port import RuleStore

T = TypeVar("T")

LARGEST_VALUE = 64 << 10  # bytes of JSON


class ValueOptions(LimitOptions, total=False):
    """What limits the tasks of a type that have one value, for type checkers."""

    weight: int | None


def value_rule(name: Any, value: str | None, options: ValueOptions) -> ValueRule:
    """Check what is said of a value, as `checked_value` names it, or of each."""
    what = f"type '{checked_name(RuleScope.TYPE, name)}', " + (
        "each value" if value is None else f"value {shown(value)}"
    )
    check_known(what, options, ValueOptions)
    weight = options.get("weight")
    return ValueRule(
        name,
        value,
        *checked_limits(what, options),
        None if weight is None else checked_weight(what, weight),
    )


def checked_value(name: str, given: Any) -> str:
    """Name a value as rules are found by it: that of one argument, or a tuple for several."""
    what = f"type '{name}': value {shown(given)}"
    if given == ():
        raise ConfigurationError(f"{what} has nothing in it; give a value for each argument")
    return value_text([_plain(what, one) for one in _several(given)])


def _several(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)


def _plain(what: str, value: Any) -> str | float | None:
    """A value as it is in a payload."""
    try:
        plain = decode_json(encode_json(value, what=what, max_bytes=LARGEST_VALUE))
    except PayloadError as error:
        raise ConfigurationError(str(error)) from None
    if isinstance(plain, list | dict):
        raise ConfigurationError(
            f"{what}: use a text, a number, True, False or None; a tuple for several arguments"
        )
    return plain  # type: ignore[no-any-return]  # nothing else is left in JSON


class ValueStore(RuleStore, Protocol):
    """What is asked of the store."""

    async def type_defaults(self, name: str) -> TypeDefaults | None:
        """Return what a worker registered for this type, if any did."""


class ValueAccess(Protocol):
    """How rules are reached, whatever event loop they are asked for from."""

    def storing(self) -> AbstractAsyncContextManager[ValueStore]:
        """Yield the store of the running event loop, which stays open while the block lasts."""

    def run_sync(self, name: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine for a caller that has no event loop."""


class Values:
    """The values by which types are limited: `app.values`."""

    def __init__(self, access: ValueAccess) -> None:
        self._access = access

    async def change(self, name: str, value: Any, **options: Unpack[ValueOptions]) -> None:
        """Let this stand for a value, a tuple for several arguments, until `reset`."""
        checked_name(RuleScope.TYPE, name)
        rule = value_rule(name, checked_value(name, value), options)
        check_some(f"type '{name}', value {shown(value)}", options, ValueOptions)
        async with self._access.storing() as store:
            _check_number(name, value, await store.type_defaults(name))
            await store.set_value_rule(rule)

    async def change_each(self, name: str, **options: Unpack[ValueOptions]) -> None:
        """Let this stand for each value without a rule of its own, instead of what code declares."""
        rule = value_rule(name, None, options)
        check_some(f"type '{name}', each value", options, ValueOptions)
        async with self._access.storing() as store:
            await store.set_value_rule(rule)

    async def reset(self, name: str, value: Any) -> bool:
        """Let a value have the rule that each has; return whether it had one of its own."""
        checked = checked_value(checked_name(RuleScope.TYPE, name), value)
        async with self._access.storing() as store:
            return await store.reset_value_rule(name, checked)

    async def reset_each(self, name: str) -> bool:
        """Let what code declares for each value stand again; return whether anything was set instead."""
        checked_name(RuleScope.TYPE, name)
        async with self._access.storing() as store:
            return await store.reset_value_rule(name, None)

    async def rules(self, name: str | None = None) -> list[ValueRecord]:
        """List the rules in force, of one type or of all; that for each value first."""
        if name is not None:
            checked_name(RuleScope.TYPE, name)
        async with self._access.storing() as store:
            return await store.value_rules(name)

    def change_sync(self, name: str, value: Any, **options: Unpack[ValueOptions]) -> None:
        """`change` for synchronous code."""
        self._access.run_sync("change", lambda: self.change(name, value, **options))

    def change_each_sync(self, name: str, **options: Unpack[ValueOptions]) -> None:
        """`change_each` for synchronous code."""
        self._access.run_sync("change_each", lambda: self.change_each(name, **options))

    def reset_sync(self, name: str, value: Any) -> bool:
        """`reset` for synchronous code."""
        return self._access.run_sync("reset", lambda: self.reset(name, value))

    def reset_each_sync(self, name: str) -> bool:
        """`reset_each` for synchronous code."""
        return self._access.run_sync("reset_each", lambda: self.reset_each(name))

    def rules_sync(self, name: str | None = None) -> list[ValueRecord]:
        """`rules` for synchronous code."""
        return self._access.run_sync("rules", lambda: self.rules(name))


def _check_number(name: str, value: Any, known: TypeDefaults | None) -> None:
    """Raise if no task can have such a value; what is not registered yet may be by anything."""
    if known is None or known.limit_by is None:
        return
    arguments = [argument for argument, _ in decode_json(known.limit_by)]
    if len(_several(value)) != len(arguments):
        raise ConfigurationError(
            f"type '{name}': value {shown(value)}: its limit is by {', '.join(arguments)}; "
            + ("give one value" if len(arguments) == 1 else f"give a tuple of {len(arguments)}")
        )
