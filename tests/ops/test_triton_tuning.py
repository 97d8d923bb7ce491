"""A measured choice of tiles is taken by every linear kernel, and changes nothing but how the work is cut."""

from __future__ import annotations

import pytest
import torch

from quantkit_kernels.ops import linear as op
from quantkit_kernels.ops import quantize
from quantkit_kernels.triton import linear_a8, linear_w4a16, linear_w8a16
from quantkit_kernels.triton.layout import pack_matrix, pad_rows
from quantkit_kernels.triton.linear import linear, linear_codes
from quantkit_kernels.triton.split_k import splits
from quantkit_kernels.triton.tuned_choices import TABLES
from quantkit_kernels.triton.tuning import table_key, tuned
from tests.ops.native import between

FACTS = {"op": "linear", "sm": 120, "rows": "few", "dtype": "fp16", "bits": 4, "group_size": 64, "symmetric": True,
         "bias": False, "scale": "bf16", "n": 100, "k": 4096}  # fmt: skip
CHOICES = [
    {"block_n": 128, "stages": 3}, {"block_n": 64, "splits": 1}, {"splits": 4},
    {"block_n": 32, "stages": 6, "splits": 2},
]  # fmt: skip


@pytest.mark.parametrize("rows", ["few", "many"])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("form", ["W4", "W8", "codes"])
def test_every_choice_gives_the_references_result(
    monkeypatch: pytest.MonkeyPatch, form: str, choice: dict[str, int], rows: str
) -> None:
    n, k, t = between(1, 150), 1152, between(1, 16 if rows == "few" else 90)
    facts = {**FACTS, "n": n, "k": k, "rows": rows, "bits": 4 if form == "W4" else 8}
    facts |= {} if form == "W4" else {"group_size": 0}
    facts |= {"quant": "int8"} if form == "codes" else {}
    if rows == "many":
        choice = {"block_n": 64 if choice.get("block_n") == 32 else choice.get("block_n", 64), "stages": 2}
    monkeypatch.setitem(TABLES, 120, {table_key(facts): choice})
    assert tuned(facts) == facts | choice
    x, codes = torch.randn(t, k).half(), torch.randint(-8, 8, (n, k)).to(torch.int8)
    if form == "codes":
        weights, scale = quantize.reference(torch.randn(n, k), torch.int8)
        row_codes, row_scale = quantize.reference(x, torch.int8)
        found = linear_codes(row_codes, row_scale, pad_rows(weights, scale), rows=rows)
        assert torch.equal(found, op.of_token_codes(row_codes, row_scale, weights, scale).half())
        return
    groups = k // 64 if form == "W4" else 1
    scale = (torch.rand(n, groups) * 0.02 + 0.001).bfloat16()
    matrix = pack_matrix(codes, scale, bits=4, group_size=64) if form == "W4" else pack_matrix(codes, scale, bits=8)
    wanted = op.reference(x, codes.float() * scale.float().repeat_interleave(k // groups, 1))
    found = linear(x, matrix, rows=rows).float()
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("file", [linear_w4a16, linear_w8a16, linear_a8])
def test_a_signature_takes_the_choice_and_the_rules_without_one(file) -> None:
    (few, *_) = [spec for spec in file.SPECS if spec.name.endswith("few")]
    facts = FACTS | {"bits": 4 if file is linear_w4a16 else 8, "group_size": 64 if file is linear_w4a16 else 0}
    facts |= {"quant": "int8"} if file is linear_a8 else {}
    rules, chosen = few.signature(facts), few.signature({**facts, "block_n": 128, "stages": 6, "splits": 2})
    assert (rules.constants["BLOCK_N"], rules.constants["STAGES"], rules.constants["SPLITS"]) == (32, 4, splits(facts))
    assert (chosen.constants["BLOCK_N"], chosen.constants["STAGES"], chosen.constants["SPLITS"]) == (128, 6, 2)
    assert (chosen.num_warps, chosen.num_stages) == (8, 6)


def test_a_table_speaks_of_its_own_target_and_matrix_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLES, 90, {table_key(FACTS): {"block_n": 64}})
    assert tuned({**FACTS, "sm": 90})["block_n"] == 64
    for other in ({"sm": 89}, {"n": 101}, {"k": 4224}, {"symmetric": False}, {"rows": "many"}, {"quant": "int8"}):
        assert "block_n" not in tuned({**FACTS, "sm": 90, **other}), other


def test_choices_of_another_target_do_not_stick(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuned({**FACTS, "block_n": 64, "splits": 2, "stages": 3}) == FACTS
    assert tuned({"op": "sample", "vocab": 5}) == {"op": "sample", "vocab": 5}
