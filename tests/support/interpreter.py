"""The python of the tests, which a test that has processes forked replaces in `sys`."""

from __future__ import annotations

import sys

PYTHON = sys.executable
