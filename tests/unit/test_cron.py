"""When cron expressions are due: hard cases, and two years of daylight saving in five zones."""

from bisect import bisect_right
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import islice, takewhile
from zoneinfo import ZoneInfo

import pytest

from slowly import slowly
from windlass.model.errors import ConfigurationError
from windlass.policy.cron import parse_cron

ZURICH = "Europe/Zurich"
LORD_HOWE = "Australia/Lord_Howe"


def due(expression: str, zone: str, start: str, number: int) -> list[str]:
    """The first times after a local one, as clocks there show them."""
    place = ZoneInfo(zone)
    after = datetime.fromisoformat(start).replace(tzinfo=place)
    found = islice(parse_cron(expression, zone).after(after), number)
    return [moment.astimezone(place).strftime("%Y-%m-%d %H:%M:%S%z") for moment in found]


@pytest.mark.parametrize(
    ("expression", "start", "expected"),
    [
        ("0 0 29 2 *", "2026-01-01", ["2028-02-29 00:00:00", "2032-02-29 00:00:00"]),
        ("0 0 29 2 *", "2096-03-01", ["2104-02-29 00:00:00"]),  # 2100 is no leap year
        ("0 0 31 * *", "2026-01-31", ["2026-03-31 00:00:00", "2026-05-31 00:00:00"]),
        ("0 12 L * *", "2026-02-01", ["2026-02-28 12:00:00", "2026-03-31 12:00:00"]),
        ("0 12 LW * *", "2026-05-01", ["2026-05-29 12:00:00", "2026-06-30 12:00:00"]),
        ("0 0 13 * 5", "2026-02-01", ["2026-02-06 00:00:00", "2026-02-13 00:00:00"]),  # either
        ("0 0 */2 * 5", "2026-02-01", ["2026-02-13 00:00:00", "2026-02-27 00:00:00"]),  # both
        ("0 0 * * 0", "2026-11-18", ["2026-11-22 00:00:00"]),
        ("0 0 * * 7", "2026-11-18", ["2026-11-22 00:00:00"]),
        ("0 0 * * sun", "2026-11-18", ["2026-11-22 00:00:00"]),
        ("0 0 * * 1#1", "2026-11-18", ["2026-12-07 00:00:00"]),
        ("0 0 * * 5L", "2026-11-18", ["2026-11-27 00:00:00"]),
        ("0 0 1 jan,JUL *", "2026-02-01", ["2026-07-01 00:00:00", "2027-01-01 00:00:00"]),
        ("5-59/20 * * * *", "2026-01-01", ["2026-01-01 00:05:00", "2026-01-01 00:25:00"]),
        ("58/1 23 31 12 *", "2026-01-01", ["2026-12-31 23:58:00", "2026-12-31 23:59:00"]),
        ("*/20 59 23 * * *", "2026-01-01", ["2026-01-01 23:59:00", "2026-01-01 23:59:20"]),
        ("0 0 0 1 1 *", "2026-01-01", ["2027-01-01 00:00:00"]),  # strictly after
        ("@yearly", "2026-01-01", ["2027-01-01 00:00:00"]),
        ("@Daily", "2026-01-01", ["2026-01-02 00:00:00"]),
        (" 0   3 * * * ", "2026-01-01", ["2026-01-01 03:00:00"]),
    ],
)
def test_an_expression_is_due(expression: str, start: str, expected: list[str]) -> None:
    found = due(expression, "UTC", start, len(expected))

    assert [moment.removesuffix("+0000") for moment in found] == expected


@pytest.mark.parametrize(
    ("expression", "zone", "start", "expected"),
    [
        # Clocks in Zurich skip 2:00 to 3:00 on 29 March 2026.
        ("30 2 * * *", ZURICH, "2026-03-28 12:00", ["29 03:00:00+0200", "30 02:30:00+0200"]),
        ("0 2 * * *", ZURICH, "2026-03-28 12:00", ["29 03:00:00+0200", "30 02:00:00+0200"]),
        ("*/20 2 * * *", ZURICH, "2026-03-28 12:00", ["29 03:00:00+0200", "30 02:00:00+0200"]),
        ("30 2,3 * * *", ZURICH, "2026-03-28 12:00", ["29 03:00:00+0200", "29 03:30:00+0200"]),
        ("0 2,3 * * *", ZURICH, "2026-03-28 12:00", ["29 03:00:00+0200", "30 02:00:00+0200"]),
        ("5 30 2 * * *", ZURICH, "2026-03-28 12:00", ["29 03:00:00+0200", "30 02:30:05+0200"]),
        ("30 * * * *", ZURICH, "2026-03-29 01:00", ["29 01:30:00+0100", "29 03:30:00+0200"]),
        ("0 * * * *", ZURICH, "2026-03-29 01:00", ["29 03:00:00+0200", "29 04:00:00+0200"]),
        ("0 0-23 * * *", ZURICH, "2026-03-29 01:00", ["29 03:00:00+0200", "29 04:00:00+0200"]),
        # They show 2:00 to 3:00 twice on 25 October 2026.
        ("30 2 * * *", ZURICH, "2026-10-24 12:00", ["25 02:30:00+0200", "26 02:30:00+0100"]),
        ("30 2,3 * * *", ZURICH, "2026-10-25 02:30", ["25 03:30:00+0100", "26 02:30:00+0100"]),
        ("0 3 * * *", ZURICH, "2026-10-24 12:00", ["25 03:00:00+0100"]),
        ("30 * * * *", ZURICH, "2026-10-25 01:45", ["25 02:30:00+0200", "25 02:30:00+0100"]),
        ("0 * * * *", ZURICH, "2026-10-25 02:00", ["25 02:00:00+0100", "25 03:00:00+0100"]),
        # Half an hour: skipped on 4 October 2026, shown twice on 5 April.
        ("15 2 * * *", LORD_HOWE, "2026-10-03 12:00", ["04 02:30:00+1100", "05 02:15:00+1100"]),
        ("45 2 * * *", LORD_HOWE, "2026-10-03 12:00", ["04 02:45:00+1100"]),
        ("45 1 * * *", LORD_HOWE, "2026-04-04 12:00", ["05 01:45:00+1100", "06 01:45:00+1030"]),
        ("45 * * * *", LORD_HOWE, "2026-04-05 01:00", ["05 01:45:00+1100", "05 01:45:00+1030"]),
        # Midnight itself was skipped in Sao Paulo on 4 November 2018.
        ("0 0 * * *", "America/Sao_Paulo", "2018-11-03 12:00", ["04 01:00:00-0200"]),
    ],
)
def test_daylight_saving_loses_and_doubles_nothing(
    expression: str, zone: str, start: str, expected: list[str]
) -> None:
    found = due(expression, zone, start, len(expected))

    assert [moment[8:] for moment in found] == expected


def test_times_of_the_day_are_not_due_again_in_the_second_showing() -> None:
    second = datetime(2026, 10, 25, 1, 10, tzinfo=UTC)  # 2:10 in Zurich, for the second time

    (following,) = islice(parse_cron("30 2 * * *", ZURICH).after(second), 1)

    assert following == datetime(2026, 10, 26, 1, 30, tzinfo=UTC)


# An oracle that knows nothing of cronsim: it looks at every five minutes of two years.

ZONES = (ZURICH, "America/New_York", LORD_HOWE, "Africa/Casablanca", "Asia/Kathmandu")
START = datetime(2026, 1, 15, tzinfo=UTC)
MIDDLE = datetime(2027, 1, 15, tzinfo=UTC)
END = datetime(2028, 1, 15, tzinfo=UTC)
YEARS = [(START, MIDDLE), pytest.param((MIDDLE, END), marks=pytest.mark.slow)]
STEP = timedelta(minutes=5)

EXPRESSIONS: dict[str, Callable[[datetime], bool]] = {
    "30 2 * * *": lambda t: (t.hour, t.minute) == (2, 30),
    "0 3 * * *": lambda t: (t.hour, t.minute) == (3, 0),
    "15,45 1-3 * * *": lambda t: t.hour in (1, 2, 3) and t.minute in (15, 45),
    "*/10 2 * * 0": lambda t: t.hour == 2 and t.minute % 10 == 0 and t.weekday() == 6,
    "0 */2 * * *": lambda t: t.hour % 2 == 0 and t.minute == 0,
    "10 2 29-31 3,10 *": lambda t: (
        (t.hour, t.minute) == (2, 10) and t.day >= 29 and t.month in (3, 10)
    ),
    "*/15 * * * *": lambda t: t.minute % 15 == 0,
    "0 * * * *": lambda t: t.minute == 0,
    "35 * * * 6": lambda t: t.minute == 35 and t.weekday() == 5,
}
Year = tuple[datetime, datetime]
ELAPSED = {"*/15 * * * *", "0 * * * *", "35 * * * 6"}


@cache
def shown(zone: str, year: Year) -> list[tuple[datetime, datetime]]:
    """Every moment, and what clocks show then, whether for the first time or again."""
    place = ZoneInfo(zone)
    first, last = year
    moments = [first + k * STEP for k in range((last - first) // STEP + 1)]
    return [(one, one.astimezone(place).replace(tzinfo=None, fold=0)) for one in moments]


def elapsed(zone: str, year: Year, matches: Callable[[datetime], bool]) -> list[datetime]:
    return [moment for moment, wall in shown(zone, year) if matches(wall)]


def times_of_day(zone: str, year: Year, matches: Callable[[datetime], bool]) -> list[datetime]:
    found: list[datetime] = []
    latest = shown(zone, year)[0][1] - STEP  # the furthest that clocks have shown
    for moment, wall in shown(zone, year):
        skipped = (wall - latest) // STEP - 1  # unless clocks went on there are none
        is_new = skipped >= 0
        if (is_new and matches(wall)) or any(
            matches(latest + k * STEP) for k in range(1, skipped + 1)
        ):
            found.append(moment)
        if is_new:
            latest = wall
    return found


# One test for each zone and year: what clocks show there all the year is found out once.
@pytest.mark.parametrize("year", YEARS, ids=["first", "second"])
@pytest.mark.parametrize("zone", slowly(ZONES, lambda zone: zone != ZURICH))
def test_two_years_of_daylight_saving(zone: str, year: Year) -> None:
    first, last = year
    for expression, matches in EXPRESSIONS.items():
        oracle = elapsed if expression in ELAPSED else times_of_day
        expected = [one for one in oracle(zone, year, matches) if first < one < last]

        found = list(takewhile(lambda one: one < last, parse_cron(expression, zone).after(first)))

        assert found == expected, expression
        assert len(found) > 4


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("expression", ["30 2 * * *", "30 * * * *"])
def test_it_does_not_matter_where_one_begins(zone: str, expression: str) -> None:
    cron = parse_cron(expression, zone)
    days = timedelta(days=1)
    everything = list(takewhile(lambda one: one < MIDDLE, cron.after(START)))

    for begin in (START + k * days / 3 for k in range(0, 1090, 11)):
        (following,) = islice(cron.after(begin), 1)
        assert following == everything[bisect_right(everything, begin)]


@pytest.mark.parametrize(
    "expression",
    [
        *("", "*", "* * * *", "* * * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *"),
        *("* * 32 * *", "* * * 13 *", "* * * * 8", "*/0 * * * *", "5-1 * * * *", "a * * * *"),
        *("-1 * * * *", "1,,2 * * * *", "0 0 * * MON#6", "60 0 0 * * *", "0 0 31 2 *", "@reboot"),
        *("0 0 * * 1#2/3", "٣ * * * *", "0 0 30 2 *"),
    ],
)
def test_a_bad_expression_is_refused(expression: str) -> None:
    with pytest.raises(ConfigurationError, match=r"cron .*; "):
        parse_cron(expression, "UTC")


@pytest.mark.parametrize("zone", ["", "Europe", "Mars/Olympus", "../etc/passwd", "\0", "/etc"])
def test_an_unknown_time_zone_is_refused(zone: str) -> None:
    with pytest.raises(ConfigurationError, match=r"timezone .* is not known here; use"):
        parse_cron("0 3 * * *", zone)


@pytest.mark.parametrize(
    "zone", ["localtime", "posixrules", "Factory", "posix/Europe/Zurich", "right/UTC", "LOCALTIME"]
)
def test_a_time_zone_that_differs_from_host_to_host_is_refused(zone: str) -> None:
    with pytest.raises(ConfigurationError, match=r"timezone .* is not the same everywhere; use"):
        parse_cron("0 3 * * *", zone)


@pytest.mark.parametrize(
    ("expression", "step"),
    [
        *(("*/100 * * * *", "100"), ("1/61 * * * *", "61"), ("0 0 1-31/99 * *", "99")),
        *(("0 */25 * * *", "25"), ("0 0 * */13 *", "13"), ("0 0 * * */8", "8")),
        *(("*/61 * * * * *", "61"), ("0,5/77 * * * *", "77"), ("0 0 L/32 * *", "32")),
    ],
)
def test_a_step_that_is_longer_than_its_field_is_refused(expression: str, step: str) -> None:
    with pytest.raises(ConfigurationError, match=f"the step '{step}' is longer than its field; "):
        parse_cron(expression, "UTC")


@pytest.mark.parametrize("expression", ["*/60 * * * *", "0 */24 * * *", "0 0 */31 * *"])
def test_a_step_as_long_as_its_field_is_understood(expression: str) -> None:
    assert next(parse_cron(expression, "UTC").after(START), None) is not None


@pytest.mark.parametrize("expression", ["0 0 30 2 *", "0 0 31 2 *", "0 0 0 31 4,6 *"])
def test_a_day_that_no_month_has_is_never_due(expression: str) -> None:
    with pytest.raises(ConfigurationError, match="is never due; name a day that its months have"):
        parse_cron(expression, "UTC")


@pytest.mark.parametrize("expression", ["0 0 32 2 *", "0 0 30 13 *"])
def test_a_day_or_a_month_that_is_none_is_not_understood(expression: str) -> None:
    with pytest.raises(ConfigurationError, match="use five fields"):
        parse_cron(expression, "UTC")
