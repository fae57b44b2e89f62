"""A small HTTP server in threads of its own, so that it answers also when the event loop does not."""

import socket
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from windlass.model.errors import ConfigurationError

SILENT_AT_MOST = 10.0  # seconds between two bytes of what a client wants


class Page(NamedTuple):
    """An answer."""

    status: HTTPStatus
    kind: str  # of content
    body: bytes


Pages = Mapping[str, Callable[[], Page]]


class Monitor:
    """Answers GET for a few paths. Each page is made in the thread of its request."""

    def __init__(self, host: str, port: int, pages: Pages) -> None:
        self._pages = pages
        try:
            self._server = _server_at(host, port)((host, port), _handler(lambda: self._pages))
        except OSError as error:
            raise ConfigurationError(
                f"health_port {port} on {host} cannot be listened on: {error}; choose another"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="windlass-monitor", daemon=True
        )

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    def show(self, pages: Pages) -> None:
        """Answer with other pages from now on."""
        self._pages = pages

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Answer no more."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client that is silent must not hold up the end

    def handle_error(self, *_: object) -> None:
        """Say nothing: a client went away before it had its answer."""


def _server_at(host: str, port: int) -> type[_Server]:
    """A server for addresses of the host's kind, IPv4 or IPv6."""
    kinds = [found[0] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    return type("_Server", (_Server,), {"address_family": kinds[0]})


def _handler(shown: Callable[[], Pages]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = SILENT_AT_MOST
        server_version = "windlass"
        sys_version = ""

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            pages = shown()
            make = pages.get(self.path.partition("?")[0])
            page = _nothing(pages) if make is None else make()
            self.send_response(page.status)
            self.send_header("Content-Type", page.kind)
            self.send_header("Content-Length", str(len(page.body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            if with_body:
                self.wfile.write(page.body)

        def log_message(self, *_: object) -> None:
            """Say nothing: probes come every few seconds."""

    return Handler


def _nothing(pages: Pages) -> Page:
    known = f"there are: {', '.join(sorted(pages))}\n"
    return Page(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", known.encode())
