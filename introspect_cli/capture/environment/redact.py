"""Keep secrets out of a store: one rule for every text that a run keeps, its files among them.

What a script is given, sets or raises may hold what is nobody else's business. A value is secret where its name says
so (`--api-key`, `password=...`, a batch's `['token']`), or where it looks like a credential: a token with a known
prefix, a password in a URL, what follows `Authorization:`. The value is replaced, the name stays, so that a diff can
still say which setting there is. Names that only sound alike (`max_tokens`, `tokenizer`, `author`) are none.

Code speaks of tokens, keys and sessions all the time, and what is left of it must still parse. So only strings and
comments are looked at, and behind names that are as often of something else (`token`, `key`) only what looks as if
somebody had drawn it by lot goes. In configuration, whatever a secret name introduces goes as a whole, in any format.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from typing import TYPE_CHECKING, Any

from introspect_cli.store.files import REDACTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_SHORT = 200
"""Characters of a text up to which it is remembered how it looks."""
_LONGEST_NAME = 200
"""Characters of a name that are looked at, on each side of the word that makes it secret."""
_PLACES = frozenset({"PWD", "OLDPWD"})
"""Variables that have the name of a password and hold a directory."""

_ALIKE = re.compile(
    r"(?i)(tokeni[sz]|tokens|n_token|token_?(?:id|type|len|count|num|size|dim|drop|embed|idx|index|level|mix|pos)"
    r"|(?:num|max|min|pad|eos|bos|unk|sep|cls|mask|special|image|end|start|per|first|last)_?token|author(?!iz)|secretary)"
)
_STRICT = r"secret|passw|passphrase|pwd|(?:api|access|private|account)[ _-]?key|credential|auth[ _-]?token"
_STRICT_NAME = re.compile(rf"(?i)({_STRICT})")
_SECRET_NAME = re.compile(
    rf"(?i)({_STRICT}|token|private|auth|cookie|session|signature|_key$|^key$|^sig$|dsn$|connection_?string|webhook)"
)

_NOT_WITHIN = r"(?<![A-Za-z0-9])"
_PREFIXED = (
    r"A(?:KIA|SIA|ROA|IDA)[0-9A-Z]{16}"  # AWS
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|hf_[A-Za-z0-9]{20,}|api_org_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|[srp]k-[A-Za-z0-9_-]{16,}|[srp]k_(?:live|test)_[A-Za-z0-9]{16,}|whsec_[A-Za-z0-9+/=]{16,}"
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,}"  # Slack
    r"|gl(?:pat|dt|rt|ptt|cbt|soat)-[\w-]{16,}"  # GitLab
    r"|(?:npm|dckr_pat|dop_v1|doo_v1|sbp|nvapi|ntn|lin_api|shp(?:at|ca|pa|ss)|gsk|r8|pul|fo1|figd|sntrys|secret|tvly)"
    r"[_-][A-Za-z0-9_-]{20,}"
    r"|pypi-[A-Za-z0-9_-]{20,}|xai-[A-Za-z0-9]{20,}|dapi[0-9a-f]{32}|dp\.(?:pt|st|ct)\.[A-Za-z0-9]{20,}"
    r"|hv[sb]\.[A-Za-z0-9_-]{20,}|SG\.[\w-]{16,}\.[\w-]{16,}|SK[0-9a-f]{32}|key-[0-9a-z]{32}|ya29\.[\w-]{20,}"
    r"|AIza[\w-]{30,}|GOCSPX-[\w-]{20,}|ATATT[\w=-]{20,}|PMAK-[\w-]{20,}|NRAK-[A-Z0-9]{20,}|sq0[a-z]{3}-[\w-]{20,}"
    r"|\d{8,10}:AA[\w-]{30,}|EAAC[A-Za-z0-9]{20,}|AGE-SECRET-KEY-1[0-9A-Z]{20,}|T3BlbkFJ\w{10,}"
    r"|eyJ[\w-]{8,1500}\.eyJ[\w-]{8,}(?:\.[\w-]*)?"  # JSON web tokens
)
_TOKENS = re.compile(rf"{_NOT_WITHIN}({_PREFIXED}|[0-9a-fA-F]{{40}}(?![0-9A-Za-z]))")
_PREFIXED_TOKENS = re.compile(rf"{_NOT_WITHIN}({_PREFIXED})")
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]*-----|\Z)", re.DOTALL)
_WEBHOOK = re.compile(
    r"(https://(?:hooks\.slack\.com/(?:services|workflows)|discord(?:app)?\.com/api/webhooks)/)[\w/-]+"
)
_URL_USER = re.compile(r"(?<=[a-zA-Z0-9+.-])(://)(?:[^/\s:@'\"]*:[^\s/'\"]*|[^/\s:@'\"]{16,})@")
_HEADER = re.compile(
    r"(?i)((?:proxy-)?authorization['\"]?\s*[:=,]\s*['\"]?(?:(?:bearer|basic|token|digest|negotiate|apikey)\s+)?"
    r"|\bbearer\s+)(?=[^\s'\"])[^\s'\",;]{6,}"
)
_COOKIE = re.compile(r"(?i)((?:set-)?cookie['\"]?\s*[:=]\s*)[^\n]+")
# Both begin at the word and not at the name: to look for a name's end from each of its characters takes hours over
# a text of a million.
_PAIR = re.compile(
    r"(?P<name>(?:token|sig|signature|webhook|dsn|" + _STRICT + rf")[\w-]{{0,{_LONGEST_NAME}}}['\"]?)"
    r"(?P<sign>\s*(?:=>?|:(?!//)|\bis\b(?!\s+(?:not|missing|required|invalid|wrong|empty|expired|set|unset)\b))\s*)"
    r"(?P<value>b?\"[^\"]*\"|b?'[^']*'|[^\s,;&)\]}'\"]+)",
    re.IGNORECASE,
)
_AFTER_OPTION = re.compile(
    rf"(?P<name>(?:token|webhook|{_STRICT})[\w-]{{0,{_LONGEST_NAME}}})(?P<sign>\s+)(?P<value>[^\s-]\S*)", re.IGNORECASE
)
_BEGUN = re.compile(r"[\w.-]*\Z")
_NAME = re.compile(r"[A-Za-z0-9_.]*")
_NUMBER = re.compile(r"[+-]?\d*\.?\d+(?:e[+-]?\d+)?", re.IGNORECASE)
_FLAG = re.compile(r"true|false|none|null", re.IGNORECASE)
_KEY = re.compile(r"\['((?:[^'\\]|\\.)*)'\]|\[\"((?:[^\"\\]|\\.)*)\"\]|\.(\w+)")
_OPTION = re.compile(r"^--?([A-Za-z][\w.-]*)(=(.*))?$", re.DOTALL)


def is_secret_name(name: str, patterns: tuple[str, ...] = ()) -> bool:
    """Whether a name is one of a secret: `password`, `auth`, `api-key`; not `max_tokens`, `PWD` or `OLDPWD`.

    Args:
        name: of an option, variable or key; case does not matter.
        patterns: globs of further secret names, which are asked first.
    """
    plain, is_asked = name.replace("-", "_"), any(fnmatch.fnmatchcase(name.lower(), glob.lower()) for glob in patterns)
    looks_secret = _STRICT_NAME.search(plain) or _SECRET_NAME.search(_ALIKE.sub("", plain))
    return is_asked or bool(looks_secret and plain not in _PLACES)


@functools.lru_cache(maxsize=4096)
def is_secret_path(path: str) -> bool:
    """Whether any key in a value's path is a secret name, such as `['auth']['user']`; cached."""
    return any(is_secret_name(next(filter(None, keys), "")) for keys in _KEY.findall(path))


def value(name: str, text: str, patterns: tuple[str, ...] = ()) -> str:
    """Text of a named value for a store.

    `REDACTED` if the name is secret, else the text with parts replaced that look like credentials.

    Args:
        name: the value's name.
        text: the value.
        patterns: globs of further secret names.
    """
    return REDACTED if is_secret_name(name, patterns) else without_credentials(text)


def plain(given: object, *, secret: bool) -> object:
    """A plain value for a store, with secrets replaced; None and booleans stay as they are.

    Args:
        given: the value.
        secret: whether its name is secret: then it becomes `REDACTED`, whatever it is. Otherwise only parts of a text
            that look like credentials are replaced, and bytes or a set that has such a part become `REDACTED`.
    """
    if given is None or isinstance(given, bool):
        return given
    if secret:
        return REDACTED
    if isinstance(given, str):
        return without_credentials(given)
    if type(given) in (bytes, set, frozenset):
        text = repr(given)
        return given if without_credentials(text) == text else REDACTED
    return given


def without_credentials(text: str) -> str:
    """Text with each part that looks like a credential replaced, and each value after a secret name (`token=abc`).

    So are 40 hex digits, even those of a commit. Texts of at most 200 characters are cached.
    """
    return _redact_text(text) if len(text) <= _SHORT else _redact_text.__wrapped__(text)


@functools.lru_cache(maxsize=256)  # the same few texts come every step
def _redact_text(text: str) -> str:
    """`without_credentials`, cached."""
    if _NAME.fullmatch(text):
        return _TOKENS.sub(REDACTED, text)  # there is no URL in it, no key, and nothing behind a name
    text = _COOKIE.sub(rf"\g<1>{REDACTED}", _without_keys_and_logins(text))
    text = _TOKENS.sub(REDACTED, text)
    return _AFTER_OPTION.sub(_redacted_option, _PAIR.sub(_redacted_pair, text))


def _without_keys_and_logins(text: str, again: Callable[[re.Match[str]], bool] = lambda _: True) -> str:
    """Text with private keys, webhook URLs, logins in URLs and authorization headers replaced.

    A login in a URL is a user with a password, or 16 characters without one.

    Args:
        text: the text.
        again: whether a match, of a login in a URL or of a header's value, is a credential; all are by default.
    """
    text = _PRIVATE_KEY.sub(REDACTED, text)
    text = _WEBHOOK.sub(rf"\g<1>{REDACTED}", text)
    text = _URL_USER.sub(lambda match: f"{match[1]}{REDACTED}@" if again(match) else match[0], text)
    if not any(word in text.lower() for word in ("authorization", "bearer")):
        return text  # most texts of a program have none, and the pattern begins anywhere
    return _HEADER.sub(lambda match: match[1] + REDACTED if again(match) else match[0], text)


def prose_without_credentials(text: str) -> str:
    """Text of a person or program with what is surely a credential replaced.

    Unlike `without_credentials` it leaves values after names, cookies, 40 hex digits, logins in URLs that have a brace,
    and values of headers that have a brace or are letters only.
    """
    return _PREFIXED_TOKENS.sub(REDACTED, _without_keys_and_logins(text, _is_credential))


def _is_credential(match: re.Match[str]) -> bool:
    """Whether what follows group 1 of a match of `_URL_USER` or `_HEADER` is a credential.

    It has no brace and, in a header, is not letters only. Of a URL it has the `@`, so that it is never letters only.
    """
    value = match[0][len(match[1]) :]
    return "{" not in value and not value.isalpha()


def _start_of_name(match: re.Match[str]) -> str:
    """What of a name stands before the matched word in it, from at most 200 characters before; "" for nothing."""
    before = match.string[max(match.start() - _LONGEST_NAME, 0) : match.start()]
    begun = _BEGUN.search(before)
    return begun[0] if begun else ""


def _redacted_option(match: re.Match[str]) -> str:
    """Replacement for a match of `_AFTER_OPTION`: as `_redacted_pair` where it is an option (`--token abc`).

    It is one where a hyphen stands in the name before the matched word. Otherwise the match as it is.
    """
    return _redacted_pair(match) if "-" in _start_of_name(match).rpartition(".")[2] else match[0]


def _redacted_pair(match: re.Match[str]) -> str:
    """Replacement for a match of a name and its value: `name=REDACTED` where the whole name is secret.

    As it is for flags (`true`, `none`), for numbers unless the name is strict, and for a value redacted before.
    """
    name, shown = _start_of_name(match) + match["name"], match["value"]
    strict = _STRICT_NAME.search(name) is not None
    harmless = _FLAG.fullmatch(shown) or (_NUMBER.fullmatch(shown) and not strict)
    if REDACTED in shown or harmless or not is_secret_name(name.strip("'\"")):
        return match[0]
    return f"{match['name']}{match['sign']}{REDACTED}"


def nested_without_secrets(data: Any, patterns: tuple[str, ...] = ()) -> Any:
    """Nested plain data with values under a secret key replaced, and credentials in all texts; tuples become lists.

    Under a secret key, None and booleans stay. Keys themselves are not changed.

    Args:
        data: dicts, lists, tuples, and plain values.
        patterns: globs of further secret keys.
    """
    if isinstance(data, dict):
        return {
            key: plain(item, secret=True)
            if isinstance(key, str) and is_secret_name(key, patterns)
            else nested_without_secrets(item, patterns)
            for key, item in data.items()
        }
    if isinstance(data, (list, tuple)):
        return [nested_without_secrets(item, patterns) for item in data]
    return without_credentials(data) if isinstance(data, str) else data


def environment(variables: Mapping[str, str], patterns: tuple[str, ...] = ()) -> dict[str, str]:
    """Environment variables, sorted by name, secret values replaced; `patterns` are globs of further names."""
    return {name: value(name, text, patterns) for name, text in sorted(variables.items())}


def arguments(argv: Iterable[str], patterns: tuple[str, ...] = ()) -> list[str]:
    """A command line with values of secret options replaced (`--token X`, `--token=X`), and credentials in all others.

    A word that looks like an option is never the value of the one before it.

    Args:
        argv: the words.
        patterns: globs of further secret names, without hyphens at their beginning.
    """
    shown = []
    is_next = False
    for argument in argv:
        option = _OPTION.match(argument)
        is_secret = option is not None and is_secret_name(option[1], patterns)
        name, sign, _ = argument.partition("=")
        if is_next and option is None:
            shown.append(REDACTED)
        else:
            shown.append(f"{name}={REDACTED}" if is_secret and sign else without_credentials(argument))
        is_next = is_secret and not sign
    return shown


# --- files that a run keeps: its sources, and its configuration

_TEXTS = re.compile(
    r"(?P<comment>\#[^\n]*)"
    r'|"""(?P<long>[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*)"""'
    r"|'''(?P<long_>[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*)'''"
    r'|"(?P<short>[^"\\\n]*(?:\\.[^"\\\n]*)*)"'
    r"|'(?P<short_>[^'\\\n]*(?:\\.[^'\\\n]*)*)'",
    re.DOTALL,
)
_BEFORE = re.compile(
    r"(?:(?P<name>[\w.-]+)['\"]?\s*\]?\s*(?::[^=\n'\"]{0,60}=|=|:)|\(['\"](?P<asked>[\w.-]+)['\"]\s*,)"
    r"\s*\(?\s*[rbfuRBFU]{0,2}\Z"
)
_FAR = 160
"""Characters before a string in which its name is looked for."""
_DEFAULT = re.compile(r"\b(?:default|value|fallback)\Z")
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

    def cleaned(match: re.Match[str]) -> str:
        """A string or comment without secrets."""
        group = str(match.lastgroup)
        body = clean = match[group]
        if group != "comment" and _is_secret(text, match.start(), body, patterns):
            clean = REDACTED
        elif group.startswith("short") and "{" not in body and _STRICT_NAME.search(body):
            clean = without_credentials(body)  # what is in the braces of an f-string has to stay an expression
        elif formed:
            clean = prose_without_credentials(body)
        start = match.start(group) - match.start()
        return match[0][:start] + clean + match[0][start + len(body) :]

    return _TEXTS.sub(cleaned, text)


def _is_secret(text: str, start: int, body: str, patterns: tuple[str, ...]) -> bool:
    """Whether the name before a string says that it is a secret, or it is 40 hex digits and no commit.

    The name is that of a variable, key, argument or subscript, the first argument of the call, or, for a default, any
    word of its line. Behind a name that is no strict one, the string must look drawn by lot: 16 characters or more,
    with letters and digits.

    Args:
        text: of the file.
        start: where the string begins in it.
        body: of the string.
        patterns: globs of further secret names.
    """
    if not body or body.isspace() or REDACTED in body:
        return False
    around = text[max(start - _FAR, 0) : start]
    if _COMMIT.fullmatch(body):
        return not _OF_A_COMMIT.search(around.rpartition("\n")[2])
    if around.rstrip().rstrip("(rbfuRBFU").rstrip()[-1:] not in {"=", ":", ","}:
        return False  # quickly: this is asked of each string
    if (before := _BEFORE.search(around)) is None:
        return False
    name = before["name"] or before["asked"]
    if _DEFAULT.search(name):  # add_argument("--password", default="...")
        name = around[: before.start()].rpartition("\n")[2] or around[: before.start()]
    by_lot = _DRAWN.fullmatch(body) is not None
    strict = _STRICT_NAME.search(name.replace("-", "_")) is not None
    return strict or (is_secret_name(name, patterns) and (by_lot or not is_secret_name(name)))


_INTRODUCED = re.compile(
    r"(?:^|(?<=[{,\[\s]))['\"]?(?P<name>[A-Za-z_][\w.-]{0,200})['\"]?[ \t]{0,20}[:=][ \t]{0,200}"
    r"|^[ \t]{0,200}\[+(?P<section>[^\]\n]{1,200})\]+[ \t]*$",
    re.MULTILINE,
)
"""A key before its value, or the heading of a section."""
_QUOTED = r"\"{3}.*?\"{3}|'{3}.*?'{3}|\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"
_BRACKET = re.compile(rf"{_QUOTED}|[{{}}\[\]]", re.DOTALL)
_SCALAR = re.compile(rf"{_QUOTED}|[^\n]*?(?=,?[ \t]*$)", re.MULTILINE | re.DOTALL)
_FLOW_SCALAR = re.compile(rf"{_QUOTED}|[^\n,}}\]]*", re.DOTALL)
_HEADING = re.compile(r"^[ \t]*\[", re.MULTILINE)
_FLAGS = frozenset({"true", "false", "null", "none", "yes", "no", "~"})


def config(text: str, patterns: tuple[str, ...] = ()) -> str:
    """Text of a configuration file in which what a secret name introduces is replaced, whatever the format.

    That is a value, a bracket with all in it, the lines below a key, or a section. Lines keep their numbers, and flags
    (true, null) stay.

    Args:
        text: of the file.
        patterns: globs of further secret names.
    """
    pieces, done = [], 0
    for match in _INTRODUCED.finditer(text):
        names = (match["section"] or match["name"]).split(".")
        if match.start() < done or not any(is_secret_name(name.strip("'\" "), patterns) for name in names):
            continue
        end = _end_of_value(text, match)
        value = text[match.end() : end]
        if value.strip() and value.strip().lower() not in _FLAGS:
            blank = " " * match[0].endswith(":")  # YAML asks for one
            shown = "" if match["section"] else f'{blank}"{REDACTED}"'
            pieces += [text[done : match.end()], shown, "\n" * value.count("\n")]
            done = end
    return prose_without_credentials("".join([*pieces, text[done:]]))


def _end_of_value(text: str, match: re.Match[str]) -> int:
    """Where what a key or heading introduces ends: a section, a bracket, or a value with the lines indented below."""
    start = match.end()
    if match["section"]:
        heading = _HEADING.search(text, start)
        return heading.start() - 1 if heading is not None else len(text)
    if text[start : start + 1] in {"{", "["}:
        depth = 0
        for bracket in _BRACKET.finditer(text, start):
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(bracket[0], 0)
            if not depth:
                return bracket.end()
        return len(text)
    line = text[text.rfind("\n", 0, match.start()) + 1 : start]
    in_flow = text.lstrip().startswith("{") or "{" in line or "[" in line
    scalar = (_FLOW_SCALAR if in_flow else _SCALAR).match(text, start)
    end = start if scalar is None else scalar.end()
    indent = len(line) - len(line.lstrip())
    # blank lines, those that are indented further, and items of a list
    inside = rf",?[ \t]*\n(?:[ \t]*(?=\n|\Z)|[ \t]{{{indent + 1}}}[^\n]*|[ \t]{{{indent}}}- [^\n]*)"
    below = None if in_flow else re.compile(rf"(?:{inside})+").match(text, end)
    return end if below is None else below.end()
