"""How tests wait for what happens in processes."""

import asyncio
from collections.abc import Callable
from pathlib import Path

WITHIN = 60.0  # seconds


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WITHIN):
        while not condition():
            await asyncio.sleep(0.01)


async def noted(path: Path) -> int:
    """The number that a handler has written down, once it has."""

    def read() -> str:
        return path.read_text() if path.exists() else ""

    await until(read)
    return int(read())


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
