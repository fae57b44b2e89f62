"""Limits by value: what is declared with a task, and what is said of single values."""

import json
from collections.abc import AsyncIterator
from enum import Enum
from hashlib import md5
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass import App, ConfigurationError, Context, Limit, TaskSet
from windlass.client import checked_value
from windlass.client.values import ValueOptions, value_rule
from windlass.model.rule import FAIR_WINDOW, LaneRule, RuleScope, ValueRecord, ValueRule
from windlass.model.task import TypeDefaults
from windlass.policy.limit import value_text
from windlass.registry import Registry, TaskDefinition


class Region(Enum):
    EU = "eu"


class Rules:
    """The part of a store that is asked, and what it was told."""

    def __init__(self) -> None:
        self.rules: dict[tuple[str, str | None], ValueRule] = {}
        self.types: dict[str, TypeDefaults] = {}

    async def type_defaults(self, name: str) -> TypeDefaults | None:
        return self.types.get(name)

    async def set_value_rule(self, rule: ValueRule) -> None:
        self.rules[rule.type, rule.value] = rule

    async def reset_value_rule(self, type: str, value: str | None) -> bool:  # noqa: A002 - as in the port
        return self.rules.pop((type, value), None) is not None

    async def value_rules(self, type: str | None = None) -> list[ValueRecord]:  # noqa: A002
        return [ValueRecord(one, True) for one in self.rules.values() if type in (None, one.type)]


@pytest.fixture
def rules() -> Rules:
    return Rules()


@pytest.fixture
async def app(rules: Rules, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[App]:
    async with App("memory:") as app:
        store = await app.store()
        for name in ("type_defaults", "set_value_rule", "reset_value_rule", "value_rules"):
            monkeypatch.setattr(store, name, getattr(rules, name))
        yield app


def defined(limit: Any) -> TaskDefinition:
    tasks = TaskSet()

    @tasks.task(limit=limit)
    async def send(
        ctx: Context, tenant: str, region: Region = Region.EU, size: Any = 7
    ) -> None: ...

    return tasks.tasks[0].definition


@pytest.mark.parametrize(
    ("limit", "limit_by"),
    [
        (Limit(3, by="tenant"), '[["tenant", null]]'),
        (Limit(by=("region",)), '[["region", "eu"]]'),
        (Limit(by=["tenant", "size"]), '[["tenant", null], ["size", 7]]'),
        ([Limit(5), Limit(rate="1/s", by=("size", "region"))], '[["size", 7], ["region", "eu"]]'),
        (Limit(5), None),
        (None, None),
        ((), None),
    ],
)
def test_what_a_limit_is_by_goes_to_the_store_with_its_defaults(
    limit: Any, limit_by: str | None
) -> None:
    assert defined(limit).defaults.limit_by == limit_by


@pytest.mark.parametrize(
    ("default", "encoded"),
    [
        ("é", '"é"'),
        (None, "null"),
        (True, "true"),
        ([1, "a"], '[1,"a"]'),
        (object(), "null"),
        (float("nan"), "null"),
        ("\x00", "null"),
        ("\ud800", "null"),
        ("x" * (1 << 20), "null"),
    ],
    ids=lambda one: str(one)[:10].encode("ascii", "replace").decode(),
)
def test_a_default_is_as_it_would_be_in_a_payload_or_null(default: Any, encoded: str) -> None:
    tasks = TaskSet()

    @tasks.task(limit=Limit(by="tenant"))
    async def send(tenant: Any = default, /) -> None: ...

    assert send.definition.defaults.limit_by == f'[["tenant", {encoded}]]'
    assert json.loads(send.definition.defaults.limit_by)


def test_a_limit_by_value_is_declared_for_each_value_and_not_for_the_type() -> None:
    registry = Registry()
    registry.add(defined((Limit(50, rate="20/s"), Limit(3, rate="10/s", burst=5, by="tenant"))))

    assert registry.rules() == [LaneRule(RuleScope.TYPE, "send", 50, 20.0, 2.0)]
    assert registry.value_rules() == [ValueRule("send", None, 3, 10.0, 5)]


def test_fairness_alone_is_declared_as_a_rule_without_a_size() -> None:
    registry = Registry()
    registry.add(defined(Limit(by="tenant")))

    assert registry.rules() == []
    (rule,) = registry.value_rules()
    assert rule == ValueRule("send")
    assert rule.slots == FAIR_WINDOW


@pytest.mark.parametrize(
    ("by", "said"),
    [
        (5, "by 5: give the name of an argument, or a tuple of names"),
        ({"tenant"}, "by {'tenant'}: give the name of an argument, or a tuple of names"),
        (("tenant", None), "by ('tenant', None): give the name of an argument"),
        ((), "by () names no argument; leave it out"),
        ("", "by '' names no argument; leave it out"),
        (["a", "b", "a"], "by ['a', 'b', 'a'] names an argument twice; leave one out"),
    ],
)
def test_what_names_no_arguments_is_refused(by: Any, said: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Limit(3, by=by)

    assert str(raised.value).startswith(f"Limit: {said}")


@pytest.mark.parametrize(
    ("by", "said"),
    [
        ("tennant", "limit by 'tennant', which is not an argument"),
        (("tenant", "kwargs"), "limit by 'kwargs', which is not an argument"),
        ("ctx", "limit by 'ctx', which is filled in by the worker and is not part of the payload"),
    ],
)
def test_an_argument_that_is_not_there_is_named_with_those_that_are(by: Any, said: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        defined(Limit(3, by=by))

    assert str(raised.value) == f"task 'send': {said}; arguments are: tenant, region, size"


def test_a_task_without_arguments_has_none_to_be_limited_by() -> None:
    with pytest.raises(ConfigurationError, match="arguments are: none"):

        @TaskSet().task(limit=Limit(by="tenant"))
        async def send() -> None: ...


@pytest.mark.parametrize(
    "limits", [(Limit(1), Limit(2)), [Limit(1, by="tenant"), Limit(1, by="region")]]
)
def test_two_limits_of_a_kind_are_refused_with_the_way_out(limits: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"task 'send': limit .*by=\('tenant', 'region'\)"):
        defined(limits)


@pytest.mark.parametrize("limit", [3, [3], (Limit(1), "x"), {"by": "tenant"}])
def test_what_is_no_limit_is_refused(limit: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"task 'send': limit .*give one as in Limit"):
        defined(limit)


@pytest.mark.parametrize("options", [{"burst": 3}, {"concurrency": 0}, {"rate": "soon"}])
def test_sizes_are_checked_with_by_too(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="Limit: "):
        Limit(by="tenant", **options)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("acme", "acme"),
        ("", ""),
        ("a\nb", "a\nb"),
        (7, "7"),
        (1.5, "1.5"),
        (1e16, "10000000000000000"),
        (1e-7, "0.0000001"),
        (-0.0, "0.0"),
        (True, "true"),
        (None, "null"),
        (("acme",), "acme"),
        (("acme", "é"), '["acme", "é"]'),
        (("acme", None, 7, False), '["acme", null, "7", "false"]'),
        (Region.EU, "eu"),
        (UUID(int=7), str(UUID(int=7))),
    ],
)
def test_a_value_is_named_as_in_a_payload(value: Any, text: str) -> None:
    assert checked_value("send", value) == text


@given(st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=190, max_size=400))
def test_a_long_value_is_cut_and_still_told_from_others(text: str) -> None:
    named = value_text([text])

    assert len(named) <= 200
    assert named == text or named == text[:160] + "…" + md5(text.encode()).hexdigest()
    assert value_text([text + "x" * 200]) != named


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ((), "type 'send': value () has nothing in it; give a value for each argument"),
        ([1], "type 'send': value [1]: use a text, a number, True, False or None; a tuple for"),
        (({},), "type 'send': value ({},): use a text, a number"),
        (object, "cannot be carried as JSON"),
        ("\x00", "a string holds the NUL character"),
        (("a", float("inf")), "is no number of JSON"),
    ],
)
async def test_what_no_argument_can_be_is_refused(
    app: App, rules: Rules, value: Any, said: str
) -> None:
    with pytest.raises(ConfigurationError) as changed:
        await app.values.change("send", value, concurrency=1)
    with pytest.raises(ConfigurationError) as reset:
        await app.values.reset("send", value)

    assert said in str(changed.value)
    assert str(reset.value) == str(changed.value)
    assert rules.rules == {}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"concurrency": 0}, "concurrency 0: use an integer from 1"),
        ({"rate": "soon"}, "rate 'soon' is not a rate"),
        ({"burst": 3}, "burst 3 is part of a rate"),
        ({"weight": 0}, "weight 0: use a whole number from 1 to 1000"),
        ({"weight": 1001}, "weight 1001: use a whole number"),
        ({"weight": 1.5}, "weight 1.5: use a whole number"),
        ({"ageing": 5}, "option 'ageing' is not known; options are: concurrency, rate, burst, w"),
    ],
)
async def test_sizes_that_make_no_sense_are_refused(
    app: App, rules: Rules, options: Any, said: str
) -> None:
    with pytest.raises(ConfigurationError) as for_one:
        await app.values.change("send", "acme", **options)
    with pytest.raises(ConfigurationError) as for_each:
        await app.values.change_each("send", **options)

    assert str(for_one.value).startswith(f"type 'send', value 'acme': {said}")
    assert str(for_each.value).startswith(f"type 'send', each value: {said}")
    assert rules.rules == {}


@pytest.mark.parametrize("name", ["", "a\n", 5, None])
async def test_a_type_that_cannot_be_one_is_refused(app: App, name: Any) -> None:
    for call in (
        app.values.change(name, "acme"),
        app.values.change_each(name),
        app.values.reset(name, "acme"),
        app.values.reset_each(name),
    ):
        with pytest.raises(ConfigurationError, match=r"type .* (characters|character|string)"):
            await call


async def test_sizes_are_set_and_reset(app: App, rules: Rules) -> None:
    await app.values.change("send", "acme", concurrency=10, rate="5/s", weight=3)
    await app.values.change_each("send", rate=20, burst=7)
    await app.values.change("send", ("acme", "us"), concurrency=None)
    await app.values.change("other", 7, weight=2)

    found = [one.rule for one in await app.values.rules("send")]
    assert found == [
        ValueRule("send", "acme", 10, 5.0, 1.0, 3),
        ValueRule("send", None, None, 20.0, 7.0),
        ValueRule("send", '["acme", "us"]'),
    ]
    assert found[0].slots == 10
    assert len(await app.values.rules()) == 4
    assert await app.values.reset("send", "acme")
    assert not await app.values.reset("send", "acme")
    assert await app.values.reset_each("send")
    assert await app.values.reset("send", ("acme", "us"))
    assert list(rules.rules) == [("other", "7")]
    assert rules.rules["other", "7"].slots == 2 * FAIR_WINDOW


@pytest.mark.parametrize(
    ("limit_by", "value", "said"),
    [
        ('[["tenant", null]]', ("acme", "eu"), "its limit is by tenant; give one value"),
        ('[["tenant", null], ["region", "eu"]]', "acme", "by tenant, region; give a tuple of 2"),
    ],
)
async def test_a_value_that_no_task_can_have_is_refused(
    app: App, rules: Rules, limit_by: str, value: Any, said: str
) -> None:
    rules.types["send"] = TypeDefaults("send", limit_by=limit_by)

    with pytest.raises(ConfigurationError) as raised:
        await app.values.change("send", value, concurrency=1)

    assert said in str(raised.value)
    assert rules.rules == {}


@pytest.mark.parametrize("known", [None, TypeDefaults("send")])
async def test_sizes_may_be_set_before_a_limit_is_declared(
    app: App, rules: Rules, known: TypeDefaults | None
) -> None:
    if known is not None:
        rules.types["send"] = known

    await app.values.change("send", ("acme", "eu"), concurrency=1)

    assert list(rules.rules) == [("send", '["acme", "eu"]')]


def test_a_rule_of_a_value_may_say_nothing() -> None:
    assert value_rule("send", "acme", ValueOptions()) == ValueRule("send", "acme")
