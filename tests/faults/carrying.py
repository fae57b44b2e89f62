"""One connection through the proxy: messages carried both ways until a rule befalls one."""

import asyncio
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

from faults.messages import (
    ANSWERED_ON_FLUSH,
    CANCEL_REQUEST,
    FLUSH,
    GSSENC_REQUEST,
    SHOWN_BY,
    SSL_REQUEST,
    STARTUP,
    Conversation,
    Message,
    Splitter,
    When,
)
from faults.rules import Effect, Rule

CHUNK = 1 << 16
LAST_WORDS = 1.0  # seconds for what was said last to be taken by the peer
ABORTIVE = struct.pack("ii", 1, 0)  # a TCP connection is reset and not ended

Side = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Surroundings(Protocol):
    """What a connection asks of its proxy."""

    pass_cancellations: bool

    async def flowing(self) -> None:
        """Wait while everything is paused."""

    def met(self, when: When, message: Message) -> Rule | None:
        """Note a message and return the rule that befalls it."""

    async def connect_upstream(self) -> Side:
        """Open a connection to the server."""

    def forget(self, connection: "Connection") -> None:
        """Take note that a connection is over."""


class Connection:
    """One client, and the server's session behind it."""

    def __init__(self, proxy: Surroundings, number: int, client: Side) -> None:
        self.number = number
        self.talk = Conversation()
        self._proxy = proxy
        self._client = client
        self._server: Side | None = None
        self._passes = True
        self._cut = asyncio.Event()
        self._withheld: list[Message] | None = None  # answers, until the server has shown
        self._shown_by: set[str] = set()  # one of these
        self._shown = asyncio.Event()

    @property
    def backend_pid(self) -> int | None:
        """The process of the server's session, once it has begun."""
        return self.talk.backend_pid

    @property
    def client_pid(self) -> int:
        """The process of the client, on this machine."""
        wire = self._client[1].get_extra_info("socket")
        process, _, _ = struct.unpack(
            "3i", wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        return int(process)

    @property
    def is_half_open(self) -> bool:
        """Whether nothing passes any more and nobody was told."""
        return not self._passes and not self._cut.is_set()

    def cut(self) -> None:
        """Close both sides at once, whatever is under way."""
        self._passes = False
        self._cut.set()
        self._proxy.forget(self)
        self._abort()

    def half_open(self) -> None:
        """Swallow everything from now on, in both directions."""
        self._passes = False

    def leave_server(self) -> None:
        """Let the server find that nobody is there, and tell the client nothing."""
        self._passes = False
        if self._server is not None:
            _abort(self._server[1])

    async def run(self) -> None:
        """Carry messages until one side ends or the connection is cut."""
        pumps: list[asyncio.Task[None]] = []
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                beginning = await self._beginning()
                if beginning is not None and not self._cut.is_set():
                    self._server = server = await self._proxy.connect_upstream()
                    pumps = [
                        asyncio.create_task(self._pump_to_server(beginning, server[1])),
                        asyncio.create_task(self._pump_to_client(server[0])),
                    ]
                    await self._until_over(pumps)
        finally:
            for pump in pumps:
                pump.cancel()
            ends = await asyncio.gather(*pumps, return_exceptions=True)
            await self._close()
        for end in ends:
            if isinstance(end, Exception) and not isinstance(end, OSError):
                raise end  # a fault of the proxy's own

    async def _beginning(self) -> Message | None:
        """Read the first message, which has no type; none if it is not to be passed on."""
        reader, writer = self._client
        while True:
            head = await reader.readexactly(8)
            size, code = struct.unpack("!II", head)
            if code not in {SSL_REQUEST, GSSENC_REQUEST}:
                break
            writer.write(b"N")
        body = await reader.readexactly(size - 8)
        if code == CANCEL_REQUEST:
            if not self._proxy.pass_cancellations:
                return None
            return Message(("CancelRequest",), head + body, "")
        return Message((STARTUP,), head + body, "")

    async def _until_over(self, pumps: list[asyncio.Task[None]]) -> None:
        cut = asyncio.create_task(self._cut.wait())
        try:
            await asyncio.wait([cut, *pumps], return_when=asyncio.FIRST_COMPLETED)
            if self.is_half_open:
                await cut  # neither side learns that the other has gone
        finally:
            cut.cancel()

    async def _close(self) -> None:
        self._proxy.forget(self)
        for side in filter(None, (self._client, self._server)):
            side[1].close()
            if self._passes:
                with suppress(OSError, TimeoutError):
                    await asyncio.wait_for(side[1].wait_closed(), LAST_WORDS)
        self._abort()
        for side in filter(None, (self._client, self._server)):
            with suppress(OSError):
                await side[1].wait_closed()

    def _abort(self) -> None:
        for side in filter(None, (self._client, self._server)):
            _abort(side[1])

    # To the server

    async def _pump_to_server(self, beginning: Message, to: asyncio.StreamWriter) -> None:
        reader, splitter = self._client[0], Splitter()
        await self._carry_to_server([beginning], to)
        while data := await reader.read(CHUNK):
            await self._carry_to_server(map(self.talk.asked, splitter.feed(data)), to)

    async def _carry_to_server(self, messages: Iterable[Message], to: asyncio.StreamWriter) -> None:
        for message in messages:
            if rule := self._proxy.met(When.BEFORE, message):
                await self._undergo(rule)
            if rule := self._proxy.met(When.AFTER, message):
                await self._undergo_once_carried_out(rule, message, to)
            else:
                await self._send(message.data, to)
        if self._passes:
            await to.drain()

    async def _undergo_once_carried_out(
        self, rule: Rule, message: Message, to: asyncio.StreamWriter
    ) -> None:
        self._withheld = []
        self._shown_by = SHOWN_BY[message.kinds[0]]
        self._shown.clear()
        await self._send(message.data, to)
        if message.kinds[0] in ANSWERED_ON_FLUSH:
            await self._send(FLUSH, to)
        if self._passes:  # else there will be no answer
            await self._shown.wait()
        await self._undergo(rule)
        while self._withheld:  # more may come meanwhile, and must not overtake
            await self._tell(self._withheld.pop(0))
        self._withheld = None

    # To the client

    async def _pump_to_client(self, reader: asyncio.StreamReader) -> None:
        splitter = Splitter()
        while data := await reader.read(CHUNK):
            for message in map(self.talk.answered, splitter.feed(data)):
                await self._carry_to_client(message)
            if self._passes:
                await self._client[1].drain()

    async def _carry_to_client(self, message: Message) -> None:
        if self._withheld is None:
            await self._tell(message)
            return
        self._withheld.append(message)
        if message.kinds[0] in self._shown_by:
            self._shown.set()

    async def _tell(self, message: Message) -> None:
        if rule := self._proxy.met(When.REPLY, message):
            await self._undergo(rule)
        await self._send(message.data, self._client[1])

    async def _undergo(self, rule: Rule) -> None:
        """Suffer what the rule says."""
        rule.befell(self)
        if rule.effect is Effect.CUT:
            self.cut()
        elif rule.effect is Effect.HALF_OPEN:
            self.half_open()
        else:
            await rule.wait()

    async def _send(self, data: bytes, to: asyncio.StreamWriter) -> None:
        await self._proxy.flowing()
        if self._passes:
            to.write(data)


def _abort(writer: asyncio.StreamWriter) -> None:
    wire = writer.get_extra_info("socket")
    if wire is None or wire.fileno() < 0:
        return  # it is over, and asyncio fails to abort what ended while it was closing
    if wire.family != socket.AF_UNIX:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORTIVE)
    writer.transport.abort()
