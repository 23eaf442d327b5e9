"""Whether sharing work among threads pays at the moment.

The problem: on a machine with more work than cores, or in a container with fewer cores than it shows, the threads
that share a call wait for each other until the system has given all of them a turn: milliseconds instead of
microseconds. The way: time what is done alone and what is shared; after a few shared calls that took longer than the
same would have taken alone, share nothing for a while, then try again.
"""

from __future__ import annotations

from typing import Final

_SLACK: Final = 1.5
"""What was done alone may have been in the cache, and what is shared not."""
_STRIKES: Final = 3
"""Slow shared calls, less the quick ones since, before a pause."""
_PAUSE: Final = 100
"""Calls done alone then."""
_CALIBRATION: Final = 200
"""One in so many calls is done alone in any case, to know what that takes."""
_UNTIMED: Final = 4
"""Calls after a timed one that are done without a look at the clock."""


class Pace:
    """What calls of one kind took, in seconds per element.

    Attributes:
        untimed: calls that may still be shared, or not, as `pays` last said, before it must be asked again.
        shares: what that is.
    """

    def __init__(self) -> None:
        self.untimed = 0
        self.shares = False
        self._alone = 0.0
        self._strikes = 0
        self._pause = 0
        self._calls = 0

    def pays(self) -> bool:
        """Whether to share the next call, of which `note` wants to hear."""
        self._calls += 1
        if self._pause:
            self._pause -= 1
            return False
        return self._calls % (_CALIBRATION // (1 + _UNTIMED)) != 1

    def note(self, seconds: float, *, shared: bool) -> None:
        """What a call took, per element."""
        if not shared:
            # a call may be interrupted, none is quicker than it can be: forget slow ones sooner than quick ones
            self._alone = seconds if not self._alone else min(seconds, 0.9 * self._alone + 0.1 * seconds)
        elif seconds <= _SLACK * self._alone:
            self._strikes = max(0, self._strikes - 1)
        else:
            self._strikes += 1
            if self._strikes == _STRIKES:
                self._strikes, self._pause = 0, _PAUSE // (1 + _UNTIMED)
        self.shares = self._alone > 0 and not self._pause
        # in doubt, every call is timed
        certain = self._pause or (shared and not self._strikes)
        self.untimed = _UNTIMED if certain else 0
