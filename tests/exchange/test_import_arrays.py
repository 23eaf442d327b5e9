"""Arrays that something else wrote become a run: the same numbers, the same checksums, its names and its order."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from arrays import as_safetensors
from opcapture import captured, compared
from synthetic import row, write_run
from verbs import verb

from introspect_cli.compare.result import Role, Verdict
from introspect_cli.errors import IntrospectError
from introspect_cli.records import Kind, Phase, Site
from introspect_cli.schedule.rules import Schedule
from introspect_cli.store.run import open_run
from introspect_cli.store.verify import verify_run

torch = pytest.importorskip("torch")


PORTS = Path(__file__).parents[2] / "fixtures" / "ports"


def imported(source, output, *words):
    """Import in this process; the run. Errors are raised."""
    done = verb("import", source, "-o", output, *words)
    if done.returncode:
        raise IntrospectError(done.stderr)
    return output


def forward(weights, tokens, *, scale=1.0):
    """A small model in numpy: arrays by site, in the order in which they are computed.

    What it multiplies is a rounding beside torch's, as another order of a sum may make it, whatever processor this is.
    """

    def times(x, name):
        return np.nextafter(x @ weights[name].T, np.float32(np.inf))

    found = {f"param/{name}": value for name, value in weights.items()}
    x = found["output/Net.embed"] = weights["Net.embed.weight"][tokens]
    x = found["output/Net.up"] = times(x, "Net.up.weight") + weights["Net.up.bias"]
    x = found["output/Net.act"] = np.maximum(x, 0) * np.float32(scale)
    found["output/Net"] = times(x, "Net.down.weight")
    return found


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(20, 8)
        self.up, self.act = torch.nn.Linear(8, 16), torch.nn.ReLU()
        self.down = torch.nn.Linear(16, 3, bias=False)

    def forward(self, tokens):
        return self.down(self.act(self.up(self.embed(tokens))))


TOKENS = torch.arange(12).view(3, 4)


def made():
    torch.manual_seed(0)
    return Net()


def train():
    net = made()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(TOKENS).square().mean().backward()
    optimizer.step()


WEIGHTS = {f"Net.{name}": value.detach().numpy() for name, value in made().state_dict().items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return captured(tmp_path_factory.mktemp("torch") / "run", train)


def as_folder(place, arrays):
    for name, value in arrays.items():
        path = place / f"{name}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, value)
    return place


def as_archive(place, arrays):
    np.savez(place.with_suffix(".npz"), **arrays)
    return place.with_suffix(".npz")


@pytest.mark.parametrize("write", [as_folder, as_archive, as_safetensors])
def test_a_run_agrees_with_arrays_that_numpy_computed_and_the_first_that_differs_is_named(run, tmp_path, write):
    theirs = imported(write(tmp_path / "dump", forward(WEIGHTS, TOKENS.numpy())), tmp_path / "theirs")
    assert not verify_run(theirs).findings
    with open_run(run) as one, open_run(theirs) as two:
        ours = {record.site: record.summary for record in one.rank(0).records(0)}
        for record in two.rank(0).records(0):
            if record.site.kind is Kind.PARAM:
                assert record.summary.checksum == ours[record.site].checksum, record.site
    for a, b in ((run, theirs), (theirs, run)):
        result = compared(a, b, rtol=1e-5)
        assert (result.verdict, result.counts.diverged) == (Verdict.SAME, 0), result.sentence
        assert result.counts.equal == 8  # four parameters and four outputs: what run b lists and no more
        assert "what it does not list is not compared" in " ".join(result.notes)
    wrong = forward(WEIGHTS, TOKENS.numpy(), scale=1.5)
    theirs = imported(write(tmp_path / "wrong", wrong), tmp_path / "theirs", "--force")
    for a, b in ((run, theirs), (theirs, run)):
        result = compared(a, b, rtol=1e-5)
        assert result.verdict is Verdict.DIVERGED
        assert result.first.site == Site(Phase.FORWARD, Kind.OUTPUT, "Net.act"), result.sentence
        assert result.first.rel_l2 == pytest.approx(1 / 3, rel=0.5)


def test_names_of_another_framework_are_known_by_their_values(run, tmp_path):
    renamed = {"embed": "words", "up": "wide", "down": "narrow"}

    def theirs(name):
        for old, new in renamed.items():
            name = name.replace(f"Net.{old}", f"flax/{new}")
        return name.replace("Net", "flax").replace(".", "/")

    for scale, verdict, said in (
        (1.0, Verdict.SAME, "8 records of 1 step, 3 of them only within tolerance"),
        (1.5, Verdict.DIVERGED, "First divergence at step 0: the output of flax.narrow (Linear)"),
    ):
        found = forward(WEIGHTS, TOKENS.numpy(), scale=scale)
        found["output/Net.down"] = found["output/Net"]
        arrays = {theirs(name): value for name, value in found.items() if name != "output/Net.act"}
        path = imported(as_archive(tmp_path / "dump", arrays), tmp_path / "theirs", "--force")
        result = compared(run, path)
        assert result.verdict is verdict, result.sentence
        assert said in result.sentence


def test_a_checkpoint_is_the_start_of_a_run(run, tmp_path):
    state = {name.removeprefix("Net."): value for name, value in WEIGHTS.items()}
    weights = as_safetensors(tmp_path / "model", state)
    start = imported(weights, tmp_path / "start", "--kind", "param", "--root", "Net")
    assert compared(run, start, kinds=frozenset({Kind.PARAM})).counts.diverged == 0
    state["up.bias"] = state["up.bias"] + 1
    start = imported(as_safetensors(tmp_path / "model", state), start, "--kind=param", "--root=Net", "--force")
    assert compared(run, start).first.site == Site(Phase.START, Kind.PARAM, "Net.up.bias")


def test_steps_ranks_calls_and_types_are_read(tmp_path):
    bits = torch.randn(6).to(torch.bfloat16)
    as_folder(tmp_path / "d", {"step=3/rank1/output/h/0/call1": np.ones((2, 3), ">f8")})
    (tmp_path / "d" / "step=4").mkdir()
    raw = bits.view(torch.int16).numpy()
    as_safetensors(tmp_path / "d/step=4/model-00001", {"grad/w": raw}, {"grad/w": "BF16"})
    path = imported(tmp_path / "d", tmp_path / "run", "--save-tensors", "w")
    with open_run(path) as run:
        (wide,) = run.rank(1).records(3)
        (grad,) = run.rank(0).records(4)
        assert (wide.site, wide.summary.layout.dtype) == (Site(Phase.FORWARD, Kind.OUTPUT, "h.0", 1), "float64")
        assert (grad.site, grad.summary.layout.dtype) == (Site(Phase.OPTIMIZER, Kind.GRAD, "w"), "bfloat16")
        assert np.array_equal(run.tensor(grad.summary.checksum), bits.float().numpy())
        assert run.tensor(wide.summary.checksum) is None


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("output/h.0.mlp", (0, Site(Phase.FORWARD, Kind.OUTPUT, "h.0.mlp"))),
        ("input/h/0", (0, Site(Phase.FORWARD, Kind.INPUT, "h.0", 0, "[0]"))),
        ("step_12/0007-output/h['a']", (12, Site(Phase.FORWARD, Kind.OUTPUT, "h", 0, "['a']"))),
        ("optimizer/param/w", (0, Site(Phase.OPTIMIZER, Kind.PARAM, "w"))),
        ("loss", (0, Site(Phase.LOSS, Kind.LOSS, "loss"))),
        ("batch/[1]", (0, Site(Phase.DATA, Kind.BATCH, "DataLoader", 0, "[1]"))),
    ],
)
def test_a_name_says_what_an_array_is(tmp_path, words, found):
    step, site = found
    with open_run(imported(as_archive(tmp_path / "d", {words: np.ones(2)}), tmp_path / "run")) as run:
        assert [record.site for record in run.rank(0).records(step)] == [site]


def test_the_order_is_that_of_an_archive_or_of_numbers_and_is_never_made_up_in_silence(tmp_path):
    rng = np.random.default_rng(0)
    names = ["output/z", "output/b", "output/a"]
    values = {name: rng.normal(size=3).astype(np.float32) for name in names}
    numbered = {f"{at:02d}-{name}": value for at, (name, value) in enumerate(values.items())}
    for write, arrays, order, said in (
        (as_archive, values, ["z", "b", "a"], []),
        (as_folder, numbered, ["z", "b", "a"], []),
        (as_folder, values, ["a", "b", "z"], ["the order"]),
    ):
        place = tmp_path / f"{write.__name__}{len(said)}"
        with open_run(imported(write(place, arrays), tmp_path / "run", "--force")) as run:
            assert [record.site.fqn for record in run.rank(0).records(0)] == order
            assert [sentence[:9] for sentence in run.manifest["not_observed"]] == said


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """Weights before each of six steps, and three captures: of every step, of steps 0, 2 and 4, and of 1, 3 and 5."""
    weights = []

    def work():
        net = made()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        weights.clear()
        for step in range(6):
            weights.append({f"Net.{name}": each.detach().numpy().copy() for name, each in net.state_dict().items()})
            net(TOKENS).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 2:
                net.eval()
                with torch.no_grad():
                    net(TOKENS + 1)
                net.train()

    path = tmp_path_factory.mktemp("sampled")
    runs = {
        name: captured(path / name, work, steps=Schedule.parse(text), eval=name == "every")
        for name, text in (("every", "::"), ("even", "::2"), ("odd", "1::2"))
    }
    return runs, list(weights)


@pytest.mark.parametrize(
    ("run", "steps", "bad", "verdict", "said"),
    [
        ("even", range(6), 3, Verdict.SAME, "24 records of 3 steps"),
        ("even", range(6), 4, Verdict.DIVERGED, "First divergence at step 4: the output of Net.act (ReLU)"),
        ("odd", range(6), 3, Verdict.DIVERGED, "First divergence at step 3: the output of Net.act (ReLU)"),
        ("odd", [3], 0, Verdict.SAME, "8 records of 1 step"),
        ("even", [0], 3, Verdict.SAME, "agree up to and including step 0."),
        ("odd", [0, 2], 3, Verdict.UNDECIDED, "Could not tell: the runs have no step in common."),
        ("every", range(6), 7, Verdict.SAME, "48 records of 6 steps"),
        ("every", range(6), 3, Verdict.DIVERGED, "First divergence at step 3: the output of Net.act (ReLU)"),
        ("every", [0], 7, Verdict.SAME, "agree up to and including step 0."),
    ],
)
def test_a_list_of_arrays_is_compared_with_a_sampled_run(sampled, tmp_path, run, steps, bad, verdict, said):
    """Only steps of both are; what a list ends with, or tells no setting of, is no difference."""
    runs, weights = sampled
    found = {
        f"step={step}/{name}": value
        for step in steps
        for name, value in forward(weights[step], TOKENS.numpy(), scale=1.5 if step == bad else 1.0).items()
    }
    np.savez(tmp_path / "dump.npz", **found)
    dump = imported(tmp_path / "dump.npz", tmp_path / "dump")
    result = compared(runs[run], dump, rtol=1e-4, atol=1e-5)
    assert (result.verdict, said in result.sentence) == (verdict, True), result.sentence
    if result.first:  # inputs are not listed, and the change may have come in a step that the schedule left out
        assert (result.first.reason, result.first.role) == ("gap", Role.PROPAGATED)
        assert ("steps-between" in {one.code for one in result.explains}) is (run != "every")
    assert not result.settings
    other = compared(dump, runs[run], rtol=1e-4, atol=1e-5)
    assert (other.verdict, other.settings) == (verdict, ()), other.sentence


def test_parameters_that_a_list_has_at_the_start_of_every_step_are_those_that_the_step_before_left(sampled, tmp_path):
    """Nothing else is listed; a parameter that the third update left differently differs when step 3 begins."""
    runs, weights = sampled
    found = {f"step={step}/param/{name}": each for step, held in enumerate(weights) for name, each in held.items()}
    np.savez(tmp_path / "dump.npz", **found)
    dump = imported(tmp_path / "dump.npz", tmp_path / "dump")
    for a, b in ((runs["every"], dump), (dump, runs["every"])):
        result = compared(a, b)
        assert (result.verdict, result.counts.equal) == (Verdict.SAME, 24), result.sentence
    found |= {name: each * np.float32(1.5) for name, each in found.items() if name >= "step=3" and "up.weight" in name}
    np.savez(tmp_path / "dump.npz", **found)
    dump = imported(tmp_path / "dump.npz", tmp_path / "dump", "--force")
    for a, b in ((runs["every"], dump), (dump, runs["every"])):
        result = compared(a, b)
        assert result.first.site == Site(Phase.START, Kind.PARAM, "Net.up.weight")
        assert (result.first.step, result.counts.diverged) == (3, 3)
        assert "the parameter Net.up.weight when the step begins" in result.sentence
        assert "left: the update of the step before" in result.sentence


@pytest.mark.parametrize(
    ("run", "step", "scale", "said"),
    [
        ("every", 2, 1.0, "The runs are the same: 8 records of 1 step, "),
        ("every", 2, 1.5, "Net.act"),
        ("odd", 3, 1.0, "(the first: the output of Net.embed in the evaluation of step 3)"),
    ],
)
def test_arrays_of_an_evaluation_are_reported_as_that(sampled, tmp_path, run, step, scale, said):
    """It runs after step 1, and belongs to step 2; the run that holds odd steps alone has not recorded any."""
    runs, weights = sampled
    trained, evaluated = forward(weights[step], TOKENS.numpy()), forward(weights[2], TOKENS.numpy() + 1, scale=scale)
    found = {
        f"step={step}/{phase}{name}": value
        for phase, arrays in (("", trained), ("eval/", evaluated))
        for name, value in arrays.items()
        if name.startswith("output")
    }
    np.savez(tmp_path / "dump.npz", **found)
    result = compared(runs[run], imported(tmp_path / "dump.npz", tmp_path / "dump"), rtol=1e-4, atol=1e-5)
    assert said in result.sentence, result.sentence
    assert (result.verdict is Verdict.DIVERGED) == (scale != 1.0)
    if scale != 1.0:
        assert result.first.site.phase is Phase.EVAL


def cut(place):
    whole = as_safetensors(place / "a", {"output/h": np.zeros(3)})
    whole.write_bytes(whole.read_bytes()[:-1])


def mixed(place):
    as_folder(place, {"output/h": np.zeros(2)})
    (place / "step=0").mkdir()
    (place / "step=0" / "rank0.yaml").write_text("parameters: {}\n")


NUMPY = "is not a .npy file that can be read"
BROKEN = {
    "cut": (cut, "lies beyond the end of the file"),
    "pickle": (lambda place: np.save(place / "a.npy", np.array([print, {}], object), allow_pickle=True), NUMPY),
    "text": (lambda place: np.save(place / "a.npy", np.array(["a"])), "elements of numpy's type <U1 are not read"),
    "empty": (lambda place: (place / "a.npy").write_bytes(b""), NUMPY),
    "zip": (lambda place: (place / "a.npz").write_bytes(b"PK\x03\x04 nothing"), "is not a .npz file that can be read"),
    "twice": (
        lambda place: as_folder(place, {"output/h": np.zeros(2), "output/h/call0": np.zeros(2)}),
        "are of the same site",
    ),
    "mixed": (mixed, "has arrays and YAML reports below it"),
    "nothing": (lambda place: None, "has no arrays"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_cannot_be_read_is_a_sentence_and_leaves_no_run(tmp_path, kind):
    make, said = BROKEN[kind]
    (tmp_path / "d").mkdir()
    make(tmp_path / "d")
    with pytest.raises(IntrospectError, match=said):
        imported(tmp_path / "d", tmp_path / "run", "--kind", "output")
    assert not (tmp_path / "run").exists()


def test_a_name_without_a_kind_is_asked_for_one(tmp_path):
    with pytest.raises(IntrospectError, match="does not say what it is of: put a kind before it"):
        imported(as_folder(tmp_path / "d", {"h.0": np.zeros(2)}), tmp_path / "run")
    with pytest.raises(IntrospectError, match="is a run already"):
        imported(write_run(tmp_path / "r", [[row("loss", "loss", "loss", 1.0)]]), tmp_path / "run")


def test_gpt2_in_numpy_agrees_with_that_of_transformers_and_its_faults_are_found(tmp_path):
    pytest.importorskip("transformers")
    sys.path.append(str(PORTS))
    import ported_numpy
    import trained

    a = captured(tmp_path / "a", lambda: trained.train("gpt2"))
    state = {name: value.numpy() for name, value in trained.original("gpt2").state_dict().items()}
    tokens = torch.randint(0, 60, (3, 12), generator=torch.Generator().manual_seed(1)).numpy()
    places = {
        "": "42 records of 1 step, 14 of them only within tolerance",
        "eps": "the output of model.layer_1.norm_1 (LayerNorm)",
        "gelu": "the output of model.layer_1.down (Conv1D)",
        "mask": "the output of model.layer_1.mix (Conv1D)",
        "weight": "the parameter model.layer_1.up.kernel when the step begins",
    }
    assert set(ported_numpy.FAULTS) < set(places)
    for fault, said in places.items():
        dump = as_archive(tmp_path / "dump", ported_numpy.forward(state, tokens, 2, fault))
        result = compared(a, imported(dump, tmp_path / "b", "--force"))
        assert (result.verdict is Verdict.SAME) is (not fault), result.sentence
        assert said in result.sentence
        assert not any("different steps" in note or "different statistics" in note for note in result.notes)
