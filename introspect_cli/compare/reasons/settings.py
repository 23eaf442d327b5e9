"""Settings that differ, the strongest explanation first.

Two runs differ in hundreds of settings that explain nothing (a shell's working directory, a session's number) and in
one that does. What a change can explain depends on where the runs diverge: a learning rate explains a parameter after
the step and no random state. So each change gets a weight from the reason of the first divergence, and what is known
to be noise is left out. Flat mappings are compared directly; nested ones by deepdiff, imported only then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from introspect_cli.compare.command_line import argv_of, command_options
from introspect_cli.compare.reasons.beginning import DOCUMENT
from introspect_cli.compare.reasons.files import READ, FileChange, file_changes
from introspect_cli.compare.reasons.hyperparameters import Label, Told, built_changes, optimizer_changes
from introspect_cli.compare.result import SettingChange
from introspect_cli.compare.watched import lists
from introspect_cli.store.launch import rank_list

if TYPE_CHECKING:
    from introspect_cli.records import ModuleInfo
    from introspect_cli.store.reader import Run

ENV_NOISE = re.compile(
    r"^(PWD|OLDPWD|SHLVL|_|TERM.*|COLORTERM|SSH_.*|TMUX.*|STY|WINDOW.*|XDG_.*|DBUS_.*|DISPLAY|LS_COLORS|PS[0-9]|PROMPT.*"
    r"|COLUMNS|LINES|HOSTNAME|HOST|LOGNAME|USER|MAIL|HOME|EDITOR|PAGER|LESS.*|HIST.*|LANG|LC_.*|.*_SESSION(_.*)?|TMPDIR"
    r"|VSCODE_.*|ITERM_.*|CONDA_(SHLVL|PROMPT.*)|SLURM_(JOB|STEP|TASK|SUBMIT|NODE|LAUNCH|SRUN).*|PYTEST_.*"
    r"|INVOCATION_ID|JOURNAL_STREAM|MANPATH|INTROSPECT_.*|NO_COLOR|FORCE_COLOR|CLICOLOR.*|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|TORCH_NCCL_ASYNC_ERROR_HANDLING"
    r"|GIT_.*|BASH_.*|WSL.*|DEBUGINFOD_URLS|INFOPATH|WINDOWID|GPG_.*|DESKTOP.*|GNOME_.*|KDE_.*)$"
)
"""Variables that name where, by whom and for which job a process was started; they explain nothing."""

_ENV_STRONG = re.compile(
    r"^(CUDA|CUBLAS|CUDNN|NCCL|OMP|MKL|OPENBLAS|TORCH|PYTORCH|NVIDIA|KMP|GLOO|XLA|ATEN|DNNL|ONEDNN|TRITON|HIP|ROCM)"
)
_ENV_NAMES = re.compile(
    r"^(WANDB|MLFLOW|NEPTUNE|COMET|CLEARML)_"
    r"|(LOG|OUT|OUTPUT|SAVE|RUN|RESULTS?|EXP|EXPERIMENT)_?(DIR|PATH|NAME|ID|FILE|ROOT|TAG)$|_PORT$"
)
_ENV_SEED = re.compile(r"SEED")
_RUN_NOISE = re.compile(
    r"(^|[.\[' ])(time|started|ended|pid|uptime|load|hostname|output|cwd|tmp|temperature|free_?memory|boot)\b"
)
_WHICH_DEVICE = re.compile(r"\buuid$")
_EXPLAINS_NOTHING = re.compile(
    r"^-*(o|out|outputs?|results?|logs?|save|name|exp|experiment|run|tag|port|host|date|time|timestamp|verbose|v|quiet|q"
    r"|((out(put)?|results?|log(s|ging|ger)?|save|run|exp(eriment)?|project|job|group|work|wandb|tensorboard|tb|ckpt"
    r"|checkpoint|cache|te?mp|model|master|dist|rdzv|report|print|profile)[-_])+"
    r"(dir(ectory)?|path|file|folder|name|id|tag|group|port|addr|root|to|every|freq|interval|level|mode|steps|entity"
    r"|project|endpoint)|(log|save|out|result)(dir|file|path))$",
    re.IGNORECASE,
)
"""Options that say where results go and what a run is called."""

_NUMERIC_PACKAGES = re.compile(
    r"^(torch|torchvision|torchaudio|triton|numpy|scipy|numba|nvidia|jax|tensorflow|flash|xformers|transformers|lightning"
    r"|pytorch|accelerate|deepspeed|apex|timm|mkl|intel|bitsandbytes|einops|peft|diffusers|tokenizers|datasets)"
)

_WEIGHTS = {
    "hyperparameter": 0.3,
    "optimizers": 0.3,
    "sources": 0.8,
    "command": 0.85,
    "git": 0.6,
    "runtime": 0.4,
    "packages": 0.35,
    "hardware": 0.2,
    "seeds": 0.3,
    "options": 0.3,
    "environment": 0.25,
}
"""How well a change explains a divergence whose reason says nothing else."""

_SWITCHES = {
    "matmul_allow_tf32": "TF32 in matrix products",
    "cudnn_allow_tf32": "TF32 in cuDNN",
    "fp16_reduced_precision_reduction": "reduced precision in sums of float16 products",
    "bf16_reduced_precision_reduction": "reduced precision in sums of bfloat16 products",
    "fp16_accumulation": "accumulation in float16",
    "flash_sdp": "flash attention",
    "mem_efficient_sdp": "memory-efficient attention",
    "math_sdp": "attention by plain operators",
    "cudnn_sdp": "attention by cuDNN",
    "cudnn_enabled": "cuDNN",
    "cudnn_benchmark": "the benchmark that chooses cuDNN's kernels",
    "cudnn_deterministic": "determinism of cuDNN",
    "deterministic_algorithms": "torch.use_deterministic_algorithms",
}
"""Flags that are on or off, as a sentence calls them."""

_KERNEL_OPTIONS = re.compile(r"(^|[. ])(fused|foreach|capturable)$")
"""Options of an optimizer that choose the kernel, and compute the same but for rounding."""

_OF_OPTIMIZERS = frozenset({"hyperparameter", "optimizers"})
_OF_THE_SCRIPT = frozenset({"command", "sources", "git"})
_NUMERICS = frozenset({"runtime", "packages", "hardware"})
_ELSEWHERE = frozenset({DOCUMENT, "files", "operators"})
"""Documents that are no settings."""
_GIT = frozenset({"commit", "dirty"})


class Explained(Protocol):
    """What a reason says of the settings that explain it."""

    weights: ClassVar[Mapping[str, float]]
    names: re.Pattern[str] | None


_LONGEST = 80
_AROUND = 20


def _texts(one: Any, two: Any) -> tuple[str | None, str | None]:
    """A setting's two values on one line each, None for none; of long ones what is around the first difference."""
    a, b = (None if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in (one, two))
    if a is None or b is None:
        start = 0
    else:
        shared = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        start = max(shared - _AROUND, 0) if max(len(a), len(b)) > _LONGEST else 0
    return _cut(a, start), _cut(b, start)


def _cut(text: str | None, start: int) -> str | None:
    """A text from a place on, and no longer than a line has room for."""
    if text is None:
        return None
    rest = f"...{text[start:]}" if start else text
    return rest if len(rest) <= _LONGEST else rest[: _LONGEST - 3] + "..."


def _flat(value: Any) -> bool:
    return isinstance(value, Mapping) and not any(isinstance(item, (Mapping, list, tuple)) for item in value.values())


def _changes(a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, value in a, value in b) for each difference; None on the side that lacks it."""
    if a == b:
        return
    if (_flat(a) or not a) and (_flat(b) or not b):
        a, b = a or {}, b or {}
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            for name in dict.fromkeys([*a, *b]):
                if a.get(name) != b.get(name):
                    yield str(name), a.get(name), b.get(name)
            return
    yield from _nested(a, b)


def _nested(a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """Differences of nested values, as deepdiff finds them."""
    from deepdiff import DeepDiff

    found = DeepDiff(a, b, view="tree", verbose_level=2, ignore_order=False)
    for kind in found:
        for level in found[kind]:
            name = re.sub(r"^root", "", level.path() or "")
            name = re.sub(r"\['([^'\]]*)'\]", r".\1", name).lstrip(".")
            one, two = level.t1, level.t2
            yield (
                name or "value",
                None if "added" in kind else one,
                None if "removed" in kind else two,
            )


def _same_file_name(a: Sequence[str], b: Sequence[str]) -> bool:
    """Whether two scripts in two folders are called the same."""
    return bool(a and b) and PurePath(a[0]).name == PurePath(b[0]).name


def _says_where(name: str) -> bool:
    """Whether an option says where results go, or what a run is called: `--out-dir`, `hydra.run.dir`."""
    words = name.split(".")
    return any(_EXPLAINS_NOTHING.match("-".join(words[-count:])) for count in (1, 2))


_STEPS_WITH = re.compile(r"(lr|learning_?rate|weight_?decay|momentum|betas?|nesterov|amsgrad)$", re.IGNORECASE)
"""What an optimizer steps with: it explains an update, and nothing before."""
_BUILT = frozenset({"loaders", "schedulers", "scalers"})


def _weigh_built(source: str, name: str, reason: Explained | None, fed: str | None, *, rates: bool) -> float:
    """How well it explains a divergence that something was built with another argument.

    Args:
        source: kind of thing.
        name: which, where it was built, and the argument.
        reason: why the runs diverge; None where they do not.
        fed: the loader whose batch differs; "" where data may and was not recorded, None where data is not the cause.
        rates: whether hyper-parameters differ at the diverging step, or none were recorded.
    """
    if _says_where(name.rpartition(".")[2]):
        return 0.1
    if reason is None:
        return 0.5
    if source == "loaders":
        mine = fed is not None and re.match(rf"{re.escape(fed)}(?: \(\d+\))?(?: \([^()]*:[^()]*\))?:", name)
        return 0.97 if mine else 0.85 if fed == "" else 0.3
    if source == "schedulers":
        return max(0.9 * reason.weights.get("optimizers", 0.3), 0.3) if rates else 0.3
    return reason.weights.get(source, 0.3)


def _weigh_file(change: FileChange, reason: Explained | None, fed: str | None) -> float:
    """How well it explains a divergence that a file, or a value in one, is another: this as an argument."""
    if change.value:
        name = change.value.rpartition(".")[2]
        return _weigh("hyperparameter" if _STEPS_WITH.match(name) else "command", name, reason, rounding=False)
    if reason is None:
        return 0.5
    if change.a is None or change.b is None:
        return 0.3  # what is read in one run alone is often a cache
    data = 0.3 if fed is None else 0.96 if fed else 0.85
    return max(reason.weights.get("checkpoints", 0.3) if change.checkpoint else 0.0, data)


def _weigh(source: str, name: str, reason: Explained | None, *, rounding: bool) -> float:
    """How well a change explains a divergence, 0 to 1; 0 is noise that is not shown."""
    if source == "environment":
        if ENV_NOISE.match(name):
            return 0.0
        if _ENV_NAMES.search(name):
            return 0.1
        base = 0.65 if _ENV_STRONG.match(name) else 0.25
        if _ENV_SEED.search(name) and (reason is None or reason.weights.get("seeds", 0.0) > 0.9):
            base = 0.95
        return base
    if source == "command" and _says_where(name):
        return 0.1
    if source == "hardware" and _WHICH_DEVICE.search(name):
        return 0.1
    if source in {"runtime", "hardware", "command"} and _RUN_NOISE.search(name.lower()):
        return 0.0
    if reason is None:
        return 0.5
    base = reason.weights.get(source, _WEIGHTS.get(source, 0.3))
    if source == "packages":
        if not _NUMERIC_PACKAGES.match(name.lower()):
            return 0.2  # what computes nothing explains nothing
        base += 0.25
    if rounding and (source in _NUMERICS or _ENV_STRONG.match(name)):
        base += 0.2
    elif rounding and source == "sources":
        base -= 0.15
    if reason.names is not None and source != "packages" and reason.names.search(name):
        base += 0.1
    return min(base, 1.0)


def _sourced(a: Run, b: Run) -> Iterator[tuple[Any, ...]]:
    """(source, name, value in a, value in b) of all settings that differ, from two runs' settings and manifests."""
    settings_a, settings_b = ({n: run.settings[n] for n in run.settings if n not in _ELSEWHERE} for run in (a, b))
    words_a, words_b = argv_of(settings_a, a.manifest), argv_of(settings_b, b.manifest)
    if "sources" in settings_a and "sources" in settings_b and _same_file_name(words_a[:1], words_b[:1]):
        words_b[0] = words_a[0]  # what the script holds is told by its hash; its folder explains nothing
    for name, one, two in _changes(command_options(words_a), command_options(words_b)):
        yield "command", name, one, two
    for source in dict.fromkeys([*settings_a, *settings_b]):
        if source == "command" or source not in settings_a or source not in settings_b:
            continue  # settings that one capture was told not to keep are no change
        one_side, other_side = settings_a[source], settings_b[source]
        if source == "built":
            yield from built_changes(one_side, other_side, _changes)
            continue
        found = (optimizer_changes if source == "optimizers" else _changes)(one_side, other_side)
        for name, one, two in found:
            if source == "sources":
                both = one is not None and two is not None
                yield source, name, *(("", "changed") if both else (one and "imported", two and "imported"))
            elif source != "git":
                yield source, name, one, two
            elif name in _GIT:
                yield source, name, *(value[:10] if isinstance(value, str) else value for value in (one, two))
    if all("files" in run.settings for run in (a, b)):
        for change in file_changes(a, b, _changes):
            yield "files", change, change.a, change.b
    told = [run.manifest.get("options") for run in (a, b)]
    options_a, options_b = (options if isinstance(options, Mapping) else {} for options in told)
    for name in ("seed", "deterministic", "compile", "perturb"):
        if options_a.get(name) != options_b.get(name):
            yield "options", f"--{name}", options_a.get(name), options_b.get(name)


_MOST_RANKS = 16
"""Ranks that are looked at: their settings are documents of their own. `check` holds all ranks of a run together."""


def _rank_changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[SettingChange]:
    """What differs between the optimizers and the flags of one rank of two runs."""
    by_rank = []
    for source, changes in (("optimizers", optimizer_changes), ("runtime", _changes)):
        if source in a and source in b:
            told = ((name, *_texts(one, two)) for name, one, two in changes(a[source], b[source]))
            by_rank += [SettingChange(source, *own) for own in told if not _RUN_NOISE.search(own[0].lower())]
    return by_rank


def on_some_ranks(a: Run, b: Run) -> list[str]:
    """Sentences on optimizers and flags that differ on some ranks and not on the lowest, whose settings are the run's.

    Another rank's learning rate may have changed without a trace in any number, where gradients are zero or NaN: then
    nothing diverges, and nothing else would tell of it.
    """
    ranks = [rank for rank in a.recorded if rank in b.recorded][:_MOST_RANKS]
    if len(ranks) < 2:
        return []
    notes: dict[SettingChange, list[int]] = {}
    for rank in ranks:
        for change in _rank_changes(a.settings_of(rank), b.settings_of(rank)):
            notes.setdefault(change, []).append(rank)
    return [
        f"On {rank_list(own)} alone a setting differs: {describe(change)} ({change.source})."
        for change, own in notes.items()
        if ranks[0] not in own
    ]


def setting_changes(
    a: Run,
    b: Run,
    reason: Explained | None,
    hyperparameters: Told,
    *,
    rounding: bool = False,
    blamed: Sequence[ModuleInfo] = (),
    fed: str | None = None,
    rates: bool = False,
) -> tuple[SettingChange, ...]:
    """Settings that differ between two runs, the strongest explanation first.

    Args:
        a: run a.
        b: run b.
        reason: why the runs diverge; None where they do not.
        hyperparameters: name to (value in a, value in b), as recorded at the diverging step.
        rounding: whether the distance is of the size of rounding, which speaks for kernels, not for code.
        blamed: the module whose code is meant and those around it, the innermost first.
        fed: the loader whose batch differs; "" where data may and was not recorded, None where data is not the cause.
        rates: whether hyper-parameters differ at the diverging step, or none were recorded.
    """
    changes: list[SettingChange] = []
    named = set()
    for name, (one, two) in hyperparameters.items():
        weight = max(_weigh("hyperparameter", name, reason, rounding=rounding), 0.5 if reason is not None else 0.0)
        changes.append(SettingChange("hyperparameter", name, one, two, weight >= 0.5, weight))
        named.add(name.about)
    for origin, name, one, two in _sourced(a, b):
        if isinstance(name, Label) and name.about in named:
            continue
        shown = str(name)
        if isinstance(name, FileChange):
            weight, shown = _weigh_file(name, reason, fed), name.name
        elif origin in _BUILT:
            weight = _weigh_built(origin, name, reason, fed, rates=rates)
            if None in (one, two) and name.endswith(": prefetch_factor"):
                weight = min(weight, 0.3)  # torch sets it itself where there are workers
        else:
            weight = _weigh(origin, name, reason, rounding=rounding)
        if weight <= 0:
            continue
        changes.append(
            SettingChange(
                origin,
                shown,
                *_texts(one, two),
                reason is not None and weight >= 0.5,
                round(weight, 3),
            )
        )
    if reason is not None:
        changes = _by_file(changes, blamed)
    if rounding and reason is not None:
        changes = _rounding_first(changes)
    if reason is not None and all(change.weight < 0.6 for change in changes):
        changes = _alone(changes)
    changes.sort(key=lambda change: -change.weight)
    silent = lists(a.manifest), lists(b.manifest)  # what a list of arrays has no word of is not known to differ
    return tuple(own for own in changes if not ((silent[0] and own.a is None) or (silent[1] and own.b is None)))


def _by_file(changes: list[SettingChange], blamed: Sequence[ModuleInfo]) -> list[SettingChange]:
    """The changed file in which the blamed module's class stands before all others; told with the line."""
    changed = {change.name for change in changes if change.source == "sources"}
    for module in blamed:
        file, _, line = module.source.rpartition(":")
        if file in changed:
            told = f"changed ({module.module_class} is at {file}:{line})"
            return [
                replace(change, b=told, weight=0.97)
                if change.name == file
                else replace(change, weight=min(change.weight, 0.7))
                if change.source == "sources"
                else change
                for change in changes
            ]
    return changes


def _rounding_first(changes: list[SettingChange]) -> list[SettingChange]:
    """Settings that change how results are rounded, where any does, before the script's name, arguments and files.

    An argument that made such a setting another is told by it; one that made none is left as the best there is.
    """
    tuned = (change for change in changes if change.source in _OF_OPTIMIZERS and change.explains)
    if not any(map(rounds_differently, changes)) or not all(map(rounds_differently, tuned)):
        return changes
    return [
        replace(change, weight=max(change.weight, 0.9), explains=True)
        if rounds_differently(change)
        else replace(change, weight=min(change.weight, 0.75))
        if change.source in _OF_THE_SCRIPT
        else change
        for change in changes
    ]


def chooses_kernel(name: str) -> bool:
    """Whether a hyper-parameter is one that chooses the kernel, and computes the same but for rounding."""
    return bool(_KERNEL_OPTIONS.search(name))


def rounds_differently(change: SettingChange) -> bool:
    """Whether a setting changes how results are rounded: hardware, threads, libraries that compute, their flags."""
    if change.source in _OF_OPTIMIZERS:
        return chooses_kernel(change.name)
    if change.source == "options":
        return change.name in {"--deterministic", "--compile"}
    if change.source == "packages":
        return bool(_NUMERIC_PACKAGES.match(change.name.lower()))
    if change.source == "environment":
        return bool(_ENV_STRONG.match(change.name))
    return change.source in {"hardware", "runtime"} and not _WHICH_DEVICE.search(change.name)


def _alone(changes: list[SettingChange]) -> list[SettingChange]:
    """Few environment variables that differ, where nothing better does: then it is probably one of them."""
    environment = [change for change in changes if change.source == "environment" and change.weight > 0.1]
    if len(environment) > 3:
        return changes
    return [replace(c, weight=0.8, explains=True) if c in environment else c for c in changes]


def describe(change: SettingChange) -> str:
    """A change like a diff: `lr 0.0003 -> 0.001`, `model.py changed`, `--amp, set only in b`."""
    if change.source in {"sources", "files"} and change.a == "":
        return f"{change.name} {change.b}"
    switched = {"True": "a", "False": "b"}.get(str(change.a)) if {change.a, change.b} == {"True", "False"} else None
    if switched and change.source == "runtime" and change.name in _SWITCHES:
        return f"{_SWITCHES[change.name]} is on in {switched} only"
    only = ", set only in" if change.source in {"command", "environment", "options"} else " only in"
    name = "uncommitted changes" if (change.source, change.name) == ("git", "dirty") else change.name
    if change.a is None:
        tail = "" if change.b in {"given", "imported", READ, None} else f"{_sign(name)}{change.b}"
        return f"{name}{tail}{only} b"
    if change.b is None:
        tail = "" if change.a in {"given", "imported", READ} else f"{_sign(name)}{change.a}"
        return f"{name}{tail}{only} a"
    return f"{name} {change.a} -> {change.b}"


def _sign(name: str) -> str:
    return " " if name.startswith("-") else " = "
