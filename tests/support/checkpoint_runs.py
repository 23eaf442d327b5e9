"""Runs made of checkpoints, and what is said of them."""

from __future__ import annotations

import pytest

from introspect_cli.compare.checkpoints import as_moments
from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions
from introspect_cli.exchange.checkpoints import open_any, written

torch = pytest.importorskip("torch")


def answer(a, b, **options):
    """What `diff` finds."""
    with open_any(a) as opened, open_any(b) as other:
        return compare_runs(*as_moments(opened, other, written), DiffOptions(**options))


def said(a, b, **options):
    """Verdict, sentence and all that is said beside it."""
    result = answer(a, b, **options)
    return result.verdict.value, result.sentence, "\n".join((*result.evidence, *result.notes))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.up = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 16)
        self.bn, self.down = torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 20, bias=False)

    def forward(self, tokens):
        return self.down(torch.relu(self.bn(self.up(self.emb(tokens)))))
