"""One classifier for all workers: the application's rules first, then its file, then ours."""

import tomllib
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from windlass.failures.facts import facts_of
from windlass.model.errors import ConfigurationError
from windlass.model.failure import ErrorFacts
from windlass.model.limits import shown
from windlass.policy.classification import Rule, Verdict, classify, parse_rule, parse_rules

BUILT_IN = "the built-in rules"
IN_CODE = "the application"


class Classifier:
    """Says which class an exception is of."""

    def __init__(self, path: str = "") -> None:
        self._in_code: list[Rule] = []
        self._in_file = _read(path) if path else ()
        self._paths: frozenset[str] | None = None

    @property
    def rules(self) -> tuple[Rule, ...]:
        """All rules, in the order in which they are tried."""
        return (*self._in_code, *self._in_file, *built_in_rules())

    @property
    def paths(self) -> frozenset[str]:
        """The attributes that rules look at."""
        if self._paths is None:
            self._paths = frozenset(path for rule in self.rules for path in rule.attributes or ())
        return self._paths

    def load(self) -> None:
        """Read the rules now: when an error is to be judged, there may be no file to be had."""
        built_in_rules()

    def add(self, given: Mapping[str, Any]) -> None:
        """Add a rule of the application, which is tried after those that were added before."""
        self._in_code.append(parse_rule(given, place="error rule", source=IN_CODE))
        self._paths = None

    def facts_of(self, error: BaseException, now: datetime) -> ErrorFacts:
        """Return what an exception says of itself, as far as rules ask for it."""
        return facts_of(error, now=now, paths=self.paths)

    def classify(self, facts: ErrorFacts) -> Verdict:
        """Return the class of an error, and the rule that decided."""
        return classify(self.rules, facts)


@cache
def built_in_rules() -> tuple[Rule, ...]:
    """The rules that come with Windlass."""
    text = files("windlass.failures").joinpath("rules.toml").read_text("utf-8")
    return parse_rules(tomllib.loads(text), BUILT_IN)


def _read(path: str) -> tuple[Rule, ...]:
    try:
        document = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigurationError(
            f"error_rules {shown(path)} cannot be read: {error.strerror}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"error_rules {shown(path)} is not TOML: {error}") from error
    return parse_rules(document, path)
