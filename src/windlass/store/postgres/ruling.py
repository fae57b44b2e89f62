"""Rules of lanes on PostgreSQL: limits, ageing, paused types."""

from collections.abc import Sequence
from operator import itemgetter

from windlass.model.rule import LaneRule, RuleRecord, RuleScope, ValueRecord, ValueRule
from windlass.store.postgres.parts import PostgresParts, named_if_held


class RuleVerbs(PostgresParts):
    """What code declares for queues and types, and what operators set instead."""

    async def declare_rules(
        self, rules: Sequence[LaneRule], *, types: Sequence[str], values: Sequence[ValueRule] = ()
    ) -> None:
        lanes = _columns(7, [_values(rule) for rule in sorted(rules, key=lambda rule: rule.key)])
        each = [(one.type, one.concurrency, one.rate, one.burst, one.weight) for one in values]
        await self._run.execute(
            "declare_rules", *lanes, list(types), *_columns(5, sorted(each, key=itemgetter(0)))
        )

    async def set_value_rule(self, rule: ValueRule) -> None:
        size = (rule.concurrency, rule.rate, rule.burst, rule.weight)
        with named_if_held(f"the limit by value of type '{rule.type}'"):
            await self._run.execute("set_value_rule", rule.type, rule.value, *size)

    async def reset_value_rule(self, type: str, value: str | None) -> bool:  # noqa: A002 - as everywhere
        with named_if_held(f"the limit by value of type '{type}'"):
            return bool(await self._run.fetchval("reset_value_rule", type, value))

    async def value_rules(self, type: str | None = None) -> list[ValueRecord]:  # noqa: A002
        return [
            ValueRecord(ValueRule(*rest), by_operator)
            for by_operator, *rest in await self._run.fetch("list_value_rules", type)
        ]

    async def set_rule(self, rule: LaneRule) -> None:
        with named_if_held(f"what is said of {rule.scope} '{rule.name}'"):
            await self._run.execute("set_rule", *_values(rule))

    async def reset_rule(self, scope: RuleScope, name: str) -> bool:
        with named_if_held(f"what is said of {scope} '{name}'"):
            return bool(await self._run.fetchval("reset_rule", scope, name))

    async def rules(self) -> list[RuleRecord]:
        return [
            RuleRecord(LaneRule(RuleScope(scope), *rest), by_operator, used)
            for by_operator, used, scope, *rest in await self._run.fetch("list_rules")
        ]

    async def pause_type(self, type: str) -> None:  # noqa: A002 - as everywhere
        with named_if_held(f"type '{type}'"):
            await self._run.execute("pause_type", type)

    async def resume_type(self, type: str) -> bool:  # noqa: A002
        with named_if_held(f"type '{type}'"):
            return bool(await self._run.fetchval("resume_type", type))


def _columns(number: int, rows: Sequence[tuple[object, ...]]) -> list[list[object]]:
    columns = zip(*rows, strict=True) if rows else ([] for _ in range(number))
    return [list(column) for column in columns]


def _values(rule: LaneRule) -> tuple[object, ...]:
    return (
        rule.scope,
        rule.name,
        rule.concurrency,
        rule.rate,
        rule.burst,
        rule.ageing,
        rule.weight,
    )
