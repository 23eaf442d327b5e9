"""Two implementations of one model: agreement where there is, the place where there is not, in the names of both."""

from __future__ import annotations

import ported
import pytest
from opcapture import captured
from ports import gpt2, shaken, theirs, torch, trained, transformers

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.compare.terms.result import Verdict
from introspect_cli.store.read.run import open_run

VIT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
       "patch_size": 4, "num_labels": 5, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 60}


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA, num_key_value_heads=2, max_position_embeddings=24)
    return shaken(transformers.LlamaForCausalLM(config))


def vit():
    torch.manual_seed(0)
    return shaken(transformers.ViTForImageClassification(transformers.ViTConfig(**VIT)))


def looking(make, logits):
    """One step of a model on fixed images."""

    def work():
        model = make()
        source = torch.Generator().manual_seed(1)
        images, labels = torch.randn(3, 3, 16, 16, generator=source), torch.randint(5, (3,), generator=source)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.nn.functional.cross_entropy(logits(model, images), labels).backward()
        optimizer.step()

    return work


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    place = tmp_path_factory.mktemp("theirs")
    found = {make: captured(place / make.__name__, trained(make, theirs)) for make in (gpt2, llama)}
    found[vit] = captured(place / "vit", looking(vit, lambda model, images: model(pixel_values=images).logits))
    return found


@pytest.fixture
def compare(originals, tmp_path):
    def run(make, port, fault="", **options):
        loop = looking if make is vit else trained
        work = loop(lambda: port(make().config, fault).load(make()), lambda model, given: model(given))
        path = captured(tmp_path / "b", work)
        with open_run(originals[make]) as a, open_run(path) as b:
            return compare_runs(a, b, DiffOptions(**options))

    return run


STAGE, MINE = "ViTForImageClassification.vit.layers", "Seen.stages"
SIGHT = {
    "eps": f"the output of {STAGE}.1.layernorm_before (LayerNorm) in a, the output of {MINE}.1.pre (LayerNorm) in b",
    "gelu": "; left: what runs between the last value that agrees and this one.",
    "causal": f"the output of {STAGE}.1.attention.o_proj (Linear) in a, the output of {MINE}.1.mixer.out (Linear) in b",
    "columns first": "the output of Seen.cut in b, the same numbers in another order.",
    "last token": "ViTForImageClassification.classifier (Linear) in a, the output of Seen.answer (Linear) in b",
    "bias": f"cause: the numbers of b in another order: {STAGE}.0.mlp.fc2.bias.",
}


named_as_in_5 = pytest.mark.skipif(
    int(transformers.__version__.partition(".")[0]) < 5,
    reason="the port knows the weights of a ViT by transformers 5's names",
)


@named_as_in_5
@pytest.mark.parametrize("fault", SIGHT)
def test_vit_with_a_fault_is_reported_where(compare, fault):
    result = compare(vit, ported.Seen, fault)
    assert result.verdict is Verdict.DIVERGED, result.sentence
    assert SIGHT[fault] in result.sentence
    assert result.counts.diverged == len(result.divergences) > 0
