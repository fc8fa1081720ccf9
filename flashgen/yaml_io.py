"""Strict YAML: the same small subset on every loader, with line numbers in every refusal. No tags, anchors or YAML 1.1 surprises.

Plain scalars are `null`, `true`, `false`, decimal integers (no leading zero, no underscore), finite decimal floats, else text. What YAML
1.1 would turn into other types (`NO`, `017`, `1_000`, `1:30`, dates, `.inf`) stays text, so that a typed schema refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from flashgen.errors import FlashgenError, InvalidSpace

INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
FLOAT = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
WORDS: dict[str, Any] = {"null": None, "~": None, "": None, "true": True, "false": False}
OTHER_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})  # other YAML readers give these a meaning
SAFE_TEXT = re.compile(r"[A-Za-z_][A-Za-z0-9_./+=-]*|-{1,2}[A-Za-z][A-Za-z0-9_.+=-]*")
MAX_DIGITS = 18  # fits 64 bits; also far below the length at which int() itself refuses
MAX_DEPTH = 32
MAX_CHARACTERS = 64 * 2**20
MAX_VALUES = 2**20  # keys, scalars and containers of one document; bounds time and memory whatever the text

Path = tuple[str | int, ...]


class Flow(dict[str, Any]):
    """A mapping that `dump` writes on one line."""


def load_strict(text: str, origin: str, *, error: type[FlashgenError] = InvalidSpace, lines: dict[Path, int] | None = None) -> Any:
    """The one document in `text` as dicts with text keys, lists, and scalars.

    `origin` names the file in messages. `lines`, when given, receives the 1-based line of every node by its path.
    Raises `error` for syntax errors, duplicate keys, tags, anchors, aliases, non-text keys, too deep nesting, too many values and huge
    integers.
    """
    if len(text) > MAX_CHARACTERS:
        raise error(f"{origin}: {len(text)} characters; at most {MAX_CHARACTERS} are read. Split the file.")
    builder = _Builder(origin, error, lines)
    try:
        for event in yaml.parse(text, Loader=loader()):
            builder.feed(event)
    except yaml.YAMLError as problem:
        raise error(f"{origin}: not readable as YAML: {_one_line(problem)}. Correct or remove the file.") from None
    return builder.document


def loader() -> Any:
    """The parser class: libyaml where PyYAML was built with it, else pure Python. Both feed the same builder."""
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def dump(document: Mapping[str, Any]) -> str:
    """`document` as YAML text that `load_strict` reads back exactly. `Flow` mappings and lists of scalars stay on one line."""
    out: list[str] = []
    _block(document, 0, out)
    return "\n".join(out) + "\n"


class _Builder:
    """Turns parser events into values with an explicit stack, so that no input can exhaust the interpreter's."""

    def __init__(self, origin: str, error: type[FlashgenError], lines: dict[Path, int] | None) -> None:
        self.origin = origin
        self.error = error
        self.lines = lines
        self.document: Any = None
        self.documents = 0
        self.values = 0
        self.stack: list[_Open] = []

    def feed(self, event: Any) -> None:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            self.refuse(line, f"alias *{event.anchor}; write the value out")
        if isinstance(event, yaml.DocumentStartEvent):
            self.documents += 1
            if self.documents > 1:
                self.refuse(line, "a second document; one document per file")
        if isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)):
            self.check_plain(event, line)
            self.count(line)
        if isinstance(event, yaml.ScalarEvent):
            self.scalar(event, line)
        elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            self.open(event, line)
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            self.stack.pop()

    def count(self, line: int) -> None:
        self.values += 1
        if self.values > MAX_VALUES:
            self.refuse(line, f"more than {MAX_VALUES} values; split the file")

    def check_plain(self, event: Any, line: int) -> None:
        if event.anchor is not None:
            self.refuse(line, f"anchor &{event.anchor}; write values out instead of sharing them")
        if event.tag is not None:
            self.refuse(line, f"tag {event.tag!r}; only plain text, numbers, true, false and null are read")

    def open(self, event: Any, line: int) -> None:
        if len(self.stack) >= MAX_DEPTH:
            self.refuse(line, f"nesting deeper than {MAX_DEPTH} levels")
        container: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
        top = self.stack[-1] if self.stack else None
        if top is not None and top.expects_key:
            self.refuse(line, "a mapping key that is not plain text")
        path = self.add(container, line)
        self.stack.append(_Open(container, path))

    def scalar(self, event: Any, line: int) -> None:
        top = self.stack[-1] if self.stack else None
        if top is not None and top.expects_key:
            self.key(top, event.value, line)
            return
        self.add(self.value(event, line), line)

    def key(self, top: _Open, key: str, line: int) -> None:
        if key in top.key_lines:
            self.refuse(line, f"key {key!r} again (first on line {top.key_lines[key]}); keep one of the two")
        top.key_lines[key] = line
        top.key = key

    def value(self, event: Any, line: int) -> Any:
        text: str = event.value
        if event.style in ("'", '"', "|", ">"):
            return text
        if text in WORDS:
            return WORDS[text]
        if INTEGER.fullmatch(text):
            if len(text.lstrip("-")) > MAX_DIGITS:
                self.refuse(line, f"an integer of {len(text.lstrip('-'))} digits; at most {MAX_DIGITS} are read")
            return int(text)
        if FLOAT.fullmatch(text):
            number = float(text)
            if number in (float("inf"), float("-inf")):
                self.refuse(line, f"a number beyond the range of a float: {text[:40]}")
            return number
        return text

    def add(self, value: Any, line: int) -> Path:
        if not self.stack:
            self.document = value
            path: Path = ()
        else:
            top = self.stack[-1]
            path = top.add(value)
        if self.lines is not None:
            self.lines[path] = line
        return path

    def refuse(self, line: int, what: str) -> None:
        raise self.error(f"{self.origin}:{line}: {what}.")


class _Open:
    """A mapping or sequence whose end has not come yet."""

    __slots__ = ("container", "key", "key_lines", "path")

    def __init__(self, container: Any, path: Path) -> None:
        self.container = container
        self.path = path
        self.key: str | None = None
        self.key_lines: dict[str, int] = {}

    @property
    def expects_key(self) -> bool:
        return isinstance(self.container, dict) and self.key is None

    def add(self, value: Any) -> Path:
        if isinstance(self.container, list):
            self.container.append(value)
            return (*self.path, len(self.container) - 1)
        key = self.key
        assert key is not None
        self.container[key] = value
        self.key = None
        return (*self.path, key)


def _block(value: Mapping[str, Any], indent: int, out: list[str], first: str = "") -> None:
    for number, (key, item) in enumerate(value.items()):
        lead = first if first and number == 0 else " " * indent
        name = f"{lead}{_scalar(key)}:"
        if isinstance(item, Mapping) and not isinstance(item, Flow) and item:
            out.append(name)
            _block(item, indent + 2, out)
        elif _is_list(item) and any(isinstance(element, Mapping) and not isinstance(element, Flow) for element in item):
            out.append(name)
            for element in item:
                _block(element, indent + 4, out, first=" " * (indent + 2) + "- ")
        else:
            out.append(f"{name} {_inline(item)}")


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(key)}: {_inline(item)}" for key, item in value.items()) + "}"
    if _is_list(value):
        return "[" + ", ".join(_inline(item) for item in value) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError(f"YAML of this project holds finite numbers only; got {value}.")
        return repr(value)
    return _text(str(value))


def _text(value: str) -> str:
    if SAFE_TEXT.fullmatch(value) and value.lower() not in OTHER_WORDS:
        return value
    escaped = (character if " " <= character <= "~" else _escape(character) for character in value)
    return '"' + "".join("\\" + c if c in '"\\' and len(c) == 1 else c for c in escaped) + '"'


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _one_line(problem: BaseException) -> str:
    return " ".join(str(problem).split()).rstrip(".")
