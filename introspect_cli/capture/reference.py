"""The run that a capture is compared with while it goes on, as each rank of a launch hears of it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.capture.against import Against
from introspect_cli.capture.ranks.divergence import Announcement
from introspect_cli.errors import StoreError
from introspect_cli.exit_codes import UNDECIDED
from introspect_cli.store.files import GOLDEN_RUN

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from introspect_cli.capture.options import CaptureOptions
    from introspect_cli.capture.recorder import Recorder
    from introspect_cli.store.launch import Launch


class Reference:
    """What a session asks of the run named by `--against`; without one, it has nothing to say."""

    def __init__(
        self,
        run: Path,
        store: Path,
        options: CaptureOptions,
        launch: Launch | None,
        guarded: AbstractContextManager[None],
    ) -> None:
        """Begin to compare; of several ranks, the first compares all of them.

        Args:
            run: the run that is being recorded.
            store: the directory of this rank.
            options: of the capture.
            launch: this process's place among ranks; None for one process.
            guarded: in which whatever fails is told and costs the script nothing.
        """
        self._options, self._guarded = options, guarded
        self._rank = launch.rank if launch is not None else 0
        self._against: Against | None = None
        self._announcement: Announcement | None = None
        self._has_ended_the_script = False
        if options.against is not None:
            with guarded:
                if launch is not None and launch.world_size > 1 and (options.stop or options.keep_around):
                    self._announcement = Announcement(store, self._rank)
                if not self._rank:
                    self._against = Against(run, options)

    def digests(self) -> dict[int, bytes] | None:
        """What each step of the reference digests to, as far as that can be read here; None without a reference."""
        if self._options.against is None:
            return None
        found: dict[int, bytes] = {}
        with self._guarded:
            found |= _digests(self._options.against, self._rank)
        return found

    def look(self, recorder: Recorder, say: Callable[[str], None]) -> bool:
        """Say what was found by the end of a step; whether the script is to be ended for it, which is so once."""
        if self._against is None and self._announcement is None:
            return False
        ended, after = recorder.step - 1, None
        with self._guarded:
            first = None
            if self._against is not None:
                for sentence in self._against.look(ended):
                    say(sentence)
                first = self._against.first
                after = None if first is None else ended
            if self._announcement is not None:
                heard = self._announcement.hear() if first is None else self._announcement.say(first[0], ended + 1)
                if heard is not None:
                    first, after = (heard.first,), heard.after
            recorder.compared(-1 if self._against is None else self._against.agreed, first)
        if not self._options.stop or after is None or ended < after or self._has_ended_the_script:
            return False
        self._has_ended_the_script = True
        if not self._rank:
            say(f"the script is ended after step {ended} (--stop)")
        return True

    @property
    def status(self) -> int | None:
        """With `--stop`, the exit status of `diff`; None without, or where another process compares."""
        if self._against is None or not self._options.stop:
            return None
        return UNDECIDED if self._against.code is None else self._against.code

    def finish(self, recorder: Recorder | None) -> list[str]:
        """Wait for the verdict, for a while; what is to be said of it."""
        said: list[str] = []
        with self._guarded:
            if self._against is not None:
                said = self._against.finish()
                if recorder is not None:
                    recorder.compared(self._against.agreed, self._against.first)
            if self._announcement is not None and not self._rank:
                self._announcement.close()
        return said

    def abandon(self) -> None:
        """Forget it, in a forked child."""
        if self._against is not None:
            self._against.abandon()
        self._against = self._announcement = None


def _digests(reference: str, rank: int) -> dict[int, bytes]:
    """What each step of a run digests to; empty where that cannot be read here, which another process says."""
    from introspect_cli.store.objects import is_remote
    from introspect_cli.store.reader import open_run

    if is_remote(reference):
        return {}
    path = Path(reference)
    with suppress(StoreError), open_run(path / GOLDEN_RUN if (path / GOLDEN_RUN).is_file() else path) as run:
        return run.rank(rank).digests() if rank in run.ranks else {}
    return {}
