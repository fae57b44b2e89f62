"""Dead letters in files, before they are removed from the store."""

import hashlib
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from windlass.model.dead import DeadLetter
from windlass.service import in_thread

LONGEST_NAME = 80  # characters of a queue's name in the name of a file

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")


class Archive:
    """A folder with a file for each queue and day: JSON Lines, only ever appended to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def append(self, queue: str, letters: Sequence[DeadLetter], now: datetime) -> Path:
        """Write letters of a queue, and return where once they are on the disk."""
        path = self._folder / f"{file_stem(queue)}-{now.astimezone(UTC):%Y-%m-%d}.jsonl"
        await in_thread(_append, path, msgspec.json.Encoder().encode_lines(letters))
        return path


def file_stem(queue: str) -> str:
    """A name for the files of a queue that every file system takes."""
    stem = _UNSAFE.sub("_", queue)[:LONGEST_NAME]
    if stem == queue:
        return f"dead-{stem}"
    # Other names may look alike when they are spelled so.
    return f"dead-{stem}-{hashlib.sha256(queue.encode()).hexdigest()[:12]}"


def _append(path: Path, lines: bytes) -> None:
    new_folders = [folder for folder in path.parents if not folder.is_dir()]
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("ab+") as file:
        # Whoever was killed in the middle of a line left a part of it, and still has the letter.
        if file.tell() and not _ends_a_line(file.fileno(), file.tell()):
            lines = b"\n" + lines
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        _sync_folder(path.parent)
    for folder in new_folders:
        _sync_folder(folder.parent)


def _ends_a_line(descriptor: int, size: int) -> bool:
    return os.pread(descriptor, 1, size - 1) == b"\n"


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
