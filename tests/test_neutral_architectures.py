"""Architectures of `transformers`, tiny and random: each trains the same bits under capture."""

from __future__ import annotations

import inspect
import zlib
from typing import Any

import pytest
import torch
from neutrality import assert_neutral

transformers = pytest.importorskip("transformers")

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

FAMILIES: dict[str, str] = {
    "text encoders": """albert bert big_bird bert-generation canine camembert convbert data2vec-text deberta deberta-v2
        distilbert dpr electra ernie esm eurobert flaubert fnet ibert layoutlm longformer megatron-bert mobilebert
        modernbert mpnet mra nystromformer rembert roberta roberta-prelayernorm roformer splinter squeezebert tapas
        xlm xlm-roberta xlm-roberta-xl xlnet yoso""",
    "decoders": """apertus arcee biogpt bitnet bloom codegen cohere cohere2 ctrl deepseek_v3 diffllama doge ernie4_5
        exaone4 falcon gemma gemma2 gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gptj
        granite helium llama ministral mistral mpt nanochat nemotron olmo olmo2 olmo3 openai-gpt opt persimmon phi phi3
        qwen2 qwen3 smollm3 stablelm starcoder2 vaultgemma xglm""",
    "mixtures of experts": """ernie4_5_moe flex_olmo glm4_moe gpt_oss granitemoe granitemoeshared hunyuan_v1_moe jetmoe
        minimax mixtral nllb-moe olmoe phimoe qwen2_moe qwen3_moe switch_transformers""",
    "state-space and recurrent": "falcon_mamba jamba lfm2 mamba mamba2 olmo_hybrid qwen3_next recurrent_gemma rwkv",
    "encoder-decoders": """bart bigbird_pegasus blenderbot blenderbot-small longt5 m2m_100 marian mbart mt5 mvp pegasus
        pegasus_x plbart prophetnet t5 t5gemma umt5""",
    "vision": """beit convnext data2vec-vision deit dinov2 dinov2_with_registers dinov3_convnext dinov3_vit dpt focalnet
        ijepa imagegpt pixtral poolformer regnet resnet sam_vision_model siglip_vision_model swiftformer swin vit
        vit_mae vit_msn vitdet""",
    "audio": """data2vec-audio hubert moonshine sew sew-d unispeech unispeech-sat wav2vec2 wav2vec2-conformer wavlm
        whisper""",
    "multimodal": """aimv2 altclip blip chinese_clip clip clipseg flava idefics3_vision kosmos-2.5 metaclip_2 owlv2
        owlvit siglip vilt visual_bert""",
}
"""Model types of `transformers`."""

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

SLICE = ("bert", "gpt2", "llama", "mixtral", "mamba", "t5", "whisper", "vit", "clip", "resnet", "wav2vec2", "rwkv")
"""What CI runs; the rest runs with `pytest -m sweep`."""

ARCHITECTURES = {name: family for family, names in FAMILIES.items() for name in names.split()}


def config_of(name: str) -> Any:
    """A tiny configuration, nested ones included."""
    cls = transformers.CONFIG_MAPPING[name]
    given = tiny(cls) | NEEDS.get(name, {})
    return cls(**{key: value for key, value in given.items() if value is not DROP})


def tiny(cls: type) -> dict[str, Any]:
    known = set(inspect.signature(cls).parameters) | set(getattr(cls, "attribute_map", {}))
    chosen = {key: value for key, value in SIZES.items() if key in known}
    for key, inner in (getattr(cls, "sub_configs", None) or {}).items():
        if inner.__name__ not in ("AutoConfig", "PreTrainedConfig", "PretrainedConfig"):
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
    found = [
        v.float().square().mean() for v in values if isinstance(v, torch.Tensor) and v.is_floating_point() and v.grad_fn
    ]
    return torch.stack(found).sum()


def train_architecture(name: str) -> Any:
    """A training function: forward, backward and a step, twice, of a tiny model."""

    def train(log: Any) -> None:
        torch.manual_seed(zlib.crc32(name.encode()))
        net = transformers.AutoModel.from_config(config_of(name)).train()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            loss = log.loss(first_floats(net(**inputs_of(net))))
            loss.backward()
            optimizer.step()
            log(net, optimizer)

    return train


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [name if name in SLICE else pytest.param(name, marks=pytest.mark.sweep) for name in ARCHITECTURES]
)
def test_architecture(tmp_path, name):
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    seen = assert_neutral(train_architecture(name), tmp_path / "run")
    seen.assert_losses()
    assert list(seen.steps)[:2] == [0, 1]
    assert seen.repeated() == []
    assert seen.of("output", step=1, phase="forward")
    assert seen.of("grad_output", step=1)
    trained = {record.site.fqn for record in seen.of("param", step=1, phase="optimizer")}
    assert trained
    assert {record.site.fqn for record in seen.of("grad", step=1)} <= trained


def test_table_is_wide():
    assert len(ARCHITECTURES) >= 150
    assert set(SLICE) <= set(ARCHITECTURES)
    assert sum(name in transformers.CONFIG_MAPPING for name in ARCHITECTURES) >= 60
