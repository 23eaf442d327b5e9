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
from introspect_cli.compare.terms.options import DiffOptions  # noqa: E402
from introspect_cli.render.values_text import closeup_blocks  # noqa: E402
from introspect_cli.store.read.run import open_run  # noqa: E402

LENGTHS = (12, 9, 5, 10)


class Attention(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.n_head, self.fault = 4, fault
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(8)
        if self.fault == "one head":
            scores = scores * torch.tensor([1.0, 1.0, 1.25, 1.0]).view(4, 1, 1)
        else:
            scores = scores * torch.ones(4, 1, 1)
        mask = torch.ones(length, length).tril(1 if self.fault == "looks ahead" else 0)
        weights = scores.masked_fill(mask == 0, -1e9).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Tail(nn.Module):
    """What a fault in some kernel does to a tensor."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def forward(self, x, tokens):
        one = torch.ones_like(x)
        if self.fault == "one sample":
            one[2] = 1.5
        if self.fault == "padding":
            one[tokens == 0] = 3.0
        if self.fault == "last tile":
            one[..., 28:] = 0.0
        if self.fault == "every fourth":
            one[..., ::4] = 1 + 2**-22
        if self.fault == "a nan":
            one[1, 3, 7] = math.nan
        x = x * one
        if self.fault == "bfloat16":
            return x.bfloat16().float() + 0
        return x + (torch.arange(12.0)[:, None] == 11) * (self.fault == "last position")


class Model(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.attn, self.tail = Attention(fault), Tail(fault)

    def forward(self, tokens):
        return self.tail(self.attn(self.embed(tokens)), tokens)


def train(fault, *, loaded=True):
    def work():
        torch.manual_seed(0)
        model = Model(fault)
        if fault == "a row":
            with torch.no_grad():
                model.attn.proj.weight[5].zero_()
        tokens = torch.randint(1, 50, (4, 12))
        for row, length in enumerate(LENGTHS):
            tokens[row, length:] = 0
        loader = torch.utils.data.DataLoader(tokens, batch_size=4) if loaded else [tokens]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in loader:
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
    "looks ahead": ("Model.attn", "", ""),
    "one sample": ("Model.tail", "2 of dimension 0 alone (of 4), every element there", "b is 1.5 times a"),
    "padding": ("Model.tail", "", "b is 3 times a"),
    "last tile": ("Model.tail", "the last 4 of 32 columns, every element there", "b is 0 in all"),
    "every fourth": ("Model.tail", "every fourth of 32 columns, from 0", ""),
    "a nan": ("Model.tail", "one element alone, [1, 3, 7]", "b is NaN there"),
    "last position": ("Model.tail", "index 11 of dimension 1 alone (of 12), every element there", ""),
    "bfloat16": ("Model.tail", "", "b is a rounded to bfloat16"),
    "a row": ("Model.attn.proj.weight", "row 5 alone (of 32), every element there", "b is 0 in all of them"),
}  # fmt: skip


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
    shown, text = look("one sample", save_tensors=())
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
