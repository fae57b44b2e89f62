"""The application whose workers live through the chaos; what its handlers do is written down."""

import asyncio
import os
from pathlib import Path

from chaos.settings import SETTINGS
from windlass import App
from windlass.testing.history_check import log_runs

app = App(**SETTINGS)
app.middleware(log_runs(Path(os.environ["CHAOS_RUNS"])))


@app.task(retry=100)
async def short(milliseconds: int) -> int:
    await asyncio.sleep(milliseconds / 1000)
    return milliseconds


@app.task(retry=100)
async def long(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds
