"""Plain ports of three models of the transformers package: other names, other nesting, fused and split layers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

FAULTS = ("eps", "gelu", "scale", "mask", "residual", "position", "weight", "untied")


class Mixer(nn.Module):
    """Causal attention with one fused projection, or plain attention."""

    def __init__(self, width, heads, *, causal=True, bias=True, rotate=None, scale=1.0):
        super().__init__()
        self.heads, self.causal, self.rotate, self.scale = heads, causal, rotate, scale
        self.inp, self.out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.inp(x).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        if self.rotate is not None:
            q, k = self.rotate(q), self.rotate(k)
        scale = self.scale / (w // self.heads) ** 0.5
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=scale)
        return self.out(y.transpose(1, 2).reshape(b, t, w))


class Act(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return F.gelu(x, approximate=self.kind)


class Layer(nn.Module):
    def __init__(self, width, heads, act="tanh", eps=1e-5, *, scale=1.0, causal=True, doubled=False):
        super().__init__()
        self.pre, self.post = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self.mixer = Mixer(width, heads, causal=causal, scale=scale)
        self.wide, self.act, self.narrow = nn.Linear(width, 4 * width), Act(act), nn.Linear(4 * width, width)
        self.doubled = doubled

    def forward(self, x):
        x = x + self.mixer(self.pre(x))
        x = x + x * 0.01 if self.doubled else x
        return x + self.narrow(self.act(self.wide(self.post(x))))


class Tiny(nn.Module):
    """GPT-2 as one writes it down."""

    def __init__(self, config, fault=""):
        super().__init__()
        width, heads = config.n_embd, config.n_head
        self.fault = fault
        self.tokens, self.places = nn.Embedding(config.vocab_size, width), nn.Embedding(config.n_positions, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(config.n_layer - 1))
        changes = {
            "eps": {"eps": 1e-3},
            "gelu": {"act": "none"},
            "scale": {"scale": 1.1},
            "mask": {"causal": False},
            "residual": {"doubled": True},
        }
        self.layers.append(Layer(width, heads, **changes.get(fault, {})))
        self.norm = nn.LayerNorm(width, 1e-5)
        self.to_words = nn.Linear(width, config.vocab_size, bias=False)
        if fault != "untied":
            self.to_words.weight = self.tokens.weight

    def forward(self, ids):
        shift = 1 if self.fault == "position" else 0
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]) + shift)
        for layer in self.layers:
            x = layer(x)
        return self.to_words(self.norm(x))

    def load(self, theirs):
        """Take the weights of transformers' GPT-2, whose `Conv1D` holds them transposed."""
        state = {name: value.clone() for name, value in theirs.state_dict().items()}
        renamed = {
            "tokens.weight": "transformer.wte.weight",
            "places.weight": "transformer.wpe.weight",
            "to_words.weight": "lm_head.weight",
            **{f"norm.{part}": f"transformer.ln_f.{part}" for part in ("weight", "bias")},
        }
        names = {"pre": "ln_1", "post": "ln_2", "mixer.inp": "attn.c_attn", "mixer.out": "attn.c_proj"}
        names |= {"wide": "mlp.c_fc", "narrow": "mlp.c_proj"}
        for number in range(len(self.layers)):
            for mine, other in names.items():
                for part in ("weight", "bias"):
                    renamed[f"layers.{number}.{mine}.{part}"] = f"transformer.h.{number}.{other}.{part}"
        turned = ("mixer.inp.weight", "mixer.out.weight", "wide.weight", "narrow.weight")
        found = {mine: state[name].T if mine.endswith(turned) else state[name] for mine, name in renamed.items()}
        if self.fault == "weight":
            found["layers.1.wide.weight"][3] = 0
        self.load_state_dict(found)
        return self


class Rms(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return self.gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Rotary:
    def __init__(self, size, base):
        self.turns = 1.0 / base ** (torch.arange(0, size, 2) / size)

    def __call__(self, x):
        angle = torch.arange(x.shape[2])[:, None] * self.turns
        cos, sin = (torch.cat([each, each], -1) for each in (angle.cos(), angle.sin()))
        one, two = x.chunk(2, -1)
        return x * cos + torch.cat([-two, one], -1) * sin


class Gated(nn.Module):
    """One projection for gate and value, or with them exchanged."""

    def __init__(self, width, hidden, *, exchanged=False):
        super().__init__()
        self.both, self.down, self.exchanged = (
            nn.Linear(width, 2 * hidden, False),
            nn.Linear(hidden, width, False),
            exchanged,
        )

    def forward(self, x):
        gate, value = self.both(x).chunk(2, -1)
        return self.down(F.silu(value) * gate if self.exchanged else F.silu(gate) * value)


class Fused(nn.Module):
    """Llama with fused qkv and gate-up projections."""

    def __init__(self, config, fault=""):
        super().__init__()
        width, size = config.hidden_size, config.hidden_size // config.num_attention_heads
        base = 20000.0 if fault == "base" else 10000.0
        self.embed, self.out_norm = nn.Embedding(config.vocab_size, width), Rms(width, config.rms_norm_eps)
        self.stack = nn.ModuleList()
        for number in range(config.num_hidden_layers):
            last = number == config.num_hidden_layers - 1
            rotate = Rotary(size, base if last else 10000.0)
            self.stack.append(
                nn.ModuleDict({
                    "n1": Rms(width, config.rms_norm_eps), "n2": Rms(width, config.rms_norm_eps),
                    "att": Mixer(width, config.num_attention_heads, bias=False, rotate=rotate),
                    "ff": Gated(width, config.intermediate_size, exchanged=last and fault == "gate"),
                })
            )  # fmt: skip
        self.head = nn.Linear(width, config.vocab_size, False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.stack:
            x = x + layer["att"](layer["n1"](x))
            x = x + layer["ff"](layer["n2"](x))
        return self.head(self.out_norm(x))

    def load(self, theirs):
        """Take the weights of transformers' Llama, three or two of which are one here."""
        state = theirs.state_dict()
        found = {"embed.weight": state["model.embed_tokens.weight"], "head.weight": state["lm_head.weight"]}
        found["out_norm.gain"] = state["model.norm.weight"]
        for number in range(len(self.stack)):
            old, new = f"model.layers.{number}.", f"stack.{number}."
            found[f"{new}att.inp.weight"] = torch.cat([state[f"{old}self_attn.{each}_proj.weight"] for each in "qkv"])
            found[f"{new}att.out.weight"] = state[f"{old}self_attn.o_proj.weight"]
            found[f"{new}ff.both.weight"] = torch.cat(
                [state[f"{old}mlp.{each}_proj.weight"] for each in ("gate", "up")]
            )
            found[f"{new}ff.down.weight"] = state[f"{old}mlp.down_proj.weight"]
            found[f"{new}n1.gain"] = state[f"{old}input_layernorm.weight"]
            found[f"{new}n2.gain"] = state[f"{old}post_attention_layernorm.weight"]
        self.load_state_dict(found)
        return self


class Seen(nn.Module):
    """ViT as one writes it down: patches cut out and multiplied, the class token last to be put in front."""

    def __init__(self, config, fault=""):
        super().__init__()
        width, self.size, self.fault = config.hidden_size, config.patch_size, fault
        number = (config.image_size // config.patch_size) ** 2 + 1
        self.cut = nn.Linear(config.num_channels * config.patch_size**2, width)
        self.first, self.where = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(number, width))
        changes = {"gelu": {"act": "tanh"}, "causal": {"causal": True}, "eps": {"eps": 1e-3}}
        self.stages = nn.ModuleList()
        for at in range(config.num_hidden_layers):
            last = at == config.num_hidden_layers - 1
            options = {"act": "none", "eps": config.layer_norm_eps, "causal": False}
            layer = Layer(width, config.num_attention_heads, **{**options, **(changes.get(fault, {}) if last else {})})
            layer.wide = nn.Linear(width, config.intermediate_size)
            layer.narrow = nn.Linear(config.intermediate_size, width)
            self.stages.append(layer)
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.answer = nn.Linear(width, config.num_labels)

    def forward(self, images):
        b, c, h, w = images.shape
        size = self.size
        parts = images.view(b, c, h // size, size, w // size, size)
        order = (0, 4, 2, 1, 3, 5) if self.fault == "columns first" else (0, 2, 4, 1, 3, 5)
        x = self.cut(parts.permute(*order).reshape(b, -1, c * size * size))
        x = torch.cat([self.first.expand(b, 1, -1), x], 1) + self.where
        for stage in self.stages:
            x = stage(x)
        return self.answer(self.norm(x)[:, 0 if self.fault != "last token" else -1])

    def load(self, theirs):
        """Take the weights of transformers' ViT, three of which are one here."""
        state = theirs.state_dict()
        renamed = {
            "cut.weight": state["vit.embeddings.patch_embeddings.projection.weight"].flatten(1),
            "cut.bias": state["vit.embeddings.patch_embeddings.projection.bias"],
            "first": state["vit.embeddings.cls_token"].flatten(),
            "where": state["vit.embeddings.position_embeddings"][0],
        }
        pairs = {"norm": "vit.layernorm", "answer": "classifier"}
        for at in range(len(self.stages)):
            old, new = f"vit.layers.{at}.", f"stages.{at}."
            names = {"pre": "layernorm_before", "post": "layernorm_after", "wide": "mlp.fc1", "narrow": "mlp.fc2"}
            pairs |= {f"{new}{mine}": f"{old}{name}" for mine, name in names.items()}
            pairs[f"{new}mixer.out"] = f"{old}attention.o_proj"
            for part in ("weight", "bias"):
                found = [state[f"{old}attention.{one}_proj.{part}"] for one in "qkv"]
                renamed[f"{new}mixer.inp.{part}"] = torch.cat(found)
        renamed |= {
            f"{mine}.{part}": state[f"{name}.{part}"] for mine, name in pairs.items() for part in ("weight", "bias")
        }
        if self.fault == "bias":
            renamed["stages.0.narrow.bias"] = renamed["stages.0.narrow.bias"].flip(0)
        self.load_state_dict(renamed)
        return self
