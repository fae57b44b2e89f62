"""Where a URL leads to is said as the driver reads it, and never with a secret."""

import pytest

from windlass.model.errors import StoreUnavailable
from windlass.store.postgres.parts import PACKAGE
from windlass.store.postgres.statements import Statements
from windlass.store.postgres.url import address, several_hosts, wanted_session
from windlass.store.sqlfiles import SqlFiles


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://u:hunter2@db.example/shop", "db.example:5432"),
        ("postgresql://u:hunter2@db.example:6543/shop?password=hunter2", "db.example:6543"),
        ("postgresql://u:hunter2@[::1]:1/shop", "[::1]:1"),
        ("postgresql://u:hunter2@h1:1,h2/shop", "h1:1, h2:5432"),
        ("postgresql://u:hunter2@h:1/shop?host=other&port=2", "h:1"),
        ("postgresql://u@/shop?host=h1,h2&port=1,2", "h1:1, h2:2"),
        ("postgresql://u@/shop?host=h1,h2&port=1", "h1:1, h2:1"),
        ("postgresql://u@/shop?host=h:1&port=2", "h:2"),
        ("postgresql://u@/shop?host=/run/pg&port=5433", "/run/pg/.s.PGSQL.5433"),
        ("postgresql://u@/shop?host=%2Frun%2Fa%2520b&port=5432", "/run/a%20b/.s.PGSQL.5432"),
        ("postgresql://%2Frun%2Fpg/shop", "/run/pg/.s.PGSQL.5432"),
        ("postgresql://u@/shop?host=/run/.s.PGSQL.1", "/run/.s.PGSQL.1"),
        ("postgresql:///shop", "a local socket or localhost, port 5432"),
        ("postgresql:///shop?service=shop", "the host of service 'shop'"),
    ],
)
def test_a_url_is_named_by_its_host_and_port_or_its_socket(url: str, said: str) -> None:
    assert address(url, {}) == said


def test_what_the_url_leaves_out_comes_from_the_environment_as_for_the_driver() -> None:
    environment = {"PGHOST": "h1,h2", "PGPORT": "1,2"}

    assert address("postgresql:///shop", environment) == "h1:1, h2:2"
    assert address("postgresql://h/shop", environment) == "h:1"


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("postgresql://u:hunter2@h1:1,h2/shop", [("h1", 1), ("h2", 5432)]),
        ("postgresql://[::1]:1,[::2]/shop", [("::1", 1), ("::2", 5432)]),
        ("postgresql://u@/shop?host=h1,h2&port=1,2", [("h1", 1), ("h2", 2)]),
        ("postgresql://u@/shop?host=%2Fa%2C%2Fb&port=7", [("/a", 7), ("/b", 7)]),
        ("postgresql://h1/shop?host=h2,h3", []),
        ("postgresql://h1,h2/shop?target_session_attrs=prefer-standby", []),
        ("postgresql://h1/shop", []),
        ("postgresql:///shop", []),
        ("postgresql:///shop?service=shop", []),
    ],
)
def test_several_hosts_are_told_apart(url: str, hosts: list[tuple[str, int]]) -> None:
    assert several_hosts(url, {}) == hosts


@pytest.mark.parametrize(
    ("url", "pooler", "wanted"),
    [
        ("postgresql://h1,h2/shop", False, "read-write"),
        ("postgresql://h1,h2/shop", True, "read-write"),
        ("postgresql://u@/shop?host=h1,h2", False, "read-write"),
        ("postgresql://h1/shop", False, "primary"),
        ("postgresql://h1/shop", True, None),
        ("postgresql://h1,h2/shop?target_session_attrs=any", False, None),
        ("postgresql:///shop?service=shop", False, None),
    ],
)
def test_a_url_leads_to_a_host_that_takes_writes_unless_it_says_otherwise(
    url: str, pooler: bool, wanted: str | None
) -> None:
    assert wanted_session(url, pooler=pooler, environment={}) == wanted
    decided = {"PGTARGETSESSIONATTRS": "any"}
    assert wanted_session(url, pooler=pooler, environment=decided) is None


def test_half_of_a_password_that_looks_like_a_port_is_not_named() -> None:
    assert address("postgresql://u:4711/secret@h/shop", {}) == ""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionRefusedError("no"), "ConnectionRefusedError: no"),
        (TimeoutError(), "TimeoutError"),
    ],
)
async def test_a_pool_that_has_lost_its_server_names_it(error: OSError, reason: str) -> None:
    class Pool:
        async def acquire(self) -> None:
            raise error

    run = Statements(SqlFiles(PACKAGE, "windlass"), "postgresql://u:hunter2@db:1/shop")
    run.pool = Pool()

    with pytest.raises(StoreUnavailable) as raised:
        await run.fetch("probe")

    assert str(raised.value) == f"the database at db:1 cannot be reached: {reason}"
