from datetime import timedelta
from typing import Any

import pytest

from windlass import App, ConfigurationError
from windlass.model.task import Retention
from windlass.settings import Settings


def test_settings_come_from_arguments_then_the_environment_then_defaults() -> None:
    environment = {"WINDLASS_LEASE": "60", "WINDLASS_CONCURRENCY": "7", "HOME": "/"}

    settings = Settings.load({"concurrency": 9, "retention": timedelta(days=1)}, environment)

    assert (settings.lease, settings.concurrency, settings.retention) == (60.0, 9, 86400.0)
    assert settings.heartbeat == 10.0


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("True", True), ("1", True), ("FALSE", False), ("0", False)]
)
def test_yes_and_no_in_the_environment(text: str, value: bool) -> None:
    assert Settings.load({}, {"WINDLASS_AUTO_MIGRATE": text}).auto_migrate is value


def test_each_retention_is_its_own() -> None:
    app = App("memory:", retention=1, dead_retention=2, idempotency_retention=timedelta(seconds=3))

    assert app.settings.kept_for() == Retention(
        *(timedelta(seconds=seconds) for seconds in (1, 2, 3))
    )


def test_the_database_comes_from_the_argument_then_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WINDLASS_DATABASE_URL", "postgresql://h/d")

    assert App().url == "postgresql://h/d"
    assert App("memory:").url == "memory:"


def test_an_unknown_variable_is_named() -> None:
    with pytest.raises(ConfigurationError, match="WINDLASS_LEESE"):
        Settings.load({}, {"WINDLASS_LEESE": "60"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WINDLASS_LEASE", "soon"),
        ("WINDLASS_CONCURRENCY", "1.5"),
        ("WINDLASS_AUTO_MIGRATE", "perhaps"),
        ("WINDLASS_LEASE", "nan"),
        ("WINDLASS_CONCURRENCY", "0"),
        ("WINDLASS_LEASE", "-1"),
    ],
)
def test_an_invalid_value_is_named(name: str, value: str) -> None:
    with pytest.raises(
        ConfigurationError, match=name.removeprefix("WINDLASS_").lower() + "|" + name
    ):
        Settings.load({}, {name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("retention", timedelta(days=69 * 366)),
        ("dead_retention", timedelta.max),
        ("idempotency_retention", 1e15),
        ("lease", 10**400),
        ("ageing", 1e300),
        ("leader_term", 1e300),
        ("concurrency", 10**12),
        ("pool_size", 10**9),
        ("max_result_bytes", 2**40),
        ("max_payload_bytes", 2**25 + 1),
        ("pool_size", 1),
        ("concurrency", True),
    ],
)
def test_a_setting_that_the_database_could_not_hold_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=name):
        App("memory:", **{name: value})


def test_a_grace_for_unknown_types_is_off_or_at_least_a_lease() -> None:
    assert App("memory:").settings.unknown_type_grace == 0
    assert Settings.load({}, {"WINDLASS_UNKNOWN_TYPE_GRACE": "600"}).unknown_type_grace == 600
    assert App("memory:", unknown_type_grace=timedelta(seconds=30)).settings.lease == 30
    with pytest.raises(ConfigurationError, match=r"unknown_type_grace \(29s\) .* lease \(30s\)"):
        App("memory:", unknown_type_grace=29)


def test_a_lease_shorter_than_two_heartbeats_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="raise lease or lower heartbeat"):
        App("memory:", lease=5, heartbeat=2.6)
    assert App("memory:", lease=5, heartbeat=2.5).settings.lease == 5


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(ConfigurationError, match="leese"):
        App("memory:", leese=5)


@pytest.mark.parametrize(
    "schema", ["", "Windlass", "a b", "a;b", "1a", "a" * 64, 'a"b', "pg_a", "a\n", None]
)
def test_a_schema_name_that_would_need_quoting_is_refused_by_the_app_itself(schema: str) -> None:
    with pytest.raises(ConfigurationError, match="schema"):
        App("postgresql://h/d", schema=schema)
    with pytest.raises(ConfigurationError, match="schema"):
        App("memory:", schema=schema)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:hunter2@[::1/x",
        "postgresql://u:hunter2@[]/x",
        "postgresql://u:hunter2@h:abc/x",
        "postgresql://u:hunter2@h:99999/x",
        "postgresql://u:hunter2@h:0/x",
        "postgresql://u:hunter2@h1:1,h2:b/x",
        "postgresql://u:hunter2@h1,,h2/x",
        "postgresql://u:hunter2@/x?port=abc",
        "postgresql://u:hunter2@h/x?nonsense",
        "postgresql://u:hunter2@h/a%00b",
        "postgresql://u:hunter2@h\x00/x",
        "postgresql://u:hunter2@h\n/x",
        "postgresql://u:hunter2@h:5432:5433/x",
        # Characters of a password that are not encoded.
        "postgresql://u:hunter2#x@h/x",
        "postgresql://u:hunter2/x@h/x",
        "postgresql://u:hunter2?x@h/x",
        "postgresql://u:x@hunter2@h/x",
        "postgresql://u:[hunter2@h/x",
    ],
)
def test_a_malformed_url_is_refused_by_the_app_itself_and_not_repeated(url: str) -> None:
    for keywords in ({"url": url}, {"url": "memory:", "direct_url": url}):
        with pytest.raises(ConfigurationError, match=r"URL|direct_url") as raised:
            App(**keywords)
        assert "not valid" in str(raised.value)
        assert "hunter" not in str(raised.value)
        assert raised.value.__cause__ is None
        assert raised.value.__context__ is None


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://",
        "postgresql:///shop",
        "postgres://u@h/shop",
        "PostgreSQL://u@h/shop",
        "postgresql://u:%40%2F%3A@h:5432/shop?sslmode=require&connect_timeout=5",
        "postgresql://u@[::1]:5432,[fe80::1]/shop",
        "postgresql://u@h1:1,h2:2,h3/shop?target_session_attrs=read-write",
        "postgresql://u@/shop?host=/var/run/postgresql&port=5433",
        "postgresql://%2Fvar%2Frun%2Fpostgresql/shop",
    ],
)
def test_every_kind_of_url_that_libpq_knows_is_taken(url: str) -> None:
    assert App(url).url == url


@pytest.mark.parametrize("url", [5, b"postgresql://u:hunter2@h/x"])
def test_a_url_that_is_no_text_is_refused_and_not_repeated(url: Any) -> None:
    for keywords in ({"url": url}, {"url": "memory:", "direct_url": url}):
        with pytest.raises(ConfigurationError, match=r"(?i)url is of type") as raised:
            App(**keywords)
        assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("url", ["mysql://x", "nonsense", "sqlite:///a"])
def test_an_unknown_scheme_is_refused_by_the_app_itself(url: str) -> None:
    with pytest.raises(ConfigurationError, match="scheme"):
        App(url)


@pytest.mark.parametrize("empty", ["", " \n"])
def test_an_empty_url_is_said_to_be_empty_with_the_ways_out(
    empty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=r"the database URL is empty; give postgresql://"):
        App(empty)

    monkeypatch.setenv("WINDLASS_DATABASE_URL", empty)
    with pytest.raises(ConfigurationError, match=r"WINDLASS_DATABASE_URL is set but empty; give"):
        App()
