"""The demo as a newcomer runs it: a process of its own in an empty folder, then once more."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from windlass.store.postgres.embedded import is_installed

pytestmark = [
    pytest.mark.skipif(not is_installed(), reason="needs the embedded extra"),
    pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="looks at processes in /proc"),
]

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
ENDS = {
    ("ask_for_review", "completed"): 11,
    ("charge", "completed"): 81,
    ("charge", "dead"): 3,
    ("charge", "failed"): 6,
    ("confirm", "completed"): 81,
    ("make_thumbnails", "completed"): 110,
    ("send_report", "completed"): 9,
    ("write_report", "completed"): 3,
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for process_id in processes_in(tmp_path):  # of a test that failed half way
        os.kill(process_id, signal.SIGKILL)


def start_demo(folder: Path) -> subprocess.Popen[str]:
    # A URL that nobody answers: the demo must not look at it.
    unwanted = {"WINDLASS_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/nothing"}
    return subprocess.Popen(
        [sys.executable, str(DEMO)],
        cwd=folder,
        env=os.environ | unwanted,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts us in the background would have it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - takes no lock
    )


def run_demo(folder: Path) -> tuple[str, str]:
    demo = start_demo(folder)
    out, errors = demo.communicate(timeout=120)
    assert demo.returncode == 0, out + errors
    return out, errors


def examine(folder: Path) -> list[dict[str, str]]:
    """What the doctor finds in the database of the demo."""
    done = subprocess.run(
        [sys.executable, "-m", "windlass.cli", "doctor", "--json"],
        cwd=folder,
        env=os.environ | {"WINDLASS_DATABASE_URL": "embedded:"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    findings: list[dict[str, str]] = json.loads(done.stdout)
    return findings


def processes_in(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink().is_relative_to(folder):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def ends_in(out: str) -> dict[tuple[str, str], int]:
    rows = re.findall(r"^(\w+) +(completed|failed|dead|cancelled) +(\d+) +(\d+)", out, re.MULTILINE)
    return {(kind, state): int(found) for kind, state, found, _ in rows}


def test_the_demo_ends_as_expected_twice_in_a_row_and_leaves_no_process(folder: Path) -> None:
    first, errors = run_demo(folder)
    second, _ = run_demo(folder)
    healthy = examine(folder)

    assert ends_in(first) == ends_in(second) == ENDS
    assert "all 304 tasks ended as expected" in first
    assert str(folder / ".windlass") in errors
    assert (folder / ".windlass" / "data").is_dir()
    assert "\x1b" not in first
    assert "Traceback" not in errors
    assert [finding["level"] for finding in healthy] == ["ok"] * len(healthy), healthy
    assert len(healthy) > 20
    assert processes_in(folder) == []


def test_ctrl_c_stops_the_demo_and_what_is_left_waits_for_the_next(folder: Path) -> None:
    demo = start_demo(folder)
    assert demo.stdout is not None
    while " s  " not in demo.stdout.readline():  # the first line of the live summary
        assert demo.poll() is None, "it ended before it began"

    demo.send_signal(signal.SIGINT)
    _, errors = demo.communicate(timeout=60)

    assert demo.returncode == 130
    assert "Traceback" not in errors
    assert processes_in(folder) == []
    assert ends_in(run_demo(folder)[0]) == ENDS
