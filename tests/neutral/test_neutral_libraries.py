"""A few published vision models train to the same bits under capture; `benchmarks/breadth.py` tries hundreds."""

from __future__ import annotations

import importlib.util
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import breadth  # noqa: E402 - found by the path above

MODELS = {
    "timm": ("test_vit", "test_efficientnet", "test_convnext"),
    "torchvision": ("squeezenet1_1", "mobilenet_v3_small", "shufflenet_v2_x0_5"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("library", "name"), [(library, name) for library, names in MODELS.items() for name in names])
def test_a_published_model_trains_to_the_same_bits(tmp_path, library, name):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    breadth._IMPORTS[library]()
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - what models draw from
    try:
        bare = breadth.trained(breadth._BUILDERS[library], name, None)
        captured = breadth.trained(breadth._BUILDERS[library], name, tmp_path / "run")
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])  # noqa: NPY002 - as above
        torch.set_rng_state(generators[2])
    assert len(bare) > 20
    assert captured == bare
    assert (tmp_path / "run" / "manifest.yaml").exists()
