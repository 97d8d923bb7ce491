"""Static gates on machine code: committed tables hold what was compiled, and what must hold for every kernel.

There is a table for the triton that CI pins and one for the triton that torch's CUDA build of the same release brings.
When a kernel changes, `python kernels/benchmarks/sass_table.py` writes the installed one's anew; read what moved before
commit, and write both.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from quantkit.compile.gates import CASES, measure, refusal, tool_versions
from quantkit.compile.targets import SHARED_BYTES, TARGETS
from quantkit_kernels.triton import kernels

TABLES = {
    version: json.loads(
        (Path(__file__).resolve().parents[2] / f"kernels/benchmarks/sass_triton_{version}.json").read_text("utf-8")
    )
    for version in ("3.9.0", "3.7.1")
}
ROWS: dict[str, dict[str, Any]] = TABLES["3.9.0"]["rows"]
NOT_COMPILED = {"3.7.1": ("embedding", "softcap", "sample", "qk_norm_rope_kv_write", "paged_", "moe_")}
"""Kernels that were not compiled by that release since they changed: run sass_table.py with it and take them out."""
DOTS = ("linear", "moe_linear", "paged_attention ", "paged_prefill")


def rows(case: str = "", target: str = "") -> dict[str, dict[str, Any]]:
    suffix = f"| {target}" if target else ""
    chosen = {name: row for name, row in ROWS.items() if name.startswith(case) and name.endswith(suffix)}
    assert chosen, f"no row for {case} {target}"
    return chosen


def todays(version: str = metadata.version("triton")) -> dict[str, dict[str, Any]]:
    """Rows of the table that the installed tools made."""
    assert version in TABLES, f"no table for triton {version}: run kernels/benchmarks/sass_table.py"
    assert TABLES[version]["tools"] == dict(tool_versions())
    found: dict[str, dict[str, Any]] = TABLES[version]["rows"]
    return found


@pytest.mark.parametrize("version", TABLES)
def test_the_table_holds_every_kernel_on_every_target(version: str) -> None:
    absent = NOT_COMPILED.get(version, ())
    cases = [case for case in CASES if not case.startswith(absent)]
    served = {f"{case} | {target}" for case in cases for target in TARGETS if refusal(case, target) is None}
    assert set(TABLES[version]["rows"]) == served
    assert {kernel for kernel, _ in CASES.values()} == set(kernels())


def test_a_target_goes_without_a_kernel_only_where_it_has_no_fp8() -> None:
    refused = {(case, target): said for case in CASES for target in TARGETS if (said := refusal(case, target))}
    fp8 = {case for case, (_, facts) in CASES.items() if facts.get("quant") == "fp8" or facts.get("cache") == "FP8"}
    assert set(refused) == {(case, target) for case in fp8 for target in ("sm_80", "sm_86")}
    assert refused["linear_fp8_few", "sm_86"] == "sm_86 has no FP8 arithmetic: it begins with sm_89"


@pytest.mark.parametrize("version", TABLES)
def test_nothing_spills(version: str) -> None:
    found = TABLES[version]["rows"].items()
    assert {name for name, row in found if row["spill_bytes"] or row["local"]} == set()


@pytest.mark.parametrize("target", TARGETS)
def test_shared_memory_stays_within_the_targets_limit(target: str) -> None:
    assert max(row["shared_bytes"] for row in rows(target=target).values()) <= SHARED_BYTES[target]


def test_dots_are_matrix_instructions() -> None:
    kinds = {name: set(row["matrix"]) for name, row in ROWS.items()}
    assert {name for name in kinds if name.startswith(DOTS) and not kinds[name]} == set()
    assert {name for name in kinds if not name.startswith(DOTS) and kinds[name]} == set()
    assert set().union(*(kinds[name] for name in rows("linear_w4a16_many", "sm_90"))) == {"HGMMA"}
    assert set().union(*(kinds[name] for name in rows("linear_w4a16_few"))) == {"HMMA"}


def test_codes_are_multiplied_as_codes() -> None:
    for case, target, kind in (
        ("linear_w8a8_few", "", "IMMA"),
        ("linear_w8a8_many", "sm_80", "IMMA"),
        ("linear_w8a8_many", "sm_90", "IGMMA"),
        ("linear_fp8_many", "sm_89", "QMMA"),
        ("linear_fp8_many", "sm_90", "QGMMA"),
        ("linear_fp8_many", "sm_100", "UTCQMMA"),
        ("linear_fp8_many", "sm_120", "QMMA"),
    ):
        assert set().union(*(row["matrix"] for row in rows(case, target).values())) == {kind}, f"{case} {target}"


def test_weights_are_read_sixteen_bytes_at_a_time() -> None:
    assert all(row["wide_loads"] >= 8 for kind in ("linear", "moe_linear") for row in rows(kind).values())


@pytest.mark.parametrize(
    ("case", "target", "most"),
    [
        ("linear_w4a16_few g128", "sm_80", 5.0),
        ("linear_w4a16_few g64", "sm_80", 5.3),
        ("linear_w4a16_few g32", "sm_80", 6.0),
        ("linear_w4a16_few g128", "sm_90", 4.0),
        ("linear_w4a16_few g64", "sm_90", 4.3),
        ("linear_w4a16_few g32", "sm_90", 5.0),
        ("linear_w4a16_few g128 asymmetric", "sm_80", 5.0),
        ("linear_w4a16_few g64 asymmetric", "sm_80", 5.3),
        ("linear_w4a16_few g32 asymmetric", "sm_80", 6.5),
        ("linear_w4a16_few g128 asymmetric", "sm_90", 4.6),
        ("linear_w4a16_few g64 asymmetric", "sm_90", 5.0),
        ("linear_w4a16_few g32 asymmetric", "sm_90", 6.5),
        ("moe_linear_w4a16_few g128", "sm_80", 5.0),
        ("moe_linear_w4a16_few g64", "sm_80", 5.3),
        ("moe_linear_w4a16_few g32", "sm_80", 6.0),
        ("moe_linear_w4a16_few g128", "sm_90", 4.0),
        ("moe_linear_w4a16_few g64", "sm_90", 4.3),
        ("moe_linear_w4a16_few g32", "sm_90", 5.0),
        ("moe_linear_w8a16_few", "sm_80", 5.0),
        ("moe_linear_w8a16_few", "sm_90", 4.0),
        ("moe_linear_f16_few", "sm_80", 2.0),
        ("moe_linear_f16_few", "sm_90", 2.0),
        ("linear_w8a16_few", "sm_80", 5.0),
        ("linear_w8a16_few", "sm_90", 4.0),
        ("linear_w8a8_few", "sm_80", 1.5),
        ("linear_w8a8_few", "sm_90", 1.5),
        ("linear_fp8_few", "sm_89", 1.5),
        ("linear_fp8_few", "sm_90", 2.5),
    ],
)
def test_a_weight_costs_few_instructions_in_decode(case: str, target: str, most: float) -> None:
    """Beyond about 4.9 (A100) and 4.6 (H100) a 4-bit weight costs more time than reading it."""
    assert ROWS[f"{case} | {target}"]["per_weight"] <= most


def test_todays_code_is_what_the_table_says(tmp_path: Path) -> None:
    made = measure(["linear_w4a16_few g128"], ["sm_90"], tmp_path, 1, lambda *_: None)
    assert made == {name: todays()[name] for name in made}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_all_of_todays_code_is_what_the_table_says(target: str, tmp_path: Path) -> None:
    made = measure(CASES, [target], tmp_path, 2, lambda *_: None)
    assert made == {name: row for name, row in todays().items() if name.endswith(f"| {target}")}
