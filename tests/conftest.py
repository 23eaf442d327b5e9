"""What every test gets: a way to run the command, and the assertion that introspect leaves nothing in the process."""

from __future__ import annotations

import builtins
import gc
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from interpreter import PYTHON

import introspect_cli

# Where python is told to keep nothing it compiles, each process compiles all of torch that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# What a shell starts in the background ignores them, and so would each process that a test interrupts.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else lambda *_: None)
# The models here are tiny; on a busy machine, torch's threads wait for each other instead of computing.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where inductor compiles: no trial of vector extensions, which takes longer than the rest. Its header is compiled once
# for all tests; each of their kernels takes a fraction of the time then. That asks openssl for a checksum.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "01"[shutil.which("openssl") is not None])
# As those set it who want the same order twice: one python, already started, then serves them and all others.
os.environ.setdefault("PYTHONHASHSEED", "0")
# pytest's workers are given a terminal's width; what is printed to a pipe is not wrapped, with and without workers.
os.environ.pop("COLUMNS", None)

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")  # a busy machine is no fault of what is tested

pytest_plugins = ["projects", "repositories"]  # fixtures that several files use

PACKAGE = str(Path(introspect_cli.__file__).parent)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if "fresh_compiler" in item.fixturenames:
            item.add_marker("compile")
    items.sort(key=lambda item: "longest" not in item.keywords)


def pytest_collection_finish():
    """What was imported stays: nobody need look through it for garbage, nor a capture for optimizers."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def introspect(tmp_path, request):
    """Run `introspect ARGS...` in `tmp_path` unless `cwd` says otherwise.

    In a fork of a process that has imported all of it, where nothing else is asked: that takes longer than a small run
    does. `new_process` asks for one that is started for it.
    """

    def run(*args, cwd=tmp_path, text=True, new_process=False, **settings):
        changed = dict(settings.get("env", os.environ).items() - os.environ.items())
        plain = not settings.keys() - {"env"} and settings.get("env", os.environ).keys() >= os.environ.keys()
        if args and text and plain and not new_process and not any(map(_of_python, changed)):
            return request.getfixturevalue("forks")(*map(str, args), cwd=cwd, env=tuple(changed.items()))
        command = [PYTHON if new_process else sys.executable, "-m", "introspect_cli", *map(str, args)]
        return subprocess.run(command, cwd=cwd, text=text, capture_output=True, check=False, **settings)

    return run


def _of_python(name):
    """Whether python itself reads the variable, when it starts."""
    return name.startswith("PYTHON") and name != "PYTHONPATH"


@pytest.fixture(scope="session")
def forks():
    """Run `introspect ARGS...` in a fork of a process that has imported torch, where starting is not what is tested."""
    from forks import Forks

    run = Forks()
    yield run
    run.close()


@pytest.fixture(scope="module")
def quick_python(forks):
    """Python, for what starts processes itself, is a program that has them forked where it can."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(forks.stand_in()))
        yield


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no headless browser here")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1280,1400",
        f"--user-data-dir={tmp_path_factory.mktemp('browser')}",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.binary_location = binary
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()


@pytest.fixture
def web_server(tmp_path):
    """The address of a web server that has the test's directory."""
    pytest.importorskip("aiohttp")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    threads = _introspects_threads()
    process, torch_state = _process_state(), _torch_state()
    yield
    assert _process_state() == process
    if torch_state is not None:
        assert _torch_state() == torch_state
    assert [name for name, value in _hooked().items() if _is_ours(value)] == []
    assert [finder for finder in sys.meta_path if _is_ours(finder)] == []
    deadline = time.monotonic() + 60
    while _introspects_threads().keys() - threads.keys():
        assert time.monotonic() < deadline, f"threads left running: {_introspects_threads()}"
        time.sleep(0.01)


def _introspects_threads():
    """Threads that run code of the package, bare ones that `threading` does not know of included."""
    return {
        thread: frame.f_code.co_name
        for thread, top in sys._current_frames().items()
        if thread != threading.get_ident()
        for frame, _ in traceback.walk_stack(top)
        if frame.f_code.co_filename.startswith(PACKAGE)
    }


def _process_state():
    return {
        "open": (builtins.open, io.open, type(os.open)),
        "excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "unraisablehook": sys.unraisablehook,
        "main": sys.modules["__main__"],
        "argv": sys.argv,
        "recursion limit": sys.getrecursionlimit(),
        "profile": sys.getprofile(),
    }


def _torch_state():
    """What a capture must not change for good, None where torch is not imported."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "optim"):
        return None
    return {
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": torch.get_default_dtype(),
        **{name: value for name, value in _hooked().items() if "hooks" not in name},
    }


def _hooked():
    """All that a capture may replace or hook into, by name."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "optim"):
        return {}
    import torch.utils.data
    from torch import nn
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    functions = {
        "Module.__call__": vars(nn.Module)["__call__"],
        "Module._call_impl": vars(nn.Module)["_call_impl"],
        "Tensor.backward": vars(torch.Tensor)["backward"],
        "autograd.backward": torch.autograd.backward,
        "autograd.grad": torch.autograd.grad,
        "DataLoader.__iter__": vars(dataloader.DataLoader)["__iter__"],
        "iterator.__next__": vars(dataloader._BaseDataLoaderIter)["__next__"],
        "GradScaler.step": vars(torch.amp.GradScaler)["step"],
        "torch.save": torch.save,
        "Optimizer.__init__": vars(optimizer.Optimizer)["__init__"],
    }
    registries = {
        f"{module.__name__}.{name}": registry
        for module in (nn.modules.module, optimizer)
        for name, registry in vars(module).items()
        if name.startswith("_global") and "hooks" in name and isinstance(registry, dict)
    }
    hooks = {f"{name}[{key}]": hook for name, registry in registries.items() for key, hook in registry.items()}
    return functions | hooks


def _is_ours(value):
    """Whether a function, method, or instance was defined in the package."""
    function = getattr(value, "__func__", value)
    code = getattr(function, "__code__", None)
    if code is not None:
        return code.co_filename.startswith(PACKAGE)
    return type(value).__module__.startswith("introspect_cli")


@pytest.fixture
def fresh_compiler():
    """Nothing compiled by earlier tests, and nothing left to later ones."""
    import torch

    limit = sys.getrecursionlimit()
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    sys.setrecursionlimit(limit)  # inductor raises it
