"""The tables of a gpu-check, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass
class Section:
    """What one section found. state: `ok`, `failed` (something is wrong) or `died` (it ended without saying so)."""

    name: str
    state: str = "ok"
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def line(self) -> str:
        """One line on the terminal."""
        wrong = sum(not row.get("ok", True) for row in self.rows)
        told = f"{len(self.rows)} rows, {wrong} wrong" if self.rows else ""
        said = "; ".join([told, *self.notes[:2]] if told else self.notes[:2])
        return f"{self.name:10} {self.state:7} {self.seconds:6.1f} s  {' '.join(said.split())}"[:240]


def markdown(sections: Sequence[Section]) -> str:
    """A table a section."""
    parts = ["# gpu-check\n"]
    for section in sections:
        parts.append(f"## {section.name}: {section.state} ({section.seconds:.1f} s)\n")
        parts += [f"{_cell(note)}\n" for note in section.notes]
        if section.rows:
            columns = list(dict.fromkeys(name for row in section.rows for name in row))
            parts.append("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
            parts += ["| " + " | ".join(_cell(row.get(name, "")) for name in columns) + " |" for row in section.rows]
            parts.append("")
    return "\n".join(parts) + "\n"


def write(sections: Sequence[Section], folder: Path) -> None:
    """`gpu-check.md` and `gpu-check.json`, each whole or as it was."""
    folder.mkdir(parents=True, exist_ok=True)
    body = json.dumps([asdict(section) for section in sections], indent=1) + "\n"
    for name, text in (("gpu-check.md", markdown(sections)), ("gpu-check.json", body)):
        part = folder / f".{name}"
        part.write_text(text, encoding="utf-8")
        part.replace(folder / name)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join(str(value).split()).replace("|", "\\|")[:300]
