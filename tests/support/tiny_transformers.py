"""Architectures of `transformers`, made tiny, with random weights and inputs: what the tests train."""

from __future__ import annotations

import inspect
import re
from contextlib import suppress
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "embed_dim": 32,
    "embedding_size": 32,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "attention_head_size": 8,
    "kv_channels": 8,
    "intermediate_size": 48,
    "d_ff": 48,
    "ffn_dim": 48,
    "n_inner": 48,
    "hidden_dim": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "state_size": 8,
    "time_step_rank": 4,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "image_size": 32,
    "patch_size": 8,
    "projection_dim": 16,
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [8, 16, 24, 32],
    "num_mel_bins": 16,
    "max_source_positions": 32,
    "max_target_positions": 32,
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "decoder_start_token_id": 2,
}
"""What every configuration is made small with, as far as it knows the name."""

DROP = object()
"""Stands for a size that a configuration knows and must not be given."""

NEEDS: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "convnext": {"hidden_size": DROP, "num_hidden_layers": DROP, "num_layers": DROP, "patch_size": 4},
    "deepseek_v3": {"head_dim": DROP, "num_key_value_heads": 4, "rope_interleave": False},
    "falcon_mamba": {"conv_kernel": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba": {"conv_kernel": 4},
    "mamba2": {"conv_kernel": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "qwen3_next": {
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
    "swin": {
        "embed_dim": 16,
        "num_heads": [1, 1, 2, 2],
        "num_attention_heads": DROP,
        "num_hidden_layers": DROP,
        "num_layers": DROP,
        "hidden_size": DROP,
        "window_size": 2,
        "patch_size": 2,
    },
}
"""What some need beside the sizes."""


def config_of(name: str) -> Any:
    """A tiny configuration of a type of model, nested ones included."""
    cls = transformers.CONFIG_MAPPING[name]
    given = {key: value for key, value in (tiny(cls) | NEEDS.get(name, {})).items() if value is not DROP}
    for _ in range(len(SIZES)):
        try:
            return cls(**given)
        except Exception as error:  # noqa: PERF203 - a name that means another thing here; its message tells the field
            wrong = re.search(r"field '(\w+)'", str(error))
            if not wrong or given.pop(wrong[1], None) is None:
                raise
    raise AssertionError(name)


def tiny(cls: Any) -> dict[str, Any]:
    """The sizes that a configuration and those in it know."""
    taken = set(inspect.signature(cls).parameters) | set(getattr(cls, "attribute_map", {}))
    chosen = {key: value for key, value in SIZES.items() if key in taken}
    for key, inner in (getattr(cls, "sub_configs", None) or {}).items():
        if inner.__name__ == "AutoConfig":
            with suppress(Exception):  # what it is made of by itself tells which class that is
                made_of = type(getattr(cls(), key))
                needs = NEEDS.get(made_of.model_type, {})
                chosen[key] = {**tiny(made_of), **needs, "model_type": made_of.model_type}
                chosen[key] = {name: value for name, value in chosen[key].items() if value is not DROP}
        elif inner.__name__ not in ("PreTrainedConfig", "PretrainedConfig"):
            chosen[key] = tiny(inner)
    return chosen


def inputs_of(net: Any) -> dict[str, torch.Tensor]:
    """Random inputs of the kind the model takes."""
    config = net.config
    given: dict[str, torch.Tensor] = {}
    names = inspect.signature(net.forward).parameters
    if "input_ids" in names:
        given["input_ids"] = torch.randint(4, 90, (2, 8))
    if "pixel_values" in names:
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 32)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        given["pixel_values"] = torch.randn(2, getattr(vision, "num_channels", 3), height, width)
    if "input_values" in names:
        given["input_values"] = torch.randn(2, 1024)
    if "input_features" in names:
        audio = getattr(config, "audio_config", config)
        given["input_features"] = torch.randn(2, getattr(audio, "num_mel_bins", 16), 64)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        given["decoder_input_ids"] = torch.randint(4, 90, (2, 6))
    return given


def first_floats(output: Any) -> torch.Tensor:
    """A loss over everything floating in an output."""
    values = output.to_tuple() if hasattr(output, "to_tuple") else output
    tensors = [
        v.float().square().mean() for v in values if isinstance(v, torch.Tensor) and v.is_floating_point() and v.grad_fn
    ]
    return torch.stack(tensors).sum()
