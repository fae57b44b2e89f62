"""What an application wants to have called: when a worker starts and stops, and when a task has failed."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from windlass.service import in_thread


async def call(hook: Callable[..., Any], *arguments: Any) -> Any:
    """Call a hook, a coroutine function, or a plain one: in a thread if it is given anything to work on."""
    if arguments and not inspect.iscoroutinefunction(hook):
        result = await in_thread(hook, *arguments)
    else:
        result = hook(*arguments)
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
