"""Machine code, read: what a kernel's main loop consists of. It needs no GPU, and tells most of what one would.

The main loop is the innermost loop with the most matrix instructions, or the longest where there are none.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from quantkit.compile.resources import dump

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+([^;]+);", re.MULTILINE)
_GUARD = re.compile(r"^@!?U?P\w+\s+")
_MATRIX = re.compile(r"^(HMMA|IMMA|QMMA|OMMA|HGMMA|IGMMA|QGMMA|UTC\w*MMA)\b")
_WIDE = re.compile(r"^LDG(STS)?\..*128")
_SPILL = re.compile(r"^(STL|LDL)\b")
_BARRIER = re.compile(r"^(BAR\.|SYNCS\.PHASECHK|WARPGROUP\.DEPBAR)")


@dataclass(frozen=True)
class Code:
    """What the machine code of a kernel holds.

    instructions: of the whole kernel. matrix: kinds of matrix instruction with counts. wide_loads: 16-byte loads from
    global memory. local: loads and stores of spilled registers. loop, loop_barriers: instructions of the main loop, and
    those that wait for other threads; 0 where there is none.
    """

    instructions: int
    matrix: dict[str, int]
    wide_loads: int
    local: int
    loop: int
    loop_barriers: int


def read_code(cubin: bytes) -> Code:
    """Disassemble a cubin."""
    lines = [(int(at, 16), _GUARD.sub("", text.strip())) for at, text in _INSTRUCTION.findall(dump(cubin, "-sass"))]
    while lines and lines[-1][1].startswith(("NOP", "BRA")):  # padding behind the last return
        lines.pop()
    names = [text.split()[0] for _, text in lines]
    loop = [text.split()[0] for _, text in _main_loop(lines)]
    return Code(
        instructions=len(lines),
        matrix=dict(sorted(Counter(found[1] for name in names if (found := _MATRIX.match(name))).items())),
        wide_loads=sum(bool(_WIDE.match(name)) for name in names),
        local=sum(bool(_SPILL.match(name)) for name in names),
        loop=len(loop),
        loop_barriers=sum(bool(_BARRIER.match(name)) for name in loop),
    )


def _main_loop(lines: list[tuple[int, str]]) -> list[tuple[int, str]]:
    spans = []
    for at, text in lines:
        target = re.search(r"0x([0-9a-f]+)", text) if text.startswith("BRA") else None
        if target is not None and int(target[1], 16) < at:
            spans.append((int(target[1], 16), at))
    innermost = [
        span
        for span in spans
        if not any(span[0] <= other[0] and other[1] <= span[1] and other != span for other in spans)
    ]
    loops = [[line for line in lines if first <= line[0] <= last] for first, last in innermost]
    return max(loops, key=lambda loop: (sum(bool(_MATRIX.match(text)) for _, text in loop), len(loop)), default=[])
