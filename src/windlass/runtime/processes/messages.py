"""What a worker and its processes say to each other: frames of JSON, and never a pickle."""

import struct
from uuid import UUID

import msgspec

from windlass.model.failure import ErrorClass, ErrorFacts

LARGEST_FRAME = 256 << 20  # bytes; a result has 32 MiB at most, and escapes may make six of each
HEADER = struct.Struct("!I")


class Run(msgspec.Struct, tag="run", tag_field="message"):
    """Run a handler."""

    type: str
    module: str
    qualname: str
    payload: str
    task_id: UUID
    token: UUID
    generation: int
    fence: int
    attempt: int
    max_attempts: int
    queue: str
    worker_id: str
    timeout: float | None  # seconds
    keep_result: bool
    max_result_bytes: int
    error_paths: list[str]  # of attributes of errors that rules look at


class Cancel(msgspec.Struct, tag="cancel", tag_field="message"):
    """Let the handler that runs give way."""


class Leave(msgspec.Struct, tag="leave", tag_field="message"):
    """End."""


class Ready(msgspec.Struct, tag="ready", tag_field="message"):
    """What handlers need is imported."""


class Logged(msgspec.Struct, tag="logged", tag_field="message", omit_defaults=True):
    """A line for the log of the worker."""

    name: str
    level: int
    text: str
    created: float
    path: str
    line: int
    function: str | None
    process: int
    thread: str
    traceback: str | None = None
    extra: dict[str, str | int | float | bool | None] = {}


class Returned(msgspec.Struct, tag="returned", tag_field="message"):
    """The handler returned."""

    result: str | None  # JSON
    resident: int = 0  # bytes that the process holds


class Raised(msgspec.Struct, tag="raised", tag_field="message", omit_defaults=True):
    """What is kept of an exception: plain values, made in the process that raised it."""

    error: str = ""  # a JSON object: type, message, traceback, and the class if that is certain
    error_class: ErrorClass | None = None  # None: the rules of the worker decide, by the facts
    facts: ErrorFacts | None = None
    may_retry: bool | None = None  # what the task's own predicate said
    retry_after: float | None = None  # seconds
    snooze: float | None = None  # seconds
    put_off: str | None = None  # why, if it did not ask for that itself
    resident: int = 0  # bytes that the process holds


class Died(msgspec.Struct):
    """The process ended before it answered. Nobody sends this."""

    reason: str  # as in: its process …


Answer = Returned | Raised | Died  # to one Run
ToProcess = Run | Cancel | Leave
FromProcess = Ready | Logged | Returned | Raised

_encoder = msgspec.json.Encoder()
_to_process: msgspec.json.Decoder[ToProcess] = msgspec.json.Decoder(ToProcess)
_from_process: msgspec.json.Decoder[FromProcess] = msgspec.json.Decoder(FromProcess)


def frame(message: ToProcess | FromProcess) -> bytes:
    """A message as it is sent, behind its length."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def length(header: bytes) -> int:
    """How many bytes follow a header; ValueError if that can be none of ours."""
    (size,) = HEADER.unpack(header)
    if size > LARGEST_FRAME:
        raise ValueError(f"a message of {size} bytes is none of ours")
    return int(size)


def read_by_process(body: bytes) -> ToProcess:
    """Read what the worker sent."""
    return _to_process.decode(body)


def read_by_worker(body: bytes) -> FromProcess:
    """Read what a process sent; `msgspec.DecodeError` if it did not."""
    return _from_process.decode(body)
