"""What ranks on one disk hold alike is kept once: names, layouts, the module tree and settings, as hard links.

Each rank writes its files alone and may be killed at any time, so no two share one while they write. A rank that has
closed its files links each under a digest of its bytes into a directory of the launch; where that name is taken, it
exchanges its own file for a link to the equal one. Both are one operation that happens or does not. A file that is
written anew later gets a new name of its own, as ever. Where a file system has no hard links, copies stay.
"""

from __future__ import annotations

import os
from contextlib import suppress
from hashlib import blake2b

from introspect_cli.errors import StoreError
from introspect_cli.store.files import LAYOUTS, MODULES, SETTINGS, SITES, Folder

EQUAL = ".equal"
"""Where a launch has what is equal on several ranks, by digests; no reader looks there."""

_LARGEST = 64 << 20


def keep_once(rank: Folder) -> None:
    """Exchange the files of a rank that is closed for links to equal ones of other ranks."""
    if rank.fd < 0:
        return
    with suppress(OSError, StoreError):
        launch = Folder(
            os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=rank.secure().fd), f"{rank.path}/.."
        )
        with launch, launch.make_folder(EQUAL, 0o700) as equal:
            _exchange(rank, equal, (SITES, LAYOUTS, MODULES))
            with rank.folder(SETTINGS) as settings:
                _exchange(settings, equal, settings.names())


def _exchange(folder: Folder, equal: Folder, names: tuple[str, ...] | list[str]) -> None:
    for name in names:
        with suppress(OSError, StoreError):
            data = folder.read_file(name, _LARGEST)
            mode = os.stat(name, dir_fd=folder.fd, follow_symlinks=False).st_mode
            digest = f"{blake2b(data, digest_size=16).hexdigest()}-{mode:o}"
            try:
                os.link(name, digest, src_dir_fd=folder.fd, dst_dir_fd=equal.fd, follow_symlinks=False)
            except FileExistsError:
                if equal.read_file(digest, _LARGEST) == data:
                    _replace(folder, name, equal, digest)


def _replace(folder: Folder, name: str, equal: Folder, digest: str) -> None:
    """Have a name stand for the equal file, in one step."""
    beside = f".{name}.{os.getpid()}"
    with suppress(FileNotFoundError):
        os.unlink(beside, dir_fd=folder.fd)
    os.link(digest, beside, src_dir_fd=equal.fd, dst_dir_fd=folder.fd, follow_symlinks=False)
    os.rename(beside, name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
