"""The source files of a run as text: by name, read when asked for.

That a file changed is told by its digest; what changed in it only by its text, and by the time somebody asks, the file
may be another one or gone. Secrets were taken out before: a text whose own digest is not that of its name is not all
that the file held. A store may be a stranger's: names that lead out of a directory are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from introspect_cli.sums import source_digest

if TYPE_CHECKING:
    from introspect_cli.store.read.run import Run

_DIGEST = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Source:
    """A source file of a run.

    Attributes:
        name: its path in the project, or that of its module where it lay elsewhere; `-c` and `<notebook>` for code that
            no file held.
        digest: of what it held when it was read.
        data: what it held, without secrets.
    """

    name: str
    digest: str
    data: bytes

    @property
    def exact(self) -> bool:
        """Whether this is all that the file held: no secret was taken out."""
        return source_digest(self.data) == self.digest

    @property
    def text(self) -> str:
        """The file as text, in the encoding that it declares; as UTF-8 with replacement characters where that fails."""
        from importlib.util import decode_source

        try:
            return decode_source(self.data)
        except (SyntaxError, UnicodeDecodeError):
            return self.data.decode("utf-8", "replace")


class Sources(Mapping[str, Source]):
    """The source files of a run whose text it keeps, by name, each read when asked for."""

    def __init__(self, run: Run) -> None:
        """Read the names and digests of source files, and which texts are kept; names that lead outside are dropped.

        Raises:
            StoreError: the document or the directory of sources is damaged.
        """
        self._run = run
        self.digests: dict[str, str] = {}
        """Digest by name of all source files, whether their text is there or not."""
        for name, digest in run.settings.document("sources").items():
            if isinstance(name, str) and _DIGEST.fullmatch(str(digest)) and _stays_inside(name):
                self.digests[name] = str(digest)
        kept = run.kept_sources if self.digests else frozenset()
        self._names = [name for name, digest in self.digests.items() if digest in kept]

    def __getitem__(self, name: str) -> Source:
        """The source file with a name, read from the store now.

        Raises:
            KeyError: its text is not there.
            StoreError: it is damaged.
        """
        if name not in self._names:
            raise KeyError(name)
        digest = self.digests[name]
        data = self._run.source(digest)
        if data is None:
            raise KeyError(name)
        return Source(name, digest, data)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _stays_inside(name: str) -> bool:
    """Whether `name`, as a path below a directory, stays in it: relative, without `..` and NUL."""
    return bool(name) and not name.startswith("/") and ".." not in name.split("/") and "\0" not in name
