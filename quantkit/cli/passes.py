"""`quantkit inspect --passes`: what each fusion pass made of a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.artifact.architecture import architecture
from quantkit.errors import CheckpointError
from quantkit.program import build_program, fuse_steps
from quantkit.program.ir import Program

if TYPE_CHECKING:
    from quantkit.artifact.read import Artifact


@dataclass(frozen=True)
class PassCount:
    """A pass and the ops of a step, by name, before it and after it."""

    name: str
    before: Mapping[str, int]
    after: Mapping[str, int]


def pass_counts(artifact: Artifact) -> tuple[PassCount, ...]:
    """The passes between the architecture of the artifact's config.json and the program it stores.

    The last entry, `lower_precision, plan_buffers`, ends in the stored program: what an engine runs. Raises what
    `architecture` raises, and CheckpointError where the two are not of one model.
    """
    program = build_program(architecture(artifact))
    counts = []
    for name, after in (*fuse_steps(program), ("lower_precision, plan_buffers", artifact.program)):
        counts.append(PassCount(name, _ops(program), _ops(after)))
        program = after
    if counts[-1].before != counts[-1].after:
        raise CheckpointError(
            "describes another model than the program that is stored",
            where=str(artifact.folder / "config.json"),
            next="`quantkit verify` says which file was changed",
        )
    return tuple(counts)


def passes_text(counts: Sequence[PassCount]) -> str:
    """The passes to be read in a terminal: how many ops a step has before and after each, and which became fewer."""
    width = max(len(count.name) for count in counts)
    lines = [f"{'pass':<{width}}  {'before':>7}{'after':>7}  ops"]
    for count in counts:
        before, after = sum(count.before.values()), sum(count.after.values())
        lines.append(f"{count.name:<{width}}  {before:>7,}{after:>7,}  {_changes(count)}".rstrip())
    first, last = sum(counts[0].before.values()), counts[-1].after
    ops = ", ".join(f"{number} {op}" for op, number in last.items())
    return "\n".join([*lines, "", f"{first:,} ops became {sum(last.values()):,}: {ops}"])


def _changes(count: PassCount) -> str:
    names = dict.fromkeys((*count.before, *count.after))
    pairs = [(name, count.before.get(name, 0), count.after.get(name, 0)) for name in names]
    return ", ".join(f"{name} {before} -> {after}" for name, before, after in pairs if before != after) or "the same"


def _ops(program: Program) -> dict[str, int]:
    return dict(Counter(node.op for node in program.nodes))
