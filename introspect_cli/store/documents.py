"""Documents: the manifest and the settings in YAML, and what a training framework calls its steps, in JSON.

People edit and exchange these, `yaml.safe_load` expands aliases without limit and its C parser recurses without limit,
and a dumper meets whatever objects a script left in its settings. Documents are reduced to plain data before they are
written, and read event by event into plain data with limits on size, depth and number of nodes; tags, anchors, aliases
and several documents in one file are refused, and never written.
"""

from __future__ import annotations

import json
import math
import numbers
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import yaml

from introspect_cli.labels import NAMES, NUMBERED
from introspect_cli.store.files import DamageError
from introspect_cli.texts import bounded

if TYPE_CHECKING:
    from introspect_cli.labels import Label, Labels


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

_CHECK = b"# %s of run %s, crc32 %08x\n"
_MAX_DEPTH = 64
_LONGEST = 1 << 15  # characters of a text that a reader gives; a PATH has a tenth
_MAX_NODES = 200_000
_MAX_DIGITS = 1000  # int() is quadratic, and refuses more than 4300
_NUMBERS = frozenset({"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"})
_CONSTRUCTED = _NUMBERS | {"tag:yaml.org,2002:bool", "tag:yaml.org,2002:null"}

_WORD = re.compile(r"[\w.-]{1,40}")
_MOST = 1 << 62


class PlainDumper(_Dumper):  # type: ignore[misc] # whichever dumper this PyYAML was built with
    """A safe dumper that writes no anchors."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 -- the signature is PyYAML's
        """Always True: a value that occurs twice is written twice, without a YAML anchor."""
        return True


def plain(value: object, depth: int = 0) -> Any:
    """`value` as dicts, lists, texts, numbers, booleans and None; of anything else its `str`.

    Tuples become lists, sets sorted lists, integers of 3000 bits or more hexadecimal texts, lone surrogates a backslash
    and their number, and whatever is no text or number and lies 62 levels deep or more `...`. Of keys that become equal
    the last wins.

    Args:
        value: any object.
        depth: how many levels it lies below the outermost one.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value).encode("utf-8", "backslashreplace").decode()
    if isinstance(value, numbers.Integral):
        number = int(value)
        return number if abs(number).bit_length() < 3 * _MAX_DIGITS else hex(number)
    if isinstance(value, numbers.Real):
        return float(value)
    if depth >= _MAX_DEPTH - 2:
        return "..."
    if isinstance(value, Mapping):
        return {_key(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, AbstractSet):
        return sorted((plain(item, depth + 1) for item in value), key=repr)
    return plain(str(value))


def _key(key: object) -> Any:
    return plain(key) if isinstance(key, (str, int, float, type(None))) else plain(str(key))


def dump(value: object, name: str, run_id: str) -> bytes:
    """`value` as one YAML document, with a comment at its end by which `check` knows it.

    Args:
        value: reduced to plain data (`plain`) first.
        name: of the file, which the comment repeats.
        run_id: 32 hex digits, which it repeats too.
    """
    text: str = yaml.dump(
        plain(value), Dumper=PlainDumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=1000
    )
    data = text.encode()
    return data + _check_line(data, name, run_id)


def check(data: bytes, name: str, run_id: object, path: str) -> None:
    """Raise DamageError unless the comment at the document's end fits its bytes, its `name` and `run_id`."""
    end = len(data) - len(_check_line(b"", name, "0" * 32))
    if end < 0 or data[end:] != _check_line(data[:end], name, str(run_id)):
        raise DamageError(path, "it was altered or cut short, or belongs elsewhere")


def _check_line(data: bytes, name: str, run_id: str) -> bytes:
    return _CHECK % (name.encode("ascii", "replace"), run_id.encode("ascii", "replace"), zlib.crc32(data))


def sanitized(value: Any) -> Any:
    """A document's plain data with every text, keys too, bounded to 32768 characters and cleaned by `texts.bounded`."""
    if isinstance(value, str):
        return bounded(value, _LONGEST)
    if isinstance(value, dict):
        return {sanitized(key): sanitized(item) for key, item in value.items()}
    return [sanitized(item) for item in value] if isinstance(value, list) else value


def load(data: bytes, path: str) -> Any:
    """The plain data of one YAML document, its size already bounded by the caller; None where it is empty.

    Raises:
        DamageError: it is not valid YAML, or holds what a store never does: anchors, aliases, tags, a repeated key,
            several documents, over 64 levels or 200,000 values.
    """
    loader = None
    try:
        loader = _Loader(data)
        return _Builder(loader, path).document()
    except DamageError:
        raise
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        raise DamageError(path, f"it is not valid YAML{where}") from None
    except (ValueError, OverflowError, RecursionError, UnicodeError):
        raise DamageError(path, "it holds a value that cannot be read") from None
    finally:
        if loader is not None:
            loader.dispose()


class _Builder:
    """Builds plain data from the events of one YAML document; refuses anchors, aliases, tags and repeated keys."""

    def __init__(self, loader: Any, path: str) -> None:
        """Keep the loader, whose events `document` reads; `path` is for messages."""
        self._loader = loader
        self._path = path
        self._nodes = 0

    def document(self) -> Any:
        """The stream's only document; None where the stream is empty, DamageError where it holds more than one."""
        root: list[Any] = []
        stack: list[list[Any]] = [root]
        documents = 0
        while self._loader.check_event():
            event = self._loader.get_event()
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise DamageError(self._path, "it holds several documents")
            elif isinstance(event, (yaml.SequenceStartEvent, yaml.MappingStartEvent)):
                self._check(event, len(stack))
                stack.append([])
            elif isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
                done = stack.pop()
                stack[-1].append(done if isinstance(event, yaml.SequenceEndEvent) else self._mapping(done))
            elif isinstance(event, yaml.ScalarEvent):
                self._check(event, len(stack))
                stack[-1].append(self._scalar(event))
            elif isinstance(event, yaml.AliasEvent):
                raise DamageError(self._path, "it uses YAML aliases, which a store never does")
        return root[0] if root else None

    def _check(self, event: Any, depth: int) -> None:
        """Count a value; DamageError for a tag or an anchor, and over `_MAX_DEPTH` levels or `_MAX_NODES` values."""
        self._nodes += 1
        if depth > _MAX_DEPTH or self._nodes > _MAX_NODES:
            raise DamageError(self._path, "it is nested too deeply or holds too many values")
        if event.anchor is not None or event.tag not in (None, "!"):
            raise DamageError(self._path, "it uses YAML tags or anchors, which a store never does")

    def _mapping(self, items: list[Any]) -> dict[Any, Any]:
        """A dict from alternating keys and values; DamageError for a key that is a list or dict, or comes twice."""
        keys, values = items[::2], items[1::2]
        if any(isinstance(key, (list, dict)) for key in keys):
            raise DamageError(self._path, "it has a list or a mapping as a key")
        out = dict(zip(keys, values, strict=True))
        if len(out) != len(keys):
            raise DamageError(self._path, "it names a key twice")
        return out

    def _scalar(self, event: Any) -> Any:
        """A number, boolean, None or text, by YAML's rules; DamageError for a number over `_MAX_DIGITS` digits."""
        tag = self._loader.resolve(yaml.ScalarNode, event.value, event.implicit)
        if tag in _NUMBERS and len(event.value) > _MAX_DIGITS:
            raise DamageError(self._path, "it holds a number of too many digits")
        if tag not in _CONSTRUCTED:
            return event.value
        value = self._loader.construct_object(yaml.ScalarNode(tag, event.value))
        return math.nan if isinstance(value, float) and math.isnan(value) else value


def gpu_names(gpus: Sequence[Mapping[str, Any]]) -> str:
    """The GPUs that a run's settings list, as words: `2 x NVIDIA H100 80GB HBM3`.

    Names are in the order in which they first occur, with `GPU` for one without a name; "" without GPUs.
    """
    counts = Counter(str(gpu.get("name", "GPU")) for gpu in gpus)
    return ", ".join(name if number == 1 else f"{number} x {name}" for name, number in counts.items())


# --- labels of steps


def encode_labels(labels: Labels) -> bytes:
    """The labels of a step (the framework's names for it, such as epoch and batch) as JSON."""
    return json.dumps(labels, separators=(",", ":")).encode()


def decode_labels(data: bytes, path: str) -> dict[str, Label]:
    """The labels of a step, by name; only those in `NAMES`, in that order.

    A label whose value no capture could have written is left out.

    Args:
        data: JSON.
        path: of the file, for the error.

    Raises:
        DamageError: it is no JSON object.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise DamageError(path, "the labels of a step cannot be read")
    return {name: label for name in NAMES if (label := _label(name, document.get(name))) is not None}


def _label(name: str, value: Any) -> Label | None:
    """`value` where a capture could have written it as the label `name`; None for anything else.

    A label in `NUMBERED` is an integer below 2**62, a pair of these (given as a tuple) or a finite float; any other is
    a text of 1 to 40 letters, digits and `_.-`.
    """
    if name not in NUMBERED:
        return value if isinstance(value, str) and _WORD.fullmatch(value) else None
    if isinstance(value, list):
        if len(value) != 2 or not all(type(end) is int and abs(end) < _MOST for end in value):
            return None
        return value[0], value[1]
    if type(value) is int:
        return value if abs(value) < _MOST else None
    return value if isinstance(value, float) and math.isfinite(value) else None
