"""Typed enqueues, as mypy and pyright see them: right programs pass, wrong ones are told where."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


def told_by_mypy(program: Path) -> set[int]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--config-file="),
            *("--no-error-summary", "--cache-dir=/dev/null", str(program)),
        ],
        env={"MYPYPATH": str(SOURCE), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    lines = re.findall(rf"{program.name}:(\d+): error", done.stdout)
    return {int(line) for line in lines}


def told_by_pyright(program: Path, tmp_path: Path) -> set[int]:
    settings = tmp_path / "pyrightconfig.json"
    settings.write_text(
        json.dumps(
            {
                "include": [str(program)],
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
    told = json.loads(done.stdout)["generalDiagnostics"]
    return {one["range"]["start"]["line"] + 1 for one in told if one["severity"] == "error"}


def marked(program: Path) -> set[int]:
    lines = program.read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}


@pytest.mark.parametrize("name", ["good", "bad"])
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_checker_tells_what_is_wrong_and_nothing_else(
    name: str, checker: str, tmp_path: Path
) -> None:
    program = HERE / f"{name}.py"
    told = told_by_mypy(program) if checker == "mypy" else told_by_pyright(program, tmp_path)

    assert told == marked(program)
