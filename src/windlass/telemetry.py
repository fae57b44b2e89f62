"""What happened, said once: `emit(event)`. Logs and whoever else is interested subscribe."""

import logging
from collections.abc import Callable
from typing import Any

Subscriber = Callable[[str, dict[str, Any]], None]

_log = logging.getLogger("windlass")
_subscribers: list[Subscriber] = []

_LEVELS = {
    "lease.lost": logging.WARNING,
    "settlement.lost": logging.WARNING,
    "settlement.delayed": logging.WARNING,
    "store.unavailable": logging.WARNING,
    "listener.lost": logging.WARNING,
    "claim.rescued": logging.WARNING,
    "worker.removed": logging.WARNING,
    "task.dead": logging.WARNING,
    "thread.abandoned": logging.WARNING,
    "service.failed": logging.ERROR,
    "chore.failed": logging.ERROR,
}


def emit(event: str, **values: Any) -> None:
    """Say that something happened. Values never hold a payload, a result or a secret."""
    level = _LEVELS.get(event, logging.INFO)
    if _log.isEnabledFor(level):
        _log.log(level, "%s %s", event, " ".join(f"{key}={value}" for key, value in values.items()))
    for subscriber in _subscribers:
        subscriber(event, values)


def subscribe(subscriber: Subscriber) -> Callable[[], None]:
    """Be told of every event; call what is returned to stop."""
    _subscribers.append(subscriber)
    return lambda: _subscribers.remove(subscriber)
