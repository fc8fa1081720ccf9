from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from flashgen import paths, render
from flashgen.errors import InfeasibleVariant
from flashgen.model import DType, MaskKind, Op, ProblemClass, Source, Variant
from flashgen.space import load_space

FAMILIES = ("simt_forward", "ampere_forward", "standard_forward")


def source(family: str, klass: ProblemClass | None = None, **params: int) -> Source:
    space = load_space(family)
    variant = Variant.of(family, {**dict(space.definition.fallback), **params})
    return render.render(space, klass or ProblemClass(Op.FORWARD, DType.BFLOAT16, 64, 64, MaskKind.CAUSAL), variant)


def test_the_binding_template_uses_exactly_its_declared_variables() -> None:
    assert render.undeclared() == render.DECLARED


@pytest.mark.parametrize("family", FAMILIES)
def test_a_source_is_self_contained(family: str) -> None:
    includes = re.findall(r'^\s*#include "([^"]+)"', source(family).text, re.MULTILINE)
    assert all(name.startswith("emu/") for name in includes)
    assert not re.search(r"//%|/\*[%#]|[%#]\*/", source(family).text), "Jinja marks are left in the source"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_source_is_the_same_text_each_time(family: str) -> None:
    assert source(family) == source(family)


def test_the_digest_ignores_comments_line_marks_and_blank_space() -> None:
    text = 'int a = 1;  // one\n#line 3 "x"\n/* two\nlines */ int b;\n'
    assert render.digest(text, ()) == render.digest("int a =  1;\n\nint b; // other\n", ())


def test_the_digest_keeps_what_only_looks_like_a_comment() -> None:
    assert render.digest('asm("// a");', ()) != render.digest('asm("// b");', ())


def test_every_parameter_of_a_launch_is_part_of_the_digest() -> None:
    digests = {source("ampere_forward", num_stages=stages, ctas_per_sm=ctas).digest for stages in (1, 2) for ctas in (1, 3)}
    assert len(digests) == 4


def test_emulation_headers_are_no_part_of_a_source() -> None:
    assert "rendezvous" not in source("ampere_forward").text


def test_line_marks_lead_back_to_the_template_files() -> None:
    text = source("ampere_forward").text
    named = set(re.findall(r'^#line \d+ "([^"]+)"', text, re.MULTILINE))
    assert "ampere/forward.cuh" in named
    assert all((paths.templates() / name).is_file() for name in named)


def test_only_integers_can_reach_a_template() -> None:
    space = load_space("ampere_forward")
    hostile = Variant("ampere_forward", (*source("ampere_forward").variant.params[1:], ("block_q", "64; asm(...)")))  # type: ignore[arg-type]
    with pytest.raises(Exception, match=r"integer|block_q"):
        render.render(space, ProblemClass(Op.FORWARD, DType.BFLOAT16, 64, 64, MaskKind.NONE), hostile)


def test_a_variant_of_another_family_is_refused() -> None:
    with pytest.raises(InfeasibleVariant, match="belongs to family simt_forward"):
        render.render(load_space("ampere_forward"), source("simt_forward").klass, source("simt_forward").variant)


def test_kernel_files_hold_no_assembly() -> None:
    for folder in ("simt", "ampere", "standard"):
        for path in (paths.templates() / folder).glob("*.cuh"):
            assert "asm" not in path.read_text(), f"{path}: PTX belongs behind a primitive of include/ptx/"


def test_only_the_root_and_lists_of_operands_hold_jinja_marks() -> None:
    marked = {path.relative_to(paths.templates()).as_posix() for path in paths.templates().rglob("*.j2")}
    operands = {"include/ptx/sm90.cuh.j2", "include/ptx/sm90_backward.cuh.j2"}
    assert marked == {"kernel.cu.j2"} | operands
    for name in operands:
        assert render.undeclared(name) == {"constants", "element"}


def test_operand_lists_follow_the_constants() -> None:
    text = render.expand('#include "sm90.cuh"\n', "Half", {"block_kv": 48, "head_dim": 80, "head_dim_v": 72})
    assert not re.search(r"//%|/\*[%#]|[%#]\*/|\{\{", text)
    assert text.count("m64n48k16.f32.f16.f16") == 5
    assert text.count("m64n72k16.f32.f16.f16") == 3
    for words, operands in (("wgmma_wait<0, float[24]>", 24), ("wgmma_wait<1, float[36], u32[12], float[24]>", 72)):
        body = text.split(words)[1].split("template <>")[0]
        assert len(re.findall(r'"\+[fr]"', body)) == operands


def declarations(path: Path) -> set[str]:
    """Names and argument types of the functions of a primitives header."""
    text = re.sub(r"//[^\n]*", "", path.read_text())
    text = re.sub(r"template <>\s*FG_DEVICE[^{]*", "", text)  # one shape of a primitive, not a primitive
    found = re.findall(r"FG_DEVICE\s+(?:constexpr\s+)?([\w:<>]+)\s+(\w+(?:<\w+>)?)\(([^)]*)\)", text)
    return {f"{kind} {name}({', '.join(argument_types(arguments))})" for kind, name, arguments in found}


def argument_types(arguments: str) -> list[str]:
    """`u32 (&a)[4], Half` → `u32 (&)[4]`, `Half`: types without the names of the arguments."""
    types = []
    for argument in filter(None, map(str.strip, arguments.split(","))):
        reference = re.sub(r"\(&\w+\)", "(&)", argument)
        types.append(reference if reference != argument else re.sub(r"(?<=[\s*&])\w+$", "", argument).strip())
    return types


@pytest.mark.parametrize("name", ["common.cuh", "sm80.cuh", "sm90.cuh.j2"])
def test_each_primitive_has_a_twin_with_the_same_signature(name: str) -> None:
    include = paths.templates() / "include"
    device, host = declarations(include / "ptx" / name), declarations(include / "emu" / f"{name.split('.')[0]}.hpp")
    assert len(device) > 5
    assert device <= host, f"without a twin in emu/: {sorted(device - host)}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_source_compiles_with_nvcc(family: str, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    file = tmp_path / "kernel.cu"
    file.write_text(source(family).text)
    command = [nvcc, "-std=c++17", "-gencode=arch=compute_80,code=sm_80", "-cubin", "-o", str(tmp_path / "out.cubin"), str(file)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
