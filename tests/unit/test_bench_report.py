"""What the benchmarks compute and show, of numbers that are made up."""

from xml.etree import ElementTree as ET

import pytest
from bench.cases.case import Case, Run, Sizes, against
from bench.drains import Sample, parts
from bench.picture import picture
from bench.ratios import Measured, Values, percentile, quartile, ratio
from bench.report import line, parse, table
from bench.stage import Workload


def test_a_ratio_is_the_median_of_the_ratios_of_the_rounds() -> None:
    ours = {1: 10.0, 2: 40.0, 3: 30.0}
    theirs = {1: 10.0, 2: 10.0, 3: 10.0}

    found = ratio(ours, theirs, more=True)

    assert found is not None
    assert (found.median, found.rounds) == (3.0, 3)


def test_the_worse_quartile_is_the_lower_of_rates_and_the_upper_of_costs() -> None:
    ours = dict(enumerate([1.0, 2.0, 3.0, 4.0, 5.0]))
    theirs = dict.fromkeys(range(5), 1.0)

    rates, costs = ratio(ours, theirs, more=True), ratio(ours, theirs, more=False)

    assert rates is not None
    assert costs is not None
    assert (rates.quartile, costs.quartile) == (2.0, 4.0)


def test_only_rounds_that_have_both_are_compared() -> None:
    found = ratio({1: 10.0, 2: 20.0}, {2: 10.0, 3: 10.0}, more=True)

    assert found is not None
    assert (found.median, found.rounds) == (2.0, 1)
    assert ratio({1: 10.0}, {2: 10.0}, more=True) is None


def test_one_value_is_its_own_quartile() -> None:
    assert quartile([7.0], lower=True) == 7.0


@pytest.mark.parametrize(("percent", "expected"), [(50, 50.0), (99, 99.0), (100, 100.0), (0, 1.0)])
def test_a_percentile_is_a_value_that_was_seen(percent: float, expected: float) -> None:
    values = [float(value) for value in range(100, 0, -1)]

    assert percentile(values, percent) == expected


def test_the_rates_of_fifths_show_a_run_that_slows_down() -> None:
    samples = [Sample(0.0, 0), Sample(1.0, 20), Sample(2.0, 60), Sample(10.0, 100)]

    rates = list(parts(samples, began=0.5, tasks=100).values())

    assert rates == [40.0, 40.0, 40.0, 5.0, 5.0]


def test_an_adapter_is_told_only_what_is_not_as_usual() -> None:
    assert Workload(100).options() == []
    assert Workload(100, sleep_ms=1.0, keys=True).options() == ["--sleep-ms", "1.0", "--keys"]


def nothing() -> Values:
    return {}


DRAIN = Case(
    "drain-1",
    "no-op tasks",
    (Run("windlass", nothing), Run("peer", nothing)),
    against("windlass", ["windlass", "peer", "absent"]),
    shown=("rate", "wal"),
)
MEASURED = [
    Measured("drain-1", "windlass", 1, {"rate": 30_000.0, "wal": 700.0}),
    Measured("drain-1", "peer", 1, {"rate": 20_000.0}),
    Measured("drain-1", "windlass", 2, {"rate": 40_000.0, "wal": 710.0}),
    Measured("drain-1", "peer", 2, {"rate": 20_000.0}),
    Measured("latency", "windlass", 1, {"p50_ms": 1.5, "p99_ms": 4.0}),
    Measured("latency", "peer <old>", 1, {"p50_ms": 3.0, "p99_ms": 8.0}),
]


def test_the_table_shows_medians_and_ratios_and_leaves_out_what_is_not_there() -> None:
    shown = table(DRAIN, MEASURED)

    assert "| windlass |  35,000 |   705 |" in shown
    assert "| peer     |  20,000 |     - |" in shown
    assert "| windlass ÷ peer | tasks/s |   1.75 |     1.62 |      2 |" in shown
    assert "absent" not in shown


def test_the_table_says_how_much_of_the_machine_others_had() -> None:
    shares = [10.0, 30.0, 80.0]
    runs = [Measured("drain-1", "peer", 1, {"others_percent": share}) for share in shares]

    assert "Others had 30 % of the machine meanwhile." in table(DRAIN, runs)
    assert "Others" not in table(DRAIN, MEASURED)


def test_lines_of_results_are_read_back() -> None:
    lines = ['{"heading": ["of a run"]}', *(line(one) for one in MEASURED)]

    assert parse(lines) == MEASURED


def test_what_could_not_be_measured_is_no_line_of_json() -> None:
    unknown = Measured("drain-1", "windlass", 1, {"rate": 1.0, "postgres_us": float("nan")})

    assert parse([line(unknown)])[0].values == {"rate": 1.0}


def test_the_picture_has_a_bar_for_each_value_and_escapes_names() -> None:
    two = [Measured("drain-2", one.label, one.round, one.values) for one in MEASURED[:4]]

    root = ET.fromstring(picture([*MEASURED, *two]))

    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"35,000", "20,000", "1.5", "8.0", "peer <old>"} <= set(texts)
    assert len(root.findall("{http://www.w3.org/2000/svg}g")) == 2


def test_a_picture_of_nothing_is_empty_and_still_a_picture() -> None:
    root = ET.fromstring(picture([]))

    assert root.findall("{http://www.w3.org/2000/svg}g") == []


def test_the_sizes_of_the_goals_are_the_default() -> None:
    assert (Sizes().tasks, Sizes().pending, Sizes().finished) == (50_000, 1_000_000, 10_000_000)
