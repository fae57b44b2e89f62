"""Times that the documentation promises are those of the code."""

from pathlib import Path

import pytest

from windlass import service
from windlass.cli import run
from windlass.client import verbs
from windlass.model import limits
from windlass.runtime import loop_watch
from windlass.store.postgres import connection, dial

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("seconds", "page", "promise"),
    [
        (dial.NEXT_HOST_AFTER == 1, "operating", "one that is silent for a second is passed by"),
        (service.LONGEST_BACKOFF == 5, "operating", "with pauses of up to five seconds"),
        (verbs.REPEAT_WITHIN == 2, "enqueueing", "is repeated by itself for up to two seconds"),
        (connection.ANSWER_WITHIN == 60, "enqueueing", "has a minute for each statement"),
        (connection.CONNECT_WITHIN == 10, "enqueueing", "ten seconds for each new connection"),
        (connection.LOOK_WITHIN == 10, "enqueueing", "ten seconds for each look at the schema"),
        (limits.UNNOTICED_STEP.seconds == 3, "operating", "A step of up to three seconds"),
        (run.WAIT_FOR_DATABASE == 60, "workers", "it waits a minute for it"),
        (loop_watch.BLOCKED_AFTER == 1, "workers", "for over a second"),
    ],
)
def test_a_time_in_the_documentation_is_that_of_the_code(
    seconds: bool, page: str, promise: str
) -> None:
    said = " ".join((DOCS / f"{page}.md").read_text().split())
    assert promise in said
    assert seconds, f"docs/{page}.md: {promise}"
