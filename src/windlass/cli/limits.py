"""How limits of queues and types are typed, and shown."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from windlass.app import App
from windlass.cli.options import single_option
from windlass.model.errors import ConfigurationError
from windlass.model.rule import STRICT, LaneRule, RuleRecord, RuleScope, ValueRule


def limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Take what limits a queue or a type."""
    for option in (
        single_option("--burst", help="how many may begin at once after a quiet time"),
        single_option("--rate", help="how many may begin in a time, as in 100/s or 5/m"),
        single_option("--concurrency", help="how many may be held at once, across all workers"),
    ):
        command = option(command)
    return command


def given_options(**typed: str | None) -> dict[str, Any]:
    """Read those that were given; numbers as numbers."""
    given = {name: _read(name, text) for name, text in typed.items() if text is not None}
    if not given:
        names = ", ".join(f"--{name}" for name in typed)
        raise ConfigurationError(
            f"nothing is said of it: give one of {names}; to lift its limits, give none for each it has, "
            "as in --concurrency none; to let what code declares stand again, use reset"
        )
    return given


def _read(name: str, text: str) -> int | float | str | None:
    if text == "none":
        return None
    if name == "rate":
        return text
    try:
        return int(text) if name in ("concurrency", "weight") else float(text)
    except ValueError:
        return text  # refused with the others, or a word


async def rules_of(app: App, scope: RuleScope) -> dict[str, RuleRecord]:
    """The rules in force by name."""
    rules = app.queues if scope is RuleScope.QUEUE else app.types
    return {one.rule.name: one for one in await rules.rules()}


def shown_rule(record: RuleRecord | None) -> str:
    """A rule in a few words, for a table."""
    if record is None:
        return "-"
    words = _words(record.rule, record.used)
    return ", ".join(words or ["none"]) + (" (set by hand)" if record.by_operator else "")


def _words(rule: LaneRule, used: int) -> list[str]:
    words = []
    if rule.concurrency is not None:
        words.append(f"{used} of {rule.concurrency} at once")
    words += rate_words(rule)
    if rule.ageing is not None:
        words.append("strict" if rule.ageing == STRICT else f"ages {rule.ageing:g} s a point")
    if rule.weight is not None:
        words.append(f"weight {rule.weight:g}")
    return words


def rate_words(rule: LaneRule | ValueRule) -> list[str]:
    """What a rule says of a time, if it does."""
    return [] if rule.rate is None else [f"{rule.rate:g}/s, bursts of {rule.burst:g}"]


def shown_json(record: RuleRecord | None) -> dict[str, Any] | None:
    """A rule for programs; infinity is no number in JSON."""
    if record is None:
        return None
    said = asdict(record.rule) | {"by_operator": record.by_operator, "used": record.used}
    if record.rule.ageing == STRICT:
        said["ageing"] = "strict"
    return {name: value for name, value in said.items() if name not in ("scope", "name")}


async def change_rule(app: App, rule: LaneRule) -> str:
    """Set a rule; return what is to be said of it."""
    async with app:
        await (await app.store()).set_rule(rule)
        return _said(rule.scope, rule.name, (await rules_of(app, rule.scope)).get(rule.name))


async def reset_rule(app: App, scope: RuleScope, name: str) -> str:
    """Remove what was set by hand; return what is to be said of it."""
    async with app:
        was_set = await (await app.store()).reset_rule(scope, name)
        said = _said(scope, name, (await rules_of(app, scope)).get(name))
    return said if was_set else f"nothing was set by hand; {said}"


def _said(scope: RuleScope, name: str, record: RuleRecord | None) -> str:
    if record is None or not _words(record.rule, record.used):
        return f"{scope} '{name}' has no limits"
    return f"{scope} '{name}': {shown_rule(record)}"
