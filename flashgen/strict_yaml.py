"""A small, safe YAML: mappings, sequences, strings, plain integers, decimals, true, false and null. Nothing else is read.

Refused, with the line: duplicate keys, tags, anchors and aliases, several documents, keys that are not strings, oversized integers and files.
YAML 1.1's surprises are off: `no` and `1:30` are strings, `017` and `1_000` are not integers. No object is ever constructed from a tag.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml

from flashgen.errors import FlashgenError

MAX_BYTES = 64 * 2**20
MAX_DEPTH = 40
MAX_DIGITS = 18  # fits a signed 64-bit integer
LINES_DEPTH = 3

Path = tuple[str | int, ...]

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the pure loader reads the same language, slower
_CORE = "tag:yaml.org,2002:"
_RESOLVERS = (
    ("int", r"-?[0-9]+", "-0123456789"),
    ("float", r"-?[0-9]+\.[0-9]+(?:[eE][-+]?[0-9]+)?", "-0123456789"),
    ("bool", r"true|false", "tf"),
    ("null", r"null|~|", ["n", "~", ""]),
)


class _Loader(_Base):  # type: ignore[misc]
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  PyYAML's own attribute, filled below


for _tag, _pattern, _first in _RESOLVERS:
    for _loader in (_Loader,):
        _loader.add_implicit_resolver(_CORE + _tag, re.compile(rf"(?:{_pattern})\Z"), list(_first))


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed file: its value, and the line (from 1) on which each node down to three levels deep starts."""

    value: Any
    lines: dict[Path, int] = field(default_factory=dict)


def parse(text: str, name: str, error: type[FlashgenError]) -> Document:
    """Read one document. `name` stands in messages; anything refused raises `error` with file, line and reason."""
    if len(text) > MAX_BYTES:
        raise error(f"{name}: at most {MAX_BYTES} characters are read; the file has {len(text)}.")
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.YAMLError as problem:
        raise error(f"{name}: not readable as YAML: {_one_line(problem)}") from None
    except RecursionError:
        raise error(f"{name}: nested deeper than {MAX_DEPTH} levels.") from None
    return _Builder(name, error).document(node)


def _one_line(problem: yaml.YAMLError) -> str:
    mark = getattr(problem, "problem_mark", None)
    reason = getattr(problem, "problem", None) or str(problem).splitlines()[0]
    return f"{reason} (line {mark.line + 1})" if mark is not None else str(reason)


class _Builder:
    """Turns PyYAML's node graph into plain values."""

    def __init__(self, name: str, error: type[FlashgenError]) -> None:
        self.name = name
        self.error = error
        self.seen: set[int] = set()
        self.lines: dict[Path, int] = {}

    def document(self, node: Any) -> Document:
        if node is None:
            raise self.error(f"{self.name}: the file is empty.")
        return Document(self.value(node, ()), self.lines)

    def refuse(self, node: Any, path: Path, reason: str) -> NoReturn:
        where = f" {dotted(path)}:" if path else ""
        raise self.error(f"{self.name}, line {node.start_mark.line + 1}:{where} {reason}")

    def value(self, node: Any, path: Path) -> Any:
        if id(node) in self.seen:
            self.refuse(node, path, "aliases (&name, *name) are not read; write the value out.")
        self.seen.add(id(node))
        if len(path) <= LINES_DEPTH:
            self.lines[path] = node.start_mark.line + 1
        if len(path) > MAX_DEPTH:
            self.refuse(node, path[:3], f"nested deeper than {MAX_DEPTH} levels.")
        tag = node.tag.removeprefix(_CORE)
        if isinstance(node, yaml.MappingNode) and tag == "map":
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and tag == "seq":
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, tag, path)
        self.refuse(node, path, f"the tag {node.tag} is not read; only plain mappings, sequences, strings and numbers are.")

    def mapping(self, node: Any, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first_line: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = self.value(key_node, path)
            if not isinstance(key, str):
                self.refuse(key_node, path, f"a key must be a string; got {key!r}.")
            if key in result:
                self.refuse(key_node, path, f"the key {key!r} stands here a second time (first on line {first_line[key]}); keep one.")
            first_line[key] = key_node.start_mark.line + 1
            result[key] = self.value(value_node, (*path, key))
        return result

    def scalar(self, node: Any, tag: str, path: Path) -> Any:
        text: str = node.value
        if tag == "str":
            return text
        if tag == "int" and re.fullmatch(r"-?[0-9]+", text):
            return self.integer(node, text, path)
        if tag == "float" and re.fullmatch(_RESOLVERS[1][1], text):
            return float(text)
        if tag == "bool" and text in ("true", "false"):
            return text == "true"
        if tag == "null":
            return None
        self.refuse(node, path, f"the tag {node.tag} is not read; only plain mappings, sequences, strings and numbers are.")

    def integer(self, node: Any, text: str, path: Path) -> int:
        digits = text.removeprefix("-")
        if len(digits) > MAX_DIGITS:
            self.refuse(node, path, f"an integer has at most {MAX_DIGITS} digits; this one has {len(digits)}.")
        if len(digits) > 1 and digits.startswith("0"):
            self.refuse(node, path, f"{text} has a leading zero, which some readers take for octal; write it without.")
        return int(text)


def dotted(path: Path) -> str:
    """A path as people write it: entries[7].variant.params."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
