"""The messages of the PostgreSQL protocol, as far as a proxy must know them to name a moment."""

from dataclasses import dataclass
from enum import Enum

SSL_REQUEST = 80877103
GSSENC_REQUEST = 80877104
CANCEL_REQUEST = 80877102

STARTUP = "Startup"
COMMIT = "Commit"  # besides its own kind: of whatever makes a transaction commit

ASKED = {
    b"P": "Parse",
    b"B": "Bind",
    b"D": "Describe",
    b"E": "Execute",
    b"C": "Close",
    b"H": "Flush",
    b"S": "Sync",
    b"Q": "Query",
    b"X": "Terminate",
    b"p": "Password",
}
ANSWERED = {
    b"R": "Authentication",
    b"K": "BackendKeyData",
    b"S": "ParameterStatus",
    b"1": "ParseComplete",
    b"2": "BindComplete",
    b"3": "CloseComplete",
    b"t": "ParameterDescription",
    b"T": "RowDescription",
    b"n": "NoData",
    b"D": "DataRow",
    b"C": "CommandComplete",
    b"I": "EmptyQueryResponse",
    b"s": "PortalSuspended",
    b"E": "ErrorResponse",
    b"N": "NoticeResponse",
    b"A": "NotificationResponse",
    b"Z": "ReadyForQuery",
}

_FAILED = {"ErrorResponse"}
# By what the server shows that it has carried out a message.
SHOWN_BY = {
    STARTUP: {"Authentication"} | _FAILED,
    "Parse": {"ParseComplete"} | _FAILED,
    "Bind": {"BindComplete"} | _FAILED,
    "Describe": {"RowDescription", "NoData"} | _FAILED,
    "Execute": {"CommandComplete", "EmptyQueryResponse", "PortalSuspended"} | _FAILED,
    "Close": {"CloseComplete"} | _FAILED,
    "Sync": {"ReadyForQuery"},
    "Query": {"ReadyForQuery"},
}
# The server answers these only when it is told to, and does so without a change of its state.
ANSWERED_ON_FLUSH = {"Parse", "Bind", "Describe", "Execute", "Close"}
FLUSH = b"H\0\0\0\4"


class When(Enum):
    """On which side of a message something happens."""

    BEFORE = "before"  # the server never gets it
    AFTER = "after"  # the server has carried it out, and the client is not told
    REPLY = "reply"  # before this answer reaches the client


@dataclass(frozen=True, slots=True)
class Message:
    """One message on its way; `kinds` are all the names it goes by, its own first."""

    kinds: tuple[str, ...]
    data: bytes
    text: str  # of the statement it belongs to


class Splitter:
    """Bytes → whole messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take in what arrived and return what is complete by now."""
        self._buffer += data
        whole, start = [], 0
        while start + 5 <= len(self._buffer):
            end = start + 1 + int.from_bytes(self._buffer[start + 1 : start + 5], "big")
            if end > len(self._buffer):
                break
            whole.append(bytes(self._buffer[start:end]))
            start = end
        del self._buffer[:start]
        return whole


class Conversation:
    """What one connection has said so far: enough to tell which message commits."""

    def __init__(self) -> None:
        self.text = ""
        self.backend_pid: int | None = None
        self._in_transaction = False
        self._executed = False
        self._statements: dict[bytes, str] = {}
        self._portals: dict[bytes, str] = {}

    def asked(self, data: bytes) -> Message:
        """Name a message of the client."""
        kind = ASKED.get(data[:1], repr(data[:1]))
        if kind == "Parse":
            name, text, _ = data[5:].split(b"\0", 2)
            self.text = self._statements[name] = text.decode(errors="replace")
        elif kind == "Bind":
            portal, name, _ = data[5:].split(b"\0", 2)
            self.text = self._portals[portal] = self._statements.get(name, "")
        elif kind == "Execute":
            self.text = self._portals.get(data[5 : data.index(b"\0", 5)], "")
            self._executed = True
        elif kind == "Query":
            self.text = data[5:-1].decode(errors="replace")
        kinds = (kind, COMMIT) if self._commits(kind) else (kind,)
        if kind == "Sync":
            self._executed = False
        return Message(kinds, data, self.text)

    def answered(self, data: bytes) -> Message:
        """Name a message of the server."""
        kind = ANSWERED.get(data[:1], repr(data[:1]))
        if kind == "ReadyForQuery":
            self._in_transaction = data[5:6] != b"I"
        elif kind == "BackendKeyData":
            self.backend_pid = int.from_bytes(data[5:9], "big")
        return Message((kind,), data, self.text)

    def _commits(self, kind: str) -> bool:
        verb = self.text.lstrip().upper()
        if self._in_transaction:
            return kind in {"Query", "Execute"} and verb.startswith(("COMMIT", "END"))
        if kind == "Query":
            return not verb.startswith(("BEGIN", "START TRANSACTION"))
        return kind == "Sync" and self._executed
