"""The same model in two code bases."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


transformers = pytest.importorskip("transformers")


GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 24, "vocab_size": 60}


DROPS = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)


def gpt2():
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **DROPS))
    return shaken(model)


def shaken(model):
    """Parameters as large as those of a trained model, none of them constant."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def trained(make, logits):
    """One step of a model on fixed tokens."""

    def work():
        model = make()
        tokens = torch.randint(0, 60, (3, 12), generator=torch.Generator().manual_seed(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        out = logits(model, tokens)
        torch.nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    return work


def theirs(model, tokens):
    return model(input_ids=tokens).logits


THEIRS, OURS = "GPT2LMHeadModel.transformer", "Tiny.layers.1"
