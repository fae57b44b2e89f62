import importlib
import json
import socket
import ssl
import subprocess
import urllib.error
import warnings
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.message import Message
from email.utils import format_datetime
from typing import Any

import aiohttp
import asyncpg
import botocore.exceptions
import django.db
import httpx
import psycopg
import pytest
import redis.exceptions
import requests
import sqlalchemy.exc
from aiohttp.client_reqrep import RequestInfo
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from windlass import ConfigurationError, PayloadError, StoreUnavailable
from windlass.failures.classifier import Classifier
from windlass.failures.facts import LONGEST_RETRY_AFTER, facts_of, names_of

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
CLASSIFIER = Classifier()


def by_httpx(status: int, headers: dict[str, str]) -> Exception:
    request = httpx.Request("GET", "http://example.org")
    response = httpx.Response(status, headers=headers, request=request)
    return httpx.HTTPStatusError("no", request=request, response=response)


def by_requests(status: int, headers: dict[str, str]) -> Exception:
    response = requests.Response()
    response.status_code = status
    response.headers.update(headers)
    return requests.HTTPError("no", response=response)


def by_aiohttp(status: int, headers: dict[str, str]) -> Exception:
    kept = CIMultiDictProxy(CIMultiDict(headers))
    url = URL("http://example.org")
    info = RequestInfo(url, "GET", CIMultiDictProxy(CIMultiDict()), url)
    return aiohttp.ClientResponseError(info, (), status=status, headers=kept)


def by_botocore(status: int, headers: dict[str, str]) -> Exception:
    said = {key.lower(): value for key, value in headers.items()}
    metadata = {"HTTPStatusCode": status, "HTTPHeaders": said}
    error = {"Code": "Odd", "Message": "no"}
    answer: Any = {"Error": error, "ResponseMetadata": metadata}
    error_raised: Exception = botocore.exceptions.ClientError(answer, "GetObject")
    return error_raised


def by_urllib(status: int, headers: dict[str, str]) -> Exception:
    message = Message()
    for key, value in headers.items():
        message[key] = value
    return urllib.error.HTTPError("http://example.org", status, "no", message, None)


CLIENTS = [by_httpx, by_requests, by_aiohttp, by_botocore, by_urllib]
Made = Callable[[int, dict[str, str]], Exception]


@pytest.mark.parametrize("made", CLIENTS)
@pytest.mark.parametrize(
    ("status", "error_class"),
    [
        (429, "rate-limited"),
        (503, "transient"),
        (500, "transient"),
        (408, "transient"),
        (404, "permanent-input"),
        (422, "permanent-input"),
        (501, "permanent-input"),
    ],
)
def test_the_status_decides_whatever_the_client(made: Made, status: int, error_class: str) -> None:
    facts = CLASSIFIER.facts_of(made(status, {}), NOW)

    assert facts.status == status
    assert CLASSIFIER.classify(facts).error_class == error_class


@pytest.mark.parametrize("made", CLIENTS)
@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "120"}, 120),
        ({"Retry-After": " 0 "}, None),  # no wish: the backoff of the task decides
        ({"Retry-After": "1.5"}, 1.5),
        ({"Retry-After": "-5"}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": str(10**9)}, LONGEST_RETRY_AFTER),
        ({"Retry-After": format_datetime(NOW + timedelta(minutes=5), usegmt=True)}, 300),
        ({"Retry-After": format_datetime(NOW - timedelta(minutes=5), usegmt=True)}, None),
        # A server whose clock is wrong says both by the same clock.
        (
            {
                "Retry-After": format_datetime(NOW + timedelta(hours=1), usegmt=True),
                "Date": format_datetime(NOW + timedelta(minutes=59), usegmt=True),
            },
            60,
        ),
        ({"Retry-After": "30", "Date": "yesterday"}, 30),
    ],
)
def test_a_retry_after_is_found_in_either_form(
    made: Made, headers: dict[str, str], seconds: float | None
) -> None:
    assert facts_of(made(503, headers), now=NOW).retry_after == seconds


class OddError(Exception):
    def __init__(self, **attributes: object) -> None:
        super().__init__("odd")
        self.__dict__.update(attributes)


def caused_by(error: Exception) -> Exception:
    wrapper: Exception = django.db.OperationalError("x")
    wrapper.__cause__ = error
    return wrapper


def kafka_error(name: str) -> Exception:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what its import says of Python is not ours to mend
        error: Exception = getattr(importlib.import_module("kafka.errors"), name)()
    return error


def throttled(code: str) -> Exception:
    error = {"Code": code, "Message": "no"}
    answer: Any = {"Error": error, "ResponseMetadata": {"HTTPStatusCode": 400}}
    raised: Exception = botocore.exceptions.ClientError(answer, "PutItem")
    return raised


def database_error(kind: type[sqlalchemy.exc.DBAPIError], orig: Exception) -> Exception:
    return kind("SELECT 1", {}, orig)


@pytest.mark.parametrize(
    ("error", "error_class"),
    [
        (KeyError("x"), "code-bug"),
        (IndexError(), "code-bug"),
        (NameError(), "code-bug"),
        (UnboundLocalError(), "code-bug"),
        (AttributeError(), "code-bug"),
        (TypeError(), "code-bug"),
        (AssertionError(), "code-bug"),
        (SyntaxError(), "code-bug"),
        (IndentationError(), "code-bug"),
        (ModuleNotFoundError(), "code-bug"),
        (NotImplementedError(), "code-bug"),
        (RecursionError(), "code-bug"),
        (ValueError("x"), "unknown"),
        (RuntimeError("x"), "unknown"),
        (ZeroDivisionError(), "unknown"),
        (Exception(), "unknown"),
        (TimeoutError(), "transient"),
        (ConnectionResetError(), "transient"),
        (BrokenPipeError(), "transient"),
        (MemoryError(), "transient"),
        (socket.gaierror(), "transient"),
        (ssl.SSLError(), "transient"),
        (ssl.SSLCertVerificationError(), "permanent-input"),
        (subprocess.TimeoutExpired("x", 1), "transient"),
        (OSError(28, "no space"), "transient"),
        (OSError(24, "too many open files"), "transient"),
        (FileNotFoundError(2, "no such file"), "unknown"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "no"), "permanent-input"),
        (json.JSONDecodeError("x", "y", 0), "permanent-input"),
        (RuntimeError("Rate limit exceeded"), "rate-limited"),
        (RuntimeError("upstream timed out"), "transient"),
        (StoreUnavailable(), "transient"),
        (PayloadError(), "code-bug"),
        (ConfigurationError(), "code-bug"),
        (ExceptionGroup("several", [ConnectionResetError(), TimeoutError()]), "transient"),
        (ExceptionGroup("several", [ConnectionResetError(), KeyError()]), "unknown"),
        (httpx.ConnectError("x"), "transient"),
        (httpx.ReadTimeout("x"), "transient"),
        (httpx.UnsupportedProtocol("x"), "permanent-input"),
        (requests.ConnectionError(), "transient"),
        (requests.ReadTimeout(), "transient"),
        (requests.exceptions.MissingSchema(), "permanent-input"),
        (aiohttp.ServerDisconnectedError(), "transient"),
        (aiohttp.ClientPayloadError(), "transient"),
        (aiohttp.ServerTimeoutError(), "transient"),
        (aiohttp.InvalidURL("x"), "permanent-input"),
        (urllib.error.URLError("x"), "transient"),
        (throttled("ThrottlingException"), "rate-limited"),
        (throttled("ProvisionedThroughputExceededException"), "rate-limited"),
        (throttled("ServiceUnavailable"), "transient"),
        (throttled("ValidationException"), "permanent-input"),
        (botocore.exceptions.EndpointConnectionError(endpoint_url="x"), "transient"),
        (botocore.exceptions.ReadTimeoutError(endpoint_url="x"), "transient"),
        (botocore.exceptions.ParamValidationError(report="x"), "code-bug"),
        (redis.exceptions.ConnectionError(), "transient"),
        (redis.exceptions.TimeoutError(), "transient"),
        (redis.exceptions.BusyLoadingError(), "transient"),
        (redis.exceptions.ResponseError("OOM command not allowed"), "transient"),
        (redis.exceptions.ResponseError("WRONGTYPE Operation against"), "code-bug"),
        (redis.exceptions.ResponseError("something else"), "unknown"),
        (redis.exceptions.AuthenticationError(), "unknown"),
        (kafka_error("KafkaConnectionError"), "transient"),
        (kafka_error("KafkaTimeoutError"), "transient"),
        (kafka_error("NotLeaderForPartitionError"), "transient"),
        (kafka_error("MessageSizeTooLargeError"), "permanent-input"),
        (psycopg.errors.SerializationFailure(), "transient"),
        (psycopg.errors.DeadlockDetected(), "transient"),
        (psycopg.errors.UniqueViolation(), "permanent-input"),
        (psycopg.errors.UndefinedTable(), "code-bug"),
        (psycopg.errors.InsufficientPrivilege(), "unknown"),
        (psycopg.OperationalError("connection failed"), "transient"),
        (asyncpg.SerializationError(), "transient"),
        (asyncpg.TooManyConnectionsError(), "transient"),
        (asyncpg.AdminShutdownError(), "transient"),
        (asyncpg.LockNotAvailableError(), "transient"),
        (asyncpg.NotNullViolationError(), "permanent-input"),
        (asyncpg.UndefinedColumnError(), "code-bug"),
        (asyncpg.InterfaceError("connection is closed"), "transient"),
        (
            database_error(sqlalchemy.exc.DBAPIError, psycopg.errors.DeadlockDetected()),
            "transient",
        ),
        (
            database_error(sqlalchemy.exc.IntegrityError, psycopg.errors.UniqueViolation()),
            "permanent-input",
        ),
        (sqlalchemy.exc.TimeoutError(), "transient"),
        (caused_by(psycopg.errors.UndefinedTable()), "code-bug"),
        (django.db.OperationalError("gone"), "transient"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_comes_of_an_exception_without_any_rule_of_the_user(
    error: Exception, error_class: str
) -> None:
    facts = CLASSIFIER.facts_of(error, NOW)

    assert CLASSIFIER.classify(facts).error_class == error_class


def test_the_longest_wait_of_a_group_is_that_of_the_group() -> None:
    group = ExceptionGroup(
        "several", [by_httpx(429, {"Retry-After": "5"}), by_httpx(429, {"Retry-After": "9"})]
    )

    assert facts_of(group, now=NOW).retry_after == 9


def test_a_class_goes_by_every_package_that_may_offer_it() -> None:
    assert {
        "aiohttp.client_exceptions.ClientError",
        "aiohttp.ClientError",
        "Exception",
        "builtins.Exception",
    } <= names_of(aiohttp.ClientConnectionError)


@pytest.mark.parametrize("status", [99, 600, True, "429", None, 4.5])
def test_what_is_no_status_is_not_taken_for_one(status: object) -> None:
    assert facts_of(OddError(status=status), now=NOW).status is None


def test_only_what_rules_ask_for_is_looked_at() -> None:
    error = OddError(errno=28, deep={"a": OddError(b="c")}, list=[1])

    facts = facts_of(error, now=NOW, paths=["errno", "deep.a.b", "deep.x", "list", "nothing"])

    assert facts.attributes == {"errno": 28, "deep.a.b": "c"}


class WildError(Exception):
    @property
    def response(self) -> object:
        raise SystemExit(3)

    @property
    def status(self) -> object:
        raise RuntimeError

    def __str__(self) -> str:
        raise KeyboardInterrupt


def test_an_exception_that_raises_when_looked_at_is_classified_all_the_same() -> None:
    facts = CLASSIFIER.facts_of(WildError(), NOW)

    assert facts.status is None
    assert "raised KeyboardInterrupt" in facts.message
    assert CLASSIFIER.classify(facts).error_class == "unknown"


def test_a_group_without_end_is_looked_at_for_some_levels() -> None:
    group: Exception = KeyError()
    for _ in range(50):
        group = ExceptionGroup("one", [group])

    assert CLASSIFIER.classify(CLASSIFIER.facts_of(group, NOW)).error_class == "unknown"
