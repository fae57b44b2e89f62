"""The benchmarks run; what they say is for people, and no test asserts it."""

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def test_a_drain_is_measured_beside_the_store_alone(database_url: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, BENCH / "drain.py"),
            *("--tasks", "600", "--rounds", "1", "--database", database_url),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert done.returncode == 0, done.stderr
    assert "round 1: worker" in done.stdout
    assert "median ratio" in done.stdout


def test_listings_are_measured_filter_by_filter(database_url: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, BENCH / "listing.py"),
            *("--live", "400", "--ended", "4000", "--turns", "1", "--database", database_url),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert done.returncode == 0, done.stderr
    assert "50 found, not all   everything" in done.stdout
    assert "--tag rare" in done.stdout
