"""The decoder's sections of a gpu-check: its graphs against launches one by one, and its speed beside Transformers."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from gpu.ahead import Ahead
from gpu.decoder import BLOCK, Call, Decoder, RandomWeights, llama
from gpu.report import Section
from quantkit.compile.cards import card_of_device
from quantkit.compile.roofline import Step, step_time
from quantkit.models.rope import cos_sin
from quantkit.runtime.backend_reference import ReferenceBackend, TensorMemory
from quantkit.runtime.buckets import Bucket
from quantkit.runtime.graphs import Graphs, OutOfDeviceMemory, padded
from quantkit.runtime.step import StepInputs


class Device:
    """A decoder as `Graphs` captures it; without CUDA a replay runs the calls."""

    def __init__(self, decoder: Decoder, cuda: bool) -> None:
        self._decoder, self._cuda = decoder, cuda
        self._calls: dict[Bucket, list[Call]] = {}
        self._pool = torch.cuda.graph_pool_handle() if cuda else None

    def write(self, name: str, values: np.ndarray) -> None:
        self._decoder.write_one(name, values)

    def run(self, bucket: Bucket) -> None:
        if bucket not in self._calls:
            self._calls[bucket] = self._decoder.bind(bucket.size, bucket.size, decodes=True)
        for call in self._calls[bucket]:
            call()

    def capture(self, bucket: Bucket) -> Any:
        if not self._cuda:
            return lambda: self.run(bucket)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                self.run(bucket)
        except torch.cuda.OutOfMemoryError as error:
            raise OutOfDeviceMemory(str(error).splitlines()[0]) from None
        return graph.replay

    def replay(self, graph: Any) -> None:
        graph()

    def addresses(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self._decoder.inputs.items()} | {
            "logits": self._decoder.logits.data_ptr()
        }


def step(lengths: list[int], blocks: int, vocab: int, *, prompts: bool = False) -> StepInputs:
    """One token of each sequence at the end of `lengths` positions, or all of them."""
    chance = np.random.default_rng()
    counts = lengths if prompts else [1] * len(lengths)
    return StepInputs.of_sequences(
        [chance.integers(0, vocab, count).tolist() for count in counts],
        [list(range(1 + row * blocks, 1 + (row + 1) * blocks)) for row in range(len(lengths))],
        starts=[0 if prompts else length - 1 for length in lengths], block_size=BLOCK,
    )  # fmt: skip


def check_graphs(section: Section, dry: bool) -> None:
    """A small decoder: against the reference, and each graph's replay against launches one by one, bit for bit."""
    device = "cpu" if dry else "cuda"
    program = llama(2, 128, 256, 4, 2, 96) if dry else llama(2, 2048, 8192, 32, 8, 4096)
    weights = RandomWeights(program, device)
    length, most = (24, 3) if dry else (200, 20)
    decoder = Decoder(program, weights, max_tokens=most * length, max_seqs=most, max_model_len=256,
                      ahead=Ahead(dry), device=device)  # fmt: skip
    for caches in decoder.caches:
        for cache in caches:
            cache.copy_(torch.randint(-90, 91, cache.shape, dtype=torch.int8))
    _compare(section, decoder, weights, [length, length - 5, length - 10], prompts=True)
    _compare(section, decoder, weights, [length, length - 5, length - 10], prompts=False)
    sizes = (2, 3) if dry else (1, 2, 4, 8, 16, 20)
    graphs = Graphs(Device(decoder, not dry), {"decode": sizes, "prefill": ()}, decoder.blocks)
    free = _free(dry)
    made = graphs.capture([Bucket("decode", size) for size in sizes])
    section.notes.append(
        f"{len(made.captured)} graphs captured, {len(made.shed)} shed, {(free - _free(dry)) / 2**20:.1f} MiB"
    )
    for sequences in range(1, most + 1, 1 if dry else 3):
        asked = step([length - row for row in range(sequences)], decoder.blocks, program.vocab_size)
        saved = [[cache.clone() for cache in caches] for caches in decoder.caches]
        decoder.logits.fill_(float("nan"))
        bucket = graphs.replay(asked)
        if not isinstance(bucket, Bucket):
            section.rows.append({"what": f"replay of {sequences}", "ok": False, "why": str(bucket)})
            continue
        replayed = decoder.logits[:sequences].clone()
        for caches, before in zip(decoder.caches, saved, strict=True):
            for cache, old in zip(caches, before, strict=True):
                cache.copy_(old)
        decoder.logits.fill_(float("nan"))
        decoder.write(padded(asked, bucket, decoder.blocks))
        for call in decoder.bind(bucket.size, bucket.size, decodes=True):
            call()
        same = torch.equal(decoder.logits[:sequences].view(torch.int16), replayed.view(torch.int16))
        section.rows.append(
            {"what": f"replay of {sequences} in {bucket.size}", "ok": same and bool(replayed.isfinite().all())}
        )
    held = graphs.graph_captures_total == len(made.captured)
    section.rows.append({"what": "no capture after ready", "ok": held})


def _compare(section: Section, decoder: Decoder, weights: RandomWeights, lengths: list[int], *, prompts: bool) -> None:
    """Logits of prompts, or of one token at the end of each, against the float32 reference over the same cache."""
    program, sequences, tokens = decoder.program, len(lengths), sum(lengths) if prompts else len(lengths)
    asked = step(lengths, decoder.blocks, program.vocab_size, prompts=prompts)
    caches = [{layer: side[which].cpu().clone() for layer, side in enumerate(decoder.caches)} for which in range(2)]
    memory = TensorMemory(
        {each.name: torch.from_numpy(getattr(asked, each.name)) for each in fields(asked)},
        {"logits": torch.zeros(sequences, program.vocab_size)}, *caches,
        {"global": tuple(torch.from_numpy(table) for table in cos_sin(program.ropes["global"], 256))},
    )  # fmt: skip
    ReferenceBackend(program, weights, memory).run(tokens, sequences, sequences)
    expected = memory.activations["logits"]
    decoder.write(asked)
    decoder.logits.fill_(float("nan"))
    for call in decoder.bind(tokens, sequences, decodes=not prompts):
        call()
    got = decoder.logits[:sequences].float().cpu()
    error = float((got - expected).norm() / expected.norm())
    agree = int((got.argmax(1) == expected.argmax(1)).sum())
    what = f"{'prompts' if prompts else 'decode'} against the reference"
    section.rows.append({"what": what, "ok": error < 0.02, "relative error": error,
                         "same top-1": f"{agree} of {sequences}"})  # fmt: skip


@dataclass(frozen=True)
class _Load:
    """What is timed: a model's shape (as `llama` takes it), batches of decode at a context, and a prompt."""

    shape: tuple[int, int, int, int, int, int]
    batches: tuple[int, ...]
    context: int
    prompt: int
    device: str


LLAMA_1B = _Load((16, 2048, 8192, 32, 8, 128256), (1, 8, 64), 512, 2048, "cuda")
TINY = _Load((1, 128, 256, 4, 2, 96), (1, 2), 20, 18, "cpu")


def measure_decoder(section: Section, dry: bool) -> None:
    """Llama-3.2-1B's shape with random weights: decode at batch 1, 8, 64 and a prompt of 2,048, beside Transformers."""
    load = TINY if dry else LLAMA_1B
    _ours(section, load, dry)
    _transformers(section, load, dry)


def _ours(section: Section, load: _Load, dry: bool) -> None:
    shape, batches, context, prompt, device = load.shape, load.batches, load.context, load.prompt, load.device
    program, ahead = llama(*shape), Ahead(dry)
    decoder = Decoder(
        program, RandomWeights(program, device), max_tokens=max(prompt, batches[-1]), max_seqs=batches[-1],
        max_model_len=prompt + BLOCK, ahead=ahead, device=device,
    )  # fmt: skip
    section.notes.append(f"weights of {decoder.weight_bytes / 1e6:.0f} MB; context {context}")
    card = card_of_device("" if dry else torch.cuda.get_device_name(), ahead.target)
    section.notes.append(f"predicted as {card.line() if card else f'nothing: no card of {ahead.target} is known'}")
    graphs = Graphs(Device(decoder, not dry), {"decode": batches, "prefill": ()}, decoder.blocks)
    graphs.capture([Bucket("decode", size) for size in batches])
    for batch in batches:
        asked = step([context] * batch, decoder.blocks, program.vocab_size)
        calls = decoder.bind(batch, batch, decodes=True)
        row: dict[str, Any] = {"what": f"decode, batch {batch}"}
        section.rows.append(row)
        row["ms by graph"] = _step_ms(lambda: graphs.replay(asked), dry)  # noqa: B023
        row["ms launch by launch"] = _step_ms(lambda: [call() for call in calls], dry)  # noqa: B023
        row["tokens/s"] = batch / row["ms by graph"] * 1e3
        row["GB/s of weights"] = decoder.weight_bytes / row["ms by graph"] / 1e6
        if card:
            row["ms predicted"] = step_time(program, Step.decode(batch, context), card).seconds * 1e3
        row["ok"] = bool(decoder.logits[:batch].isfinite().all())
    asked = step([prompt], decoder.blocks, program.vocab_size, prompts=True)
    decoder.write(asked)
    calls = decoder.bind(prompt, 1, decodes=False)
    spent = _step_ms(lambda: [call() for call in calls], dry, 3)
    finite = bool(decoder.logits[:1].isfinite().all())
    section.rows.append({"what": f"prompt of {prompt}", "ms launch by launch": spent, "ok": finite})
    if card:
        section.rows[-1]["ms predicted"] = step_time(program, Step.prefill(prompt, prompt), card).seconds * 1e3


def _transformers(section: Section, load: _Load, dry: bool) -> None:
    """The same shape in Transformers, eager FP16, random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, hidden, inner, heads, kv_heads, vocab = load.shape
    config = LlamaConfig(vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=True)  # fmt: skip
    with torch.device(load.device), torch.inference_mode():
        model = LlamaForCausalLM(config).to(torch.float32 if dry else torch.float16).eval()
        for batch in load.batches:
            ids = torch.randint(0, vocab, (batch, load.context))
            cache, one = model(ids, use_cache=True, logits_to_keep=1).past_key_values, ids[:, :1]
            spent = _step_ms(lambda: model(one, past_key_values=cache, use_cache=True), dry)  # noqa: B023
            section.rows.append(
                {
                    "what": f"Transformers FP16, batch {batch}",
                    "ms launch by launch": spent,
                    "tokens/s": batch / spent * 1e3,
                }
            )
        ids = torch.randint(0, vocab, (1, load.prompt))
        spent = _step_ms(lambda: model(ids, use_cache=True, logits_to_keep=1), dry, 3)
        section.rows.append({"what": f"Transformers FP16, prompt of {load.prompt}", "ms launch by launch": spent})


def _step_ms(work: Call, dry: bool, count: int = 20) -> float:
    """Median milliseconds of a step, the host's part included."""
    spent = []
    for _ in range(1 if dry else count + 2):
        began = time.perf_counter()
        work()
        if not dry:
            torch.cuda.synchronize()
        spent.append((time.perf_counter() - began) * 1e3)
    return float(np.median(spent if dry else spent[2:]))


def _free(dry: bool) -> int:
    return 0 if dry else int(torch.cuda.mem_get_info()[0])
