"""A small disk of a test's own, to fill and to free."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

BLOCK = 65536


class SmallDisk:
    """A file system in memory; only root may mount one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def resize(self, megabytes: int) -> None:
        _mount("-o", f"remount,size={megabytes}m", str(self.folder))

    def fill(self) -> None:
        """Leave no room at all, not for a single byte."""
        filler = os.open(self.folder / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            with suppress(OSError):
                while os.write(filler, bytes(BLOCK)):
                    pass
        finally:
            os.close(filler)
        assert self.free() < BLOCK

    def free(self) -> int:
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def empty(self) -> None:
        """Give back the room that was taken."""
        (self.folder / "filler").unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[SmallDisk]:
    """Mount a disk of this size, or skip; who is root is expected to be able to."""
    folder.mkdir()
    refusal = _mount("-t", "tmpfs", "-o", f"size={megabytes}m,mode=700", "windlass", str(folder))
    if refusal is not None:
        told = f"cannot mount a small disk ({refusal}): nothing was tried on a full one"
        is_refused_by_system = os.geteuid() != 0 or "permission denied" in refusal
        if os.environ.get("CI") == "true" and not is_refused_by_system:
            pytest.fail(told)
        pytest.skip(told)
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _mount(*arguments: str) -> str | None:
    """Return why it was refused."""
    try:
        result = subprocess.run(
            ["mount", *arguments],
            check=False,
            capture_output=True,
            text=True,
            env=os.environ | {"LC_ALL": "C"},
        )
    except FileNotFoundError as error:
        return str(error)
    return None if result.returncode == 0 else result.stderr.strip()
