"""An application whose tasks write down that they ran."""

import asyncio
from pathlib import Path

from windlass import App

app = App()


@app.task
async def note(n: int, ballast: str = "") -> None:
    write_down(n)
    await asyncio.sleep(0.02)


def write_down(n: int) -> None:
    with Path("ran").open("a") as ran:
        ran.write(f"{n}\n")
