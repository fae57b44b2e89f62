"""How findings are put: their levels, and numbers, durations and lists for people."""

from collections.abc import Iterable, Sequence

from windlass.model.examination import Finding, Level, Server

SHOWN = 5  # of a list

_DURATIONS = ((86_400.0, "days"), (3_600.0, "h"), (60.0, "min"))
_SIZES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def note(check: str, found: str, advice: str) -> Finding:
    """Say something that is good to know."""
    return Finding(check, Level.NOTE, found, advice)


def warning(check: str, found: str, advice: str) -> Finding:
    """Say what will hurt."""
    return Finding(check, Level.WARNING, found, advice)


def error(check: str, found: str, advice: str) -> Finding:
    """Say what does not work, or is wrong already."""
    return Finding(check, Level.ERROR, found, advice)


def setting(server: Server, name: str, value: str) -> str:
    """Return the command that sets something for this role here, wherever else it was set."""
    return f'ALTER ROLE "{server.login}" IN DATABASE "{server.database}" SET {name} = {value}'


def or_ok(check: str, found: Sequence[Finding], otherwise: str) -> list[Finding]:
    """Return what was found, or that all is well."""
    return list(found) or [Finding(check, Level.OK, otherwise)]


def lasting(seconds: float) -> str:
    """Return a duration in its largest unit of which there are two at least."""
    for unit, name in _DURATIONS:
        if abs(seconds) >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    if abs(seconds) >= 10:
        return f"{seconds:.0f} s"
    return f"{seconds:.1f} s" if abs(seconds) >= 1 else f"{seconds * 1000:.0f} ms"


def size(number_of_bytes: int) -> str:
    """Return a size in its largest unit."""
    for unit, name in _SIZES:
        if number_of_bytes >= unit:
            return f"{number_of_bytes / unit:.0f} {name}"
    return f"{number_of_bytes} B"


def counted(number: int, thing: str) -> str:
    """Return how many there are."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def listed(things: Iterable[object]) -> str:
    """Return the first few, and how many there are beyond."""
    texts = [str(thing) for thing in things]
    more = len(texts) - SHOWN
    return ", ".join(texts[:SHOWN]) + (f" and {more} more" if more > 0 else "")
