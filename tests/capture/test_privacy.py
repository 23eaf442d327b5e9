"""Secrets of the process that is captured are in no file of its run, and in nothing that is shown or made of it."""

import os
import stat
import subprocess
import sys

import pytest

from introspect_cli.capture.environment import redact
from introspect_cli.store.files.folders import REDACTED

pytestmark = pytest.mark.usefixtures("quick_python")

TOKEN = "ghp_" + "Zq7" * 12
SECRETS = {
    "by the variable's name": ("DB_PASSWORD", "correct-horse-battery"),
    "by a pattern of the user's": ("CUSTOMER_NAME", "Ada-of-Ockham"),
    "by the look of a token": ("NOTE", f"the {TOKEN} one"),
    "by the password in a URL": ("HTTP_PROXY_OF_MINE", "http://me:hunter2hunter2@proxy:80/"),
}
HIDDEN = ("correct-horse-battery", "Ada-of-Ockham", TOKEN, "hunter2hunter2", "swordfish-swordfish")

SCRIPT = """
import sys, torch
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 1)
        self.api_key = "swordfish-swordfish"

    def forward(self, x, token="", options=None):
        return self.inner(x)

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=float(sys.argv[1]))
optimizer.param_groups[0]["api_key"] = "hunter2hunter2"
rows = [{"x": torch.ones(2), "password": "swordfish-swordfish"}] * 2
for batch in torch.utils.data.DataLoader(rows, batch_size=1):
    net(batch["x"], token="hunter2hunter2", options={"auth": {"user": "swordfish-swordfish"}}).sum().backward()
    optimizer.step()
raise RuntimeError(
    "no answer from https://me:hunter2hunter2@host/x, password=swordfish-swordfish, asked with " + sys.argv[-1]
)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs that end with a secret in their last word, from a repository whose remote holds one."""
    folder = tmp_path_factory.mktemp("private")
    (folder / "train.py").write_text(SCRIPT)
    for words in (["init", "-q"], ["remote", "add", "origin", "https://me:hunter2hunter2@git.host/x.git"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", f"Use {TOKEN} for now"]
    subprocess.run(["git", *who], cwd=folder, check=True)
    env = os.environ | dict(SECRETS.values())
    for name, rate in (("a", "0.1"), ("b", "0.2")):
        command = [sys.executable, "-m", "introspect_cli", "capture", "-o", name, "--redact", "CUSTOMER_*", "train.py"]
        secret = [rate, "--api-key", "swordfish-swordfish", "--url", "ftp://me:hunter2hunter2@host/", TOKEN]
        done = subprocess.run([*command, *secret], cwd=folder, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "no answer" in done.stderr
        messages = "".join(line for line in done.stderr.splitlines() if line.startswith("introspect: "))
        assert not any(secret in messages for secret in HIDDEN)
    return folder


def test_no_file_of_a_run_holds_a_secret(runs):
    files = [path for path in (runs / "a").rglob("*") if path.is_file()]
    assert len(files) > 8
    for path in files:
        data = path.read_bytes()
        assert [secret for secret in HIDDEN if secret.encode() in data] == [], path.name
    environment = (runs / "a/settings/environment.yaml").read_text()
    for name, _ in SECRETS.values():
        assert name in environment
    assert environment.count("<redacted>") >= len(SECRETS)


def test_what_holds_settings_is_its_owners_alone(runs):
    for path in [runs / "a/manifest.yaml", *(runs / "a/settings").iterdir()]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path.name
    assert stat.S_IMODE((runs / "a/settings").stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "words",
    [
        ("show", "a"),
        ("show", "settings", "a"),
        ("show", "a", "--format", "json"),
        ("diff", "a", "b"),
        ("diff", "a", "b", "--format", "json"),
        ("check", "a"),
        ("verify", "a"),
        ("export", "a", "--format", "yaml", "-o", "made/yaml"),
        ("export", "a", "--format", "jsonl", "-o", "made/jsonl"),
        ("report", "a", "b", "-o", "made/report.html"),
    ],
    ids=" ".join,
)
def test_nothing_shown_or_made_holds_a_secret(runs, introspect, words):
    made = runs / "made"
    made.mkdir(exist_ok=True)
    done = introspect(*words, cwd=runs)
    assert done.returncode in {0, 1}, done.stderr
    texts = [done.stdout.encode(), done.stderr.encode(), *(p.read_bytes() for p in made.rglob("*") if p.is_file())]
    assert sum(map(len, texts)) > 20
    assert [secret for secret in HIDDEN for text in texts if secret.encode() in text] == []


def test_a_directory_is_no_password():
    shown = redact.environment({"PWD": "/home/me", "OLDPWD": "/tmp", "DB_PWD": "x"})
    assert shown == {"PWD": "/home/me", "OLDPWD": "/tmp", "DB_PWD": REDACTED}
