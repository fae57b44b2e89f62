"""What happened, said once: `emit(event)`, from where it reaches the log."""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("windlass")
_counts: Counter[str] = Counter()
_counting = threading.Lock()  # the heart tells from a thread of its own

Watcher = Callable[[str, Any], None]
_watchers: tuple[Watcher, ...] = ()

LEVELS = {
    "lease.lost": logging.WARNING,
    "loop.blocked": logging.WARNING,
    "settlement.lost": logging.WARNING,
    "settlement.delayed": logging.WARNING,
    "settlement.refused": logging.WARNING,
    "settlement.abandoned": logging.WARNING,
    "store.unavailable": logging.WARNING,
    "clock.jumped": logging.WARNING,
    "breaker.held": logging.WARNING,
    "breaker.opened": logging.WARNING,
    "listener.lost": logging.WARNING,
    "listener.deaf": logging.WARNING,
    "server.restarted": logging.WARNING,
    "systemd.deaf": logging.WARNING,
    "migration.waiting": logging.WARNING,
    "claim.rescued": logging.WARNING,
    "leader.stepped_down": logging.WARNING,
    "worker.removed": logging.WARNING,
    "task.dead": logging.WARNING,
    "task.failed": logging.WARNING,
    "task.code_bug": logging.ERROR,
    "task.unknown_error": logging.WARNING,
    "task.unknown_type": logging.ERROR,
    "retry.undecided": logging.WARNING,
    "alarm.skipped": logging.WARNING,
    "alarm.failed": logging.WARNING,
    "dead.archived": logging.WARNING,
    "dead.dropped": logging.WARNING,
    "replay.refused": logging.WARNING,
    "schedule.skipped": logging.WARNING,
    "schedule.clock_set_back": logging.WARNING,
    "schedule.taken_over": logging.WARNING,
    "schedule.refused": logging.ERROR,
    "schedule.held": logging.WARNING,
    "thread.abandoned": logging.WARNING,
    "handler.abandoned": logging.WARNING,
    "handler.deadlocked": logging.WARNING,
    "handler.failed_late": logging.WARNING,
    "worker.stuck": logging.ERROR,
    "worker.held_up": logging.WARNING,
    "worker.exhausted": logging.WARNING,
    "process.died": logging.WARNING,
    "process.failed": logging.WARNING,
    "service.failed": logging.ERROR,
    "chore.failed": logging.ERROR,
}


def emit(event: str, **values: Any) -> None:
    """Say that something happened, in one line. Values never hold a payload, a result or a secret."""
    with _counting:
        _counts[event] += 1
    level = LEVELS.get(event, logging.INFO)
    if _log.isEnabledFor(level):
        said = " ".join(f"{key}={_shown(value)}" for key, value in values.items())
        _log.log(level, "%s %s", event, said)


def watch(watcher: Watcher) -> None:
    """Let somebody see what is told from here on."""
    global _watchers  # noqa: PLW0603 - the seam is one for the process, as the log is
    _watchers = (*_watchers, watcher)


def unwatch(watcher: Watcher) -> None:
    """Let them see no more."""
    global _watchers  # noqa: PLW0603
    _watchers = tuple(one for one in _watchers if one is not watcher)


def is_watched() -> bool:
    """Whether there is anybody to tell."""
    return bool(_watchers)


def tell(event: str, batch: Any) -> None:
    """Show what happens all the time, a batch at once, to whoever measures; it is not logged."""
    for watcher in _watchers:
        try:
            watcher(event, batch)
        except Exception:  # noqa: BLE001 - whatever is wrong with a measure, the work goes on
            _log.exception("%s could not be measured", event)


def counted(event: str) -> int:
    """How often it has happened in this process."""
    return _counts[event]


def _shown(value: object) -> object:
    if not isinstance(value, BaseException):
        return value
    # The lines after the first may show rows: PostgreSQL's DETAIL does.
    said, name = str(value).partition("\n")[0], type(value).__name__
    return f"{name}: {said}" if said else name
