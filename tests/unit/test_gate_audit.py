"""The audits tell damage from rounding, and say where it is; sound rounding of every kind passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit.formats import SCHEMES, QuantizedMatrix
from quantkit.gate.audit import audit_rules
from quantkit.gate.audit_cache import CacheUse
from quantkit.gate.audit_weights import PartAudit, PlainAudit, WeightAudit, audit_part
from quantkit.gate.data import Window
from quantkit.gate.domains import domains_of, json_tokens
from quantkit.gate.structure import structural_rules
from quantkit.quantize.gptq import gptq
from quantkit.quantize.rtn import rtn
from quantkit.runtime.text import ChatText
from tests import planted
from tests.tiny import make_checkpoint

FOUR_BITS = ("W4A16_G64", "W4A16_G32_ASYM", "W4A16_G128_ASYM")


def weights() -> Tensor:
    """`[96, 256]` with heavy tails, as trained matrices have."""
    torch.manual_seed(0)
    return torch.randn(96, 256) * torch.exp(0.5 * torch.randn(96, 1)) * 0.05


def hessian(kind: str) -> Tensor:
    """Second moments of inputs that lie in few directions, of few tokens, or with one mean for all."""
    torch.manual_seed(1)
    if kind == "few":
        inputs = torch.randn(60, 256) * torch.exp(1.5 * torch.randn(256))
    elif kind == "low rank":
        inputs = torch.randn(1000, 8) @ torch.randn(8, 256) + 0.1 * torch.randn(1000, 256)
    else:
        inputs = torch.relu(torch.randn(1000, 256) + 1)
    return inputs.T @ inputs


def sound(scheme: str, how: str) -> QuantizedMatrix:
    if how in ("mse", "minmax"):
        return rtn(weights(), SCHEMES[scheme], search=how, scale_dtype=np.dtype(np.float16))  # type: ignore[arg-type]
    return gptq(weights(), hessian(how), SCHEMES[scheme], scale_dtype=np.dtype(np.float16))[0]


def audited(stored: QuantizedMatrix) -> PartAudit:
    return audit_part(weights(), stored, "model.layers.3.mlp.down_proj.weight", "layers.3.down")


@pytest.mark.parametrize("how", ["mse", "minmax", "few", "low rank", "one mean"])
@pytest.mark.parametrize("scheme", ["W8A16", *FOUR_BITS])
def test_sound_rounding_of_every_kind_passes(scheme: str, how: str) -> None:
    found = audited(sound(scheme, how))
    assert found.problem == ""
    assert abs(found.shift) < 0.1
    assert (found.displaced, found.stretched) == (0, 0)


@pytest.mark.parametrize("scheme", [name for name in FOUR_BITS if name.endswith("ASYM")])
def test_a_zero_point_off_by_one_is_found_alone_and_everywhere(scheme: str) -> None:
    good = sound(scheme, "mse")
    assert good.zero is not None
    one = good.zero.copy()
    one[7, 1] += 1 if one[7, 1] < 7 else -1
    assert "1 of" in audited(replace(good, zero=one)).problem
    assert "the first in row 7, group 1: a zero point is wrong" in audited(replace(good, zero=one)).problem
    every = audited(replace(good, zero=np.where(good.zero < 7, good.zero + 1, good.zero - 1)))
    assert "zero point" in every.problem


@pytest.mark.parametrize("scheme", ["W8A16", *FOUR_BITS])
@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_wrong_scale_is_found_alone_and_everywhere(scheme: str, factor: float) -> None:
    good = sound(scheme, "mse")
    one = good.scale.copy()
    one[5, 0] *= factor
    assert "the first in row 5, group 0: a scale is wrong" in audited(replace(good, scale=one)).problem
    assert "a scale is wrong" in audited(replace(good, scale=good.scale * factor)).problem


def test_one_weight_that_dwarfs_its_group_may_move_by_more_than_a_step() -> None:
    source = weights()
    source[5, 64:128] *= 0.02
    source[5, 70] = 1.0
    stored = rtn(source, SCHEMES["W4A16_G64"], search="minmax", scale_dtype=np.dtype(np.float16))
    stored.codes[5, 70] -= 2  # as GPTQ does to make up for other columns
    found = audit_part(source, stored, "model.layers.3.mlp.down_proj.weight", "layers.3.down")
    assert (found.displaced, found.stretched, found.problem) == (0, 0, "")


def test_a_group_of_one_large_weight_and_a_few_of_one_step_is_no_wrong_scale() -> None:
    source = weights()
    source[5, 64:128] = 0.0
    source[5, 70] = 1.0
    source[5, 71:75] = 0.21
    stored = rtn(source, SCHEMES["W4A16_G64"], search="minmax", scale_dtype=np.dtype(np.float16))
    stored.codes[5, 71:75] = 1  # 1.47 steps in the source, so that is the gain of all but the largest
    found = audit_part(source, stored, "model.layers.0.self_attn.k_proj.weight", "layers.0.qkv")
    assert (found.displaced, found.stretched, found.problem) == (0, 0, "")


@pytest.mark.parametrize("scheme", ["W8A16", *FOUR_BITS])
def test_rows_in_another_order_are_not_the_sources(scheme: str) -> None:
    good = sound(scheme, "mse")
    rolled = QuantizedMatrix(
        good.scheme,
        np.roll(good.codes, 1, axis=0),
        np.roll(good.scale, 1, axis=0),
        None if good.zero is None else np.roll(good.zero, 1, axis=0),
    )
    assert "they are not the source's" in audited(rolled).problem


def use(**changes: float) -> CacheUse:
    return replace(CacheUse("layers.2.k_scale", 0.95, 1.0, 0.0005, 0, 64, 4000), **changes)


def test_a_cache_scale_too_large_or_too_small_is_named_by_layer() -> None:
    assert use().problem == ""
    assert use(use=0.49, narrow=40).problem.startswith(
        "layers.2.k_scale is too large: half of its channels use at most 49%"
    )
    assert use(reach=2.0, clipped=0.02).problem.startswith(
        "layers.2.k_scale is too small: half of its channels reach 2.00"
    )
    assert use(use=0.3, tokens=100).problem == ""  # too few to say anything


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("text"), "llama", dtype="float16")


def test_rules_name_matrices_tokens_and_what_is_beyond(tokenizer: Path) -> None:
    text = ChatText(tokenizer)
    bad = PartAudit("t", "layers.9.qkv", "W4A16_G64", 0.3, 0.9, 10, 9, 0, "the first in row 0, group 0")
    row = text.encode("的")
    audit = WeightAudit((bad,) * 15, (PlainAudit("embed", "table", tuple(row), 384),), 3)
    rules = audit_rules(audit, (use(),), text)
    assert [rule.outcome for rule in rules] == ["fail"] * 14 + ["pass"]
    assert rules[0].name == "weights layers.9.qkv"
    assert rules[12].text == "3 more like these"
    assert "tokens '的' (all with Chinese, Japanese or Korean characters)" in rules[13].text


def test_json_inside_a_conversation_is_a_domain_of_its_own(tokenizer: Path) -> None:
    text = ChatText(tokenizer)
    plain, with_json = (
        text.encode("the small river"),
        text.encode('price {"name": "blue", "stock": 42} and {x} the river'),
    )
    windows = [
        Window("a", "sql", "en", tuple(plain), 0, False),
        Window("b", "rag", "zh", tuple(with_json), 2, False),
    ]
    mask = json_tokens(windows, text)
    assert len(mask) == sum(window.scored for window in windows)
    assert not mask[: windows[0].scored].any()
    inside = "".join(text.token_text(t) for t, m in zip(with_json[2:-1], mask[windows[0].scored :], strict=True) if m)
    assert inside.strip().endswith('"stock": 42}')
    assert "river" not in inside
    names = [domain.name for domain in domains_of(windows, mask)]
    assert names == ["language en", "language zh", "category rag", "category sql", "format json"]
    assert domains_of(windows, mask)[1].chosen.sum() == windows[1].scored
    assert "format json" not in [domain.name for domain in domains_of(windows, np.zeros_like(mask))]


def changed(tokenizer: Path, folder: Path, name: str, old: str, new: str) -> ChatText:
    copied = planted.copy_of(tokenizer, folder)
    path = copied / name
    whole = path.read_text("utf-8")
    assert old in whole
    path.write_text(whole.replace(old, new), "utf-8")
    return ChatText(copied)


@pytest.mark.parametrize(
    ("file", "old", "new", "rule", "said"),
    [
        ("chat_template.jinja", "{% for m in messages %}", "{% for m in messages if m.role != 'system' %}",
         "chat_template", "a system turn, several turns after a system turn, Chinese rendered otherwise"),
        ("chat_template.jinja", "\n\n", "\n", "chat_template", "one user turn"),
        ("generation_config.json", '"do_sample": false', '"do_sample": true, "temperature": 0.3',
         "sampling_defaults", "do_sample was False, is True; temperature was None, is 0.3"),
    ],
)  # fmt: skip
def test_what_is_not_the_sources_around_the_weights_is_named(
    tokenizer: Path, tmp_path: Path, file: str, old: str, new: str, rule: str, said: str
) -> None:
    rules = structural_rules(ChatText(tokenizer), changed(tokenizer, tmp_path / "copy", file, old, new))
    wrong = {one.name: one.text for one in rules if one.outcome == "fail"}
    assert wrong.keys() == {rule}
    assert said in wrong[rule]


def test_a_template_that_refuses_what_the_sources_refuses_is_the_same(tmp_path: Path) -> None:
    strict = make_checkpoint(tmp_path / "m", "mistral", dtype="float16")
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    path = strict / "chat_template.jinja"
    path.write_text(refusing + path.read_text("utf-8"), "utf-8")
    rules = structural_rules(ChatText(strict), ChatText(planted.copy_of(strict, tmp_path / "copy")))
    assert {rule.outcome for rule in rules} == {"pass"}
