"""The URL of a database, looked at before the driver does."""

import os
import re
from collections.abc import Mapping
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from windlass.model.errors import ConfigurationError

SCHEMES = ("postgresql", "postgres")
DEFAULT_PORT = "5432"
_HOST = re.compile(r"(?P<host>\[[^\[\]]+\]|[^\[\]:]*)(?::(?P<port>.*))?")


def checked_url(what: str, url: str) -> str:
    """Return a URL that the driver can read, or raise.

    The message repeats nothing of it: what looks like a port may be half of a password.
    """
    wrong = _wrong_with(url)
    if wrong is not None:
        raise ConfigurationError(
            f"{what} is not valid: {wrong}; write postgresql://user:password@host:port/database, "
            "with %40 for an @ in the password, %2F for a /, %3A for a :, %3F for a ?, %23 for a #"
        )
    return url


def address(url: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return where a URL that was checked leads to, as the driver reads it: hosts or sockets.

    Empty if it cannot be told from a part of a password.
    """
    parts = urlsplit(url)
    if "@" in parts.path:
        return ""  # the password may hold a '/': then what looks like a host and port is its half
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    hosts = unquote(parts.netloc.rpartition("@")[2])
    ports = "" if hosts else query.get("port", "")
    hosts = hosts or query.get("host", "")
    if not hosts and "service" in query:
        return f"the host of service '{query['service']}'"
    hosts = hosts or environment.get("PGHOST", "")
    otherwise = (ports or environment.get("PGPORT") or DEFAULT_PORT).split(",")
    if not hosts:
        return f"a local socket or localhost, port {otherwise[0]}"
    named = hosts.split(",")
    if len(otherwise) != len(named):
        otherwise = otherwise[:1] * len(named)
    return ", ".join(
        _one_address(host, port, is_fixed=bool(ports))
        for host, port in zip(named, otherwise, strict=True)
    )


def _one_address(text: str, port: str, *, is_fixed: bool) -> str:
    if text.startswith("/"):
        return text if ".s.PGSQL." in text else f"{text}/.s.PGSQL.{port}"
    match = _HOST.fullmatch(text)
    if match is None or is_fixed or not match["port"]:
        return f"{match['host'] if match else text}:{port}"
    return text


def _wrong_with(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        query = parse_qs(parts.query, strict_parsing=True) if parts.query else {}
    except ValueError:
        return "its host, or what follows a '?', cannot be read"
    if parts.scheme not in SCHEMES:
        return "it does not begin with postgresql://"
    if "\0" in unquote(url) or not url.isprintable():
        return "it holds a control character"
    if parts.fragment:
        return "it holds a '#'"
    if parts.netloc.count("@") > 1:
        return "it holds more than one '@'"
    return _wrong_with_hosts(parts, query)


def _wrong_with_hosts(parts: SplitResult, query: dict[str, list[str]]) -> str | None:
    hosts = parts.netloc.rpartition("@")[2].split(",")
    ports = [port for given in query.get("port", ()) for port in given.split(",")]
    for host in hosts:
        match = _HOST.fullmatch(host)
        if match is None or (not host and len(hosts) > 1):
            return "one of its hosts cannot be read"
        ports.append(unquote(match["port"] or ""))
    if not all(map(_is_port, filter(None, ports))):
        return "what follows the ':' of a host is not a port from 1 to 65535"
    return None


def _is_port(text: str) -> bool:
    return re.fullmatch("[0-9]{1,5}", text) is not None and 1 <= int(text) <= 65535
