"""What a limit is made of, and what a bucket of tokens lets through."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass import ConfigurationError, Limit
from windlass.policy.limit import Bucket, per_second, usual_burst


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("10/s", 10),
        ("0.5/s", 0.5),
        ("120/m", 2),
        ("120/min", 2),
        ("3600/h", 1),
        ("5/10s", 0.5),
        (" 100 / second ", 100),
        (7, 7),
        (0.25, 0.25),
    ],
)
def test_a_rate_is_read(text: Any, rate: float) -> None:
    assert per_second("rate", text) == rate


@pytest.mark.parametrize(
    "given_rate",
    [
        *[
            "",
            "10",
            "10/",
            "/s",
            "ten/s",
            "10/y",
            "-1/s",
            "0/s",
            "1/0s",
            "1e9/s",
            "10000000000/s",
            "٣/s",
        ],
        *[0, -1, True, float("nan"), float("inf"), None, [], 10**400],
    ],
    ids=lambda one: str(one)[:20],
)
def test_what_is_no_rate_is_refused_with_a_way_out(given_rate: Any) -> None:
    with pytest.raises(ConfigurationError, match=r'queue \'mail\': rate .*write it as "10/s"'):
        per_second("queue 'mail': rate", given_rate)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "limits nothing"),
        ({"concurrency": 0}, "concurrency 0"),
        ({"concurrency": True}, "concurrency True"),
        ({"concurrency": "3"}, "concurrency '3'"),
        ({"rate": "fast"}, "rate 'fast'"),
        ({"concurrency": 3, "burst": 2}, "give rate= too"),
        ({"rate": "3/s", "burst": 0.5}, "burst 0.5"),
        ({"rate": "3/s", "burst": float("nan")}, "burst nan"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Limit(**options)


def test_a_burst_is_a_tenth_of_a_second_and_one_at_least() -> None:
    assert usual_burst(0.01) == 1
    assert usual_burst(1000) == 100


def test_a_bucket_fills_up_to_its_burst() -> None:
    bucket = Bucket(0.0, 100.0)

    assert bucket.at(100.5, 2, 3).tokens == 1
    assert bucket.at(1000, 2, 3).tokens == 3


def test_a_bucket_is_full_once_the_clock_was_set_back() -> None:
    assert Bucket(0.0, 100.0).at(50.0, 2, 3) == Bucket(3, 50.0)


def test_an_empty_bucket_says_when_it_is_worth_to_ask_again() -> None:
    assert Bucket(1.0, 0.0).more_in(10, 1) is None
    assert Bucket(0.5, 0.0).more_in(10, 1) == pytest.approx(0.05)
    assert Bucket(0.0, 0.0).more_in(1000, 100) == pytest.approx(0.05)
    assert Bucket(0.0, 0.0).more_in(1000, 1) == pytest.approx(0.001)


@given(
    rate=st.floats(0.01, 10_000),
    burst=st.floats(1, 1000),
    steps=st.lists(st.tuples(st.floats(0, 5), st.integers(0, 50)), max_size=40),
)
def test_no_stretch_of_time_has_more_than_its_rate_and_a_burst(
    rate: float, burst: float, steps: list[tuple[float, int]]
) -> None:
    bucket, now = Bucket(burst, 0.0), 0.0
    taken: list[tuple[float, int]] = []
    for pause, wanted in steps:
        now += pause
        bucket = bucket.at(now, rate, burst)
        number = min(wanted, bucket.whole)
        bucket = bucket._replace(tokens=bucket.tokens - number)
        taken.append((now, number))

    for first, (since, _) in enumerate(taken):
        for until, _ in taken[first:]:
            within = sum(number for moment, number in taken[first:] if moment <= until)
            assert within <= burst + rate * (until - since) + 1e-3
