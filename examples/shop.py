"""A small shop: its payments, mails, pictures and reports as tasks.

What happens to an order follows from its number alone, so the demo knows how every task must end.
"""

import asyncio
import random
import time
import zlib
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

from windlass import App, Call, Context, Fail, Retry, RetryAfter, TaskState

app = App()  # the database of WINDLASS_DATABASE_URL, else the embedded one in ./.windlass

ORDERS = range(1, 91)
PICTURES = range(1, 111)
REGIONS = ("north", "south", "west")
MANAGERS = ("ada@shop.example", "grace@shop.example", "edsger@shop.example")
SIZES = {"small": 64, "medium": 160, "large": 320}


@dataclass(frozen=True)
class Order:
    """An order as it travels in payloads; `run` tells one run of the demo from the next."""

    number: int
    run: str
    customer: str
    cents: int

    @property
    def tags(self) -> list[str]:
        return [f"run:{self.run}"]


class ProviderDown(Exception):  # noqa: N818 - says what happened
    """The payment provider did not answer."""


class PaymentProvider:
    """Somebody else's service: often down for a moment, sometimes for good."""

    async def charge(self, order: Order, attempt: int) -> str:
        await asyncio.sleep(0.02)
        if card_is_stolen(order.number):
            raise Fail("the card was reported stolen")
        if asks_for_patience(order.number) and attempt == 1:
            raise RetryAfter(0.3, "too many requests")
        if attempt <= failures_before_success(order.number):
            raise ProviderDown("the payment provider did not answer")
        return f"receipt-{order.run}-{order.number}"


def card_is_stolen(number: int) -> bool:
    return number % 15 == 0


def never_answers(number: int) -> bool:
    return number % 40 == 7


def asks_for_patience(number: int) -> bool:
    return number % 9 == 4


def failures_before_success(number: int) -> int:
    if never_answers(number):
        return 1000
    return random.Random(number).choice((0, 0, 0, 1, 2))


@app.on_startup
def connect() -> PaymentProvider:
    """Run once in each worker; handlers find it as `ctx.state`."""
    return PaymentProvider()


@app.task(
    queue="payments",
    priority="critical",
    retry=Retry(max_attempts=5, base=0.2, ceiling=2),
    timeout=10,
)
async def charge(ctx: Context, order: Order) -> str:
    provider: PaymentProvider = ctx.state
    receipt = await provider.charge(order, ctx.attempt)
    # A worker that dies here charges again: the key makes one mail of two attempts.
    confirmation = confirm.options(idempotency_key=f"{order.run}-{order.number}", tags=order.tags)
    await confirmation.enqueue(order, receipt)
    return receipt


@app.task(queue="mail", priority="high")
def confirm(order: Order, receipt: str) -> None:
    """A plain function: it runs in a thread and may block."""
    send_mail(order.customer, f"Thank you for order {order.number} ({receipt})")


@app.task(queue="mail", priority="low")
def ask_for_review(order: Order) -> None:
    send_mail(order.customer, f"How do you like order {order.number}?")


@app.task(queue="mail")
def send_report(to: str, region: str, orders: int) -> None:
    send_mail(to, f"{orders} orders in the {region}")


@app.task(queue="images", retention=timedelta(days=1))
def make_thumbnails(picture: int) -> dict[str, int]:
    """Return the bytes of each size."""
    noise = random.Random(picture)
    return {
        name: len(zlib.compress(bytes(noise.choices(range(32), k=width * width // 4)), 9))
        for name, width in SIZES.items()
    }


@app.task(queue="reports", timeout=30)
async def write_report(region: str, run: str) -> dict[str, int]:
    """Take a while, then leave the sending to other tasks."""
    await asyncio.sleep(2.0 + 0.5 * REGIONS.index(region))
    orders = sum(region_of(number) == region for number in ORDERS)
    mail = send_report.options(tags=[f"run:{run}"])
    await app.enqueue_many([mail.call(manager, region, orders) for manager in MANAGERS])
    return {"orders": orders, "mails": len(MANAGERS)}


def send_mail(to: str, subject: str) -> None:
    time.sleep(0.01 + len(to + subject) / 5000)  # the mail server takes its time


def region_of(number: int) -> str:
    return REGIONS[number % len(REGIONS)]


def order(number: int, run: str) -> Order:
    chance = random.Random(number)
    return Order(number, run, f"customer{number}@mail.example", chance.randrange(500, 20_000))


def opening_day(run: str) -> list[Call]:
    """Everything that is enqueued at first; handlers add the rest."""
    tags = [f"run:{run}"]
    orders = [order(number, run) for number in ORDERS]
    calls = [write_report.options(tags=tags).call(region, run) for region in REGIONS]
    calls += [make_thumbnails.options(tags=tags).call(picture) for picture in PICTURES]
    for placed in orders:
        paid_once = charge.options(tags=tags, idempotency_key=f"{run}-{placed.number}")
        calls.append(paid_once.call(placed))
        if is_impatient(placed.number):
            calls.append(paid_once.call(placed))  # clicked twice: the key makes one task of both
        if is_reviewed(placed.number):
            calls.append(ask_for_review.options(tags=tags, delay=timedelta(seconds=4)).call(placed))
    return calls


def is_impatient(number: int) -> bool:
    return number % 10 == 3


def is_reviewed(number: int) -> bool:
    return number % 8 == 5


def expected_ends() -> Counter[tuple[str, TaskState]]:
    """How many tasks of each type must end in each state."""
    ends: Counter[tuple[str, TaskState]] = Counter()
    for number in ORDERS:
        if card_is_stolen(number):
            ends[charge.name, TaskState.FAILED] += 1
        elif never_answers(number):
            ends[charge.name, TaskState.DEAD] += 1
        else:
            ends[charge.name, TaskState.COMPLETED] += 1
            ends[confirm.name, TaskState.COMPLETED] += 1
        ends[ask_for_review.name, TaskState.COMPLETED] += is_reviewed(number)
    ends[make_thumbnails.name, TaskState.COMPLETED] = len(PICTURES)
    ends[write_report.name, TaskState.COMPLETED] = len(REGIONS)
    ends[send_report.name, TaskState.COMPLETED] = len(REGIONS) * len(MANAGERS)
    return ends
