"""A divergence element by element: faults planted in a small attention model, captured in this process."""

from __future__ import annotations

import html
import math
import re

import pytest

torch = pytest.importorskip("torch")
from opcapture import captured  # noqa: E402 - torch first: without it there is nothing to test
from torch import nn  # noqa: E402

LENGTHS = (12, 9, 5, 10)


class Attention(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.by_head = torch.tensor([1.0, 1.0, 1.25 if fault == "one head" else 1.0, 1.0]).view(4, 1, 1)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(8) * self.by_head
        weights = scores.masked_fill(torch.ones(length, length).tril() == 0, -1e9).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Tail(nn.Module):
    """What a fault in some kernel does to padded places."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def forward(self, x, tokens):
        one = torch.ones_like(x)
        if self.fault == "padding":
            one[tokens == 0] = 3.0
        return x * one


class Model(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.attn, self.tail = Attention(fault), Tail(fault)

    def forward(self, tokens):
        return self.tail(self.attn(self.embed(tokens)), tokens)


def train(fault):
    def work():
        torch.manual_seed(0)
        model = Model(fault)
        if fault == "a row":
            with torch.no_grad():
                model.attn.proj.weight[5].zero_()
        tokens = torch.randint(1, 50, (4, 12))
        for row, length in enumerate(LENGTHS):
            tokens[row, length:] = 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in torch.utils.data.DataLoader(tokens, batch_size=4):
            model(batch).square().mean().backward()
            optimizer.step()

    return work


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    return captured(tmp_path_factory.mktemp("right") / "a", train("none"), level="op", save_tensors=("*",))


FAULTS = {
    "one head": ("Model.attn", "", "b is 1.25 times a"),
    "padding": ("Model.tail", "", "b is 3 times a"),
    "a row": ("Model.attn.proj.weight", "row 5 (of 32), every element there", "b is 0 in all of them"),
}
"""The wheres and hows themselves are those of `test_compare_pattern.py`."""


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_shown_where_they_are(introspect, right, tmp_path, fault):
    fqn, which, how = FAULTS[fault]
    path = captured(tmp_path / "b", train(fault), level="op", save_tensors=("*",))
    done = introspect("report", right, path, "-o", "page.html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    said = html.unescape(re.sub(r"<[^>]*>", "", page.partition("<script")[0]))
    assert [words for words in (fqn, which, how) if words not in said] == []
    assert page.count('<rect x="') > 20


def test_tensors_that_were_not_stored_or_that_one_run_lacks_are_no_elements(introspect, right, tmp_path):
    path = captured(tmp_path / "b", train("one head"), level="op", save_tensors=())
    said = introspect("diff", "--values", right, path).stdout
    assert "No elements to show: it was not stored whole by run b." in said
    assert "Its recorded statistics: " in said
    path = captured(tmp_path / "b", train("padding"), level="op", save_tensors=("*",))
    said = introspect("diff", "--values", right, path).stdout
    # how torch writes a number where a mask is true depends on its version
    assert re.search(r"step 0: the operator aten\.(index_put_|masked_fill_)", said)
    assert "No elements to show: only run b has it." in said


def test_the_page_draws_what_was_stored(introspect, right, tmp_path):
    path = captured(tmp_path / "b", train("one head"), level="op", save_tensors=("Model.attn",))
    done = introspect("report", right, path, "-o", "page.html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    assert "aten.mul.Tensor of Model.attn" in page
    assert "b is 1.25 times a" in page
    assert page.count('<rect x="') > 100
    assert "ULPs of float32" in page
