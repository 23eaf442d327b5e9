"""Values recorded in graphs of compilers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from opcapture import captured

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


SCRIPTS = {
    # Random numbers of a compiler's own are another thing than rounding.
    "train_cnn": ("Net", ["--dropout", "0"]),
    "train_gpt": ("GPT", []),
    "train_rnn": ("CharacterModel", ["--cell", "rnn"]),
}


def run(path, monkeypatch, name, *, arguments=(), level="module", **settings):
    """Capture a fixture whose model compiles itself when it is made, if there are settings to compile it with."""
    class_name, given = SCRIPTS[name]
    spec = importlib.util.spec_from_file_location(name, FIXTURES / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, script)
    spec.loader.exec_module(script)
    model = getattr(script, class_name)
    build = model.__init__

    def built(self, *args, **kwargs):
        build(self, *args, **kwargs)
        if settings:
            self.compile(**settings)

    monkeypatch.setattr(model, "__init__", built)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--steps", "2", *given, *arguments])
    return captured(path, script.main, compile="keep", level=level)


def wrong_backend():
    """A compiler whose decomposition of GELU is the other GELU."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def gelu(x, *, approximate="none"):
        return torch.nn.functional.hardswish(x) if approximate == "none" else x

    compiler = lambda graph, _inputs: make_boxed_func(graph.forward)  # noqa: E731
    return aot_autograd(fw_compiler=compiler, decompositions={torch.ops.aten.gelu.default: gelu})
