"""Run one PostgreSQL program under an identity that it accepts.

A script of its own, started by its path, isolated from site packages, with few imports:

    embedded_launch.py (self|namespace|account) UID GID (stay|leave) DIRECTORY PROGRAM [ARGUMENT]...
"""

import fcntl
import os
import sys

_CLONE_NEWUSER = 0x10000000


def main(arguments: list[str]) -> None:
    """Lock the directory for as long as the program or a child of it lives, then become it."""
    identity, uid, gid, stay, directory, *command = arguments
    os.umask(0o077)
    # Not closed on exec: the system drops this lock when the last process of the server has ended,
    # however it ended. No other sign of life is safe from going stale.
    lock = os.open(f"{directory}/server.lock", os.O_RDWR | os.O_NOFOLLOW)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.set_inheritable(lock, True)
    if identity == "namespace":
        _enter_namespace(int(uid), int(gid))
    elif identity == "account":
        os.setgroups([])
        os.setgid(int(gid))
        os.setuid(int(uid))
    os.chdir(directory)
    if stay == "leave" and os.fork() != 0:
        os._exit(0)
    os.execv(command[0], command)  # noqa: S606 - there is nothing for a shell to do


def _enter_namespace(uid: int, gid: int) -> None:
    # PostgreSQL refuses to run as root. In a user namespace our id goes by another number, while
    # the files stay ours and folders that only we may enter stay open.
    import ctypes  # noqa: PLC0415 - half of this script's start, and rarely needed

    outer_uid, outer_gid = os.geteuid(), os.getegid()
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUSER) != 0:
        raise OSError(ctypes.get_errno(), "user namespaces are refused")
    _write("/proc/self/setgroups", "deny")  # the kernel's condition for writing gid_map
    _write("/proc/self/uid_map", f"{uid} {outer_uid} 1")
    _write("/proc/self/gid_map", f"{gid} {outer_gid} 1")


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    os.write(descriptor, text.encode())
    os.close(descriptor)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except OSError as error:
        sys.exit(f"cannot run PostgreSQL as {sys.argv[1]} {sys.argv[2]}: {error}")
