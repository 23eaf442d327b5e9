"""What a shell script may rely on: the exit codes of every verb but `capture`, whose code is the script's."""

SAME = 0
"""The runs agree wherever both were observed."""

DIVERGED = 1
"""The runs differ (or, for `check` and `verify`, something was found)."""

UNDECIDED = 2
"""No answer: bad usage, an unreadable store, nothing in common, one run ends early."""

CANNOT_TEST = 125
"""Code for `git bisect run` to skip the revision."""
