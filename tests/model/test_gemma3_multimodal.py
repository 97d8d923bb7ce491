"""The text part of an image-and-text Gemma 3 checkpoint is opened as a text model of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from quantkit.models import open_source
from quantkit.program import build_program, fuse
from tests.model.parity import Runner, worst
from tests.tiny import make_model, write_tokenizer

LENGTH = 32


@pytest.fixture(scope="module")
def whole() -> Gemma3ForConditionalGeneration:
    """A tiny image-and-text model whose text part has the random weights of `tests.tiny`."""
    text = make_model("gemma3_text")
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(
        text_config=text.config.to_dict(),
        vision_config={"model_type": "siglip_vision_model", **vision},
        mm_tokens_per_image=4,
        image_token_index=383,
    )
    model = Gemma3ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.tie_weights()
    return model


@pytest.mark.parametrize("form", ["published", "transformers 5"])
def test_text_part_gives_the_logits_of_the_whole_model(
    whole: Gemma3ForConditionalGeneration, form: str, tmp_path: Path
) -> None:
    whole.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, "gemma3_text")
    if form == "transformers 5":  # names as the module tree has them, which `from_pretrained` reads as well
        path = tmp_path / "model.safetensors"
        save_file({_module_name(name): tensor for name, tensor in load_file(path).items()}, path)
    else:
        assert "language_model.model.norm.weight" in load_file(tmp_path / "model.safetensors")
    source = open_source(str(tmp_path))
    ids = torch.randint(0, 383, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        theirs = whole(input_ids=ids).logits
    runner = Runner(fuse(build_program(source.spec)), source, 1, LENGTH, "reference")
    assert worst(runner.decode(ids.tolist(), 9), list(theirs)) <= 1e-4


def _module_name(name: str) -> str:
    if name.startswith("language_model.model."):
        return "model.language_model." + name.removeprefix("language_model.model.")
    return "model." + name


def test_what_is_written_beside_the_weights_describes_the_text_model(
    whole: Gemma3ForConditionalGeneration, tmp_path: Path
) -> None:
    whole.save_pretrained(tmp_path / "in")
    write_tokenizer(tmp_path / "in", "gemma3_text")
    source = open_source(str(tmp_path / "in"))
    source.write_tokenizer(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert config["vocab_size"] == 384
    assert not [name for name in source.reader.names() if "vision" in name or "projector" in name]
