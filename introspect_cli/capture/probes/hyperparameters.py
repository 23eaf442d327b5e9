"""What an optimizer steps with: learning rates each step, everything else where it is new or has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from introspect_cli.records import Kind, Phase, Site, SiteInfo

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer

    from introspect_cli.capture.recorder import Recorder

PLAIN = (bool, int, float, str)
_KEPT = frozenset({*PLAIN, type(None)})
_OTHER = object()


class _Known(NamedTuple):
    """A value as it was recorded the last time: itself, where it is plain and equal to itself; as plain data; where."""

    value: object
    plain: Any
    site: int


class Hyperparameters:
    """Records what is in an optimizer's groups beside parameters."""

    def __init__(self, recorder: Recorder) -> None:
        """Start with nothing recorded."""
        self._recorder = recorder
        self._known: dict[tuple[str, int], dict[str, _Known]] = {}

    def record(self, optimizer: Optimizer, name: str, first: int) -> None:
        """Record the learning rate of each group, and everything else where it is new or has changed.

        Args:
            optimizer: the one that steps.
            name: its name.
            first: the number of its first group.
        """
        resumed = self._recorder.resumed
        for number, group in enumerate(optimizer.param_groups, first):
            known = self._known.setdefault((name, number), {})
            for key, value in group.items():
                before = known.get(key)
                is_rate = key == "lr"
                if key == "params" or (before is not None and before.value is value and not is_rate and not resumed):
                    continue
                plain = setting(value)
                if is_rate or resumed or before is None or before.plain != plain:
                    if before is None:
                        path = f"[{number}][{key!r}]"
                        found = Site(Phase.OPTIMIZER, Kind.HYPERPARAMETER, name, 0, path)
                        site = self._recorder.site(found, SiteInfo(type(optimizer).__name__))
                    else:
                        site = before.site
                    known[key] = _Known(value if _is_fixed(value) else _OTHER, plain, site)
                    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                        self._recorder.tensor(site, value)
                    else:
                        self._recorder.value(site, plain)


class OptimizerSettings:
    """What the optimizers' groups hold, with the names of their parameters: the document `settings/optimizers`.

    Attributes:
        found: one entry for each optimizer.
        changed: whether that is another than when it was last written.
    """

    def __init__(self) -> None:
        """Start without optimizers."""
        self.found: list[dict[str, Any]] = []
        self.changed = False

    def note(self, name: str, optimizer: Optimizer, fqns: list[list[str]], *, first: int, in_turn: bool) -> None:
        """Put an optimizer in, in the place of what it was.

        Args:
            name: its name.
            optimizer: it.
            fqns: of each of its parameters, the name, or those of what lies in a flat one.
            first: the number of its first group.
            in_turn: whether another optimizer may have it step its groups one after the other.
        """
        remaining = iter(fqns)
        groups = [
            {
                **{key: setting(value) for key, value in group.items() if key != "params"},
                "params": [fqn for _ in group["params"] for fqn in next(remaining)],
            }
            for group in optimizer.param_groups
        ]
        before = [group for entry in self.found if entry["name"] == name for group in entry["groups"]]
        groups = [*before[:first], *groups]
        if in_turn:  # those that are not stepped now may have no parameters
            groups = [group if group["params"] else [*before[at : at + 1], group][0] for at, group in enumerate(groups)]
        self.found = [entry for entry in self.found if entry["name"] != name]
        self.found.append({"name": name, "class": type(optimizer).__name__, "groups": groups})
        self.changed = True


def _is_fixed(value: object) -> bool:
    """Whether what is this very object stays equal to what it was: plain, and no number that equals nothing."""
    if type(value) is tuple:
        return all(type(item) in _KEPT for item in value)
    return type(value) in _KEPT and value == value  # noqa: PLR0124 - see above


def setting(value: object) -> Any:
    """A hyper-parameter as plain data."""
    if value is None or isinstance(value, PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.device.type == "cpu" and value.numel() <= 16 else f"tensor on {value.device}"
    if isinstance(value, (tuple, list)):
        return [setting(item) for item in value]
    return type(value).__name__
