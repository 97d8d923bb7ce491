"""An artifact is refused, by name, for every way its payload can have been changed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from quantkit.artifact.files import digest_file
from quantkit.artifact.manifest import FileEntry, Manifest, canonical, manifest_bytes, parse_manifest
from quantkit.artifact.read import open_artifact
from quantkit.artifact.verify import verify
from quantkit.artifact.write import write_payload
from quantkit.errors import CheckpointError, PreflightError
from quantkit.formats import QuantizedMatrix
from quantkit.models import SourceWeights, open_source
from quantkit.program import build_program, fuse, lower_precision
from quantkit.quantize.weights import RtnWeights
from tests.tiny import make_checkpoint

SCHEMES = ("W8A16", "W4A16_G32", "W4A16_G64_ASYM", "FP16")


def _source(folder: Path, **options):
    return open_source(str(make_checkpoint(folder, "llama", dtype="float16", **options)))


def _program(source):
    program = fuse(build_program(source.spec))
    schemes = {group: SCHEMES[i % 4] for i, group in enumerate(program.groups())} | {"lm_head": "W8A16"}
    return lower_precision(program, schemes, "INT8")


def _scales(program):
    return {w.name: np.full(w.shape, 0.01, np.float32) for w in program.weights.values() if w.kind == "scales"}


def _manifest(**changes) -> Manifest:
    return replace(Manifest("0.1.0", {"family": "llama"}, {"version": 1}, {}, "INT8"), **changes)


def _write(folder: Path, source, program=None, manifest=None, weights=None) -> str:
    program = program or _program(source)
    provider = RtnWeights(source, kv_scales=_scales(program))
    weights = weights or ((w, provider.load(w)) for w in program.weights.values())
    return write_payload(folder, source=source, program=program, weights=weights, manifest=manifest or _manifest())


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return _source(tmp_path_factory.mktemp("source"), tied=True)


@pytest.fixture(scope="module")
def pristine(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pristine") / "artifact"
    _write(folder, source)
    return folder


@pytest.fixture
def artifact(pristine, tmp_path):
    return Path(shutil.copytree(pristine, tmp_path / "artifact"))


def _reseal(folder: Path) -> None:
    """What an attacker does: list the payload as it now is, digests and all."""
    body = json.loads((folder / "quantkit/manifest.json").read_bytes())
    body.pop("payload_digest")
    manifest = Manifest(**(body | {"files": {}}))
    names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json"]
    sealed = manifest.with_files({name: digest_file(folder / name) for name in names})
    (folder / "quantkit/manifest.json").write_bytes(manifest_bytes(sealed))


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


def test_an_artifact_gives_back_what_was_written(source, pristine):
    artifact = open_artifact(pristine)
    provider = RtnWeights(source, kv_scales=_scales(artifact.program))
    for weight in artifact.program.weights.values():
        ours, given = artifact.load(weight), provider.load(weight)
        assert type(ours) is type(given)
        if isinstance(ours, QuantizedMatrix):
            assert np.array_equal(ours.codes, given.codes)
            assert np.array_equal(ours.scale, given.scale)
            assert (ours.zero is None) == (given.zero is None)
            assert ours.zero is None or np.array_equal(ours.zero, given.zero)
        else:
            assert ours.dtype == given.dtype
            assert np.array_equal(ours, given)


def test_the_payload_holds_tokenizer_licence_program_and_no_time_of_day(pristine):
    names = {path.relative_to(pristine).as_posix() for path in pristine.rglob("*") if path.is_file()}
    wanted = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "LICENSE"}
    wanted |= {"quantkit/manifest.json", "quantkit/program.json", "quantkit/kv_scales.safetensors", "model.safetensors"}
    assert wanted <= names
    assert set(open_artifact(pristine).manifest.files) == names - {"quantkit/manifest.json"}


def test_the_same_inputs_give_the_same_bytes(source, pristine, tmp_path):
    digest = _write(tmp_path / "again", source)
    assert digest == open_artifact(pristine).payload_digest
    for path in pristine.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "again" / path.relative_to(pristine)).read_bytes()


def test_the_order_in_which_weights_arrive_does_not_matter(source, pristine, tmp_path):
    program = _program(source)
    provider = RtnWeights(source, kv_scales=_scales(program))
    backwards = ((w, provider.load(w)) for w in reversed(program.weights.values()))
    digest = _write(tmp_path / "again", source, program, weights=backwards)
    assert digest == open_artifact(pristine).payload_digest


def test_another_recipe_is_another_artifact(source, pristine, tmp_path):
    digest = _write(tmp_path / "other", source, manifest=_manifest(recipe={"version": 1, "name": "other"}))
    assert digest != open_artifact(pristine).payload_digest


def test_the_digest_is_the_documented_one(pristine):
    body = json.loads((pristine / "quantkit/manifest.json").read_bytes())
    stated = body.pop("payload_digest")
    assert stated == "sha256:" + hashlib.sha256(canonical(body)).hexdigest() == open_artifact(pristine).payload_digest


def test_weight_bytes_count_the_stored_tensors(pristine):
    artifact = open_artifact(pristine)
    tensors = load_file(pristine / "model.safetensors") | load_file(pristine / "quantkit/kv_scales.safetensors")
    assert artifact.weight_bytes == sum(t.numel() * t.element_size() for t in tensors.values())
    embed, layer = 384 * 128, 128 * 256 + 128 * 128 + 3 * 128 * 256 + 2 * 128
    assert artifact.source_weight_bytes == 2 * (embed + 2 * layer + 128)


def test_large_checkpoints_are_sharded_with_an_index(source, tmp_path, monkeypatch):
    monkeypatch.setattr("quantkit.artifact.write.SHARD_BYTES", 100_000)
    _write(tmp_path / "sharded", source)
    shards = sorted(path.name for path in (tmp_path / "sharded").glob("model-*.safetensors"))
    assert len(shards) > 2
    index = json.loads((tmp_path / "sharded/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(shards)
    for name, shard in index["weight_map"].items():
        assert name in load_file(tmp_path / "sharded" / shard)
    verify(tmp_path / "sharded")


def test_verify_reports_what_it_covered(pristine):
    report = verify(pristine)
    artifact = open_artifact(pristine)
    assert report.payload_digest == artifact.payload_digest
    assert (report.files, report.weights) == (len(artifact.manifest.files) + 1, len(artifact.program.weights))


@pytest.mark.parametrize("position", [0, 0.5, -1])
@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "LICENSE",
        "quantkit/program.json",
        "quantkit/kv_scales.safetensors",
        "quantkit/manifest.json",
    ],
)
def test_a_flipped_bit_is_refused_with_the_file(artifact, name, position):
    size = (artifact / name).stat().st_size
    _flip(artifact / name, size - 1 if position == -1 else int(size * position))
    with pytest.raises(CheckpointError, match=name):
        open_artifact(artifact)


def test_every_byte_of_the_manifest_counts(artifact):
    path = artifact / "quantkit/manifest.json"
    data = path.read_bytes()
    for position in range(0, len(data), 97):
        changed = bytearray(data)
        changed[position] ^= 2
        with pytest.raises(CheckpointError):
            parse_manifest(bytes(changed))


def test_sizes_alone_find_a_file_that_grew_but_not_a_flipped_bit(artifact):
    _flip(artifact / "LICENSE", 3)
    open_artifact(artifact, check="sizes")
    with (artifact / "LICENSE").open("ab") as file:
        file.write(b"!")
    with pytest.raises(CheckpointError, match=r"LICENSE: has .* bytes instead of"):
        open_artifact(artifact, check="sizes")


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "quantkit/program.json"])
def test_a_missing_file_is_named(artifact, name):
    (artifact / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: is missing"):
        open_artifact(artifact)


def test_a_folder_without_manifest_is_no_artifact(artifact, tmp_path):
    (artifact / "quantkit/manifest.json").unlink()
    with pytest.raises(CheckpointError, match="is no artifact"):
        open_artifact(artifact)
    with pytest.raises(CheckpointError, match="no such folder"):
        open_artifact(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["extra.txt", "quantkit/kernels/x.cubin", "model-2.safetensors", ".hidden"])
def test_an_unlisted_file_is_named(artifact, name):
    (artifact / name).parent.mkdir(parents=True, exist_ok=True)
    (artifact / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=f"{name}: is not listed"):
        open_artifact(artifact)


def test_evidence_lies_outside_the_seal(artifact):
    before = open_artifact(artifact).payload_digest
    (artifact / "evidence/gate").mkdir(parents=True)
    (artifact / "evidence/gate/report.json").write_text("{}")
    assert open_artifact(artifact).payload_digest == before


@pytest.mark.parametrize("name", ["tokenizer.json", "quantkit", "evidence"])
def test_a_symlink_is_refused_even_to_the_same_bytes(artifact, tmp_path, name):
    target = tmp_path / "elsewhere"
    if (artifact / name).exists():
        shutil.move(artifact / name, target)
    else:
        target.mkdir()
    (artifact / name).symlink_to(target)
    with pytest.raises(CheckpointError, match=f"{name}: is a symlink"):
        open_artifact(artifact)


def test_a_pipe_is_refused(artifact):
    os.mkfifo(artifact / "pipe")
    with pytest.raises(CheckpointError, match="pipe: is not a regular file"):
        open_artifact(artifact)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "scales.pt", "quantkit/state.PKL"])
def test_a_pickle_is_refused_even_when_listed(artifact, name):
    (artifact / name).write_bytes(b"cos\nsystem\n")
    _reseal(artifact)
    with pytest.raises(CheckpointError, match=f"{name}: is a pickle"):
        open_artifact(artifact)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", "a\\b", "./config.json", "evidence/x", ""])
def test_a_listed_path_that_leaves_the_payload_is_refused(artifact, name):
    manifest = open_artifact(artifact).manifest
    spoiled = manifest.with_files({**manifest.files, name: FileEntry(1, "0" * 64)})
    (artifact / "quantkit/manifest.json").write_bytes(manifest_bytes(spoiled))
    with pytest.raises(CheckpointError, match=r"leaves the artifact|cannot be a listed"):
        open_artifact(artifact)


@pytest.mark.parametrize("version", [0, 2, "1", None, True, 10**30])
def test_another_schema_version_names_the_command_that_rebuilds(artifact, version):
    path = artifact / "quantkit/manifest.json"
    body = json.loads(path.read_bytes()) | {"schema_version": version}
    path.write_bytes(canonical(body))
    with pytest.raises(CheckpointError, match=r"schema version .* quantkit build"):
        open_artifact(artifact)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"[]",
        lambda data: b"\xff\xfe" + data,
        lambda data: data.replace(b'"kv_format"', b'"kv_format": "INT8", "kv_format"', 1),
        lambda data: data.replace(b'"version": 1', b'"version": NaN', 1),
        lambda data: data.replace(b'"version": 1', b'"version": 1e999', 1),
        lambda data: data.replace(b'"recipe": {', b'"recipe": ' + b"[" * 5000 + b"]" * 5000 + b', "x": {', 1),
        lambda data: data.replace(b'"llama"', b'"\\ud800"', 1),
        lambda data: data + b"\n",
        lambda data: data.replace(b"  ", b" "),
    ],
)
def test_a_spoiled_manifest_is_refused_by_name(artifact, spoil):
    path = artifact / "quantkit/manifest.json"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        open_artifact(artifact)


@pytest.mark.parametrize(
    "change", [{"files": []}, {"recipe": "x"}, {"schemes": {"a": 1}}, {"kv_format": 3}, {"new": 1}]
)
def test_a_manifest_of_other_types_is_refused(change):
    body = asdict(_manifest()) | change
    with pytest.raises(CheckpointError, match="key"):
        parse_manifest(canonical(body | {"payload_digest": ""}))


def test_a_half_written_artifact_is_never_left_behind(source, tmp_path):
    program = _program(source)
    provider = RtnWeights(source, kv_scales=_scales(program))

    def interrupted():
        for index, weight in enumerate(program.weights.values()):
            if index == 5:
                raise KeyboardInterrupt
            yield weight, provider.load(weight)

    with pytest.raises(KeyboardInterrupt):
        _write(tmp_path / "artifact", source, program, weights=interrupted())
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_said_so_and_left_clean(source, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(PreflightError, match="no room on the disk"):
            _write(tmp_path / "artifact", source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_other_disk_errors_keep_their_own_name(source, tmp_path):
    program = _program(source)

    def broken():
        raise OSError(errno.EIO, "Input/output error")
        yield

    with pytest.raises(OSError, match="Input/output"):
        _write(tmp_path / "artifact", source, program, weights=broken())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_not_overwritten(source, pristine):
    with pytest.raises(PreflightError, match="in the way"):
        _write(pristine, source)


def test_a_forgotten_weight_stops_the_write(source, tmp_path):
    program = _program(source)
    provider = RtnWeights(source, kv_scales=_scales(program))
    weights = [(w, provider.load(w)) for w in program.weights.values() if w.name != "layers.1.qkv"]
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.\w_proj.* not written whole"):
        _write(tmp_path / "artifact", source, program, weights=weights)
    assert list(tmp_path.iterdir()) == []


def test_a_weight_of_another_scheme_stops_the_write(source, tmp_path):
    program = _program(source)
    provider = RtnWeights(source, kv_scales=_scales(program))
    wrong = {"layers.0.qkv": SourceWeights(source)}
    weights = [(w, wrong.get(w.name, provider).load(w)) for w in program.weights.values()]
    with pytest.raises(CheckpointError, match=r"layers\.0\.qkv: .*float16 .* is not the program's W8A16"):
        _write(tmp_path / "artifact", source, program, weights=weights)
