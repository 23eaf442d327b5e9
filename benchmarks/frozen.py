"""Frozen answers: what the verbs say of every planted fault, asked again and compared byte for byte.

    python benchmarks/frozen.py make DIRECTORY [--only cases|reduced|tests|asked] [--jobs N]
    python benchmarks/frozen.py freeze DIRECTORY [--only GLOB] [--all] [--jobs N]
    python benchmarks/frozen.py check DIRECTORY [--only GLOB] [--slice N] [--all] [--placeholders]

Whoever rebuilds the inside of the comparison must not change an answer, and a test asserts only what its author
thought of. `make` captures the pairs of `cases.py`, reduces them as `configurations.py` says, runs the tests that
compare runs and keeps their runs with the commands they gave (`harvest.py`). `freeze` asks `diff`, `check`, `show` and
`report` of all these runs and keeps what they say; `check` asks again, with the code at hand, and says what differs.

To check the code of another working tree, put it first on the path: `PYTHONPATH=TREE python frozen.py check DIRECTORY`.
Of the package only `introspect_cli.cli` is imported by `freeze` and `check`, and torch never is.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import re
import shlex
import sqlite3
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from cases import Captures, Case
    from configurations import Configuration

OUTPUT = "{output}"
"""Stands in a question for the file that the verb writes, which is part of the answer."""

SURROUNDINGS = {"COLUMNS": "120", "LINES": "50", "NO_COLOR": "1", "TZ": "UTC", "LC_ALL": "C.UTF-8", "TERM": "dumb"}
"""Of the environment, what an answer may depend on."""

DIFF_FORMS = {(): 0.35, ("--format", "json"): 0.7, ("-v",): 0.1, ("--all",): 0.07}
"""How a comparison is told, and for which share of the reduced pairs `check` asks so where not told `--all`."""

CHECK_FORMS = ((), ("--format", "json"))
SHOW_FORMS = (
    (),
    ("--format", "json"),
    ("tree",),
    ("settings",),
    ("step", "1"),
    ("history", "*", "--kinds", "loss"),
)


@dataclass(frozen=True)
class Question:
    """A command line.

    Attributes:
        group: what it belongs to: a configuration of the matrix, or a file of tests.
        name: the case or test.
        words: the verb and its arguments.
        env: what is added to the environment.
        cwd: where it is asked, below the directory.
        extra: whether it is asked with `check --all` alone.
    """

    group: str
    name: str
    words: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    cwd: str = "."
    extra: bool = False

    @property
    def key(self) -> str:
        """What the answer is stored under."""
        added = [f"{name}={value}" for name, value in self.env]
        return json.dumps([self.group, self.name, self.cwd, *added, *self.words], ensure_ascii=False)

    @property
    def store(self) -> str:
        """The file that keeps the answer."""
        return f"{self.group.partition('/')[0]}{'-extra' * self.extra}.sqlite"

    @property
    def verb(self) -> str:
        """The verb and how it is told to answer."""
        return " ".join([self.words[0], *(word for word in self.words if word in {"-v", "--all", "json"})])


# ---------------------------------------------------------------------------------------------------- asking


def ask(question: Question, directory: Path) -> str:
    """What the command says, with its exit code and the file it wrote; asked within this process."""
    from introspect_cli import cli

    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for _ in range(2))
    warned: set[str] = set()
    with tempfile.TemporaryDirectory() as folder, _process(question, directory, out, err, Path(folder)) as written:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, kind, *_: warned.add(f"{kind.__name__}: {message}")
            code: object = 0
            try:
                cli.main()
            except SystemExit as ending:
                code = ending.code
        files = "".join(
            f"--- file\n{_page(path.read_text('utf-8', 'replace'))}\n" for path in [written] if path.exists()
        )
    texts = [stream.buffer.getvalue().decode("utf-8", "replace") for stream in (out, err) if stream.flush() is None]
    texts[1] += "".join(f"{line}\n" for line in sorted(warned))
    for place in (str(written), str(directory.resolve()), str(directory)):
        texts = [text.replace(place, "OUTPUT" if place == str(written) else "DIRECTORY") for text in texts]
    return f"exit {code}\n{texts[0]}--- error\n{_masked(texts[1])}{files}"


@contextmanager
def _process(
    question: Question, directory: Path, out: io.TextIOWrapper, err: io.TextIOWrapper, folder: Path
) -> Iterator[Path]:
    """The state of a process that runs the command."""
    suffix = next((Path(word).suffix for word in question.words if word.startswith(OUTPUT)), "")
    written = folder / f"written{suffix}"
    before = sys.argv, sys.stdout, sys.stderr, dict(os.environ), Path.cwd()
    words = [str(written) if word.startswith(OUTPUT) else word for word in question.words]
    sys.argv, sys.stdout, sys.stderr = ["introspect", *words], out, err
    os.environ.update(dict(question.env))
    os.chdir(directory / question.cwd)
    try:
        yield written
    finally:
        sys.argv, sys.stdout, sys.stderr = before[:3]
        os.environ.clear()
        os.environ.update(before[3])
        os.chdir(before[4])


_ASSET = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


def _page(text: str) -> str:
    """A file that was written, its style and its program as checksums."""
    return _ASSET.sub(lambda match: f"<{match[1]} {hashlib.sha256(match[2].encode()).hexdigest()[:16]}>", text)


def _masked(text: str) -> str:
    """Messages, without where in the code an exception was raised."""
    return re.sub(r"(?m)^  (File \".*\n(    .*\n)*)+|^ {4}.*\n", "", text, flags=0) if "Traceback" in text else text


# ------------------------------------------------------------------------------------------------- the matrix


def make_captures(directory: Path, jobs: int) -> None:
    """Capture all pairs, those of operators and of the field included."""
    from concurrent.futures import ThreadPoolExecutor

    from forks import Forks

    forks = Forks()
    captures = _captures(directory, forks)
    sides = dict.fromkeys(pair for case in all_cases() for pair in ((case.a, False), (case.b, case.a == case.b)))

    def capture(item: Any) -> str:
        try:
            captures.path(item[0], again=item[1])
        except Exception as error:
            return f"{item[0].script} {' '.join(item[0].args)}: {error}"
        return ""

    with ThreadPoolExecutor(jobs) as pool:
        failed = [line for line in pool.map(capture, sides) if line]
    forks.close()
    print(f"{len(sides) - len(failed)} captures; failed: {failed or 'none'}", flush=True)


def _captures(directory: Path, run: Any = None) -> Captures:
    from cases import Captures

    (directory / "runs").mkdir(parents=True, exist_ok=True)
    return Captures(directory / "runs", run)


def all_cases() -> list[Case]:
    """All pairs of runs that there are."""
    from cases import load_cases, load_field_cases, load_operator_cases

    return [*load_cases(), *load_operator_cases(), *load_field_cases()]


def configurations_of(case: Case) -> list[Configuration]:
    """The configurations that a full capture of the case can be reduced to."""
    from configurations import CONFIGURATIONS, Reduction

    whole = Reduction()
    return [
        one
        for one in CONFIGURATIONS
        if not (one.capture or one.capture_a or one.capture_b or one.scripts)
        and (not case.a.options or (one.a == one.b == whole))
    ]


def make_reduced(directory: Path, jobs: int) -> None:
    """Reduce the captures, and write down what is asked of them."""
    todo = [(case, one) for case in all_cases() for one in configurations_of(case)]
    with multiprocessing.Pool(jobs, _start_reducing, (directory,)) as pool:
        pairs = pool.map(_reduced, todo, chunksize=4)
    questions = []
    seen: set[tuple[str, ...]] = set()
    for (case, one), pair in zip(todo, pairs, strict=True):
        if pair is not None:
            questions += asked_of(case, one, *(str(path.relative_to(directory)) for path in pair), seen)
    write_questions(directory / "matrix.jsonl", questions)


def _start_reducing(directory: Path) -> None:
    import numpy as np  # noqa: F401

    globals()["_reducing"] = _captures(directory)


def _reduced(cell: tuple[Case, Configuration]) -> tuple[Path, Path] | None:
    import fcntl

    import matrix

    captures: Captures = globals()["_reducing"]
    case, one = cell
    paths = []
    for letter in "ab":
        with (captures.directory / f".lock-{hash(getattr(case, letter)) % 64}").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                paths.append(matrix.run_of(case, letter, one, captures))
            except Exception as error:
                print(f"{case.name} {one.name} {letter}: {error!r}", flush=True)
                return None
    return paths[0], paths[1]


def asked_of(case: Case, one: Configuration, a: str, b: str, seen: set[tuple[str, ...]]) -> Iterator[Question]:
    """What is asked of the runs of a case under a configuration; of a run that several share, once."""
    from harvest import words_of

    from introspect_cli.compare.terms.options import DiffOptions

    narrowed = tuple(words_of(DiffOptions(**one.diff)) or ())
    group = f"matrix/{one.name}"
    full = one.name == "everything"

    def question(share: float, *words: str) -> Question:
        return Question(group, case.name, words, extra=_share(group, *words) >= share)

    for form, share in DIFF_FORMS.items():
        yield question(1 if full else share, "diff", *form, *narrowed, a, b)
    if full or _share(case.name, one.name) < 0.06:
        yield question(0.5, "report", *narrowed, "-o", f"{OUTPUT}.html", a, b)
    if narrowed:
        return
    for run in (a, b):
        forms = [("check", *form, run) for form in CHECK_FORMS] + [("show", *form, run) for form in SHOW_FORMS]
        for words in forms:
            if words not in seen and (full or _share(*words) < 0.2):
                seen.add(words)
                yield question(0.5, *words)
    if full:
        yield question(0.5, "show", "history", "*", "--kinds", "loss,grad", "--stat", "l2", a, b)


def _share(*words: str) -> float:
    """A number from 0 to 1 that depends on the words alone."""
    return zlib.crc32(" ".join(words).encode()) / 2**32


# --------------------------------------------------------------------------------------------------- the tests

TREE = Path(__file__).resolve().parent.parent

_ASKING = re.compile(r"introspect\(|forks|compare_runs|captures|introspect_cli\.diff")
_LEAVE_LITTLE = re.compile(
    r"test_(neutral|gpu|tensors|layers|private|screenshots|bisect|publish|golden|zoom|pages|completion|script|cli_main"
    r"|store_(killed|interrupted|attacked|fuzzed|form|together)|integrations|capture_interrupted)\w*"
)
"""Tests that take long, or leave no runs that can be asked again."""


def make_tests(directory: Path, jobs: int) -> None:
    """Run the tests that ask about runs, and keep the runs."""
    files = [
        str(path)
        for path in sorted((TREE / "tests").glob("*/test_*.py"))
        if _ASKING.search(path.read_text(encoding="utf-8")) and not _LEAVE_LITTLE.fullmatch(path.stem)
    ]
    log = directory / "asked.log"
    log.unlink(missing_ok=True)
    environment = {**os.environ, "FROZEN_LOG": str(log), "PYTHONPATH": str(TREE / "benchmarks"), "PYTHONHASHSEED": "0"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "harvest",
        "-p",
        "no:cacheprovider",
        f"--basetemp={directory}/tests",
    ]
    command += ["-o", "tmp_path_retention_policy=all", "-n", str(jobs), "--dist", "loadfile", *files]
    subprocess.run(command, cwd=TREE, env=environment, check=False)
    ask_tests(directory)


def ask_tests(directory: Path) -> None:
    """Write down what the tests asked, as far as it can be asked again."""
    from harvest import commands

    questions = [
        Question(f"tests/{file}", test, words, tuple(sorted(env.items())), cwd)
        for file, test, words, env, cwd in commands(directory / "asked.log", directory, OUTPUT)
    ]
    kept: dict[tuple[Any, ...], Question] = {}
    for question in [*questions, *_around(questions, directory)]:
        kept.setdefault((question.words, question.env, question.cwd), question)
    write_questions(directory / "tests.jsonl", kept.values())


def _around(questions: Sequence[Question], directory: Path) -> Iterator[Question]:
    """The same comparisons told in other ways, and what is to be said of each of the runs."""
    from harvest import is_run

    for question in questions:
        if question.words[0] == "diff" and not {"--values", "--level", "--settings", "--bisect"}.intersection(
            question.words
        ):
            bare = _without_form(question.words)
            for form in DIFF_FORMS:
                words = (*bare[:1], *form, *bare[1:])
                yield dataclasses.replace(question, words=words, extra=form[:1] not in {(), ("--format",)})
    runs: dict[Path, Question] = {}
    for question in questions:
        for word in question.words[1:]:
            path = directory / question.cwd / word
            if not word.startswith("-") and is_run(path):
                runs.setdefault(path.resolve(), question)
    for path, question in runs.items():
        where = str(path.relative_to(directory))
        for form in CHECK_FORMS:
            yield Question(question.group, question.name, ("check", *form, where), extra=not form)
        for form in SHOW_FORMS:
            if _share(where, *form) < 0.3:
                yield Question(question.group, question.name, ("show", *form, where), extra=_share(where) > 0.3)
        if _share(where, "report") < 0.1:
            yield Question(question.group, question.name, ("report", "-o", f"{OUTPUT}.html", where), extra=True)


def _without_form(words: Sequence[str]) -> tuple[str, ...]:
    """A comparison's command line without how it is to be told."""
    bare: list[str] = []
    for before, word in itertools.pairwise(["", *words]):
        if word not in {"--format", "-v", "--verbose", "--all", "--limit"} and before not in {"--format", "--limit"}:
            bare.append(word)
    return tuple(bare)


# ------------------------------------------------------------------------------------- questions and answers


def write_questions(path: Path, questions: Iterable[Question]) -> None:
    """Write them, one a line."""
    lines = dict.fromkeys(json.dumps(dataclasses.astuple(question), ensure_ascii=False) for question in questions)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} questions in {path.name}", flush=True)


def read_questions(directory: Path) -> list[Question]:
    """All that were written down."""
    questions = []
    for path in sorted(directory.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            group, name, words, env, cwd, extra = json.loads(line)
            questions.append(Question(group, name, tuple(words), tuple((one, two) for one, two in env), cwd, extra))
    return questions


def answered(
    questions: Sequence[Question], directory: Path, jobs: int, *, placeholders: bool = False
) -> Iterator[tuple[int, str, float]]:
    """The answers, by number of the question, each with the seconds it took.

    With `placeholders` they are those of the code without its sentences, which are put in when all has been decided.
    """
    with multiprocessing.get_context("fork").Pool(jobs, _start_asking, (directory, questions, placeholders)) as pool:
        yield from pool.imap_unordered(_answer, range(len(questions)), chunksize=8)


def _start_asking(directory: Path, questions: Sequence[Question], placeholders: bool) -> None:
    import gc

    def same(text: str) -> str:
        return text

    put_in = same
    if placeholders:
        from placeholders import install

        put_in = install().restored

    os.environ.update(SURROUNDINGS)
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):
        os.environ.pop(name, None)
    time.tzset()
    globals()["_asking"] = directory, questions, put_in
    gc.freeze()


def _answer(number: int) -> tuple[int, str, float]:
    directory, questions, put_in = globals()["_asking"]
    before = time.perf_counter()
    return number, put_in(ask(questions[number], directory)), time.perf_counter() - before


def freeze(directory: Path, only: str, jobs: int, *, extra: bool) -> None:
    """Ask the questions and keep the answers: those that `check` asks always, or the extra ones."""
    asked = [
        question
        for question in read_questions(directory)
        if question.extra == extra and (not only or _named(question, only))
    ]
    for store in sorted({question.store for question in asked}):
        _freeze(directory, store, [question for question in asked if question.store == store], jobs)


def _freeze(directory: Path, store: str, questions: Sequence[Question], jobs: int) -> None:
    path = directory / store
    started, took = time.perf_counter(), Counter[str]()
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    with sqlite3.connect(temporary) as kept:
        kept.execute("create table answers (key text primary key, answer blob)")
        for number, answer, seconds in answered(questions, directory, jobs):
            question = questions[number]
            took[question.verb] += seconds
            kept.execute("insert or replace into answers values (?, ?)", (question.key, zlib.compress(answer.encode())))
            if "mistake in introspect" in answer:
                print(f"mistake: {question.key}", flush=True)
            if seconds > 5:
                print(f"slow, {seconds:.0f} s: {question.key}", flush=True)
    kept.close()
    temporary.replace(path)
    print(f"{store}: {len(questions)} answers, {time.perf_counter() - started:.0f} s; seconds by verb:")
    print("\n".join(f"  {name:24} {seconds:8.1f}" for name, seconds in took.most_common()))


def frozen_answers(directory: Path, questions: Sequence[Question]) -> dict[str, str]:
    """The answers that were kept, by the questions' keys."""
    answers = {}
    for store in {question.store for question in questions}:
        keys = [question.key for question in questions if question.store == store]
        path = directory / store
        if path.exists():
            with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as kept:
                for key in keys:
                    for (answer,) in kept.execute("select answer from answers where key = ?", (key,)):
                        answers[key] = zlib.decompress(answer).decode()
    return answers


def check(
    directory: Path, only: str, every: int, jobs: int, shown: int, *, everything: bool, placeholders: bool
) -> int:
    """Ask again, print what differs; 0 where nothing does."""
    questions = [question for question in read_questions(directory) if everything or not question.extra]
    questions = [question for question in questions if not only or _named(question, only)]
    questions = [question for question in questions if every < 2 or zlib.crc32(question.key.encode()) % every == 0]
    started = time.perf_counter()
    if placeholders:
        questions = [
            question for question in questions if question.words[0] in {"diff", "check"} and "json" in question.words
        ]
    frozen = frozen_answers(directory, questions)
    asked = [question for question in questions if question.key in frozen]
    different: dict[int, str] = {}
    decided: set[int] = set()
    for number, answer, _ in answered(asked, directory, jobs, placeholders=placeholders):
        before = frozen[asked[number].key]
        if answer != before if not placeholders else answer.casefold() != before.casefold():
            different[number] = answer
            if placeholders and _decided(answer) != _decided(before):
                decided.add(number)
    for number in sorted(different, key=lambda number: (number not in decided, number))[:shown]:
        _print_difference(asked[number], frozen[asked[number].key], different[number])
    for title, of in _COUNTED.items():
        counts = Counter(of(asked[number]) for number in different)
        if counts:
            print(f"\ndifferent by {title}:")
            print("\n".join(f"  {count:6} {name}" for name, count in counts.most_common(15)))
    seconds = time.perf_counter() - started
    if placeholders:
        print(f"{len(decided)} of them in what was decided, the others in sentences alone")
    missing = len(questions) - len(asked)
    from introspect_cli import cli

    print(f"the code of {Path(cli.__file__).parent}:")
    print(f"{len(asked)} answers compared, {len(different)} differ, {missing} not frozen, {seconds:.0f} s")
    return int(bool(different) or not asked)


def _decided(answer: str) -> Any:
    """What an answer in JSON says outside of sentences, with its exit code."""
    from placeholders import decided

    text, _, _ = answer.partition("--- error\n")
    code, _, document = text.partition("\n")
    try:
        return code, decided(json.loads(document))
    except json.JSONDecodeError:
        return answer


_COUNTED: dict[str, Callable[[Question], str]] = {
    "verb": lambda question: question.verb,
    "configuration or file of tests": lambda question: question.group,
    "case or test": lambda question: question.name,
}


def _print_difference(question: Question, before: str, after: str) -> None:
    """A few lines of what differs."""
    print(f"\n{question.group} {question.name}: cd {question.cwd}; introspect {shlex.join(question.words)}")
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "frozen", "now", lineterm="", n=2)
    cut = [line[:400] for line in itertools.islice(lines, 60)]
    print("\n".join(cut))


def _named(question: Question, glob: str) -> bool:
    return any(
        fnmatchcase(text, glob) for text in (question.group, question.name, question.verb, " ".join(question.words))
    )


def main() -> int:
    """Do what was asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["make", "freeze", "check"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", default="", help="check: a glob of groups, names, verbs or commands; make: a part")
    parser.add_argument("--slice", type=int, default=1, metavar="N", help="ask every Nth question")
    parser.add_argument("--all", action="store_true", help="ask what is otherwise left out, which takes twice as long")
    parser.add_argument("--placeholders", action="store_true", help="check: ask without sentences: what decides?")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--shown", type=int, default=5, help="differences that are printed")
    asked = parser.parse_args()
    directory = asked.directory.resolve()
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    if asked.verb == "check":
        return check(
            directory,
            asked.only,
            asked.slice,
            asked.jobs,
            asked.shown,
            everything=asked.all,
            placeholders=asked.placeholders,
        )
    if asked.verb == "freeze":
        freeze(directory, asked.only, asked.jobs, extra=asked.all)
        return 0
    parts = [asked.only] if asked.only else ["cases", "reduced", "tests"]
    if "cases" in parts:
        make_captures(directory, asked.jobs)
    if "reduced" in parts:
        make_reduced(directory, asked.jobs)
    if "tests" in parts:
        make_tests(directory, asked.jobs)
    if "asked" in parts:
        ask_tests(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
