"""The application whose tasks pass gates: by tenant, and by ordering keys."""

import asyncio

from windlass import App, Context, Limit, Retry

CONCURRENCY = 4
SECONDS = 0.1
SHORT = 0.003  # seconds: a gate is empty again as often as the next task comes

app = App(lease=4, heartbeat=1, sweep=1, leader_term=3, concurrency=50)
soon = Retry(max_attempts=30, backoff="fixed", base=0.2, jitter="none")


@app.task(retry=30, limit=Limit(concurrency=CONCURRENCY, by="tenant"))
async def nap(tenant: int) -> None:
    await asyncio.sleep(SECONDS)


@app.task(limit=Limit(concurrency=1, by="tenant"))
async def one(tenant: int) -> None:
    await asyncio.sleep(SHORT)


@app.task(limit=(Limit(concurrency=8), Limit(concurrency=2, by="tenant")))
async def both(tenant: int) -> None:
    await asyncio.sleep(SHORT)


@app.task(retry=soon)
async def step(ctx: Context, number: int) -> None:
    if number % 20 == 0 and ctx.attempt == 1:
        raise ConnectionError("try again, and keep the place")
