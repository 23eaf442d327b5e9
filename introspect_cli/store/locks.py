"""Who is writing: advisory locks that the system drops with their process.

The problem: a reader must know whether a run still goes on, and two captures must not share a directory, also
when the first was killed and could clean nothing up. The way: `flock` on a descriptor the writer keeps open.
A file system without locks behaves as if nobody ever held one.
"""

from __future__ import annotations

import fcntl
import time

_ATTEMPTS = 5
_PAUSE = 0.01  # seconds; a reader that asks holds the lock for microseconds


def take(fd: int) -> bool:
    """Take the lock until `fd` is closed; False where another process has it."""
    for _ in range(_ATTEMPTS):
        if _try(fd):
            return True
        time.sleep(_PAUSE)
    return _try(fd)


def _try(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def held(fd: int) -> bool:
    """Whether a writer holds the lock of the open file `fd`."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
