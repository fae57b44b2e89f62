"""What an application wants to have called when a worker starts and stops."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any


async def call(hook: Callable[[], Any]) -> Any:
    """Call a hook, a plain function or a coroutine function."""
    result = hook()
    return await result if isinstance(result, Awaitable) else result


async def call_all(hooks: Sequence[Callable[[], Any]]) -> None:
    """Call each, whatever those before it raised; raise what they did."""
    errors = []
    for hook in hooks:
        try:
            await call(hook)
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)
    if len(errors) > 1:
        raise ExceptionGroup("several shut-down hooks failed", errors)
    if errors:
        raise errors[0]
