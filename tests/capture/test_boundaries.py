"""A norm moved over the boundary of a module that keeps its name: two modules of one name, and the same numbers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from opcapture import captured, compared
from refactored import fit
from torch import nn

from introspect_cli.compare.terms.result import Verdict


class Mlp(nn.Module):
    """Two layers, with a norm before or after them, inside, where one is asked for."""

    def __init__(self, before=None, after=None):
        super().__init__()
        self.norm, self.last = before, after
        self.up, self.act, self.down = nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)

    def forward(self, x):
        x = x if self.norm is None else self.norm(x)
        x = self.down(self.act(self.up(x)))
        return x if self.last is None else self.last(x)


class Residual(nn.Module):
    """What is inside, and a norm before or after it, where one is asked for."""

    def __init__(self, fn, before=None, after=None, nudge=1):
        super().__init__()
        self.norm, self.last, self.fn, self.nudge = before, after, fn, nudge

    def forward(self, x):
        y = x if self.norm is None else self.norm(x)
        y = self.fn(y if self.nudge == 1 else y * self.nudge)
        return x + (y if self.last is None else self.last(y))


class PreNorm(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.norm, self.fn = norm(), fn

    def forward(self, x):
        return self.fn(self.norm(x))


class Whole(nn.Module):
    """Two blocks between an embedding and a head; every parameter is drawn anew, in an order that no block changes."""

    def __init__(self, block):
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(4, 8), nn.Sequential(block(), block()), nn.Linear(8, 3)
        source = torch.Generator().manual_seed(3)
        layers = [each for each in self.modules() if isinstance(each, nn.Linear)]
        with torch.no_grad():
            for layer in layers:
                layer.weight.normal_(0, 0.5, generator=source)
            for layer in self.modules():
                if isinstance(layer, nn.LayerNorm):  # told apart by their values
                    layer.weight.normal_(1, 0.2, generator=source)
                    layer.bias.normal_(0, 0.2, generator=source)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


def norm():
    return nn.LayerNorm(8)


def sequence(*inside):
    """The same two layers as a sequence, the norm first where it is one of them."""
    return nn.Sequential(*inside, nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))


BLOCKS = {
    "outside": lambda: Residual(Mlp(), before=norm()),
    "inside": lambda: Residual(Mlp(before=norm())),
    "inside, nudged": lambda: Residual(Mlp(before=norm()), nudge=1.001),
    "outside, nudged": lambda: Residual(Mlp(), before=norm(), nudge=1.001),
    "after, outside": lambda: Residual(Mlp(), after=norm()),
    "after, inside": lambda: Residual(Mlp(after=norm())),
    "sequence, outside": lambda: Residual(sequence(), before=norm()),
    "sequence, inside": lambda: Residual(sequence(norm())),
    "two levels": lambda: Residual(PreNorm(Mlp())),
    "two levels, inside": lambda: Residual(Mlp(before=norm())),
    "three levels": lambda: Residual(Residual(PreNorm(Mlp()))),
    "three levels, inside": lambda: Residual(Residual(Mlp(before=norm()))),
    "three levels, outside": lambda: Residual(Residual(Mlp(), before=norm())),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")

    def find(name):
        path = directory / name.replace(", ", "-").replace(" ", "-")
        return path if path.exists() else captured(path, fit(partial(Whole, BLOCKS[name]), steps=2))

    return find


@pytest.fixture
def diff(run):
    def compare(a, b, **options):
        return compared(run(a), run(b), **options)

    return compare


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("outside", "inside"),
        ("after, outside", "after, inside"),
        ("sequence, outside", "sequence, inside"),
        ("two levels", "outside"),
        ("two levels", "two levels, inside"),
        ("three levels", "three levels, inside"),
        ("three levels", "three levels, outside"),
        ("three levels, outside", "three levels, inside"),
    ],
)
@pytest.mark.parametrize("back", [False, True])
def test_a_norm_that_moves_into_a_wrapper_or_out_of_it_changes_no_number(diff, a, b, back):
    result = diff(b, a) if back else diff(a, b)
    assert result.verdict is Verdict.SAME, result.sentence
    assert "norm" in result.sentence or "fn" in result.sentence


@pytest.mark.parametrize(("a", "b"), [("outside", "inside, nudged"), ("inside", "outside, nudged")])
@pytest.mark.parametrize("back", [False, True])
def test_a_number_that_is_changed_beside_it_is_named(diff, a, b, back):
    result = diff(b, a) if back else diff(a, b)
    assert result.verdict is Verdict.DIVERGED
    assert result.first.site.fqn.startswith("Whole.blocks.0.")
