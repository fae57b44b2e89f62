"""What is kept of an error: type, message and traceback, in a form that can be stored."""

import traceback

import msgspec

LONGEST_MESSAGE = 10_000  # characters
LONGEST_TRACEBACK = 20_000


def describe_exception(error: BaseException) -> str:
    """Return an exception as the JSON object that is kept of it."""
    kind = type(error).__qualname__
    return describe(kind, text_of(error) or kind, error)


def text_of(value: object) -> str:
    """Return the text of something that a handler raised: it may itself raise."""
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - it is the handler's
        return f"<its text raised {type(error).__name__}>"


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
