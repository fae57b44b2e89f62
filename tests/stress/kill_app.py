"""The application whose workers are killed: short tasks, and some long ones."""

import asyncio

from windlass import App

app = App(
    lease=4,
    heartbeat=1,
    sweep=1,
    leader_term=3,
    concurrency=5,
    buffer=20,
)


@app.task
async def short(milliseconds: int) -> int:
    await asyncio.sleep(milliseconds / 1000)
    return milliseconds


@app.task(retry=30)
async def long(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds
