"""Who runs a command."""

import getpass
import os
import re
import socket

_LONGEST_PART = 99  # characters, so that both and what is between them are a name
_UNFIT = re.compile(r"[\x00-\x20\x7f-\x9f()\ud800-\udfff]")


def caller() -> str:
    """The user and the machine, as `user@host`, in characters that a name may hold."""
    return f"{_fit(_user())}@{_fit(socket.gethostname())}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # nobody has named it, as in many containers
        return f"uid{os.getuid()}" if hasattr(os, "getuid") else "somebody"


def _fit(text: str) -> str:
    return _UNFIT.sub("_", text)[:_LONGEST_PART] or "unknown"
