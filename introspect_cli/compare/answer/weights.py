"""How well each setting that differs explains a divergence.

Each change is weighted by the reason of the first divergence: a learning rate explains a parameter after the step, no
random state. Noise such as a shell's working directory is left out.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from introspect_cli.compare.changes.statements import CodeChanges, Nearness
from introspect_cli.compare.result import SettingChange, Size
from introspect_cli.compare.settings.differences import on_one_line
from introspect_cli.compare.settings.hyperparameters import OPTIMIZERS, RECORDED
from introspect_cli.compare.settings.settings import (
    ENV_NOISE,
    FILES,
    RUN_NOISE,
    chooses_kernel,
    differences,
    file_name,
    holds_tensors,
    read_by_one,
)
from introspect_cli.compare.watched import is_list
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from introspect_cli.compare.reasons.base import Reason
    from introspect_cli.compare.reasons.view import View
    from introspect_cli.store.run import Run

_ENV_STRONG = (
    r"^(CUDA|CUBLAS|CUDNN|NCCL|OMP|MKL|OPENBLAS|TORCH|PYTORCH|NVIDIA|KMP|GLOO|XLA|ATEN|DNNL|ONEDNN|TRITON|HIP|ROCM)"
)
_WHICH_DEVICE = re.compile(r"\buuid$")
_OF_RESULTS = (
    r"(?i)(^|\.)-*(o|out|outputs?|results?|logs?|save|name|exp|experiment|run|tag|port|host|date|time|timestamp|verbose|v"
    r"|quiet|q|(wandb|mlflow|neptune|comet|clearml)_.*|((out(put)?|results?|log(s|ging|ger)?|save|run|exp(eriment)?|project|job|group|work|wandb|tensorboard|tb"
    r"|ckpt|checkpoint|cache|te?mp|model|master|dist|rdzv|report|print|profile)[-_.])+"
    r"(dir(ectory)?|path|file|folder|name|id|tag|group|port|addr|root|to|every|freq|interval|level|mode|steps|entity"
    r"|project|endpoint)|(log|save|out|result)(dir|file|path))$"
)
"""Options and variables that say where results go and what a run is called: `--out-dir`, `hydra.run.dir`."""

_NUMERIC_PACKAGES = (
    r"^(torch|torchvision|torchaudio|triton|numpy|scipy|numba|nvidia|jax|tensorflow|flash|xformers|transformers|lightning"
    r"|pytorch|accelerate|deepspeed|apex|timm|mkl|intel|bitsandbytes|einops|peft|diffusers|tokenizers|datasets)"
)
_OF_SCRIPTS = r"torch[-_](?!xla)"
"""Names of packages, as `torch-geometric`, that run only where the script's code imports them."""

UNLIKELY = 0.45
SAYS_NOTHING = 0.1
"""Weight up to which a setting says where results go, or names a machine, and changes no number."""
_USUAL = 0.3

_BUILT = frozenset({"loaders", "schedulers", "scalers"})
_FIXED: tuple[tuple[AbstractSet[str], re.Pattern[str], float], ...] = (
    ({"environment"}, ENV_NOISE, 0.0),
    ({"environment", "command", *_BUILT}, re.compile(_OF_RESULTS), SAYS_NOTHING),
    ({"environment"}, re.compile(_ENV_STRONG), 0.65),
    ({"environment"}, re.compile(""), 0.25),
    ({"hardware"}, _WHICH_DEVICE, SAYS_NOTHING),
    ({"loaders"}, re.compile(r": prefetch_factor$"), _USUAL),
    ({"runtime", "hardware", "command"}, RUN_NOISE, 0.0),
)
"""Sources, a pattern of names, and the weight whatever the reason; the first row that matches counts."""
_WEIGHTS = {
    "autocast": 0.97,
    "sources": 0.8,
    "command": 0.85,
    "git": 0.6,
    "runtime": 0.4,
    "packages": 0.35,
    "hardware": 0.2,
}
"""How well a change explains a divergence whose reason says nothing else of its source, where not by `_USUAL`."""

_OF_OPTIMIZERS = frozenset({RECORDED, OPTIMIZERS})
_STEPS_WITH = re.compile(r"(lr|learning_?rate|weight_?decay|momentum|betas?|nesterov|amsgrad)$", re.IGNORECASE)
"""What an optimizer steps with: it explains an update, and nothing before."""


def _is_of_optimizer(change: SettingChange) -> bool:
    """Whether a change is of an optimizer, or of an argument or file value named like its option (`lr`, `betas`)."""
    named = {"command": change.name, FILES: change.about}.get(change.source, "")
    steps_with = _STEPS_WITH.match(named.rpartition(".")[2].strip("-").replace("-", "_"))
    return change.source in _OF_OPTIMIZERS or bool(steps_with)


MADE_BY_CODE = _BUILT | _OF_OPTIMIZERS | {"sources", "git"}
"""Settings that the script's code makes: where the code alone differs beside them, it made them differ."""


_ROUNDS = {
    "options": r"--(deterministic|compile)$",
    "packages": _NUMERIC_PACKAGES,
    "environment": _ENV_STRONG,
    "hardware": r"(?!.*\buuid$)",
    "runtime": "",
}
"""By source, the names of settings that change rounding and nothing else."""


def rounds_differently(change: SettingChange) -> bool:
    """Whether a setting changes rounding and nothing else.

    That is hardware but for which device it is, flags, packages and variables of numerics, `--deterministic`,
    `--compile`, options of an optimizer that choose a kernel.
    """
    if change.source in _OF_OPTIMIZERS:
        return chooses_kernel(change.name)
    return change.source in _ROUNDS and bool(re.match(_ROUNDS[change.source], change.name, re.IGNORECASE))


def _weight(change: SettingChange, at: View | None, reason: Reason | None, *, offset: bool) -> float:
    """Weight of a change from 0 to 1: at 0 it is noise and not shown, from 0.5 on it explains the divergence.

    By `_FIXED`, else 0.5 without a divergence, else by the reason. A seed in the environment weighs 0.95 where a
    random state may be the cause. What cannot have reached the place weighs at most `_USUAL`.
    """
    source, name = change.source, change.name
    if source == FILES and change.about:  # a value of configuration weighs as an argument does
        source, name = "command", change.about.rpartition(".")[2]
    fixed = next((weight for sources, names, weight in _FIXED if source in sources and names.search(name)), None)
    if fixed is not None:
        is_seed = fixed > SAYS_NOTHING and "SEED" in name
        return 0.95 if is_seed and (reason is None or reason.weights.get("seeds", 0.0) > 0.9) else fixed
    if offset and (source == "scalers" or (source == OPTIMIZERS and change.about)):
        return 0.0  # of the first step, which is not compared; a scaler that was restored has that one's scale
    if at is None or reason is None:
        return 0.5
    weight = _weight_by_reason(at, reason, source, name, change)
    before = at.site.phase not in {Phase.START, Phase.OPTIMIZER, Phase.EVAL} or at.site.kind is Kind.GRAD
    late = before and not at.site.call and at.first.step == 0 and _is_of_optimizer(change)  # no optimizer has stepped
    rounds = at.first.size is Size.MORE and chooses_kernel(name)
    return min(weight, _USUAL) if late or rounds else weight


def _weight_by_reason(at: View, reason: Reason, source: str, name: str, change: SettingChange) -> float:
    """Weight from 0 to 1 of a setting by its source, as far as the reason says; by `_WEIGHTS` where it does not.

    0.97 for the loader that `at.fed` names, 0.85 for loaders and files where data was not recorded. Raised by 0.1 for
    names that match the reason's; packages that compute nothing explain nothing.
    """
    weights, fed = reason.weights, at.fed
    base = weights.get(source, _WEIGHTS.get(source, _USUAL))
    if source == "loaders":
        named = fed and re.match(rf"{re.escape(fed)}(?: \(\d+\))?(?: \([^()]*:[^()]*\))?:", name)
        return 0.97 if named else 0.85 if fed == "" else _USUAL
    if source == "schedulers":  # of what does not differ, no scheduler makes anything
        recorded = at.step.alignment.are(Kind.HYPERPARAMETER).any()
        scheduled = not recorded or {"lr", "momentum", "betas"} & {each.about for each in at.tuned}
        return max(0.9 * weights.get(OPTIMIZERS, _USUAL), _USUAL) if scheduled else _USUAL
    if source == FILES:
        tensors = weights.get("checkpoints", _USUAL) if holds_tensors(name) else _USUAL
        both = change.a is not None and change.b is not None and fed is not None
        return max(tensors, 0.96 if fed else 0.85) if both else tensors
    if source == "packages":
        of_numerics = re.match(_NUMERIC_PACKAGES, name.lower()) is not None
        if None in (change.a, change.b):  # by itself nothing looks for it, unless it is one of these
            return 0.2 if of_numerics and not re.match(_OF_SCRIPTS, name.lower()) else SAYS_NOTHING
        if not of_numerics:
            return 0.2
        base += 0.25
    elif source != "scalers" and reason.names and re.search(reason.names, name, re.IGNORECASE):
        base += 0.1
    return max(min(base, 1.0), 0.5 * (source == RECORDED))


def setting_changes(
    a: Run, b: Run, at: View | None = None, reason: Reason | None = None, *, offset: bool = False
) -> tuple[SettingChange, ...]:
    """Settings that differ, the heaviest first; without a divergence none explains anything.

    They are those of the rank that diverges. Left out are noise, what a list of arrays lacks, and what the document of
    optimizers says of a hyper-parameter that `at.tuned` has too. Where the distance is rounding, what rounds otherwise
    is raised to 0.9 and the script's settings lowered to 0.75; where nothing else weighs 0.6, up to three variables of
    the environment are raised to 0.8.

    Args:
        a: one run.
        b: the other run.
        at: the divergence; None where there is none.
        reason: of the divergence.
        offset: whether other steps are compared than the first of each run, which is what settings of optimizers tell.
    """
    changes: list[SettingChange] = []
    hyperparameters = at.tuned if at is not None else []
    recorded = {change.about for change in hyperparameters}
    resumes = read_by_one(a, b) if offset else set[str]()
    of_place = () if at is None else (at.first.rank, at.step.comparison.rename or str)
    for change in (*hyperparameters, *differences(a, b, *of_place)):
        weight, one_sided = _weight(change, at, reason, offset=offset), None in (change.a, change.b)
        if change.source == "command" and one_sided and file_name(change.a or change.b) in resumes:
            weight = SAYS_NOTHING  # it has the run resume, which is compared part by part
        # what a list of arrays has no word of is not known to differ
        unlisted = any(is_list(run.manifest) and value is None for run, value in ((a, change.a), (b, change.b)))
        if weight > 0 and not unlisted and not (change.source == OPTIMIZERS and change.about in recorded):
            x, y = on_one_line(change.a, change.b)
            changes.append(change._replace(a=x, b=y, weight=round(weight, 3)))
    tuned = [change for change in changes if change.source in _OF_OPTIMIZERS and change.explains]
    if at is None:
        changes = [one._replace(weight=min(one.weight, UNLIKELY)) for one in changes]
    elif at.rounding and any(map(rounds_differently, changes)) and all(map(rounds_differently, tuned)):
        for place, one in enumerate(changes):  # an argument that changed such a setting is shown by it
            least, most = 0.9 * rounds_differently(one), 0.75 if one.source in {"command", "sources", "git"} else 1.0
            changes[place] = one._replace(weight=max(min(one.weight, most), least))
    named = [change for change in changes if change.source == "environment" and change.weight > SAYS_NOTHING]
    if at is not None and len(named) <= 3 and all(change.weight < 0.6 for change in changes):  # it is one of these
        changes = [one._replace(weight=0.8) if one in named else one for one in changes]
    return tuple(sorted(changes, key=lambda one: -one.weight))


_NEAR = dict(zip(Nearness, (0.98, 0.95, 0.85, 0.7, 0.7, UNLIKELY), strict=True))
_IN_COMMENTS = 0.05


def weighed_by_code(
    settings: tuple[SettingChange, ...], code: CodeChanges | None, *, rounding: bool = False
) -> tuple[SettingChange, ...]:
    """Settings re-sorted by weight, each changed file that explains weighed by its statement nearest to the divergence.

    A file changed only in comments or names explains nothing. `settings` as they are where `code` is None.

    Args:
        settings: the strongest explanation first.
        code: how the source files differ.
        rounding: whether the distance is of the size of rounding: if any setting that differs rounds otherwise, files
            keep their weight, so that flags and libraries come before code.
    """
    keep, code = rounding and any(map(rounds_differently, settings)), code or CodeChanges()
    near = {one.change.file: None if keep and one.likely else _NEAR[one.nearness] for one in reversed(code.ranked)}
    near |= dict.fromkeys(code.unchanged, _IN_COMMENTS)
    files = ((one, near.get(one.name) or one.weight) for one in settings if one.source == "sources")
    weighed = [one._replace(weight=weight if one.explains else min(weight, one.weight)) for one, weight in files]
    others = (one for one in settings if one.source != "sources")
    return tuple(sorted((*others, *weighed), key=lambda one: -one.weight))
