"""`introspect verify` finds what is damaged, says what is sound, and its exit code can be scripted."""

from __future__ import annotations

import numpy as np
from store_attacks import TENSOR, build
from synthetic import row, write_run

from introspect_cli.errors import StoreError
from introspect_cli.records import Site
from introspect_cli.store import rank_writer
from introspect_cli.store.run import open_run
from introspect_cli.store.verify import verify_run


def is_sound(path):
    try:
        return verify_run(path).sound
    except StoreError:  # the bit made it a newer format
        return False


def test_every_byte_of_a_run_is_checked(tmp_path):
    """One flipped bit anywhere in a closed run is found, in whatever file."""
    files = build(tmp_path / "run")
    rng = np.random.default_rng(3)
    for name, data in files.items():
        places = range(len(data)) if len(data) < 300 else rng.choice(len(data), 60, replace=False)
        for at in places:
            changed = bytearray(data)
            changed[at] ^= 1 << int(rng.integers(8))
            (tmp_path / "run" / name).unlink()
            (tmp_path / "run" / name).write_bytes(changed)
            assert not is_sound(tmp_path / "run"), (name, at)
        (tmp_path / "run" / name).write_bytes(data)
    assert verify_run(tmp_path / "run").sound


def test_findings_do_not_stop_at_the_first(tmp_path):
    files = build(tmp_path / "run")
    for name in (f"rank0/tensors/{TENSOR:016x}.safetensors", "rank1/log.bin"):
        (tmp_path / "run" / name).write_bytes(files[name][:-20] + bytes(20))
    (tmp_path / "run" / "extra\n").write_text("")
    (tmp_path / "run" / "rank0" / "tensors" / "x.json").write_text("")
    report = verify_run(tmp_path / "run")
    text = "\n".join(report.findings)
    for part in (
        "it is not what this tensor",
        "rank1/log.bin: ",
        "'extra\\n' is not",
        "'x.json' is not",
    ):
        assert part in text
    assert report.counts["documents"] == 4
    assert report.counts["steps"] >= 4  # what is before the damage is sound all the same


def test_digests_and_keys_are_computed_again(tmp_path, monkeypatch):
    """A writer that counted wrongly would be found, though every CRC is right."""
    rows, real, wrongly = [row("forward", "output", "A", 1.0)], Site.key, "do not add up to the digest"
    monkeypatch.setattr(Site, "key", lambda site: real(site) ^ 1)
    keys = write_run(tmp_path / "keys", [rows])
    monkeypatch.setattr(Site, "key", real)
    assert wrongly in verify_run(keys).findings[0]
    right = rank_writer.step_digest

    def wrong(keys, sums, *others):
        return right(keys, sums + np.uint64(1), *others)

    monkeypatch.setattr(rank_writer, "step_digest", wrong)
    assert wrongly in verify_run(write_run(tmp_path / "run", [rows])).findings[0]


def test_the_command_says_what_is_sound_and_what_is_not(tmp_path, introspect):
    files = build(tmp_path / "run")
    sound = introspect("verify", "run")
    assert (sound.returncode, sound.stderr) == (0, "")
    assert (
        sound.stdout == "sound: 8 steps with 40 records, 4 documents, 1 tensor; closed properly, last complete step 3\n"
    )
    with open_run(tmp_path / "run") as run:
        at = run.rank(0).entry(0).offset
    data = files["rank0/log.bin"]
    (tmp_path / "run" / "rank0" / "log.bin").write_bytes(data[: at + 9] + b"!" + data[at + 10 :])
    damaged = introspect("verify", "run")
    assert damaged.returncode == 1
    assert "damaged: run/rank0/log.bin: the records of step 0 are not those that were written\n" in damaged.stdout
    assert "still sound: 7 steps with 35 records" in damaged.stdout
    missing = introspect("verify", "nowhere")
    assert missing.returncode == 2
    assert missing.stdout == ""
    assert missing.stderr.startswith("introspect: there is no run at nowhere")
