"""Which tiles, stages and splits of the linear kernels are fastest here: the tuner section of a gpu-check.

Tiles and stages first, K cut as the rules have it; then ways to cut K with the best of those. What wins by less than
GAIN stays with the rules. `keep_tuning.py` writes what was found into the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from gpu.ahead import Ahead
from gpu.cases import build, launches
from gpu.report import Section
from quantkit.compile.buckets import CLASSES
from quantkit.compile.emit import choose
from quantkit.compile.places import Place, places
from quantkit.errors import QuantkitError
from quantkit.program.ir import Program
from quantkit_kernels.triton import Fact, KernelSpec, kernels
from quantkit_kernels.triton.split_k import LEAST_BLOCKS, MOST_SPLITS, splits
from quantkit_kernels.triton.tuning import table_key, tuned

GAIN = 1.03
BLOCKS = {"few": (32, 64, 128), "many": (64, 128)}
STAGES = {"few": (3, 4, 6), "many": (2, 3, 4)}
ROWS = {"few": 1, "many": 512}
"""Rows that a choice is timed with: a decode of one sequence, and a prompt."""

Facts = dict[str, Fact]
Timer = Callable[[Callable[[], Any]], float]


def tile_candidates(facts: Mapping[str, Fact]) -> Iterator[dict[str, int]]:
    """Tiles and stages worth timing for a linear; not each may compile everywhere."""
    kind = str(facts["rows"])
    for block_n in BLOCKS[kind]:
        for stages in STAGES[kind]:
            yield {"block_n": block_n, "stages": stages}


def split_candidates(facts: Mapping[str, Fact]) -> Iterator[dict[str, int]]:
    """Other ways to cut K, with the facts' tiles: powers of two whose parts still have blocks enough."""
    if facts["rows"] != "few" or facts["group_size"] == 32:
        return
    here, blocks, parts = splits(facts), -(-int(facts["k"]) // 128), 1
    while parts <= MOST_SPLITS and (parts == 1 or blocks >= parts * LEAST_BLOCKS):
        if parts != here:
            yield {"splits": parts}
        parts *= 2


def linears(program: Program, target: str) -> list[Facts]:
    """The facts of a program's linears for few rows and for many, each form once, without choices."""
    found: dict[str, Facts] = {}
    for name in ("decode", "prefill"):
        for place in places(program, target, CLASSES[name]):
            if place.facts["op"] == "linear":
                plain = tuned(place.facts, {})
                found[table_key(plain)] = plain
    return list(found.values())


def tune(section: Section, dry: bool, program: Program, time: Timer) -> None:
    """A row for each linear of the program: what the rules take, what the best takes, and which choice that is.

    time: milliseconds of a launch. A choice whose results are wrong fails the section; one that does not compile is
    passed over and counted.
    """
    ahead = Ahead(dry)
    for facts in linears(program, ahead.target):
        row: dict[str, Any] = {"linear": table_key(facts), "sm": facts["sm"]}
        section.rows.append(row)
        try:
            _tune(row, ahead, facts, dry, time)
        except Exception as error:  # noqa: BLE001 - one linear's failure is one row
            row |= {"ok": False, "why": f"{type(error).__name__}: {error}"}


def _tune(row: dict[str, Any], ahead: Ahead, facts: Facts, dry: bool, time: Timer) -> None:
    rows = 2 if dry else ROWS[str(facts["rows"])]
    device = "cpu" if dry else "cuda"
    tried: dict[tuple[tuple[str, int], ...], float] = {}
    wrong: list[str] = []

    def measure(choices: Iterable[dict[str, int]]) -> None:
        given = {tuple(choice.items()): {**facts, **choice} for choice in choices}
        _compile(ahead, given.values())
        for choice, chosen in given.items():
            try:
                case = build(chosen, rows, 0, device)
                ready = launches(case, _specs(chosen), chosen, ahead)
                case.poison()
                spent = time(lambda: [launch.launch() for launch in ready])  # noqa: B023
                if max(case.errors().values()) > 1:
                    wrong.append(str(dict(choice)))
                tried[choice] = spent
            except (QuantkitError, RuntimeError) as error:
                row["left out"] = int(row.get("left out", 0)) + 1
                row["why"] = f"{dict(choice)}: {error}"[:200]

    measure([{}, *tile_candidates(facts)])
    rules = tried[()]
    best = dict(min(tried, key=tried.__getitem__))
    measure([{**best, **cut} for cut in split_candidates({**facts, **best})])
    fastest = min(tried, key=tried.__getitem__)
    kept = dict(fastest) if rules / tried[fastest] >= GAIN else {}
    row |= {"rules us": rules * 1e3, "best us": tried[fastest] * 1e3, "gain": rules / tried[fastest],
            "choice": kept, "tried": len(tried), "ok": not wrong}  # fmt: skip
    if wrong:
        row["why"] = f"wrong results: {', '.join(wrong)}"


def _compile(ahead: Ahead, given: Iterable[Facts]) -> None:
    """All of them side by side; where one does not compile, each says so when it is launched."""
    wanted = [(spec, facts) for facts in given for spec in _specs(facts)]
    try:
        ahead.compile(wanted)
    except QuantkitError:
        return


def _specs(facts: Facts) -> list[KernelSpec]:
    chosen = choose(Place("linear", CLASSES["decode"], facts), list(kernels().values()))
    if isinstance(chosen, str):
        raise RuntimeError(chosen)
    return chosen
