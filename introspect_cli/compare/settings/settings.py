"""Settings of two runs that differ, the strongest explanation first.

All documents are compared, optimizers in `hyperparameters.py`. Each change is weighted by the reason of the first
divergence (a learning rate explains a parameter after the step, no random state); noise such as a shell's working
directory is left out.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from introspect_cli.compare.result import SettingChange
from introspect_cli.compare.say import told
from introspect_cli.compare.settings import beginning
from introspect_cli.compare.settings.differences import (
    MOST_RANKS,
    READ,
    Difference,
    describe,
    on_one_line,
    unequal_values,
)
from introspect_cli.compare.settings.hyperparameters import OPTIMIZERS, RECORDED, optimizer_differences
from introspect_cli.compare.watched import is_list
from introspect_cli.errors import StoreError
from introspect_cli.texts import begin_alike, clean, gpu_names, rank_list

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from collections.abc import Set as AbstractSet

    from introspect_cli.records import ModuleInfo
    from introspect_cli.store.run import Run


# --- files that a run read


FILES = "files"
"""The document that says what a run read, and the source of what differs in it."""

_CHECKPOINTS = frozenset(
    {".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".npz", ".npy", ".h5", ".pkl", ".msgpack", ".distcp"}
)
_MOST = 20
_LONGEST = 60
_MOST_NODES = 20_000


class ReadFile(NamedTuple):
    """A file that a run read.

    Attributes:
        name: as the run names it.
        digest: of its content; None where that is not on record.
    """

    run: Run
    name: str
    digest: Any
    size: Any

    @property
    def content_key(self) -> tuple[Any, Any]:
        """Key by which files have equal content: digest and size."""
        return self.digest, self.size

    @property
    def ending(self) -> str:
        """Lower-case suffix of the name: `.yaml`."""
        return PurePath(self.name).suffix.lower()

    def text(self) -> str | None:
        """The text, decoded, not cached; None where the run did not keep it or it is damaged."""
        if not isinstance(self.digest, str) or self.digest not in self.run.kept_sources:
            return None
        try:
            data = self.run.source(self.digest)
        except StoreError:
            return None
        return None if data is None else data.decode("utf-8", "replace")


def files_of(run: Run) -> dict[str, ReadFile]:
    """Files that a run read, by name; entries that stand for many files are left out. {} where none is on record."""
    return {
        str(name): ReadFile(run, str(name), document.get("digest"), document.get("size"))
        for name, document in run.settings.document(FILES).items()
        if isinstance(document, Mapping) and not document.get("many")
    }


def tensor_files(run: Run) -> dict[str, str]:
    """Names of the files of tensors that a run read, by digest, or by name where there is no digest."""
    return {str(file.digest or name): name for name, file in files_of(run).items() if holds_tensors(name)}


def holds_tensors(name: str) -> bool:
    """Whether a file's name ends as those of tensors do: `.pt`, `.safetensors`, `.npz`."""
    return PurePath(name).suffix.lower() in _CHECKPOINTS


# --- two runs


def file_differences(a: Run, b: Run) -> Iterator[Difference]:
    """Differences of files that were read: values of configuration, else the first line, else digests.

    A file that one run alone read has the value `READ`. Files that both runs imported as sources are left out.
    """
    one, two = files_of(a), files_of(b)
    imported = [run.settings.document("sources") for run in (a, b)]
    pairs, only_a, only_b = _paired_files(one, two)
    for first, second in pairs:
        if not (first in imported[0] and second in imported[1]):  # those are among the sources
            yield from _differences_of_pair(one[first], two[second])
    yield from (Difference(FILES, name, READ, None) for name in only_a)
    yield from (Difference(FILES, name, None, READ) for name in only_b)


def _paired_files(
    a: Mapping[str, ReadFile], b: Mapping[str, ReadFile]
) -> tuple[list[tuple[str, str]], list[str], list[str]]:
    """(pairs of names in a and b, names in a alone, names in b alone).

    Paired are equal names, then files of equal content, then of equal basename, then of equal ending. The last three
    count only where just one file left in each run has it.
    """
    pairs = [(name, name) for name in a if name in b]
    left = [[file for name, file in one.items() if name not in two] for one, two in ((a, b), (b, a))]
    keys: tuple[Callable[[ReadFile], object], ...] = (
        lambda file: file.content_key,
        lambda file: PurePath(file.name).name,
        lambda file: file.ending,
    )
    for key in keys:
        counts = [Counter(map(key, files)) for files in left]
        alone = [{key(file): file for file in files} for files in left]
        both = [each for each in alone[0] if counts[0][each] == counts[1][each] == 1]
        pairs += [(alone[0][each].name, alone[1][each].name) for each in both]
        left = [[file for file in files if key(file) not in both] for files in left]
    one, two = ([file.name for file in files] for files in left)
    return pairs, one, two


def _differences_of_pair(a: ReadFile, b: ReadFile) -> Iterator[Difference]:
    """Differences of two paired files; none where their content is equal or a digest is missing.

    Of configuration the first `_MOST` values, of other texts the first line that differs; where a text is not there,
    one difference, of the digests.
    """
    if a.content_key == b.content_key or not (a.digest and b.digest):
        return
    shown = a.name if a.name == b.name else f"{a.name} and {b.name}"
    text_a, text_b = a.text(), b.text()
    if text_a is None or text_b is None:
        yield Difference(FILES, shown, a.digest, b.digest)
        return
    values = parsed(text_a, a.ending), parsed(text_b, b.ending)
    if None in values:
        for line, x, y in first_unequal_line(text_a, text_b):
            yield Difference(FILES, f"{shown}:{line}", x, y, f"{x} {y}")
    else:
        for value, x, y in islice(unequal_values(*values), _MOST):
            yield Difference(FILES, f"{shown}: {value}", x, y, value)


# --- a text


def parsed(text: str, ending: str) -> Any:
    """JSON, YAML, TOML or INI as nested data, by the file's `ending`.

    None for another ending, malformed text, more than `_MOST_NODES` values, and what is no list or mapping; for TOML
    also before Python 3.11.
    """
    import configparser

    try:
        if ending == ".json":
            content = json.loads(text)
        elif ending in {".yaml", ".yml"}:
            content = _parsed_yaml(text)
        elif ending == ".toml" and sys.version_info >= (3, 11):
            import tomllib

            content = tomllib.loads(text)
        elif ending in {".ini", ".cfg", ".conf"}:
            parser = configparser.RawConfigParser(strict=False)
            parser.read_string(text)
            content = {section: dict(parser.items(section)) for section in parser.sections()}
        else:
            return None
    except (ValueError, yaml.YAMLError, configparser.Error, RecursionError):
        return None
    return content if isinstance(content, (dict, list)) and _is_small(content) else None


def _is_small(root: Any) -> bool:
    """Whether nested data or YAML nodes are at most `_MOST_NODES`, with aliases followed."""
    waiting, count = [root], 0
    while waiting:
        value = waiting.pop()
        count += not isinstance(value, tuple)  # a key with its value
        if count > _MOST_NODES:
            return False
        inside = value.value if isinstance(value, yaml.CollectionNode) else value
        if isinstance(inside, dict):
            waiting.extend(inside.values())
        elif isinstance(inside, (list, tuple)):
            waiting.extend(inside)
    return True


def _parsed_yaml(text: str) -> Any:
    """The data of a YAML text; None where it is empty or too large. yaml.YAMLError where it is malformed."""
    if text.count("*") > _MOST_NODES or text.count("\n") > _MOST_NODES:
        return None
    node = yaml.compose(text, yaml.SafeLoader)
    return yaml.safe_load(text) if node is not None and _is_small(node) else None


def first_unequal_line(a: str, b: str) -> Iterator[tuple[int, str | None, str | None]]:
    """(line number, line of a, line of b) of the first lines that differ; None for a missing one.

    The number is that in b, in a where b has no such line. Lines are cut to `_LONGEST` characters. Blank lines and
    indentation count for nothing; nothing where all else is equal.
    """
    one, two = ([(n, text.strip()) for n, text in enumerate(whole.splitlines(), 1) if text.strip()] for whole in (a, b))
    at = begin_alike([text for _, text in one], [text for _, text in two])
    x, y = (lines[at] if at < len(lines) else None for lines in (one, two))
    if x or y:
        yield (y or x or (0, ""))[0], x and clean(x[1], _LONGEST), y and clean(y[1], _LONGEST)


def read_by_one(a: Run, b: Run) -> set[str]:
    """Basenames of the files that either run alone read; files of one basename are one."""
    one, two = (set(map(file_name, run.settings.document(FILES))) for run in (a, b))
    return one ^ two


def file_name(path: object) -> str:
    """The last part of a path."""
    return PurePath(str(path)).name


# --- documents of settings


RUN_NOISE = re.compile(
    r"(^|[.\[' ])(time|started|ended|pid|uptime|load|hostname|output|cwd|tmp|temperature|free_?memory|boot)\b",
    re.IGNORECASE,
)
_NO_SETTINGS = frozenset({beginning.DOCUMENT, beginning.SEEDINGS_DOCUMENT, FILES, "operators"})
"""Documents that are compared elsewhere."""
_GIT = frozenset({"commit", "dirty"})
_OF_A_GPU = frozenset({"cudnn", "nccl"})
"""Versions that a process knows once it uses a GPU: that one run alone has them says no more than that it did."""


def differences(a: Run, b: Run) -> Iterator[Difference]:
    """All settings of two runs that differ, noise included; a document that one run alone kept is no difference.

    First the command line, then other documents in the order of a, files that were read if both recorded them, and the
    options of `capture` that change a training. The script's folder does not count if both kept their sources.
    Seedings, draws and operators' arguments are compared elsewhere.
    """
    settings_a, settings_b = ({n: run.settings[n] for n in run.settings if n not in _NO_SETTINGS} for run in (a, b))
    words_a, words_b = argv_of(settings_a, a.manifest), argv_of(settings_b, b.manifest)
    same_name = words_a and words_b and PurePath(words_a[0]).name == PurePath(words_b[0]).name
    if same_name and "sources" in settings_a and "sources" in settings_b:
        words_b[0] = words_a[0]  # what the script holds has a hash; its folder explains nothing
    yield from _document_differences("command", command_options(words_a), command_options(words_b))
    for source in settings_a:
        if source != "command" and source in settings_b:  # what one capture was asked not to keep is no change
            yield from _document_differences(source, settings_a[source], settings_b[source])
    if all(FILES in run.settings for run in (a, b)):
        yield from file_differences(a, b)
    options_a, options_b = (run.manifest.get("options", {}) for run in (a, b))
    for name in ("seed", "deterministic", "compile", "perturb"):
        if options_a.get(name) != options_b.get(name):
            yield Difference("options", f"--{name}", options_a.get(name), options_b.get(name))


def _document_differences(source: str, a: Mapping[str, object], b: Mapping[str, object]) -> Iterator[Difference]:
    """Differences within the settings document `source`, by the rules of that document.

    A source file of one run alone has the value `imported`. Of `git` only commit (10 characters) and `dirty` count;
    versions of cuDNN and NCCL only if both runs have them.
    """
    if source in {"built", OPTIMIZERS}:
        yield from (built_differences if source == "built" else optimizer_differences)(a, b)
        return
    for name, one, two in unequal_values(a, b):
        if source == "sources":
            both = one is not None and two is not None
            yield Difference(source, name, *((one, two) if both else (one and "imported", two and "imported")))
        elif source == "hardware" and name == "gpus":
            yield Difference(source, "GPU", *(gpu_names(value) if value else "none used" for value in (one, two)))
        elif source == "git" and name in _GIT:
            yield Difference(source, name, *(value[:10] if isinstance(value, str) else value for value in (one, two)))
        elif source != "git" and not (source == "runtime" and name in _OF_A_GPU and None in (one, two)):
            yield Difference(source, name, one, two)


def notes_on_some_ranks(a: Run, b: Run) -> list[str]:
    """Notes on optimizers and flags that differ on some ranks, but not on the lowest, whose settings stand for the run.

    The first `MOST_RANKS` common ranks are compared. With zero or NaN gradients nothing else would show such a change.
    """
    ranks = [rank for rank in a.recorded if rank in b.recorded][:MOST_RANKS]
    notes: dict[SettingChange, list[int]] = {}
    for rank in ranks if len(ranks) > 1 else ():
        one, two = (run.settings_of(rank) for run in (a, b))
        for source in (OPTIMIZERS, "runtime"):
            for change in (
                _document_differences(source, one[source], two[source]) if source in one and source in two else ()
            ):
                if not RUN_NOISE.search(change.name):
                    shown = SettingChange(source, change.name, *on_one_line(change.a, change.b))
                    notes.setdefault(shown, []).append(rank)
    return [
        told("on-some-ranks", ranks=rank_list(these), change=describe(change), source=change.source)
        for change, these in notes.items()
        if ranks[0] not in these
    ]


# --- a script's command line

OPTION = re.compile(r"-(?!\.?\d).", re.DOTALL)
"""Begins the name of an option; `-3` is a number."""

ARGUMENT = "argument "
"""Begins the names of arguments that stand by themselves; no option has a space in it."""

_ASSIGNED = re.compile(r"[\w.+]+=")
_AGAIN = re.compile(r"(.+) \(\d+\)")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)


def arguments(argv: Iterable[str]) -> dict[str, Any]:
    """A command line by name, in its order.

    Args:
        argv: words; `--lr 1e-3`, `--lr=1e-3` and `lr=1e-3` are alike.

    Returns:
        An option's value, True for a flag, and a list where several words follow it; `argument 0` and so on for what
        stands by itself. Of `-p lr=1 -p depth=2`, `-p lr` and `-p depth`; of what else is given again, `-v (2)`.
    """
    values: dict[str, Any] = {}
    option, position = "", 0
    for word in argv:
        if OPTION.match(word):
            given, equals, value = word.partition("=")
            again = (f"{given} ({number})" for number in itertools.count(2))
            option = next(name for name in itertools.chain([given], again) if name not in values)
            values[option] = True
            if equals:
                _set_option(values, option, value)
                option = ""
        elif option and values[option] is True:
            option = _set_option(values, option, word)
        elif _ASSIGNED.match(word):
            name, _, value = word.partition("=")
            values[name] = value
            option = ""
        elif option:
            so_far = values[option]
            values[option] = [*so_far, word] if isinstance(so_far, list) else [so_far, word]
        else:
            values[f"{ARGUMENT}{position}"] = word
            position += 1
    return values


def _set_option(values: dict[str, Any], option: str, value: str) -> str:
    """Set an option's value in `values` and return its name there.

    Of a value like `lr=1`, the entry `-p` becomes `-p lr`.
    """
    if _ASSIGNED.match(value):
        del values[option]
        name, _, value = value.partition("=")
        option = f"{option.partition(' ')[0]} {name}"
    values[option] = value
    return option


def command_options(argv: Iterable[str]) -> dict[str, str]:
    """A command line to compare: each option with its first value, `given` for a flag, then arguments by position.

    Further words after an option count as arguments. Of a number that is given again the last counts, as for nearly all
    parsers.
    """
    options = arguments(argv)
    alone = [value for name, value in options.items() if name.startswith(ARGUMENT)]
    named: dict[str, str] = {}
    for given, value in options.items():
        again = _AGAIN.fullmatch(given)
        name = again[1] if again and _NUMBER.fullmatch(str(value)) else given
        if isinstance(value, list):
            named[name] = value[0]
            alone += value[1:]
        elif not name.startswith(ARGUMENT):
            named[name] = "given" if value is True else value
    return named | {f"{ARGUMENT}{position}": value for position, value in enumerate(alone)}


def argv_of(settings: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    """Words of the script's command line, the script first: of the settings, else of the manifest.

    [] where they are not on record.
    """
    command = settings.get("command")
    argv = command.get("argv") if isinstance(command, Mapping) else None
    if not isinstance(argv, (list, tuple)):
        argv = manifest.get("argv", [])
    return [str(word) for word in argv]


# --- things that a run built


def built_differences(a: Any, b: Any) -> Iterator[Difference]:
    """Differences of objects that both runs built (loaders, schedulers, scalers), named `object (line): attribute`.

    Lines do not count, nor how often a scheduler has the same functions: it has one for each of the optimizer's groups.
    Attributes below one that differs itself are left out.

    Args:
        a: the document of a: by kind, by object, attributes by name.
        b: that of b.
    """
    for kind in _shared_keys(a, b):
        one_side, other_side = a[kind], b[kind]
        for thing in _shared_keys(one_side, other_side):
            one, two = one_side[thing], other_side[thing]
            if not (isinstance(one, Mapping) and isinstance(two, Mapping)):
                continue
            lines = list(dict.fromkeys(str(built["line"]) for built in (one, two) if "line" in built))
            where = f"{thing} ({' and '.join(lines)})" if lines else str(thing)
            changes = [change for change in unequal_values(one, two) if change[0] != "line"]
            # a sampler of another class has other attributes
            others = tuple(f"{name}{sign}" for name, _, _ in changes for sign in ".[")
            alone = [change for change in changes if not change[0].startswith(others)]
            for name, x, y in alone:
                if name != "lr_lambdas" or _names_in(x) != _names_in(y):
                    yield Difference(kind, f"{where}: {name}", x, y)


def _names_in(value: Any) -> set[str]:
    """The quoted names in a list's text, each once: {"a", "b"} of "['a', 'b', 'a']"."""
    return {*re.findall(r"'([^']*)'", str(value))}


def _shared_keys(a: Any, b: Any) -> list[Any]:
    """Keys of both mappings, in the order of `a`; [] where either is no mapping."""
    return [key for key in a if key in b] if isinstance(a, Mapping) and isinstance(b, Mapping) else []


# --- how well each explains a divergence


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
_WHICH_DEVICE = re.compile(r"\buuid$")
_OF_RESULTS = (
    r"(?i)(^|\.)-*(o|out|outputs?|results?|logs?|save|name|exp|experiment|run|tag|port|host|date|time|timestamp|verbose|v"
    r"|quiet|q|((out(put)?|results?|log(s|ging|ger)?|save|run|exp(eriment)?|project|job|group|work|wandb|tensorboard|tb"
    r"|ckpt|checkpoint|cache|te?mp|model|master|dist|rdzv|report|print|profile)[-_.])+"
    r"(dir(ectory)?|path|file|folder|name|id|tag|group|port|addr|root|to|every|freq|interval|level|mode|steps|entity"
    r"|project|endpoint)|(log|save|out|result)(dir|file|path))$"
)
"""Options that say where results go and what a run is called: `--out-dir`, `hydra.run.dir`."""

_NUMERIC_PACKAGES = (
    r"^(torch|torchvision|torchaudio|triton|numpy|scipy|numba|nvidia|jax|tensorflow|flash|xformers|transformers|lightning"
    r"|pytorch|accelerate|deepspeed|apex|timm|mkl|intel|bitsandbytes|einops|peft|diffusers|tokenizers|datasets)"
)

SAYS_NOTHING = 0.1
"""Weight up to which a setting says where results go, or names a machine, and changes no number."""
_USUAL = 0.3

_BUILT = frozenset({"loaders", "schedulers", "scalers"})
_FIXED: tuple[tuple[AbstractSet[str], re.Pattern[str], float], ...] = (
    ({"environment"}, ENV_NOISE, 0.0),
    ({"environment"}, re.compile(_ENV_NAMES), SAYS_NOTHING),
    ({"environment"}, re.compile(_ENV_STRONG), 0.65),
    ({"environment"}, re.compile(""), 0.25),
    ({"command", *_BUILT}, re.compile(_OF_RESULTS), SAYS_NOTHING),
    ({"hardware"}, _WHICH_DEVICE, SAYS_NOTHING),
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

_KERNEL_OPTIONS = re.compile(r"(^|[. ])(fused|foreach|capturable)$")
"""Options of an optimizer that choose the kernel, and compute the same but for rounding."""

_OF_OPTIMIZERS = frozenset({RECORDED, OPTIMIZERS})
_OF_THE_SCRIPT = frozenset({"command", "sources", "git"})
_NUMERICS = frozenset({"runtime", "packages", "hardware"})


_STEPS_WITH = re.compile(r"(lr|learning_?rate|weight_?decay|momentum|betas?|nesterov|amsgrad)$", re.IGNORECASE)
"""What an optimizer steps with: it explains an update, and nothing before."""


def _is_of_optimizer(change: Difference) -> bool:
    """Whether a change is of an optimizer, or of an argument or file value named like its option (`lr`, `betas`)."""
    named = {"command": change.name, FILES: change.about}.get(change.source, "")
    steps_with = _STEPS_WITH.match(named.rpartition(".")[2].strip("-").replace("-", "_"))
    return change.source in _OF_OPTIMIZERS or bool(steps_with)


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
        weights: those of the reason why the runs diverge, by the setting's source; None where they do not.
        names: a pattern of settings that weigh a little more for that reason; "" for none.
        hyperparameters: what differs of them as recorded at the diverging step.
        rounding: whether the distance is of the size of rounding, which speaks for kernels, not for code.
        modules: the module whose code is meant and those around it, the innermost first.
        fed: the loader whose batch differs; "" where data may and was not recorded, None where data is not the cause.
        rates: whether hyper-parameters differ at the diverging step, or none were recorded.
        offset: whether other steps are compared than the first of each run, which is what settings of optimizers tell.
        stepped: whether an optimizer may have stepped before.
        more: whether the distance is more than rounding, which no other kernel of an optimizer makes.
    """

    weights: Mapping[str, float] | None = None
    names: str = ""
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

        By `_FIXED`, else 0.5 without a divergence, else by the reason. A seed in the environment weighs 0.95 where a
        random state may be the cause. What cannot have reached the place weighs at most `_USUAL`.
        """
        source, name, weights = change.source, change.name, self.weights
        if source == FILES and change.about:  # a value of configuration weighs as an argument does
            source, name = "command", change.about.rpartition(".")[2]
        fixed = next((weight for sources, names, weight in _FIXED if source in sources and names.search(name)), None)
        if fixed is not None:
            is_seed = fixed > SAYS_NOTHING and "SEED" in name
            return 0.95 if is_seed and (weights is None or weights.get("seeds", 0.0) > 0.9) else fixed
        if self.offset and source == "scalers":
            return SAYS_NOTHING  # a scaler that a checkpoint filled has that one's scale
        if weights is None:
            return 0.5
        weight = self._weight_by_reason(weights, source, name, change)
        late = not self.stepped and _is_of_optimizer(change)
        by_torch = None in change[2:4] and name.endswith(": prefetch_factor")  # where there are workers
        if late or by_torch or (self.more and chooses_kernel(name)) or self._is_of_first_steps(change):
            return min(weight, _USUAL)
        return weight

    def shown_name(self, change: Difference) -> str:
        """Name of a change as it is shown; under an offset, ` in the first step` follows a setting of an optimizer."""
        return f"{change.name}{' in the first step' * self._is_of_first_steps(change)}"

    def _is_of_first_steps(self, change: Difference) -> bool:
        """Whether a setting of an optimizer describes the first step, which is not compared under an offset."""
        return self.offset and change.source == OPTIMIZERS and bool(change.about)

    def _weight_by_reason(self, weights: Mapping[str, float], source: str, name: str, change: Difference) -> float:
        """Weight from 0 to 1 of a setting by its source, as far as the reason says; by `_WEIGHTS` where it does not.

        0.97 for the loader that `fed` names and for the file of a module to blame, 0.85 for loaders and files where
        data was not recorded. Raised by 0.1 for names that match the reason's, and for numerics where the distance is
        rounding; packages that compute nothing explain nothing.
        """
        base = weights.get(source, _WEIGHTS.get(source, _USUAL))
        if source == "loaders":
            named = self.fed and re.match(rf"{re.escape(self.fed)}(?: \(\d+\))?(?: \([^()]*:[^()]*\))?:", name)
            return 0.97 if named else 0.85 if self.fed == "" else _USUAL
        if source == "schedulers":
            return max(0.9 * weights.get(OPTIMIZERS, _USUAL), _USUAL) if self.rates else _USUAL
        if source == FILES:
            tensors = weights.get("checkpoints", _USUAL) if holds_tensors(name) else _USUAL
            both = change.a is not None and change.b is not None and self.fed is not None
            return max(tensors, 0.96 if self.fed else 0.85) if both else tensors
        if source == "sources" and any(name == each.source.rpartition(":")[0] for each in self.modules):
            return 0.97
        if source == "packages":
            if not re.match(_NUMERIC_PACKAGES, name.lower()):
                return 0.2
            base += 0.25
        if self.rounding:
            base += 0.2 * (source in _NUMERICS) - 0.15 * (source == "sources")
        named = self.names and re.search(self.names, name, re.IGNORECASE)
        if named and source not in {"packages", "scalers"}:
            base += 0.1
        return max(min(base, 1.0), 0.5 * (source == RECORDED))


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
    diverged = blame.weights is not None
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
