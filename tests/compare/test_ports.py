"""Two implementations of one model: agreement where there is, the place where there is not, in the names of both."""

from __future__ import annotations

import ported
import pytest
from opcapture import captured
from ports import OURS, THEIRS, gpt2, shaken, theirs, torch, trained, transformers

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


PLACES = {
    "eps": f"in {THEIRS}.h.1.ln_1 (LayerNorm) in a, which is {OURS}.pre (LayerNorm) in b: its input agrees",
    "gelu": f"In between, a ran {THEIRS}.h.1.mlp.act; b ran {OURS}.act.",
    "scale": f"is the output of {THEIRS}.h.1.attn.c_attn in a, which is the output of {OURS}.mixer.inp in b.",
    "mask": f"before {THEIRS}.h.1.attn.c_proj (Conv1D) in a, which is {OURS}.mixer.out (Linear) in b",
    "residual": f"before {THEIRS}.ln_f (LayerNorm) in a, which is Tiny.norm (LayerNorm) in b: its input",
    "position": f"before {THEIRS}.wpe (Embedding) in a, which is Tiny.places (Embedding) in b: its input",
    "weight": f"{THEIRS}.h.1.mlp.c_fc.weight and {OURS}.wide.weight have no equal on the other side.",
    "untied": f"the gradient of {THEIRS}.wte.weight in a, which is the gradient of Tiny.tokens.weight in b differs",
}


def test_gpt2_and_its_port_agree(compare):
    result = compare(gpt2, ported.Tiny)
    assert result.verdict is Verdict.SAME, result.sentence
    assert "to the output .logits of GPT2LMHeadModel in a, which is the output of Tiny in b" in result.sentence
    assert "28 of 28 distinctive parameters of a are in b (8 transposed, in another order or shape)" in result.evidence
    assert any((each.a, each.b) == (f"{THEIRS}.h.0.mlp.c_fc", "Tiny.layers.0.wide") for each in result.structure)
    assert (result.counts.diverged, result.divergences) == (0, ())
    assert "values were paired by what they hold, in step 0 alone" in result.notes[0]


@pytest.mark.parametrize("fault", PLACES)
def test_gpt2_with_a_fault_is_reported_where_in_both_vocabularies(compare, fault):
    result = compare(gpt2, ported.Tiny, fault)
    assert result.verdict is Verdict.DIVERGED, result.sentence
    assert PLACES[fault] in result.sentence
    assert result.first.site.fqn.startswith(THEIRS)
    assert result.counts.diverged == len(result.divergences) > 0
    assert result.counts.only_a == 0


def test_llama_agrees_with_fused_layers(compare):
    result = compare(llama, ported.Fused)
    assert result.verdict is Verdict.SAME, result.sentence
    assert "(4 tensors of one run are several of the other put together)" in result.evidence[0]
    merged = {(each.a, each.b) for each in result.structure if each.change == "merged"}
    parts = " + ".join(f"LlamaForCausalLM.model.layers.0.self_attn.{each}_proj.weight" for each in "qkv")
    assert (parts, "Fused.stack.0.att.inp.weight") in merged


@pytest.mark.parametrize(("fault", "place"), [("base", "self_attn.o_proj"), ("gate", "mlp.down_proj")])
def test_llama_with_a_fault_inside_a_fused_layer(compare, fault, place):
    result = compare(llama, ported.Fused, fault)
    assert result.verdict is Verdict.DIVERGED
    assert f"before LlamaForCausalLM.model.layers.1.{place} (Linear) in a" in result.sentence
    assert "b ran Fused.stack.1." in result.sentence


def test_comparing_by_name_alone_and_with_a_tolerance(compare):
    result = compare(gpt2, ported.Tiny, by_value=False)  # one step: its loss agrees, nothing is known of the update
    assert result.verdict is Verdict.DIVERGED
    assert "the module GPT2LMHeadModel runs only in a" in result.sentence
    result = compare(gpt2, ported.Tiny, "eps", rtol=0.5)
    assert "within 0.5" in result.sentence


STAGE, MINE = "ViTForImageClassification.vit.layers", "Seen.stages"
SIGHT = {
    "eps": f"in {STAGE}.1.layernorm_before (LayerNorm) in a, which is {MINE}.1.pre (LayerNorm) in b: its input agrees",
    "gelu": f"In between, a ran {STAGE}.1.mlp.activation_fn; b ran {MINE}.1.act.",
    "causal": f"before {STAGE}.1.attention.o_proj (Linear) in a, which is {MINE}.1.mixer.out (Linear) in b",
    "columns first": "which is the output of Seen.cut in b, the same numbers in another order.",
    "last token": "before ViTForImageClassification.classifier (Linear) in a, which is Seen.answer (Linear) in b",
    "bias": f"Look at its parameters: {STAGE}.0.mlp.fc2.bias holds the same numbers as in b, in another order.",
}


named_as_in_5 = pytest.mark.skipif(
    int(transformers.__version__.partition(".")[0]) < 5,
    reason="the port knows the weights of a ViT by transformers 5's names",
)


@named_as_in_5
def test_vit_and_its_port_agree(compare):
    result = compare(vit, ported.Seen)
    assert result.verdict is Verdict.SAME, result.sentence
    assert "which is the output of Seen in b, and so do 28 gradients of parameters" in result.sentence
    assert "4 tensors of one run are several of the other put together" in result.evidence[0]


@named_as_in_5
@pytest.mark.parametrize("fault", SIGHT)
def test_vit_with_a_fault_is_reported_where(compare, fault):
    result = compare(vit, ported.Seen, fault)
    assert result.verdict is Verdict.DIVERGED, result.sentence
    assert SIGHT[fault] in result.sentence
    assert result.counts.diverged == len(result.divergences) > 0
