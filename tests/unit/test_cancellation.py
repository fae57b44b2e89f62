"""Why and by whom, in one text: what was put into it is read out of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.model.cancellation import Cancellation, cancelled_by, may_be_by
from windlass.model.limits import EXPIRED

PIECES = st.sampled_from(["(asked for by ", "(", ")", " ", "ops", "\n", "ü"])
TEXTS = st.lists(PIECES).map("".join) | st.text()


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (Cancellation("no longer needed"), "no longer needed"),
        (Cancellation("no longer needed", "ops"), "no longer needed (asked for by ops)"),
        (Cancellation("", "ops"), "(asked for by ops)"),
        (Cancellation(""), ""),
    ],
)
def test_the_text_says_both(wanted: Cancellation, text: str) -> None:
    assert wanted.text == text
    assert Cancellation.read(text) == wanted


@given(reason=TEXTS, by=TEXTS.filter(lambda name: bool(name) and may_be_by(name)))
def test_what_is_said_is_read_again(reason: str, by: str) -> None:
    assert Cancellation.read(Cancellation(reason, by).text) == (reason, by)


@given(TEXTS)
def test_whatever_is_read_is_said_again(text: str) -> None:
    assert Cancellation.read(text).text == text


@pytest.mark.parametrize(
    "text",
    [
        EXPIRED,
        "no need",
        "asked for by ops",
        "x(asked for by ops)",
        "x (asked for by )",
        "(asked for by ops) x",
    ],
)
def test_nobody_is_made_up(text: str) -> None:
    assert Cancellation.read(text) == (text, None)


@pytest.mark.parametrize("status", ["dead", "failed", "pending", "completed"])
def test_only_a_cancelled_task_was_cancelled_by_somebody(status: str) -> None:
    assert cancelled_by(status, "no (asked for by ops)") is None
    assert cancelled_by("cancelled", "no (asked for by ops)") == "ops"
