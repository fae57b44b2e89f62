"""The application of a flood: tasks of several priorities, and steps of ageing that are short."""

import asyncio

from windlass import App

STEP = 0.1  # seconds for each point of priority

app = App(lease=10, heartbeat=2, sweep=1, concurrency=100, buffer=0)
app.queue("aged", ageing=STEP)


@app.task(queue="aged")
async def work() -> None:
    await asyncio.sleep(0.1)
