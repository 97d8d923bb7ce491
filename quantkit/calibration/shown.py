"""A calibration set as lines to be read in a terminal: what it covers, and what two of its samples say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from quantkit.calibration.samples import CalibrationSet, Sample
from quantkit.terminal import printable

_LINES, _WIDTH = 6, 110
_MOST_MISSING = 5


class Decoder(Protocol):
    """What this module asks of `runtime.text.ChatText`."""

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`."""
        ...


def coverage_lines(seen: Mapping[str, Any]) -> list[str]:
    """The table of a `coverage.Coverage`: a line a category and language; tokens as P50/P95/P99."""
    strata = seen["strata"]
    columns: list[tuple[str, list[str]]] = [
        ("calibration", [f"{s['category']} {s['language']}" for s in strata]),
        ("samples", [str(s["samples"]) for s in strata]),
        ("share", [f"{s['share']:.1%}" for s in strata]),
        ("profile", ["-" if s["wanted_share"] is None else f"{s['wanted_share']:.1%}" for s in strata]),
        ("prompt P50/P95/P99", [_lengths(s["prompt"]) for s in strata]),
        ("profile", [_lengths(s["wanted_prompt"], "<=") for s in strata]),
        ("answer P50/P95/P99", [_lengths(s["output"]) for s in strata]),
        ("profile", [_lengths(s["wanted_output"], "<=") for s in strata]),
    ]
    lines = _table([column for column in columns if any(cell != "-" for cell in column[1])])
    lines.append(
        f"{seen['samples']} samples, {seen['tokens']:,} tokens; whole samples {_lengths(seen['lengths'])} tokens; "
        f"of {seen['loaded']:,} rows {seen['duplicates']} repeat another, {seen['near_duplicates']} nearly, "
        f"{seen['refused']} refused by the template, {seen['outside']} outside the profile"
    )
    if seen["truncated_tokens"]:
        lines.append(f"{seen['truncated_tokens']:,} tokens were cut off")
    if seen["pii"]:
        replaced = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in seen["pii"].items())
        lines.append(f"personal data replaced: {replaced}")
    for short in seen["missing"][:_MOST_MISSING]:
        lines.append(
            f"too few conversations: {short['category']} {short['language']} has {short['samples']} of "
            f"{short['wanted']} that the profile asks for"
        )
    if len(seen["missing"]) > _MOST_MISSING:
        lines.append(f"too few conversations in {len(seen['missing']) - _MOST_MISSING} more cells (coverage.json)")
    return [printable(line) for line in lines]


def _table(columns: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Title and cells under one another, the first column to the left, the others to the right."""
    padded = []
    for number, (title, cells) in enumerate(columns):
        width = max(map(len, (title, *cells)))
        padded.append([cell.rjust(width) if number else cell.ljust(width) for cell in (title, *cells)])
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def sample_lines(made: CalibrationSet, text: Decoder) -> list[str]:
    """The first sample and the longest of another language (or any other), decoded as the model is given them."""
    if not made.samples:
        return []
    first = made.samples[0]
    others = [s for s in made.samples[1:] if s.language != first.language] or list(made.samples[1:])
    shown: Sequence[Sample] = (first, max(others, key=lambda s: len(s.ids))) if others else (first,)
    lines: list[str] = []
    for sample in shown:
        lines.append(f"sample {sample.name} ({sample.category}, {sample.language}, {len(sample.ids)} tokens):")
        lines += [f"  | {line}" for line in _cut(text.decode(sample.ids, skip_special=False))]
    return [printable(line) for line in lines]


def _cut(text: str) -> list[str]:
    whole = text.split("\n")
    lines = [line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..." for line in whole[:_LINES]]
    return lines if len(whole) <= _LINES else [*lines, f"... ({len(whole) - _LINES} more lines)"]


def _lengths(lengths: Mapping[str, int] | None, mark: str = "") -> str:
    return "-" if lengths is None else mark + "/".join(str(lengths[key]) for key in ("p50", "p95", "p99"))
