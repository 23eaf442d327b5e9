"""Schedules: their text, and the steps they want."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from introspect_cli.errors import UsageError
from introspect_cli.schedule.rules import Schedule

BEYOND = 640  # beyond all starts and strides


def python_slice(start, stop, stride):
    return ":".join("" if number is None else str(number) for number in (start, stop, stride))


number = st.one_of(st.none(), st.integers(0, 120))
slices = st.builds(python_slice, number, number, st.one_of(st.none(), st.integers(1, 17)))
parts = st.lists(st.one_of(st.integers(0, 120).map(str), slices), min_size=1, max_size=4)


def wanted(texts):
    """What python's own slices select of the steps below `BEYOND`."""
    steps = set()
    for text in texts:
        if ":" in text:
            bounds = [int(word) if word else None for word in text.split(":")]
            steps.update(range(BEYOND)[slice(*bounds)])
        else:
            steps.add(int(text))
    return steps


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no fault of what is tested
@given(parts)
def test_it_wants_what_python_slices_select(texts):
    if any(not wanted([text]) for text in texts):
        with pytest.raises(UsageError):
            Schedule.parse(",".join(texts))
        return
    schedule = Schedule.parse(",".join(texts))
    expected = wanted(texts)
    assert {step for step in range(BEYOND) if schedule.wants(step)} == expected
    if schedule.last is None:
        assert schedule.wants(max(expected))
    else:
        assert schedule.last == max(expected)
    again = Schedule.parse(str(schedule))
    assert again == schedule
    assert str(again) == str(schedule)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (":", ":"),
        ("::1", ":"),
        ("0,5,10:20,100::50", "0,5,10:20,100::50"),
        (" 0 , 5 ", "0,5"),
        ("5,5,5:6", "5"),
        ("100:200:300", "100"),
    ],
)
def test_a_schedule_is_written_as_it_is_read(text, shown):
    assert str(Schedule.parse(text)) == shown


@pytest.mark.parametrize(
    "text",
    ["", ",", "5,", "x", "-1", "5:x", "1:2:3:4", "::0", "5:5", "9:3", "1.5", "٣", "1" * 30, "0x10", "1_0", "all"],
)
def test_what_is_no_schedule_is_reported(text):
    with pytest.raises(UsageError, match="schedule"):
        Schedule.parse(text)
