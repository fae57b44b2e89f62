import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass import ConfigurationError, Retry
from windlass.policy.retry import delay_as_asked, delay_before


@pytest.mark.parametrize(
    ("retry", "delays"),
    [
        (Retry(backoff="fixed", base=3, jitter="none"), [3, 3, 3]),
        (Retry(backoff="linear", base=3, jitter="none"), [3, 6, 9]),
        (Retry(backoff="exponential", base=3, jitter="none"), [3, 6, 12]),
        (Retry(backoff="exponential", base=3, ceiling=10, jitter="none"), [3, 6, 10]),
        (Retry(backoff="exponential", base=1, multiplier=3, jitter="none"), [1, 3, 9]),
        (Retry(backoff="exponential", base=4, multiplier=1, jitter="none"), [4, 4, 4]),
        (Retry(backoff="fixed", base=4, jitter="equal"), [3, 3, 3]),
    ],
)
def test_each_backoff_grows_in_its_own_way(retry: Retry, delays: list[float]) -> None:
    assert [delay_before(retry, attempt, 0.5) for attempt in (1, 2, 3)] == delays


@given(
    attempt=st.integers(1, 30_000),
    draw=st.floats(0, 1, exclude_max=True),
    multiplier=st.floats(1, 1000),
)
def test_equal_jitter_is_at_least_half_of_the_pause(
    attempt: int, draw: float, multiplier: float
) -> None:
    plain = Retry(jitter="none", multiplier=multiplier)
    pause = delay_before(plain, attempt, draw)

    assert pause / 2 <= delay_before(replace(plain, jitter="equal"), attempt, draw) <= pause <= 3600


@given(seconds=st.floats(0, 86_400), draw=st.floats(0, 1, exclude_max=True))
def test_what_the_other_side_asks_for_is_spread_after_it_and_never_before(
    seconds: float, draw: float
) -> None:
    assert seconds <= delay_as_asked(seconds, draw) <= seconds + min(1, seconds / 10)


@given(attempt=st.integers(1, 30_000), draw=st.floats(0, 1, exclude_max=True))
def test_full_jitter_stays_below_the_ceiling(attempt: int, draw: float) -> None:
    assert 0 <= delay_before(Retry(), attempt, draw) <= Retry().ceiling


def test_jitter_is_a_part_of_the_pause_that_the_ceiling_allows() -> None:
    assert delay_before(Retry(base=100, ceiling=10, jitter="full"), 1, 0.5) == 5


def test_the_default_is_four_attempts_from_two_seconds_to_an_hour() -> None:
    assert Retry() == Retry(4, "exponential", 2, 3600, "full")


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"max_attempts": True},
        {"max_attempts": 2.5},
        {"max_attempts": 30_001},
        {"backoff": "quadratic"},
        {"jitter": "half"},
        {"base": -1},
        {"multiplier": 0.5},
        {"multiplier": float("nan")},
        {"multiplier": "2"},
        {"multiplier": 10**5000},
        {"when": "never"},
        {"when": asyncio.sleep},
        {"base": float("nan")},
        {"ceiling": float("inf")},
        {"base": "2"},
        {"base": None},
        {"base": True},
        {"base": timedelta(seconds=2)},
        {"ceiling": 1e300},
        {"ceiling": 10**5000},
    ],
)
def test_a_wrong_value_is_named(wrong: dict[str, object]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigurationError, match=name):
        Retry(**wrong)  # type: ignore[arg-type]  # on purpose
