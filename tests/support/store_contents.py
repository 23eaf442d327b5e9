"""Stores that are valid in form and hostile in content, and every verb that reads one.

What a capture would never write but a stranger can: texts that repaint a terminal, paths nested thousands deep, numbers
that are none, settings of another type than anybody expects. Each store is whole, with every check right, so nothing
refuses it: the verbs have to cope.
"""

from __future__ import annotations

import io
import math
import random
import resource
import shutil
import signal
import tempfile
import time
import traceback
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import click
import numpy as np

from introspect_cli.cli import VERBS, introspect
from introspect_cli.errors import IntrospectError
from introspect_cli.exchange.formats import FORMATS
from introspect_cli.records import Given, Kind, Layout, ModuleInfo, Phase, Site, SiteInfo
from introspect_cli.statistics import STATISTICS, Statistic
from introspect_cli.store.batch import StepBatch, Texts
from introspect_cli.store.run_writer import StoreWriter

SLOW = 10.0  # seconds of CPU; an ordinary answer takes a hundredth
MEMORY = 1024  # MB

_CODES = (
    "\x1b[31m", "\x1b]0;x\x07", "\x7f", "\x9b2J", "\r", "\n", "\t", "\0", "\b", "\u202e", "\u2066", "\u200f",
    "\u2028",
)  # fmt: skip
_MARKUP = (
    "[bold]", "[/]", "<script>", "&lt;", "</svg>", "--> ", "{0}", "%s", "!!python/object", "- a: b", "'", '"', "\\",
    "../../etc/passwd", "/", "*", "?", "[a-", "(?P<x", "=HYPERLINK(1)", ",", ";", "#", "@1", "\u0301", "\U0001f600",
    "\ufeff", "\U000e0041", "\ue000", "\u00a0", "１", "٣",
)  # fmt: skip
_NAMES = (
    "GPT", "GPT.blocks.0", "GPT.blocks.1.mlp.act", "GPT.blocks.2", "GPT.lm_head", "script", "loss", "AdamW", "torch",
    "python", "DataLoader", "0", "", ".", "..", "GPT.", ".GPT", "_orig_mod.GPT", "GPT.blocks.99999999999999999999",
)  # fmt: skip
_PATHS = ("", "[0]", "[1]", "['hidden']", ".logits", "[0]['lr']", "[0]['betas'][1]", "aten.mm.default", "(others)")
_NUMBERS = (
    0.0, -0.0, 1.0, -1.0, 0.5, math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 1e-45, 3.4e38, 2.0**53, 1e22,
)  # fmt: skip
_COUNTS = (0, 0, 0, 1, 2, 7, -1, -2, 2**31, 2**53, 2**63 - 1, -(2**63))
_TEXTS = (
    "0.001", "nan", "inf", "-inf", "1e999", "True", "None", "'relu'", "(0.9, 0.999)", "[" * 3000, "1" * 4000, "{}",
)  # fmt: skip
_SHAPES = ((2**62,), (1,) * 900, (0,) * 64, (2**62, 0), (2**31, 2**31), (2**40, 2**40), (2**63 - 1,))
_SIZES = (0, 1, 2, 3, 8, 128, 2**31, 2**40, 2**62)
_DTYPES = (
    "float32", "bfloat16", "float64", "int64", "bool", "python.int", "python.float", "python.str", "complex64", "",
)  # fmt: skip
_DOCUMENTS = (
    "environment", "git", "command", "optimizers", "runtime", "packages", "sources", "hardware", "seeds",
    "determinism", "modules", "schedules", "x",
)  # fmt: skip
_TEXTS_OF = frozenset({".csv", ".jsonl", ".yaml", ".json", ".svg", ".html", ".md", ".txt"})
_READ_NO_RUN = frozenset({"bisect", "capture"})
"""Verbs that are given a script to run, or nothing."""
_KEYS = (
    "tool", "script", "argv", "exit_code", "started", "ended", "options", "observed", "not_observed", "notes",
    "children", "failures", "steps", "remainder", "passed_over", "how", "exception", "imported_from", "cwd", "record",
    "stats", "modules", "exclude", "commit", "dirty", "branch", "groups", "lr", "name", "class", "params", "torch",
    "python", "level", "ops", "sketch",
)  # fmt: skip


class Source:
    """Draws what a hostile store is made of: mostly what is usual, sometimes what is not."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.badness = self.rng.choice((0.02, 0.1, 0.3, 0.8))

    def bad(self) -> bool:
        return self.rng.random() < self.badness

    def hostile(self) -> str:
        rng = self.rng
        how = rng.randrange(6)
        if how == 0:
            return rng.choice(_CODES) + rng.choice(_NAMES)
        if how == 1:
            return "".join(rng.choice(_MARKUP) for _ in range(rng.randrange(1, 5)))
        if how == 2:
            return rng.choice(("x", "[0]", "['a']", ".a", "[", "'", "\x1b", "9", "a.")) * rng.choice(
                (70, 1000, 5000, 20000)
            )
        if how == 3:
            return "".join(
                chr(rng.choice((rng.randrange(32), rng.randrange(0x300), rng.randrange(0xD800)))) for _ in range(9)
            )
        return rng.choice(_NAMES) + rng.choice(_CODES) + rng.choice(_MARKUP) + rng.choice(_NAMES)

    def text(self, usual: tuple[str, ...]) -> str:
        return self.hostile() if self.bad() else self.rng.choice(usual)

    def number(self) -> float:
        return self.rng.choice(_NUMBERS) if self.bad() else self.rng.gauss(0, 1)

    def site(self) -> Site:
        rng = self.rng
        call = rng.choice((2**32 - 1, 7, 2**31)) if self.bad() else rng.choice((0, 0, 0, 1))
        return Site(rng.choice(tuple(Phase)), rng.choice(tuple(Kind)), self.text(_NAMES), call, self.text(_PATHS))

    def layout(self) -> Layout:
        rng = self.rng
        shape = tuple(rng.choice(_SIZES[:6]) for _ in range(rng.randrange(4)))
        if self.bad():
            shape = rng.choice(_SHAPES)
        return Layout(
            shape, self.text(_DTYPES), self.text(("cpu", "cuda:0", "")), self.text(("contiguous", "expanded", ""))
        )

    def module(self) -> ModuleInfo:
        names = tuple(self.text(("weight", "bias", "p")) for _ in range(self.rng.randrange(3)))
        attributes = tuple(
            (self.text(("p", "eps")), self.text(("0.1", "'none'"))) for _ in range(self.rng.randrange(3))
        )
        aliases = tuple(self.text(("GPT.a", "weight=GPT.b.weight", "=", "a=b=c")) for _ in range(self.rng.randrange(2)))
        where = self.text(("model.py:3", ""))
        step = self.rng.choice((0, 1, -1, 2**62))
        return ModuleInfo(
            self.text(_NAMES), self.text(("Linear", "GELU")), where, names, names, aliases, attributes, step
        )

    def value(self, depth: int = 0) -> object:
        """Plain data, as documents are made of."""
        rng = self.rng
        how = rng.randrange(9 if depth < 4 else 6)
        if how == 0:
            return self.hostile()
        if how == 1:
            return rng.choice((*_NUMBERS, 10**400, -(10**30), 0, 1, True, False, None))
        if how < 6:
            return rng.choice((*_NAMES, *_TEXTS[:10], "2.13.0", "train.py", "--lr", "3e-4"))
        if how == 6:
            return [self.value(depth + 1) for _ in range(rng.randrange(4))]
        return {self.key(): self.value(depth + 1) for _ in range(rng.randrange(5))}

    def key(self) -> object:
        return self.rng.choice((self.hostile(), 1, None, 2.5, True)) if self.bad() else self.rng.choice(_KEYS)


def build(path: Path, seed: int, *, other: bool = False) -> None:
    """Write the hostile run of a seed, or its sibling that differs from it here and there."""
    source = Source(seed)
    rng = source.rng
    extra = {f"s{number}": Statistic(rng.choice(("<i8", "<f8", "<f4"))) for number in range(2)} if source.bad() else {}
    STATISTICS.update(extra)
    try:
        with StoreWriter.create(path) as store:
            manifest = {
                "tool": {"name": "introspect", "version": "0.1.0"},
                "options": {"record": [kind.value for kind in Kind], "steps": ":"},
                "observed": [kind.value for kind in Kind],
            }
            manifest |= {rng.choice(_KEYS): source.value() for _ in range(rng.randrange(6)) if source.bad()}
            for name in rng.sample(_DOCUMENTS, rng.randrange(5)):
                store.write_settings(
                    name, {source.key(): source.value() for _ in range(4)} if rng.random() < 0.8 else source.value()
                )
            for rank in sorted({0, rng.choice((0, 0, 0, 1, 99999))}):
                _write_rank(store, rank, source, other=other)
            store.write_manifest({**manifest, "status": "complete" if rng.random() < 0.8 else source.hostile()})
    finally:
        for name in extra:
            del STATISTICS[name]


def _write_rank(store: StoreWriter, rank: int, source: Source, *, other: bool) -> None:
    rng = source.rng
    kept = {name: rng.random() < 0.85 for name in ("stats", "sketch")}
    writer = store.rank(rank, **kept, sorted_stats=("med",) if rng.random() < 0.3 else ())
    writer.modules([source.module() for _ in range(rng.randrange(6))])
    rows = [source.site() for _ in range(rng.choice((0, 1, 5, 12, 30)))]
    infos = [
        SiteInfo(source.text(("Linear", "")), source.text(("aten.mm.default", "")), source.text(("m.py:3", "")))
        for _ in rows
    ]
    layouts = [source.layout() for _ in rows]
    step = rng.choice((2**62, 2**31, 10**15)) if source.bad() else 0
    for _ in range(rng.choice((0, 1, 2, 4))):
        differs = other and rng.random() < 0.5
        writer.append(step, _batch(writer, source, rows, infos, layouts, differs=differs))
        step += rng.choice((1, 1, 1, 2, 1000, 2**40)) if source.bad() else 1


def _batch(writer, source, rows, infos, layouts, *, differs):
    rng, count = source.rng, len(rows)
    checksum = [rng.choice((0, 1, 2**64 - 1, rng.getrandbits(64))) for _ in rows]
    if differs:
        checksum = [each ^ 1 if rng.random() < 0.3 else each for each in checksum]
    counts, floats = {}, {}
    for name, statistic in STATISTICS.items():
        if statistic.type == "<i8":
            counts[name] = np.array([rng.choice(_COUNTS) if source.bad() else 0 for _ in rows], np.int64)
        else:
            with np.errstate(over="ignore"):
                whole = rng.choice(_NUMBERS) if source.bad() and source.bad() else None
                floats[name] = np.array([source.number() if whole is None else whole for _ in rows]).astype(
                    statistic.type
                )
    with np.errstate(over="ignore"):
        sketch = np.array([[source.number() for _ in range(16)] for _ in rows]).reshape(count, 16).astype(np.float32)
    given = {
        row: Given(
            tuple(rng.randrange(-1, count) for _ in range(rng.randrange(4))),
            rng.randrange(-1, count),
            source.text(("", "AddBackward0")),
        )
        for row in range(count)
        if rng.random() < 0.5
    }
    return StepBatch(
        site=np.array([writer.site(site, info) for site, info in zip(rows, infos, strict=True)], np.uint32),
        sequence=np.array([rng.choice((row, row, row, 0, 2**32 - 1)) for row in range(count)], np.uint32),
        layout=np.array([writer.layout(layout) for layout in layouts], np.uint32),
        status=np.array([rng.choice((0, 0, 0, 0, 1, 2, 3)) for _ in rows], np.uint8),
        checksum=np.array(checksum, np.uint64),
        counts=counts,
        floats=floats,
        sketch=sketch,
        text=Texts(enumerate([source.text(_TEXTS) if rng.random() < 0.4 else "" for _ in rows])),
        given=given,
    )


def verbs(a: str, b: str, out: str, rng: random.Random) -> list[list[str]]:
    """Every verb of the table that reads a run, in its forms; one that nobody wrote forms for, in all ways."""
    name = rng.choice(_NAMES[:6])
    stat = rng.choice(("mean", "std", "l2", "nans", "s0"))
    forms = {
        "show": [
            [a],
            ["tree", a],
            ["tree", a, "--unfold"],
            ["graph", a],
            ["graph", a, "--no-prune", "-o", f"{out}/g.svg"],
            ["graph", a, "-o", f"{out}/g.html"],
            ["step", "0", a],
            ["step", "0", a, "--format", "json"],
            ["history", "*", a, "--stat", stat],
            ["history", name, a, "--format", "json"],
            ["settings", a],
            [a, "--format", "json"],
        ],
        "diff": [
            [a, b],
            [a, b, "-v", "--all"],
            [a, b, "--format", "json"],
            [a, b, "--format", "yaml", "--rtol", "1e-3"],
            [a, b, "--map", "--noise", a],
            [a, b, "--level", "op", "-o", f"{out}/d.html"],
            [a, b, "--settings"],
            [b, a, "--offset", "1", "--rename", "GPT=X"],
        ],
        "check": [[a], [a, "--format", "json"]],
        "report": [[a, b, "-o", f"{out}/r.html"], [a, "-o", f"{out}/s.html"]],
        "export": [[a, "--format", form, "-o", f"{out}/{form}"] for form in FORMATS],
        "runs": [[str(Path(a).parent)], [str(Path(a).parent), "--format", "json"]],
    }
    others = [[a], [a, b], [a, "-o", f"{out}/x"], [a, b, "-o", f"{out}/x"], [a, b, "--format", "json"]]
    return [[verb, *form] for verb in VERBS if verb not in _READ_NO_RUN for form in forms.get(verb, others)]


def problem(arguments: list[str]) -> str | None:
    """What is wrong with how a verb ended; None if nothing."""
    out, err = io.StringIO(), io.StringIO()
    begin = time.process_time()
    try:
        with _bounded(), redirect_stdout(out), redirect_stderr(err):
            introspect.main(arguments, prog_name="introspect", standalone_mode=False)
    except (click.ClickException, click.exceptions.Exit, click.Abort, SystemExit):
        pass
    except IntrospectError as error:
        err.write(str(error))
    except BaseException:
        return traceback.format_exc(limit=-4)
    seconds = time.process_time() - begin
    if seconds > SLOW:
        return f"it took {seconds:.0f} s"
    for where, text in (("stdout", out.getvalue()), ("stderr", err.getvalue())):
        code = control(text)
        if code:
            return f"{where} has {code}"
    return None


class _Slow(BaseException):
    """A verb has worked for too long."""


def _stop(*_: object) -> None:
    raise _Slow


@contextmanager
def _bounded() -> Iterator[None]:
    """Stop what runs away, before it takes the machine with it."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 2 * MEMORY * 2**20, before[1]))
    handler = signal.signal(signal.SIGVTALRM, _stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, 1.5 * SLOW)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def control(text: str) -> str:
    """The first character that does something to a terminal, with what is around it; "" where there is none."""
    if text.isascii() and text.replace("\n", "").isprintable():
        return ""
    for at, char in enumerate(text):
        if char != "\n" and (unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")):
            return f"{char!a} in {text[max(at - 30, 0) : at + 10]!a}"
    return ""


def written(folder: Path) -> str | None:
    """What is wrong with the text files that verbs wrote; None if nothing."""
    for file in folder.rglob("*"):
        if control(file.name):
            return f"a file is named {file.name!a}"
        if file.suffix in _TEXTS_OF and file.is_file():
            code = control(file.read_text(encoding="utf-8").replace("\t", ""))
            if code:
                return f"{file.name} has {code}"
    return None


def attack(seed: int, most: int = 5) -> list[str]:
    """Build a hostile pair and run some verbs over it; the problems found."""
    rng = random.Random(seed)
    found = []
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024  # by whatever this process did before
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        build(place / "a", seed)
        build(place / "b", seed, other=True)
        every = verbs(str(place / "a"), str(place / "b"), str(place / "out"), rng)
        for arguments in rng.sample(every, min(most, len(every))):
            shutil.rmtree(place / "out", ignore_errors=True)
            (place / "out").mkdir()
            wrong = problem(arguments) or written(place / "out")
            if wrong:
                found.append(f"seed {seed}: {' '.join(arguments).replace(folder + '/', '')}: {wrong}")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    if memory > max(MEMORY, used):
        found.append(f"seed {seed}: {memory} MB of memory were used")
    return found
