"""The Program: building, fusing, planning, slicing, storing, refusing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from quantkit.errors import CheckpointError
from quantkit.models.spec import DecoderSpec, LayerSpec, RopeSpec, TensorNames
from quantkit.program import build_program, format_program, fuse, lower_precision, plan_buffers, slices, verify
from quantkit.program.ir import Program
from quantkit.program.serial import program_from_json, program_to_json

SPEC = DecoderSpec(
    family="llama",
    dtype="float16",
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-5,
    layers=tuple(LayerSpec(window=4 if i else None) for i in range(3)),
    ropes={"global": RopeSpec("default", 1e4, 8)},
    max_position=64,
    tied=True,
)
GEMMA = replace(
    SPEC,
    qk_norm=True,
    norm_offset=1.0,
    names=replace(
        TensorNames(),
        post_attention_norm="model.layers.{i}.post_attention_layernorm.weight",
        mlp_norm="model.layers.{i}.pre_feedforward_layernorm.weight",
        post_mlp_norm="model.layers.{i}.post_feedforward_layernorm.weight",
    ),
)
PHI3 = replace(
    SPEC,
    tied=False,
    names=replace(
        TensorNames(),
        qkv=("model.layers.{i}.self_attn.qkv_proj.weight",),
        gate_up=("model.layers.{i}.mlp.gate_up_proj.weight",),
    ),
)


def served(spec: DecoderSpec = SPEC) -> Program:
    schemes = {"layers.0.qkv": "W8A16", "layers.1.down": "W4A16_G32_ASYM"}
    program = build_program(replace(spec, intermediate_size=96))
    return plan_buffers(lower_precision(fuse(program), schemes, "INT8"))


def ops(program: Program) -> list[str]:
    return [node.op for node in program.nodes]


@pytest.mark.parametrize("spec", [SPEC, GEMMA, PHI3, replace(SPEC, qkv_bias=True, mlp_bias=True)])
def test_fusing_leaves_nine_ops_a_layer_and_verifies(spec: DecoderSpec) -> None:
    program = fuse(build_program(spec))
    verify(program)
    unfused = {"rope", "kv_write", "split", "act_mul", "head_rms_norm"}
    assert not unfused & set(ops(program))
    layer = [node for node in program.nodes if node.layer == 1]
    assert len(layer) == (11 if spec is GEMMA else 9)


def test_a_fused_group_lists_its_source_tensors_in_order() -> None:
    weight = fuse(build_program(SPEC)).weights["layers.2.qkv"]
    assert [part.tensor.split(".")[-2] for part in weight.parts] == ["q_proj", "k_proj", "v_proj"]
    assert weight.shape == ((6 + 2 * 2) * 8, 48)


def test_rows_of_an_already_fused_tensor_are_one_part_again() -> None:
    weights = fuse(build_program(PHI3)).weights
    assert [(p.start, p.stop) for p in weights["layers.0.qkv"].parts] == [(0, 80)]
    assert [(p.start, p.stop) for p in weights["layers.0.gate_up"].parts] == [(0, 160)]


def test_buffers_are_never_shared_by_values_alive_at_once() -> None:
    program = served(GEMMA)
    last_use = {name: i for i, node in enumerate(program.nodes) for name in node.inputs}
    born = {name: i for i, node in enumerate(program.nodes) for name in node.outputs}
    planned = [value for value in program.values.values() if value.buffer is not None]
    in_place = {("add_rms_norm", 1, 1)}
    for a in planned:
        for b in planned:
            if a.name == b.name or a.buffer != b.buffer or born[a.name] > born[b.name]:
                continue
            end = last_use.get(a.name, born[a.name])
            node = program.nodes[born[b.name]]
            inherits = any(
                node.op == op and node.outputs[out] == b.name and node.inputs[source] == a.name
                for op, out, source in in_place
            )
            assert end < born[b.name] or (inherits and end == born[b.name]), (a.name, b.name)
    assert len({value.buffer for value in planned}) <= 4


def test_slices_cover_every_node_once_and_chain() -> None:
    program = lower_precision(fuse(build_program(SPEC)), {}, "INT8")
    pieces = slices(program)
    assert [node.name for piece in pieces for node in piece.nodes] == [node.name for node in program.nodes]
    available: set[str] = set()
    for piece in pieces:
        verify(piece)
        assert {name for name in piece.inputs if name.startswith(("layers", "embed"))} <= available
        available = set(piece.outputs)
    assert pieces[-1].outputs == ("logits",)


def test_json_round_trip_is_exact_and_canonical() -> None:
    program = served()
    text = program_to_json(program)
    assert program_from_json(text) == program
    assert program_to_json(program_from_json(text)) == text


def test_text_form_names_schemes_and_shapes() -> None:
    text = format_program(served())
    assert "qkv[T, 80]" in text
    assert "weight: W8A16 80x48" in text
    assert "(window 4)" in text


def edit(change: object) -> str:
    data = json.loads(program_to_json(served()))
    change(data)  # type: ignore[operator]
    return json.dumps(data)


HOSTILE = {
    "unknown op": lambda d: d["nodes"][3].update(op="exec"),
    "reads ahead": lambda d: d["nodes"].reverse(),
    "wrong width": lambda d: d["weights"][1].update(shape=[49]),
    "negative window": lambda d: d["kv"][1].update(window=-1),
    "huge shape": lambda d: d["weights"][0].update(shape=[1 << 40, 48]),
    "zero head_dim": lambda d: d["kv"][0].update(head_dim=0),
    "heads do not divide": lambda d: d["kv"][0].update(num_kv_heads=4),
    "missing scales": lambda d: d["nodes"][3]["weights"].clear(),
    "layer out of range": lambda d: d["nodes"][3].update(layer=3),
    "negative layer": lambda d: d["nodes"][3].update(layer=-1),
    "unknown attribute": lambda d: d["nodes"][3]["attrs"].update(path="/etc/passwd"),
    "attribute of another type": lambda d: d["nodes"][1]["attrs"].update(eps="1"),
    "bool for a number": lambda d: d["nodes"][1]["attrs"].update(eps=True),
    "no layers": lambda d: d.update(kv=[]),
    "unknown scheme": lambda d: d["weights"][2].update(scheme="W2A2"),
    "group does not divide": lambda d: d["weights"][2].update(scheme="W4A16_G128"),
    "quantized table": lambda d: d["weights"][0].update(scheme="W8A16"),
    "part rows overlap nothing": lambda d: d["weights"][0]["parts"][0].update(start=5),
    "unknown rope kind": lambda d: d["ropes"]["global"].update(kind="spiral"),
    "rotary wider than head": lambda d: d["ropes"]["global"].update(rotary_dim=10),
    "odd rotary": lambda d: d["ropes"]["global"].update(rotary_dim=7),
    "huge buffer": lambda d: d["values"][10].update(buffer=1 << 30),
    "another format": lambda d: d.update(format=2),
    "no nodes": lambda d: d.update(nodes=[]),
    "not an object": lambda d: d.update(nodes="x"),
    "vocabulary of zero": lambda d: d.update(vocab_size=0),
    "duplicate value": lambda d: d["values"].append(d["values"][0]),
    "input renamed": lambda d: d["inputs"].append("/dev/mem"),
    "output twice": lambda d: d["nodes"].append(d["nodes"][-1]),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_program_is_refused_by_name(change: object) -> None:
    with pytest.raises(CheckpointError, match=r"program\.json"):
        program_from_json(edit(change))


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"format": 1}', '{"format": 1, "format": 1}', "[" * 100000, '{"a": NaN}']
)
def test_text_that_is_no_program_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError):
        program_from_json(text)


def test_only_products_with_codes_are_taken_in_integers_and_files_of_before_are_exact() -> None:
    lowered = lower_precision(fuse(build_program(SPEC)), {"layers.0.qkv": "W8A16", "lm_head": "W8A16"}, "FP32", "int8")
    modes = {node.name: node.attrs["compute"] for node in lowered.nodes if "compute" in node.attrs}
    assert {name for name, mode in modes.items() if mode == "int8"} == {"layers.0.qkv", "logits"}
    assert (lowered.compute, fuse(build_program(SPEC)).compute) == ("int8", "exact")
    verify(lowered)
    again = program_from_json(program_to_json(lowered))
    assert again == lowered
    lines = program_to_json(lowered).replace('"compute": "int8", ', "").replace('"compute": "int8"', "")
    older = program_from_json(lines.replace('"compute": "exact", ', "").replace('"compute": "exact"', ""))
    assert older.compute == "exact"


@pytest.mark.parametrize(("mode", "complaint"), [("int8", "with a weight in FP16"), ("int4", "unknown compute 'int4'")])
def test_a_product_that_cannot_be_taken_so_is_refused(mode: str, complaint: str) -> None:
    program = fuse(build_program(SPEC))
    nodes = tuple(replace(n, attrs={**n.attrs, "compute": mode}) if n.op == "linear" else n for n in program.nodes)
    with pytest.raises(CheckpointError, match=complaint):
        verify(program.with_(nodes=nodes))
