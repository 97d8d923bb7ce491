"""One measurement as a line of a table: bytes and operations, the rates reached, and their share of the ceilings."""

from __future__ import annotations

from dataclasses import dataclass

HEAD = ("op", "form", "case", "us", "GB/s", "of read", "G/s", "of ceiling")


@dataclass(frozen=True)
class Figure:
    """moved: bytes that must come from memory; operations: a multiply-add is two; read, ceiling: of the machine."""

    op: str
    form: str
    case: str
    seconds: float
    moved: float
    operations: float
    read: float
    ceiling: float

    def cells(self) -> tuple[str, ...]:
        """Texts under HEAD."""
        rate, speed = self.moved / self.seconds, self.operations / self.seconds
        return (
            self.op,
            self.form,
            self.case,
            f"{self.seconds * 1e6:.1f}",
            f"{rate / 1e9:.1f}",
            f"{rate / self.read:.0%}",
            f"{speed / 1e9:.0f}",
            f"{speed / self.ceiling:.0%}",
        )


def text(figures: list[Figure]) -> str:
    """A table for the terminal."""
    rows = [HEAD, *(figure.cells() for figure in figures)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    return "\n".join(" ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def markdown(figures: list[Figure]) -> str:
    """The same as Markdown."""
    rows = [HEAD, ("---",) * len(HEAD), *(figure.cells() for figure in figures)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
