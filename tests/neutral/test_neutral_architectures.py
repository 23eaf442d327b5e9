"""Architectures of libraries, tiny and random: each trains the same bits under capture."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from neutrality import assert_neutral
from sweeps import sliced

transformers = pytest.importorskip("transformers")
if not transformers.utils.is_torch_available():
    pytest.skip("this transformers wants a newer torch", allow_module_level=True)

from tiny_transformers import config_of, first_floats, inputs_of  # noqa: E402 - imports transformers

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

VISION = {
    "timm": ("test_vit", "test_efficientnet", "test_convnext"),
    "torchvision": ("squeezenet1_1", "mobilenet_v3_small", "shufflenet_v2_x0_5"),
}
"""Models of other libraries."""

MODELS = [("transformers", name) for names in FAMILIES.values() for name in names.split()]
MODELS += [(library, name) for library, names in VISION.items() for name in names]
SLICE = [
    *(("transformers", name) for name in ("bert", "mixtral", "mamba", "t5", "clip")),
    ("timm", "test_efficientnet"),
    ("torchvision", "squeezenet1_1"),
]
"""What runs each time; the rest runs with `pytest -m sweep`."""


def model_of(library: str, name: str) -> Any:
    """A tiny model, and what makes the loss of a batch that it takes."""
    if library == "transformers":
        if name not in transformers.CONFIG_MAPPING:
            pytest.skip(f"transformers {transformers.__version__} has no {name}")
        net = transformers.AutoModel.from_config(config_of(name)).train()
        return net, lambda: first_floats(net(**inputs_of(net)))
    made = pytest.importorskip(library)
    if library == "timm":
        net = made.create_model(name, pretrained=False, num_classes=10)
        channels, *size = net.default_cfg.get("input_size", (3, 96, 96))
    else:
        net, channels, size = made.models.get_model(name, weights=None), 3, (96, 96)
    return net, lambda: net(torch.randn(2, channels, *(min(side, 96) for side in size))).square().mean()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("library", "name"), sliced(MODELS, SLICE))
def test_a_library_model_trains_to_the_same_bits(tmp_path, library, name):
    def train(log: Any) -> None:
        torch.manual_seed(zlib.crc32(name.encode()))
        net, loss_of_a_batch = model_of(library, name)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            loss = log.loss(loss_of_a_batch())
            loss.backward()
            optimizer.step()
            log(net, optimizer)

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()
    assert list(seen.steps)[:2] == [0, 1]
    assert seen.repeated() == []
    assert seen.of("output", step=1, phase="forward")
    assert seen.of("grad_output", step=1)
    trained = {record.site.fqn for record in seen.of("param", step=1, phase="optimizer")}
    assert trained
    assert {record.site.fqn for record in seen.of("grad", step=1)} <= trained


def test_the_table_of_architectures_is_wide():
    assert len(MODELS) >= 150
    assert sum(name in transformers.CONFIG_MAPPING for _, name in MODELS) >= 60
