"""The safetensors reader: lazy rows, shards, and every damaged or hostile file refused with its name and tensor."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quantkit.errors import CheckpointError
from quantkit.models.safetensors_reader import INDEX, open_safetensors

A = torch.arange(24, dtype=torch.float32).reshape(6, 4)
B = torch.linspace(-2, 2, 10).to(torch.bfloat16)


def write(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(first: int, last: int, *, dtype: str = "F32", shape: list[Any] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(last - first) // 4] if shape is None else shape, "data_offsets": [first, last]}


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_safetensors(folder)
    assert caught.value.exit_code == 3
    return caught.value.line()


@pytest.fixture
def two_shards(tmp_path: Path) -> Path:
    save_file({"a": A}, tmp_path / "one.safetensors")
    save_file({"b": B}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    return tmp_path


def test_reads_whole_tensors_and_row_ranges_in_their_own_type(two_shards: Path) -> None:
    reader = open_safetensors(two_shards)
    assert reader.names() == ["a", "b"]
    assert (reader.shape("a"), reader.dtype("b")) == ((6, 4), torch.bfloat16)
    assert torch.equal(reader.read("a"), A)
    assert torch.equal(reader.read("a", 2, 5), A[2:5])
    assert torch.equal(reader.read("b", start=7), B[7:])
    assert reader.read("a", 3, 3).shape == (0, 4)


def test_reads_only_the_rows_asked_for(tmp_path: Path) -> None:
    """Rows before a hole punched in the file after opening still read; rows in it are a clear error."""
    path = tmp_path / "model.safetensors"
    save_file({"a": A}, path)
    reader = open_safetensors(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    assert torch.equal(reader.read("a", 0, 4), A[:4])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: a: the file ends 20 bytes early"):
        reader.read("a")


def test_rows_outside_the_tensor_are_refused(two_shards: Path) -> None:
    reader = open_safetensors(two_shards)
    for start, stop in ((-1, 2), (0, 7), (4, 3)):
        with pytest.raises(CheckpointError, match="outside its 6 rows"):
            reader.read("a", start, stop)


def test_an_unknown_tensor_is_named(two_shards: Path) -> None:
    with pytest.raises(CheckpointError, match="tensor c is missing"):
        open_safetensors(two_shards).read("c")


def test_types_other_than_the_three_are_refused_when_used(tmp_path: Path) -> None:
    save_file({"codes": torch.zeros(4, dtype=torch.int8), "a": A}, tmp_path / "model.safetensors")
    reader = open_safetensors(tmp_path)
    assert torch.equal(reader.read("a"), A)
    with pytest.raises(CheckpointError, match="codes: type I8 is not supported"):
        reader.dtype("codes")


def test_a_single_file_of_another_name_is_read(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "weights.safetensors")
    assert open_safetensors(tmp_path).names() == ["a"]


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "one.safetensors")
    save_file({"b": B}, tmp_path / "two.safetensors")
    assert INDEX in refusal(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickles_are_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"never opened")
    line = refusal(tmp_path)
    assert name in line
    assert "pickle" in line
    assert "save_pretrained" in line


@pytest.mark.parametrize("cut", [0, 4, 8, 20, 70, -1, -90])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"tensor.a": A}, path)
    path.write_bytes(path.read_bytes()[:cut])
    line = refusal(tmp_path)
    assert str(path) in line
    assert "truncated" in line
    if cut < 0:
        assert "tensor.a" in line


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "header length huge": (lambda p: write(p, b"{}", length=1 << 62), "truncated"),
    "header length above the format's": (
        lambda p: _sparse(p, 200 << 20),
        "exceeds",
    ),
    "not json": (lambda p: write(p, b"{nope"), "not valid JSON"),
    "not utf-8": (lambda p: write(p, b'{"\xff":1}'), "not valid JSON"),
    "nested without end": (lambda p: write(p, b"[" * 100_000 + b"]" * 100_000), "not valid JSON"),
    "a number of a million digits": (lambda p: write(p, b'{"a":' + b"9" * 1_000_000 + b"}"), "not valid JSON"),
    "a list": (lambda p: write(p, []), "JSON object"),
    "tensor twice": (
        lambda p: write(p, b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{}}', bytes(4)),
        "twice",
    ),
    "entry not an object": (lambda p: write(p, {"a": 3}), "a: header entry"),
    "unknown type": (lambda p: write(p, {"a": entry(0, 4, dtype="F99")}, bytes(4)), "a: unknown type"),
    "negative offset": (lambda p: write(p, {"a": entry(-4, 0, shape=[1])}, bytes(4)), "a: data_offsets"),
    "backwards": (lambda p: write(p, {"a": entry(4, 0, shape=[1])}, bytes(4)), "a: data_offsets"),
    "past the end": (lambda p: write(p, {"a": entry(0, 8)}, bytes(4)), "a: ends 4 bytes after the end"),
    "offset above 64 bits": (lambda p: write(p, {"a": entry(0, 1 << 70, shape=[1])}, bytes(4)), "a: data_offsets"),
    "boolean offset": (lambda p: write(p, {"a": entry(0, True, shape=[0])}, bytes(1)), "a: data_offsets"),
    "fractional shape": (lambda p: write(p, {"a": entry(0, 4, shape=[1.0])}, bytes(4)), "a: shape"),
    "negative shape": (lambda p: write(p, {"a": entry(0, 4, shape=[-1, -1])}, bytes(4)), "a: shape"),
    "shape whose product wraps": (
        lambda p: write(p, {"a": entry(0, 4, shape=[1 << 33, 1 << 33])}, bytes(4)),
        "a: 4 bytes do not hold",
    ),
    "many dimensions": (lambda p: write(p, {"a": entry(0, 4, shape=[1] * 5000)}, bytes(4)), "a: shape"),
    "overlap": (lambda p: write(p, {"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)), "b: overlaps a"),
    "gap": (lambda p: write(p, {"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)), "b: leaves a gap after a"),
    "bytes of no tensor": (lambda p: write(p, {"a": entry(0, 4)}, bytes(12)), "8 bytes after the last tensor"),
}


def _sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.write(struct.pack("<Q", size - 8))
        file.truncate(size)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors"
    make, words = HOSTILE[name]
    make(path)
    line = refusal(tmp_path)
    assert str(path) in line
    assert words in line


def test_damaged_headers_never_escape_as_other_errors(tmp_path: Path) -> None:
    """A thousand random byte changes in the header: each opens or is one of our errors."""
    path = tmp_path / "model.safetensors"
    save_file({"a": A, "b": B}, path)
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    generator = torch.Generator().manual_seed(5)
    refused = 0
    for _ in range(1000):
        damaged = bytearray(whole)
        for _ in range(2):
            at, value = (
                torch.randint(0, header, (1,), generator=generator),
                torch.randint(0, 256, (1,), generator=generator),
            )
            damaged[int(at)] = int(value)
        path.write_bytes(damaged)
        try:
            reader = open_safetensors(tmp_path)
            for name in reader.names():
                reader.read(name)
        except CheckpointError:
            refused += 1
    assert refused > 500


@pytest.mark.parametrize(
    "file", ["../two.safetensors", "/etc/two.safetensors", "a/../../two.safetensors", "", "two.bin", "a\0.safetensors"]
)  # fmt: skip
def test_an_index_that_names_a_path_outside_is_refused(two_shards: Path, file: str) -> None:
    (two_shards / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": file}}))
    line = refusal(two_shards)
    assert "is not a safetensors file of this folder" in line
    assert f"{INDEX}: b" in line


@pytest.mark.parametrize(
    "index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{", '{"weight_map": {}}']
)
def test_a_malformed_index_is_refused(two_shards: Path, index: str) -> None:
    (two_shards / INDEX).write_text(index)
    assert INDEX in refusal(two_shards)


def test_a_shard_that_is_missing_is_named(two_shards: Path) -> None:
    (two_shards / "two.safetensors").unlink()
    assert "two.safetensors: file is missing" in refusal(two_shards)


def test_a_tensor_the_index_promises_in_vain_is_named(two_shards: Path) -> None:
    (two_shards / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "c": "two.safetensors"}}))
    line = refusal(two_shards)
    assert "two.safetensors" in line
    assert "no tensor c" in line


@pytest.mark.parametrize("name", ["model.safetensors", "two.safetensors"])
def test_a_link_out_of_the_folder_is_refused(
    two_shards: Path, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "file.safetensors"
    save_file({"a": A, "b": B}, outside)
    (two_shards / name).unlink(missing_ok=True)
    (two_shards / name).symlink_to(outside)
    assert "leads out of the folder" in refusal(two_shards)


def test_a_link_in_a_loop_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.safetensors").symlink_to(tmp_path / "one.safetensors")
    assert "file is missing" in refusal(tmp_path)


def test_links_of_a_hub_cache_snapshot_are_followed_to_its_blobs(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--o--m" / "blobs", tmp_path / "models--o--m" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file({"a": A}, blobs / "f00")
    (snapshot / "model.safetensors").symlink_to("../../blobs/f00")
    assert torch.equal(open_safetensors(snapshot).read("a"), A)
