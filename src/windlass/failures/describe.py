"""What is kept of an error: class, type, message and traceback, in a form that can be stored."""

import traceback

import msgspec

from windlass.model.attempt import Failed
from windlass.model.failure import ErrorClass

LONGEST_TYPE = 200  # characters
LONGEST_MESSAGE = 10_000
LONGEST_TRACEBACK = 20_000


def describe_exception(error: BaseException, error_class: ErrorClass) -> str:
    """Return an exception as the JSON object that is kept of it."""
    kind = type(error).__qualname__
    return describe(kind, text_of(error) or kind, error_class, error)


def failed(
    kind: str, message: str, error_class: ErrorClass, error: BaseException | None = None
) -> Failed:
    """Return the outcome of an attempt that failed in a way that needs no rule to be classified."""
    return Failed(describe(kind, message, error_class, error), error_class)


def failed_by(error: BaseException, error_class: ErrorClass) -> Failed:
    """Return the same for an exception, whatever a rule would say of it."""
    return Failed(describe_exception(error, error_class), error_class)


def text_of(value: object) -> str:
    """Return the text of something that a handler raised: it may itself raise, and anything."""
    try:
        return str.__str__(str(value))  # not of a subclass, whose methods may raise in their turn
    except BaseException as error:  # noqa: BLE001 - it is the handler's
        return f"<its text raised {type(error).__name__}>"


def describe(
    kind: str,
    message: str,
    error_class: ErrorClass | None = None,
    error: BaseException | None = None,
) -> str:
    """Return the JSON object that is kept of an error, cut to a bearable size."""
    kept = {"type": clean(kind, LONGEST_TYPE), "message": clean(message, LONGEST_MESSAGE)}
    if error_class is not None:
        kept["class"] = str(error_class)
    if error is not None and type(error).__module__ != "builtins":
        kept["module"] = clean(type(error).__module__, LONGEST_TYPE)
    if error is not None and error.__traceback__ is not None:
        try:
            lines = traceback.format_exception(error)
        except BaseException:  # noqa: BLE001 - what belongs to an error may itself raise
            lines = traceback.format_tb(error.__traceback__)
        kept["traceback"] = clean("".join(lines), LONGEST_TRACEBACK)
    return msgspec.json.encode(kept).decode()


def clean(text: str, longest: int) -> str:
    """Return a text that any store and any message can hold, cut to a bearable length."""
    # PostgreSQL holds neither the NUL character nor half of a surrogate pair.
    text = text.replace("\x00", "\\x00").encode("utf-8", "replace").decode()
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]} … {len(text) - longest} characters … {text[-longest // 2 :]}"
