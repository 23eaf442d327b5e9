"""What a run says of itself: its manifest, and the documents under `settings/`.

A run that is killed has to have them, so they are written as soon as the first step is complete, and again where
something in them has changed. What needs a process of its own or a long look (git, installed packages) is asked before
the script starts: inside it, it would cost a step its time, and what python's `subprocess` does to the warnings filter
would be seen.
"""

from __future__ import annotations

import datetime as dt
import functools
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.environment import redact, sources
from introspect_cli.capture.environment.sources import SourceFiles
from introspect_cli.capture.ranks.launchers import rank_and_size
from introspect_cli.capture.read_files import MAX_TEXT_BYTES, ReadFiles
from introspect_cli.errors import DocumentTooLargeError
from introspect_cli.records import Kind
from introspect_cli.script.ending import places_of
from introspect_cli.script.target import COMPILED
from introspect_cli.store.sources import LIMIT_RUN
from introspect_cli.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.capture.capture import Capture
    from introspect_cli.capture.context import Context
    from introspect_cli.capture.options import CaptureOptions
    from introspect_cli.script.ending import Ending


def opening(capture: Capture) -> dict[str, Any]:
    """The manifest of a run that begins, or of one rank's part of it.

    Arguments of the script that may be secret are redacted.
    """
    target, options, launch = capture.target, capture.options, capture.launch
    manifest: dict[str, Any] = {
        "tool": {"name": "introspect-cli", "version": __version__},
        "status": "running",
        "started": _now(),
        "options": options.to_dict(),
        "narrowing": options.narrowing(),
    }
    if launch is not None:
        process = {"rank": launch.rank, "world_size": launch.world_size, "local_rank": launch.local_rank}
        manifest |= {**process, "attempt": launch.attempt, "host": platform.node(), "launch_id": launch.id}
    if target is not None:
        manifest |= {"script": target.script, "module": target.module}
        shown = redact.arguments(target.args, options.redact)
        manifest["argv"] = [target.script or f"-m {target.module}", *shown]
    return manifest


def closing(capture: Capture, context: Context | None, ending: Ending) -> dict[str, Any]:
    """Entries that the manifest gets at the end of the run, without credentials.

    Args:
        capture: has the sentences on what was not observed, and the tracebacks.
        context: what has recorded; None where torch was never imported.
        ending: how the script ended.
    """
    options, guard = capture.options, capture.guard
    places = places_of(ending.raised) if ending.how == "exception" and ending.raised is not None else []
    at = next((place for place in reversed(places) if sources.is_users(place.path)), None)
    facts: dict[str, Any] = {
        "ended": _now(),  # which of several ranks ended first
        "exit_code": ending.exit_code,
        "how": ending.how,
        "exception": ending.exception,
        "raised_at": at and {"file": sources.relative(at.path), "line": at.line, "function": at.function},
        "observed": sorted(kind.value for kind in options.record),
        "not_observed": guard.sentences,
        "failures": guard.details,
        "steps": 0,
    }
    if context is not None:
        clock, ranks, policy = context.clock, context.data_parallel, context.policy
        facts |= {
            "draws": context.draws.complete,
            "not_observed": [*guard.sentences, *never_seen(options, context)],
            "notes": list(context.notes),
            "children": context.started,
            "steps": context.complete_steps,
            "perturbed": context.perturbed,
            "left_out": policy.left_out,
            "kept_around": None if policy.box is None else policy.box.written,
            "pipeline": context.pipelines.manifest,
            "data_parallel": ranks.ranks,
            "broadcasts_buffers": ranks.broadcasts,
            "passed_over": clock.passed_over,
            "ran_unseen": context.unseen,
            # What comes after the last optimizer step is in the store as one more step, and is none.
            "remainder": context.recorder.steps_written > context.complete_steps,
        }
    return {name: redact.nested_without_secrets(fact) for name, fact in facts.items()}


def never_seen(options: CaptureOptions, context: Context) -> list[str]:
    """Sentences for the manifest on what ran and was not recorded; [] where nothing is known to be missing.

    First whether `--perturb` moved nothing. If a step is complete: passes before training, evaluation, saves in
    unrecorded steps, no module call, collectives in compiled code.
    """
    from introspect_cli.capture import private_api  # it imports torch, as the script has by now

    stepped, saved = bool(context.complete_steps), ", ".join(context.saved_unseen)
    of_collectives = Kind.COLLECTIVE in options.record and context.has_ranks
    table: tuple[tuple[object, str], ...] = (
        (context.perturbed is not None and not context.perturbed["elements"],
         ("--perturb moved nothing: no module with parameters to train was called with gradients, so this run is an "
          "ordinary one")),
        (stepped and context.clock.left_out,
         "what ran before training began and led to no optimizer step was taken for an evaluation and is not recorded"),
        (stepped and context.clock.passed_over, "evaluation ran and is not recorded (--eval records it)"),
        (stepped and saved, f"what was saved as {saved} in steps that are not recorded is not recorded either"),
        (stepped and not context.names.any_module and options.level != "op",
         ("no module was called, so nothing between the tensors that require gradients and the losses is recorded "
          "(--level op records every operator)")),
        (stepped and of_collectives and private_api.compiled_entries(),
         ("torch.compile compiled some of what ran: collectives inside that, if any, are not recorded "
          "(--compile eager runs it as python)")),
    )  # fmt: skip
    return [sentence for is_so, sentence in table if is_so]


def without_others(capture: Capture) -> dict[str, Any]:
    """Note that other ranks are missing, if torch has a process group that no launcher announced.

    Returns:
        the manifest's entry `{"alone": {"rank": ..., "world_size": ...}}`; {} where none is missing.
    """
    guard = capture.guard
    if (place := rank_and_size()) is None:
        return {}
    guard.note(
        f"this process is rank {place[0]} of {place[1]}, and the other ranks are not in this run: no launcher "
        f"announced them at the start; use `introspect capture torchrun --nproc-per-node {place[1]} ...`"
    )
    if Kind.COLLECTIVE in capture.options.record:
        guard.note("collectives are not recorded: the script made this process a rank only after the capture began")
    return {"alone": {"rank": place[0], "world_size": place[1]}}


_OF_THE_SCRIPT = frozenset({"autocast", "beginning", "built", "operators", "optimizers", "seedings"})
"""Documents with values of the script's, which are redacted; the others are, or hold none."""


def _now() -> str:
    """The time in UTC as ISO 8601, to the microsecond: a file written in the second of the start is older than it."""
    return dt.datetime.now(dt.timezone.utc).isoformat(timespec="microseconds")


class Documents:
    """Writes the documents under `settings/`.

    Attributes:
        files: notes what the script reads.
    """

    def __init__(self, capture: Capture) -> None:
        """Ask git and the package list now, if wanted, and set the project's root for the process.

        The root is the script's folder, or the current directory without a script. Nothing is written, and no file is
        watched before `files.install`. Texts of sources are kept by each machine's first rank.
        """
        self._capture, self._facts = capture, capture.facts
        options, store, target, launch = capture.options, capture.store, capture.target, capture.launch
        self._options, self._store = options, store
        script = target.script if target is not None else None
        sources.set_project(os.path.dirname(os.path.realpath(script)) if script else str(Path.cwd()))  # noqa: PTH120 - realpath first
        texts = options.sources and not (launch and (launch.rank if launch.local_rank is None else launch.local_rank))
        kept = functools.partial(sources.Texts, store.save_source if texts else None, options.redact)
        self.sources = SourceFiles(kept(LIMIT_RUN), time.time())
        self.files = ReadFiles(capture, kept(MAX_TEXT_BYTES))
        self._directory = str(Path.cwd())  # the script may go elsewhere
        early = (
            (options.source, "git", lambda: sources.git(sources.Project.root)),
            (options.packages, "packages", sources.packages),
        )
        for is_wanted, name, make in early:  # that takes long
            if is_wanted and (made := self._make(name, make)) is not None:
                self._facts[name] = functools.partial(dict, made)

    def write(self) -> None:
        """Write the documents in `facts`, taking each out.

        A document that cannot be made, or is too large, is left out with a note. Documents with values of the script's
        are redacted. Where there are facts, source files imported since are read, too.

        Raises:
            StoreError: the store can no longer be written.
        """
        if self._facts and self._options.source and self.sources.read_imports():
            self._add_sources()
        while self._facts:
            name = next(iter(self._facts))
            made = self._make(name, self._facts.pop(name))
            if name in _OF_THE_SCRIPT:
                made = redact.nested_without_secrets(made, self._options.redact)
            try:
                if made is not None:
                    self._store.write_settings(name, made)
            except DocumentTooLargeError:
                self._capture.guard.note(f"the settings {name} are not recorded: they are larger than a store allows")

    def write_all(self, raised: BaseException | None = None) -> None:
        """Put code, command, machine, versions, flags and environment in `facts`, then `write`.

        Args:
            raised: what ended the script.

        Raises:
            StoreError: the store can no longer be written.
        """
        from introspect_cli.capture.environment import settings  # it imports torch, as the script has by now

        options, target = self._options, self._capture.target
        if options.source:
            self.sources.read_imports(raised)
            self._add_sources()
        if target is not None:
            self._facts["command"] = lambda: settings.command(target, self._directory, options.redact)
        self._facts["runtime"], self._facts["hardware"] = settings.runtime, settings.hardware
        self._facts["seeds"] = lambda: {"seed": options.seed, "deterministic": options.deterministic}
        if options.env:
            self._facts["environment"] = lambda: redact.environment(os.environ, options.redact)
        self.write()

    def _add_sources(self) -> None:
        """Put the document of the source files' digests in `facts`."""
        self._facts["sources"] = lambda: dict(sorted(self.sources.digests.items()))

    def begin(self) -> None:
        """Keep the script's text as it was compiled; call it just before the script's first line.

        Nothing for a module (`-m`), without a script, or where no sources are recorded.
        """
        target = self._capture.target
        if self._options.source and target is not None and target.script in COMPILED:
            with self._capture.guard.around("settings sources", "the text of the script is"):
                self.sources.add(sources.source_name(target.script, "__main__"), COMPILED[target.script])

    def _make(self, name: str, make: Callable[[], Any]) -> Any:
        """A document; None where making it failed, which is noted."""
        with self._capture.guard.around(f"settings {name}", f"{name} settings are"):
            return make()
        return None
