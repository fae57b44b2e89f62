"""A dead letter as text, for somebody who was woken up by it."""

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from windlass.model.dead import DeadLetter

INDENT = "    "


def letter_lines(letter: DeadLetter) -> Iterator[str]:
    """What failed first, then how it came to that, then what it was about."""
    last: dict[str, Any] = letter.errors[-1] if letter.errors else {}
    yield f"{letter.type} in queue {letter.queue} is {letter.status}: {letter.error_class}"
    yield from _block(f"{last['type']}: {last['message']}" if last else letter.last_error or "")
    for name, value in _facts(letter).items():
        if value not in (None, ""):
            yield f"{name + ':':<17}{value}"
    for error in letter.errors:
        yield ""
        yield f"attempt {error['attempt']}: {_when(error)}, {_where(error)}"
        yield from _block(f"{error['type']}: {error['message']}")
    if last.get("traceback"):
        yield ""
        yield "traceback of the last attempt:"
        yield from _block(last["traceback"])
    yield ""
    yield "payload:"
    yield from _block(json.dumps(letter.payload, indent=2, ensure_ascii=False))


def _facts(letter: DeadLetter) -> dict[str, object]:
    return {
        "id": letter.id,
        "created": _time(letter.created_at),
        "ended": _time(letter.completed_at),
        "attempts": f"{letter.attempts} of {letter.max_attempts}",
        "worker": letter.worker_id,
        "priority": letter.priority,
        "tags": ", ".join(letter.tags),
        "idempotency key": letter.idempotency_key,
        "replay of": letter.replay_of and f"{letter.replay_of} (replay {letter.depth} of its line)",
        "replayed as": ", ".join(letter.replayed_as),
    }


def _when(error: dict[str, Any]) -> str:
    ended = datetime.fromisoformat(error["ended_at"])
    if not error.get("started_at"):
        return f"ended {_time(ended)}"
    started = datetime.fromisoformat(error["started_at"])
    return f"{_time(started)}, ran for {(ended - started).total_seconds():.3f} s"


def _where(error: dict[str, Any]) -> str:
    return f"worker {error['worker_id']}" if error["worker_id"] else "by no worker"


def _time(moment: datetime | None) -> str:
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S%z}"


def _block(text: str) -> Iterator[str]:
    for line in text.splitlines() or [""]:
        yield f"{INDENT}{line}"
