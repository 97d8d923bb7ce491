"""Recipes, options, paths and data as a hostile, careless or unlucky user gives them: one line and exit code 2."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.build.plan import plan
from quantkit.errors import RecipeError
from quantkit.recipe.load import load_recipe
from tests.build_inputs import write_recipe

GOOD = "version: 1\nmodel:\n  source: somewhere\n"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("attack"), "llama")


@pytest.fixture
def recipe(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / original.name


def refusal(recipe: Path, *sets: str) -> str:
    with pytest.raises(RecipeError) as caught:
        plan(load_recipe(recipe, sets), recipe.parent / "out")
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 600
    return line


@pytest.mark.parametrize(
    "value",
    ["!!int abc", '!!int "0b"', '!!int ""', "!!float x", "!!bool maybe", "!!timestamp xx", "2001-99-99", "9" * 5000],
)
def test_a_scalar_that_yaml_cannot_make_is_told_with_its_line(tmp_path: Path, value: str) -> None:
    (tmp_path / "r.yaml").write_text(f"{GOOD}quantization:\n  budget_bits: {value}\n")
    with pytest.raises(RecipeError, match=r"r\.yaml:5: .* cannot be read as (int|float|bool|timestamp)"):
        load_recipe(tmp_path / "r.yaml")


@pytest.mark.parametrize(
    "text",
    ["[" * 5000 + "]" * 5000, "a: " + "{a: " * 3000 + "1" + "}" * 3000, "\n".join(" " * i + "a:" for i in range(300))],
    ids=["lists", "mappings", "blocks"],
)
def test_deep_nesting_is_refused_by_depth(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(RecipeError, match="nested deeper than 32 levels"):
        load_recipe(tmp_path / "r.yaml")


def test_an_endless_recipe_is_not_read_to_its_end() -> None:
    with pytest.raises(RecipeError, match="more than 1 MiB"):
        load_recipe(Path("/dev/zero"))


def test_an_anchor_is_refused_even_where_nothing_refers_to_it(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(GOOD.replace("model:", "model: &m"))
    with pytest.raises(RecipeError, match=r"r\.yaml:2: anchors and aliases"):
        load_recipe(tmp_path / "r.yaml")


@pytest.mark.parametrize("option", ["²=3", "quantization.schemes.²=x", f"calibration.data.{'9' * 5000}=x"])
def test_an_option_with_a_digit_that_is_no_index_is_refused(recipe: Path, option: str) -> None:
    assert refusal(recipe, option).startswith("--set ")


def test_an_option_that_ends_like_a_line_number_is_refused_as_an_option(recipe: Path) -> None:
    assert refusal(recipe, "nme=:²").startswith("--set nme=:²: unknown key 'nme'")


@pytest.mark.parametrize("key", ["model.source", "calibration.data.0", "gate.data.0"])
@pytest.mark.parametrize("path", ["a" * 5000, "~nosuchuser/x"], ids=["too long", "unknown home"])
def test_a_path_that_cannot_be_is_told_with_its_key(recipe: Path, key: str, path: str) -> None:
    assert "--set " + key in refusal(recipe, f"{key}={path}")


def test_a_source_that_is_not_there_is_told_with_the_recipe_s_line(recipe: Path) -> None:
    recipe.write_text(recipe.read_text().replace("source: source", "source: sorce"))
    assert f"{recipe}:{recipe.read_text().splitlines().index('  source: sorce') + 1}: sorce: no model at" in refusal(
        recipe
    )


@pytest.mark.parametrize("policy", ["nosuch", "no/such.yaml", "calib.jsonl"])
def test_a_policy_that_cannot_judge_is_refused_by_plan(recipe: Path, policy: str) -> None:
    refusal(recipe, f"gate.policy={policy}")


def test_a_packaged_folder_is_no_data_file(recipe: Path) -> None:
    assert "no file at" in refusal(recipe, "calibration.data.0=builtin:calib")


def _bad_line(text: str) -> bytes:
    return ("\n".join([*text.splitlines()[:2], "{oops", *text.splitlines()[3:]])).encode()


DAMAGES: list[tuple[str, Callable[[str], bytes], str]] = [
    ("empty", lambda text: b"", "at least"),
    ("blank", lambda text: b"\n\n", "holds no rows"),
    ("bad line", _bad_line, "line 3 is not valid JSON"),
    ("compressed", lambda text: b"\x1f\x8b\x08" + bytes(5) + b"x" * 50, "line 1 is not valid JSON"),
    ("deep", lambda text: (text + '{"id":' + "[" * 2000 + "]" * 2000 + "}\n").encode(), "line 17 is not valid JSON"),
    (
        "no turns",
        lambda text: text.encode() + b'{"id": "z", "category": "c", "language": "en"}\n',
        ":17: key 'messages'",
    ),
]


@pytest.mark.parametrize("file", ["calib.jsonl", "held.jsonl"])
@pytest.mark.parametrize(("damage", "told"), [pytest.param(d, t, id=name) for name, d, t in DAMAGES])
def test_bad_data_is_found_before_any_weight_is_read(
    recipe: Path, file: str, damage: Callable[[str], bytes], told: str
) -> None:
    path = recipe.with_name(file)
    path.write_bytes(damage(path.read_text()))
    assert told in refusal(recipe)


def test_judging_on_calibration_text_is_refused_before_any_weight_is_read(recipe: Path) -> None:
    recipe.with_name("held.jsonl").write_bytes(recipe.with_name("calib.jsonl").read_bytes())
    assert "also used for calibration" in refusal(recipe)


@pytest.mark.parametrize("reason", ["        ", "fine\\x1b[31m and so on", "\\u202eall went well", "x" * 1001], ids=len)
def test_a_waiver_without_words_or_with_hidden_ones_is_refused(recipe: Path, reason: str) -> None:
    assert refusal(recipe, f'gate.review.waive="{reason}"').startswith("--set gate.review.waive")
