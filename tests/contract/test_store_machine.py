"""PostgreSQL answers as the executable specification does, whatever is asked of both."""

import asyncio
import os
import random
from collections.abc import Coroutine, Iterator
from datetime import datetime
from typing import Any, TypeVar

import asyncpg
import hypothesis
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from contract.explain_machine import explain_machine_for
from contract.pgbouncer import store_options
from contract.postgres_clock import PostgresClock
from contract.postgres_empty import EMPTY
from contract.store_machine import StoreMachine, machine_for
from windlass.store.postgres.store import PostgresStore

T = TypeVar("T")

EXAMPLES = int(os.environ.get("STORE_MACHINE_EXAMPLES", "40"))
SEED = int(os.environ.get("STORE_MACHINE_SEED", str(random.getrandbits(32))))


class PostgresSubject:
    """One database, one store and one event loop for all examples."""

    def __init__(self, url: str, sql_url: str) -> None:
        self._url = sql_url
        self._loop = asyncio.new_event_loop()
        self.store = PostgresStore(store_options(url))

    def open(self) -> None:
        self.run(self.store.open())
        self._clock = self.run(PostgresClock.install(self._url))
        self._connection: asyncpg.Connection = self.run(_connect(self._url))

    def close(self) -> None:
        self.run(self._connection.close())
        self.run(self._clock.close())
        self.run(self.store.close())
        self._loop.close()

    def reset(self) -> None:
        self.run(self._connection.execute(EMPTY))

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(call)

    def set_clock(self, now: datetime) -> None:
        self.run(self._clock.freeze(now))


async def _connect(url: str) -> asyncpg.Connection:
    return await asyncpg.connect(url)


@pytest.fixture
def postgres_subject(database_url: str, sql_url: str) -> Iterator[PostgresSubject]:
    subject = PostgresSubject(database_url, sql_url)
    subject.open()
    yield subject
    subject.close()


@pytest.mark.timeout(600)
def test_postgres_and_the_model_give_the_same_answers(postgres_subject: PostgresSubject) -> None:
    drive(machine_for(postgres_subject))


@pytest.mark.timeout(600)
def test_explain_says_claimable_exactly_when_the_next_claim_returns_it(
    postgres_subject: PostgresSubject,
) -> None:
    drive(explain_machine_for(postgres_subject))


def drive(machine: type[StoreMachine]) -> None:
    print(f"STORE_MACHINE_SEED={SEED}")

    run_state_machine_as_test(
        hypothesis.seed(SEED)(machine),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=28,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
