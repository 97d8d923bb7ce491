"""Sources with tokenizers, templates and shapes that do not fit: told by name, as early as can be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quantkit.build.context import open_context
from quantkit.build.parity import import_parity
from quantkit.build.progress import Silent
from quantkit.build.stages.calibrate import STAGE as CALIBRATE
from quantkit.build.stages.import_source import STAGE, TOKENIZER
from quantkit.calibration.dataset import load_samples
from quantkit.calibration.vocabulary import require_known
from quantkit.errors import CheckpointError, NumericsError, QuantkitError
from quantkit.gate.rungs import rung_schemes
from quantkit.models import open_source, spec_from_config
from quantkit.program import build_program, fuse
from quantkit.recipe.load import load_recipe
from quantkit.runtime.text import ChatText
from tests.build_inputs import one_thread, write_recipe
from tests.tiny import make_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with one_thread():
        yield write_recipe(tmp_path_factory.mktemp("sources"), "llama")


@pytest.fixture
def recipe(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / original.name


def import_refusal(recipe: Path) -> str:
    (recipe.parent / "stage").mkdir()
    with pytest.raises(CheckpointError) as caught:
        STAGE.run(open_context(load_recipe(recipe)), {}, recipe.parent / "stage", Silent())
    assert ".tmp" not in str(caught.value)
    return str(caught.value)


def edit(name: str, change: dict[str, Any]) -> Callable[[Path], None]:
    def apply(source: Path) -> None:
        path = source / name
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        (source / "chat_template.jinja").unlink(missing_ok=True)

    return apply


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "stop is text": (edit("generation_config.json", {"eos_token_id": "x"}), "eos_token_id must be"),
    "stop below zero": (edit("generation_config.json", {"eos_token_id": -1}), "eos_token_id must be"),
    "stop in an object": (edit("generation_config.json", {"eos_token_id": {"a": 1}}), "eos_token_id must be"),
    "stop is a fraction": (edit("generation_config.json", {"eos_token_id": 1.5}), "eos_token_id must be"),
    "hot": (edit("generation_config.json", {"do_sample": True, "temperature": "hot"}), "sampling defaults"),
    "half a surrogate": (edit("tokenizer_config.json", {"bos_token": "\ud800"}), "tokenizer_config.json: not readable"),
    "template is a number": (edit("tokenizer_config.json", {"chat_template": 5}), "chat_template must be"),
    "templates are numbers": (edit("tokenizer_config.json", {"chat_template": [5]}), "chat_template must be"),
    "template is binary": (lambda s: (s / "chat_template.jinja").write_bytes(b"\xff\xfe"), "not UTF-8"),
    "tokenizer cut off": (
        lambda s: (s / "tokenizer.json").write_bytes((s / "tokenizer.json").read_bytes()[:5000]),
        "source: tokenizer.json: not a tokenizer",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tokenizer_is_told_by_the_source_s_own_file(recipe: Path, name: str) -> None:
    damage, told = BROKEN[name]
    damage(recipe.parent / "source")
    assert told in import_refusal(recipe)


def test_a_tokenizer_of_another_model_is_refused(recipe: Path) -> None:
    shutil.rmtree(recipe.parent / "source")
    make_checkpoint(recipe.parent / "source", "llama", dtype="float16", vocab_size=97)
    assert "the embedding has 97 rows" in import_refusal(recipe)


def test_the_last_row_of_the_embedding_is_known() -> None:
    require_known([[0, 96], []], 97, "source")
    with pytest.raises(CheckpointError, match="token id 97"):
        require_known([[0, 97]], 97, "source")


def test_a_model_without_template_is_calibrated_on_plain_text(recipe: Path, tmp_path: Path) -> None:
    source = recipe.parent / "source"
    (source / "chat_template.jinja").unlink()
    text = ChatText(source)
    assert not text.has_template
    chosen = load_samples([recipe.with_name("calib.jsonl")], text, max_samples=4, max_tokens=256, seed=0)
    assert len(chosen.samples) == 4
    assert all(len(sample.ids) > 5 for sample in chosen.samples)


def test_what_a_killed_calibration_left_does_not_stay(recipe: Path, tmp_path: Path) -> None:
    context = open_context(load_recipe(recipe))
    (tmp_path / "import" / TOKENIZER).mkdir(parents=True)
    context.source.write_tokenizer(tmp_path / "import" / TOKENIZER)
    left = tmp_path / "calibrate" / "work" / ".part-boundary-00000.f32"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    CALIBRATE.run(context, {"import": tmp_path / "import"}, tmp_path / "calibrate", Silent())
    assert not (tmp_path / "calibrate" / "work").exists()
    assert (tmp_path / "calibrate" / "statistics.safetensors").is_file()


def test_a_config_that_readers_would_refuse_is_refused_before_any_weight_is_read(recipe: Path) -> None:
    edit("config.json", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e300}})(recipe.parent / "source")
    with pytest.raises(QuantkitError, match=r"source: config.json: rope theta"):
        open_context(load_recipe(recipe))


def test_a_matrix_that_no_group_divides_stays_in_8_bits_on_the_rung(original: Path) -> None:
    config = json.loads((original.parent / "source" / "config.json").read_text())
    schemes = rung_schemes(fuse(build_program(spec_from_config(config | {"intermediate_size": 100}))))
    assert schemes["layers.0.down"] == "W8A16"
    assert schemes["layers.0.qkv"] == "W4A16_G128"


def test_a_model_that_overflows_by_itself_is_told_apart_from_one_that_is_read_wrongly(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    for name in ("up", "down"):
        tensors[f"model.layers.0.mlp.{name}_proj.weight"].mul_(1e30)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source = open_source(str(folder))
    with pytest.raises(NumericsError, match="the unquantized model itself makes logits of NaN or Inf"):
        import_parity(source, fuse(build_program(source.spec)), [[5, 6, 7, 8]])
