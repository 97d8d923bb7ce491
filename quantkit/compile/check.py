"""Check an artifact's kernels without a GPU: what a launch on each target would stumble over.

Beyond `read_kernels` (files, digests, whose kernel it is) every kernel's description is parsed as the launcher parses
it, held against the entry of its PTX and the headers of its machine code, and its resources against the target's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quantkit.artifact import layout
from quantkit.artifact.kernels import KernelEntry, StoredKernels, TargetKernels, read_kernels
from quantkit.artifact.read import Artifact
from quantkit.compile.buckets import CLASSES
from quantkit.compile.targets import SHARED_BYTES, capability, ptx_target
from quantkit.errors import CheckpointError
from quantkit_kernels.cuda.elf import architecture, defines
from quantkit_kernels.cuda.kernel import WARP, LaunchPlan

REGISTERS = 65536
"""Of a multiprocessor, in all targets."""
MOST_REGISTERS = 255
MOST_THREADS = 1024
_AGAIN = "Build the artifact again"
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{")
_PARAMETER = re.compile(r"\.param\s+\.[a-z](\d+)")
_BITS = {"i1": 8, "u1": 8, "i8": 8, "u8": 8, "i16": 16, "u16": 16, "i32": 32, "u32": 32, "i64": 64, "u64": 64,
         "fp32": 32, "f32": 32, "fp64": 64}  # fmt: skip


@dataclass(frozen=True)
class CheckedTarget:
    """One target whose kernels are sound.

    nodes: places that a kernel serves, over all bucket classes. unserved: places without one. refused: kernels that the
    launcher leaves to Triton, with the reason.
    """

    target: str
    kernels: int
    nodes: int
    unserved: int
    refused: dict[str, str]

    def line(self) -> str:
        """As it is printed."""
        text = f"{self.target}: {self.kernels} kernels sound, serving {self.nodes} places, {self.unserved} have none"
        left = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items())
        return f"{text}; compiled on the spot: {left}" if left else text


def check_targets(artifact: Artifact) -> list[CheckedTarget]:
    """Every target's kernels; CheckpointError names the first thing that is wrong, PreflightError what is missing."""
    return [_check(artifact, listed) for listed in read_kernels(artifact)]


def _check(artifact: Artifact, listed: TargetKernels) -> CheckedTarget:
    folder = artifact.folder / layout.KERNELS / listed.target
    if listed.target not in SHARED_BYTES:
        raise CheckpointError(f"{listed.target} is no target that this version knows", where=str(folder))
    _check_places(artifact, listed, f"{folder}/index.json")
    stored = StoredKernels(folder, listed)
    refused = {}
    for entry in listed.kernels:
        try:
            plan = _check_kernel(stored, entry)
        except ValueError as error:
            raise CheckpointError(str(error), where=f"{folder}/{entry.name}", next=_AGAIN) from None
        reason = _left_to_triton(plan)
        if reason is not None:
            refused[entry.name] = reason
    served = sum(len(nodes) for nodes in listed.launches.values())
    unserved = sum(len(nodes) for nodes in listed.missing.values())
    return CheckedTarget(listed.target, len(listed.kernels), served, unserved, refused)


def _check_places(artifact: Artifact, listed: TargetKernels, where: str) -> None:
    """In every bucket class each node launches something or has a reason why not, and every kernel is launched."""
    nodes = {node.name for node in artifact.program.nodes}
    for name in listed.launches.keys() | listed.missing.keys():
        known = set(listed.launches.get(name, ())) | set(listed.missing.get(name, ()))
        if name not in CLASSES:
            raise CheckpointError(f"{name[:40]!r} is no bucket class", where=where, next=_AGAIN)
        if known != nodes:
            odd = min(known ^ nodes)
            raise CheckpointError(
                f"{name}: node {odd[:60]!r} is listed wrongly or not at all", where=where, next=_AGAIN
            )
    idle = [entry.name for entry in listed.kernels if not entry.classes]
    if idle:
        raise CheckpointError(f"no node launches {idle[0]}", where=where, next=_AGAIN)


def _check_kernel(stored: StoredKernels, entry: KernelEntry) -> LaunchPlan:
    """The kernel's description; ValueError says what of it does not hold."""
    body, cubin = stored.read(entry.name)
    plan = LaunchPlan.from_metadata(body)
    if not defines(cubin, plan.symbol):
        raise ValueError(f"the machine code holds no kernel {plan.symbol[:80]}")
    if architecture(cubin) != capability(entry.target):
        raise ValueError(f"the machine code is for sm_{architecture(cubin)}")
    _check_ptx((stored.folder / f"{entry.name}.ptx").read_text("utf-8", errors="replace"), plan, entry.target)
    threads = WARP * plan.num_warps
    for what, taken, there in (
        ("bytes of shared memory", plan.shared_bytes, SHARED_BYTES[entry.target]),
        ("registers a thread", entry.registers, MOST_REGISTERS),
        ("registers a block", entry.registers * threads, REGISTERS),
        ("threads", threads, MOST_THREADS),
    ):
        if taken > there:
            raise ValueError(f"takes {taken} {what}, and {entry.target} has {there}")
    return plan


def _check_ptx(ptx: str, plan: LaunchPlan, target: str) -> None:
    if not re.search(rf"^\.target\s+{ptx_target(target)}\s*(,|$)", ptx, re.MULTILINE):
        raise ValueError(f"its PTX is not for {ptx_target(target)}")
    entry = next((found for found in _ENTRY.finditer(ptx) if found[1] == plan.symbol), None)
    if entry is None:
        raise ValueError(f"its PTX has no entry {plan.symbol[:80]}")
    taken = [int(bits) for bits in _PARAMETER.findall(entry[2])]
    passed = [64 if each.type.startswith("*") else _BITS[each.type] for each in plan.arguments]
    if taken != passed:
        raise ValueError(f"its PTX takes parameters of {taken} bits and its description passes {passed}")
    if ptx.count("{") != ptx.count("}"):
        raise ValueError("its PTX is truncated")
    threads = re.search(r"\.reqntid\s+(\d+)", entry[3])
    if threads is not None and int(threads[1]) != WARP * plan.num_warps:
        raise ValueError(f"its PTX is for {threads[1]} threads and its description for {WARP * plan.num_warps}")


def _left_to_triton(plan: LaunchPlan) -> str | None:
    if not plan.known_convention:
        return f"compiled by Triton {plan.triton}"
    return plan.refusal
