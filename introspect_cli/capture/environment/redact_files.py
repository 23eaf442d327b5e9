"""Keep secrets out of the files that a run keeps: its sources, and its configuration.

Code speaks of tokens, keys and sessions all the time, and is to be run again and compared: what is taken out must be
the secret alone, and what is left must still parse. So only what stands in strings and comments is looked at. What
has the form of a credential goes, as in settings; so does a string that a name says is one (`password = "..."`,
`{"api_key": "..."}`, `os.environ["HF_TOKEN"] = "..."`). Behind names that are as often of something else (`token`,
`key`) only what looks as if somebody had drawn it by lot goes.

Configuration is to be compared value by value, and must still parse, too: what stands under a name that says that it is
secret is replaced, in place, whatever the format; what looks like a credential goes wherever it stands.
"""

from __future__ import annotations

import re

from introspect_cli.capture.environment.redact import (
    is_secret_name,
    is_strict_name,
    prose_without_credentials,
    without_credentials,
)
from introspect_cli.store.files.folders import REDACTED

_TEXTS = re.compile(
    r"(?P<comment>\#[^\n]*)"
    r"|(?P<prefix>\b[rbfuRBFU]{1,2})?(?:"
    r'"""(?P<long>[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*)"""'
    r"|'''(?P<long_>[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*)'''"
    r'|"(?P<short>[^"\\\n]*(?:\\.[^"\\\n]*)*)"'
    r"|'(?P<short_>[^'\\\n]*(?:\\.[^'\\\n]*)*)')",
    re.DOTALL,
)
_LONG = ("long", "long_")
_GROUPS = ("comment", *_LONG, "short", "short_")
_BEFORE = re.compile(r"(?P<name>[\w.-]+)['\"]?\s*\]?\s*(?P<sign>:[^=\n'\"]{0,60}=|=|:|,)\s*\(?\s*[rbfuRBFU]{0,2}\Z")
_FAR = 160
"""Characters before a string in which its name is looked for."""
_DEFAULT = re.compile(r"\b(?:default|value|fallback)\Z")
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DRAWN = re.compile(r"(?=[^\s]*\d)(?=[^\s]*[A-Za-z])[^\s{}<>%/]{16,}", re.DOTALL)
_COMMIT = re.compile(r"[0-9a-fA-F]{40}")
_OF_A_COMMIT = re.compile(r"(?i)commit|revision|\brev\b|sha|hash|ref\b|version|digest|checksum")


def source(text: str, patterns: tuple[str, ...] = ()) -> str:
    """Text of a source file with secrets in strings and comments replaced; all other code stays as it is.

    Args:
        text: of the file.
        patterns: globs of further secret names.
    """
    formed = prose_without_credentials(text) != text
    pieces = []
    done = 0
    for match in _TEXTS.finditer(text):
        group = next(name for name in _GROUPS if match[name] is not None)
        start, end = match.span(group)
        body = text[start:end]
        is_secret = group != "comment" and _is_secret(text, match.start(), body, patterns)
        clean = REDACTED if is_secret else _redact_body(body, group, formed=formed)
        if clean != body:
            pieces += [text[done:start], clean]
            done = end
    return "".join([*pieces, text[done:]]) if pieces else text


def _redact_body(body: str, group: str, *, formed: bool) -> str:
    """The body of a string or comment with credentials replaced.

    In a string on one line with a secret word in it and no brace, such as `host=db;password=...`, values after secret
    names are replaced, too.

    Args:
        body: what is inside the quotes, or the comment.
        group: which group of `_TEXTS` it is.
        formed: whether the file has any text that `prose_without_credentials` replaces; False spares looking for it.
    """
    # an expression in the braces of an f-string holds no secret and has to stay one
    if group not in _LONG and "{" not in body and is_strict_name(body):
        return without_credentials(body)
    return prose_without_credentials(body) if formed else body


def _is_secret(text: str, start: int, body: str, patterns: tuple[str, ...]) -> bool:
    """Whether a string in a source file is secret: by the name before it, or as 40 hex digits that are no commit's.

    After a name that is as often of something else (`token`, `key`) only a string of 16 characters or more with letters
    and digits is; one that is itself the name of a secret (`"HF_TOKEN"`) is not. A blank string, and one with a part
    that is redacted already, never is.

    Args:
        text: the file.
        start: where the string begins, with its prefix and quotes; 160 characters before are looked at.
        body: what is inside the quotes.
        patterns: globs of further secret names.
    """
    if not body or body.isspace() or REDACTED in body:
        return False
    around = text[max(start - _FAR, 0) : start]
    if _COMMIT.fullmatch(body):
        return not _OF_A_COMMIT.search(around.rpartition("\n")[2])
    if around.rstrip().rstrip("(rbfuRBFU").rstrip()[-1:] not in {"=", ":", ","}:
        return False
    before = _BEFORE.search(around)
    if before is None:
        return False
    name = before["name"]
    if _DEFAULT.search(name):  # add_argument("--password", default="...")
        line = around[: before.start()].rpartition("\n")[2] or around[: before.start()]
        return is_strict_name(line) and not _is_name_of_secret(body)
    if before["sign"] == "," and not around[: before.start("name")].endswith(("('", '("')):
        return False  # a list of names, or a call whose first argument is none
    if is_strict_name(name):
        return not _is_name_of_secret(body)
    return is_secret_name(name, patterns) and (not is_secret_name(name) or _DRAWN.fullmatch(body) is not None)


def _is_name_of_secret(body: str) -> bool:
    """Whether a string is the name of a secret, not one itself: a word in capitals with `_`, or a strict name."""
    in_capitals = body.isupper() and "_" in body and not any(letter.isdigit() for letter in body)
    return _PLAIN_NAME.fullmatch(body) is not None and (in_capitals or is_strict_name(body))


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
    """Text of a configuration file of any format, with values under secret names and credentials replaced.

    Booleans and null stay. `patterns` are globs of further secret names.
    """
    text = _ASSIGNED.sub(lambda match: _redacted_assignment(match, patterns), text)
    return prose_without_credentials(_redact_below_names(_redact_brackets(text, patterns), patterns))


def _redact_brackets(text: str, patterns: tuple[str, ...]) -> str:
    """Text with each value in the brackets after a secret name replaced, however deep: `"auth": {"user": "me"}`."""
    pieces, done = [], 0
    for match in _BRACKETED.finditer(text):
        if match.start() < done or not is_secret_name(match["name"], patterns):
            continue
        end = _closing_bracket(text, match.end())
        pieces += [text[done : match.end()], _ITEM.sub(_redacted_item, text[match.end() : end])]
        done = end
    return "".join([*pieces, text[done:]])


def _closing_bracket(text: str, start: int) -> int:
    """Index of the bracket that closes the one just before `start`, strings skipped; the text's length for none."""
    depth = 1
    for match in _BRACKET.finditer(text, start):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(match[0], 0)
        if not depth:
            return match.start()
    return len(text)


def _redacted_item(match: re.Match[str]) -> str:
    """Replacement for a match of `_ITEM`, a key or value in brackets: keys and flags stay, others keep their quotes."""
    value = match[0]
    if match["key"] or _is_flag(value) or value in {REDACTED, f'"{REDACTED}"'}:
        return value
    quote = value[0] if value[0] in "\"'" else '"'
    return f"{quote}{REDACTED}{quote}"


def _redacted_assignment(match: re.Match[str], patterns: tuple[str, ...]) -> str:
    """Replacement for `name: value` or `name = value`: redacted where the name's last part is secret, flags stay."""
    value = match["value"]
    if not is_secret_name(match["name"].rpartition(".")[2], patterns) or _is_flag(value):
        return match[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{match['before']}{quote}{REDACTED}{quote}"


def _is_flag(value: str) -> bool:
    """Whether a value is a boolean or null in any of the formats: `true`, `no`, `~`."""
    return value.strip().lower() in {"true", "false", "null", "none", "yes", "no", "~"}


def _redact_below_names(text: str, patterns: tuple[str, ...]) -> str:
    """Text with values replaced in lines indented below a secret name, and in sections (`[auth]`) of such a name.

    Items of a list (`- x`) count as below a name that is indented as far. Booleans and null stay.
    """
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
            lines[number] = _VALUE.sub(_redacted_value, line)
            continue
        opened = _OPENS.match(line)
        if opened is not None and is_secret_name(opened["name"], patterns):
            inside = indent
    return "\n".join(lines)


def _redacted_value(match: re.Match[str]) -> str:
    """Replacement for a match of `_VALUE`, a line below a secret name; flags, and what is redacted already, stay."""
    value = match["value"]
    if _is_flag(value) or REDACTED in value:
        return match[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{match['before']}{quote}{REDACTED}{quote}{match['after']}"
