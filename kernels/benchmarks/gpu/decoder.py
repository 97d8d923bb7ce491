"""A decoder of random weights on a GPU, out of a Program and the registered kernels; its graphs, and its speed.

The rows whose logits are wanted are gathered as the embedding gathers its table's. Weights are random words in the
kernels' layout, so a model of a billion weights is there at once; where a reference is wanted they are unpacked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu.ahead import Ahead
from gpu.report import Section
from quantkit.compile.buckets import CLASSES, FEW_ROWS
from quantkit.compile.emit import choose
from quantkit.compile.places import Place, places
from quantkit.formats.schemes import scheme
from quantkit.models.rope import cos_sin
from quantkit.models.spec import DecoderSpec, LayerSpec, RopeSpec
from quantkit.program import build_program, fuse, lower_precision, plan_buffers
from quantkit.program.ir import Node, Program, Weight
from quantkit.program.passes import buffer_widths
from quantkit.runtime.backend_reference import ReferenceBackend, TensorMemory
from quantkit.runtime.buckets import Bucket
from quantkit.runtime.graphs import Graphs, OutOfDeviceMemory, padded
from quantkit.runtime.step import StepInputs
from quantkit_kernels.triton import kernels
from quantkit_kernels.triton.layout import unpack_words
from quantkit_kernels.triton.paged_attention import NO_WINDOW, workspace

BLOCK = 16
Call = Callable[[], Any]


def llama(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int) -> Program:
    """A Llama of that shape in W4A16 (group 128), its head in W8A16, its cache in INT8."""
    dim = hidden // heads
    spec = DecoderSpec(
        family="llama", dtype="float16", vocab_size=vocab, hidden_size=hidden, intermediate_size=inner,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, norm_eps=1e-5, layers=(LayerSpec(),) * layers,
        ropes={"global": RopeSpec("default", 500000.0, dim)}, max_position=8192,
    )  # fmt: skip
    fused = fuse(build_program(spec))
    schemes = dict.fromkeys(fused.groups(), "W4A16_G128") | {"lm_head": "W8A16"}
    return plan_buffers(lower_precision(fused, schemes, "INT8"))


class RandomWeights:
    """Weights of a program on a device, by name; a WeightProvider of the same numbers for the reference."""

    def __init__(self, program: Program, device: str) -> None:
        self.matrices: dict[str, tuple[Tensor, Tensor]] = {}
        self.arrays: dict[str, Tensor] = {}
        for name, weight in program.weights.items():
            if weight.kind == "matrix":
                self.matrices[name] = _random_matrix(weight, device)
            elif weight.kind == "table":
                self.arrays[name] = torch.randn(weight.shape, device=device).half()
            elif weight.kind == "scales":
                self.arrays[name] = torch.rand(weight.shape, device=device) * 0.02 + 0.01
            else:
                self.arrays[name] = 1 + 0.1 * torch.randn(weight.shape, device=device)

    def load(self, weight: Weight) -> Any:
        """The weight in float32, on the CPU."""
        if weight.name in self.arrays:
            return self.arrays[weight.name].float().cpu().numpy()
        words, scale = (part.cpu() for part in self.matrices[weight.name])
        codes = unpack_words(words, scheme(weight.scheme).bits, weight.shape[1]).float()
        return (codes * scale.float().T.repeat_interleave(weight.shape[1] // scale.shape[0], 1)).numpy()


def _random_matrix(weight: Weight, device: str) -> tuple[Tensor, Tensor]:
    """int32 words `[N, K · bits / 32]` and float16 scales `[groups, N]`; weights spread by about 0.7 / sqrt(K)."""
    (n, k), how = weight.shape, scheme(weight.scheme)
    words = torch.randint(-(2**31), 2**31, (n, k * how.bits // 32), dtype=torch.int64, device=device).int()
    groups = k // how.group_size if how.group_size else 1
    spread = 0.7 / k**0.5 / (2**how.bits / 12**0.5)
    return words, (spread * (0.5 + torch.rand(groups, n, device=device))).half()


class Decoder:
    """A program bound to kernels on a device; ValueError, when a step is bound, for a node that has none."""

    def __init__(
        self, program: Program, weights: RandomWeights, *, max_tokens: int, max_seqs: int, max_model_len: int,
        ahead: Ahead, device: str,
    ) -> None:  # fmt: skip
        self.program, self._weights, self._ahead = program, weights, ahead
        self.blocks = -(-max_model_len // BLOCK)
        sizes = {"T": max_tokens, "B": max_seqs, "B+1": max_seqs + 1, "M": self.blocks, "R": max_seqs}
        buffers = [
            torch.zeros(width * max_tokens, dtype=torch.float16, device=device) for width in buffer_widths(program)
        ]
        self.inputs: dict[str, Tensor] = {}
        self._values: dict[str, Tensor] = {}
        for name, value in program.values.items():
            shape = [sizes[dim] if isinstance(dim, str) else dim for dim in value.shape]
            if value.dtype == "int32":
                self.inputs[name] = torch.zeros(shape, dtype=torch.int32, device=device)
            elif value.buffer is not None:
                self._values[name] = buffers[value.buffer][: shape[0] * shape[1]].view(shape)
            elif value.dtype == "float32":
                self._values[name] = torch.zeros(shape, dtype=torch.float16, device=device)
        shape = (max_seqs * self.blocks + 1, program.kv[0].num_kv_heads, BLOCK, program.kv[0].head_dim)
        self.caches = [[torch.zeros(shape, dtype=torch.int8, device=device) for _ in range(2)] for _ in program.kv]
        self._rope = [torch.from_numpy(table).to(device) for table in cos_sin(program.ropes["global"], max_model_len)]
        heads = next(int(str(node.attrs["num_heads"])) for node in program.nodes if node.op == "paged_attention")
        self._parts = workspace(max_seqs, heads, program.kv[0].head_dim, torch.device(device))
        self._last = torch.zeros(max_seqs, program.hidden_size, dtype=torch.float16, device=device)
        self._specs = list(kernels().values())
        everywhere = [place for each in CLASSES.values() for place in places(program, ahead.target, each)]
        everywhere += [_of_rows(place, 1) for place in everywhere]  # the head has a row a sequence
        found = [(place.facts, choose(place, self._specs)) for place in everywhere]
        ahead.compile([(spec, facts) for facts, chosen in found if not isinstance(chosen, str) for spec in chosen])

    @property
    def logits(self) -> Tensor:
        """float16 `[max_seqs, V]`."""
        return self._values["logits"]

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step reads of weights."""
        return sum(words.nbytes + scale.nbytes for words, scale in self._weights.matrices.values())

    def write(self, inputs: StepInputs) -> None:
        """Copy a step's inputs to the device."""
        for each in fields(inputs):
            self.write_one(each.name, getattr(inputs, each.name))

    def write_one(self, name: str, values: np.ndarray) -> None:
        """Copy the leading part of one input."""
        into = self.inputs[name][: len(values)]
        into = into[:, : values.shape[1]] if values.ndim == 2 else into
        into.copy_(torch.from_numpy(np.ascontiguousarray(values)))

    def bind(self, tokens: int, sequences: int, decodes: bool) -> list[Call]:
        """The calls of a step of these sizes, over buffers that stay."""
        name = "prefill" if not decodes else "decode" if tokens <= FEW_ROWS else "decode-wide"
        found = {place.node: place for place in places(self.program, self._ahead.target, CLASSES[name])}
        calls: list[Call] = []
        for node in self.program.nodes:
            calls += self._bind(node, found[node.name], tokens, sequences)
        return calls

    def _bind(self, node: Node, place: Place, tokens: int, sequences: int) -> list[Call]:
        values = self._arguments(node, tokens, sequences)
        head = node.op == "logits"
        if head:
            place = _of_rows(place, sequences)
        chosen = choose(place, self._specs)
        if isinstance(chosen, str):
            raise ValueError(f"{node.name}: {chosen}")
        before: list[Call] = []
        if head:
            facts = {**place.facts, "op": "embedding", "width": self.program.hidden_size, "table": "fp16", "scale": 1.0}
            rows = {"token_ids": self.inputs["logits_rows"][:sequences], "table": values["source"]}
            gathered = {**rows, "out": values["x"], "scale": 1.0}
            before = [self._ahead.launch(kernels()["embedding"], facts, {"rows": sequences}, gathered).launch]
        sizes = {"rows": sequences if head else tokens, "sequences": sequences, "n": values.get("n", 0)}
        return before + [self._ahead.launch(spec, place.facts, sizes, values).launch for spec in chosen]

    def _arguments(self, node: Node, tokens: int, sequences: int) -> dict[str, Any]:
        """What the node's kernels may ask for, by argument."""
        x = [self.inputs.get(name, self._values.get(name)) for name in node.inputs]
        y = [self._values.get(name) for name in node.outputs]
        first = None if x[0] is None else x[0][:tokens]
        out = None if y[0] is None else y[0][:tokens]
        arrays = {role: self._weights.arrays.get(name) for role, name in node.weights.items()}
        match node.op:
            case "linear" | "logits":
                words, scale = self._weights.matrices[node.weights["weight"]]
                n, k = self.program.weights[node.weights["weight"]].shape
                made = {"x": first, "words": words, "scale": scale, "out": out, "rows": tokens, "n": n, "k": k}
                if node.op == "logits":
                    made |= {"source": first, "x": self._last[:sequences], "out": self.logits[:sequences],
                             "rows": sequences}  # fmt: skip
                return made
            case "rms_norm" | "add_rms_norm":
                made = {
                    "x": first,
                    "weight": arrays["weight"],
                    "y": out,
                    "eps": node.attrs["eps"],
                    "offset": node.attrs["offset"],
                }
                if node.op == "add_rms_norm":
                    made |= {"residual": x[1][:tokens], "residual_out": y[1][:tokens]}
                return made
            case "gated_act":
                return {"gate_up": first, "out": out}
            case "embedding":
                return {"token_ids": first, "table": arrays["table"], "out": out, "scale": node.attrs["scale"]}
        k_cache, v_cache = self.caches[node.layer or 0]
        shared = {"k_cache": k_cache, "v_cache": v_cache, "k_scale": arrays["k_scale"], "v_scale": arrays["v_scale"]}
        if node.op == "qk_norm_rope_kv_write":
            return shared | {
                "qkv": first, "cos": self._rope[0], "sin": self._rope[1],
                "positions": self.inputs["positions"][:tokens],
                "slot_mapping": self.inputs["slot_mapping"][:tokens], "q_out": out, "eps": 1e-5, "offset": 0.0,
            }  # fmt: skip
        return shared | {
            "q": first, "out": out, "block_table": self.inputs["block_table"][:sequences],
            "seq_lens": self.inputs["seq_lens"][:sequences], "partial": self._parts[0], "log_sum": self._parts[1],
            "query_start_loc": self.inputs["query_start_loc"][: sequences + 1], "sequences": sequences,
            "tokens": tokens, "scale": node.attrs["scale"], "softcap": 1.0, "window": NO_WINDOW,
            "table_width": self.blocks,
        }  # fmt: skip


def _of_rows(place: Place, rows: int) -> Place:
    """The place for another number of rows."""
    return replace(place, facts={**place.facts, "rows": "few" if rows <= FEW_ROWS else "many"})


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


_LLAMA_1B = _Load((16, 2048, 8192, 32, 8, 128256), (1, 8, 64), 512, 2048, "cuda")
_TINY = _Load((1, 128, 256, 4, 2, 96), (1, 2), 20, 18, "cpu")


def measure_decoder(section: Section, dry: bool) -> None:
    """Llama-3.2-1B's shape with random weights: decode at batch 1, 8, 64 and a prompt of 2,048, beside Transformers."""
    load = _TINY if dry else _LLAMA_1B
    _ours(section, load, dry)
    _transformers(section, load, dry)


def _ours(section: Section, load: _Load, dry: bool) -> None:
    shape, batches, context, prompt, device = load.shape, load.batches, load.context, load.prompt, load.device
    program = llama(*shape)
    decoder = Decoder(
        program, RandomWeights(program, device), max_tokens=max(prompt, batches[-1]), max_seqs=batches[-1],
        max_model_len=prompt + BLOCK, ahead=Ahead(dry), device=device,
    )  # fmt: skip
    section.notes.append(f"weights of {decoder.weight_bytes / 1e6:.0f} MB; context {context}")
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
        row["ok"] = bool(decoder.logits[:batch].isfinite().all())
    asked = step([prompt], decoder.blocks, program.vocab_size, prompts=True)
    decoder.write(asked)
    calls = decoder.bind(prompt, 1, decodes=False)
    spent = _step_ms(lambda: [call() for call in calls], dry, 3)
    finite = bool(decoder.logits[:1].isfinite().all())
    section.rows.append({"what": f"prompt of {prompt}", "ms launch by launch": spent, "ok": finite})


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
