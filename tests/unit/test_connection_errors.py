"""What is told of an error of the server."""

import asyncpg
import pytest

from windlass.model.errors import StoreUnavailable
from windlass.store.postgres.connection import translated


@pytest.mark.parametrize(
    "said", ["could not extend file", "could not extend file: No space left on device"]
)
def test_a_full_disk_is_named_once_also_where_the_server_does_not(said: str) -> None:
    with pytest.raises(StoreUnavailable) as raised, translated():
        raise asyncpg.DiskFullError(said)

    assert str(raised.value).endswith("could not extend file: No space left on device")


@pytest.mark.parametrize(
    "ended", [asyncpg.IdleInTransactionSessionTimeoutError, asyncpg.TransactionTimeoutError]
)
def test_a_transaction_that_the_server_has_ended_in_its_pause_can_be_tried_again(
    ended: type[asyncpg.PostgresError],
) -> None:
    with pytest.raises(StoreUnavailable, match="too long"), translated():
        raise ended("too long")
