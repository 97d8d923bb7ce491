"""The sections of a gpu-check. Each is a function of (section, dry) that fills in rows and notes; a dry run takes the
CPU and Triton's interpreter at small sizes, and leaves out what only a device can tell."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from gpu import decoding, sliced, tuner
from gpu.ahead import DRY_TARGET, Ahead, Launchable
from gpu.cases import Case, build, launches, small
from gpu.decoder import llama
from gpu.report import Section
from quantkit_kernels.cuda.jit import JitLaunch
from quantkit_kernels.triton import Fact, KernelSpec, kernels

SLICE = "GPU_CHECK_SLICE"
"""Environment variable: the file that `tools/gpu_slice.py` made."""
FEW, MANY = 5, 70
"""Rows of a case, by its class: neither divides a tile."""


def device_facts(section: Section, dry: bool) -> None:
    """What is measured on."""
    import platform

    import triton

    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    if not dry:
        from quantkit_kernels.cuda.driver import Driver, load_library

        about, driver = torch.cuda.get_device_properties(0), Driver(load_library())
        facts |= {
            "device": about.name, "target": f"sm_{driver.capability}", "memory GiB": about.total_memory / 2**30,
            "multiprocessors": about.multi_processor_count, "L2 MiB": about.L2_cache_size / 2**20,
            "shared KiB a block": driver.shared_bytes / 1024, "driver's CUDA": driver.version / 1000,
            "torch's CUDA": torch.version.cuda,
        }  # fmt: skip
    section.rows = [{"what": name, "value": value} for name, value in facts.items()]


def _cases(dry: bool) -> Iterator[tuple[str, list[KernelSpec], dict[str, Fact]]]:
    """(name, the op's launches, facts) of every registered kernel, in the registry's own words."""
    from quantkit.compile.buckets import CLASSES
    from quantkit.compile.emit import choose
    from quantkit.compile.gates import CASES
    from quantkit.compile.places import Place
    from quantkit.compile.targets import capability

    specs, sm = kernels(), capability(DRY_TARGET) if dry else _capability()
    for name, (kernel, given) in CASES.items():
        facts = {**(small(given) if dry else given), "sm": sm}
        mine = specs[kernel]
        chosen = choose(Place(name, CLASSES["decode"], facts), list(specs.values()))
        others = chosen if isinstance(chosen, list) else []
        yield name, [mine if spec.launch == mine.launch else spec for spec in others] or [mine], facts
    for name in specs.keys() - {kernel for kernel, _ in CASES.values()}:
        yield f"{name} (no case in quantkit.compile.gates)", [], {}


def _capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _unserved(specs: list[KernelSpec], facts: dict[str, Fact], dry: bool) -> str | None:
    """Why no kernel is asked for the case here, or None."""
    if dry and facts.get("cache") == "BF16":
        return "Triton's interpreter neither rounds to BF16 nor multiplies it"
    return next((f"refused: {reason}" for spec in specs if (reason := spec.refusal(facts)) is not None), None)


def _served(section: Section, dry: bool) -> Iterator[tuple[dict[str, Any], list[KernelSpec], dict[str, Fact]]]:
    """(row, launches, facts) of every case that kernels serve here; the others get a row with the reason."""
    for name, specs, facts in _cases(dry):
        row: dict[str, Any] = {"case": name}
        section.rows.append(row)
        reason = _unserved(specs, facts, dry)
        if reason is None:
            yield row, specs, facts
        else:
            row["why"] = reason


def _build(
    specs: list[KernelSpec], facts: dict[str, Fact], dry: bool, rows: int | None = None, length: int = 0
) -> Case:
    if not specs:
        raise ValueError("nothing says what to check it with")
    rows = rows or (FEW if facts.get("rows") == "few" or dry else MANY)
    if dry and facts["op"] == "paged_attention" and facts["phase"] == "decode":
        rows = 3  # a sequence has 32 programs, which are interpreted one by one
    return build(facts, rows, length or (70 if dry else 4097), "cpu" if dry else "cuda")


def check_kernels(section: Section, dry: bool) -> None:
    """Every kernel against its reference on fresh random inputs, outputs poisoned, twice: the same bits."""
    ahead = _compiled(section, dry)
    for row, specs, facts in _served(section, dry):
        try:
            case = _build(specs, facts, dry)
            ready = launches(case, specs, facts, ahead)
            first, again = _bits(case, ready), _bits(case, ready)
            errors = case.errors()
            same = all(torch.equal(first[out], again[out]) for out in first)
            row |= {"ok": same and max(errors.values()) <= 1, "error / bound": max(errors.values()), "same bits": same}
        except Exception as error:  # noqa: BLE001 - one kernel's failure is one row
            row |= {"ok": False, "why": f"{type(error).__name__}: {error}"}


def _compiled(section: Section, dry: bool) -> Ahead:
    """Every case's kernels, compiled together; where that fails each is tried on its own later."""
    ahead, began = Ahead(dry), time.perf_counter()
    try:
        served = [(specs, facts) for _, specs, facts in _cases(dry) if _unserved(specs, facts, dry) is None]
        found = [(spec, facts) for specs, facts in served for spec in specs]
        count = ahead.compile(found)
        section.notes.append(f"{count} kernels compiled in {time.perf_counter() - began:.1f} s")
    except Exception as error:  # noqa: BLE001
        section.notes.append(f"{type(error).__name__}: {error}")
    return ahead


def check_launcher(section: Section, dry: bool) -> None:
    """Triton's own launch, where it can make one, gives the bits of ours; registers are as the metadata say."""
    if dry:
        section.notes.append("left out: machine code runs on a device only")
        return
    ahead = _compiled(section, dry)
    for row, specs, facts in _served(section, dry):
        try:
            case = _build(specs, facts, dry)
            ours = launches(case, specs, facts, ahead)
            row["registers"] = ahead.driver.function_attribute(ahead.load(specs[0], facts).function, 4)
            row["us a launch (ours)"] = _host_us(ours[0].launch)
            bits = _bits(case, ours)
        except Exception as error:  # noqa: BLE001
            row |= {"ok": False, "why": f"{type(error).__name__}: {error}"}
            continue
        try:
            theirs = []
            for spec in specs:
                how = spec.signature(facts)
                values = {each: case.values[each] for each in how.arguments}
                theirs.append(JitLaunch(spec, how, spec.grid(how, case.sizes), values))
            expected = _bits(case, theirs)
            row["ok"] = all(torch.equal(bits[out], expected[out]) for out in bits)
            row["us a launch (Triton)"] = _host_us(theirs[0].launch)
        except Exception as error:  # noqa: BLE001 - as on a machine without a C compiler
            row["why"] = f"Triton cannot launch here: {type(error).__name__}: {error}"


def _bits(case: Case, ready: Sequence[Launchable]) -> dict[str, torch.Tensor]:
    """What the launches make of poisoned outputs, as bytes."""
    case.poison()
    for launch in ready:
        launch.launch()
    return {out: case.values[out].clone().view(torch.uint8) for out in case.expected}


def _host_us(launch: Callable[[], Any], count: int = 200) -> float:
    launch()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        launch()
    spent = time.perf_counter() - began
    torch.cuda.synchronize()
    return spent / count * 1e6


def _milliseconds(work: Callable[[], Any], dry: bool) -> float:
    """Median of runs with a cold L2 cache."""
    if dry:
        began = time.perf_counter()
        work()
        return (time.perf_counter() - began) * 1e3
    from triton.testing import do_bench

    return float(do_bench(work, warmup=10, rep=60, return_mode="median"))


def measure_ceilings(section: Section, dry: bool) -> None:
    """What the device reaches at best: reading, copying, and products in FP16 and INT8."""
    device, size, edge = ("cpu", 1 << 16, 64) if dry else ("cuda", 1 << 30, 8192)
    data, out = torch.zeros(size // 2, dtype=torch.float16, device=device), None
    out = torch.empty_like(data)
    a, b = (torch.randn(edge, edge, device=device).to(torch.float32 if dry else torch.float16) for _ in range(2))
    codes = [torch.randint(-127, 128, (edge, edge), dtype=torch.int8, device=device) for _ in range(2)]
    for what, unit, amount, work in (
        ("read", "GB/s", size, lambda: torch.amax(data)),
        ("copy", "GB/s", 2 * size, lambda: out.copy_(data)),
        ("FP16 product", "TFLOP/s", 2 * edge**3, lambda: a @ b),
        ("INT8 product", "TOP/s", 2 * edge**3, lambda: torch._int_mm(codes[0], codes[1].t())),
    ):
        try:
            spent = _milliseconds(work, dry)
            section.rows.append({"what": what, "rate": amount / spent / (1e6 if unit == "GB/s" else 1e9), "unit": unit})
        except Exception as error:  # noqa: BLE001
            section.rows.append({"what": what, "ok": False, "why": f"{type(error).__name__}: {error}"})


def measure_speed(section: Section, dry: bool) -> None:
    """Bandwidth and operations of every kernel against what was measured now, and torch's FP16 and compiled forms."""
    ceilings = Section("ceilings")
    measure_ceilings(ceilings, dry)
    rate = {row["what"]: row.get("rate", float("nan")) for row in ceilings.rows}
    read = max(rate["read"], rate["copy"])
    ahead = _compiled(section, dry)
    torch_ms: dict[tuple[Any, ...], tuple[float, float]] = {}
    for name, specs, facts in _cases(dry):
        if _unserved(specs, facts, dry) is not None:
            continue
        for rows in (FEW,) if dry else (1, 16) if facts.get("rows") == "few" else (64, 2048):
            row: dict[str, Any] = {"case": name, "rows": rows}
            section.rows.append(row)
            try:
                case = _build(specs, facts, dry, rows)
                ready = launches(case, specs, facts, ahead)
                spent = _milliseconds(lambda: [launch.launch() for launch in ready], dry)  # noqa: B023
                row |= {"us": spent * 1e3, "GB/s": case.moved / spent / 1e6}
                row["of read"] = row["GB/s"] / read
                if case.operations:
                    row["TFLOP/s"] = case.operations / spent / 1e9
                    row["of FP16"] = row["TFLOP/s"] / rate["FP16 product"]
                if case.baseline is not None and not dry:
                    same = (facts["n"], facts["k"], facts["bias"], rows)
                    if same not in torch_ms:
                        torch_ms[same] = _torch_ms(case.baseline)
                    plain, compiled = torch_ms[same]
                    row |= {"x torch FP16": plain / spent, "x compiled": compiled / spent}
            except Exception as error:  # noqa: BLE001
                row |= {"ok": False, "why": f"{type(error).__name__}: {error}"}


def check_slice(section: Section, dry: bool) -> None:
    """The first layers of a real artifact, where they were carried along."""
    sliced.check(section, dry, Path(os.environ.get(SLICE, "gpu-slice.safetensors")))


def tune_linears(section: Section, dry: bool) -> None:
    """Tiles of the linears of Llama-3.2-1B's shape, for `keep_tuning.py` to keep."""
    shape = decoding.TINY.shape if dry else decoding.LLAMA_1B.shape
    tuner.tune(section, dry, llama(*shape), lambda work: _milliseconds(work, dry))


def _torch_ms(work: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds of plain torch and of torch.compile; NaN where it cannot compile."""
    plain = _milliseconds(work, dry=False)
    try:
        return plain, _milliseconds(torch.compile(work), dry=False)
    except Exception:  # noqa: BLE001 - a machine without a C compiler
        return plain, float("nan")
    finally:
        torch.compiler.reset()


SECTIONS: dict[str, Callable[[Section, bool], None]] = {
    "device": device_facts,
    "kernels": check_kernels,
    "launcher": check_launcher,
    "ceilings": measure_ceilings,
    "graphs": decoding.check_graphs,
    "slice": check_slice,
    "decoder": decoding.measure_decoder,
    "speed": measure_speed,
    "tuner": tune_linears,
}
"""Every section by its name."""
