"""When ended tasks may go, and where they rest until then."""

from datetime import date, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.policy.retention import DAILY_UNTIL, DAYS_AHEAD, Span, is_over, missing_spans

TODAY = date(2027, 3, 3)  # a Wednesday
DAY = timedelta(days=1)
WEEK = timedelta(days=7)

retentions = st.lists(
    st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=500)), min_size=1, max_size=5
)
days = st.dates(min_value=date(2024, 1, 1), max_value=date(2040, 1, 1))


def one_day(day: date) -> Span:
    return Span(day, day + DAY)


def covers(spans: list[Span], day: date) -> bool:
    return any(span.first <= day < span.past for span in spans)


def overlap(spans: list[Span]) -> bool:
    return any(one.past > other.first for one, other in pairwise(sorted(spans)))


def test_there_is_a_place_for_each_of_the_coming_days() -> None:
    spans = missing_spans(TODAY, [WEEK], [])

    assert spans == [one_day(TODAY + WEEK + ahead * DAY) for ahead in range(DAYS_AHEAD + 2)]


def test_a_retention_of_nothing_has_a_place_today() -> None:
    assert missing_spans(TODAY, [timedelta(0)], [])[0] == one_day(TODAY)


def test_what_is_present_is_not_made_again() -> None:
    present = missing_spans(TODAY, [WEEK], [])

    assert missing_spans(TODAY, [WEEK], present) == []
    assert missing_spans(TODAY + DAY, [WEEK], present) == [one_day(present[-1].past)]


def test_retentions_that_share_days_share_places() -> None:
    spans = missing_spans(TODAY, [WEEK, WEEK + DAY, timedelta(days=7, hours=5)], [])

    assert spans == [one_day(TODAY + WEEK + ahead * DAY) for ahead in range(DAYS_AHEAD + 3)]


def test_a_place_is_a_day_until_thirty_days_and_a_week_beyond() -> None:
    spans = missing_spans(TODAY, [timedelta(days=DAILY_UNTIL - 2)], [])

    assert [span.past - span.first for span in spans[:3]] == [DAY] * 3
    assert [span.first - TODAY for span in spans[:3]] == [
        timedelta(days=DAILY_UNTIL + ahead) for ahead in (-2, -1, 0)
    ]
    assert spans[3].first == TODAY + timedelta(days=DAILY_UNTIL + 1)


def test_a_week_begins_on_a_monday() -> None:
    spans = missing_spans(TODAY, [timedelta(days=400)], [])

    assert all(span.first.weekday() == 0 and span.past - span.first == WEEK for span in spans)
    assert covers(spans, TODAY + timedelta(days=400))


def test_a_week_is_cut_down_to_what_no_other_place_covers() -> None:
    monday = date(2027, 4, 12)  # forty days ahead
    tuesday, friday = one_day(monday + DAY), one_day(monday + 4 * DAY)

    spans = missing_spans(TODAY, [monday + 2 * DAY - TODAY], [tuesday, friday])

    assert Span(monday + 2 * DAY, monday + 4 * DAY) in spans
    assert not overlap([*spans, tuesday, friday])


@given(days, retentions)
def test_every_end_of_the_coming_days_finds_its_place(today: date, asked: list[timedelta]) -> None:
    spans = missing_spans(today, asked, [])

    assert not overlap(spans)
    for retention in asked:
        for ahead in range(DAYS_AHEAD + 1):
            # A retention of part of a day may carry the end over midnight.
            earliest = today + ahead * DAY + timedelta(days=retention.days)
            carried = earliest + DAY * bool(retention.seconds or retention.microseconds)
            assert covers(spans, earliest)
            assert covers(spans, carried) or ahead == DAYS_AHEAD


@given(days, st.lists(st.tuples(st.integers(0, 9), retentions), max_size=6))
def test_places_made_on_different_days_never_overlap(
    today: date, turns: list[tuple[int, list[timedelta]]]
) -> None:
    present: list[Span] = []

    for passed, asked in turns:
        today += timedelta(days=passed)
        made = missing_spans(today, asked, present)
        assert all(span.first < span.past for span in made)
        assert all(covers([*present, *made], today + timedelta(days=r.days)) for r in asked)
        present = [span for span in present + made if not is_over(span, today)]

    assert not overlap(present)


@pytest.mark.parametrize("span", [one_day(TODAY), Span(TODAY - 6 * DAY, TODAY + DAY)])
def test_a_place_is_over_once_its_last_day_has_passed(span: Span) -> None:
    assert [is_over(span, TODAY + ahead * DAY) for ahead in (-1, 0, 1, 2)] == [
        False,
        False,
        True,
        True,
    ]
