"""What is exported opens in the libraries it is for, and what others wrote comes in."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import sys

import numpy as np
import pytest
import yaml
from synthetic import row, write_run

from introspect_cli.exchange.formats import FORMATS, export, wanted_steps
from introspect_cli.records import Kind, Layout
from introspect_cli.selection import read_selection
from introspect_cli.store.run import open_run
from introspect_cli.store.run_writer import StoreWriter

RNG = np.random.default_rng(0)


def step_rows(scale=1.0):
    x = (RNG.standard_normal((2, 3)) * scale).astype(np.float32)
    return [
        row("start", "rng", "torch", np.arange(8, dtype=np.uint8)),
        row("data", "batch", "DataLoader", x, path="[0]"),
        row("data", "batch", "DataLoader", np.arange(2), path="[1]['label']"),
        row("forward", "input", "Net", x, path="[0]", module_class="Net"),
        row("forward", "input", "Net", 3, path="['depth']", module_class="Net"),
        row("forward", "input", "Net.layers.0", x, path="[0]", module_class="Linear"),
        row("forward", "output", "Net.layers.0", x * 2, module_class="Linear"),
        row("forward", "output", "Net", x * 2, path="['logits']", module_class="Net"),
        row("loss", "loss", "loss", np.array(1.5, np.float32)),
        row("optimizer", "hyperparameter", "SGD", 0.1, path="[0]['lr']"),
        row("optimizer", "grad", "Net.layers.0.weight", x),
        row("optimizer", "param", "Net.layers.0.weight", x + 1, module_class="Linear"),
        row("optimizer", "optimizer_state", "Net.layers.0.weight", x, path="['momentum_buffer']"),
        row("optimizer", "buffer", "Net.norm.running_mean", np.array([1.0, np.inf], np.float32)),
    ]


SETTINGS = {
    "environment": {"HOME": "/home", "SEED": "1"},
    "packages": {"torch": "2.13.0"},
    "optimizers": [
        {"name": "SGD", "class": "SGD", "groups": [{"lr": 0.1, "nesterov": False, "params": ["Net.layers.0.weight"]}]}
    ],
}


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", [step_rows(), step_rows()], settings=SETTINGS, ranks=2)


def exported(introspect, run, form, *more):
    done = introspect("export", run, "--format", form, "-o", "out", *more)
    assert done.returncode == 0, done.stderr
    return run.parent / "out"


def test_parquet_is_partitioned_by_step_and_rank(introspect, run):
    dataset = pytest.importorskip("pyarrow.dataset")
    out = exported(introspect, run, "parquet")
    table = dataset.dataset(out, partitioning="hive").to_table()
    assert table.num_rows == 2 * 2 * 14
    assert set(table.column("step").to_pylist()) == {0, 1}
    assert set(table.column("rank").to_pylist()) == {0, 1}
    weights = table.filter(dataset.field("kind") == "param").to_pylist()
    assert {weight["fqn"] for weight in weights} == {"Net.layers.0.weight"}
    assert weights[0]["shape"] == [2, 3]
    assert len(weights[0]["sketch"]) == 16
    with open_run(run) as opened:
        kept = next(r for r in opened.rank(0).records(0) if r.site.kind.value == "param").summary
    assert weights[0]["mean"] == pytest.approx(kept.stats["mean"], rel=1e-12)
    assert weights[0]["checksum"] == f"{kept.checksum:016x}"


@pytest.mark.parametrize("form", ["parquet", "csv", "jsonl"])
def test_flat_formats_without_pyarrow_say_what_to_install(introspect, run, form, tmp_path, monkeypatch):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "pyarrow.py").write_text("raise ImportError('not installed')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(hidden), os.environ.get("PYTHONPATH", "")]))
    done = introspect("export", run, "--format", form, "-o", "out")
    assert done.returncode == 2
    assert 'pip install "introspect-cli[export]"' in done.stderr
    assert not list((run.parent / "out").rglob("*.*"))


def test_csv_and_json_lines_have_a_row_a_record(introspect, run):
    out = exported(introspect, run, "csv", "--steps", "1", "--kinds", "loss,buffer")
    with (out / "records.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["step"], r["kind"]) for r in rows] == [("1", "loss"), ("1", "buffer")] * 2
    assert float(rows[0]["mean"]) == 1.5
    assert rows[0]["med"] == ""
    done = introspect("export", run, "--format", "jsonl", "-o", "lines", "--modules", "Net.layers")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (run.parent / "lines" / "records.jsonl").read_text().splitlines()]
    assert {line["fqn"] for line in lines} == {"Net.layers.0", "Net.layers.0.weight"}
    assert lines[0]["shape"] == [2, 3]


def test_the_yaml_report_has_the_format_s_keys_in_its_order(introspect, run):
    out = exported(introspect, run, "yaml")
    top = out / "introspection"
    assert yaml.safe_load((top / "env_vars.yaml").read_text()) == SETTINGS["environment"]
    assert yaml.safe_load((top / "pip_freeze.yaml").read_text()) == SETTINGS["packages"]
    text = (top / "fit" / "step=1" / "rank1.yaml").read_text()
    document = yaml.safe_load(text)
    assert list(document) == ["parameters", "buffers", "optimizers", "rngs", "batch"]
    assert list(document["parameters"]) == ["layers.0.weight", "__all_data__", "__all_grads__"]
    assert list(document["parameters"]["layers.0.weight"]) == ["data", "grad"]
    data = document["parameters"]["layers.0.weight"]["data"]
    assert data.startswith("2×3|fp32|0∞̟|0∞̠|0⚠|0⌀|")
    assert [part[-1] for part in data.split("|")[6:]][:3] == ["μ", "⁺", "σ"]
    digest = data.rpartition("|")[2]
    assert document["parameters"]["__all_data__"] == hashlib.md5(digest.encode()).hexdigest()
    assert document["buffers"]["norm.running_mean"].startswith("2|fp32|1∞̟|0∞̠|")
    adam = document["optimizers"][0]
    assert adam["__type__"] == "SGD"
    assert adam["param_groups"] == [{"lr": 0.1, "nesterov": False, "params": [0]}]
    assert list(adam["state"][0]) == ["momentum_buffer"]
    assert document["batch"]["__batch_idx__"] == 1
    assert document["batch"]["__batch__"][1]["label"].startswith("2|i64|")
    assert max(len(line) for line in text.splitlines()) > 150  # nothing is folded


def test_a_report_comes_back_as_the_run_it_was(introspect, run):
    out = exported(introspect, run, "yaml")
    done = introspect("import", out, "-o", "back", "--root", "Net")
    assert done.returncode == 0, done.stderr
    assert introspect("verify", "back").returncode == 0
    with open_run(run) as before, open_run(run.parent / "back") as after:
        assert after.ranks == (0, 1)
        for rank in (0, 1):
            was = {r.site: r.summary for r in before.rank(rank).records(1)}
            kept = {r.site: r.summary for r in after.rank(rank).records(1)}
            for site, summary in kept.items():
                if site.path == "[0]['nesterov']":
                    continue  # a setting, which is not recorded at each step
                assert site in was
                if summary.stats and summary.layout.shape:
                    assert summary.checksum == was[site].checksum
                    for name in ("mean", "var", "min", "max", "nans", "zeros"):
                        assert summary.stats[name] == pytest.approx(was[site].stats[name], rel=1e-8)
            assert {site.kind.value for site in kept} == {
                "rng", "batch", "param", "grad", "buffer", "optimizer_state", "hyperparameter",
            }  # fmt: skip
        assert dict(after.settings)["packages"] == SETTINGS["packages"]


OTHERS = """\
parameters:
  layer.weight:
    data: 4×2|bf16|0∞̟0∞̠|0⚠|1.25e-01μ|5.0e-01σ|-1.0↤|1.0↦|0123456789abcdef0123456789abcdef
    grad: 4×2|bf16|1⚠|0.5μ|fedcba9876543210fedcba9876543210
  scale:
    data: 2.5
  __all_data__: 00
buffers:
  running: 3|fp8_e4m3fn|-0.5μ
rngs:
  torch: 0011
  numpy: {algo: MT19937, state: abcd, pos: 3, has_gauss: 0, cached_gaussian: 0.0}
batch:
  __batch_idx__: 7
  __batch__:
    image: 2×3|fp32|0.5μ
    name: [a, b]
"""


def reports(tmp_path, name, text):
    place = tmp_path / name / "introspection" / "fit" / "step=7"
    place.mkdir(parents=True)
    (place / "rank0.yaml").write_text(text)
    return tmp_path / name


def test_steps_that_lightnings_stages_count_from_one_are_ours_from_zero(introspect, tmp_path):
    for step in (1, 2):
        place = tmp_path / "a" / "introspection" / "TrainerFn.FITTING" / f"step={step}"
        place.mkdir(parents=True)
        (place / "rank0.yaml").write_text(OTHERS)
    done = introspect("import", tmp_path / "a", "-o", "run")
    assert done.returncode == 0, done.stderr
    with open_run(tmp_path / "run") as run:
        assert [int(step) for step in run.rank(0).entries["step"]] == [0, 1]


def test_a_report_that_another_tool_wrote_is_read(introspect, tmp_path):
    done = introspect("import", reports(tmp_path, "a", OTHERS), "-o", "runA")
    assert done.returncode == 0, done.stderr
    with open_run(tmp_path / "runA") as run:
        records = {(r.site.kind.value, r.site.fqn, r.site.path): r.summary for r in run.rank(0).records(7)}
    weight = records["param", "Model.layer.weight", ""]
    assert weight.layout == Layout((4, 2), "bfloat16")
    assert weight.stats["var"] == pytest.approx(0.25 * 7 / 8)  # their std is the unbiased one
    assert weight.stats["min"] == -1
    assert records["grad", "Model.layer.weight", ""].stats["nans"] == 1
    assert records["param", "Model.scale", ""].stats["mean"] == 2.5
    assert records["buffer", "Model.running", ""].layout.dtype == "float8_e4m3fn"
    assert records["batch", "DataLoader", "['name'][1]"].text == "'b'"
    other = OTHERS.replace("0123456789abcdef0123456789abcdef", "0123456789abcdef0123456789abcd00")
    introspect("import", reports(tmp_path, "b", other), "-o", "runB")
    done = introspect("diff", "runA", "runB", "--format", "json")
    assert done.returncode == 1, done.stderr
    assert [d["fqn"] for d in json.loads(done.stdout)["divergences"]] == ["Model.layer.weight"]
    assert introspect("diff", "runA", "runA").returncode == 0


def test_states_of_a_second_optimizer_are_not_taken_for_those_of_the_first(introspect, tmp_path):
    adam = "- {__type__: Adam, param_groups: [{lr: 0.1, params: [0]}], state: {0: {step: %d}}}\n"
    text = OTHERS + "optimizers:\n" + adam % 1 + adam % 2
    done = introspect("import", reports(tmp_path, "a", text), "-o", "runA")
    assert done.returncode == 0, done.stderr
    with open_run(tmp_path / "runA") as run:
        records = [r for r in run.rank(0).records(7) if r.site.kind.value == "optimizer_state"]
    assert {r.site.fqn: r.summary.stats["mean"] for r in records} == {"Model.layer.weight": 1, "Adam#2.0": 2}


@pytest.mark.parametrize("text", ["- 1", "a: *b", "parameters: [", "!!python/object:os.system {}", "\x00"])
def test_a_damaged_report_is_a_sentence(introspect, tmp_path, text):
    done = introspect("import", reports(tmp_path, "bad", text), "-o", "run")
    assert done.returncode == 2
    assert done.stderr.startswith("introspect: ")
    assert "Traceback" not in done.stderr


def test_a_tree_of_calls_has_the_format_s_nodes(introspect, run):
    out = exported(introspect, run, "json-tree", "--steps", "0")
    files = sorted(path.name for path in out.glob("step=0/rank0/*"))
    assert files == ["Net_debug_tree_SUMMARY.json"]
    tree = json.loads((out / "step=0" / "rank0" / files[0]).read_text())
    assert list(tree) == ["module_path", "inputs", "children"]
    assert tree["module_path"] == "Net (top-level)"
    assert tree["inputs"]["kwargs"] == {"depth": "3"}
    child = tree["children"][0]
    assert child["module_path"] == "Net.layers.0"
    assert list(child) == ["module_path", "inputs", "outputs", "children"]
    assert child["outputs"]["shape"] == "torch.Size([2, 3])"
    assert re.fullmatch(r"tensor\(-?\d\.\d{4}e[+-]\d\d\)", child["outputs"]["mean"])


def test_values_that_were_stored_are_in_the_full_tree(introspect, tmp_path):
    from synthetic import batch

    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    rows = [row("forward", "input", "Net", values, path="[0]"), row("forward", "output", "Net", values)]
    with StoreWriter.create(tmp_path / "run") as store:
        store.write_manifest({"status": "complete"})
        writer = store.rank(0, sorted_stats=("med", "mode"))
        table = batch(writer, rows)
        writer.append(0, table)
        store.save_tensor(int(table.checksum[0]), memoryview(values), "float32", values.shape)
    out = exported(introspect, tmp_path / "run", "json-tree")
    full = json.loads((out / "step=0" / "rank0" / "Net_debug_tree_FULL_TENSORS.json").read_text())
    assert full["outputs"]["value"][0].startswith("tensor([[ 0.0000e+00,  1.0000e+00")
    summary = json.loads((out / "step=0" / "rank0" / "Net_debug_tree_SUMMARY.json").read_text())
    del full["outputs"]["value"], full["inputs"]["args"][0]["value"]
    assert summary == full


def test_a_directory_that_holds_something_is_left_alone(introspect, run):
    assert introspect("export", run, "--format", "csv", "-o", ".").returncode == 2
    assert introspect("export", run, "--format", "csv", "-o", "new", "--steps", "99").returncode == 2
    assert introspect("import", run.parent / "nowhere", "-o", "x").returncode == 2
    assert introspect("import", run, "-o", "x").returncode == 2


SYMBOLS = ["∞̟", "∞̠", "⚠", "⌀", "m̃", "μ", "μ⁺", "σ", "σ²", "s²", "γ₁", "γ₂", "Mo", "↤", "↦"]


def test_a_line_says_what_it_was_made_of_and_is_read_again(introspect, tmp_path):
    line = "2×3|fp32|" + "|".join(f"{2 if at < 4 else 0.5}{symbol}" for at, symbol in enumerate(SYMBOLS))
    report = {"parameters": {"w": {"data": f"{line}|00000000000000ff", "grad": None}}, "batch": {"__batch_idx__": 0}}
    done = introspect("import", reports(tmp_path, "a", yaml.safe_dump(report)), "-o", "run")
    assert done.returncode == 0, done.stderr
    with open_run(tmp_path / "run") as run:
        (record,) = [r.summary for r in run.rank(0).records(7) if r.site.kind is Kind.PARAM]
    assert (record.layout.shape, record.layout.dtype, record.checksum) == ((2, 3), "float32", 255)
    out = introspect("export", "run", "--format", "yaml", "-o", "out")
    assert out.returncode == 0, out.stderr
    (again,) = (tmp_path / "out").rglob("rank0.yaml")
    derived = line.replace("0.5σ|", "0.707106781σ|").replace("|0.5s²", "")
    assert derived in again.read_text()


def test_paths_are_read_and_nested(introspect, tmp_path):
    paths = ["[0]", "[1]['x']", "[1]['y'][0]", "[2]['a b'].logits[\"it's\"]"]
    rows = [row("data", "batch", "DataLoader", number, path=path) for number, path in enumerate(paths)]
    write_run(tmp_path / "run", [[*rows, row("data", "batch", "Other", 7, path="[1]")]])
    (made,) = exported(introspect, tmp_path / "run", "yaml").rglob("rank0.yaml")
    batch = yaml.safe_load(made.read_text())["batch"]["__batch__"]
    assert batch[1] == {1: 7}
    assert batch[0] == [0, {"x": 1, "y": [2]}, {"a b": {"logits": {"it's": 3}}}]


def write_names(run, directory, selection):
    """A format of a test's own: the names of what was selected, a line each."""
    names = {r.site.fqn for step, rank in wanted_steps(run, selection) for r in run.rank(rank).records(step)}
    (directory / "names.txt").write_text("\n".join(sorted(names)))
    return 1


def test_a_format_is_a_function_and_a_line_in_the_table(tmp_path, monkeypatch):
    write_run(tmp_path / "a", [[row("forward", "output", "Net", np.ones(2, np.float32))]] * 2)
    monkeypatch.setitem(sys.modules, "introspect_cli.exchange.names", sys.modules[__name__])
    monkeypatch.setitem(FORMATS, "names", ("the names of what was recorded", "names:write_names"))
    with open_run(tmp_path / "a") as run:
        assert export(run, "names", tmp_path / "out", read_selection(steps=[1])) == 1
    assert (tmp_path / "out" / "names.txt").read_text() == "Net"
