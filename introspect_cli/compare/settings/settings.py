"""Settings of two runs that differ.

All documents are compared, optimizers in `hyperparameters.py`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from introspect_cli.compare.result import SettingChange
from introspect_cli.compare.settings import beginning
from introspect_cli.compare.settings.differences import READ, paired, unequal_values
from introspect_cli.compare.settings.hyperparameters import OPTIMIZERS, Optimizers, optimizer_differences
from introspect_cli.texts import begin_alike, clean, gpu_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.store.run import Run


# --- files that a run read


FILES = "files"
"""The document that says what a run read, and the source of what differs in it."""

_CHECKPOINTS = frozenset(
    {".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".npz", ".npy", ".h5", ".pkl", ".msgpack", ".distcp"}
)
_MOST = 20
_LONGEST = 60
_MOST_LINES = 20_000


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

    def text(self) -> str | None:
        """The text, decoded, not cached; None where the run did not keep it.

        Raises:
            StoreError: it is damaged.
        """
        kept = str(self.digest) in self.run.kept_sources
        data = self.run.source(str(self.digest)) if kept else None
        return None if data is None else data.decode("utf-8", "replace")


def files_of(run: Run) -> dict[str, ReadFile]:
    """Files that a run read, by name; entries that stand for many files are left out. {} where none is on record."""
    return {
        str(name): ReadFile(run, str(name), document.get("digest"), document.get("size"))
        for name, document in run.settings.document(FILES).items()
        if isinstance(document, Mapping) and not document.get("many")
    }


def tensor_files(run: Run) -> set[str]:
    """Digests of the files of tensors that a run read, names of those without one."""
    return {str(file.digest or name) for name, file in files_of(run).items() if holds_tensors(name)}


def holds_tensors(name: str) -> bool:
    """Whether a file's name ends as those of tensors do: `.pt`, `.safetensors`, `.npz`."""
    return PurePath(name).suffix.lower() in _CHECKPOINTS


# --- two runs


def file_differences(a: Run, b: Run) -> Iterator[SettingChange]:
    """Differences of files that were read: values of configuration, else the first line, else digests.

    Files are paired by name, content, basename and ending, in this order. One that one run alone read has the value
    `READ`. Files that both runs imported as sources are left out.
    """
    imported = [run.settings.document("sources") for run in (a, b)]
    pairs, (only_a, only_b) = paired(
        files_of(a).values(),
        files_of(b).values(),
        lambda file: file.name,
        lambda file: (file.digest, file.size),
        lambda file: file_name(file.name),
        lambda file: PurePath(file.name).suffix.lower(),
    )
    for one, two in pairs:
        if not (one.name in imported[0] and two.name in imported[1]):  # those are among the sources
            yield from _differences_of_pair(one, two)
    yield from (SettingChange(FILES, file.name, READ, None) for file in only_a)
    yield from (SettingChange(FILES, file.name, None, READ) for file in only_b)


def _differences_of_pair(a: ReadFile, b: ReadFile) -> Iterator[SettingChange]:
    """Differences of two paired files; none where their content is equal or a digest is missing.

    Of configuration the first `_MOST` values, of other texts the first line that differs; where a text is not there,
    one difference, of the digests.
    """
    if (a.digest, a.size) == (b.digest, b.size) or not (a.digest and b.digest):
        return
    shown = a.name if a.name == b.name else f"{a.name} and {b.name}"
    texts = [(file.text(), PurePath(file.name).suffix.lower()) for file in (a, b)]
    values = [None if text is None else parsed(text, ending) for text, ending in texts]
    if None not in values:
        for value, x, y in islice(unequal_values(values[0], values[1]), _MOST):
            yield SettingChange(FILES, f"{shown}: {value}", x, y, value)
    elif texts[0][0] is None or texts[1][0] is None:
        yield SettingChange(FILES, shown, a.digest, b.digest)
    elif first := first_unequal_line(texts[0][0], texts[1][0]):
        line, x, y = first
        yield SettingChange(FILES, f"{shown}:{line}", x, y, f"{x} {y}")


# --- a text


def parsed(text: str, ending: str) -> Any:
    """JSON, YAML or TOML as nested data, by the file's `ending`.

    None for another ending, malformed text, YAML that shares more than `_MOST` values or has more than
    `_MOST_LINES` lines, and what is no list or mapping; for TOML also before Python 3.11.
    """
    try:
        if ending == ".json":
            content = json.loads(text)
        elif ending in {".yaml", ".yml"}:
            shared = text.count("*")  # what is shared counts each time, and may grow without end
            content = yaml.safe_load(text) if shared <= _MOST and text.count("\n") <= _MOST_LINES else None
        elif ending == ".toml" and sys.version_info >= (3, 11):
            import tomllib

            content = tomllib.loads(text)
        else:
            return None
    except (ValueError, yaml.YAMLError, RecursionError):
        return None
    return content if isinstance(content, (dict, list)) else None


def first_unequal_line(a: str, b: str) -> tuple[int, str | None, str | None] | None:
    """(line number, line of a, line of b) of the first lines that differ; None for a missing one, or where none does.

    The number is that in b, in a where b has no such line. Lines are cut to `_LONGEST` characters. Blank lines and
    indentation count for nothing.
    """
    one, two = ([(n, text.strip()) for n, text in enumerate(whole.splitlines(), 1) if text.strip()] for whole in (a, b))
    at = begin_alike([text for _, text in one], [text for _, text in two])
    x, y = (lines[at] if at < len(lines) else (0, None) for lines in (one, two))
    return (y[0] or x[0], x[1] and clean(x[1], _LONGEST), y[1] and clean(y[1], _LONGEST)) if x[0] or y[0] else None


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
_OPTIONS = ("seed", "deterministic", "compile", "perturb")
"""Options of `capture` that change a training."""
_GIT = frozenset({"commit", "dirty"})
_OF_A_GPU = frozenset({"cudnn", "nccl"})
"""Versions that a process knows once it uses a GPU: that one run alone has them says no more than that it did."""


def differences(a: Run, b: Run, rank: int | None = None, rename: Callable[[str], str] = str) -> Iterator[SettingChange]:
    """All settings of a rank of two runs (of the lowest, without one) that differ, noise included.

    A document that one run alone kept is no difference. First the command line, then other documents in the order of a,
    files that were read if both recorded them, and the options of `capture` that change a training. The script's
    folder does not count if both kept their sources. Seedings, draws and operators' arguments are compared elsewhere.
    `rename` maps names of parameters of a to those of b.
    """
    every = (run.settings if rank is None else run.settings_of(rank) for run in (a, b))
    settings_a, settings_b = ({name: each[name] for name in each if name not in _NO_SETTINGS} for each in every)
    words_a, words_b = ([str(word) for word in run.manifest.get("argv", [])] for run in (a, b))
    same_name = words_a and words_b and PurePath(words_a[0]).name == PurePath(words_b[0]).name
    if same_name and "sources" in settings_a and "sources" in settings_b:
        words_b[0] = words_a[0]  # what the script holds has a hash; its folder explains nothing
    given = (
        {name: " ".join(each) or "given" for name, each in arguments(words).items()} for words in (words_a, words_b)
    )
    yield from _document_differences("command", *given)
    # what one capture was asked not to keep is no change
    for source in (name for name in settings_a if name != "command" and name in settings_b):
        one, two = settings_a[source], settings_b[source]
        if source == OPTIMIZERS:
            yield from optimizer_differences(Optimizers(one, two, rename))
        else:
            yield from built_differences(one, two) if source == "built" else _document_differences(source, one, two)
    if all(FILES in run.settings for run in (a, b)):
        yield from file_differences(a, b)
    chosen = (run.manifest.get("options", {}) for run in (a, b))
    yield from _document_differences(
        "options", *({f"--{name}": each.get(name) for name in _OPTIONS} for each in chosen)
    )


def _document_differences(source: str, a: Mapping[str, object], b: Mapping[str, object]) -> Iterator[SettingChange]:
    """Differences within the settings document `source`, by the rules of that document.

    A source file of one run alone has the value `imported`. Of `git` only commit (10 characters) and `dirty` count;
    versions of cuDNN and NCCL only if both runs have them.
    """
    for name, one, two in unequal_values(a, b):
        alone, values = None in (one, two), [one, two]
        if source == "sources" and alone:
            values = [one and "imported", two and "imported"]
        elif source == "hardware" and name == "gpus":
            values = [gpu_names(value) if value else "none used" for value in values]
        elif source == "git":
            values = [value[:10] if isinstance(value, str) else value for value in values]
        if (source != "git" or name in _GIT) and not (source == "runtime" and name in _OF_A_GPU and alone):
            yield SettingChange(source, "GPU" if name == "gpus" else name, *values)


# --- a script's command line

_NUMBER = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?")
OPTION = re.compile(r"-(?!\.?\d).", re.DOTALL)
"""Begins the name of an option; `-3` is a number."""

ARGUMENT = "argument "
"""Begins the names of arguments that stand by themselves; no option has a space in it."""

_ASSIGNED = re.compile(r"[\w.+]+=")


def arguments(argv: Iterable[str]) -> dict[str, list[str]]:
    """The words of a command line by name, in its order; `--lr 1e-3`, `--lr=1e-3` and `lr=1e-3` are alike.

    An option has the words behind it; of one that is given again, its name stands between them, and of a number the
    last alone counts, as for nearly all parsers. What stands by itself is `argument 0` and so on.
    """
    named: dict[str, list[str]] = {}
    option = ""
    for word in argv:
        if OPTION.match(word) or (not option and _ASSIGNED.match(word)):
            option, equals, value = word.partition("=")
            before = named.get(option, [])
            named[option] = [*before, option] if option in named and not _NUMBER.fullmatch(" ".join(before)) else []
            named[option] += [value] if equals else []
            option = "" if equals else option
        elif option:
            named[option].append(word)
        else:
            named[f"{ARGUMENT}{sum(each.startswith(ARGUMENT) for each in named)}"] = [word]
    return named


# --- things that a run built


def built_differences(a: Any, b: Any) -> Iterator[SettingChange]:
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
                    yield SettingChange(kind, f"{where}: {name}", x, y)


def _names_in(value: Any) -> set[str]:
    """The quoted names in a list's text, each once: {"a", "b"} of "['a', 'b', 'a']"."""
    return {*re.findall(r"'([^']*)'", str(value))}


def _shared_keys(a: Any, b: Any) -> list[Any]:
    """Keys of both mappings, in the order of `a`; [] where either is no mapping."""
    return [key for key in a if key in b] if isinstance(a, Mapping) and isinstance(b, Mapping) else []


# --- names that change no number, or only how it is rounded


ENV_NOISE = re.compile(
    r"^(PWD|OLDPWD|SHLVL|_|TERM.*|COLORTERM|SSH_.*|TMUX.*|STY|WINDOW.*|XDG_.*|DBUS_.*|DISPLAY|LS_COLORS|PS[0-9]|PROMPT.*"
    r"|COLUMNS|LINES|HOSTNAME|HOST|LOGNAME|USER|MAIL|HOME|EDITOR|PAGER|LESS.*|HIST.*|LANG|LC_.*|.*_SESSION(_.*)?|TMPDIR"
    r"|VSCODE_.*|ITERM_.*|CONDA_(SHLVL|PROMPT.*)|SLURM_(JOB|STEP|TASK|SUBMIT|NODE|LAUNCH|SRUN).*|PYTEST_.*"
    r"|INVOCATION_ID|JOURNAL_STREAM|MANPATH|INTROSPECT_.*|NO_COLOR|FORCE_COLOR|CLICOLOR.*|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|TORCH_NCCL_ASYNC_ERROR_HANDLING|_TORCHINDUCTOR_.*|(TORCHINDUCTOR|TRITON)_CACHE_DIR|TRITON_\w+_PATH"
    r"|GIT_.*|BASH_.*|WSL.*|DEBUGINFOD_URLS|INFOPATH|WINDOWID|GPG_.*|DESKTOP.*|GNOME_.*|KDE_.*)$"
)
"""Variables that name where, by whom and for which job a process was started; they explain nothing."""

_KERNEL_OPTIONS = re.compile(r"(^|[. ])(fused|foreach|capturable)$")
"""Options of an optimizer that choose the kernel, and compute the same but for rounding."""


def chooses_kernel(name: str) -> bool:
    """Whether a hyper-parameter does no more than choose the kernel: `fused`, `foreach`, `capturable`."""
    return bool(_KERNEL_OPTIONS.search(name))
