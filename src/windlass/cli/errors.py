"""Commands on the rules by which errors are classified."""

import builtins
import importlib
import warnings
from typing import Any

import click
from msgspec.structs import replace

from windlass.cli.loading import app_option, json_option, load_app
from windlass.cli.options import single_option
from windlass.cli.printing import legible, print_json, print_table
from windlass.failures.classifier import Classifier
from windlass.failures.facts import LENGTH_OF_SQLSTATE, facts_of_class
from windlass.model.errors import ConfigurationError
from windlass.model.failure import ErrorFacts
from windlass.policy.classification import RETRIED, Rule
from windlass.registry import checked_name
from windlass.settings import Settings


@click.group()
def errors() -> None:
    """See how errors are classified."""


def _classifier(application: str | None) -> Classifier:
    """The rules of an application; without one, those of the file that is configured, and ours."""
    if application is None:
        return Classifier(Settings.load({}).error_rules)
    return load_app(application).registry.classifier


@errors.command("list")
@app_option
@json_option
def list_rules(application: str | None, as_json: bool) -> None:
    """List the rules in the order in which they are tried."""
    rules = [_record(rule) for rule in _classifier(application).rules]
    if as_json:
        print_json(rules)
        return
    print_table(
        ("class", "rule", "from", "asks for"),
        [(rule["class"], rule["name"], rule["source"], _asked(rule)) for rule in rules],
    )


def _record(rule: Rule) -> dict[str, Any]:
    return {
        "name": rule.name,
        "source": rule.source,
        "class": rule.error_class,
        "type": sorted(rule.types),
        "status": sorted(rule.statuses),
        "sqlstate": sorted(rule.sqlstates),
        "attribute": dict(rule.attributes or {}),
        "message": None if rule.message is None else rule.message.pattern,
    }


def _asked(rule: dict[str, Any]) -> str:
    keys = ("type", "status", "sqlstate", "attribute", "message")
    return "; ".join(f"{key} {_few(rule[key])}" for key in keys if rule[key])


def _few(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value[:3]) + (", …" if len(value) > 3 else "")
    return ", ".join(value) if isinstance(value, dict) else str(value)


@errors.command("test")
@app_option
@click.argument("name", metavar="EXCEPTION")
@single_option("--status", type=int, help="The status of HTTP that it would carry.")
@single_option("--sqlstate", help="The SQLSTATE that it would carry.")
@single_option("--message", default="", help="What it would say.")
@click.option(
    "--attribute", multiple=True, metavar="PATH=VALUE", help="An attribute that it would have."
)
@json_option
def test_rule(
    application: str | None, name: str, as_json: bool, attribute: tuple[str, ...], **said: Any
) -> None:
    """Tell which rule an exception would be classified by, given by its dotted name."""
    checked_name("exception", name)
    if said["status"] is not None and not 100 <= said["status"] <= 599:
        raise ConfigurationError(f"--status {said['status']}: give one of HTTP, from 100 to 599")
    if said["sqlstate"] is not None and len(said["sqlstate"]) != LENGTH_OF_SQLSTATE:
        raise ConfigurationError(f"--sqlstate '{said['sqlstate']}': give all five characters")
    classifier = _classifier(application)
    found = _class_of(name)
    facts = (
        ErrorFacts(names=frozenset({name}))
        if found is None
        else facts_of_class(found, classifier.paths)
    )
    facts = replace(
        facts,
        names=facts.names | {name},
        attributes=dict(facts.attributes) | dict(_attribute(one) for one in attribute),
        **{key: value for key, value in said.items() if value is not None},
    )
    verdict = classifier.classify(facts)
    if as_json:
        rule = None if verdict.rule is None else _record(verdict.rule)
        print_json([{"exception": name, "class": verdict.error_class, "rule": rule}])
        return
    does = "tried again" if verdict.error_class in RETRIED else "fails at once"
    click.echo(legible(f"{name} is {verdict.error_class}: {does}"))
    if verdict.rule is None:
        click.echo("no rule matches it")
    else:
        click.echo(legible(f"by the rule {verdict.rule}"))
    if found is None:
        click.echo(
            legible(
                f"'{name}' cannot be imported here, so only its name was compared, not its bases, "
                "nor what its class says of itself"
            ),
            err=True,
        )


def _class_of(name: str) -> type[BaseException] | None:
    """The class of an exception, if it can be found here."""
    module, _, last = name.rpartition(".")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it warns of is none of ours, nor an error
            found = getattr(importlib.import_module(module) if module else builtins, last, None)
    except Exception:  # noqa: BLE001 - a library may fail in any way when it is imported
        found = None
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _attribute(text: str) -> tuple[str, Any]:
    path, is_there, value = text.partition("=")
    if not is_there or not path:
        raise ConfigurationError(f"--attribute '{text}': write it as PATH=VALUE")
    known = {"true": True, "false": False}
    if value in known:
        return path, known[value]
    return path, int(value) if value.lstrip("-").isdecimal() else value
