"""What is said of whole queues and types: limits, ageing, pauses."""

from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Any, Protocol, TypedDict, TypeVar, Unpack, cast

from windlass.model.errors import ConfigurationError
from windlass.model.limits import HEAVIEST, shown
from windlass.model.rule import STRICT, LaneRule, RuleRecord, RuleScope
from windlass.policy.limit import check_limit, per_second, usual_burst
from windlass.registry import checked_name, checked_seconds
from windlass.store.port import OperateStore, RuleStore

T = TypeVar("T")


class LimitOptions(TypedDict, total=False):
    """What limits the tasks of a type, for type checkers."""

    concurrency: int | None
    rate: str | float | None
    burst: float | None


class QueueOptions(LimitOptions, total=False):
    """What `app.queue(...)` takes, for type checkers."""

    ageing: float | timedelta | str | None
    weight: int | None


def lane_rule(scope: RuleScope, name: Any, options: QueueOptions) -> LaneRule:
    """Check what is said of a queue or a type."""
    what = f"{scope} '{checked_name(scope, name)}'"
    check_known(what, options, QueueOptions if scope is RuleScope.QUEUE else LimitOptions)
    ageing, weight = options.get("ageing"), options.get("weight")
    return LaneRule(
        scope,
        name,
        *checked_limits(what, options),
        None if ageing is None else _checked_ageing(what, ageing),
        None if weight is None else checked_weight(what, weight),
    )


def check_known(what: str, options: Any, known: type[LimitOptions]) -> None:
    """Raise unless all options are known."""
    for option in options:
        if option not in known.__annotations__:
            raise ConfigurationError(
                f"{what}: option '{option}' is not known; options are: "
                f"{', '.join(known.__annotations__)}"
            )


def check_some(what: str, options: Any, known: type[LimitOptions]) -> None:
    """Raise if nothing is said: that would lift, without a word, whatever limit there is."""
    if not options:
        raise ConfigurationError(
            f"{what}: nothing was given to set; options are: {', '.join(known.__annotations__)}; "
            "concurrency=None lifts a limit"
        )


def checked_limits(
    what: str, options: LimitOptions
) -> tuple[int | None, float | None, float | None]:
    """Return how many at once, in a second, and of these at once after a quiet time; or raise."""
    concurrency, rate, burst = (options.get(one) for one in ("concurrency", "rate", "burst"))
    check_limit(what, concurrency, rate, burst)
    in_a_second = None if rate is None else per_second(f"{what}: rate", rate)
    if in_a_second is not None:
        burst = usual_burst(in_a_second) if burst is None else float(burst)  # type: ignore[arg-type]  # checked
    return concurrency, in_a_second, burst  # type: ignore[return-value]  # checked


def _checked_ageing(what: str, value: Any) -> float:
    if value == "strict":
        return STRICT
    if isinstance(value, str):
        raise ConfigurationError(
            f"{what}: ageing {shown(value)}: use seconds for each point of priority, or 'strict'"
        )
    return checked_seconds(f"{what}: ageing", value)


def checked_weight(what: str, value: Any) -> int:
    """Return a share, or raise."""
    if type(value) is not int or not 1 <= value <= HEAVIEST:
        raise ConfigurationError(
            f"{what}: weight {shown(value)}: use a whole number from 1 to {HEAVIEST}"
        )
    return value


class RulesStore(RuleStore, OperateStore, Protocol):
    """What is asked of the store."""


class RulesAccess(Protocol):
    """How rules are reached, whatever event loop they are asked for from."""

    def storing(self) -> AbstractAsyncContextManager[RulesStore]:
        """Yield the store of the running event loop, which stays open while the block lasts."""

    def run_sync(self, name: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine for a caller that has no event loop."""


class _Rules:
    """What operators say of queues, or of types."""

    scope: RuleScope

    def __init__(self, access: RulesAccess) -> None:
        self._access = access

    def _name(self, name: Any) -> str:
        return checked_name(self.scope, name)

    async def reset(self, name: str) -> bool:
        """Let what code declares stand again; return whether anything was set instead."""
        checked = self._name(name)
        async with self._access.storing() as store:
            return await store.reset_rule(self.scope, checked)

    async def rules(self) -> list[RuleRecord]:
        """List the rules that are in force, by name."""
        async with self._access.storing() as store:
            return [one for one in await store.rules() if one.rule.scope is self.scope]

    async def _change(self, rule: LaneRule) -> None:
        async with self._access.storing() as store:
            await store.set_rule(rule)

    def reset_sync(self, name: str) -> bool:
        """`reset` for synchronous code."""
        return self._access.run_sync("reset", lambda: self.reset(name))

    def rules_sync(self) -> list[RuleRecord]:
        """`rules` for synchronous code."""
        return self._access.run_sync("rules", self.rules)


class Queues(_Rules):
    """The queues of an application: `app.queues`."""

    scope = RuleScope.QUEUE

    async def pause(self, name: str) -> None:
        """Grant no more tasks of a queue; what runs goes on."""
        checked = self._name(name)
        async with self._access.storing() as store:
            await store.pause(checked)

    async def resume(self, name: str) -> bool:
        """Grant tasks of a queue again; return whether it was paused."""
        checked = self._name(name)
        async with self._access.storing() as store:
            return await store.resume(checked)

    async def change(self, name: str, **options: Unpack[QueueOptions]) -> None:
        """Let this stand instead of what `app.queue(...)` declares, until `reset`."""
        check_some(f"queue '{self._name(name)}'", options, QueueOptions)
        await self._change(lane_rule(self.scope, name, options))

    def pause_sync(self, name: str) -> None:
        """`pause` for synchronous code."""
        self._access.run_sync("pause", lambda: self.pause(name))

    def resume_sync(self, name: str) -> bool:
        """`resume` for synchronous code."""
        return self._access.run_sync("resume", lambda: self.resume(name))

    def change_sync(self, name: str, **options: Unpack[QueueOptions]) -> None:
        """`change` for synchronous code."""
        self._access.run_sync("change", lambda: self.change(name, **options))


class Types(_Rules):
    """The task types of an application: `app.types`."""

    scope = RuleScope.TYPE

    async def pause(self, name: str) -> None:
        """Grant no more tasks of a type; what runs goes on."""
        checked = self._name(name)
        async with self._access.storing() as store:
            await store.pause_type(checked)

    async def resume(self, name: str) -> bool:
        """Grant tasks of a type again; return whether it was paused."""
        checked = self._name(name)
        async with self._access.storing() as store:
            return await store.resume_type(checked)

    async def change(self, name: str, **options: Unpack[LimitOptions]) -> None:
        """Let this stand instead of the limit that the task declares, until `reset`."""
        check_some(f"type '{self._name(name)}'", options, LimitOptions)
        await self._change(lane_rule(self.scope, name, cast("QueueOptions", options)))

    def pause_sync(self, name: str) -> None:
        """`pause` for synchronous code."""
        self._access.run_sync("pause", lambda: self.pause(name))

    def resume_sync(self, name: str) -> bool:
        """`resume` for synchronous code."""
        return self._access.run_sync("resume", lambda: self.resume(name))

    def change_sync(self, name: str, **options: Unpack[LimitOptions]) -> None:
        """`change` for synchronous code."""
        self._access.run_sync("change", lambda: self.change(name, **options))
