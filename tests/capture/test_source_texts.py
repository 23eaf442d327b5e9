"""A run keeps the text of the source files that ran, and no secret in them."""

import ast
import gzip
import os
import subprocess
import sys
import types
import zipfile

import pytest
from opcapture import captured
from projects import MODEL, TRAIN

from introspect_cli.errors import StoreError
from introspect_cli.store.run import Sources, open_run
from introspect_cli.store.verify import verify_run


def test_the_text_of_each_file_is_in_the_run_and_no_secret(project):
    path = project("run")
    with open_run(path) as run:
        kept = Sources(run)
        assert set(kept) == {"model.py", "train.py"}
        assert kept["train.py"].text == TRAIN
        assert kept["train.py"].exact
        assert "hunter2" not in kept["model.py"].text
        assert not kept["model.py"].exact
        assert kept["model.py"].text == MODEL.replace("hunter2-is-long", "<redacted>")
    for file in (path / "rank0/sources").iterdir():
        assert file.stat().st_mode & 0o077 == 0
    assert verify_run(path).findings == ()


@pytest.mark.usefixtures("quick_python")
@pytest.mark.parametrize(
    ("words", "with_texts"),
    [
        ("pack run -o out.zip", True),
        ("pack run -o out.zip --no-sources", False),
        ("golden save -o out --steps 2 train.py", False),
        ("publish run file://{}/far --sources", True),
        ("publish run file://{}/far", False),
    ],
)
def test_what_leaves_the_machine_has_the_texts_only_if_asked_for_and_a_pack_if_not_told_otherwise(
    project, introspect, tmp_path, words, with_texts
):
    home = project("run").with_name("run-project")
    words = words.format(tmp_path).split()
    done = introspect(*(tmp_path / "run" if word == "run" else word for word in words), cwd=home)
    assert done.returncode == 0, done.stderr
    sent = tmp_path / "far" / "run"
    names = [path.relative_to(sent).as_posix() for path in sent.rglob("*") if path.is_file()]
    names += [name for packed in tmp_path.rglob("*.zip") for name in zipfile.ZipFile(packed).namelist()]
    assert any(name.startswith("manifest") for name in names)
    assert any(name.startswith("rank0/sources/") for name in names) is with_texts


@pytest.mark.parametrize("fault", ["raise ValueError('no')", "def f(:"])
def test_files_whose_import_failed_are_kept(introspect, tmp_path, fault):
    """Python keeps nothing of a module whose import raised, nor of those that were importing it."""
    (tmp_path / "train.py").write_text("import torch\nimport loss\n")
    (tmp_path / "loss.py").write_text("import helpers\n")
    (tmp_path / "helpers.py").write_text(f"{fault}\n")
    assert introspect("capture", "-q", "-o", "run", "train.py").returncode == 1
    with open_run(tmp_path / "run") as run:
        assert set(Sources(run)) == {"train.py", "loss.py", "helpers.py"}


def test_code_that_no_file_of_a_module_holds_is_kept(tmp_path, monkeypatch):
    code = "import introspect_cli, torch\nwith introspect_cli.recording(torch.nn.Linear(2, 2), 'run') as r:\n    pass\n"
    (tmp_path / "piece.txt").write_text(code)
    with (tmp_path / "piece.txt").open() as piece:
        subprocess.run([sys.executable, "-"], stdin=piece, cwd=tmp_path, check=True)
    with open_run(tmp_path / "run") as run:
        assert [(name, source.text) for name, source in Sources(run).items()] == [("<stdin>", code)]
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "-c", "x = 1"])

    def kept():
        with open_run(captured(tmp_path / "run", lambda: None, source=True)) as run:
            return Sources(run)["-c" if main.__dict__.get("In") is None else "<notebook>"].text

    assert kept() == "x = 1"
    main.In, main.get_ipython = ["", "a = 1\n", "b = 2"], print
    assert kept() == "# cell 1\na = 1\n\n# cell 2\nb = 2\n\n"


def test_a_module_that_was_written_over_since_is_reported(project):
    edits = "import pathlib, sys\npathlib.Path('model.py').write_text('x = 1')\n"
    path = project("run", train=TRAIN.replace("torch.manual_seed", edits + "torch.manual_seed"))
    with open_run(path) as run:
        assert any("model.py changed after the script began" in said for said in run.manifest["not_observed"])


def test_files_of_any_encoding_and_end_of_line_are_kept_to_the_byte(project):
    latin = b"# -*- coding: latin-1 -*-\r\nname = '\xe9t\xe9'\r\n"
    path = project("run", train="import latin\n" + TRAIN, more={"latin.py": latin})
    with open_run(path) as run:
        source = Sources(run)["latin.py"]
        assert source.data == latin
        assert "été" in source.text


HOSTILE = """
import importlib, os, pathlib, sys
sys.path.insert(0, "made")
pathlib.Path("made").mkdir(exist_ok=True)
pathlib.Path("made/generated.py").write_text("SCALE = 2.0\\n")
import generated, gone, linked
os.unlink("gone.py")
config = open("config.yaml").read() + open("link.yaml").read()
pathlib.Path("config.yaml").write_text("rate: 9\\n")
for name in ("loop.yaml", "dangling.yaml"):
    try:
        open(name)
    except OSError as error:
        print(type(error).__name__, error.errno)
exec(compile("def made_up(x):\\n    return x * 2", "<made up>", "exec"))
if os.fork() == 0:
    import extra
    print(open("extra.yaml").read(), flush=True)
    os._exit(0)
os.wait()
print(config, open("config.yaml").read(), generated.SCALE, linked.X, made_up(2))
"""


def test_what_a_script_does_to_its_files_while_it_runs_does_no_harm_and_is_on_record_as_it_was(
    project, tmp_path, introspect, forks
):
    def prepared(home):
        home.mkdir(exist_ok=True)
        (tmp_path / "shared.yaml").write_text("depth: 3\n")
        (tmp_path / "elsewhere.py").write_text("X = 1\n")
        for name, text in (
            ("config.yaml", "rate: 1\n"), ("extra.yaml", "more: 1"), ("extra.py", "print('more')\n"),
            ("gone.py", "Y = 1"),
        ):  # fmt: skip
            (home / name).write_text(text)
            os.utime(home / name, (1e9, 1e9))
        for link, target in (
            ("link.yaml", tmp_path / "shared.yaml"), ("loop.yaml", "loop.yaml"), ("dangling.yaml", "nothing"),
            ("linked.py", tmp_path / "elsewhere.py"),
        ):  # fmt: skip
            (home / link).symlink_to(target)
        os.utime(tmp_path / "shared.yaml", (1e9, 1e9))
        with (home / "large.py").open("wb") as file:
            file.truncate(100 << 20)
        return home

    (prepared(tmp_path / "bare") / "train.py").write_text(HOSTILE + TRAIN)
    (tmp_path / "bare" / "model.py").write_text(MODEL)
    bare = forks.python("train.py", cwd=tmp_path / "bare")
    prepared(tmp_path / "run-project")
    large = (
        "import sys, types\nlarge = types.ModuleType('large')\nlarge.__file__ = __file__.replace('train', 'large')\n"
    )
    path = project("run", train=f"{large}sys.modules['large'] = large\n{HOSTILE}{TRAIN}")
    with open_run(path) as run:
        texts, files, said = dict(Sources(run)), run.settings["files"], " ".join(run.manifest["not_observed"])
        assert run.manifest["exit_code"] == 0
        config = run.source(files["config.yaml"]["digest"])
    assert config == b"rate: 1\n"  # what the script read, and not what it wrote
    assert files.keys() == {"config.yaml", "link.yaml"}
    assert texts["made/generated.py"].text == "SCALE = 2.0\n"
    assert "extra.py" not in texts  # of a process that writes no run
    assert texts["linked.py"].text == "X = 1\n"
    assert "gone.py, large.py cannot be read" in said
    again = introspect("capture", "-q", "-o", "again", "train.py", cwd=prepared_again(tmp_path / "run-project"))
    assert bare.stdout == again.stdout
    assert bare.returncode == again.returncode == 0


def prepared_again(home):
    """The directory as it was before the script changed it."""
    (home / "gone.py").write_text("Y = 1")
    (home / "config.yaml").write_text("rate: 1\n")
    return home


def test_a_run_keeps_no_more_of_a_file_than_its_limit_and_equal_ones_once(project):
    path = project(
        "run",
        train="import large, one, two\n" + TRAIN,
        more={"large.py": "# x\n" * 270_000, "one.py": "", "two.py": ""},
    )
    with open_run(path) as run:
        assert set(Sources(run)) == {"model.py", "train.py", "one.py", "two.py"}
        assert any(said.startswith("the text of large.py is not kept") for said in run.manifest["not_observed"])
    assert len(list((path / "rank0/sources").iterdir())) == 3


@pytest.mark.parametrize("damage", ["bomb", "cut", "other"])
def test_damaged_texts_are_refused_with_a_sentence(project, damage):
    path = project("run")
    with open_run(path) as run:
        digest = run.settings["sources"]["train.py"]
    file = path / "rank0/sources" / f"{digest}.gz"
    data = {"bomb": gzip.compress(b"\0" * (50 << 20)), "cut": file.read_bytes()[:-9], "other": b"not gzip"}[damage]
    file.write_bytes(data)
    assert len(verify_run(path).findings) == 1
    with open_run(path) as run, pytest.raises(StoreError, match="damaged"):
        dict(Sources(run))


SECRETS = (
    ('password = "hunter2"', 'password = "<redacted>"'),
    ('x = {"api_key": "abc"}', 'x = {"api_key": "<redacted>"}'),
    ('os.environ["HF_TOKEN"] = "abcd1234efgh5678ij"', 'os.environ["HF_TOKEN"] = "<redacted>"'),
    ('p.add_argument("--password", default="hunter2")', 'p.add_argument("--password", default="<redacted>")'),
    ('db = "host=x;password=hunter2;user=y"', 'db = "host=x;password=<redacted>;user=y"'),
    ("secret_key = (\n  'abc'\n)", "secret_key = (\n  '<redacted>'\n)"),
    ('u = "postgres://me:hunter2@host/db"', 'u = "postgres://<redacted>@host/db"'),
    ("t = 'ghp_" + "a1" * 18 + "'", "t = '<redacted>'"),
    ('wandb.login("' + "a1" * 20 + '")', 'wandb.login("<redacted>")'),
)


def test_secrets_are_taken_out_of_code(project):
    lines = [text.replace("\n", " ") for text, _ in SECRETS]
    more = {f"part{at}.py": f"def never():\n    {line}\n" for at, line in enumerate(lines)}
    path = project("run", train="import " + ", ".join(name[:-3] for name in more) + "\n" + TRAIN, more=more)
    with open_run(path) as run:
        for at, (_, clean) in enumerate(SECRETS):
            kept = Sources(run)[f"part{at}.py"].text
            assert clean.replace("\n", " ") in kept
            ast.parse(kept)
