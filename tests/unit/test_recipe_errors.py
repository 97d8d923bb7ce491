"""Every mistake in a recipe is told as `file:line: message`, with the nearest valid word where there is one."""

from pathlib import Path

import pytest

from quantkit.cli.app import run as quantkit
from quantkit.errors import RecipeError
from quantkit.recipe.load import load_recipe
from tests.tiny import make_checkpoint

GOOD = "version: 1\nmodel:\n  source: somewhere\n"

MISTAKES = [
    ("", "1: key 'version' is missing"),
    ("- a\n", "1: a recipe is a mapping of sections"),
    ("version: 1\n", "1: key 'model' is missing"),
    ("version: 2\nmodel: {source: x}\n", "1: recipe version 2 is not known"),
    ("version: '1'\nmodel: {source: x}\n", "1: version must be a whole number, not '1'"),
    (GOOD + "quantisation: {}\n", "4: unknown key 'quantisation'; did you mean 'quantization'?"),
    (
        GOOD + "quantization:\n  budget_bit: 5\n",
        "5: unknown key 'quantization.budget_bit'; did you mean 'budget_bits'?",
    ),
    (
        GOOD + "quantization:\n  overrides:\n    - match: '*'\n      schem: FP16\n",
        "7: unknown key 'quantization.overrides.0.schem'; did you mean 'scheme'?",
    ),
    (GOOD + "zzz: 1\n", "4: unknown key 'zzz'; known here: version, name, model"),
    (GOOD + "model: {source: y}\n", "4: duplicate key 'model', first given in line 2"),
    (GOOD + "quantization:\n  budget_bits: '5'\n", "5: quantization.budget_bits must be a number, not '5'"),
    (GOOD + "quantization:\n  budget_bits: 99\n", "5: quantization.budget_bits must be at most 16.0, not 99"),
    (GOOD + "quantization:\n  budget_bits: .nan\n", "5: quantization.budget_bits must be a finite number"),
    (
        GOOD + "quantization:\n  schemes:\n    - W8A16\n    - w4a16_g64\n",
        "7: quantization.schemes.1: unknown scheme 'w4a16_g64'; did you mean 'W4A16_G64'?",
    ),
    (GOOD + "quantization:\n  schemes: []\n", "5: quantization.schemes must be a list of at least 1"),
    (GOOD + "quantization:\n  schemes: W8A16\n", "5: quantization.schemes must be a list, not 'W8A16'"),
    (GOOD + "quantization: 3\n", "4: quantization must be a section of keys, not 3"),
    (GOOD + "runtime:\n", "4: runtime must be a section of keys, not nothing"),
    (
        GOOD + "kv_cache:\n  format: INT2\n",
        "5: kv_cache.format must be 'INT8', 'FP8', 'INT4', 'FP16', 'BF16' or 'FP32', ",
    ),
    (GOOD + "calibration:\n  max_samples: true\n", "5: calibration.max_samples must be a whole number, not True"),
    (GOOD + "calibration:\n  max_samples: 0\n", "5: calibration.max_samples must be at least 1, not 0"),
    (GOOD + "name: a/b\n", "4: name must be letters, digits"),
    (GOOD + "gate:\n  review:\n    waive: x\n", "6: gate.review.waive must be at least 8 characters long"),
    (GOOD + "quantization:\n  gptq:\n    damping: 0\n", "6: quantization.gptq.damping must be above 0.0, not 0"),
    (GOOD + "quantization:\n  gptq:\n    damping: 1e-3\n", "not '1e-3' (YAML takes 1e-3 for text: write 1.0e-3)"),
    (GOOD + "quantization:\n  gptq:\n    act_order: 1\n", "gptq.act_order must be true or false, not 1"),
    (GOOD + "a: &x 1\nb: *x\n", "4: anchors and aliases are not read here"),
    (GOOD + "name: [\n", "not valid YAML"),
    (GOOD + "name: !!python/name:os.system x\n", "4: not valid YAML: could not determine a constructor"),
    (GOOD + "? [a]\n: 1\n", "4: a key must be a plain word"),
]


@pytest.mark.parametrize(("text", "expected"), MISTAKES, ids=[expected[:50] for _, expected in MISTAKES])
def test_a_mistake_is_told_with_file_and_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith(f"{path}:")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_mistakes_are_told_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD + "runtime: {max_num_seqs: 0}\ncalibration: {max_samples: 0}\n")
    with pytest.raises(RecipeError, match=r":4: runtime\.max_num_seqs") as caught:
        load_recipe(path)
    assert [str(other).startswith(f"{path}:5: calibration.max_samples") for other in caught.value.others] == [True]


def test_plan_tells_every_static_problem_in_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    make_checkpoint(tmp_path / "model", "llama")
    path.write_text(
        "version: 1\nname: a\nmodel: {source: ./model}\n"
        "quantization: {schemes: [W8A16], budget_bits: 9, "
        "overrides: [{match: x, scheme: FP16}, {match: y, scheme: FP16}]}\n"
        "calibration: {data: [none.jsonl], profile: none.yaml}\n"
        "gate: {data: [none.jsonl], policy: nosuch}\n"
        "runtime: {max_model_len: 999999}\n"
    )
    assert quantkit(["plan", str(path)]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("quantkit: ")]
    assert [line.removeprefix(f"quantkit: {path}:")[0] for line in lines] == list("4475566")
    assert "there is no policy 'nosuch'" in lines[-1]
    assert "standard" in lines[-1]


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no such recipe"):
        load_recipe(tmp_path / "absent.yaml")
    with pytest.raises(RecipeError, match="is a folder"):
        load_recipe(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"version: \xff\xfe")
    with pytest.raises(RecipeError, match="not UTF-8"):
        load_recipe(tmp_path / "b.yaml")


SET_MISTAKES = [
    ("quantization.budget_bitz=5", "did you mean 'budget_bits'?"),
    ("quantization.budget_bits=many", "must be a number, not 'many'"),
    ("name", "key=value"),
    (".=1", "key=value"),
    ("quantization.overrides.0.scheme=FP16", "no item 0 at 'quantization.overrides'"),
    ("version.x=1", "'version' holds no keys"),
    ("model.source=[", "not valid YAML"),
]


@pytest.mark.parametrize(("option", "expected"), SET_MISTAKES)
def test_a_mistake_in_set_names_the_option(tmp_path: Path, option: str, expected: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, [option])
    assert str(caught.value).startswith(f"--set {option}")
    assert expected in str(caught.value)
