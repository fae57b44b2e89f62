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
    if not parts.netloc.rpartition("@")[2] and "host" not in query and "service" in query:
        return f"the host of service '{query['service']}'"
    found = _hosts(parts, query, environment)
    if not found:
        port = (query.get("port") or environment.get("PGPORT") or DEFAULT_PORT).split(",")[0]
        return f"a local socket or localhost, port {port}"
    return ", ".join(_one_address(host, port) for host, port in found)


def several_hosts(url: str, environment: Mapping[str, str] = os.environ) -> list[tuple[str, int]]:
    """Return the hosts of a URL that names more than one, with their ports, as the driver does.

    Empty if they cannot be tried each by itself: of a service, or to find which one to prefer.
    """
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    asked = query.get("target_session_attrs", environment.get("PGTARGETSESSIONATTRS"))
    if "@" in parts.path or asked == "prefer-standby":
        return []
    if "service" in query or "PGSERVICE" in environment:
        return []
    found = _hosts(parts, query, environment)
    if len(found) < 2:
        return []
    return [(host.strip("[]"), int(port)) for host, port in found]


def _hosts(
    parts: SplitResult, query: Mapping[str, str], environment: Mapping[str, str]
) -> list[tuple[str, str]]:
    hosts = unquote(parts.netloc.rpartition("@")[2])
    ports = "" if hosts else query.get("port", "")
    named = (hosts or query.get("host", "") or environment.get("PGHOST", "")).split(",")
    otherwise = (ports or environment.get("PGPORT") or DEFAULT_PORT).split(",")
    if named == [""]:
        return []
    if len(otherwise) != len(named):
        otherwise = otherwise[:1] * len(named)
    return [
        _host_and_port(text, port, is_fixed=bool(ports))
        for text, port in zip(named, otherwise, strict=True)
    ]


def _host_and_port(text: str, port: str, *, is_fixed: bool) -> tuple[str, str]:
    match = None if text.startswith("/") else _HOST.fullmatch(text)
    if match is None:
        return text, port
    return match["host"], port if is_fixed or not match["port"] else match["port"]


def wanted_session(
    url: str, *, pooler: bool, environment: Mapping[str, str] = os.environ
) -> str | None:
    """Return which of its hosts a URL is to lead to, unless it, or who runs us, says so itself.

    One that takes writes: the names are those of libpq's target_session_attrs.
    """
    if parse_qs(urlsplit(url).query).keys() & {"target_session_attrs", "service"}:
        return None
    if environment.keys() & {"PGTARGETSESSIONATTRS", "PGSERVICE"}:
        return None
    if several_hosts(url, environment):
        return "read-write"
    # A role that may only read is no standby. A pooler has to be asked, which costs a round trip.
    return None if pooler else "primary"


def _one_address(host: str, port: str) -> str:
    if host.startswith("/"):
        return host if ".s.PGSQL." in host else f"{host}/.s.PGSQL.{port}"
    return f"{host}:{port}"


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
