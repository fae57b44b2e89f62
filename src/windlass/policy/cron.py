"""When a cron expression is due, in a time zone with daylight saving."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from windlass.model.errors import ConfigurationError
from windlass.model.limits import shown

if TYPE_CHECKING:
    from cronsim import CronSim

SECOND = timedelta(seconds=1)
# No zone changes its clocks twice in so short a time.
STRIDE = timedelta(hours=12)

# What a host is set to, placeholders, and copies that count leap seconds or that not every host has.
_NOT_EVERYWHERE = ("localtime", "posixrules", "factory", "posix/", "right/")

# How many values the fields have, the second first.
_VALUES = (60, 60, 24, 31, 12, 7)

_NICKNAMES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron expression in a time zone.

    If it names every hour it goes by elapsed time: it is due whenever clocks show what it says, in both of
    two hours that repeat, and in none that is skipped. Otherwise it names times of the day: one that clocks
    skip is due when they go on, and one that they show twice is due the first time.
    """

    expression: str
    zone: ZoneInfo

    def after(self, moment: datetime) -> Iterator[datetime]:
        """Yield the times that come after a moment, in UTC and in order; they may end."""
        whole = moment.astimezone(UTC).replace(microsecond=0)
        return self._elapsed(whole) if self._names_every_hour() else self._times_of_day(whole)

    def _names_every_hour(self) -> bool:
        return len(self._simulation(datetime(2000, 1, 1)).hours) == 24  # noqa: DTZ001 - on the wall

    def _simulation(self, wall: datetime) -> "CronSim":
        """What clocks on the wall will show, whatever zone they are in: the library need not know."""
        from cronsim import CronSim  # noqa: PLC0415 - only where there is a schedule

        return CronSim(self.expression, wall)

    def _times_of_day(self, moment: datetime) -> Iterator[datetime]:
        last = moment
        for wall in self._simulation(self._wall(moment)):
            due = self._first_shown(wall)
            if due > last:  # else several are due when clocks go on, or this is the second showing
                last = due
                yield due

    def _elapsed(self, moment: datetime) -> Iterator[datetime]:
        """Go from change to change of the clocks: between two of them they tell the time evenly."""
        while True:
            offset = self._offset(moment)
            simulation = self._simulation(self._wall(moment))
            known_until = moment  # no change up to here
            change = None
            for wall in simulation:
                due = (wall - offset).replace(tzinfo=UTC)
                while change is None and known_until < due:
                    change = self._change_within(known_until, known_until + STRIDE)
                    known_until += STRIDE
                if change is not None and due >= change:
                    break
                yield due
            if change is None:
                return
            wall = self._wall(change)
            if next(self._simulation(wall - SECOND), None) == wall:
                yield change
            moment = change

    def _change_within(self, start: datetime, end: datetime) -> datetime | None:
        """The first moment at which clocks show another offset than at the start."""
        before = self._offset(start)
        if self._offset(end) == before:
            return None
        while end - start > SECOND:
            middle = start + timedelta(seconds=(end - start) // SECOND // 2)
            if self._offset(middle) == before:
                start = middle
            else:
                end = middle
        return end

    def _first_shown(self, wall: datetime) -> datetime:
        """When clocks show this first, or when they go on, if they never do."""
        shown_at = wall.replace(tzinfo=self.zone).astimezone(UTC)
        if self._wall(shown_at) == wall:
            return shown_at
        # Read by the offset before the change it lies after it, read by the other one before it.
        later = wall.replace(tzinfo=self.zone, fold=1).astimezone(UTC)
        change = self._change_within(min(shown_at, later), max(shown_at, later))
        return change or shown_at

    def _wall(self, moment: datetime) -> datetime:
        return moment.astimezone(self.zone).replace(tzinfo=None, fold=0, microsecond=0)

    def _offset(self, moment: datetime) -> timedelta:
        return moment.astimezone(self.zone).utcoffset() or timedelta(0)


@lru_cache(maxsize=1000)
def parse_cron(expression: str, timezone: str) -> Cron:
    """Read a cron expression of five fields, or of six with the seconds first; or raise."""
    from cronsim import CronSimError  # noqa: PLC0415 - as above

    cron = Cron(_NICKNAMES.get(expression.strip().lower(), expression), parse_zone(timezone))
    if step := _step_too_long(cron.expression):
        raise ConfigurationError(
            f"cron {shown(expression)}: the step {shown(step)} is longer than its field; leave it out, or use a "
            "shorter one"
        )
    try:
        is_ever_due = next(cron.after(datetime(2000, 1, 1, tzinfo=UTC)), None) is not None
    except (CronSimError, AssertionError, TypeError, ValueError) as error:
        if "day-of-month" in str(error) and _is_understood_in_any_month(cron.expression):
            raise _never_due(expression) from None
        raise ConfigurationError(
            f"cron {shown(expression)}: {str(error).lower() or 'not understood'}; use five fields (minute hour "
            "day month weekday), or six with the second first"
        ) from None
    if not is_ever_due:
        raise _never_due(expression)
    return cron


def _step_too_long(expression: str) -> str:
    """The first step that reaches beyond its field: it would be taken for none, or for a mistake of the day."""
    fields = expression.split()
    for field, values in zip(fields[::-1], _VALUES[::-1], strict=False):
        for term in field.split(","):
            step = term.partition("/")[2]
            if step.isdecimal() and int(step) > values:
                return step
    return ""


def _is_understood_in_any_month(expression: str) -> bool:
    """Whether the day is wrong only since none of its months has it."""
    from cronsim import CronSim, CronSimError  # noqa: PLC0415 - as above

    fields = expression.split()
    fields[-2] = "*"
    try:
        CronSim(" ".join(fields), datetime(2000, 1, 1))  # noqa: DTZ001 - on the wall
    except (CronSimError, AssertionError, TypeError, ValueError):
        return False
    return True


def _never_due(expression: str) -> ConfigurationError:
    return ConfigurationError(
        f"cron {shown(expression)} is never due; name a day that its months have"
    )


@lru_cache(maxsize=1000)
def parse_zone(name: str) -> ZoneInfo:
    """Return a time zone by its name, or raise."""
    if name.lower().startswith(_NOT_EVERYWHERE):
        raise ConfigurationError(
            f"timezone {shown(name)} is not the same everywhere; use a name like 'Europe/Zurich' or 'UTC'"
        )
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError, TypeError):
        raise ConfigurationError(
            f"timezone {shown(name)} is not known here; use a name like 'Europe/Zurich' or 'UTC', and install "
            "the package tzdata if this system has no time zones"
        ) from None
