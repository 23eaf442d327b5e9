"""No bug in what reads the settings and writes the run reaches the script."""

import pytest
from mistakes import Mistake, seeded, train
from neutrality import assert_same, trajectory, watched

from introspect_cli.capture.environment import redact, settings, sources
from introspect_cli.errors import StoreError
from introspect_cli.store.read.run import RunState, open_run
from introspect_cli.store.write.rank_writer import RankWriter
from introspect_cli.store.write.run_writer import StoreWriter


@pytest.mark.parametrize("name", ["runtime", "hardware", "packages", "environment"])
def test_settings_that_cannot_be_read(tmp_path, monkeypatch, capsys, name):
    bare = trajectory(train)

    def fails(*args, **kwargs):
        raise Mistake(f"{name} is broken")

    owner = {"environment": redact, "packages": sources}.get(name, settings)
    monkeypatch.setattr(owner, name, fails)
    with watched(tmp_path / "run", quiet=False, env=True, packages=True):
        seen = trajectory(train)
    monkeypatch.undo()
    assert_same(bare, seen)
    said = [line for line in capsys.readouterr().err.splitlines() if f"{name} is broken" in line]
    assert len(said) == 1
    assert said[0].startswith(f"introspect: {name} settings are not observed")
    with open_run(tmp_path / "run") as run:
        assert name not in run.settings
        assert {"runtime", "hardware", "packages", "environment"} - run.settings.keys() == {name}
        assert run.state is RunState.COMPLETE


@pytest.mark.parametrize(("owner", "name"), [(RankWriter, "close"), (StoreWriter, "_close_ranks")])
def test_mistake_at_the_very_end(tmp_path, monkeypatch, capsys, owner, name):
    """What fails when all is written is told, and costs none of it."""
    bare = trajectory(train)

    def fails(self):
        raise Mistake(f"{name} is broken")

    monkeypatch.setattr(owner, name, fails)
    with watched(tmp_path / "run", quiet=False):
        seen = trajectory(train)
    monkeypatch.undo()
    assert_same(bare, seen)
    assert sum(f"{name} is broken" in line for line in capsys.readouterr().err.splitlines()) >= 1
    with open_run(tmp_path / "run") as run:
        assert run.state is not RunState.COMPLETE
        assert len(run.rank(0).steps) == 3


@pytest.mark.parametrize("error", [StoreError("the disk is full"), OSError(28, "No space left on device")])
@pytest.mark.parametrize("name", ["append", "modules"])
def test_a_store_that_fails_ends_the_run_and_not_the_script(tmp_path, monkeypatch, capsys, name, error):
    """A store that cannot be written is told once, and ends; the script does not notice."""
    bare = trajectory(train)
    original, calls = getattr(RankWriter, name), []

    def fails(self, *args):
        calls.append(name)
        if len(calls) > 1:
            raise error
        return original(self, *args)

    monkeypatch.setattr(RankWriter, name, fails)
    seeded()
    with watched(tmp_path / "run", quiet=False):
        seen = trajectory(train)
    monkeypatch.undo()
    assert_same(bare, seen)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("introspect: ")]
    assert 1 <= len(said) <= 3
    assert len(said) == len(set(said))
