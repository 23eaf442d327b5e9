"""Settings that differ, the strongest explanation first.

Each change is weighted by the reason of the first divergence (a learning rate explains a parameter after the step, no
random state); noise such as a shell's working directory is left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from introspect_cli.compare.result import SettingChange
from introspect_cli.compare.settings.differences import Difference, on_one_line
from introspect_cli.compare.settings.documents import RUN_NOISE, differences
from introspect_cli.compare.settings.files import FILES, file_name, holds_tensors, read_by_one
from introspect_cli.compare.settings.hyperparameters import OPTIMIZERS, RECORDED
from introspect_cli.compare.watched import is_list

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from introspect_cli.records import ModuleInfo
    from introspect_cli.store.run import Run

ENV_NOISE = re.compile(
    r"^(PWD|OLDPWD|SHLVL|_|TERM.*|COLORTERM|SSH_.*|TMUX.*|STY|WINDOW.*|XDG_.*|DBUS_.*|DISPLAY|LS_COLORS|PS[0-9]|PROMPT.*"
    r"|COLUMNS|LINES|HOSTNAME|HOST|LOGNAME|USER|MAIL|HOME|EDITOR|PAGER|LESS.*|HIST.*|LANG|LC_.*|.*_SESSION(_.*)?|TMPDIR"
    r"|VSCODE_.*|ITERM_.*|CONDA_(SHLVL|PROMPT.*)|SLURM_(JOB|STEP|TASK|SUBMIT|NODE|LAUNCH|SRUN).*|PYTEST_.*"
    r"|INVOCATION_ID|JOURNAL_STREAM|MANPATH|INTROSPECT_.*|NO_COLOR|FORCE_COLOR|CLICOLOR.*|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|TORCH_NCCL_ASYNC_ERROR_HANDLING|_TORCHINDUCTOR_.*|(TORCHINDUCTOR|TRITON)_CACHE_DIR|TRITON_\w+_PATH"
    r"|GIT_.*|BASH_.*|WSL.*|DEBUGINFOD_URLS|INFOPATH|WINDOWID|GPG_.*|DESKTOP.*|GNOME_.*|KDE_.*)$"
)
"""Variables that name where, by whom and for which job a process was started; they explain nothing."""

_ENV_STRONG = (
    r"^(CUDA|CUBLAS|CUDNN|NCCL|OMP|MKL|OPENBLAS|TORCH|PYTORCH|NVIDIA|KMP|GLOO|XLA|ATEN|DNNL|ONEDNN|TRITON|HIP|ROCM)"
)
_ENV_NAMES = (
    r"^(WANDB|MLFLOW|NEPTUNE|COMET|CLEARML)_"
    r"|(LOG|OUT|OUTPUT|SAVE|RUN|RESULTS?|EXP|EXPERIMENT)_?(DIR|PATH|NAME|ID|FILE|ROOT|TAG)$|_PORT$"
)
_ENV_SEED = re.compile(r"SEED")
_WHICH_DEVICE = re.compile(r"\buuid$")
_EXPLAINS_NOTHING = (
    r"(?i)^-*(o|out|outputs?|results?|logs?|save|name|exp|experiment|run|tag|port|host|date|time|timestamp|verbose|v|quiet|q"
    r"|((out(put)?|results?|log(s|ging|ger)?|save|run|exp(eriment)?|project|job|group|work|wandb|tensorboard|tb|ckpt"
    r"|checkpoint|cache|te?mp|model|master|dist|rdzv|report|print|profile)[-_])+"
    r"(dir(ectory)?|path|file|folder|name|id|tag|group|port|addr|root|to|every|freq|interval|level|mode|steps|entity"
    r"|project|endpoint)|(log|save|out|result)(dir|file|path))$"
)
"""Options that say where results go and what a run is called."""

_NUMERIC_PACKAGES = (
    r"^(torch|torchvision|torchaudio|triton|numpy|scipy|numba|nvidia|jax|tensorflow|flash|xformers|transformers|lightning"
    r"|pytorch|accelerate|deepspeed|apex|timm|mkl|intel|bitsandbytes|einops|peft|diffusers|tokenizers|datasets)"
)

_WEIGHTS = {
    "autocast": 0.97,
    "sources": 0.8,
    "command": 0.85,
    "git": 0.6,
    "runtime": 0.4,
    "packages": 0.35,
    "hardware": 0.2,
    "environment": 0.25,
}
"""How well a change explains a divergence whose reason says nothing else, where not by `_USUAL`."""
_USUAL = 0.3

_KERNEL_OPTIONS = re.compile(r"(^|[. ])(fused|foreach|capturable)$")
"""Options of an optimizer that choose the kernel, and compute the same but for rounding."""

_OF_OPTIMIZERS = frozenset({RECORDED, OPTIMIZERS})
_OF_THE_SCRIPT = frozenset({"command", "sources", "git"})
_NUMERICS = frozenset({"runtime", "packages", "hardware"})


SAYS_NOTHING = 0.1
"""Weight up to which a setting says where results go, or names a machine, and changes no number."""


class SettingWeights(Protocol):
    """A reason's weights for settings."""

    @property
    def weights(self) -> Mapping[str, float]:
        """Weight 0 to 1 by the setting's source."""

    @property
    def names(self) -> re.Pattern[str] | None:
        """Pattern of names of settings that weigh 0.1 more; None for none."""


def _is_output_name(name: str) -> bool:
    """Whether an option names a place for results or the run itself: `--out-dir`, `hydra.run.dir`."""
    words = name.split(".")
    return any(re.match(_EXPLAINS_NOTHING, "-".join(words[-count:])) for count in (1, 2))


_STEPS_WITH = re.compile(r"(lr|learning_?rate|weight_?decay|momentum|betas?|nesterov|amsgrad)$", re.IGNORECASE)
"""What an optimizer steps with: it explains an update, and nothing before."""


def _is_of_optimizer(change: Difference) -> bool:
    """Whether a change is of an optimizer, or of an argument or file value named like its option (`lr`, `betas`)."""
    named = {"command": change.name, FILES: change.about}.get(change.source, "")
    steps_with = _STEPS_WITH.match(named.rpartition(".")[2].strip("-").replace("-", "_"))
    return change.source in _OF_OPTIMIZERS or bool(steps_with)


_BUILT = frozenset({"loaders", "schedulers", "scalers"})
MADE_BY_CODE = _BUILT | _OF_OPTIMIZERS | {"sources", "git"}
"""Settings that the script's code makes: where the code alone differs beside them, it made them differ."""


def chooses_kernel(name: str) -> bool:
    """Whether a hyper-parameter does no more than choose the kernel: `fused`, `foreach`, `capturable`."""
    return bool(_KERNEL_OPTIONS.search(name))


def rounds_differently(change: SettingChange) -> bool:
    """Whether a setting changes rounding and nothing else.

    That is hardware but for which device it is, flags, packages and variables of numerics, `--deterministic`,
    `--compile`, options of an optimizer that choose a kernel.
    """
    if change.source in _OF_OPTIMIZERS:
        return chooses_kernel(change.name)
    if change.source == "options":
        return change.name in {"--deterministic", "--compile"}
    if change.source == "packages":
        return bool(re.match(_NUMERIC_PACKAGES, change.name.lower()))
    if change.source == "environment":
        return bool(re.match(_ENV_STRONG, change.name))
    return change.source in {"hardware", "runtime"} and not _WHICH_DEVICE.search(change.name)


@dataclass(frozen=True)
class Blame:
    """Facts of a divergence that decide which settings may have caused it; the default is no divergence.

    Attributes:
        reason: why the runs diverge; None where they do not.
        hyperparameters: what differs of them as recorded at the diverging step.
        rounding: whether the distance is of the size of rounding, which speaks for kernels, not for code.
        modules: the module whose code is meant and those around it, the innermost first.
        fed: the loader whose batch differs; "" where data may and was not recorded, None where data is not the cause.
        rates: whether hyper-parameters differ at the diverging step, or none were recorded.
        offset: whether other steps are compared than the first of each run, which is what settings of optimizers tell.
        stepped: whether an optimizer may have stepped before.
        more: whether the distance is more than rounding, which no other kernel of an optimizer makes.
    """

    reason: SettingWeights | None = None
    hyperparameters: Sequence[Difference] = ()
    rounding: bool = False
    modules: Sequence[ModuleInfo] = ()
    fed: str | None = None
    rates: bool = False
    offset: bool = False
    stepped: bool = True
    more: bool = False

    def weight(self, change: Difference) -> float:
        """Weight of a change from 0 to 1: at 0 it is noise and not shown, from 0.5 on it explains the divergence.

        Without a divergence, what is no noise mostly weighs 0.5.
        """
        if change.source in _BUILT:
            return self._weight_of_built(change)
        if (not self.stepped and _is_of_optimizer(change)) or (self.more and chooses_kernel(change.name)):
            return _USUAL
        if change.source == "sources" and any(change.name == each.source.rpartition(":")[0] for each in self.modules):
            return 0.97
        if change.source != FILES:
            weight = self._weight_by_name(change.source, change.name)
            if self._is_of_first_steps(change):
                return min(weight, _USUAL)
            return max(weight, 0.5) if change.source == RECORDED and self.reason is not None else weight
        if change.about:  # a value of configuration weighs as an argument does
            return self._weight_by_name("command", change.about.rpartition(".")[2])
        return self._weight_of_file(change)

    def shown_name(self, change: Difference) -> str:
        """Name of a change as it is shown; under an offset, ` in the first step` follows a setting of an optimizer."""
        return f"{change.name}{' in the first step' * self._is_of_first_steps(change)}"

    def _is_of_first_steps(self, change: Difference) -> bool:
        """Whether a setting of an optimizer describes the first step, which is not compared under an offset."""
        return self.offset and change.source == OPTIMIZERS and bool(change.about)

    def _weight_by_name(self, source: str, name: str) -> float:
        """Weight from 0 to 1 of a setting by its source (the document) and its name.

        0 for noise, SAYS_NOTHING for names of results, runs and devices, 0.5 without a divergence. Else that of the
        reason for the source, raised for names that match the reason's and, where the distance is rounding, for
        numerics. Variables of the environment have weights of their own.
        """
        reason = self.reason
        if source == "environment":
            if ENV_NOISE.match(name):
                return 0.0
            if re.search(_ENV_NAMES, name):
                return SAYS_NOTHING
            if _ENV_SEED.search(name) and (reason is None or reason.weights.get("seeds", 0.0) > 0.9):
                return 0.95
            return 0.65 if re.match(_ENV_STRONG, name) else 0.25
        if (source == "command" and _is_output_name(name)) or (source == "hardware" and _WHICH_DEVICE.search(name)):
            return SAYS_NOTHING
        if source in {"runtime", "hardware", "command"} and RUN_NOISE.search(name.lower()):
            return 0.0
        if reason is None:
            return 0.5
        base = reason.weights.get(source, _WEIGHTS.get(source, _USUAL))
        if source == "packages":
            if not re.match(_NUMERIC_PACKAGES, name.lower()):
                return 0.2  # what computes nothing explains nothing
            base += 0.25
        if self.rounding and (source in _NUMERICS or re.match(_ENV_STRONG, name)):
            base += 0.2
        elif self.rounding and source == "sources":
            base -= 0.15
        if reason.names is not None and source != "packages" and reason.names.search(name):
            base += 0.1
        return min(base, 1.0)

    def _weight_of_built(self, change: Difference) -> float:
        """Weight from 0 to 1 of an argument of a loader, scheduler or scaler.

        SAYS_NOTHING for names of results, and for scalers under an offset; 0.5 without a divergence. 0.97 for the
        loader that `fed` names, 0.85 for all where it is "".
        """
        if _is_output_name(change.name.rpartition(".")[2]) or (self.offset and change.source == "scalers"):
            return SAYS_NOTHING  # a scaler that a checkpoint filled has that one's scale
        if self.reason is None:
            weight = 0.5
        elif change.source == "schedulers":
            weight = max(0.9 * self.reason.weights.get(OPTIMIZERS, _USUAL), _USUAL) if self.rates else _USUAL
        elif change.source != "loaders":
            weight = self.reason.weights.get(change.source, _USUAL)
        elif self.fed and re.match(rf"{re.escape(self.fed)}(?: \(\d+\))?(?: \([^()]*:[^()]*\))?:", change.name):
            weight = 0.97
        else:
            weight = 0.85 if self.fed == "" else _USUAL
        # torch sets it itself where there are workers
        return min(weight, _USUAL) if None in change[2:4] and change.name.endswith(": prefetch_factor") else weight

    def _weight_of_file(self, change: Difference) -> float:
        """Weight from 0 to 1 of a file that has other content or that one run alone read; 0.5 without a divergence.

        A file of tensors weighs what the reason says of checkpoints. One with other content weighs 0.96 at least where
        a batch differs, 0.85 where data was not recorded; all others 0.3.
        """
        if self.reason is None:
            return 0.5
        tensors = self.reason.weights.get("checkpoints", 0.3) if holds_tensors(change.name) else 0.0
        if change.a is None or change.b is None:
            return tensors or 0.3
        return max(tensors, 0.3 if self.fed is None else 0.96 if self.fed else 0.85)


def setting_changes(a: Run, b: Run, blame: Blame | None = None) -> tuple[SettingChange, ...]:
    """Settings that differ, the heaviest first; from weight 0.5 on a change explains the divergence, if there is one.

    Left out are noise, what a list of arrays lacks, and what the document of optimizers says of a hyper-parameter that
    `blame.hyperparameters` has too. Where the distance is rounding, what rounds otherwise is raised to 0.9 and the
    script's settings lowered to 0.75; where nothing else weighs 0.6, up to three variables of the environment are
    raised to 0.8.

    Args:
        a: one run.
        b: the other run.
        blame: facts of the divergence; None for no divergence.
    """
    blame = blame or Blame()
    diverged = blame.reason is not None
    changes: list[SettingChange] = []
    recorded = {change.about for change in blame.hyperparameters}
    resumes = read_by_one(a, b) if blame.offset else set[str]()
    for change in (*blame.hyperparameters, *differences(a, b)):
        weight = blame.weight(change)
        if change.source == "command" and None in (change.a, change.b) and file_name(change.a or change.b) in resumes:
            weight = SAYS_NOTHING  # it has the run resume, which is compared part by part
        if weight > 0 and not (change.source == OPTIMIZERS and change.about in recorded):
            values = on_one_line(change.a, change.b)
            explains = diverged and weight >= 0.5
            changes.append(SettingChange(change.source, blame.shown_name(change), *values, explains, round(weight, 3)))
    if diverged:
        tuned = [change for change in changes if change.source in _OF_OPTIMIZERS and change.explains]
        if blame.rounding and any(map(rounds_differently, changes)) and all(map(rounds_differently, tuned)):
            changes = [  # an argument that changed such a setting is shown by it
                replace(one, weight=max(one.weight, 0.9), explains=True)
                if rounds_differently(one)
                else replace(one, weight=min(one.weight, 0.75) if one.source in _OF_THE_SCRIPT else one.weight)
                for one in changes
            ]
        named = [change for change in changes if change.source == "environment" and change.weight > SAYS_NOTHING]
        if len(named) <= 3 and all(change.weight < 0.6 for change in changes):  # then it is probably one of these
            changes = [replace(one, weight=0.8, explains=True) if one in named else one for one in changes]
    changes.sort(key=lambda change: -change.weight)
    silent = is_list(a.manifest), is_list(b.manifest)  # what a list of arrays has no word of is not known to differ
    return tuple(
        change for change in changes if not ((silent[0] and change.a is None) or (silent[1] and change.b is None))
    )
