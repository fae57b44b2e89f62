"""The application whose workers live through the chaos; what its handlers do is written down."""

import asyncio
import os
from pathlib import Path

from chaos.settings import AGAIN, SETTINGS
from windlass import App, Context
from windlass.testing.history_check import log_runs

RUNS = Path(os.environ["CHAOS_RUNS"])
SEEN = RUNS.with_name("seen")

app = App(**SETTINGS)
app.middleware(log_runs(RUNS))


def is_second_run(ctx: Context) -> bool:
    """Whether another worker, or this one, has begun the task before."""
    SEEN.mkdir(exist_ok=True)
    try:
        (SEEN / ctx.task_id).touch(exist_ok=False)
    except FileExistsError:
        return True
    return False


async def linger(ctx: Context, seconds: float) -> None:
    """Take so long; the second time longer, so that what the first one left behind meets it."""
    await asyncio.sleep(seconds + AGAIN * is_second_run(ctx))


@app.task(retry=100)
async def short(ctx: Context, milliseconds: int) -> int:
    await linger(ctx, milliseconds / 1000)
    return milliseconds


@app.task(retry=100)
async def long(ctx: Context, seconds: float) -> float:
    await linger(ctx, seconds)
    return seconds
