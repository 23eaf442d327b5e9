"""Keep secrets out of the configuration files that a run keeps.

They are to be compared value by value, so what is left must still parse: what stands under a name that says that it is
secret is replaced, in place, whatever the format; what looks like a credential goes wherever it stands.
"""

from __future__ import annotations

import re

from introspect_cli.capture.environment.redact import is_secret_name, prose
from introspect_cli.store.files import REDACTED

_ASSIGNED = re.compile(
    r"(?P<before>(?:^|(?<=[{,\[\s]))['\"]?(?P<name>[A-Za-z_][\w.-]{0,200})['\"]?[ \t]{0,20}[:=][ \t]{0,200})"
    r"(?P<value>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|(?![|>][+-]?\d?\s*$)[^\s\[{\"',}\]#][^\n,}\]]*)",
    re.MULTILINE,
)
_BRACKETED = re.compile(r"(?<![\w.-])(?P<name>[A-Za-z_][\w.-]{0,200})['\"]?\s{0,20}[:=]\s{0,200}[{\[]")
_BRACKET = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[{}\[\]]")
_ITEM = re.compile(
    r"(?P<key>(?:\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[\w.-]+)\s*[:=])"
    r"|\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[^\s{}\[\],:\"'][^{}\[\],\n\"']*"
)
_OPENS = re.compile(
    r"^(?P<indent>\s*)(?:-\s+)?['\"]?(?P<name>[A-Za-z_][\w.-]{0,200})['\"]?\s*[:=]\s*(?:[|>&\[{][^\n]*)?$"
)
_SECTION = re.compile(r"^\s*\[+\s*['\"]?(?P<name>[^\]'\"]{1,200})['\"]?\s*\]+\s*$")
_VALUE = re.compile(
    r"^(?P<before>\s*(?:-\s+)?(?:['\"]?[\w.-]{1,200}['\"]?\s*[:=]\s*)?)(?P<value>[^\s\[{}\]#,].*?)(?P<after>\s*,?\s*)$"
)


def config(text: str, patterns: tuple[str, ...] = ()) -> str:
    """A configuration file without its secrets; globs say which further names are secret."""
    text = _ASSIGNED.sub(lambda match: _assigned(match, patterns), text)
    return prose(_under_names(_in_brackets(text, patterns), patterns))


def _in_brackets(text: str, patterns: tuple[str, ...]) -> str:
    """What stands in the brackets behind a secret name: `"auth": {"user": "me"}`."""
    pieces, done = [], 0
    for match in _BRACKETED.finditer(text):
        if match.start() < done or not is_secret_name(match["name"], patterns):
            continue
        end = _closed(text, match.end())
        pieces += [text[done : match.end()], _ITEM.sub(_hidden, text[match.end() : end])]
        done = end
    return "".join([*pieces, text[done:]])


def _closed(text: str, start: int) -> int:
    """Where the bracket that was opened before a place is closed; the end of the text where it never is."""
    depth = 1
    for match in _BRACKET.finditer(text, start):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(match[0], 0)
        if not depth:
            return match.start()
    return len(text)


def _hidden(match: re.Match[str]) -> str:
    value = match[0]
    if match["key"] or _is_no_text(value) or value in {REDACTED, f'"{REDACTED}"'}:
        return value
    quote = value[0] if value[0] in "\"'" else '"'
    return f"{quote}{REDACTED}{quote}"


def _assigned(match: re.Match[str], patterns: tuple[str, ...]) -> str:
    value = match["value"]
    if not is_secret_name(match["name"].rpartition(".")[2], patterns) or _is_no_text(value):
        return match[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{match['before']}{quote}{REDACTED}{quote}"


def _is_no_text(value: str) -> bool:
    return value.strip().lower() in {"true", "false", "null", "none", "yes", "no", "~"}


def _under_names(text: str, patterns: tuple[str, ...]) -> str:
    """What stands in the lines below a secret name, further in than it, or in a section of that name."""
    lines, inside, section = text.split("\n"), -1, False
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        heading = _SECTION.match(line)
        if heading is not None:
            section = any(is_secret_name(part, patterns) for part in heading["name"].split("."))
            inside = -1
            continue
        if inside >= 0 and indent <= inside and not (indent == inside and line[indent : indent + 2] == "- "):
            inside = -1
        if inside >= 0 or section:
            lines[number] = _VALUE.sub(_covered, line)
            continue
        opened = _OPENS.match(line)
        if opened is not None and is_secret_name(opened["name"], patterns):
            inside = indent
    return "\n".join(lines)


def _covered(match: re.Match[str]) -> str:
    value = match["value"]
    if _is_no_text(value) or REDACTED in value:
        return match[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{match['before']}{quote}{REDACTED}{quote}{match['after']}"
