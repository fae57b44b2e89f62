"""The application whose workers share limits."""

import asyncio

from windlass import App

CONCURRENCY = 20
SECONDS = 0.25

app = App(lease=4, heartbeat=1, sweep=1, leader_term=3, concurrency=10)
app.queue("limited", concurrency=CONCURRENCY)


@app.task(queue="limited", retry=30)
async def nap() -> None:
    await asyncio.sleep(SECONDS)
