import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass import Budget, ConfigurationError, Retry
from windlass.policy.budget import Account


def begun(account: Account, number: int, *, now: float, is_retry: bool = False) -> int:
    return sum(account.begin(is_retry=is_retry, now=now) for _ in range(number))


def test_retries_are_a_share_of_first_attempts() -> None:
    account = Account(Budget(share=0.2, window=60, at_least=1))
    begun(account, 100, now=0)

    assert begun(account, 50, now=1, is_retry=True) == 20
    assert begun(account, 50, now=2, is_retry=True) == 0
    begun(account, 10, now=3)
    assert begun(account, 50, now=3, is_retry=True) == 2


def test_what_was_long_ago_counts_no_more() -> None:
    account = Account(Budget(share=0.5, window=60, at_least=1))
    begun(account, 100, now=0)
    assert begun(account, 100, now=1, is_retry=True) == 50

    assert begun(account, 100, now=61, is_retry=True) == 1
    begun(account, 10, now=61)
    assert begun(account, 100, now=61, is_retry=True) == 4


def test_some_retries_are_allowed_without_any_first_attempt() -> None:
    account = Account(Budget(share=0.1, window=10, at_least=3))

    assert [begun(account, 5, now=at, is_retry=True) for at in (0, 5, 10, 20)] == [3, 0, 3, 3]


@given(
    share=st.floats(0, 2),
    at_least=st.integers(1, 20),
    attempts=st.lists(st.tuples(st.booleans(), st.floats(0, 5)), max_size=200),
)
def test_no_window_has_more_retries_than_its_budget(
    share: float, at_least: int, attempts: list[tuple[bool, float]]
) -> None:
    account = Account(Budget(share=share, window=10, at_least=at_least))
    now, firsts, retries = 0.0, list[float](), list[float]()
    for is_retry, pause in attempts:
        now += pause
        begins = account.begin(is_retry=is_retry, now=now)
        if not is_retry:
            assert begins
            firsts.append(now)
        elif begins:
            retries.append(now)
            # A part of the window is forgotten as a whole: up to a tenth of it before its time.
            recent = [at for at in retries if at > now - 9]
            seen = [at for at in firsts if at > now - 10]
            assert len(recent) < max(len(seen) * share, at_least) + 1


@given(draw=st.floats(0, 1, exclude_max=True))
def test_what_waits_asks_again_soon(draw: float) -> None:
    assert 3 <= Account(Budget(window=60)).wait(draw) <= 9


def test_those_that_wait_come_back_at_different_moments() -> None:
    account = Account(Budget(window=60))

    assert [account.wait(draw) for draw in (0.0, 0.25, 0.75)] == [3.0, 4.5, 7.5]


@pytest.mark.parametrize(
    "given",
    [
        {"share": 0, "window": 1, "at_least": 1},
        {"share": 100, "window": 86_400, "at_least": 1_000_000},
    ],
)
def test_a_budget_may_be_as_large_and_as_small_as_is_said(given: dict[str, int]) -> None:
    Budget(**given)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"share": -1}, "share"),
        ({"share": 100.1}, "share"),
        ({"share": float("nan")}, "share"),
        ({"share": "0.2"}, "share"),
        ({"window": 0.9}, "window"),
        ({"window": 86_401}, "window"),
        ({"window": None}, "window"),
        ({"at_least": 0}, "at_least"),
        ({"at_least": 1.5}, "at_least"),
        ({"at_least": 1_000_001}, "at_least"),
    ],
)
def test_a_wrong_budget_is_named(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"retry: budget {said}"):
        Budget(**wrong)  # type: ignore[arg-type]  # on purpose


def test_a_share_stands_for_a_budget() -> None:
    assert Retry(budget=0.5).budget == Budget(share=0.5)
    with pytest.raises(ConfigurationError, match="retry: budget 'much'"):
        Retry(budget="much")  # type: ignore[arg-type]  # on purpose
