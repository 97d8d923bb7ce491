"""Whether a cubin is a whole ELF file for CUDA, which kernels it defines and for what; read as data, nothing is run.

The driver is given no length and trusts the headers, so a truncated file must not reach it. Layout of 64-bit ELF:
System V ABI, chapters 4 and 5.
"""

from __future__ import annotations

import struct

_CUDA = 190
_ABI_8 = 65
_HEADER, _SECTION, _SEGMENT = 64, 64, 56
_NO_BITS = 8
_MOST_SECTIONS = 10_000


def check_elf(data: bytes) -> frozenset[str]:
    """Names of the sections of a cubin; ValueError where it is no whole 64-bit ELF file for CUDA."""
    if len(data) < _HEADER or data[:6] != b"\x7fELF\x02\x01" or int.from_bytes(data[18:20], "little") != _CUDA:
        raise ValueError("is no CUDA machine code")
    segments_at, sections_at = struct.unpack_from("<QQ", data, 32)
    segment_size, segments, section_size, sections, names_index = struct.unpack_from("<HHHHH", data, 54)
    if not 0 < sections <= _MOST_SECTIONS or section_size != _SECTION or names_index >= sections:
        raise ValueError("is machine code without sections")
    if segments and (segment_size != _SEGMENT or segments_at + segments * _SEGMENT > len(data)):
        raise ValueError("is truncated: its segments lie outside it")
    if sections_at + sections * _SECTION > len(data):
        raise ValueError("is truncated: its sections lie outside it")
    spans = []
    for index in range(sections):
        name, kind, _, _, offset, size = struct.unpack_from("<IIQQQQ", data, sections_at + index * _SECTION)
        if index and kind != _NO_BITS and offset + size > len(data):
            raise ValueError(f"is truncated: section {index} lies outside it")
        spans.append((name, offset, size))
    for index in range(segments):
        offset, _, _, size = struct.unpack_from("<QQQQ", data, segments_at + index * _SEGMENT + 8)
        if offset + size > len(data):
            raise ValueError(f"is truncated: segment {index} lies outside it")
    _, at, length = spans[names_index]
    table = data[at : at + length]
    return frozenset(table[name : table.find(b"\0", name)].decode("ascii", "replace") for name, _, _ in spans)


def defines(data: bytes, symbol: str) -> bool:
    """Whether a cubin holds the code of a kernel of that name; ValueError as `check_elf`."""
    return f".text.{symbol}" in check_elf(data)


def architecture(data: bytes) -> int:
    """The compute capability that a cubin's header names, 90 for sm_90; ValueError as `check_elf`.

    Cubins of ABI 8 (OS ABI 65, from CUDA 13) have it in bits 8 to 15 of the flags, older ones in bits 0 to 7.
    """
    check_elf(data)
    flags = int.from_bytes(data[48:52], "little")
    return flags >> 8 & 0xFF if data[7] == _ABI_8 else flags & 0xFF
