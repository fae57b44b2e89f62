"""Every event is one line, and shows no row of the database."""

import logging

import asyncpg
import pytest

from windlass.telemetry import emit


def test_an_error_is_told_by_its_name_and_its_first_line(caplog: pytest.LogCaptureFixture) -> None:
    error = asyncpg.CheckViolationError("new row is refused")
    error.detail = "Failing row contains (secret)."
    assert "secret" in str(error)

    emit("chore.failed", chore="retain", error=error)

    assert caplog.messages == [
        "chore.failed chore=retain error=CheckViolationError: new row is refused"
    ]


def test_an_error_without_words_is_told_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    emit("store.unavailable", doing="lead", error=TimeoutError())

    assert caplog.messages == ["store.unavailable doing=lead error=TimeoutError"]


@pytest.mark.parametrize("event", ["settlement.refused", "settlement.abandoned", "lease.lost"])
def test_what_costs_a_task_another_run_is_a_warning(
    caplog: pytest.LogCaptureFixture, event: str
) -> None:
    emit(event)

    assert caplog.records[0].levelno == logging.WARNING
