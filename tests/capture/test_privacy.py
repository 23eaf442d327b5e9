"""Secrets of the process that is captured are in no file of its run, and in nothing that is shown or made of it."""

from __future__ import annotations

import os
import random
import stat
import string
import subprocess
import sys
import time

import pytest
from logs import documents_of
from opcapture import captured

from introspect_cli.store.files import REDACTED

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
    assert len(files) >= 3
    for path in files:
        data = path.read_bytes()
        assert [secret for secret in HIDDEN if secret.encode() in data] == [], path.name
    environment = str(documents_of(runs / "a")["environment"])
    for name, _ in SECRETS.values():
        assert name in environment
    assert environment.count("<redacted>") >= len(SECRETS)


def test_what_holds_settings_is_its_owners_alone(runs):
    for path in [runs / "a/manifest.json", *(runs / "a").glob("rank0/*.bin"), *(runs / "a").glob("rank0/*/*")]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path.name


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


@pytest.fixture
def kept(tmp_path, forks):
    """The arguments, variables and files of a run whose script has these; arguments become attributes of its model."""

    def capture(words=(), variables=()):
        (tmp_path / "train.py").write_text(
            "import sys, torch\nnet = torch.nn.Linear(2, 1)\n"
            "for at, text in enumerate(sys.argv[1:]):\n    setattr(net, f'note{at}', [text])\n"
            "net(torch.ones(2)).sum().backward()\n"
        )
        done = forks("capture", "-q", "--force", "-o", "run", "train.py", *words, cwd=tmp_path, env=tuple(variables))
        assert done.returncode == 0, done.stderr
        documents = [documents_of(tmp_path / "run")[name] for name in ("command", "environment")]
        files = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
        return documents[0]["arguments"], documents[1], files

    return capture


def test_a_directory_is_no_password(kept):
    _, variables, _ = kept(variables=[("OLDPWD", "/tmp"), ("DB_PWD", "x")])
    assert (variables["OLDPWD"], variables["DB_PWD"]) == ("/tmp", REDACTED)


# --- one rule says what is secret: two hundred real-looking secrets, and names and texts that only look alike


RNG = random.Random(18)
LETTERS, HEX = string.ascii_letters + string.digits, "0123456789abcdef"


def made(count: int, alphabet: str = LETTERS) -> str:
    return "".join(RNG.choice(alphabet) for _ in range(count))


def credentials() -> list[str]:
    """Of each sort that has a look of its own; the names are those of who gives them out."""
    return [
        "AKIA" + made(16, string.ascii_uppercase), "ASIA" + made(16, string.ascii_uppercase + "234567"),
        *(f"gh{kind}_" + made(36) for kind in "pousr"), "github_pat_" + made(22) + "_" + made(59),
        "hf_" + made(34), "api_org_" + made(34), "sk-" + made(48), "sk-proj-" + made(40), "sk-ant-api03-" + made(80),
        "sk_live_" + made(24), "rk_live_" + made(24), "pk_test_" + made(24), "whsec_" + made(32),
        f"xoxb-{made(12, '0123456789')}-{made(24)}", f"xoxp-{made(12, '0123456789')}-{made(24)}", "xapp-1-A" + made(30),
        "glpat-" + made(20), "gldt-" + made(20), "glptt-" + made(40, HEX), "npm_" + made(36), "dckr_pat_" + made(27),
        "dop_v1_" + made(64, HEX), "sbp_" + made(40, HEX), "nvapi-" + made(64), "ntn_" + made(46),
        "lin_api_" + made(40),
        "shpat_" + made(32, HEX), "gsk_" + made(52), "r8_" + made(37), "pul-" + made(40, HEX), "figd_" + made(40),
        "pypi-AgEIcHlwaS5vcmc" + made(60), "xai-" + made(80), "dapi" + made(32, HEX), "dp.pt." + made(43),
        "hvs." + made(24), f"SG.{made(22)}.{made(43)}", "SK" + made(32, HEX), "key-" + made(32, HEX),
        "ya29." + made(68),
        "AIza" + made(35), "GOCSPX-" + made(28), "ATATT3xFfGF0" + made(60), "PMAK-" + made(24, HEX),
        "NRAK-" + made(27).upper(),
        "sq0atp-" + made(22), f"{made(9, '123456789')}:AA{made(33)}", "AGE-SECRET-KEY-1" + made(58).upper(),
        f"eyJhbGciOiJIUzI1NiJ9.eyJ{made(40)}.{made(43)}", made(40, HEX),
        f"-----BEGIN RSA PRIVATE KEY-----\n{made(64)}\n-----END RSA PRIVATE KEY-----",
    ]  # fmt: skip


SORTS = credentials()
SECRET_NAMES = (
    "password", "passwd", "PGPASSWORD", "db_password", "api_key", "api-key", "apikey", "OPENAI_API_KEY", "token",
    "hub_token",
    "access_token", "auth_token", "client_secret", "SECRET_KEY", "aws_secret_access_key", "private_key", "credentials",
    "sas_token", "webhook", "passphrase",
)  # fmt: skip
FORMS = (
    "{name}={secret}", "{name}: {secret}", "--{name}={secret}", "--{name} {secret}", "{{'{name}': '{secret}'}}",
    'refused: {name}="{secret}", try again',
)  # fmt: skip
PLACES = (
    "https://me:{secret}@host.org/x.git", "postgresql://user:{secret}@db:5432/x", "mongodb+srv://u:{secret}@c.net/?w=1",
    "https://{secret}@github.com/a/b", "redis://:{secret}@cache:6379/0", "Authorization: Bearer {secret}",
    "Authorization: Basic {secret}", "{{'authorization': 'token {secret}'}}", "curl -H 'Authorization: {secret}' x",
    "https://x.org/?token={secret}&a=1", "https://x.org/?a=1&api_key={secret}",
    "https://a.blob.net/c?sv=1&sig={secret}",
    "https://hooks.slack.com/services/T0/B0/{secret}", "https://discord.com/api/webhooks/1/{secret}",
    "X-Api-Key: {secret}",
    "Cookie: session={secret}; a=b", "the password is {secret}", "git remote set-url o https://x:{secret}@h/y",
    "pip install git+https://oauth2:{secret}@gitlab.com/a/b.git", "Bearer {secret}",
)  # fmt: skip


def two_hundred() -> list[tuple[str, str]]:
    """Texts with what of each is the secret."""
    found = [(f"the {secret}, and", secret) for secret in SORTS]
    for name in SECRET_NAMES:
        for form in FORMS:
            secret = made(RNG.randrange(9, 30))
            found.append((form.format(name=name, secret=secret), secret))
    for place in PLACES:
        secrets = ("hunter2" + made(12), made(24), made(32, HEX))
        found += [(place.format(secret=secret), secret) for secret in secrets]
    return found


TWO_HUNDRED = two_hundred()


def test_each_of_two_hundred_secrets_is_redacted_wherever_it_stands(kept):
    assert len({text for text, _ in TWO_HUNDRED}) >= 200
    texts = [text for text, _ in TWO_HUNDRED]
    words, variables, files = kept(texts, [(f"NOTE_{at}", text) for at, text in enumerate(texts)])
    assert [text for text, secret in TWO_HUNDRED if secret.encode() in files] == []
    for at, (text, _) in enumerate(TWO_HUNDRED):
        assert REDACTED in words[at], text
        assert REDACTED in variables[f"NOTE_{at}"], text


def test_a_value_is_secret_by_its_name(kept):
    given = {name: "Ada" + made(6) for name in SECRET_NAMES}
    told = [word for name, secret in given.items() for word in (f"--{name}", secret, f"--{name}={secret}")]
    *_, files = kept(told, given.items())
    assert [name for name, secret in given.items() if secret.encode() in files] == []


HARMLESS = (
    "max_tokens=512", "num_tokens: 30", "pad_token_id=50256", "token_type_ids", "tokenizers: 0.15.2", "tokenizer=gpt2",
    "author: Ada", "lr=3e-4", "https://github.com/a/b.git", "ssh://git@github.com/a/b", "key 3 is missing",
    "KeyError: 'token'",
    "sigmoid=1", "epoch 3: loss=0.5, accuracy: 0.9", "unexpected keyword argument 'key'", "use_auth_token=False",
    "GPT.token_embedding.weight", "/home/ada/train.py:12", "CUDA error: device-side assert triggered",
    "token is missing",
    "cpu:0", "Fix the tokenizer of blocks.0", "design: wide", "2026-11-22T05:49:02+00:00", "monitor=val_loss",
)  # fmt: skip


def test_what_only_looks_like_a_secret_stays(kept):
    names = ["max_tokens", "tokenizer", "token_type_ids", "pad_token", "author", "num_special_tokens", "lr"]
    words, variables, _ = kept(HARMLESS, dict.fromkeys(names, "512").items())
    assert words == list(HARMLESS)
    assert [variables[name] for name in names] == ["512"] * len(names)


def test_a_long_text_takes_no_longer_than_its_length(tmp_path, monkeypatch):
    """A million characters without a blank, as a module may have in an attribute, took hours."""
    texts = (
        "x",
        "token",
        "--token",
        "token=",
        "eyJ-",
        "://",
        "-",
        "a.",
        'secret="',
        "is ",
        "-----BEGIN A",
        "authorization: ",
    )
    for at, text in enumerate(texts):
        monkeypatch.setenv(f"NOTE_{at}", (text * 100_000)[:100_000])
    began = time.process_time()
    captured(tmp_path / "run", lambda: None, env=True)
    assert time.process_time() - began < 60  # a third of a second each; a minute if it looks through the rest each time


def test_the_word_may_stand_deep_in_a_name(kept):
    name = "x" * 150 + "_token_" + "y" * 150
    words, *_ = kept([f"{name}=abc123", "run my-api-key abc123 --x"])
    assert words == [f"{name}={REDACTED}", f"run my-api-key {REDACTED} --x"]
