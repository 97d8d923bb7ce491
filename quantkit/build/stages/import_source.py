"""import: is the source whole, finite, and read rightly? Its tokenizer, and parity with Transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from quantkit.build.context import Context, Outline
from quantkit.build.estimate import Cost, Sizes
from quantkit.build.parity import LIMIT, import_parity
from quantkit.build.progress import Progress
from quantkit.build.stage import Facts, Inputs, Stage
from quantkit.calibration.vocabulary import require_known
from quantkit.runtime.text import ChatText

TOKENIZER = "tokenizer"
_TEXTS = (
    "The quick brown fox jumps over the lazy dog, and then it rests.",
    "请把附件中的发票总结一下,并在星期五之前回复客户。",
    "def add(a, b):\n    return a + b\n",
)


def _inputs(context: Context) -> Inputs:
    return {"source": context.source_fingerprint}


def _run(context: Context, needs: Mapping[str, Path], folder: Path, progress: Progress) -> Facts:
    source = context.source
    text = ChatText.of_source(source, folder / TOKENIZER)
    room = context.program.max_position
    prompts = [text.encode(sample, add_special_tokens=True)[:room] for sample in _TEXTS]
    require_known(prompts, context.program.vocab_size, source.location)
    parity = import_parity(source, context.program, prompts, progress.step)
    return {
        "family": source.spec.family,
        "tensors": len(source.reader.names()),
        "parity": asdict(parity),
        "sealed": {
            # rounded up to a power of ten: the exact figure may differ in its last digits between runs
            "max_abs_diff_below": 10.0 ** math.ceil(math.log10(max(parity.max_abs_diff, 1e-12))),
            "limit": LIMIT,
            "prompts": parity.prompts,
            "tokens": parity.tokens,
            "transformers": parity.transformers,
        },
    }


def _cost(outline: Outline) -> Cost:
    sizes, tokens = Sizes.of(outline.program), 64
    return Cost(
        disk_bytes=20_000_000,
        memory_bytes=sizes.head * (4 + sizes.item) + sizes.layer * 4,
        multiply_adds=2 * tokens * (sizes.units + sizes.head),
        element_ops=4 * (sizes.units + sizes.table),
    )


STAGE = Stage("import", "Import the source", __name__, (), _inputs, _run, _cost)
