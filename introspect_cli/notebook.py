"""Runs, findings and comparisons as objects that a notebook shows well and a script can take apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from introspect_cli.selection import check_selection, read_selection
from introspect_cli.store.files import Closing
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from introspect_cli.compare.result import DiffResult
    from introspect_cli.health.findings import CheckResult
    from introspect_cli.records import Record
    from introspect_cli.render.blocks import Block
    from introspect_cli.store.run import Run


class RunView(Closing):
    """A run opened to be looked at; a context manager that closes its files.

    Attributes:
        run: the reader, for what is not offered here.
        path: its directory, or the file or URL it was packed into.
        manifest: what ran, with which options, how it ended.
        settings: settings documents by name, each read when asked for.
    """

    def __init__(self, run: Run) -> None:
        """Take over an open run; `close` closes it."""
        self.run, self.path, self.manifest = run, run.path, run.manifest
        self.settings: Mapping[str, Any] = run.settings

    @property
    def steps(self) -> list[int]:
        """Numbers of all steps that any rank recorded, rising."""
        return sorted({int(step) for rank in self.run.ranks for step in self.run.rank(rank).entries["step"]})

    def to_arrow(
        self,
        *,
        steps: str | Iterable[int] | None = None,
        kinds: str | Iterable[str] = (),
        modules: str | Iterable[str] = (),
    ) -> Any:
        """Records as a `pyarrow.Table`, one row a record; columns as `introspect export` has them.

        An empty table without columns where there is no record.

        Args:
            steps: a schedule as `--steps` takes it, or numbers; None for all.
            kinds: names of kinds, also with commas between; empty for all.
            modules: globs of FQNs, each with all that is inside, also with commas between; empty for all.

        Raises:
            UsageError: a kind is unknown, something asked for is not in the run, or pyarrow is not installed.
            StoreError: the run is damaged.
        """
        from introspect_cli.exchange.frames import arrow, frames

        pa = arrow()
        wanted = check_selection(read_selection(steps, kinds, modules), [self.run])
        tables = list(frames(self.run, wanted))
        return pa.concat_tables(tables) if tables else pa.table({})

    def to_pandas(self, **selection: Any) -> Any:
        """Records as a `pandas.DataFrame`; arguments and errors are those of `to_arrow`. Needs pandas."""
        return self.to_arrow(**selection).to_pandas()

    def records(self, step: int, rank: int = 0) -> Iterator[Record]:
        """All records of a step in the order of their sequence.

        Raises:
            KeyError: there is no such step or rank.
            StoreError: the run is damaged.
        """
        return self.run.rank(rank).records(step)

    def check(self, *, rules: Iterable[str] = (), ignore: Iterable[str] = ()) -> Findings:
        """Look in this run for what usually goes wrong, as `introspect check` does.

        Args:
            rules: globs of the rules to apply; all where empty.
            ignore: globs of the rules not to apply.

        Raises:
            UsageError: a glob matches no rule.
            StoreError: the run is damaged.
        """
        from introspect_cli.health.check import check, choose

        return Findings(check(self.run, choose(tuple(rules), tuple(ignore))))

    def __repr__(self) -> str:
        steps = self.steps
        span = f"steps {steps[0]} to {steps[-1]}" if steps else "no steps"
        return f"<run {self.path}: {span}, {count(len(self.run.ranks), 'rank')}, {self.run.state.value}>"

    def close(self) -> None:
        """Close its files; tables already made stay valid."""
        self.run.close()


class _Shown:
    """Base of results that are printed as blocks of text, and shown as the same in HTML."""

    def _blocks(self) -> list[Block]:
        """The blocks (lines and tables) of the result; NotImplementedError here, each subclass has its own."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        """The blocks in HTML."""
        from introspect_cli.render.markup import fragment, html_of

        return fragment(html_of(self._blocks()))

    def __str__(self) -> str:
        """The blocks as text of at most 120 columns."""
        from introspect_cli.render.blocks import lines_of

        return "\n".join((" " * line.indent + line.text).rstrip() for line in lines_of(self._blocks(), 120))


class Findings(_Shown):
    """What a check found: prints as text, shows as HTML.

    Attributes:
        result: the findings as plain data.
    """

    def __init__(self, result: CheckResult) -> None:
        """Keep the result; it is turned into text or HTML when asked for."""
        self.result = result

    def _blocks(self) -> list[Block]:
        from introspect_cli.render.check_text import check_blocks

        return check_blocks(self.result)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.result.findings)

    def __len__(self) -> int:
        return len(self.result.findings)

    def __repr__(self) -> str:
        rules = ", ".join(finding.rule for finding in self.result.findings)
        return f"<{count(len(self), 'finding')}: {rules or 'none'}>"


class Comparison(_Shown):
    """How two runs compare: prints as `introspect diff` does, shows as HTML.

    Attributes:
        result: the comparison as plain data.
        same: whether the two agree wherever both were observed; False also where that is undecided.
        verdict: `same`, `diverged` or `undecided`.
        sentence: the answer in plain words.
        first: the first divergence; None where there is none.
        divergences: those of the first step that has any, at most `limit` of them; with `limit=None` all of all steps.
    """

    def __init__(self, result: DiffResult, *, grouped: bool = False) -> None:
        """Keep the result; it is turned into text or HTML when asked for.

        Args:
            result: the comparison as plain data.
            grouped: whether the text says how much follows from the first divergence, and lists no other one.
        """
        self.result, self._grouped = result, grouped
        self.verdict, self.sentence = result.verdict.value, result.sentence
        self.same = self.verdict == "same"
        self.first, self.divergences = result.first, result.divergences

    def _blocks(self) -> list[Block]:
        from introspect_cli.render.diff_text import diff_blocks

        return diff_blocks(self.result, grouped=self._grouped, more="limit=None lists them")

    def __repr__(self) -> str:
        return f"<{self.verdict}: {self.sentence}>"

    def _repr_html_(self) -> str:
        """The first screen of the report, what differs in the first divergence, what it rests on and settings."""
        from introspect_cli.render.diff_text import detail_blocks, settings_blocks
        from introspect_cli.render.markup import first_screen, fragment, html_of, rests_on

        differs = detail_blocks([self.result.first]) if self.result.first is not None else []
        blocks = [*differs, *rests_on(self.result), *settings_blocks(self.result)]
        return fragment(first_screen(self.result) + html_of(blocks))
