"""The architecture as a test: imports point down, and each third-party library has its owners."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import flashgen

PACKAGE = Path(flashgen.__file__).parent

# From the ground up. A module imports only modules of lower layers, or earlier ones of its own layer's list.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "paths", "model", "yaml_io"),
    (
        "expression", "space_file", "space", "render", "tensor_map", "launch", "launch_blocks",
        "reference", "gradients", "device", "cost", "accounting",
        "limits", "shapes", "table_schema", "table",
    ),
    ("cubins", "gpu", "compiler", "runtime", "emulate"),
    (
        "cases", "suite", "certify", "gradient_suite", "gradient_gate", "gate", "compare", "approximate", "exactness", "telemetry",
        "timing", "peers", "bench", "worker", "side_by_side",
    ),
    ("strategy", "study", "evaluators", "trials", "near", "search"),
    ("measured", "tile_grid", "explorer", "explorer_page"),
    ("staleness", "table_tools", "wishes", "shelf", "ahead", "standard", "t4", "traffic", "formula", "bundle_reader", "bundle"),
    ("table_image", "untuned", "backends", "trust", "dispatch", "testing"),
    (
        "arguments", "recompute", "torch_tensors", "torch_gradients", "torch_face", "arrays", "api", "sdpa_registry", "compat",
        "integrations",
    ),
    ("doctor", "console", "cli", "__main__"),
)  # fmt: skip
OWNERS = {
    "yaml": {"yaml_io"},
    "jinja2": {"render"},
    "optuna": {"strategy"},
    "cupy": {"gpu", "compiler", "runtime", "device", "bench", "timing", "doctor"},
    "torch": {"peers", "torch_face", "torch_tensors", "torch_gradients", "recompute", "compat", "sdpa_registry"},
    "transformers": {"integrations"},
    "pynvml": {"telemetry"},
    "click": {"cli"},
    "rich": {"console"},
    "pandas": {"explorer"},
}


def modules() -> dict[str, Path]:
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported(path: Path) -> set[str]:
    """Top-level names of imported packages; modules of flashgen as `flashgen.<module>`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "flashgen" else {node.module}
    return names


def order() -> dict[str, tuple[int, int]]:
    return {name: (level, place) for level, layer in enumerate(LAYERS) for place, name in enumerate(layer)}


def layer_of(module: str) -> tuple[int, int]:
    places = order()
    head = module.split(".")[0]
    assert head in places, f"module {module} has no layer; add it to LAYERS"
    return places[head]


def test_imports_point_down() -> None:
    wrong = []
    for module, path in modules().items():
        if module == "__init__":
            continue
        for name in imported(path):
            if name.startswith("flashgen."):
                target = name.split(".")[1]
                if target in order() and target != module.split(".")[0] and layer_of(target) >= layer_of(module):
                    wrong.append(f"{module} imports {target}")
    assert not wrong, wrong


@pytest.mark.parametrize("library", OWNERS)
def test_a_library_is_imported_by_its_owners_only(library: str) -> None:
    users = {module.split(".")[0] for module, path in modules().items() if any(name.split(".")[0] == library for name in imported(path))}
    assert users <= OWNERS[library], f"{library} is imported by {sorted(users - OWNERS[library])}"


def test_importing_the_package_loads_no_heavy_library() -> None:
    script = (
        "import sys, flashgen; "
        "print([name for name in ('cupy', 'torch', 'optuna', 'numpy', 'yaml', 'jinja2', 'click', 'rich') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
