"""Bytes and operations of a step are those of its shapes and of the kernels' tensors; peaks make times of them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantkit.compile.buckets import CLASSES
from quantkit.compile.cards import CARDS, Card, card_for, card_of_device
from quantkit.compile.places import places
from quantkit.compile.roofline import LAUNCH_SECONDS, Step, layout_bits, matrix_bytes, node_work, step_time
from quantkit.compile.targets import TARGETS
from quantkit.errors import RecipeError
from quantkit.formats.schemes import SCHEMES
from quantkit.models.spec import DecoderSpec, LayerSpec, RopeSpec
from quantkit.program import build_program, fuse, lower_precision
from quantkit.program.ir import Program, Weight
from quantkit_kernels.triton.layout import pack_matrix

BENCHMARKS = Path(__file__).resolve().parents[2] / "kernels/benchmarks"
SPEC = DecoderSpec(
    family="llama", dtype="float16", vocab_size=96, hidden_size=128, intermediate_size=256, num_heads=4,
    num_kv_heads=2, head_dim=32, norm_eps=1e-5, layers=(LayerSpec(),), ropes={"global": RopeSpec("default", 1e4, 32)},
    max_position=8192,
)  # fmt: skip


def lowered(scheme: str, head: str, cache: str, spec: DecoderSpec = SPEC) -> Program:
    program = fuse(build_program(spec))
    return lower_precision(program, dict.fromkeys(program.groups(), scheme) | {"lm_head": head}, cache)


def test_a_decode_step_counts_what_pen_and_paper_give() -> None:
    """Three sequences of 20 positions; 4-bit weights with a 16-bit scale for 128, an 8-bit head, an INT8 cache."""
    at_work = step_time(lowered("W4A16_G128", "W8A16", "INT8"), Step.decode(3, 20), CARDS[0])
    row = 3 * 128 * 2
    assert {op.op: (op.launches, op.bytes, op.operations) for op in at_work.ops} == {
        "embedding": (1, 3 * 4 + row + row, 0),
        "rms_norm": (1, row + row + 128 * 4, 0),
        "qkv": (1, row + 256 * 128 // 2 + 256 * 2 + 2 * row, 2 * 3 * 256 * 128),
        # qkv, positions and slots, cos and sin, two scales, a cell of 2 heads · 32 each for key and value, q
        "qk_norm_rope_kv_write": (1, 2 * row + 24 + 3 * 32 * 4 + 2 * 64 * 4 + 3 * 128 + row, 0),
        # q, two blocks a sequence, starts and lengths, two scales, 20 cells a sequence, out
        "paged_attention": (1, row + 3 * 2 * 4 + 16 + 12 + 2 * 64 * 4 + 60 * 128 + row, 4 * 60 * 4 * 32),
        "o": (1, row + 128 * 128 // 2 + 128 * 2 + row, 2 * 3 * 128 * 128),
        "add_rms_norm": (2, 2 * (4 * row + 128 * 4), 0),
        "gate_up": (1, row + 512 * 128 // 2 + 512 * 2 + 4 * row, 2 * 3 * 512 * 128),
        "gated_act": (1, 4 * row + 2 * row, 0),
        "down": (1, 2 * row + 128 * 256 // 2 + 2 * 128 * 2 + row, 2 * 3 * 128 * 256),
        "lm_head": (1, row + 3 * 4 + 96 * 128 + 96 * 2 + 3 * 96 * 2, 2 * 3 * 96 * 128),
    }
    assert at_work.bytes == sum(op.bytes for op in at_work.ops)
    assert at_work.operations == sum(op.operations for op in at_work.ops)


def test_a_prompt_scores_its_last_row_only_and_writes_every_cell() -> None:
    ops = {op.op: op for op in step_time(lowered("FP16", "FP16", "FP16"), Step.prefill(50, 64), CARDS[0]).ops}
    assert ops["lm_head"].operations == 2 * 96 * 128
    assert ops["lm_head"].bytes == 128 * 2 + 4 + 96 * 128 * 2 + 96 * 2
    assert ops["paged_attention"].operations == 4 * (50 * 51 // 2) * 4 * 32
    assert ops["qk_norm_rope_kv_write"].bytes == 50 * (256 * 2 + 128 * 2 + 8 + 32 * 4 + 2 * 64 * 2)
    assert ops["gate_up"].operations == 2 * 50 * 512 * 128


def test_prompts_longer_than_a_sequence_may_be_come_as_several() -> None:
    assert Step.prefill(600, 256).counts == (256, 256, 88)
    assert Step.prefill(512, 256).counts == (256, 256)
    assert Step.prefill(100, 256).counts == (100,)


def test_pairs_and_cells_are_those_that_a_window_leaves() -> None:
    rng = random.Random(5)
    for _ in range(200):
        lengths = [rng.randint(1, 40) for _ in range(rng.randint(1, 4))]
        counts = [rng.randint(1, length) for length in lengths]
        window = rng.choice([None, 1, 2, 7, 39, 100])
        step, pairs, cells = Step(tuple(counts), tuple(lengths)), 0, 0
        for count, length in zip(counts, lengths, strict=True):
            seen = [range(max(0, at + 1 - (window or at + 1)), at + 1) for at in range(length - count, length)]
            pairs += sum(map(len, seen))
            cells += len(set().union(*seen))
        assert (step.pairs(window), step.cells(window)) == (pairs, cells), (counts, lengths, window)


def test_biases_and_norms_of_heads_count_too() -> None:
    plain, rich = (
        step_time(lowered("W8A16", "W8A16", "INT8", spec), Step.decode(1, 8), CARDS[0]).bytes
        for spec in (SPEC, replace(SPEC, qkv_bias=True, qk_norm=True))
    )
    assert rich - plain == 256 * 2 + 2 * 32 * 4


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        (how.name, k)
        for how in SCHEMES.values()
        if how.quantized
        for k in (128, 576, 896)
        if k % (how.group_size or 1) == 0
    ],
)
def test_weights_weigh_what_their_packed_tensors_do(name: str, columns: int) -> None:
    how, rows = SCHEMES[name], 24
    groups = columns // how.group_size if how.group_size else 1
    zero = None if how.symmetric else torch.zeros(rows, groups, dtype=torch.int8)
    packed = pack_matrix(
        torch.zeros(rows, columns, dtype=torch.int8), torch.ones(rows, groups).half(), zero, bits=how.bits,
        group_size=how.group_size,
    )  # fmt: skip
    held = packed.words.nbytes + packed.scale.nbytes + (packed.zero.nbytes if packed.zero is not None else 0)
    assert matrix_bytes(Weight("w", "matrix", (rows, columns), (), name)) == held
    assert matrix_bytes(Weight("w", "matrix", (rows, columns), ()), layout_bits(how, columns)) == held


@pytest.mark.parametrize(("scheme", "cache"), [("W4A16_G128", "INT8"), ("W4A16_G32_ASYM", "INT4"), ("W8A16", "FP16")])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_bytes_are_those_of_the_tensors_that_gpu_check_times_its_kernels_on(
    scheme: str, cache: str, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from gpu.cases import _attended, build

    program = lowered(scheme, "W8A16", cache, replace(SPEC, qkv_bias=True))
    step = Step((1,) * 3, (37, 21, 5)) if phase == "decode" else Step((33,), (33,))
    found = [p for p in places(program, "sm_90", CLASSES[phase]) if p.node != "logits" or p.facts["op"] == "linear"]
    compared = []
    for node, place in zip(program.nodes, found, strict=True):
        rows = len(step.counts) if node.op == "logits" else step.tokens
        work = node_work(node, program, step)
        if node.op == "paged_attention":
            case = _attended(place.facts, list(step.lengths), list(step.counts), rows, "cpu")
        else:
            case = build(place.facts, rows, 50, "cpu")
        moved = case.moved
        if node.op == "qk_norm_rope_kv_write":  # the case counts its whole tables of 50 positions
            moved += (rows - 50) * 32 * 4
        elif node.op == "logits":  # the case's rows are gathered already
            moved += rows * 4
        assert (work.bytes, work.operations) == (moved, case.operations), node.name
        compared.append(node.op)
    assert len(set(compared)) == 8


def test_an_op_takes_its_bytes_or_its_products_and_a_launch() -> None:
    program, step = lowered("W4A16_G128", "FP16", "INT8"), Step.decode(4, 100)
    slow_memory, slow_products = (Card("", "sm_90", 1e6, 1e15, 1e15), Card("", "sm_90", 1e15, 1e6, 1e6))
    for op in step_time(program, step, slow_memory).ops:
        assert op.bound == "bytes"
        assert op.seconds == pytest.approx(op.launches * LAUNCH_SECONDS + op.bytes / 1e6)
    for op in step_time(program, step, slow_products).ops:
        assert op.bound == ("operations" if op.operations else "launch")
        most = max(op.operations / 1e6, op.bytes / 1e15)
        assert op.seconds == pytest.approx(op.launches * LAUNCH_SECONDS + most)
    whole = step_time(program, step, slow_memory)
    assert whole.seconds == pytest.approx(sum(op.seconds for op in whole.ops))


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "FP16"])
def test_fewer_bits_are_never_predicted_slower_in_decode(card: Card, name: str) -> None:
    spec = replace(SPEC, hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64, intermediate_size=1536)
    plain, ours = lowered("FP16", "FP16", "FP16", spec), lowered(name, "W8A16", "INT8", spec)
    for sequences in (1, 2, 8, 64, 1024):
        step = Step.decode(sequences, 700)
        few, many = step_time(ours, step, card), step_time(plain, step, card)
        assert few.seconds < many.seconds
        for mine, other in zip(few.ops, many.ops, strict=True):
            assert mine.op == other.op
            if mine.op != "qk_norm_rope_kv_write":  # which reads scales that FP16 has not, for the bytes of a cell
                assert mine.seconds <= other.seconds, (sequences, mine.op)


def test_what_is_given_by_group_replaces_its_scheme() -> None:
    program, step = lowered("W4A16_G128", "W8A16", "INT8"), Step.decode(1, 16)
    same = {group: layout_bits(SCHEMES[each.scheme], each.shape[1]) for group, each in program.groups().items()}
    assert step_time(program, step, CARDS[0], same) == step_time(program, step, CARDS[0])
    more = step_time(program, step, CARDS[0], {**same, "layers.0.down": 8.125})
    assert more.bytes - step_time(program, step, CARDS[0]).bytes == 128 * 256 * 4 // 8


def test_every_target_has_cards_and_one_that_stands_for_it() -> None:
    assert {card.target for card in CARDS} == set(TARGETS)
    assert [card_for(f"cuda:{target}").name for target in TARGETS] == [
        "A100", "RTX 3090", "RTX 4090", "H100", "B200", "RTX 5090",
    ]  # fmt: skip
    for card in CARDS:
        assert card_for(f"cuda:{card.target}", card.name.lower().replace(" ", "-")) is card
        assert card.fp16 < card.int8
        assert card.fp16 / card.bandwidth > 50, "operations a byte: a rate in other units would show"


@pytest.mark.parametrize(
    ("target", "card", "line"),
    [
        ("cuda:sm_75", None, "--target: unknown target 'cuda:sm_75'. Known: cuda:sm_80, cuda:sm_86, cuda:sm_89, "
         "cuda:sm_90, cuda:sm_100, cuda:sm_120"),
        ("sm_90", None, "--target: unknown target 'sm_90'. Known: cuda:sm_80, cuda:sm_86, cuda:sm_89, cuda:sm_90, "
         "cuda:sm_100, cuda:sm_120"),
        ("cuda:sm_90", "GH300", "--card: no card 'GH300' of cuda:sm_90 is known. Known: H100, H100 PCIe, H200"),
        ("cuda:sm_90", "l40s", "--card: 'l40s' is not a card of cuda:sm_90. Known: H100, H100 PCIe, H200; L40S is "
         "cuda:sm_89"),
    ],
)  # fmt: skip
def test_an_unknown_target_or_card_is_told_with_those_known(target: str, card: str | None, line: str) -> None:
    with pytest.raises(RecipeError) as caught:
        card_for(target, card)
    assert str(caught.value) == line
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("device", "target", "card"),
    [
        ("NVIDIA H200", "sm_90", "H200"), ("NVIDIA H100 80GB HBM3", "sm_90", "H100"),
        ("NVIDIA H100 PCIe", "sm_90", "H100 PCIe"), ("NVIDIA L40S", "sm_89", "L40S"), ("NVIDIA L4", "sm_89", "L4"),
        ("NVIDIA A100-SXM4-80GB", "sm_80", "A100"), ("NVIDIA A100-PCIE-40GB", "sm_80", "A100 40GB"),
        ("NVIDIA GeForce RTX 5090", "sm_120", "RTX 5090"),
        ("NVIDIA L40", "sm_89", "RTX 4090"), ("", "sm_90", "H100"), ("Tesla T4", "sm_75", None),
    ],
)  # fmt: skip
def test_a_device_is_known_by_its_name_else_its_target_is(device: str, target: str, card: str | None) -> None:
    found = card_of_device(device, target)
    assert (None if found is None else found.name) == card
