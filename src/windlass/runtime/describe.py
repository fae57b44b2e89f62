"""What is kept of an error: type, message and traceback, in a form that can be stored."""

import traceback

import msgspec

LONGEST_MESSAGE = 10_000  # characters
LONGEST_TRACEBACK = 20_000


def describe_exception(error: BaseException) -> str:
    """Return an exception as the JSON object that is kept of it."""
    try:
        message = str(error)
    except Exception as unprintable:  # noqa: BLE001 - the text of an error may itself raise
        message = f"<its text raised {type(unprintable).__name__}>"
    return describe(type(error).__qualname__, message, error)


def describe(kind: str, message: str, error: BaseException | None = None) -> str:
    """Return the JSON object that is kept of an error, cut to a bearable size."""
    kept = {"type": kind, "message": _clean(message, LONGEST_MESSAGE)}
    if error is not None and error.__traceback__ is not None:
        try:
            lines = traceback.format_exception(error)
        except Exception:  # noqa: BLE001 - the text of an error may itself raise
            lines = traceback.format_tb(error.__traceback__)
        kept["traceback"] = _clean("".join(lines), LONGEST_TRACEBACK)
    return msgspec.json.encode(kept).decode()


def _clean(text: str, longest: int) -> str:
    if len(text) > longest:
        text = (
            f"{text[: longest // 2]} … {len(text) - longest} characters … {text[-longest // 2 :]}"
        )
    # PostgreSQL holds neither the NUL character nor half of a surrogate pair.
    return text.replace("\x00", "\\x00").encode("utf-8", "replace").decode()
