"""A pytest plugin: `def test_training(introspect): introspect.assert_same_training("golden/gpt", train)`.

A test of training asserts that numbers are what they were; where they are not it should say at which step and module
they diverge, and not print two tensors. The fixture captures in the test's own process, so that fixtures, monkeypatches
and coverage work as in any test.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.compare.result import DiffResult

_UPDATE = "--introspect-update"


def pytest_addoption(parser: Any) -> None:
    """Declare the option `--introspect-update`."""
    group = parser.getgroup("introspect")
    group.addoption(_UPDATE, action="store_true", help="Save the golden runs of tests anew instead of checking them.")


@pytest.fixture
def introspect(request: Any) -> Checks:
    """Assertions about training; paths of golden runs are relative to the directory of the test's file."""
    return Checks(Path(request.path).parent, update=request.config.getoption(_UPDATE))


class Checks:
    """Assertions of the `introspect` fixture.

    Args:
        folder: golden runs are looked for below it.
        update: whether they are saved anew.
    """

    def __init__(self, folder: Path, *, update: bool) -> None:
        """Keep both; nothing runs before an assertion."""
        self._folder = folder
        self._update = update

    def assert_same_training(
        self, path: str | Path, train: Callable[[], Any], *, rtol: float = 0.0, atol: float = 0.0
    ) -> None:
        """Assert that a function trains as it did when the golden run was saved.

        The test fails where there is no golden run. With `--introspect-update`, it is saved and nothing is compared.

        Args:
            path: the golden run, relative to the test's directory.
            train: what trains; called once, without arguments.
            rtol: tolerated root-mean-square difference, relative to the values.
            atol: tolerated root-mean-square difference.

        Raises:
            AssertionError: the verdict is not SAME; undecided, too.
            Exception: whatever `train` raises.
        """
        __tracebackhide__ = True
        from introspect_cli.api import capture
        from introspect_cli.rerun.golden import ABOUT, KINDS, Golden, compare_golden, pack_golden

        place = self._folder / path
        golden = Golden(steps=0, rtol=rtol, atol=atol)
        if not self._update and not (place / ABOUT).exists():
            pytest.fail(f"no golden run at {place}: save it with `pytest {_UPDATE}` and commit it", pytrace=False)
        small: dict[str, Any] = {"env": False, "packages": False, "source": False, "stats": "none"}
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            with capture(None, run, record=KINDS, **small):
                train()
            if self._update:
                pack_golden(run, golden, place)
            else:
                _fail_unless_same(compare_golden(place, golden, run))

    def assert_same_numbers(
        self, model_a: Any, model_b: Any, inputs: Any, *, rtol: float = 0.0, atol: float = 0.0
    ) -> None:
        """Assert that two models of the same structure give the same numbers in one forward pass, module by module.

        Args:
            model_a: the reference.
            model_b: what should equal it.
            inputs: a tensor, a tuple of arguments, or a dict of keyword arguments, which each model is called with.
            rtol: tolerated root-mean-square difference, relative to the values.
            atol: tolerated root-mean-square difference.

        Raises:
            AssertionError: the verdict is not SAME; undecided, too.
        """
        __tracebackhide__ = True
        from introspect_cli.api import compare_transformed

        keywords = inputs if isinstance(inputs, dict) else {}
        given = () if isinstance(inputs, dict) else inputs if isinstance(inputs, tuple) else (inputs,)
        _fail_unless_same(
            compare_transformed(model_a, model_b, *given, kwargs=keywords, backward=False, rtol=rtol, atol=atol)
        )


def _fail_unless_same(result: DiffResult) -> None:
    """Raise an AssertionError with the answer and its evidence unless the verdict is SAME."""
    __tracebackhide__ = True
    from introspect_cli.compare.result import Verdict

    if result.verdict is Verdict.SAME:
        return
    lines = [result.sentence, *(f"  - {line}" for line in result.evidence), *result.notes]
    raise AssertionError("\n".join(lines))
