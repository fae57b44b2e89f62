"""What somebody may have meant who typed a name that nobody knows."""

from collections.abc import Iterable
from difflib import get_close_matches

from windlass.model.limits import shown


def guess(name: str, known: Iterable[str]) -> str:
    """Return the end of a message: the known names that are spelled like this one, if any."""
    near = [shown(other) for other in get_close_matches(name, list(known))]
    return f"; did you mean {' or '.join(near)}?" if near else ""
