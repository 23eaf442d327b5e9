"""What a run says of itself: its manifest, and the documents under `settings/`.

A run that is killed has to have them, so they are written as soon as the first step is complete, and again where
something in them has changed. What needs a process of its own or a long look (git, installed packages) is asked before
the script starts: inside it, it would cost a step its time, and what python's `subprocess` does to the warnings filter
would be seen.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from introspect_cli.capture.environment import redact, sources
from introspect_cli.capture.environment.source_files import SourceFiles
from introspect_cli.capture.ranks.launchers import unlaunched
from introspect_cli.capture.read_files import ReadFiles
from introspect_cli.errors import DocumentTooLargeError
from introspect_cli.records import Kind
from introspect_cli.script.target import COMPILED
from introspect_cli.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.capture.all_probes import Probes
    from introspect_cli.capture.guard import Guard
    from introspect_cli.capture.options.capture_options import CaptureOptions
    from introspect_cli.script.ending import Ending
    from introspect_cli.script.target import Target
    from introspect_cli.store.write.launch import Launch
    from introspect_cli.store.write.run_writer import StoreWriter


def opening(target: Target | None, options: CaptureOptions, launch: Launch | None = None) -> dict[str, Any]:
    """The manifest of a run that begins, or of one rank's part of it."""
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


def closing(options: CaptureOptions, guard: Guard, probes: Probes | None, ending: Ending) -> dict[str, Any]:
    """Entries that the manifest gets at the end of the run; `probes` None where torch was never imported."""
    place = _raised_at(ending)
    facts = {
        "ended": _now("milliseconds"),  # which of several ranks ended first
        "exit_code": ending.exit_code,
        "how": ending.how,
        "exception": redact.looks(ending.exception),
        **({"raised_at": place} if place is not None else {}),
        "observed": sorted(kind.value for kind in options.record),
        "draws": probes is not None and probes.context.draws.complete,
        "not_observed": redact.nested([*guard.sentences, *([] if probes is None else never_seen(options, probes))]),
        "notes": redact.nested(probes.notes) if probes is not None else [],
        "children": probes.children.started if probes is not None else [],
        "failures": redact.nested(guard.details),
    }
    return facts | (_NOTHING_RECORDED if probes is None else _recorded(probes))


_NOTHING_RECORDED: Final[dict[str, Any]] = {
    "steps": 0,
    "pipeline": None,
    "data_parallel": [],
    "copies": [],
    "broadcasts_buffers": None,
    "remainder": False,
}


def _recorded(probes: Probes) -> dict[str, Any]:
    """Entries of the manifest on recorded steps, ranks and what was left out."""
    context, box = probes.context, probes.keeping.box
    return {
        "steps": probes.complete_steps,
        **({"perturbed": probes.perturbed.document} if probes.perturbed is not None else {}),
        **({"left_out": True} if probes.keeping.left_out else {}),
        **({"kept_around": box.written} if box is not None else {}),
        "pipeline": context.pipelines.manifest,
        "data_parallel": context.data_parallel.ranks,
        "copies": context.copies(),
        **({"passed_over": context.clock.passed_over} if context.clock.passed_over else {}),
        **({"ran_unseen": probes.ran_unseen} if probes.ran_unseen else {}),
        "broadcasts_buffers": context.data_parallel.broadcasts,
        # What comes after the last optimizer step is in the store as one more step, and is none.
        "remainder": probes.recorder.steps_written > probes.complete_steps,
    }


def _raised_at(ending: Ending) -> dict[str, Any] | None:
    """The innermost frame of an uncaught exception that is the user's own code; None where there is none."""
    for path, line, function in reversed(ending.frames):
        if sources.is_users(path):
            return {"file": sources.relative(path), "line": line, "function": function}
    return None


def never_seen(options: CaptureOptions, probes: Probes) -> list[str]:
    """Sentences on what was not recorded, each where it holds.

    `--perturb` moved nothing; and, given a complete step: passes before training, evaluation, saves in unrecorded
    steps, no module call, collectives in compiled code.
    """
    sentences = []
    if probes.perturbed is not None and not probes.perturbed.elements:
        sentences.append(
            "--perturb moved nothing: no module with parameters to train was called with gradients, so this run is an "
            "ordinary one"
        )
    if not probes.complete_steps:
        return sentences
    if probes.context.clock.left_out:
        sentences.append(
            "what ran before training began and led to no optimizer step was taken for an evaluation and is not "
            "recorded"
        )
    if probes.context.clock.passed_over:
        sentences.append("evaluation ran and is not recorded (--eval records it)")
    if saved := list(probes.context.saved_unseen):
        sentences.append(f"what was saved as {', '.join(saved)} in steps that are not recorded is not recorded either")
    if not probes.names.any_module and options.level != "op":
        sentences.append(
            "no module was called, so nothing between the tensors that require gradients and the losses is recorded "
            "(--level op records every operator)"
        )
    if Kind.COLLECTIVE in options.record and probes.has_ranks:
        from introspect_cli.capture import private_api  # it imports torch, which may be left to the script

        if private_api.compiled_entries():
            sentences.append(
                "torch.compile compiled some of what ran: collectives inside that, if any, are not recorded "
                "(--compile eager runs it as python)"
            )
    return sentences


def without_others(options: CaptureOptions, guard: Guard) -> dict[str, Any]:
    """Note on `guard` that other ranks are not in this run, where torch has a process group that no launcher announced.

    Returns:
        the manifest's entry `{"alone": {"rank": ..., "world_size": ...}}`; {} otherwise.
    """
    place = unlaunched()
    if place is None:
        return {}
    guard.note(
        f"this process is rank {place[0]} of {place[1]}, and the other ranks are not in this run: no launcher "
        f"announced them at the start; use `introspect capture torchrun --nproc-per-node {place[1]} ...`"
    )
    if Kind.COLLECTIVE in options.record:
        guard.note("collectives are not recorded: the script made this process a rank only after the capture began")
    return {"alone": {"rank": place[0], "world_size": place[1]}}


def _repeats(launch: Launch | None) -> bool:
    """Whether this is not the machine's first rank, which alone keeps the texts of files."""
    return launch is not None and bool(launch.rank if launch.local_rank is None else launch.local_rank)


def _now(timespec: str = "seconds") -> str:
    return dt.datetime.now(dt.timezone.utc).isoformat(timespec=timespec)


class Documents:
    """Writes the documents under `settings/`."""

    def __init__(
        self,
        target: Target | None,
        options: CaptureOptions,
        store: StoreWriter,
        guard: Guard,
        launch: Launch | None = None,
    ) -> None:
        self._target = target
        self._options = options
        self._store = store
        self._guard = guard
        script = target.script if target is not None else None
        sources.set_project(os.path.dirname(os.path.realpath(script)) if script else str(Path.cwd()))  # noqa: PTH120 - realpath first
        self._sources = SourceFiles(
            store.save_source if options.sources and not _repeats(launch) else None, options.redact, time.time()
        )
        self.files = (
            ReadFiles(guard, store.path, options.redact, texts=options.sources and not _repeats(launch))
            if options.source
            else None
        )
        self._directory = str(Path.cwd())  # the script may go elsewhere
        self._asked: dict[str, object] = {}
        self._wrote_sources = False
        if options.source:
            self._ask("git", lambda: sources.git(sources.Project.root))
        if options.packages:
            self._ask("packages", sources.packages)

    def write(self, probes: Probes) -> None:
        """Write documents that have changed since the last call.

        Raises:
            StoreError: the store can no longer be written.
        """
        changed = list(probes.new_settings())
        for name, document in changed:
            # Under `nested` are names of values and of classes, and no values.
            redacted = document if name == "nested" else redact.nested(document, self._options.redact)
            self._put(name, redacted)
        if changed and self._options.source:
            self._write_sources()
        self._write_files()

    def write_all(self) -> None:
        """Write what does not depend on the probes: code, command, machine, versions, flags.

        Raises:
            StoreError: the store can no longer be written.
        """
        from introspect_cli.capture.environment import settings  # it imports torch, as the script has by now

        options, target = self._options, self._target
        if options.source:
            self._write_sources()
        self._write_files()
        if target is not None:
            self._ask("command", lambda: settings.command(target, self._directory, options.redact))
        self._ask("runtime", settings.runtime)
        self._ask("hardware", settings.hardware)
        self._ask("seeds", lambda: {"seed": options.seed, "deterministic": options.deterministic})
        if options.env:
            self._ask("environment", lambda: redact.environment(os.environ, options.redact))
        for name in list(self._asked):
            self._put(name, self._asked.pop(name))

    def begin(self) -> None:
        """Keep the script's text as compiled, just before its first line."""
        target = self._target
        if self._options.source and target is not None and target.script in COMPILED:
            with self._guard.around("settings sources", "the text of the script is"):
                self._sources.add(sources.source_name(target.script, "__main__"), COMPILED[target.script])

    def notes(self) -> list[str]:
        """Sentences on source files that are not recorded, or not as they ran."""
        return self._sources.notes()

    def _write_sources(self) -> None:
        """Write the digests of source files if any is new, or at the first call."""
        if self._sources.look() or not self._wrote_sources:
            self._wrote_sources = True
            self._put("sources", dict(sorted(self._sources.digests.items())))

    def _write_files(self) -> None:
        """Write the document of read files, and the texts of small ones, if any has changed."""
        files = self.files
        if files is not None and files.changed:
            files.changed = False
            for digest, text in files.texts():
                self._store.save_source(digest, text)
            self._put("files", files.document)

    def _ask(self, name: str, ask: Callable[[], object]) -> None:
        """Make one document; its failure is noted and leaves the others."""
        with self._guard.around(f"settings {name}", f"{name} settings are"):
            self._asked[name] = ask()

    def _put(self, name: str, value: Any) -> None:
        """Write one document; where it is too large, without names of parameters or not at all, with a note."""
        try:
            self._store.write_settings(name, value)
        except DocumentTooLargeError:
            if name == "optimizers":  # names of parameters grow with the depth of a model, and are in the store anyway
                nameless = [
                    {**optimizer, "groups": [{**group, "params": []} for group in optimizer["groups"]]}
                    for optimizer in value
                ]
                with contextlib.suppress(DocumentTooLargeError):
                    self._store.write_settings(name, nameless)
                    self._guard.note(
                        "which parameters an optimizer has is not recorded: there is no room for the names"
                    )
                    return
            self._guard.note(f"the settings {name} are not recorded: they are larger than a store allows")
