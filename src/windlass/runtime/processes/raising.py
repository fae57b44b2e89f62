"""An exception on its way to the worker: said where it was raised, judged by the rules there."""

from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec

from windlass.failures.classifier import Classifier
from windlass.failures.describe import LONGEST_MESSAGE, clean, describe, failed_by, text_of
from windlass.failures.facts import facts_of
from windlass.model.attempt import AttemptOutcome, Failed, Snoozed
from windlass.model.failure import ErrorClass, ErrorFacts, Plain
from windlass.registry import TaskDefinition
from windlass.runtime.processes.messages import Raised
from windlass.runtime.steering import as_predicate_says, steered

MAIN, MAIN_THERE = "__main__", "__mp_main__"  # the program, and what it is in a process


def raised(error: BaseException, definition: TaskDefinition, paths: Iterable[str]) -> Raised:
    """Say what there is to be known of an exception of a handler."""
    match steered(error):
        case Snoozed(seconds, put_off):
            return Raised(snooze=seconds, put_off=put_off)
        case Failed() as failed:
            return Raised(failed.error, failed.error_class, retry_after=failed.retry_after)
    kind = type(error).__qualname__
    return Raised(
        describe(kind, text_of(error) or kind, None, error),
        facts=_sendable(facts_of(error, now=datetime.now(UTC), paths=paths)),
        may_retry=as_predicate_says(definition, error),
    )


def certain(error: BaseException, error_class: ErrorClass) -> Raised:
    """Say the same of one whose class needs no rule."""
    return Raised(failed_by(error, error_class).error, error_class)


def outcome(said: Raised, classifier: Classifier) -> AttemptOutcome:
    """What becomes of an attempt that raised this."""
    if said.snooze is not None:
        return Snoozed(said.snooze, said.put_off)
    if said.facts is None:
        known = said.error_class or ErrorClass.UNKNOWN
        return Failed(said.error, known, retry_after=said.retry_after)
    error_class = classifier.classify(said.facts).error_class
    described = {**msgspec.json.decode(said.error), "class": str(error_class)}
    return Failed(
        msgspec.json.encode(described).decode(),
        error_class,
        asked_after=said.facts.retry_after,
        may_retry=said.may_retry,
    )


def _sendable(facts: ErrorFacts) -> ErrorFacts:
    """The same, as JSON can carry it."""
    return msgspec.structs.replace(
        facts,
        names=frozenset(clean(_name(name), LONGEST_MESSAGE) for name in facts.names),
        message=clean(facts.message, LONGEST_MESSAGE),
        sqlstate=None if facts.sqlstate is None else clean(facts.sqlstate, LONGEST_MESSAGE),
        attributes={path: _plain(value) for path, value in facts.attributes.items()},
        members=tuple(map(_sendable, facts.members)),
    )


def _name(name: str) -> str:
    module, dot, rest = name.partition(".")
    return f"{MAIN}{dot}{rest}" if module == MAIN_THERE else name


def _plain(value: Plain) -> Plain:
    if isinstance(value, str):
        return clean(value, LONGEST_MESSAGE)
    if isinstance(value, int) and abs(value) >> 63:
        return str(value)[:LONGEST_MESSAGE]  # as large as no message can carry
    return value
