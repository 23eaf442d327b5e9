"""How many processors there are for us, which need not be all that the machine has.

Who trains and who reads ask the same: a container or `taskset` that allows two of sixty-four is two to both.
"""

import os


def processors() -> int:
    """How many processors this process may use, at least 1."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
