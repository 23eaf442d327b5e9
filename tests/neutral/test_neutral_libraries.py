"""A few published vision models train to the same bits under capture."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import random

import numpy as np
import pytest

import introspect_cli

torch = pytest.importorskip("torch")

MODELS = {
    "timm": ("test_vit", "test_efficientnet", "test_convnext"),
    "torchvision": ("squeezenet1_1", "mobilenet_v3_small", "shufflenet_v2_x0_5"),
}


def built(library, name):
    if library == "timm":
        import timm

        model = timm.create_model(name, pretrained=False, num_classes=10)
        channels, *size = model.default_cfg.get("input_size", (3, 96, 96))
        return model, (channels, *(min(side, 96) for side in size))
    import torchvision

    return torchvision.models.get_model(name, weights=None), (3, 96, 96)


def trained(library, name, output):
    """What two steps leave behind, as digests; captured where there is a directory."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global one is what models draw from
    torch.manual_seed(0)
    model, size = built(library, name)
    with introspect_cli.recording(model, output) if output else contextlib.nullcontext():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(2, *size)).square().mean().backward()
            optimizer.step()
    state = [*model.state_dict().values(), *(each.grad for each in model.parameters()), torch.get_rng_state()]
    return [hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest() for value in state]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("library", "name"), [(library, name) for library, names in MODELS.items() for name in names])
def test_a_published_model_trains_to_the_same_bits(tmp_path, library, name):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - what models draw from
    try:
        bare, captured = trained(library, name, None), trained(library, name, tmp_path / "run")
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])  # noqa: NPY002 - as above
        torch.set_rng_state(generators[2])
    assert len(bare) > 20
    assert captured == bare
    assert (tmp_path / "run" / "manifest.yaml").exists()
