"""GPT-2 in numpy alone: what a reimplementation in another framework would dump, by the names that it has there."""

from __future__ import annotations

import numpy as np

FAULTS = ("eps", "gelu", "mask", "weight")


class Dumped(dict):
    """Arrays by site, in the order in which they were computed."""

    def __call__(self, name, value):
        self[f"output/{name}"] = value
        return value


def _norm(x, scale, shift, eps):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + np.float32(eps)) * scale + shift


def _gelu(x, exact):
    if exact:
        return (x * 0.5 * (1 + np.vectorize(_erf)(x / np.sqrt(2)))).astype(np.float32)
    return x * np.float32(0.5) * (1 + np.tanh(np.float32(0.7978845608) * (x + np.float32(0.044715) * x**3)))


def _erf(x):
    from math import erf

    return erf(x)


def forward(state, tokens, heads, fault=""):
    """Everything that it computes of tokens, and its parameters, by site.

    Args:
        state: parameters of transformers' GPT-2 as arrays, by its names.
        tokens: shape (samples, length).
        heads: attention heads.
        fault: what is wrong in its last layer.
    """
    weights = {name.removeprefix("transformer."): value for name, value in state.items()}
    seen = Dumped({"batch/tokens": tokens})
    layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("h."))
    if fault == "weight":
        weights[f"h.{layers - 1}.mlp.c_fc.weight"] = weights[f"h.{layers - 1}.mlp.c_fc.weight"].copy()
        weights[f"h.{layers - 1}.mlp.c_fc.weight"][:, 3] = 0
    for name, value in weights.items():
        if name != "lm_head.weight":
            seen[f"param/model/{_theirs(name)}"] = value
    count, length = tokens.shape
    x = seen("model/embed", weights["wte.weight"][tokens] + weights["wpe.weight"][:length])
    for at in range(layers):
        wrong = fault if at == layers - 1 else ""
        part = {name.removeprefix(f"h.{at}."): value for name, value in weights.items() if name.startswith(f"h.{at}.")}
        place = f"model/layer_{at}"
        h = seen(f"{place}/norm_1", _norm(x, part["ln_1.weight"], part["ln_1.bias"], 1e-2 if wrong == "eps" else 1e-5))
        h = seen(f"{place}/qkv", h @ part["attn.c_attn.weight"] + part["attn.c_attn.bias"])
        q, k, v = h.reshape(count, length, 3, heads, -1).transpose(2, 0, 3, 1, 4)
        scores = q @ k.swapaxes(-1, -2) / np.float32(np.sqrt(q.shape[-1]))
        if wrong != "mask":
            scores = np.where(np.tril(np.ones((length, length), bool)), scores, np.float32(-1e9))
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        h = (scores @ v).transpose(0, 2, 1, 3).reshape(count, length, -1)
        x = x + seen(f"{place}/mix", h @ part["attn.c_proj.weight"] + part["attn.c_proj.bias"])
        h = seen(f"{place}/norm_2", _norm(x, part["ln_2.weight"], part["ln_2.bias"], 1e-5))
        h = seen(f"{place}/up", h @ part["mlp.c_fc.weight"] + part["mlp.c_fc.bias"])
        h = _gelu(h, exact=wrong == "gelu")
        x = x + seen(f"{place}/down", h @ part["mlp.c_proj.weight"] + part["mlp.c_proj.bias"])
    x = seen("model/norm", _norm(x, weights["ln_f.weight"], weights["ln_f.bias"], 1e-5))
    seen("model", x @ weights["wte.weight"].T)
    return seen


def _theirs(name):
    """The name of a parameter in this implementation, as JAX's trees have it."""
    words = {"c_attn": "qkv", "c_fc": "up", "ln_1": "norm_1", "ln_2": "norm_2", "ln_f": "norm", "wte": "words"}
    words |= {"wpe": "places", "weight": "kernel", "attn": "", "mlp": ""}
    name = name.replace("attn.c_proj", "mix").replace("mlp.c_proj", "down").replace("h.", "layer_", 1)
    return "/".join(word for part in name.split(".") if (word := words.get(part, part)))
