"""Keep secrets out of a store: values whose name or looks say that they are nobody else's business."""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING

from introspect_cli.store.files import REDACTED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_SECRET_NAME = re.compile(
    r"(?i)(secret|token|passw|pwd$|passphrase|api_?key|apikey|access_?key|private|credential|auth|cookie|session"
    r"|signature|_key$|^key$|dsn$|connection_?string|webhook)"
)
_SECRET_VALUE = re.compile(
    r"(AKIA[0-9A-Z]{16}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{16,}|xox[abprs]-[A-Za-z0-9-]{10,}|glpat-[\w-]{16,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|\b[0-9a-fA-F]{40}\b|\bAIza[\w-]{30,})"
)
_URL_PASSWORD = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s:@]*:[^/\s@]+@")
_OPTION = re.compile(r"^--?([A-Za-z][\w.-]*)(=(.*))?$", re.DOTALL)


def environment(variables: Mapping[str, str], patterns: Iterable[str] = ()) -> dict[str, str]:
    """Environment variables with secret values replaced.

    Args:
        variables: name to value.
        patterns: further globs over names whose values are secret.
    """
    globs = tuple(patterns)
    return {name: value(name, text, globs) for name, text in sorted(variables.items())}


def value(name: str, text: str, patterns: tuple[str, ...] = ()) -> str:
    """A named value, replaced where its name or its looks are those of a secret."""
    plain = name.replace("-", "_")
    if _SECRET_NAME.search(plain) or any(fnmatch.fnmatchcase(name.lower(), glob.lower()) for glob in patterns):
        return REDACTED
    return looks(text)


def looks(text: str) -> str:
    """Text with whatever looks like a token replaced, and passwords in URLs."""
    return _SECRET_VALUE.sub(REDACTED, _URL_PASSWORD.sub(rf"\1{REDACTED}@", text))


def arguments(argv: Iterable[str], patterns: tuple[str, ...] = ()) -> list[str]:
    """A command line with secret option values replaced (`--token X`, `--token=X`)."""
    shown = []
    secret_next = False
    for argument in argv:
        option = _OPTION.match(argument)
        if secret_next and option is None:
            shown.append(REDACTED)
            secret_next = False
            continue
        secret_next = False
        if option is not None:
            is_secret = value(option.group(1), "", patterns) == REDACTED
            if is_secret and option.group(2):
                shown.append(f"{argument.partition('=')[0]}={REDACTED}")
                continue
            secret_next = is_secret
        shown.append(looks(argument))
    return shown
