"""Typed enqueues, as mypy and pyright see them: right programs pass, wrong ones are told where."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


PROGRAMS = [HERE / "good.py", HERE / "bad.py"]
Told = set[tuple[str, int]]  # a program and a line of it


def told_by_mypy(programs: list[Path]) -> Told:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--config-file="),
            *("--no-error-summary", "--cache-dir=/dev/null", *map(str, programs)),
        ],
        env={"MYPYPATH": str(SOURCE), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    names = "|".join(re.escape(program.name) for program in programs)
    lines = re.findall(rf"\b({names}):(\d+): error", done.stdout)
    return {(name, int(line)) for name, line in lines}


def told_by_pyright(programs: list[Path], tmp_path: Path) -> Told:
    settings = tmp_path / "pyrightconfig.json"
    settings.write_text(
        json.dumps(
            {
                "include": list(map(str, programs)),
                "extraPaths": [str(SOURCE)],
                "typeCheckingMode": "standard",
                "pythonVersion": "3.11",
            }
        )
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "basedpyright", "--outputjson"),
            *("--pythonpath", sys.executable, "--project", str(settings)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    told = json.loads(done.stdout)
    assert told["summary"]["filesAnalyzed"] == len(programs)
    return {
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1)
        for one in told["generalDiagnostics"]
        if one["severity"] == "error"
    }


def marked(program: Path) -> Told:
    lines = program.read_text().splitlines()
    return {
        (program.name, number) for number, line in enumerate(lines, 1) if line.endswith("# wrong")
    }


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_checker_tells_what_is_wrong_and_nothing_else(checker: str, tmp_path: Path) -> None:
    told = told_by_mypy(PROGRAMS) if checker == "mypy" else told_by_pyright(PROGRAMS, tmp_path)

    assert told == marked(HERE / "bad.py")
    assert marked(HERE / "good.py") == set()
