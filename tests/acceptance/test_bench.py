"""The benchmarks run; what they say is for people, and no test asserts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.contenders import Contender, find_peers
from bench.report import parse
from bench.servers import embedded_binaries

ROOT = Path(__file__).parents[2]
TINY = ("--rounds", "1", "--tasks", "300", "--singles", "20", "--latency-seconds", "0.2")


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"{os.environ['PATH']}{os.pathsep}{embedded_binaries()}"
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
        cwd=ROOT,
        env=os.environ | {"PATH": path},
    )


@pytest.mark.slow
def test_windlass_is_measured_and_the_results_kept(database_url: str, tmp_path: Path) -> None:
    results, drawn = tmp_path / "results.jsonl", tmp_path / "drawn.svg"

    done = run_bench(
        *("drain-1", "single", "latency", *TINY, "--database", database_url),
        *("--only", "none", "--results", str(results), "--picture", str(drawn)),
    )

    assert done.returncode == 0, done.stderr
    assert "windlass ÷ faithful loop" in done.stdout
    assert "p99 ms" in done.stdout
    kept = parse(results.read_text().splitlines())
    assert {one.label for one in kept if one.case == "drain-1"} == {"windlass", "faithful loop"}
    assert "left out: " not in done.stderr
    assert "Milliseconds from enqueue to start" in drawn.read_text()


@pytest.mark.slow
def test_a_drain_is_measured_among_very_many_and_beside_other_transactions(
    database_url: str,
) -> None:
    done = run_bench(
        *("deep", "snapshot", *TINY, "--database", database_url, "--only", "none"),
        *("--pending", "1000", "--finished", "2000", "--snapshot-tasks", "400"),
    )

    assert done.returncode == 0, done.stderr
    assert "left out: " not in done.stderr
    assert "finished ÷ empty" in done.stdout
    assert "open writer ÷ alone" in done.stdout


@pytest.mark.slow
def test_two_processes_are_measured_against_one(database_url: str) -> None:
    done = run_bench(
        *("processes", *TINY, "--computing", "10", "--database", database_url, "--only", "none")
    )

    assert done.returncode == 0, done.stderr
    assert "left out: " not in done.stderr
    assert "2 processes ÷ 1 process" in done.stdout


@pytest.mark.slow
def test_retries_with_a_budget_are_measured_against_plain_ones(database_url: str) -> None:
    done = run_bench(
        *("budget", *TINY, "--failing-seconds", "1", "--database", database_url, "--only", "none")
    )

    assert done.returncode == 0, done.stderr
    assert "left out: " not in done.stderr
    assert "with a budget ÷ plain backoff" in done.stdout


@pytest.mark.slow
def test_our_statements_are_measured_by_pgbench(database_url: str) -> None:
    done = run_bench("limit", *TINY, "--database", database_url, "--only", "none")

    assert done.returncode == 0, done.stderr
    assert "left out: " not in done.stderr
    assert "windlass ÷ pgbench" in done.stdout


@pytest.mark.slow
def test_windlass_is_measured_beside_a_peer_that_is_installed(
    database_url: str, tmp_path: Path
) -> None:
    node = os.environ.get("BENCH_NODE")
    found = find_peers(os.environ.get("BENCH_PYTHON"), Path(node) if node else None, tmp_path)
    peers = [one.name for one in found if isinstance(one, Contender)]
    if not peers:
        pytest.skip("no peer is installed: see BENCH_NODE and BENCH_PYTHON")

    done = run_bench("drain-1", *TINY, "--database", database_url)

    assert done.returncode == 0, done.stderr
    assert all(f"windlass ÷ {peer}" in done.stdout for peer in peers)


def test_a_peer_that_is_not_installed_is_said_to_be_left_out(database_url: str) -> None:
    done = run_bench("--list", "--database", database_url, "--python", "/nowhere/python")

    assert done.returncode == 0, done.stderr
    assert "drain-4: " in done.stdout
    assert "procrastinate is left out" in done.stdout


def test_a_case_that_is_not_known_is_refused(database_url: str) -> None:
    done = run_bench("drian", "--database", database_url, "--only", "none")

    assert done.returncode != 0
    assert "no case is called drian" in done.stderr


def test_listings_are_measured_filter_by_filter(database_url: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "bench" / "listing.py"),
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
