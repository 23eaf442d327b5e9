"""How many published architectures train to the same bits under capture: transformers, timm, torchvision.

Each is built with a tiny or its own smallest configuration and random weights, trained two steps on random inputs in a
process of its own, once bare and once captured, and compared: losses, parameters, buffers, gradients, generators.

    python benchmarks/breadth.py timm --count 100      # or torchvision, transformers; --only NAME... for some
    python benchmarks/breadth.py timm --resume seen.txt --minutes 4    # again and again, until it is through
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import multiprocessing
import random
import re
import resource
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

SMALL = re.compile(r"tiny|nano|atto|pico|femto|mini|small|_xx?s|_xxt|_s0|_t0|_b0|_m0|_p|18|_t_|_s_")
"""How timm calls what is small."""

MOST = 60_000_000
"""Parameters of one architecture; larger ones are left out."""


def main() -> int:
    """Compare architectures; 1 where one differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library", choices=["transformers", "timm", "torchvision"])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--resume", type=Path, help="a file of outcomes: leave out what it has, add what is new")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further architecture after that")
    parser.add_argument("--seconds", type=float, default=120.0, help="for one architecture, before it is left out")
    asked = parser.parse_args()
    names = asked.only or spread(_NAMES[asked.library](), asked.count)
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    by_outcome: dict[str, list[str]] = {"equal": [], "DIFFERS": [], "not built": []}
    begin = time.monotonic()
    outcomes = _seen(asked.resume, asked.library)
    for name in names:
        if name not in outcomes:
            if time.monotonic() - begin > 60 * asked.minutes:
                print(f"{len(set(names) - outcomes.keys())} of {len(names)} are left")
                break
            outcomes[name], why = in_a_process(asked.library, name, asked.seconds)
            if asked.resume:
                with asked.resume.open("a", encoding="utf-8") as file:
                    file.write(f"{asked.library}\t{name}\t{outcomes[name]}\t{why}\n")
            print(f"{outcomes[name]:9s} {name} {why}", flush=True)
        by_outcome[outcomes[name]].append(name)
    counts = ", ".join(f"{len(listed)} {outcome}" for outcome, listed in by_outcome.items())
    print(f"{asked.library}: {counts}, in {time.monotonic() - begin:.0f} s")
    return int(bool(by_outcome["DIFFERS"]))


def _seen(path: Path | None, library: str) -> dict[str, str]:
    """The outcomes of earlier runs, by name."""
    lines = path.read_text(encoding="utf-8").splitlines() if path and path.exists() else []
    return {words[1]: words[2] for line in lines if (words := line.split("\t"))[0] == library}


def spread(names: list[str], count: int) -> list[str]:
    """`count` of the names, from all over the list."""
    count = min(count, len(names))
    return [names[at * len(names) // count] for at in range(count)]


def in_a_process(library: str, name: str, seconds: float) -> tuple[str, str]:
    """Compare one architecture in a process of its own, which finds the library and introspect imported."""
    _imported(library)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(theirs, library, name))
    child.start()
    theirs.close()
    outcome = ("not built", f"(no answer within {seconds:.0f} s)")
    if ours.poll(seconds):
        try:
            outcome = ours.recv()
        except EOFError:
            outcome = ("DIFFERS", "(the process died)")
    child.kill()
    child.join()
    return outcome


@functools.cache
def _imported(library: str) -> None:
    """Import what each child would: its library, torch's optimizers, and a capture that has run once."""
    import torch

    _IMPORTS[library]()
    torch.set_num_threads(1)  # no thread is started here, which would not survive the fork
    with tempfile.TemporaryDirectory() as folder:
        trained(lambda _: (torch.nn.Linear(2, 2), lambda: {"input": torch.randn(2, 2)}), "", Path(folder) / "run")


def _child(pipe: Any, library: str, name: str) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        model_of = _BUILDERS[library]
        if library == "transformers":
            _fitting(name)  # found by trying, which draws: before anything is seeded
        bare = trained(model_of, name, None)
        with tempfile.TemporaryDirectory() as folder:
            captured = trained(model_of, name, Path(folder) / "run")
        outcome = ("equal", "")
        if bare != captured:
            outcome = ("DIFFERS", _first(bare, captured))
            if trained(model_of, name, None) != bare:
                outcome = ("not built", "(two bare trainings differ)")
    except Exception as error:
        text = f"({type(error).__name__}: {str(error)[:80]!r} {_where(error)})".replace("\n", " ")
        outcome = ("DIFFERS" if "introspect_cli" in traceback.format_exc() else "not built", text)
    pipe.send(outcome)


def _where(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def _first(bare: list[str], captured: list[str]) -> str:
    pairs = [at for at, (one, other) in enumerate(zip(bare, captured, strict=False)) if one != other]
    return f"(at {pairs[:1]} of {len(bare)}, {len(captured)})"


def trained(model_of: Callable[[str], Any], name: str, output: Path | None) -> list[str]:
    """What two steps leave behind, as digests; captured where there is a directory."""
    import contextlib

    import torch

    import introspect_cli

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global one is what models draw from
    torch.manual_seed(0)
    model, inputs = model_of(name)
    model.train()
    watching = introspect_cli.recording(model, output) if output is not None else contextlib.nullcontext()
    digests: list[str] = []
    with watching:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            loss = _loss(model(**inputs()))
            loss.backward()
            optimizer.step()
            digests.append(loss.detach().double().item().hex())
        state = [*model.parameters(), *model.buffers()]
        state += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        state.append(torch.get_rng_state())
    return digests + [hashlib.md5(_bytes(value)).hexdigest() for value in state]


def _bytes(value: torch.Tensor) -> bytes:
    import torch

    return bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()) if value.numel() else b""


def _loss(out: Any) -> Any:
    """A number to train by: the mean square of every floating tensor that comes out."""
    from torch.utils._pytree import tree_leaves

    leaves = [leaf for leaf in tree_leaves(dict(out) if hasattr(out, "keys") else out) if hasattr(leaf, "grad_fn")]
    return sum(leaf.float().square().mean() for leaf in leaves if leaf.requires_grad and leaf.is_floating_point())


def _without_extension() -> Any:
    """Have torchvision import where its compiled part is for another torch: its models need none of it."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def _timm_names() -> list[str]:
    """Of each family the one that sounds smallest."""
    families: dict[str, list[str]] = {}
    for name in _timm_imported().list_models():
        families.setdefault(name.split("_")[0], []).append(name)
    return sorted(min(members, key=lambda name: (not SMALL.search(name), len(name))) for members in families.values())


def _timm_imported() -> Any:
    _KEPT.append(_without_extension())
    import timm

    return timm


def _timm(name: str) -> Any:
    timm = _timm_imported()
    import torch

    _bounded(lambda: timm.create_model(name, pretrained=False, num_classes=10))
    model = timm.create_model(name, pretrained=False, num_classes=10)
    channels, *size = model.default_cfg.get("input_size", (3, 224, 224))
    if not model.default_cfg.get("fixed_input_size"):
        size = [min(side, 96) for side in size]
    return model, lambda: {"x": torch.randn(2, channels, *size)}


def _torchvision_names() -> list[str]:
    models = _torchvision_imported()
    return [name for name in models.list_models(module=models) if not name.startswith("vit_h")]


def _torchvision_imported() -> Any:
    _KEPT.append(_without_extension())
    from torchvision import models

    return models


def _torchvision(name: str) -> Any:
    import torch

    model = _torchvision_imported().get_model(name, weights=None)
    size = 299 if "inception" in name else 224 if name.startswith(("vit", "maxvit")) else 96
    return model, lambda: {"x": torch.randn(2, 3, size, size)}


def _transformers_imported() -> Any:
    import tiny_transformers

    return tiny_transformers


def _transformers_names() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


def _transformers(name: str) -> Any:
    from transformers import AutoModel

    tiny = _transformers_imported()
    sizes, chosen = _fitting(name)
    model = AutoModel.from_config(tiny.config_of(name, sizes))
    return model, lambda: tiny.inputs_of(model) if chosen < 0 else tiny.other_inputs_of(model)[chosen]


@functools.cache
def _fitting(name: str) -> tuple[Any, int]:
    """With which sizes a model can be made, and which inputs it takes: -1 for the usual, else the number of others."""
    import torch
    from transformers import AutoModel

    tiny = _transformers_imported()
    errors: list[Exception] = []
    for sizes in tiny.WAYS:
        try:
            config = tiny.config_of(name, sizes)
            _bounded(lambda config=config: AutoModel.from_config(config))
            model = AutoModel.from_config(config)
            choices = [tiny.inputs_of(model), *tiny.other_inputs_of(model)]
        except Exception as error:
            errors.append(error)
            continue
        for number, choice in enumerate(choices):
            try:
                with torch.no_grad():
                    model(**choice)
            except Exception as error:  # noqa: PERF203 - the first that fits is taken
                errors.append(error)
            else:
                return sizes, number - 1
    raise errors[0]


def _bounded(build: Callable[[], Any]) -> None:
    """Raise ValueError where a model would be too large to train here; it is built without its values first."""
    import torch

    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in build().parameters())
    if size > MOST:
        raise ValueError(f"{size / 1e6:.0f} million parameters")


_KEPT: list[Any] = []
_NAMES = {"timm": _timm_names, "torchvision": _torchvision_names, "transformers": _transformers_names}
_IMPORTS = {"timm": _timm_imported, "torchvision": _torchvision_imported, "transformers": _transformers_imported}
_BUILDERS: dict[str, Any] = {"timm": _timm, "torchvision": _torchvision, "transformers": _transformers}

if __name__ == "__main__":
    sys.exit(main())
