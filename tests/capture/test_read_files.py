"""The files that a script reads are on record, and the answer names the value, or the file, that differs."""

from __future__ import annotations

import gzip
import os
import re

import pytest
import torch
from logs import documents_of
from opcapture import compared
from synthetic import row, write_run
from torch import nn

from introspect_cli.store.run import open_run

SCRIPT = """
import configparser, json, pathlib, tomllib
import numpy as np
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

torch.manual_seed(0)
model = yaml.safe_load(open("config.yaml"))["model"]
scale = json.loads(pathlib.Path("data.json").read_text())["scale"]
rate = tomllib.load(open("opt.toml", "rb"))["lr"]
ini = configparser.ConfigParser()
ini.read("clip.ini")
exec(open("overrides.py").read())
data = np.memmap("train.bin", dtype=np.float32, mode="r")
net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(model["dropout"]), nn.Linear(4, 1))
net.load_state_dict(torch.load("init.pt"))
net[2].load_state_dict(load_file("head.safetensors"))
for path in sorted(pathlib.Path("many").iterdir()):
    path.read_bytes()
optimizer = torch.optim.SGD(net.parameters(), lr=rate)
for step in range(2):
    x = torch.from_numpy(np.array(data[step * 8:(step + 1) * 8])).view(2, 4)
    optimizer.zero_grad()
    (net(x).mean() * scale * factor).backward()
    nn.utils.clip_grad_norm_(net.parameters(), ini.getfloat("clip", "norm"))
    optimizer.step()
open("out.json", "w").write("{}")
open("out.json").read()
"""

CONFIG = """\
# of the model
base: &base
  width: 4
model:
  <<: *base
  dropout: 0.1
wandb: {entity: me, api_key: secret-one}
password: secret-two
session:
  - secret-three
"""


def write_files(folder):
    import numpy as np
    from safetensors.torch import save_file

    (folder / "config.yaml").write_text(CONFIG)
    (folder / "data.json").write_text('{"scale": 1.0, "auth": {"user": "secret-four", "pins": [1, 2]}}')
    (folder / "opt.toml").write_text('lr = 0.1\ntoken = """\nsecret-six"""\n[credentials]\nname = "secret-five"\n')
    (folder / "clip.ini").write_text("[clip]\nnorm = 1.0\n")
    (folder / "overrides.py").write_text("factor = 1.0\n")
    np.random.default_rng(0).normal(size=100).astype("f4").tofile(folder / "train.bin")
    generator = torch.Generator().manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 1))
    for parameter in net.parameters():
        nn.init.normal_(parameter, generator=generator)
    torch.save(net.state_dict(), folder / "init.pt")
    save_file(net[2].state_dict(), folder / "head.safetensors")
    (folder / "many").mkdir(exist_ok=True)
    for number in range(60):
        (folder / f"many/{number}.dat").write_text(str(number))


def replaced(name, old, new):
    def change(folder):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return change


def another_checkpoint(name):
    def change(folder):
        from safetensors.torch import load_file, save_file

        path, is_pickle = folder / name, name.endswith(".pt")
        held = torch.load(path) if is_pickle else load_file(path)
        held = {key: value + 1 for key, value in held.items()}
        (torch.save if is_pickle else save_file)(held, path)

    return change


CHANGES = {
    "config.yaml: model.dropout 0.1 -> 0.2": replaced("config.yaml", "0.1", "0.2"),
    "data.json: scale 1 -> 2": replaced("data.json", "1.0", "2.0"),
    "opt.toml: lr 0.1 -> 0.3": replaced("opt.toml", "0.1", "0.3"),
    "clip.ini:2: norm = 1.0 -> norm = 0.01": replaced("clip.ini", "1.0", "0.01"),
    # blank lines count for nothing
    "clip.ini:3: norm = 1.0 -> norm = 0.02": replaced("clip.ini", "norm = 1.0", "\nnorm = 0.02"),
    "overrides.py:1: factor = 1.0 -> factor = 2.0": replaced("overrides.py", "1.0", "2.0"),
    "train.bin: another file": lambda folder: (folder / "train.bin").write_bytes(bytes(400)),
    "init.pt: another file": another_checkpoint("init.pt"),
    "head.safetensors: another file": another_checkpoint("head.safetensors"),
}


def made(introspect, folder, run, *options):
    (folder / "train.py").write_text(SCRIPT)
    done = introspect("capture", "-q", *options, "-o", run, "train.py", cwd=folder)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def captured(tmp_path_factory, forks):
    """A run with all files as they are."""
    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    made(forks, folder, "run")
    return folder / "run"


@pytest.mark.parametrize("cause", CHANGES)
def test_the_value_or_the_file_that_differs_is_the_likely_cause(captured, tmp_path, introspect, cause):
    write_files(tmp_path)
    CHANGES[cause](tmp_path)
    made(introspect, tmp_path, "run")
    answer = introspect("diff", captured, "run").stdout
    said = re.search(r"^  likely +(.*)$", answer, re.MULTILINE)
    assert said is not None, answer
    assert said[1].startswith(cause), answer


def test_what_is_on_record_is_what_was_read(captured):
    found = documents_of(captured)["files"]
    assert found["config.yaml"]["line"] == "train.py:10"
    assert found["init.pt"] | {"digest": "", "size": 0} == {"size": 0, "digest": "", "line": "train.py:18"}
    assert found["many/*.dat"] == {"many": True, "line": "train.py:21"}
    assert not [name for name in found if name.startswith("many/") and "*" not in name]
    assert "out.json" not in found  # the script's own
    assert "train.py" not in found


def test_no_secret_of_a_configuration_is_on_record(captured):
    texts = [gzip.decompress(path.read_bytes()).decode() for path in (captured / "rank0/sources").iterdir()]
    assert any("dropout: 0.1" in text for text in texts)
    everything = "\n".join([*texts, str(documents_of(captured))])
    assert "secret-" not in everything.replace("secret-one", "secret-", 0)
    assert not [word for word in ("one", "two", "three", "four", "five") if f"secret-{word}" in everything]


def test_without_sources_no_text_is_kept_and_a_file_is_another_one(tmp_path, introspect):
    write_files(tmp_path)
    made(introspect, tmp_path, "a", "--no-sources")
    CHANGES["config.yaml: model.dropout 0.1 -> 0.2"](tmp_path)
    made(introspect, tmp_path, "b", "--no-sources")
    assert not (tmp_path / "a/rank0/sources").exists()
    answer = introspect("diff", "a", "b", "--settings").stdout
    assert "config.yaml: another file" in answer


HOSTILE = r"""
import gc, io, os, pathlib, threading, traceback, warnings
import torch

warnings.simplefilter("always")
for name, mode in (("absent.yaml", "r"), ("fifo", "q"), (7.5, "r")):
    try:
        open(name, mode)
    except Exception:
        traceback.print_exc()
try:
    open()
except TypeError as error:
    print(error)

class Reader:
    read = open
    bound = io.open

print(Reader().read("latin.yaml", "rb").read(), callable(open))
writer = threading.Thread(target=lambda: open("fifo", "w").write("through\n"))
writer.start()
print(open("fifo").read())
writer.join()
print(len(open("/dev/zero", "rb").read(10)))
with open("gone.json") as file:
    print(file.read(3), file.tell())
    os.unlink("gone.json")
    print(file.read())
small = os.open("small", os.O_RDONLY)
print(open("only-here.json", opener=lambda name, flags: os.open(name, flags, dir_fd=small)).read())
file = open("position.json", "rb", buffering=0)
print(file.tell(), file.read(2), os.lseek(file.fileno(), 0, os.SEEK_CUR))
for number in range(3000):
    pathlib.Path(f"small/{number}.json").read_text()
opened = open("position.json")
del opened
gc.collect()
for name in ("laughs.yaml", "deep.json", "long.yaml", "binary.yaml"):
    print(len(open(name, "rb").read()))
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""


def hostile_files(folder, last="a"):
    os.mkfifo(folder / "fifo")
    (folder / "latin.yaml").write_bytes("größe: 1\n".encode("latin-1"))
    (folder / "gone.json").write_text('{"a": 1}')
    (folder / "position.json").write_text("[1]")
    (folder / "small").mkdir()
    for number in range(3000):
        (folder / f"small/{number}.json").write_text("{}")
    laughs = "\n".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]" for n in range(1, 30))
    (folder / "small/only-here.json").write_text("[]")
    (folder / "laughs.yaml").write_text(f"x0: &x0 {last}\n{laughs}\n")
    (folder / "deep.json").write_text("[" * 50_000 + last)
    (folder / "long.yaml").write_text("password: {" * 20_000 + last)
    (folder / "binary.yaml").write_bytes(b"a: \0\xff" + last.encode())
    (folder / "train.py").write_text(HOSTILE)


def test_hostile_files_change_nothing_for_the_script_and_hold_up_nobody(tmp_path, introspect, forks):
    folders = [tmp_path / name for name in ("bare", "a", "b")]
    for folder, last in zip(folders, "aab", strict=True):
        folder.mkdir()
        hostile_files(folder, last)
    bare = forks.python("train.py", cwd=folders[0])
    run, _ = (introspect("capture", "-q", "-o", "run", "train.py", cwd=folder) for folder in folders[1:])
    places = str(folders[0]), str(folders[1])
    assert (bare.returncode, bare.stdout) == (run.returncode, run.stdout)
    assert bare.stderr.replace(*places) == run.stderr
    found = documents_of(folders[1] / "run")["files"]
    assert found["small/*.json"]["many"]
    assert {"gone.json", "latin.yaml", "laughs.yaml"} <= found.keys()
    assert not {"fifo", "/dev/zero", "written.json"} & found.keys()
    assert len(found) < 12
    answer = introspect("diff", folders[1] / "run", folders[2] / "run", "--settings").stdout
    assert "laughs.yaml:1: x0: &x0 a -> x0: &x0 b" in answer
    assert "binary.yaml: another file" in answer


BY_LIBRARIES = """
import os, pathlib
import torch
import pyarrow, pyarrow.parquet as parquet
import h5py
from pyarrow import memory_map
from safetensors.torch import load_file

parquet.read_table("table.parquet")
parquet.ParquetFile(pathlib.Path("file.parquet"))
memory_map("table.arrow").close()
for table in ("set", ["set/1.parquet"]):
    parquet.ParquetDataset(table)
file = h5py.File("data.h5", "r")
print(isinstance(file, h5py.File), h5py.File.__init__.__name__)
h5py.File(name="new.h5", mode="w")
print(load_file.__name__, [*load_file(filename="head.safetensors")])
try:
    load_file("absent.safetensors")
except FileNotFoundError as error:
    print(error)
net = torch.nn.Linear(2, 1)
net(torch.ones(1, 2)).sum().backward()
torch.optim.SGD(net.parameters(), lr=0.1).step()
"""
H5PY = """
class Group: pass
class File(Group):
    def __init__(self, name, mode="r", **more):
        open(name, mode + "b").close() if mode == "w" else None
"""


def test_files_that_libraries_open_by_themselves_are_on_record(tmp_path, introspect, forks):
    import pyarrow as pa
    from pyarrow import parquet
    from safetensors.torch import save_file

    (tmp_path / "h5py.py").write_text(H5PY)  # as far as it is asked here
    (tmp_path / "set").mkdir()
    table = pa.table({"x": [1, 2]})
    for name in ("table.parquet", "file.parquet", "set/1.parquet", "set/2.parquet"):
        parquet.write_table(table, tmp_path / name)
    with pa.OSFile(str(tmp_path / "table.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    for name in ("data.h5",):
        (tmp_path / name).write_bytes(b"data")
    save_file({"w": torch.ones(2)}, tmp_path / "head.safetensors")
    (tmp_path / "train.py").write_text(BY_LIBRARIES)
    bare = forks.python("train.py", cwd=tmp_path)
    (tmp_path / "new.h5").unlink()
    run = introspect("capture", "-q", "-o", "run", "train.py")
    assert (bare.returncode, bare.stdout, bare.stderr) == (run.returncode, run.stdout, run.stderr)
    assert run.returncode == 0, run.stderr
    found = documents_of(tmp_path / "run")["files"]
    assert found.keys() == {
        "table.parquet", "file.parquet", "table.arrow", "set/1.parquet", "set/2.parquet", "data.h5",
        "head.safetensors",
    }  # fmt: skip
    assert all(each["digest"] for each in found.values())
    assert found["data.h5"]["line"] == "train.py:14"


CONFIGURATIONS = (
    ("max_tokens: 3\ntokenizer: gpt2\nlr: 1\n", "max_tokens: 3\ntokenizer: gpt2\nlr: 1\n"),
    ("api_key: |\n  abc\n  def\nlr: 1\n", 'api_key: "<redacted>"\n\n\nlr: 1\n'),
    ("[a]\nsecret = x y\nlr=1\n", '[a]\nsecret = "<redacted>"\nlr=1\n'),
    ('{"auth": {"a": ["b", 1]}, "lr": 1}', '{"auth": "<redacted>", "lr": 1}'),
    ("hub: hf_abcdefghijklmnopqrstuvwxyz\n", "hub: <redacted>\n"),
    ("password: {a: b", 'password: "<redacted>"'),
    ("[credentials]\nname = x\n\n[a]\nlr = 1\n", "[credentials]\n\n\n[a]\nlr = 1\n"),
    ("session:\n- a\n- b\nlr: 1", 'session: "<redacted>"\n\n\nlr: 1'),
    ("w: {e: me, api_key: a1, b: 2}", 'w: {e: me, api_key: "<redacted>", b: 2}'),
    ("password: a, b # c\n  d\nlr: 1", 'password: "<redacted>"\n\nlr: 1'),
    ('{\n  "token": 12,\n  "lr": 1\n}', '{\n  "token": "<redacted>",\n  "lr": 1\n}'),
    ("use_auth_token: true\nlr: 1\n", "use_auth_token: true\nlr: 1\n"),
)


def test_secrets_are_taken_out_of_a_configuration_that_still_parses(tmp_path, introspect):
    for at, (text, _) in enumerate(CONFIGURATIONS):
        (tmp_path / f"{at}.yaml").write_text(text)
    reads = f"for at in range({len(CONFIGURATIONS)}):\n    open(f'{{at}}.yaml').read()\n"
    (tmp_path / "train.py").write_text(f"import torch\n{reads}torch.nn.Linear(1, 1)(torch.ones(1))\n")
    assert introspect("capture", "-q", "-o", "run", "train.py").returncode == 0
    with open_run(tmp_path / "run") as run:
        files = run.settings["files"]
        for at, (_, kept) in enumerate(CONFIGURATIONS):
            assert run.source(files[f"{at}.yaml"]["digest"]).decode() == kept


def test_anchors_of_a_yaml_file_are_followed_and_no_tag_makes_an_object(tmp_path):
    texts = "b: &x [1]\nc: *x\n", "b: &x [2]\nc: *x\n"
    tagged = [f"a: !!python/name:os.{name}\n" for name in ("system", "popen")]
    for run, plain, tag in zip("ab", texts, tagged, strict=True):
        files = {"plain.yaml": plain, "tagged.yaml": tag}
        write_run(tmp_path / run, [[row("loss", "loss", "loss", 1.0)]], files=files)
    found = [(change.name, change.a, change.b) for change in compared(tmp_path / "a", tmp_path / "b").settings]
    assert found == [
        ("plain.yaml: b[0]", "1", "2"), ("plain.yaml: c[0]", "1", "2"),
        ("tagged.yaml:1", *(tag.strip() for tag in tagged)),
    ]  # fmt: skip
