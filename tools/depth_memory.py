"""Peak anonymous memory of every build stage for a synthetic model, and for the same with four times the layers.

    python tools/depth_memory.py --tokenizer SMOLLM2 [--layers 6] [--times 4] [--out TABLE.md]

The model is random, of SmolLM2-135M's widths; its tokenizer and other sizes come from `--tokenizer`, a folder of
that model in Hugging Face form.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

QUANTKIT = Path(sys.executable).with_name("quantkit")
ALLOWED = 1.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--times", type=int, default=4)
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        few, many = (
            peaks(Path(folder) / f"deep-{layers}", layers, args.tokenizer)
            for layers in (args.layers, args.layers * args.times)
        )
    lines = [
        f"| stage | {args.layers} layers, MB | {args.layers * args.times} layers, MB | ratio |",
        "|---|---|---|---|",
        *(
            f"| {name} | {few[name] / 1e6:.0f} | {many[name] / 1e6:.0f} | {many[name] / few[name]:.2f} |"
            for name in few
        ),
    ]
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join([f"Made by `python {' '.join(sys.argv)}`.", "", *lines, ""]))
    sys.exit(any(many[name] > ALLOWED * few[name] for name in few))


def peaks(folder: Path, layers: int, tokenizer: Path) -> dict[str, int]:
    """Bytes by stage of one build of a random model."""
    make_model(folder / "source", layers, tokenizer)
    recipe = {
        "version": 1,
        "model": {"source": "source"},
        "calibration": {"max_samples": 16},
        "quantization": {"schemes": ["W8A16", "W4A16_G64"], "budget_bits": 6.5},
        "gate": {"max_samples": 16, "max_prompts": 8, "max_new_tokens": 16},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = [QUANTKIT, "build", folder / "recipe.yaml", "--out", folder / "artifact"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if done.returncode not in (0, 10, 11, 12):  # what a random model scores does not matter here
        sys.exit(done.returncode)
    record = json.loads((folder / "artifact/evidence/run/run.json").read_text())
    return {stage["name"]: stage["peak_anon_bytes"] for stage in record["stages"]}


def make_model(folder: Path, layers: int, tokenizer: Path) -> None:
    """A random Llama of `layers` layers in float16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    given = json.loads((tokenizer / "config.json").read_text())
    torch.manual_seed(0)
    config = LlamaConfig(**{**given, "num_hidden_layers": layers, "dtype": "float16"})
    LlamaForCausalLM(config).to(torch.float16).save_pretrained(folder)
    for path in tokenizer.iterdir():
        if path.suffix in (".json", ".jinja", ".txt", ".model") and not (folder / path.name).exists():
            shutil.copy(path, folder)


if __name__ == "__main__":
    main()
