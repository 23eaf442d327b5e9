"""Which cases of a wide test an ordinary run takes; `pytest -m sweep` runs the others."""

from __future__ import annotations

import pytest


def sliced(values, kept):
    """The values as parameters: those of `kept` in every run, the others in the sweep alone."""
    assert all(value in values for value in kept), "a slice of what is there"
    return [value if value in kept else pytest.param(*_several(value), marks=pytest.mark.sweep) for value in values]


def _several(value):
    return value if isinstance(value, tuple) else (value,)
