"""A divergence element by element: faults planted in a small attention model, captured in this process."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
from opcapture import captured  # noqa: E402 - torch first: without it there is nothing to test
from rendered import text_of  # noqa: E402
from torch import nn  # noqa: E402

from introspect_cli.compare.closeup import closeup, worth_a_look  # noqa: E402
from introspect_cli.compare.diff import compare_runs  # noqa: E402
from introspect_cli.compare.result import DiffOptions  # noqa: E402
from introspect_cli.render.values_text import closeup_blocks  # noqa: E402
from introspect_cli.store.run import open_run  # noqa: E402

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


@pytest.fixture
def look(right, tmp_path):
    """The close-up of the first divergence that can be compared, of a run with a fault, and what is printed of it."""

    def run(fault, **options):
        path = captured(tmp_path / "b", train(fault), level="op", **{"save_tensors": ("*",), **options})
        with open_run(right) as a, open_run(path) as b:
            shown = closeup(a, b, worth_a_look(compare_runs(a, b, DiffOptions(limit=None)))[-1])
        return shown, text_of(closeup_blocks(shown))

    return run


FAULTS = {
    "one head": ("Model.attn", "", "b is 1.25 times a"),
    "padding": ("Model.tail", "", "b is 3 times a"),
    "a row": ("Model.attn.proj.weight", "row 5 alone (of 32), every element there", "b is 0 in all of them"),
}
"""The wheres and hows themselves are those of `test_compare_pattern.py`."""


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_shown_where_they_are(look, fault):
    fqn, which, how = FAULTS[fault]
    shown, text = look(fault)
    assert shown.divergence.site.fqn == fqn
    assert shown.missing == ""
    assert which in "; ".join(shown.difference.where)
    assert how in "; ".join(shown.difference.relation)
    assert which in text
    assert how in text


def test_tensors_that_were_not_stored_are_no_elements(look):
    shown, text = look("padding", save_tensors=())
    assert shown.difference is None
    assert shown.missing == "run b has not stored it whole"
    assert "No elements to show: run b has not stored it whole." in text
    assert "std " in text


def test_an_operator_of_one_run_alone_is_reported_and_what_it_changed_is_shown(right, tmp_path):
    path = captured(tmp_path / "b", train("padding"), level="op", save_tensors=("*",))
    with open_run(right) as a, open_run(path) as b:
        looked = [closeup(a, b, each) for each in worth_a_look(compare_runs(a, b, DiffOptions(limit=None)))]
    assert [each.missing for each in looked] == ["only run b has it", ""]
    # how torch writes a number where a mask is true depends on its version
    assert looked[0].divergence.site.path.startswith(("aten.index_put_", "aten.masked_fill_"))
    assert looked[1].difference is not None


def test_the_page_draws_what_was_stored(introspect, right, tmp_path):
    path = captured(tmp_path / "b", train("one head"), level="op", save_tensors=("Model.attn",))
    done = introspect("report", right, path, "-o", "page.html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    assert "aten.mul.Tensor of Model.attn" in page
    assert "b is 1.25 times a" in page
    assert page.count('<rect x="') > 100
    assert "ULPs of float32" in page
