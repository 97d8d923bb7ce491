"""A recipe resolves to one canonical form, whatever was left out, set on the command line, or moved elsewhere."""

import json
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from quantkit.errors import RecipeError
from quantkit.recipe.load import load_recipe
from quantkit.recipe.schema import Recipe, json_schema
from quantkit.recipe.templates import TEMPLATES, template_text
from quantkit.resources import resource

GOOD = "version: 1\nmodel:\n  source: somewhere\n"


def write(folder: Path, text: str = GOOD) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def test_set_lays_values_over_the_file_and_is_recorded(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "quantization:\n  schemes: [W8A16]\n")
    loaded = load_recipe(
        path, ["quantization.budget_bits=5", "quantization.schemes.0=W4A16_G64", "runtime.max_num_seqs=2"]
    )
    assert loaded.recipe.quantization.budget_bits == 5.0
    assert loaded.recipe.quantization.schemes == ["W4A16_G64"]
    assert loaded.recipe.runtime.max_num_seqs == 2
    assert loaded.resolved()["set"] == [
        "quantization.budget_bits=5",
        "quantization.schemes.0=W4A16_G64",
        "runtime.max_num_seqs=2",
    ]


def test_the_resolved_form_does_not_depend_on_where_the_recipe_lies(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    here, there = write(tmp_path), write(tmp_path / "elsewhere")
    assert load_recipe(here).canonical_json() == load_recipe(there).canonical_json()


def test_written_defaults_resolve_like_absent_ones(tmp_path: Path) -> None:
    short = load_recipe(write(tmp_path)).canonical_json()
    full = {key: value for key, value in json.loads(short).items() if key != "set"}
    assert load_recipe(write(tmp_path, yaml.safe_dump(full))).canonical_json() == short


def test_attention_output_projections_stay_16_bit_unless_the_recipe_says_otherwise(tmp_path: Path) -> None:
    default = load_recipe(write(tmp_path)).recipe.quantization.overrides
    assert [(o.match, o.scheme) for o in default] == [("*.o", "FP16")]
    assert load_recipe(write(tmp_path), ["quantization.overrides=[]"]).recipe.quantization.overrides == []


def test_paths_are_relative_to_the_recipe_and_builtin_ones_ship_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.jsonl").write_text("{}\n")
    loaded = load_recipe(write(tmp_path))
    monkeypatch.chdir("/")
    assert loaded.file("mine.jsonl") == tmp_path / "mine.jsonl"
    assert loaded.file("builtin:recipes/quickstart.yaml") == resource("recipes/quickstart.yaml")
    with pytest.raises(RecipeError, match=r":3: no file at .*yours.jsonl"):
        loaded.file("yours.jsonl", "model", "source")
    with pytest.raises(RecipeError, match=r"recipes/ holds: .*quickstart.yaml"):
        loaded.file("builtin:recipes/slowstart.yaml")
    with pytest.raises(RecipeError, match="no packaged data"):
        loaded.file("builtin:recipes/../pyproject.toml")


def test_the_schema_accepts_what_the_loader_accepts_and_refuses_a_typo(tmp_path: Path) -> None:
    validator = Draft202012Validator(json_schema())
    validator.check_schema(json_schema())
    assert validator.is_valid(yaml.safe_load(GOOD))
    assert not validator.is_valid({**yaml.safe_load(GOOD), "quantisation": {}})
    assert not validator.is_valid({**yaml.safe_load(GOOD), "version": 2})
    assert not validator.is_valid({**yaml.safe_load(GOOD), "quantization": {"schemes": ["W3"]}})


def test_every_key_is_described_for_editors() -> None:
    schema = json_schema()
    for section, model in [*schema["$defs"].items(), ("Recipe", schema)]:  # type: ignore[attr-defined]
        for key, field in model["properties"].items():
            assert field.get("description") or "$ref" in field or key in ("scheme", "review"), f"{section}.{key}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_is_a_valid_recipe_for_the_given_source(tmp_path: Path, name: str) -> None:
    loaded = load_recipe(write(tmp_path, template_text(name, "it's/here")))
    assert loaded.recipe.model.source == "it's/here"
    assert Draft202012Validator(json_schema()).is_valid(yaml.safe_load(template_text(name)))


def test_the_data_that_ready_recipes_name_ships_along() -> None:
    for path in [resource("recipes/quickstart.yaml"), *(resource(f"recipes/templates/{n}.yaml") for n in TEMPLATES)]:
        loaded = load_recipe(path)
        for text in [*loaded.recipe.calibration.data, *loaded.recipe.gate.data]:
            assert loaded.file(text).is_file()


def test_defaults_pass_their_own_checks() -> None:
    assert Recipe.model_validate({"version": 1, "model": {"source": "x"}}) is not None
