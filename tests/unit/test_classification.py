import subprocess
import sys
from pathlib import Path

import pytest

from windlass import ConfigurationError
from windlass.failures.classifier import Classifier, built_in_rules
from windlass.model.failure import ErrorClass, ErrorFacts
from windlass.policy.classification import (
    NO_VERDICT,
    Rule,
    checked_class,
    classify,
    parse_rule,
    parse_rules,
)


def rule(**given: object) -> Rule:
    return parse_rule({"class": "transient", **given}, place="here", source="a test")


@pytest.mark.parametrize(
    ("asked", "facts", "is_matched"),
    [
        ({"type": "a.B"}, {"names": {"a.B", "a.c.B"}}, True),
        ({"type": ["x.Y", "a.B"]}, {"names": {"a.B"}}, True),
        ({"type": "a.B"}, {"names": {"a.C"}}, False),
        ({"status": 429}, {"status": 429}, True),
        ({"status": 429}, {"status": 428}, False),
        ({"status": 429}, {}, False),
        ({"status": "5xx"}, {"status": 503}, True),
        ({"status": [404, "5xx"]}, {"status": 404}, True),
        ({"status": "5xx"}, {"status": 429}, False),
        ({"status": "5xx"}, {}, False),
        ({"sqlstate": "40001"}, {"sqlstate": "40001"}, True),
        ({"sqlstate": "40"}, {"sqlstate": "40P01"}, True),
        ({"sqlstate": "40001"}, {"sqlstate": "40P01"}, False),
        ({"sqlstate": "40"}, {}, False),
        ({"attribute": {"errno": [28]}}, {"attributes": {"errno": 28}}, True),
        ({"attribute": {"errno": 28}}, {"attributes": {"errno": 28}}, True),
        ({"attribute": {"errno": [28]}}, {"attributes": {"errno": 5}}, False),
        ({"attribute": {"errno": [28]}}, {}, False),
        ({"attribute": {"flag": [True]}}, {"attributes": {"flag": 1}}, False),
        ({"attribute": {"flag": [1]}}, {"attributes": {"flag": True}}, False),
        ({"attribute": {"a": [1], "b": [2]}}, {"attributes": {"a": 1}}, False),
        ({"message": "time.?out"}, {"message": "a timeout it was"}, True),
        ({"message": "^time"}, {"message": "a timeout it was"}, False),
        ({"message": "late"}, {"message": " " * 3000 + "late"}, False),
        ({"type": "a.B", "status": 500}, {"names": {"a.B"}, "status": 500}, True),
        ({"type": "a.B", "status": 500}, {"names": {"a.B"}, "status": 400}, False),
        ({"type": "a.B", "message": "x"}, {"names": {"a.B"}, "message": "y"}, False),
    ],
)
def test_a_rule_matches_what_is_like_it_in_every_respect(
    asked: dict[str, object], facts: dict[str, object], is_matched: bool
) -> None:
    facts = {**facts, "names": frozenset(facts.get("names", ()))}  # type: ignore[call-overload]

    verdict = classify([rule(**asked)], ErrorFacts(**facts))  # type: ignore[arg-type]

    assert (verdict.rule is not None) is is_matched


def test_the_first_rule_that_matches_decides() -> None:
    first = rule(type="a.B", **{"class": "permanent-input"})
    rules = [rule(type="a.C"), first, rule(type="a.B")]

    verdict = classify(rules, ErrorFacts(names=frozenset({"a.B"})))

    assert (verdict.error_class, verdict.rule) == (ErrorClass.PERMANENT_INPUT, first)


def test_what_no_rule_matches_is_unknown() -> None:
    assert classify([rule(type="a.B")], ErrorFacts()) == NO_VERDICT
    assert NO_VERDICT.error_class is ErrorClass.UNKNOWN


def test_a_group_is_what_its_members_are_if_they_agree() -> None:
    rules = [rule(type="a.B"), rule(type="a.C"), rule(type="a.D", **{"class": "code-bug"})]

    def group(*names: str) -> ErrorFacts:
        return ErrorFacts(members=tuple(ErrorFacts(names=frozenset({name})) for name in names))

    assert classify(rules, group("a.B", "a.C")).error_class is ErrorClass.TRANSIENT
    assert classify(rules, group("a.B", "a.D")).error_class is ErrorClass.UNKNOWN
    assert classify(rules, group("a.B", "a.X")).error_class is ErrorClass.UNKNOWN
    assert classify(rules, ErrorFacts(members=(group("a.D"),))).error_class is ErrorClass.CODE_BUG


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "'class' is missing"),
        (
            {"class": "bad luck", "type": "a.B"},
            "class 'bad luck' is not known; use one of transient",
        ),
        ({"class": 7, "type": "a.B"}, "class 7"),
        ({"class": "transient"}, "would match every error"),
        ({"class": "transient", "type": []}, "would match every error"),
        ({"class": "transient", "typ": "a.B"}, "'typ' is not known; keys are: name, class, type"),
        ({"class": "transient", "type": 7}, "type 7 must be a string"),
        ({"class": "transient", "status": 42}, "status '42' is none; write 429 or '5xx'"),
        ({"class": "transient", "status": True}, "status 'True'"),
        ({"class": "transient", "sqlstate": "4"}, "sqlstate '4' is none"),
        ({"class": "transient", "message": "("}, r"message '\(' is not a regular expression"),
        ({"class": "transient", "message": 7}, "message 7 must be a string"),
        ({"class": "transient", "attribute": [1]}, "write a table of paths and values"),
        ({"class": "transient", "attribute": {"a": [{}]}}, "attribute 'a' {}"),
        ({"class": "transient", "type": "a.B", "name": 7}, "name 7 must be a string"),
    ],
)
def test_a_wrong_rule_is_named_with_its_place_and_value(
    given: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"^here.*{said}"):
        parse_rule(given, place="here", source="a test")


@pytest.mark.parametrize("document", [{"rules": []}, {"rule": {}}, {"rule": [1]}])
def test_a_file_of_another_shape_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=r"errors\.toml.*\[\[rule\]\]"):
        parse_rules(document, "errors.toml")


@pytest.mark.parametrize("text", ["code-bug", "code bug", "Code_Bug", " CODE-BUG "])
def test_a_class_may_be_written_with_any_joint(text: str) -> None:
    assert checked_class("class", text) is ErrorClass.CODE_BUG


def test_own_rules_come_before_those_of_the_file_and_these_before_ours(tmp_path: Path) -> None:
    written = tmp_path / "errors.toml"
    written.write_text('[[rule]]\nclass = "transient"\ntype = ["KeyError", "IndexError"]\n')
    classifier = Classifier(str(written))
    classifier.add({"class": "rate-limited", "type": "KeyError"})

    def named(name: str) -> ErrorClass:
        return classifier.classify(ErrorFacts(names=frozenset({name}))).error_class

    assert named("KeyError") is ErrorClass.RATE_LIMITED
    assert named("IndexError") is ErrorClass.TRANSIENT
    assert named("NameError") is ErrorClass.CODE_BUG
    assert classifier.rules[1].source == str(written)
    assert classifier.rules[2:] == built_in_rules()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        (b"[[rule", "is not TOML"),
        (b"\xff", "is not TOML"),
        (b'[[rule]]\nclass = "transient"\n', "rule 1 would match every error"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: bytes | None, said: str) -> None:
    path = tmp_path / "errors.toml"
    if text is not None:
        path.write_bytes(text)

    with pytest.raises(ConfigurationError, match=rf"errors\.toml.*{said}"):
        Classifier(str(path))


def test_built_in_rules_have_names_that_differ() -> None:
    names = [rule.name for rule in built_in_rules()]

    assert len(set(names)) == len(names)


def test_no_library_is_imported_for_its_rules() -> None:
    look = (
        "import sys\n"
        "from windlass.failures.classifier import Classifier\n"
        "from datetime import datetime, UTC\n"
        "classifier = Classifier()\n"
        "classifier.classify(classifier.facts_of(ValueError('x'), datetime.now(UTC)))\n"
        "libraries = {'httpx', 'requests', 'aiohttp', 'botocore', 'redis', 'kafka', 'psycopg'}\n"
        "print(*libraries & sys.modules.keys())"
    )
    said = subprocess.run(
        [sys.executable, "-c", look], check=True, capture_output=True, text=True
    ).stdout

    assert said.strip() == ""
