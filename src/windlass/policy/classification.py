"""Which class an error is of: rules are data, and the first one that matches decides."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from windlass.model.errors import ConfigurationError
from windlass.model.failure import ErrorClass, ErrorFacts, Plain
from windlass.model.limits import shown

# A retry of one of the others would come to the same end.
RETRIED = frozenset({ErrorClass.TRANSIENT, ErrorClass.RATE_LIMITED, ErrorClass.UNKNOWN})

LONGEST_SEARCHED = 2000  # characters of a message: patterns are not to run for long
_KEYS = ("name", "class", "type", "status", "sqlstate", "attribute", "message")
_STATUS = re.compile(r"[1-5]xx|[1-5][0-9]{2}")
_SQLSTATE = re.compile(r"[0-9A-Z]{2}|[0-9A-Z]{5}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What an error has to be like, in every respect that is given, to be of a class."""

    error_class: ErrorClass
    name: str = ""
    types: frozenset[str] = frozenset()  # dotted names, of the class or of a base
    statuses: frozenset[str] = frozenset()  # "429", or "5xx" for all of these
    sqlstates: frozenset[str] = frozenset()  # five characters, or the two of a class
    attributes: Mapping[str, tuple[Plain, ...]] | None = None  # path → one of these values
    message: re.Pattern[str] | None = None
    source: str = "the application"  # where it was written down

    def __str__(self) -> str:
        return f"'{self.name}' of {self.source}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The class of an error, and the rule that said so."""

    error_class: ErrorClass
    rule: Rule | None = None  # None: no rule matched


NO_VERDICT = Verdict(ErrorClass.UNKNOWN)


def classify(rules: Iterable[Rule], facts: ErrorFacts) -> Verdict:
    """Return the class of an error by the first rule that matches it.

    A group that no rule matches is what its members are, if they agree.
    """
    rules = tuple(rules)
    for rule in rules:
        if _matches(rule, facts):
            return Verdict(rule.error_class, rule)
    verdicts = [classify(rules, member) for member in facts.members]
    if len({verdict.error_class for verdict in verdicts}) == 1:
        return verdicts[0]
    return NO_VERDICT


def _matches(rule: Rule, facts: ErrorFacts) -> bool:
    if rule.types and rule.types.isdisjoint(facts.names):
        return False
    if rule.statuses:
        status = str(facts.status or "")
        if rule.statuses.isdisjoint({status, f"{status[:1]}xx"}):
            return False
    if rule.sqlstates:
        sqlstate = facts.sqlstate or ""
        if rule.sqlstates.isdisjoint({sqlstate, sqlstate[:2]}):
            return False
    for path, values in (rule.attributes or {}).items():
        if path not in facts.attributes or not _is_among(facts.attributes[path], values):
            return False
    return rule.message is None or bool(rule.message.search(facts.message[:LONGEST_SEARCHED]))


def _is_among(found: Plain, values: Iterable[Plain]) -> bool:
    """Whether it is one of these; true is not 1."""
    return any(
        found == value and isinstance(found, bool) is isinstance(value, bool) for value in values
    )


def parse_rules(document: Mapping[str, Any], source: str) -> tuple[Rule, ...]:
    """Read rules as they come out of a TOML file, or raise naming the place."""
    unknown = document.keys() - {"rule"}
    if unknown:
        raise ConfigurationError(
            f"{source}: {', '.join(sorted(unknown))} is not known; write rules as [[rule]] tables"
        )
    found = document.get("rule", [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ConfigurationError(f"{source}: write rules as [[rule]] tables")
    return tuple(
        parse_rule(one, place=f"{source}: rule {number}", source=source)
        for number, one in enumerate(found, start=1)
    )


def parse_rule(given: Mapping[str, Any], *, place: str, source: str) -> Rule:
    """Read one rule, or raise."""
    for key in given:
        if key not in _KEYS:
            raise ConfigurationError(f"{place}: '{key}' is not known; keys are: {', '.join(_KEYS)}")
    if "class" not in given:
        raise ConfigurationError(f"{place}: 'class' is missing; give one of {_CLASSES}")
    if not any(given.get(key) for key in ("type", "status", "sqlstate", "attribute", "message")):
        raise ConfigurationError(
            f"{place} would match every error; give type, status, sqlstate, attribute or message"
        )
    return Rule(
        error_class=checked_class(f"{place}: class", given["class"]),
        name=_text(place, "name", given.get("name", "")) or _named_by(given),
        types=_texts(place, "type", given.get("type")),
        statuses=_coded(place, "status", given.get("status"), _STATUS, "429 or '5xx'"),
        sqlstates=_coded(place, "sqlstate", given.get("sqlstate"), _SQLSTATE, "'40001' or '40'"),
        attributes=_attributes(place, given.get("attribute")),
        message=_pattern(place, given.get("message")),
        source=source,
    )


_CLASSES = ", ".join(ErrorClass)


def checked_class(what: str, value: Any) -> ErrorClass:
    """Return a class by its name, however its words are joined, or raise."""
    if isinstance(value, str):
        name = value.strip().lower().replace(" ", "-").replace("_", "-")
        if name in frozenset(ErrorClass):
            return ErrorClass(name)
    raise ConfigurationError(f"{what} {shown(value)} is not known; use one of {_CLASSES}")


def _named_by(given: Mapping[str, Any]) -> str:
    """A name for a rule that has none: what it looks for."""
    return ", ".join(
        f"{key} {value if isinstance(value, str | int) else shown(value)}"
        for key, value in given.items()
        if key not in ("class", "name")
    )


def _text(place: str, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigurationError(f"{place}: {key} {shown(value)} must be a string")
    return value


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple | set | frozenset) else [value]


def _texts(place: str, key: str, value: Any) -> frozenset[str]:
    return frozenset(_text(place, key, one) for one in _list(value))


def _coded(place: str, key: str, value: Any, form: re.Pattern[str], example: str) -> frozenset[str]:
    codes = [one if isinstance(one, str) else str(one) for one in _list(value)]
    for code in codes:
        if not form.fullmatch(code):
            raise ConfigurationError(f"{place}: {key} {shown(code)} is none; write {example}")
    return frozenset(codes)


def _attributes(place: str, value: Any) -> dict[str, tuple[Plain, ...]] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"{place}: attribute {shown(value)}: write a table of paths and values, as in "
            "attribute = { errno = [28] }"
        )
    for path, values in value.items():
        for one in _list(values):
            if not isinstance(one, str | int | float | bool):
                raise ConfigurationError(
                    f"{place}: attribute '{path}' {shown(one)}: compare with a text, a number, or a "
                    "truth value"
                )
    return {str(path): tuple(_list(values)) for path, values in value.items()}


def _pattern(place: str, value: Any) -> re.Pattern[str] | None:
    if value is None:
        return None
    try:
        return re.compile(_text(place, "message", value))
    except re.error as error:
        raise ConfigurationError(
            f"{place}: message {shown(value)} is not a regular expression: {error}"
        ) from error
