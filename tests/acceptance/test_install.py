"""The package as a user gets it: built, installed without the tools of its makers, and run."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_what_the_readme_installs_runs_its_first_task(tmp_path: Path) -> None:
    (typed,) = re.findall(r"^\$ (pip install .+)$", README, re.MULTILINE)
    first_task = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[0]
    checkout = tmp_path / "checkout"
    shutil.copytree(
        ROOT, checkout, ignore=shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "tests")
    )
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)  # a copy of it takes long to make
    pinned = ("--quiet", "--disable-pip-version-check", "--no-compile", "-c", "constraints.txt")
    installed = subprocess.run(
        [*pip, *shlex.split(typed)[1:], *pinned],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    if installed.returncode and os.environ.get("CI") != "true":
        pytest.skip(f"NOT TRIED AS INSTALLED: pip said {installed.stderr}")
    assert installed.returncode == 0, installed.stderr

    shutil.rmtree(checkout)
    (tmp_path / "first.py").write_text(first_task)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WINDLASS_")}
    done = subprocess.run(
        [python, "first.py"],
        cwd=tmp_path,
        env=kept | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.stdout == "hello, world\n", done.stderr
