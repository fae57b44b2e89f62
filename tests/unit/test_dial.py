"""What a connection that could not be opened leads to: a server brought back, or the error that helps."""

from typing import Any

import asyncpg
import pytest

from windlass.store.postgres.dial import dial

ONE = "postgresql://u@/d?host=a&port=1"
TWO = "postgresql://u@/d?host=a,b&port=1,2"
NOBODY = OSError("nobody there")
STANDBY = asyncpg.TargetServerAttributeNotMatched("a standby")
REFUSED = asyncpg.InvalidPasswordError("refused")


class Server:
    """Answers each attempt to connect in turn, and may be revived."""

    def __init__(self, *answers: Exception | str) -> None:
        self.answers = list(answers)
        self.revivals = 0

    async def connect(self, *_: Any, **__: Any) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def revive(self) -> None:
        self.revivals += 1


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ((NOBODY, REFUSED), REFUSED),
        ((NOBODY, STANDBY), STANDBY),
        ((STANDBY, REFUSED), REFUSED),
        ((NOBODY, OSError("nor there")), NOBODY),
    ],
)
async def test_when_no_host_will_do_the_error_that_helps_most_is_told(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[Exception, ...], told: Exception
) -> None:
    monkeypatch.setattr(asyncpg, "connect", Server(*answers).connect)

    with pytest.raises(type(told), match=str(told)):
        await dial(None, TWO)


@pytest.mark.parametrize(
    "gone", [NOBODY, asyncpg.CannotConnectNowError("starting up")], ids=["nobody", "starting"]
)
async def test_a_server_of_our_own_that_is_gone_is_brought_back_and_asked_once_more(
    monkeypatch: pytest.MonkeyPatch, gone: Exception
) -> None:
    server = Server(gone, "a connection")
    monkeypatch.setattr(asyncpg, "connect", server.connect)

    assert await dial(server.revive, ONE) == "a connection"
    assert server.revivals == 1


@pytest.mark.parametrize(
    "answer", [TimeoutError("slow"), STANDBY, REFUSED], ids=["slow", "standby", "refused"]
)
async def test_a_server_that_is_there_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, answer: Exception
) -> None:
    server = Server(answer)
    monkeypatch.setattr(asyncpg, "connect", server.connect)

    with pytest.raises(type(answer)):
        await dial(server.revive, ONE)
    assert server.revivals == 0
