"""(search space, problem class, variant) → one self-contained kernel text.

Jinja binds constants in the files whose name ends in `.j2`; every other file is C++ and is taken as it stands. Quoted includes are expanded
once each, with `#line` marks, except those of the emulation headers, so that a change of the emulator makes no digest stale.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from flashgen import paths
from flashgen.errors import InfeasibleVariant
from flashgen.model import DType, EntryPoint, MaskKind, Op, ProblemClass, Source, Variant
from flashgen.space import Space

ROOT_TEMPLATE = "kernel.cu.j2"
DECLARED = frozenset({"title", "template", "element", "constants", "entry_points", "params", "ctas_per_sm"})

_ELEMENT = {DType.FLOAT32: "Float", DType.FLOAT16: "Half", DType.BFLOAT16: "BFloat16"}
_MASK = {MaskKind.NONE: 0, MaskKind.CAUSAL: 1, MaskKind.WINDOW: 2}
_PARAMS = {Op.FORWARD: "ForwardParams", Op.BACKWARD: "BackwardParams"}
_INCLUDE = re.compile(r'^\s*#include "([^"]+)"\s*$')
_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


def render(space: Space, klass: ProblemClass, variant: Variant) -> Source:
    """The source of one variant for one problem class. Raises InfeasibleVariant when the variant belongs to another family."""
    if variant.family != space.family:
        raise InfeasibleVariant(f"Variant {variant} belongs to family {variant.family}, not to {space.family}.")
    entry_points, boxes = space.entry_points(klass, variant), space.boxes(klass, variant)
    context = {
        "title": f"flashgen {variant} for {_describe(klass)}",
        "template": space.template,
        "element": _ELEMENT[klass.dtype],
        "constants": constants(space, klass, variant),
        "entry_points": entry_points,
        "params": ("Mapped" if boxes else "") + _PARAMS[klass.op],
        "ctas_per_sm": variant.as_dict().get("ctas_per_sm", 1),
    }
    text = _Expander(paths.templates(), context).expand()
    return Source(space.family, klass, variant, text, digest(text, entry_points, boxes), entry_points, space.min_sm, boxes, space.counters)


def expand(text: str, element: str, values: Mapping[str, int | bool]) -> str:
    """Any text that includes template files as one self-contained text, with `values` as the constants of Jinja files among them."""
    return _Expander(paths.templates(), {"element": element, "constants": dict(values)}).expand_text(text)


def constants(space: Space, klass: ProblemClass, variant: Variant) -> dict[str, int | bool]:
    """Everything that the C++ Config holds, by lower-case name."""
    return {
        **space.constants(klass, variant),
        "head_dim": klass.head_dim,
        "head_dim_v": klass.head_dim_v,
        "mask": _MASK[klass.mask],
        "masked": klass.mask is not MaskKind.NONE,
    }


def digest(text: str, entry_points: tuple[EntryPoint, ...], boxes: tuple[tuple[str, int], ...] = ()) -> str:
    """sha256 over the text without comments, line marks and blank space, and over how it is launched."""
    bare = _STRING_OR_COMMENT.sub(lambda match: match[0] if match[0].startswith('"') else " ", text)
    lines = (" ".join(line.split()) for line in bare.splitlines())
    kept = [line for line in lines if line and not line.startswith("#line")]
    launches = [f"{entry.name} {entry.threads} {entry.shared_bytes}" for entry in entry_points]
    launches += [f"box {name} {rows}" for name, rows in boxes]
    return hashlib.sha256("\n".join(kept + launches).encode()).hexdigest()


def _describe(klass: ProblemClass) -> str:
    dims = f"{klass.head_dim}" if klass.head_dim == klass.head_dim_v else f"{klass.head_dim}/{klass.head_dim_v}"
    return f"{klass.op} {klass.dtype} head_dim {dims} mask {klass.mask}"


def _cpp(value: int | bool) -> str:
    """A C++ literal. Only integers and truth values can reach a template, so no table can smuggle text into a source."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    raise InfeasibleVariant(f"A template constant must be an integer or a truth value; got {value!r}.")


@lru_cache(maxsize=4)
def _environment(root: Path) -> jinja2.Environment:
    # Delimiters in the shape of C++ comments leave the templates readable for clang-format and editors.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(root),
        undefined=jinja2.StrictUndefined,
        line_statement_prefix="//%",
        block_start_string="/*%",
        block_end_string="%*/",
        comment_start_string="/*#",
        comment_end_string="#*/",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the output is C++, and only integers and our own names are inserted
    )
    environment.filters["cpp"] = _cpp
    return environment


def undeclared(name: str = ROOT_TEMPLATE) -> set[str]:
    """Variables that a template file uses; a test compares them with DECLARED."""
    environment = _environment(paths.templates())
    source, _, _ = environment.loader.get_source(environment, name)  # type: ignore[union-attr]
    return jinja2.meta.find_undeclared_variables(environment.parse(source))


@lru_cache(maxsize=256)
def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


class _Expander:
    """Replaces each quoted include by the file's text, once."""

    def __init__(self, root: Path, context: Mapping[str, Any]) -> None:
        self._root = root
        self._context = context
        self._seen: set[Path] = set()

    def expand(self) -> str:
        rendered = self._render(ROOT_TEMPLATE)
        return "".join(self._lines(rendered, self._root, ROOT_TEMPLATE))

    def expand_text(self, text: str) -> str:
        return "".join(self._lines(text, self._root, "text"))

    def _render(self, name: str) -> str:
        return _environment(self._root).get_template(name).render(self._context)

    def _lines(self, text: str, folder: Path, name: str) -> list[str]:
        result: list[str] = []
        for number, line in enumerate(text.splitlines(), start=1):
            match = _INCLUDE.match(line)
            if match and not match[1].startswith("emu/"):
                result += self._include(match[1], folder)
                result.append(f'#line {number + 1} "{name}"\n')
            elif line.strip() != "#pragma once":
                result.append(f"{line}\n")
            else:
                result.append("\n")
        return result

    def _include(self, name: str, folder: Path) -> list[str]:
        path = self._find(name, folder)
        if path in self._seen:
            return []
        self._seen.add(path)
        relative = path.relative_to(self._root).as_posix()
        text = self._render(relative) if path.suffix == ".j2" else _read(path)
        return [f'#line 1 "{relative}"\n', *self._lines(text, path.parent, relative)]

    def _find(self, name: str, folder: Path) -> Path:
        candidates = (folder / name, self._root / name, self._root / "include" / name, self._root / "include" / f"{name}.j2")
        for candidate in candidates:
            if candidate.is_file():
                return candidate
        raise FileNotFoundError(f"Template include {name!r} is neither in {folder} nor below {self._root}.")
