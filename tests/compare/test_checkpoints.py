"""Files and directories of tensors are read as runs of one moment, and compared with each other and with runs."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from checkpoint_runs import Net, said, torch
from opcapture import captured
from summaries import taken
from verbs import verb

from introspect_cli.errors import IntrospectError
from introspect_cli.exchange.checkpoints import open_any
from introspect_cli.records import Kind, Phase, Site
from introspect_cli.tensors.summarizer import Summarizer

safetensors = pytest.importorskip("safetensors.torch")


def trained(place):
    """Train for six steps; a checkpoint after some, as `step` counts."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for step in range(6):
        tokens = torch.randint(0, 20, (8,))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(tokens), tokens).backward()
        optimizer.step()
        rate.step()
        whole = {"model": net, "optimizer": optimizer, "scheduler": rate}
        saved = {name: part.state_dict() for name, part in whole.items()}
        torch.save({**saved, "step": step + 1, "rng": torch.get_rng_state()}, place / f"{step}.pt")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run, the checkpoints of its steps, and weights of step 3 in several forms."""
    place = tmp_path_factory.mktemp("checkpoints")
    captured(place / "run", lambda: trained(place))
    captured(place / "lean", lambda: trained(place), record=frozenset({Kind.PARAM, Kind.LOSS}))
    state = torch.load(place / "3.pt")["model"]
    safetensors.save_file(state, place / "3.safetensors")
    torch.save(state, place / "weights.pt")
    torch.save(state, place / "old.bin", _use_new_zipfile_serialization=False)
    np.savez(place / "3.npz", **{name: value.numpy() for name, value in state.items()})
    turned = {name: np.asfortranarray(each) if each.ndim else each.numpy() for name, each in state.items()}
    np.savez_compressed(place / "packed.npz", **turned)
    return place


DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool", "complex64")
FP8 = ("float8_e4m3fn", "float8_e5m2")


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_a_tensor_in_a_file_has_the_checksum_and_statistics_of_a_captured_one(tmp_path, ending):
    torch.manual_seed(1)
    tensors = {name: (torch.randn(1400, 300) * 3).to(getattr(torch, name)) for name in (*DTYPES, *FP8)}
    save = safetensors.save_file if ending == "safetensors" else torch.save
    save(tensors, tmp_path / f"a.{ending}")
    with open_any(tmp_path / f"a.{ending}") as run:
        records = {record.site.fqn: record for record in run.rank(0).records(0)}
    assert records.keys() == tensors.keys()
    for name, tensor in tensors.items():
        summarizer = Summarizer()
        summarizer.add(tensor)
        theirs = taken(summarizer)
        summarizer.close()
        record = records[name]
        assert record.site == Site(Phase.START, Kind.PARAM, name)
        assert (record.summary.layout.dtype, record.summary.checksum) == (name, int(theirs.checksum[0]))
        for statistic in ("mean", "var", "min", "max"):
            known = float(theirs.floats[statistic][0])
            assert record.summary.stats[statistic] == pytest.approx(known, rel=1e-5, abs=1e-6), (name, statistic)


@pytest.mark.parametrize("name", ["3.pt", "weights.pt", "old.bin", "3.npz", "packed.npz"])
def test_every_kind_of_file_holds_the_same_model(place, name):
    verdict, sentence, beside = said(place / "3.safetensors", place / name)
    assert (verdict, sentence) == ("same", "The checkpoints hold the same: all 9 tensors of the model are equal.")
    assert ("only b holds optimizer state and random states: not compared" in beside) is (name == "3.pt")


def test_a_checkpoint_says_what_it_holds_by_kind_and_names_its_optimizer_state(place):
    with open_any(place / "3.pt") as run:
        kinds = {record.site: record for record in run.rank(0).records(0)}
        assert run.settings["checkpoint"]["step"] == 4
        assert run.settings["optimizers"][0]["groups"][0]["lr"] == pytest.approx(1e-2 / 5)
        assert run.manifest["not_observed"] == []
    assert Site(Phase.START, Kind.BUFFER, "bn.running_mean") in kinds
    assert Site(Phase.START, Kind.OPTIMIZER_STATE, "down.weight", 0, "['exp_avg']") in kinds
    assert Site(Phase.START, Kind.RNG, "torch") in kinds


def test_a_tensor_that_is_missing_has_another_shape_or_is_tied_is_reported_as_that(place, tmp_path):
    state = torch.load(place / "weights.pt")
    del state["up.bias"]
    torch.save(state, tmp_path / "b.pt")
    verdict, sentence, _ = said(place / "3.pt", tmp_path / "b.pt")
    assert (verdict, sentence) == ("diverged", "The checkpoints differ: b lacks 1 tensor of a: up.bias.")
    verdict, sentence, _ = said(tmp_path / "b.pt", place / "3.pt")
    assert (verdict, sentence) == ("diverged", "The checkpoints differ: a lacks 1 tensor of b: up.bias.")
    state = torch.load(place / "weights.pt")
    torch.save({**state, "head.weight": state["emb.weight"]}, tmp_path / "b.pt")
    verdict, _, beside = said(place / "weights.pt", tmp_path / "b.pt")
    assert (verdict, "emb.weight of a equals head.weight of b" in beside) == ("same", True)
    state["emb.weight"] = torch.cat([state["emb.weight"], torch.randn(2, 8)])
    torch.save(state, tmp_path / "b.pt")
    verdict, sentence, _ = said(place / "weights.pt", tmp_path / "b.pt")
    assert verdict == "diverged"
    assert sentence == "The checkpoints differ: other shapes: emb.weight."


def test_fused_and_transposed_tensors_are_found_and_proven_by_their_elements(tmp_path):
    torch.manual_seed(0)
    one = {f"layers.{at}.attn.{name}.weight": torch.randn(8, 8) for at in range(2) for name in ("q", "k", "v")}
    one |= {"layers.0.norm.weight": torch.ones(8), "layers.0.mlp.weight": torch.randn(16, 8)}
    two = {
        f"h.{at}.qkv.weight": torch.cat([one[f"layers.{at}.attn.{n}.weight"] for n in ("q", "k", "v")]).T.contiguous()
        for at in range(2)
    }
    two |= {"h.0.ln.weight": torch.ones(8), "h.0.fc.weight": one["layers.0.mlp.weight"].T.contiguous()}
    safetensors.save_file(one, tmp_path / "a.safetensors")
    safetensors.save_file(two, tmp_path / "b.safetensors")
    verdict, sentence, beside = said(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert verdict == "same"
    assert sentence.startswith("The checkpoints hold the same, in part in another form: all 8 tensors")
    assert "layers.0.attn.q.weight + layers.0.attn.k.weight + layers.0.attn.v.weight of a, put together, is" in beside
    assert "layers.0.mlp.weight of a is h.0.fc.weight in b, transposed or in another shape" in beside
    shuffled = two["h.0.fc.weight"].reshape(-1)[torch.randperm(128)].reshape(8, 16)
    safetensors.save_file({**two, "h.0.fc.weight": shuffled}, tmp_path / "b.safetensors")
    verdict, sentence, _ = said(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert (verdict, sentence) == ("diverged", "The checkpoints differ: other shapes: h.0.fc.weight.")


def test_tensors_in_another_form_that_are_too_large_to_be_read_again_are_not_called_equal(tmp_path, monkeypatch):
    monkeypatch.setattr("introspect_cli.exchange.checkpoints._LARGEST_RELOADED", 8)
    weight = torch.randn(16, 8)
    torch.save({"w": weight, "b": torch.randn(4)}, tmp_path / "a.pt")
    torch.save({**torch.load(tmp_path / "a.pt"), "w": weight.T.contiguous()}, tmp_path / "b.pt")
    verdict, sentence, _ = said(tmp_path / "a.pt", tmp_path / "b.pt")
    assert verdict == "undecided"
    assert sentence.startswith("Could not tell: w of a is w in b, transposed or in another shape; by extrema and")
    assert "its elements were not compared" in sentence


def test_an_optimizer_that_began_anew_is_what_differs(place, tmp_path):
    whole = torch.load(place / "3.pt")
    torch.save({**whole, "optimizer": torch.load(place / "0.pt")["optimizer"]}, tmp_path / "b.pt")
    verdict, sentence, _ = said(place / "3.pt", tmp_path / "b.pt")
    assert verdict == "diverged"
    assert "The models are equal, but 18 of 18 values of the optimizer state differ" in sentence


# --- beside a run


@pytest.mark.parametrize("step", [0, 3, 5])
def test_a_run_says_at_which_step_it_had_what_a_checkpoint_holds(place, step):
    for a, b, letters in ((place / "run", place / f"{step}.pt", "ba"), (place / f"{step}.pt", place / "run", "ab")):
        verdict, sentence, _ = said(a, b)
        assert verdict == "same"
        assert sentence == (
            f"Checkpoint {letters[0]} has what run {letters[1]} has after step {step}: "
            "all 9 tensors of the model and 18 values of the optimizer state are equal."
        )


def test_what_a_run_did_not_record_is_not_called_equal(place):
    verdict, sentence, beside = said(place / "lean", place / "3.pt")
    assert verdict == "same"
    assert sentence.endswith("has what run a has after step 3: all 6 tensors of the model are equal.")
    assert "only b holds buffers, optimizer state and random states: not compared" in beside


def test_weights_that_hardly_any_step_has_are_set_beside_the_nearest_and_not_beside_a_chance(place, tmp_path):
    """Zeros that the run begins with are in every checkpoint that never trained them."""
    state = torch.load(place / "weights.pt")
    noisy = {
        name: each + 1e-4 * torch.randn_like(each) if each.is_floating_point() else each for name, each in state.items()
    }
    torch.save({**noisy, "bn.bias": torch.zeros(16)}, tmp_path / "other.pt")
    _, sentence, _ = said(place / "run", tmp_path / "other.pt")
    assert "nearest is when step 0 begins" not in sentence


def test_a_run_without_parameters_cannot_be_compared_with_a_checkpoint(place, tmp_path):
    bare = captured(tmp_path / "bare", lambda: trained(tmp_path), record=frozenset({Kind.LOSS}))
    with pytest.raises(IntrospectError, match="has no parameters on record"):
        said(bare, place / "3.pt")
    done = verb("diff", place / "run", place / "3.pt", place / "5.pt")
    assert "compared with one run at a time" in done.stderr


# --- the command line


def test_the_verbs_take_a_checkpoint_where_they_take_a_run_and_leave_nothing_behind(place, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = sorted(place.iterdir())
    done = verb("diff", place / "2.pt", place / "5.pt")
    assert "tensor" in done.stdout
    assert "step  phase" not in done.stdout
    done = verb("show", "step", "0", place / "2.pt")
    assert "emb.weight" in done.stdout
    done = verb("diff", "--format", "json", place / "run", place / "3.safetensors")
    assert json.loads(done.stdout)["verdict"] == "same"
    assert sorted(place.iterdir()) == before
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("tempfile.tempdir", None)


def test_one_checkpoint_is_shown_checked_and_exported_as_what_it_is(place, tmp_path, introspect):
    done = introspect("show", place / "2.pt")
    assert "exit code" not in done.stdout
    assert "checkpoint  " in done.stdout
    assert "holds  parameters: 6, buffers: 3, optimizer state: 18, random states: 1\n" in done.stdout
    assert (
        json.loads(introspect("show", place / "2.pt", "--format", "json").stdout)["manifest"].get("exit_code") is None
    )
    done = introspect("check", place / "2.pt")
    assert (done.returncode, " rules over the tensors of " in done.stdout) == (0, True)
    assert "not checked, because the checkpoint lacks:" in done.stdout
    state = torch.load(place / "2.pt")
    next(value for value in state["model"].values() if value.is_floating_point()).view(-1)[0] = float("nan")
    torch.save(state, tmp_path / "nan.pt")
    done = introspect("check", tmp_path / "nan.pt")
    assert (done.returncode, done.stdout.startswith("error: nonfinite: param ")) == (1, True)
    done = introspect("report", place / "2.pt", place / "5.pt", "-o", "page.html")
    assert done.returncode == 0
    assert "The checkpoints differ: " in (tmp_path / "page.html").read_text()
    done = introspect("export", place / "2.pt", "-o", "rows", "--format", "csv")
    assert done.returncode == 0


def test_without_torch_a_safetensors_file_is_read_and_another_says_what_it_needs(place):
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from introspect_cli.cli import main; sys.argv[1:] = ['diff', *sys.argv[1:]]; main()"
    )

    def run(*names):
        words = [sys.executable, "-c", program, *(str(place / name) for name in names)]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    done = run("3.safetensors", "3.npz")
    assert (done.returncode, done.stdout) == (
        0,
        "The checkpoints hold the same: all 9 tensors of the model are equal.\n",
    )
    done = run("3.safetensors", "3.pt")
    assert done.returncode == 2
    assert "was written by torch.save, and reading it needs torch: install torch" in done.stderr
    assert "Traceback" not in done.stderr
