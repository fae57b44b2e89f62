"""How large a value may be, and how one is shown in a message."""

from datetime import timedelta

LONGEST_SECONDS = 100 * 366 * 86_400.0  # of any duration: a hundred years
LONGEST_RETENTION = 68 * 365 * 86_400.0  # seconds; the database counts them in 31 bits
MARGIN = 0.1  # part of a lease or a term at whose end it is no longer trusted
UNNOTICED_STEP = timedelta(seconds=3)  # of the store's clock, by whoever watches it
DEEPEST_VALUE = 200  # levels of lists and objects in a payload or result, as in check_payload
EXPIRED = "expired: it was not started in time"  # the reason of a cancellation
PROMOTE_BATCH = 1000  # tasks that become due, in one statement
HEAVIEST = 1000  # weight of a queue: above it one of weight 1 would hardly be served
LAST_SLOTS = 10  # of a schedule, kept for as long as it is
LOOKED_BACK = 100  # slots, for a task of a schedule that has not ended
CHANGED = "the schedule was changed before it was fired"
PAUSED = "the schedule was paused before it was fired"
RETIRED = "the schedule was retired before it was fired"
MISSED = "missed"
HELD = "held by another transaction"

_LONGEST_SHOWN = 100  # characters


def shown(value: object) -> str:
    """Return a value as a message names it: short, whatever it is."""
    try:
        text = str.__str__(repr(value))
    except BaseException:  # noqa: BLE001 - a value that was given may raise anything when looked at
        return f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
