"""Runs made of checkpoints, and what is said of them."""

from __future__ import annotations

import pytest

from introspect_cli.api import diff

torch = pytest.importorskip("torch")


def answer(a, b, **options):
    """What `diff` finds."""
    return diff(a, b, **options).result


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
