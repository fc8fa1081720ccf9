"""Parameter blocks made quickly: a call changes addresses only, so its block is a copy of a prepared one with addresses written into it.

Tensor maps are opaque, but a map holds its tensor's address somewhere. Where, is found out by encoding a map at several addresses; a driver
whose maps differ in more than eight bytes that are the address gets every map encoded anew at every call.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace

from flashgen import launch
from flashgen.launch import BackwardStruct, ForwardStruct, PlainStruct
from flashgen.model import ExecutorName, Problem, Source
from flashgen.tensor_map import MAP_BYTES, TensorMapSpec

ROWS = ("q", "k", "v", "o", "dout", "dq", "dk", "dv")
"""Tensors whose rows may be read 16 bytes at a time, where all of them allow it."""
_INNER = ("q", "k", "v", "o", "lse", "workspace")  # of the forward block inside a backward one
_NOWHERE = 16  # what a map says of a tensor without memory
_TRIED = (1 << 20, 0x7F12_3456_7890, 0x0001_FEDC_BA90)  # addresses whose bytes differ everywhere; a map takes any multiple of 16
_ADDRESS = struct.Struct("<Q")
_FLAG = struct.Struct("<i")

Encode = Callable[[TensorMapSpec], bytes]


class ParameterBlocks:
    """The parameter blocks of one source on one problem and one set of strides."""

    def __init__(self, source: Source, plain: PlainStruct, problem: Problem, executor: ExecutorName) -> None:
        """`plain` is a block with every address 0, or none. Raises LaunchError for a tensor that no map describes."""
        block = launch.source_params(source, plain, problem, 0, executor)
        self._kind, self._template = type(block), bytes(block)
        outer = self._kind.problem.offset if source.boxes else 0
        forward = outer + (BackwardStruct.forward.offset if isinstance(plain, BackwardStruct) else 0)
        self._rows_aligned = bool(plain.forward.vector_access if isinstance(plain, BackwardStruct) else plain.vector_access)
        self._flag = forward + ForwardStruct.vector_access.offset
        self._counters = self._kind.counters.offset if source.boxes else None
        places = {name: forward + getattr(ForwardStruct, name).offset for name in _INNER}
        if isinstance(plain, BackwardStruct):
            places |= {name: outer + getattr(BackwardStruct, name).offset for name in ("dout", "dlse", "dq", "dk", "dv")}
        self._encode: Encode = lambda spec: spec.encode(executor)
        self._anew: list[tuple[str, int, TensorMapSpec]] = []  # maps that are encoded at every call
        in_maps: dict[str, list[int]] = {name: [] for name in places}
        for box, rows in source.boxes:
            name, offset, spec = box.removeprefix("query_"), getattr(self._kind, box).offset, launch.map_of(box, rows, plain, problem)
            inside = address_place(spec, self._encode)
            if inside is None:
                self._anew.append((name, offset, spec))
            else:
                in_maps[name].append(offset + inside)
        self._writes = {name: (place, name in ROWS, tuple(in_maps[name])) for name, place in places.items()}

    def make(self, addresses: Mapping[str, int], counters: int = 0) -> ctypes.Structure:
        """The block of one launch. `addresses` names what the block holds; what is left out stays 0."""
        block, together = bytearray(self._template), 0
        write = _ADDRESS.pack_into
        for name, address in addresses.items():
            place, has_rows, in_maps = self._writes[name]
            write(block, place, address)
            if has_rows:
                together |= address
            for inside in in_maps:
                write(block, inside, address or _NOWHERE)
        _FLAG.pack_into(block, self._flag, self._rows_aligned and together % launch.VECTOR_BYTES == 0)
        if self._counters is not None:
            write(block, self._counters, counters)
        for name, offset, spec in self._anew:
            block[offset : offset + MAP_BYTES] = self._encode(replace(spec, address=addresses.get(name) or _NOWHERE))
        return self._kind.from_buffer(block)


def address_place(spec: TensorMapSpec, encode: Encode) -> int | None:
    """Where in an encoded map its address lies, by itself and in full; None when maps at other addresses differ in anything else."""
    maps = {address: encode(replace(spec, address=address)) for address in _TRIED}
    first = maps[_TRIED[0]]
    for place in range(0, MAP_BYTES, _ADDRESS.size):
        rest = place + _ADDRESS.size
        if all(first[:place] + _ADDRESS.pack(address) + first[rest:] == found for address, found in maps.items()):
            return place
    return None
