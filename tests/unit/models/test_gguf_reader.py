"""GGUF files read as the Hugging Face checkpoints they came from; damaged and hostile ones refused by name."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from quantkit.errors import CheckpointError, QuantkitError, RecipeError
from quantkit.models import open_source
from quantkit.models.gguf_file import read_gguf
from quantkit.models.gguf_reader import GGUFWeightReader
from quantkit.models.rope import inverse_frequencies
from quantkit.models.spec import RopeSpec
from tests.tiny import FAMILIES, make_checkpoint
from tests.tiny_gguf import write_gguf

Kind = gguf.GGMLQuantizationType
ROWS, COLUMNS = 6, 512
PACKED = {
    Kind.Q8_0: 34, Kind.Q4_0: 18, Kind.Q4_1: 20, Kind.Q5_0: 22, Kind.Q5_1: 24, Kind.Q4_K: 144, Kind.Q5_K: 176,
    Kind.Q6_K: 210,
}  # fmt: skip
SCALES = {Kind.Q4_1: (0, 2), Kind.Q5_1: (0, 2), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}
"""Byte offsets of a block's float16 scales; (0,) where not listed."""


def random_blocks(kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Random packed rows `[ROWS, bytes]` of `kind` with small finite scales."""
    generator = np.random.default_rng(7)
    blocks = COLUMNS // gguf.GGML_QUANT_SIZES[kind][0]
    data = generator.integers(0, 256, (ROWS, blocks, PACKED[kind]), dtype=np.uint8)
    for at in SCALES.get(kind, (0,)):
        scales = generator.uniform(-0.02, 0.02, (ROWS, blocks, 1)).astype(np.float16)
        data[:, :, at : at + 2] = scales.view(np.uint8)
    return data.reshape(ROWS, -1)


def write_tensors(path: Path, tensors: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]) -> Path:
    writer = gguf.GGUFWriter(path, "qwen2")
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def reader(path: Path) -> GGUFWeightReader:
    return GGUFWeightReader(read_gguf(path), (1, 1))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")
    return write_gguf(folder, folder / "model.gguf", kind="Q8_0")


@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
def test_quantized_rows_equal_the_gguf_packages_dequantization(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    data = random_blocks(kind)
    expected = torch.from_numpy(gguf.quants.dequantize(data, kind)).to(torch.float16)
    read = reader(write_tensors(tmp_path / "t.gguf", {"blk.0.ffn_up.weight": (data, kind)}))
    name = "model.layers.0.mlp.up_proj.weight"
    assert read.shape(name) == (ROWS, COLUMNS)
    assert read.dtype(name) == torch.float16
    assert expected.isfinite().all()
    assert torch.equal(read.read(name), expected)
    assert torch.equal(read.read(name, 2, 5), expected[2:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_types_are_read_as_stored(dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.randn(ROWS, COLUMNS).to(dtype)
    kind = {torch.float32: Kind.F32, torch.float16: Kind.F16, torch.bfloat16: Kind.BF16}[dtype]
    stored = value.view(torch.uint8).numpy() if dtype == torch.bfloat16 else value.numpy()
    read = reader(write_tensors(tmp_path / "t.gguf", {"output.weight": (stored, kind)}))
    assert read.dtype("lm_head.weight") == dtype
    assert torch.equal(read.read("lm_head.weight", 1, 4), value[1:4])


def test_mixed_types_become_float16_and_vectors_stay_float32(tmp_path: Path) -> None:
    matrix, vector = (
        np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(np.float32),
        np.full(4, 1 / 3, np.float32),
    )
    tensors = {
        "output.weight": (matrix, Kind.F32),
        "token_embd.weight": (random_blocks(Kind.Q6_K), Kind.Q6_K),
        "output_norm.weight": (vector, Kind.F32),
    }
    read = reader(write_tensors(tmp_path / "t.gguf", tensors))
    assert torch.equal(read.read("lm_head.weight"), torch.from_numpy(matrix).to(torch.float16))
    assert torch.equal(read.read("model.norm.weight"), torch.from_numpy(vector))


def test_values_beyond_float16_are_refused_with_their_tensor(tmp_path: Path) -> None:
    big = np.full((2, COLUMNS), 1e6, np.float32)
    tensors = {"output.weight": (big, Kind.F32), "token_embd.weight": (random_blocks(Kind.Q8_0), Kind.Q8_0)}
    with pytest.raises(CheckpointError, match=r"output\.weight: holds 1000000, more than float16 can"):
        reader(write_tensors(tmp_path / "t.gguf", tensors)).read("lm_head.weight")


def test_a_type_that_is_not_read_is_named_with_those_that_are(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "t.gguf", {"output.weight": (np.zeros((2, 144), np.uint8), Kind.IQ4_NL)})
    with pytest.raises(CheckpointError, match=r"output\.weight: type IQ4_NL is not supported. Supported: F32.*Q6_K"):
        reader(path).dtype("lm_head.weight")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model_is_the_checkpoint_it_came_from(family: str, tmp_path: Path) -> None:
    extra = {"layer_types": ["sliding_attention"] * 3} if family == "gemma3_text" else {}
    folder = make_checkpoint(tmp_path / "hf", family, **extra)
    ours, theirs = open_source(str(write_gguf(folder, tmp_path / "m.gguf"))), open_source(str(folder))
    assert ours.spec == theirs.spec
    assert ours.reader.names() == theirs.reader.names()
    for name in theirs.reader.names():
        read, expected = ours.reader.read(name), theirs.reader.read(name)
        assert torch.allclose(read, expected, rtol=0, atol=2e-7 if "norm" in name else 0), name
        if read.dim() == 2:
            assert torch.equal(ours.reader.read(name, 5, 43), expected[5:43]), name


def test_rotated_rows_and_biases_of_llama_come_back_in_any_range(tmp_path: Path) -> None:
    sizes = {"head_dim": 80, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96}
    folder = make_checkpoint(tmp_path / "hf", "llama", attention_bias=True, mlp_bias=True, **sizes)
    ours, theirs = open_source(str(write_gguf(folder, tmp_path / "m.gguf"))), open_source(str(folder))
    for part in ("q_proj", "k_proj"):
        for kind in ("weight", "bias"):
            name = f"model.layers.1.self_attn.{part}.{kind}"
            for start, stop in ((0, 80), (7, 9), (39, 41), (79, 80), (0, 0)):
                assert torch.equal(ours.reader.read(name, start, stop), theirs.reader.read(name, start, stop))
    assert ours.spec == theirs.spec


def test_mistral_is_told_from_llama_by_its_name(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "hf", "mistral")
    assert open_source(str(write_gguf(folder, tmp_path / "m.gguf"))).spec.family == "mistral"


@pytest.mark.parametrize(
    ("rope", "metadata"),
    [
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, {}),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}, {}),
    ],
)
def test_scaled_ropes_survive(rope: dict[str, float], metadata: dict[str, float], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "hf", "qwen3", rope_parameters=rope)
    ours = open_source(str(write_gguf(folder, tmp_path / "m.gguf", metadata=metadata)))
    assert ours.spec.ropes == open_source(str(folder)).spec.ropes


def llama3_factors(theta: float, head_dim: int, **params: float) -> np.ndarray:
    plain, _ = inverse_frequencies(RopeSpec("default", theta, head_dim), 1)
    scaled, _ = inverse_frequencies(RopeSpec("llama3", theta, head_dim, params), 1)
    return plain / scaled


LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_llama3_rope_is_recognised_from_its_frequency_factors(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}
    folder = make_checkpoint(tmp_path / "hf", "llama", rope_parameters=rope)
    factors = {"rope_freqs.weight": llama3_factors(500000.0, 32, **LLAMA3)}
    ours = open_source(str(write_gguf(folder, tmp_path / "m.gguf", tensors=factors)))
    assert ours.spec.ropes == open_source(str(folder)).spec.ropes
    assert "rope_freqs.weight" not in ours.reader.names()


def test_frequency_factors_of_an_unknown_rope_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "hf", "llama")
    factors = {"rope_freqs.weight": np.linspace(1, 9, 16).astype(np.float32)}
    with pytest.raises(RecipeError, match=r"rope_freqs\.weight"):
        open_source(str(write_gguf(folder, tmp_path / "m.gguf", tensors=factors)))


def test_phi3_longrope_comes_from_its_factor_tensors(tmp_path: Path) -> None:
    long, short = [1.5 + 0.5 * i for i in range(16)], [1.0 + 0.25 * i for i in range(16)]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": long, "short_factor": short}
    folder = make_checkpoint(tmp_path / "hf", "phi3", rope_parameters=rope, original_max_position_embeddings=64)
    factors = {
        "rope_factors_long.weight": np.array(long, np.float32),
        "rope_factors_short.weight": np.array(short, np.float32),
    }
    ours = open_source(str(write_gguf(folder, tmp_path / "m.gguf", tensors=factors)))
    assert ours.spec == open_source(str(folder)).spec


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"expert_count": 8}, "expert_count = 8"),
        ({"rope.scaling.type": "ntk"}, "'ntk'"),
        ({"rope.dimension_count": 16}, "rope.dimension_count"),
        ({"attention.head_count": "four"}, "attention.head_count"),
        ({"attention.head_count_kv": [2, 2]}, "attention.head_count_kv"),
        ({"embedding_length": 64}, "config.json makes it"),
        ({"block_count": 3}, "tensor model.layers.2"),
        ({"block_count": 1}, "belongs to no part"),
    ],
)
def test_metadata_that_would_go_wrong_is_refused_by_name(
    metadata: dict[str, object], words: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "hf", "llama")
    with pytest.raises(QuantkitError) as caught:
        open_source(str(write_gguf(folder, tmp_path / "m.gguf", metadata=metadata)))
    assert words in caught.value.line()


def test_an_expert_tensor_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "hf", "llama")
    path = write_gguf(
        folder, tmp_path / "m.gguf", tensors={"blk.0.ffn_gate_inp.weight": np.zeros((2, 128), np.float32)}
    )
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_gate_inp\.weight belongs to no part of a llama model"):
        open_source(str(path))


def test_every_truncation_is_a_checkpoint_error_naming_the_file(llama: Path, tmp_path: Path) -> None:
    whole = llama.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in (*range(0, 200), *range(200, len(whole), 4099), len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError) as caught:
            read_gguf(path)
        assert str(path) in caught.value.line()
        assert caught.value.exit_code == 3


def test_a_truncated_tensor_is_named(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(llama.read_bytes()[:-100])
    last = max(read_gguf(llama).tensors.values(), key=lambda tensor: tensor.offset)
    with pytest.raises(CheckpointError, match=rf"cut\.gguf: {last.name}: ends \d+ bytes after the end"):
        read_gguf(path)


def test_a_file_cut_after_opening_names_its_tensor(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(llama.read_bytes())
    source = open_source(str(path))
    path.write_bytes(llama.read_bytes()[: read_gguf(llama).tensors["output_norm.weight"].offset])
    with pytest.raises(CheckpointError, match=r"output_norm\.weight: the file ends 512 bytes early"):
        source.reader.read("model.norm.weight")


def test_damaged_headers_never_escape_as_other_errors(llama: Path, tmp_path: Path) -> None:
    """A thousand random byte changes in the header: each opens or is one of our errors, in bounded time and memory."""
    whole = bytearray(llama.read_bytes())
    header = min(tensor.offset for tensor in read_gguf(llama).tensors.values())
    generator = np.random.default_rng(3)
    path = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(1000):
        damaged = bytearray(whole)
        for _ in range(generator.integers(1, 4)):
            damaged[int(generator.integers(0, header))] = int(generator.integers(0, 256))
        path.write_bytes(damaged)
        try:
            open_source(str(path))
        except QuantkitError:
            refused += 1
    assert refused > 100


def hostile(*, tensors: int = 0, keys: int = 0, version: int = 3, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + body


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(*dims: int, name: str = "t", kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def pair(name: str, kind: int, code: str, *values: int) -> bytes:
    return text(name) + struct.pack(f"<I{code}", kind, *values)


HOSTILE = {
    "empty": (b"", "not a GGUF"),
    "other magic": (b"GGML" + bytes(64), "not a GGUF"),
    "old version": (hostile(version=1), "version 1"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version"),
    "a million million tensors": (hostile(tensors=1 << 40), "claims"),
    "keys without end": (hostile(keys=1 << 40), "claims"),
    "key length huge": (hostile(keys=1, body=struct.pack("<Q", 1 << 63)), "truncated or damaged"),
    "key not utf-8": (hostile(keys=1, body=struct.pack("<Q", 1) + b"\xff"), "not UTF-8"),
    "unknown value type": (hostile(keys=1, body=pair("a", 99, "")), "a: unknown value type 99"),
    "list too long": (hostile(keys=1, body=pair("a", 9, "IQ", 4, 1 << 60)), "a: list of"),
    "list longer than the file": (hostile(keys=1, body=pair("a", 9, "IQ", 8, 1 << 20)), "a: wants 8 bytes where 0"),
    "list in a list": (hostile(keys=1, body=pair("a", 9, "IQ", 9, 4) + bytes(64)), "a: list of unsupported"),
    "key twice": (hostile(keys=2, body=pair("a", 0, "B", 1) * 2), "a: key appears twice"),
    "alignment zero": (hostile(keys=1, body=pair("general.alignment", 4, "I", 0)), "alignment 0"),
    "alignment three": (hostile(keys=1, body=pair("general.alignment", 4, "I", 3)), "alignment 3"),
    "split file": (hostile(keys=1, body=pair("split.count", 2, "H", 3)), "gguf-split --merge"),
    "split count a text": (hostile(keys=1, body=pair("split.count", 8, "") + text("x")), "split.count"),
    "no dimensions": (hostile(tensors=1, body=tensor()), "t: has 0 dimensions"),
    "many dimensions": (hostile(tensors=1, body=text("t") + struct.pack("<I", 1 << 31)), "t: has 2147483648"),
    "unknown tensor type": (hostile(tensors=1, body=tensor(32, kind=999)), "t: unknown tensor type 999"),
    "empty dimension": (hostile(tensors=1, body=tensor(0)), "t: rows of 0"),
    "part of a block": (hostile(tensors=1, body=tensor(33, kind=8)), "t: rows of 33 values"),
    "size that wraps": (hostile(tensors=1, body=tensor(1 << 33, 1 << 33)), "t: ends"),
    "offset past the end": (hostile(tensors=1, body=tensor(8, offset=1 << 62)), "t: ends"),
    "offset not aligned": (hostile(tensors=1, body=tensor(8, offset=3) + bytes(99)), "t: offset 3"),
    "tensor twice": (hostile(tensors=2, body=tensor(8) * 2 + bytes(99)), "t: tensor appears twice"),
    "overlap": (hostile(tensors=2, body=tensor(16) + tensor(16, name="u", offset=32) + bytes(200)), "u: overlaps t"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    data, words = HOSTILE[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read_gguf(path)
    assert str(path) in caught.value.line()
    assert words in caught.value.line()


def test_an_unknown_architecture_names_the_supported_ones(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(RecipeError, match=r"'mamba' is not supported. Supported: llama, qwen2, qwen3, gemma3, phi3"):
        open_source(str(path))
