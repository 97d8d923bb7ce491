"""How many KV blocks a machine gets."""

from __future__ import annotations

import pytest

from quantkit.errors import PreflightError
from quantkit.program import build_program, fuse, lower_precision
from quantkit.runtime.memory import DEFAULT_CAP, available_memory, plan_memory
from tests.unit.test_program import SPEC


def program(kv_format):
    return lower_precision(fuse(build_program(SPEC)), {}, kv_format)


def plan(kv_format="INT8", **options):
    wanted = {"max_num_seqs": 4, "max_model_len": 100, "block_size": 16, "available": 8 << 30} | options
    return plan_memory(program(kv_format), **wanted)


def test_never_more_than_every_sequence_full_needs():
    got = plan()
    assert got.num_blocks == 4 * 7 + 1
    assert got.kv_tokens == 4 * 7 * 16
    kv = program("INT8").kv
    assert got.bytes_per_block == sum(2 * layer.num_kv_heads * layer.head_dim * 16 for layer in kv)
    assert plan("FP32").bytes_per_block == 4 * got.bytes_per_block
    assert plan("FP8").bytes_per_block == got.bytes_per_block
    assert plan("INT4").bytes_per_block == sum(2 * layer.num_kv_heads * (layer.head_dim // 2 + 4) * 16 for layer in kv)


def test_never_more_than_the_default_cap_unasked():
    got = plan(max_num_seqs=10**6, available=1 << 40)
    assert got.kv_bytes <= DEFAULT_CAP < got.kv_bytes + got.bytes_per_block
    more = plan(max_num_seqs=10**6, available=1 << 40, kv_cache_bytes=DEFAULT_CAP * 2)
    assert more.kv_bytes > DEFAULT_CAP


def test_weights_and_utilization_come_off_the_memory_there_is():
    got = plan(max_num_seqs=10**6, available=10 << 20, utilization=0.5)
    assert got.kv_bytes <= (5 << 20) - got.weight_bytes < got.kv_bytes + got.bytes_per_block


def test_no_room_for_one_sequence_is_a_preflight_error_with_the_numbers():
    with pytest.raises(PreflightError, match=r"one sequence of 100 tokens needs .* kv_cache_gib allows .* Raise"):
        plan(kv_cache_bytes=1000)
    with pytest.raises(PreflightError, match=r"the machine leaves .* Lower max_model_len"):
        plan(available=1000)


def test_the_table_names_memory_weights_and_cache():
    lines = plan().table().splitlines()
    assert [line.split()[0] for line in lines] == ["memory", "weights", "KV"]
    assert "448 tokens, 100% of every sequence full" in lines[2]


def test_available_memory_is_within_what_the_machine_has():
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) * 1024
    assert 0 < available_memory() <= total
