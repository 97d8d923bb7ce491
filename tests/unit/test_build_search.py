"""Sensitivity is the same however often its stage is killed; a budget is kept in bits or bytes; allocations travel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from quantkit.build.allocation import read_allocation, write_allocation
from quantkit.build.context import Context, open_context
from quantkit.build.memory import PeakMemory
from quantkit.build.pipeline import STAGES
from quantkit.build.progress import Silent
from quantkit.build.run import run_folder, run_stages
from quantkit.build.search import search
from quantkit.build.stage import stage_keys
from quantkit.build.stages.sensitivity import STAGE as SENSITIVITY
from quantkit.build.store import Store
from quantkit.cli.app import run
from quantkit.errors import RecipeError
from quantkit.recipe.load import load_recipe
from tests.build_inputs import one_thread, write_recipe

OPEN = "quantization.overrides=[]"


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("search"), "llama")


@pytest.fixture(scope="module")
def calibrated(recipe, tmp_path_factory) -> tuple[Context, dict[str, Path]]:
    """A context with its import and calibrate stages whole."""
    context = open_context(load_recipe(recipe, [OPEN]))
    keys, store = stage_keys(STAGES, context), Store(run_folder(tmp_path_factory.mktemp("out") / "out"))
    with store.locked(), PeakMemory() as memory:
        run_stages(STAGES[:2], context, store, keys, memory, Silent(), lambda: None)
    return context, {name: store.folder_of(name, keys[name][0]) for name in ("import", "calibrate")}


class Killed(Exception):
    """Ends a stage where a signal might."""


class KilledAt(Silent):
    """Progress that ends the stage at one of its steps."""

    def __init__(self, step: int) -> None:
        self.left = step

    def step(self, done: int, total: int, what: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _whole(calibrated, folder: Path) -> dict[str, bytes]:
    context, needs = calibrated
    folder.mkdir(exist_ok=True)
    SENSITIVITY.run(context, needs, folder, Silent())
    return _files(folder)


STEPS = 2 * 2 + 2
"""Embedding, two layers, head, two layers back."""


def test_a_killed_sensitivity_stage_goes_on_to_the_same_bytes(calibrated, tmp_path):
    context, needs = calibrated
    expected = _whole(calibrated, tmp_path / "at-once")
    assert sorted(expected) == ["layer-00000.json", "layer-00001.json"]
    for step in range(1, STEPS):
        folder = tmp_path / f"killed-{step}"
        folder.mkdir()
        with pytest.raises(Killed):
            SENSITIVITY.run(context, needs, folder, KilledAt(step))
        assert (folder / "work").is_dir()
        assert _whole(calibrated, folder) == expected


def test_a_stage_killed_again_and_again_gets_done_with_no_layer_run_twice(calibrated, tmp_path):
    context, needs = calibrated
    folder = tmp_path / "killed"
    folder.mkdir()
    for _ in range(STEPS - 1):  # each run does one step and is killed at the next
        with pytest.raises(Killed):
            SENSITIVITY.run(context, needs, folder, KilledAt(1))
    SENSITIVITY.run(context, needs, folder, KilledAt(1))
    assert _files(folder) == _whole(calibrated, tmp_path / "at-once")


def test_a_layer_cut_short_is_taken_again(calibrated, tmp_path):
    context, needs = calibrated
    folder = tmp_path / "cut"
    folder.mkdir()
    with pytest.raises(Killed):
        SENSITIVITY.run(context, needs, folder, KilledAt(STEPS - 1))
    last = max((folder / "work").glob("gradient-*.f32"))
    last.write_bytes(last.read_bytes()[:100])  # a power cut: the name is there, the bytes are not
    assert _whole(calibrated, folder) == _whole(calibrated, tmp_path / "at-once")


def _search(recipe: Path, tmp_path: Path, *sets: str, **options):
    return search(load_recipe(recipe, [OPEN, *sets]), tmp_path / "out", Silent(), **options)


def test_an_allocation_file_reproduces_the_search_in_another_recipe(recipe, tmp_path):
    found = _search(recipe, tmp_path, "quantization.budget_bits=6", write=tmp_path / "a.yaml")
    chosen = {row["group"]: row["chosen"] for row in found.data["groups"]}
    assert len(set(chosen.values())) > 1
    content = yaml.safe_load(recipe.read_text()) | {"quantization": {"allocation": str(tmp_path / "a.yaml")}}
    reuse = recipe.with_name("reuse.yaml")
    reuse.write_text(yaml.safe_dump(content))
    decisions = open_context(load_recipe(reuse)).decisions
    assert decisions.pinned == chosen
    assert decisions.budget_bits == pytest.approx(found.data["average_bits"])
    pinned = open_context(load_recipe(reuse, ['quantization.overrides=[{match: "*.0.o", scheme: FP16}]'])).decisions
    assert pinned.pinned == chosen | {"layers.0.o": "FP16"}


def test_the_search_tells_what_it_weighed(recipe, tmp_path):
    found = _search(recipe, tmp_path, "quantization.budget_bits=6", budgets=[5.0, 12.0])
    assert found.data["method"] == "gradient"
    assert all(o["sensitivity"] > 0 for row in found.data["groups"] for o in row["options"] if o["scheme"] != "FP16")
    assert [p.budget_bits for p in found.points] == [6.0, 5.0, 12.0]
    assert all(p.average_bits <= p.budget_bits for p in found.points)
    assert found.points[2].sensitivity < found.points[0].sensitivity < found.points[1].sensitivity
    assert 0 < len(found.data["checked"]) <= 8
    for row in found.data["checked"]:  # a random model's tokens: the prediction is rough, its size is right
        assert row["predicted"] / 5 < row["measured"] < row["predicted"] * 5
    bits, values = zip(*found.data["frontier"], strict=True)
    assert list(bits) == sorted(bits)
    assert list(values) == sorted(values, reverse=True)


def test_the_weight_price_needs_no_gradients(recipe, tmp_path):
    found = _search(recipe, tmp_path, "quantization.sensitivity=weight", "quantization.budget_bits=6")
    assert found.data["method"] == "weight"
    assert found.data["checked"] == []
    by_gradient = _search(recipe, tmp_path, "quantization.budget_bits=6")
    assert by_gradient.data["groups"] != found.data["groups"]


def test_the_command_prints_table_frontier_and_budgets_and_writes_the_file(recipe, tmp_path, capsys):
    file = tmp_path / "a.yaml"
    arguments = ["search", str(recipe), "--out", str(tmp_path / "out"), "--set", OPEN, "--budget-bits", "6"]
    assert run([*arguments, "--budget-bits", "9", "-o", str(file)]) == 0
    text = capsys.readouterr().out
    assert text.count("[") == 8  # one choice a group
    assert "bits a weight" in text
    assert "6.000" in text
    assert "9.000" in text
    chosen = {group: row["scheme"] for group, row in json.loads(file.read_text())["schemes"].items()}
    assert run([*arguments, "--json"]) == 0
    assert {row["group"]: row["chosen"] for row in json.loads(capsys.readouterr().out)["groups"]} == chosen
    assert run([*arguments, "-o", str(tmp_path / "no" / "a.yaml")]) == 2
    assert run([*arguments, "--budget-bits", "4.1"]) == 2
    assert "least feasible" in capsys.readouterr().err


def test_a_budget_in_bytes_buys_what_the_same_bits_do(recipe, tmp_path):
    bits = _search(recipe, tmp_path, "quantization.budget_bits=6")
    weights = sum(row["weights"] for row in bits.data["groups"])
    budget = f"quantization.budget_bytes={weights * 6 // 8}"
    by_bytes = _search(recipe, tmp_path, "quantization.budget_bits=null", budget)
    assert by_bytes.data["groups"] == bits.data["groups"]
    assert by_bytes.data["bytes"] <= weights * 6 // 8


def test_an_fp32_source_counts_its_own_width_under_a_budget_of_bytes(tmp_path):
    recipe = write_recipe(tmp_path, "llama", dtype="float32")
    context = open_context(load_recipe(recipe, ["quantization.budget_bits=null", "quantization.budget_bytes=1MB"]))
    assert context.decisions.source_bits == 32
    with pytest.raises(RecipeError, match="least feasible value"):  # attention outputs are pinned to FP32
        open_context(load_recipe(recipe, ["quantization.budget_bits=null", "quantization.budget_bytes=200kB"]))
    found = search(
        load_recipe(recipe, [OPEN, "quantization.budget_bits=null", "quantization.budget_bytes=0.4MB"]),
        tmp_path / "out",
        Silent(),
    )
    assert found.data["bytes"] <= 400_000
    assert {o["bits"] for row in found.data["groups"] for o in row["options"] if o["scheme"] == "FP16"} == {32.0}


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        (["quantization.budget_bytes=140MB"], "give budget_bits or budget_bytes, not both"),
        (["quantization.budget_bits=null"], "give budget_bits or budget_bytes"),
        (["quantization.budget_bits=null", "quantization.budget_bytes=some"], "reads like '140MB'"),
        (["quantization.budget_bits=null", "quantization.budget_bytes=1kB"], r"1,000 bytes cannot be met.*\d bytes"),
        (["quantization.budget_bits=null", "quantization.budget_bytes=0"], "at least 1"),
        (["quantization.budget_bits=4.1"], r"4.1 bits a weight cannot be met.*4\.250 bits a weight, [\d,]+ bytes"),
    ],
)
def test_a_budget_that_cannot_be_is_refused_with_the_least_that_can(recipe, sets, told):
    with pytest.raises(RecipeError, match=told):
        open_context(load_recipe(recipe, [OPEN, *sets]))


def _units(recipe: Path):
    groups = open_context(load_recipe(recipe)).program.groups()
    return {name: weight for name, weight in groups.items() if name != "lm_head"}


HOSTILE = {
    "unknown group": (lambda d: d["schemes"].update({"layers.9.qkv": {"scheme": "W8A16"}}), "no group 'layers.9.qkv'"),
    "head": (lambda d: d["schemes"].update({"lm_head": {"scheme": "W8A16"}}), "no group 'lm_head'"),
    "unknown scheme": (lambda d: d["schemes"]["layers.0.o"].update(scheme="W3A16"), "unknown scheme 'W3A16'"),
    "no scheme": (lambda d: d["schemes"].update({"layers.0.o": {}}), "layers.0.o needs a scheme"),
    "scheme a list": (lambda d: d["schemes"].update({"layers.0.o": ["W8A16"]}), "layers.0.o needs a scheme"),
    "shape": (lambda d: d["schemes"]["layers.0.o"].update(shape="64x64"), r"'64x64' in this file and 128x128"),
    "shape a number": (lambda d: d["schemes"]["layers.0.o"].update(shape=3), r"3 in this file and 128x128"),
    "missing group": (lambda d: d["schemes"].pop("layers.0.o"), "no scheme for layers.0.o"),
    "another kind": (lambda d: d.update(kind="recipe"), "is no allocation file"),
    "another version": (lambda d: d.update(version=2), "allocation version 2"),
    "schemes a list": (lambda d: d.update(schemes=[]), "must map groups to schemes"),
    "schemes absent": (lambda d: d.pop("schemes"), "must map groups to schemes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_allocation_file_that_does_not_fit_is_refused_with_its_place(recipe, tmp_path, name):
    damage, told = HOSTILE[name]
    units, path = _units(recipe), tmp_path / "a.yaml"
    write_allocation(path, dict.fromkeys(units, "W8A16"), units, {"model": "source"})
    assert read_allocation(path, units) == dict.fromkeys(units, "W8A16")
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data, indent=1))
    with pytest.raises(RecipeError, match=told) as caught:
        open_context(load_recipe(recipe, ["quantization.budget_bits=null", f"quantization.allocation={path}"]))
    assert caught.value.where.startswith(str(path))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"\xff\xfe", b"kind: &a x", b"{" * 99, b"a: b: c", b"kind: quantkit-allocation"]
)
def test_bytes_that_are_no_allocation_file_are_refused(recipe, tmp_path, content):
    (tmp_path / "a.yaml").write_bytes(content)
    with pytest.raises(RecipeError, match=r"a\.yaml"):
        read_allocation(tmp_path / "a.yaml", _units(recipe))
