"""The launcher calls the driver in order, launches what the metadata says, and falls back loudly for every reason."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantkit.artifact.kernels import KernelEntry, StoredKernels, TargetKernels
from quantkit.runtime.gpu_kernels import REASONS, KernelSet
from quantkit_kernels.cuda.arguments import Argument
from quantkit_kernels.cuda.driver import Driver, DriverError
from quantkit_kernels.cuda.elf import check_elf, defines
from quantkit_kernels.cuda.jit import JitLaunch
from quantkit_kernels.cuda.kernel import LaunchPlan, LoadedKernel
from quantkit_kernels.cuda.source import source_digest
from quantkit_kernels.triton import kernels
from tests.launch.fake_driver import FakeLibrary
from tests.launch.launcher_bytes import smallest_cubin

NAME = "gated_act-0123456789abcdef"
SPEC = kernels()["gated_act"]
FACTS = {"op": "gated_act", "width": 64, "activation": "silu", "dtype": "fp16", "rows": "few", "phase": "decode"}
METADATA: dict[str, Any] = {
    "kernel": "gated_act", "symbol": "gated_act_kernel", "target": "sm_90", "num_warps": 4, "num_ctas": 1,
    "arguments": [
        {"name": "gate_up", "type": "*fp16", "divisible_by": 16}, {"name": "out", "type": "*fp16", "divisible_by": 16},
        {"name": "global_scratch", "type": "*i8", "divisible_by": 1},
        {"name": "profile_scratch", "type": "*i8", "divisible_by": 1},
    ],
    "constants": dict(SPEC.signature(FACTS).constants),
    "folded": {}, "shared_bytes": 0, "scratch_bytes": [0, 0], "convention": 1,
    "source": source_digest(SPEC.function.__module__), "versions": {"triton": "3.9.0"},
}  # fmt: skip
PLAN = LaunchPlan.from_metadata(METADATA)
CUBIN = smallest_cubin("gated_act_kernel")
VALUES = {"gate_up": 0x7F00_0000, "out": 0x7F00_1000}
NUMBERS = (
    Argument("x", "*fp16", 16), Argument("rows", "i32"), Argument("eps", "fp32"),
    Argument("global_scratch", "*i8"), Argument("profile_scratch", "*i8"),
)  # fmt: skip


def test_the_primary_context_is_retained_and_made_current_only_where_it_is_not() -> None:
    shared, alone = FakeLibrary(current=0xC0), FakeLibrary(current=0)
    Driver(shared)
    assert [call[0] for call in shared.calls] == [
        "cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxGetCurrent",
    ]  # fmt: skip
    driver = Driver(alone, ordinal=1)
    assert alone.calls[-1] == ("cuCtxSetCurrent", 0xC0)
    assert (driver.capability, driver.shared_bytes, driver.version) == (90, 232448, 13020)
    driver.close()
    assert alone.calls[-1] == ("cuDevicePrimaryCtxRelease_v2", 1)


def test_a_launch_passes_grid_block_shared_memory_stream_and_arguments_in_order() -> None:
    library = FakeLibrary()
    kernel = LoadedKernel(Driver(library), replace(PLAN, arguments=NUMBERS, shared_bytes=1000, num_warps=8), CUBIN)
    launch = kernel.prepare((5, 2, 1), {"eps": 1.0, "rows": 3, "x": 0x1230})
    launch.launch(0x57)
    _, function, *shape = library.calls[-1]
    assert function == 0xF00
    assert shape[:-1] == [5, 2, 1, 8 * 32, 1, 1, 1000, 0x57]
    expected = [0x1230, 3, 0x3F800000, 0, 0]
    assert shape[-1] == [number.to_bytes(8, "little") for number in expected]
    launch.set("rows", 7)
    launch.launch(0)
    assert library.calls[-1][-1][1] == (7).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("size", "asked"), [(48 << 10, []), ((48 << 10) + 1, [("cuFuncSetAttribute", 0xF00, 8, 49153)])]
)
def test_shared_memory_beyond_48_kilobytes_is_asked_for(size: int, asked: list[Any]) -> None:
    library = FakeLibrary()
    LoadedKernel(Driver(library), replace(PLAN, shared_bytes=size), CUBIN)
    assert library.named("cuFuncSetAttribute") == asked


def test_an_empty_grid_launches_nothing() -> None:
    library = FakeLibrary()
    LoadedKernel(Driver(library), PLAN, CUBIN).prepare((0, 1, 1), VALUES).launch(0)
    assert not library.named("cuLaunchKernel")


def test_numbers_that_were_compiled_in_are_compared_and_not_passed() -> None:
    library = FakeLibrary()
    kernel = LoadedKernel(Driver(library), replace(PLAN, folded={"n": 1}), CUBIN)
    kernel.prepare((1, 1, 1), {**VALUES, "n": 1}).launch(0)
    assert len(library.calls[-1][-1]) == 4
    with pytest.raises(ValueError, match="gated_act: n is 2, and the code is made for 1"):
        kernel.prepare((1, 1, 1), {**VALUES, "n": 2})
    with pytest.raises(ValueError, match="no value for n"):
        kernel.prepare((1, 1, 1), VALUES)


def test_missing_and_unknown_arguments_are_named() -> None:
    kernel = LoadedKernel(Driver(FakeLibrary()), PLAN, CUBIN)
    with pytest.raises(ValueError, match="gated_act: no value for gate_up"):
        kernel.prepare((1, 1, 1), {"out": 16})
    with pytest.raises(ValueError, match="gated_act: there is no argument bias"):
        kernel.prepare((1, 1, 1), {**VALUES, "bias": 0})


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"])
def test_a_driver_call_that_fails_is_named(call: str) -> None:
    with pytest.raises(DriverError, match=rf"{call}: CUDA_ERROR_100 \(100\)"):
        Driver(FakeLibrary(current=0, fails={call: 100}))


@pytest.mark.parametrize("call", ["cuModuleGetFunction", "cuFuncSetAttribute"])
def test_a_module_that_cannot_be_used_is_unloaded(call: str) -> None:
    library = FakeLibrary(fails={call: 500})
    with pytest.raises(DriverError, match=call):
        LoadedKernel(Driver(library), replace(PLAN, shared_bytes=65536), CUBIN)
    assert library.named("cuModuleUnload") == [("cuModuleUnload", 0xD1)]


def test_every_truncation_of_machine_code_is_refused_before_the_driver_sees_it() -> None:
    library = FakeLibrary()
    driver = Driver(library)
    for size in range(len(CUBIN)):
        with pytest.raises(ValueError, match=r"truncated|no CUDA machine code|without sections"):
            LoadedKernel(driver, PLAN, CUBIN[:size])
    assert not library.named("cuModuleLoadData")
    assert check_elf(CUBIN) == {"", ".shstrtab", ".text.gated_act_kernel"}
    assert defines(CUBIN, "gated_act_kernel")
    assert not defines(CUBIN, "gated_act")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"arguments": []}, "no list of arguments"),
        ({"arguments": METADATA["arguments"][:2]}, "end with global_scratch and profile_scratch"),
        ({"arguments": [METADATA["arguments"][0], *METADATA["arguments"]]}, "names of their own"),
        ({"arguments": [{"name": "x", "type": "fp16", "divisible_by": 1}, *METADATA["arguments"]]}, "argument x"),
        ({"arguments": [{"name": "x", "type": "i32", "divisible_by": 3}, *METADATA["arguments"]]}, "argument x"),
        ({"arguments": ["x", "y", "z"]}, "must state its name"),
        ({"folded": [1]}, "folded"),
        ({"folded": {"n": "1"}}, "folded"),
        ({"scratch_bytes": [0]}, "two sizes"),
        ({"scratch_bytes": [0, -1]}, "two sizes"),
        ({"num_warps": 0}, "num_warps from 1 to 32"),
        ({"num_warps": 4.0}, "must be numbers"),
        ({"shared_bytes": 2**40}, "must be numbers"),
        ({"convention": None}, "must be numbers"),
        ({"symbol": "a b"}, "symbol a name"),
        ({"source": 5}, "must be texts"),
        ({"versions": {}}, "Triton that compiled it"),
    ],
)
def test_metadata_of_another_form_is_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        LaunchPlan.from_metadata({**METADATA, **change})


@pytest.mark.parametrize(
    ("release", "known"),
    [("3.5.1", False), ("3.6.0", True), ("3.9.0+git1", True), ("3.10.0", False), ("4.0", False), ("x", False)],
)
def test_the_launcher_speaks_to_the_releases_it_is_proven_for(release: str, known: bool) -> None:
    assert replace(PLAN, triton=release).known_convention is known
    assert not replace(PLAN, triton=release, convention=2).known_convention


def stored(folder: Path, cubin: bytes = CUBIN, **change: Any) -> StoredKernels:
    body = {**METADATA, "sha256": {"cubin": hashlib.sha256(cubin).hexdigest()}, **change}
    (folder / f"{NAME}.json").write_text(json.dumps(body))
    (folder / f"{NAME}.cubin").write_bytes(cubin)
    entry = KernelEntry(NAME, "gated_act", "sm_90", ("decode",), 4, 20, 0, 0, len(cubin), {})
    return StoredKernels(folder, TargetKernels("sm_90", (entry,), {}, {}))


def prepare(kernel_set: KernelSet, name: str | None = NAME) -> Any:
    return kernel_set.prepare(name, SPEC, FACTS, {"rows": 3}, VALUES)


def test_a_kernel_of_the_artifact_is_loaded_once_and_launched_with_its_grid(tmp_path: Path) -> None:
    library = FakeLibrary()
    kernel_set = KernelSet(Driver(library), stored(tmp_path))
    for _ in range(2):
        prepare(kernel_set).launch(0)
    assert len(library.named("cuModuleLoadData")) == 1
    assert [call[2:5] for call in library.named("cuLaunchKernel")] == [(3, 1, 1)] * 2
    assert not any(kernel_set.fallbacks.values())
    kernel_set.close()
    assert len(library.named("cuModuleUnload")) == 1


def _gone(kernels_: StoredKernels) -> None:
    (kernels_.folder / f"{NAME}.cubin").unlink()


def _cut(kernels_: StoredKernels) -> None:
    (kernels_.folder / f"{NAME}.cubin").write_bytes(CUBIN[:-1])


def _cut_description(kernels_: StoredKernels) -> None:
    (kernels_.folder / f"{NAME}.json").write_text('{"kernel": "gated')


@pytest.mark.parametrize(
    ("reason", "library", "change", "damage", "told"),
    [
        ("no_code", {"capability": (8, 7)}, None, None, "no code for sm_87"),
        ("no_code", {}, {"target": "sm_80"}, None, "gated_act for sm_80"),
        ("triton_version", {}, {"versions": {"triton": "3.10.0"}}, None, "Triton 3.10.0"),
        ("triton_version", {}, {"convention": 2}, None, "Triton 3.9.0"),
        ("other_source", {}, {"source": "0" * 16}, None, "source has changed"),
        ("other_tiles", {}, {"constants": {**METADATA["constants"], "BLOCK": 512}}, None, "other constants"),
        ("other_tiles", {}, {"num_warps": 8}, None, "other constants"),
        ("unsupported", {}, {"num_ctas": 2}, None, "clusters of 2 blocks"),
        ("unsupported", {}, {"scratch_bytes": [0, 64]}, None, "scratch memory of 64 bytes"),
        ("shared_memory", {"shared": 101376}, {"shared_bytes": 166912}, None, "needs 166912 bytes"),
        ("not_loaded", {"fails": {"cuModuleLoadData": 209}}, {}, None, "cuModuleLoadData: CUDA_ERROR_209"),
        ("not_loaded", {}, {"num_warps": 99}, None, "num_warps"),
        ("not_loaded", {}, {}, _gone, "No such file"),
        ("not_loaded", {}, {}, _cut, "is not the one that its description names"),
        ("not_loaded", {}, {}, _cut_description, "is not readable"),
    ],
)  # fmt: skip
def test_every_reason_to_fall_back_is_one_line_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reason: Any, library: dict[str, Any],
    change: dict[str, Any] | None, damage: Callable[[StoredKernels], None] | None, told: str,
) -> None:  # fmt: skip
    kernels_ = None if change is None else stored(tmp_path, **change)
    if damage is not None and kernels_ is not None:
        damage(kernels_)
    kernel_set = KernelSet(Driver(FakeLibrary(**library)), kernels_)
    with caplog.at_level(logging.WARNING):
        assert isinstance(prepare(kernel_set), JitLaunch)
        prepare(kernel_set)
        kernel_set.prepare(None, kernels()["rms_norm"], {**FACTS, "op": "rms_norm", "eps": 1e-5, "offset": 0.0},
                           {"rows": 3}, {"x": 0, "weight": 0, "y": 0, "eps": 1e-5, "offset": 0.0})  # fmt: skip
    others = 1 if reason == "no_code" else 0
    assert kernel_set.fallbacks[reason] == 1 + others, "the same kernel is counted once"
    assert set(kernel_set.fallbacks) == set(REASONS)
    (line,) = [record.getMessage() for record in caplog.records if f"({reason})" in record.getMessage()]
    assert told in line
    assert "\n" not in line


def test_what_falls_back_is_refused_values_that_no_signature_names() -> None:
    kernel_set = KernelSet(Driver(FakeLibrary()), None)
    with pytest.raises(ValueError, match="disagree about bias, gate_up"):
        kernel_set.prepare(None, SPEC, FACTS, {"rows": 1}, {"out": 0, "bias": 1})
