"""Names that mean the same module: wrappers stripped, renames applied.

Capture strips wrappers already; stores imported from elsewhere or written by older versions may not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from introspect_cli.errors import UsageError

_WRAPPED = re.compile(r"\.(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")

Rename = Callable[[str], str]


def strip_wrappers(fqn: str) -> str:
    """An FQN without the attributes that compile, FSDP and checkpointing insert.

    DDP's `.module` is a name that models use too, so that one is stripped directly below a root whose class is
    a known wrapper only, which capture does.
    """
    return _WRAPPED.sub("", fqn) if "._" in fqn else fqn


def parse_rename(text: str) -> tuple[str, str]:
    r"""`OLD=NEW` into a pattern and a replacement; `\=` is an equals sign.

    Raises:
        UsageError: no equals sign, or OLD is not a regular expression.
    """
    parts = re.split(r"(?<!\\)=", text, maxsplit=1)
    if len(parts) != 2 or not parts[0]:
        raise UsageError(f"--rename takes OLD=NEW, a regular expression and its replacement, not {text!r}.")
    old, new = parts[0].replace("\\=", "="), parts[1].replace("\\=", "=")
    try:
        re.sub(re.compile(old), new, "")
        re.compile(f"{old}|").sub(new, "")
    except (re.error, IndexError) as error:
        raise UsageError(f"--rename {text!r} is not a regular expression with its replacement: {error}.") from None
    return old, new


def renamer(pairs: Sequence[tuple[str, str]], moved: dict[str, str]) -> Rename | None:
    """A function from run a's FQNs to run b's, or None where it would change nothing.

    Args:
        pairs: regular expressions and replacements, applied in turn.
        moved: whole modules: FQN prefix in a to FQN prefix in b; the longest prefix wins.
    """
    if not pairs and not moved:
        return None
    compiled = [(re.compile(old), new) for old, new in pairs]

    def rename(fqn: str) -> str:
        name = strip_wrappers(fqn)
        for pattern, new in compiled:
            name = pattern.sub(new, name)
        head = name
        while head:
            if head in moved:
                return moved[head] + name[len(head) :]
            head = head.rpartition(".")[0]
        return name

    return rename
