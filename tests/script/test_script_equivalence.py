"""A script without torch under python and under `introspect capture`: the same bytes come out, and the same code."""

from __future__ import annotations

import subprocess
import sys
import zipfile

import pytest
from interpreter import PYTHON
from outcomes import dedent, outcome

SCRIPTS = {
    "returns": "print('hello'); print('aside', file=__import__('sys').stderr)",
    "exits with a number": "import sys; sys.exit(3)",
    "exits with a huge number": "import sys; sys.exit(2**80)",
    "exits with a message": "import sys; print('before', end=''); sys.exit('a message')",
    "exits with an object without a text": """
        class Mute:
            def __str__(self): raise ValueError('no text')
        raise SystemExit(Mute())
        """,
    "goes as deep as it may": """
        import sys
        def deep(level):
            try:
                return deep(level + 1)
            except RecursionError:
                return level
        print(deep(0))
        import atexit
        atexit.register(lambda: print(deep(0) < 200))
        sys.setrecursionlimit(120)
        """,
    "exits by the builtin": "exit('bye')",
    "exits without cleaning up": "import os; print('lost', end=''); os._exit(5)",
    "raises": """
        def inner(value):
            return 1 / value
        print('before', end='')
        inner(0)
        """,
    "raises a group": """
        import sys
        def member():
            raise ValueError('member')
        if sys.version_info >= (3, 11):
            try:
                member()
            except ValueError as error:
                raise ExceptionGroup('several', [error, TypeError('bare')])
        """,
    "raises in an import": "import broken",
    "does not compile": "print('never')\ndef f(:\n    pass\n",
    "warns as it compiles": "import sys\nprint(len('a' 'b') is 2)\n",
    "is interrupted": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(5)",
    "raises an interrupt": "import atexit; atexit.register(print, 'at exit'); raise KeyboardInterrupt('by hand')",
    "handles an interrupt": """
        import os, signal, time
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        except KeyboardInterrupt:
            print('caught')
        """,
    "is terminated": "import os, signal; print('lost'); os.kill(os.getpid(), signal.SIGTERM)",
    "asks at the end of input": "input('name? '); input()",
    "reads its input": "import sys; print(sys.stdin.readline().upper(), input(), sys.stdin.read())",
    "has a hook for exceptions": """
        import sys
        def hook(kind, value, tb):
            print('hooked', kind.__name__, value, tb.tb_lineno, tb.tb_next)
            print(sys.last_value is value, sys.last_traceback is tb)
        sys.excepthook = hook
        raise ValueError('x')
        """,
    "has a hook that fails": """
        import sys
        def hook(kind, value, tb):
            raise TypeError('in the hook')
        sys.excepthook = hook
        raise ValueError('x')
        """,
    "warns": """
        import warnings
        def here():
            warnings.warn('in a function')
        def caller():
            warnings.warn('at the caller', stacklevel=2)
        here()
        caller()
        warnings.warn('old', DeprecationWarning)
        """,
    "registers handlers, one of which raises, and raises": """
        import atexit
        def late():
            raise ValueError('late')
        atexit.register(late)
        atexit.register(lambda: print('second', globals().get('__file__', 'no file'), '__cached__' in globals()))
        atexit.register(print, 'first')
        raise ValueError('x')
        """,
    "outlives its main thread": """
        import threading
        def work():
            threading.main_thread().join()
            print('thread', __file__ if '__file__' in globals() else 'no file')
        threading.Thread(target=work).start()
        print('main')
        """,
    "raises in a thread": """
        import threading
        def work():
            raise ValueError('in a thread')
        thread = threading.Thread(target=work, name='worker')
        thread.start()
        thread.join()
        """,
    "spawns": """
        import multiprocessing, sys
        print(__name__, sys.argv[1:])
        def work(queue, value):
            queue.put((value * 2, __name__, sys.argv[1:]))
        if __name__ == '__main__':
            context = multiprocessing.get_context('spawn')
            queue = context.Queue()
            child = context.Process(target=work, args=(queue, 21))
            child.start()
            print(queue.get())
            child.join()
            print(child.exitcode)
        """,
    "forks and both go on": """
        import os, sys
        sys.stdout.flush()
        child = os.fork()
        if child:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        else:
            print('child')
            sys.exit(9)
        """,
    "pickles its classes": """
        import atexit, pickle
        class Point:
            def __init__(self, x): self.x = x
        text = pickle.dumps(Point(3), protocol=0)
        print(text, pickle.loads(text).x)
        atexit.register(lambda: print(pickle.loads(text).x))
        """,
    "looks at itself": """
        import sys
        print({name: value for name, value in globals().items() if name[:5] not in ('__loa', '__bui', '__spe')})
        print(list(globals()), type(__loader__), __loader__.name, __loader__.path, __builtins__)
        print(sys.argv, sys.path[0], __file__, sys.orig_argv[1:], sys.flags)
        print(sys.modules['__main__'].__dict__ is globals())
        """,
    "shows its source": """
        import inspect, linecache
        def shown():
            return 'source'
        class Kept:
            attribute = 1
        print(inspect.getsource(shown), inspect.getsource(Kept))
        print(inspect.getsourcefile(shown), inspect.getmodule(shown))
        print(linecache.getline(__file__, 2))
        """,
    "has dataclasses": """
        from __future__ import annotations
        import typing
        from dataclasses import dataclass, fields
        later: int
        @dataclass
        class Options:
            rate: float = 0.1
            names: list[str] | None = None
        print(Options(), [field.type for field in fields(Options)], typing.get_type_hints(Options), Options.__module__)
        """,
    "is given a byte order mark": "\ufeffprint('marked')",
    "recurses for ever": "def down():\n    down()\ndown()\n",
    "logs": """
        import logging
        logging.warning('to the last resort')
        logging.basicConfig(format='%(levelname)s %(pathname)s %(lineno)d %(module)s %(message)s')
        try:
            1 / 0
        except ZeroDivisionError:
            logging.exception('logged')
        """,
    "replaces its streams": """
        import io, sys
        sys.stdout.write('kept')
        sys.stdout = io.StringIO()
        print('swallowed')
        sys.stderr = sys.__stdout__
        raise ValueError('to stdout')
        """,
    "closes its output": "import sys; print('last'); sys.stdout.close()",
    "loses its error stream": "import sys; sys.stderr = None; sys.exit('unseen')",
    "finalises": """
        import weakref
        class Last:
            def __del__(self): print('deleted')
        kept = Last()
        other = Last()
        weakref.finalize(other, print, 'finalised')
        del other
        """,
    "keeps a traceback": """
        class Last:
            def __del__(self): print('deleted')
        def fail():
            local = Last()
            raise ValueError('x')
        fail()
        """,
    "runs itself": """
        import subprocess, sys
        if len(sys.argv) > 1 and sys.argv[1] == 'child':
            print('child', __name__)
        else:
            print(subprocess.run([sys.executable, __file__, 'child'], capture_output=True, text=True).stdout)
        """,
    "has a pool at the end": """
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(2)
        pool.submit(print, 'pooled')
        """,
    "imports a neighbour": "import neighbour; print(neighbour.__file__, neighbour.value)",
    "runs code of its own": "exec(compile('def f():\\n  1/0\\n', 'generated.py', 'exec'))\nf()",
    "sets what libraries read as they load": """
        import sys
        print([name for name in ("torch", "numpy", "pyarrow", "pandas") if name in sys.modules])
        """,
    "reads its arguments": """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument('--rate', type=float, help='the rate')
        parser.parse_args()
        """,
}

# from 3.12 on the interpreter trips over an exception of its own making in these, and says so
UNLIKE_FROM_3_12 = ("exits with a huge number", "exits with an object without a text")

INPUT = b"first\nsecond\nrest\n"


def runners(tmp_path, flags=()):
    """Both ways to run a target, python first."""
    python = [sys.executable, *flags]
    return python, [*python, "-m", "introspect_cli", "capture", "-q", "--force", "-o", str(tmp_path / "run")]


def assert_same(tmp_path, words, flags=(), cwd=None, **settings):
    """Assert that a target does the same under both, and return what it does."""
    expected, captured = (outcome([*way, *words], cwd or tmp_path, **settings) for way in runners(tmp_path, flags))
    assert captured == expected
    return expected


@pytest.fixture
def neighbours(tmp_path):
    (tmp_path / "neighbour.py").write_text("value = 1\n")
    (tmp_path / "broken.py").write_text("def fail():\n    raise ImportError('broken')\nfail()\n")
    return tmp_path


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_as_under_python(neighbours, name):
    if sys.version_info >= (3, 12) and name in UNLIKE_FROM_3_12:
        pytest.skip("the interpreter does not clear its own error")
    (neighbours / "script.py").write_text(dedent(SCRIPTS[name]), encoding="utf-8")
    feed = b"" if name == "asks at the end of input" else INPUT
    words = ["--help"] if name == "reads its arguments" else ["--lr", "3e-4"]
    assert_same(neighbours, ["script.py", *words], feed=feed)


@pytest.mark.parametrize("name", ["does not compile", "raises", "exits with a message"])
def test_a_script_runs_as_under_python_where_introspect_is_started_by_a_file(neighbours, monkeypatch, name):
    """As pip installs the command: python uses the names of that file's `__main__` once more as it ends."""
    monkeypatch.setenv("PYTHONMALLOC", "malloc")
    monkeypatch.setenv("MALLOC_PERTURB_", "165")  # what is freed is overwritten at once, on Linux
    (neighbours / "script.py").write_text(dedent(SCRIPTS[name]))
    (neighbours / "introspect").write_text("import sys\nfrom introspect_cli.cli import main\n\nsys.exit(main())\n")
    capture = ["introspect", "capture", "-q", "--force", "-o", str(neighbours / "run")]
    expected, captured = (outcome([PYTHON, *way, "script.py"], neighbours) for way in ([], capture))
    assert captured == expected


@pytest.mark.parametrize(
    ("name", "as_module"), [("raises", False), ("exits with a message", False), ("recurses for ever", True)]
)
def test_streams_are_flushed_in_pythons_order(tmp_path, name, as_module):
    (tmp_path / "script.py").write_text(dedent(SCRIPTS[name]))
    assert_same(tmp_path, ["-m", "script"] if as_module else ["script.py"], merged=True)


@pytest.mark.parametrize("name", ["raises", "is interrupted", "looks at itself", "spawns", "pickles its classes"])
def test_modules_are_the_same(neighbours, name):
    (neighbours / "script.py").write_text(dedent(SCRIPTS[name]))
    assert_same(neighbours, ["-m", "script", "--lr", "3e-4"])


def test_modules_beside_the_script_are_its_own_whatever_introspect_has_imported(tmp_path):
    (tmp_path / "calendar.py").write_text("epochs = 3\n")
    (tmp_path / "yaml").mkdir()
    (tmp_path / "yaml" / "__init__.py").write_text("from yaml.nodes import mine\n")
    (tmp_path / "yaml" / "nodes.py").write_text("mine = 4\n")
    (tmp_path / "script.py").write_text("import calendar, csv, yaml\nprint(calendar.epochs, yaml.mine, csv.reader)\n")
    assert assert_same(tmp_path, ["script.py"])[1].startswith(b"3 4 <")


@pytest.mark.parametrize(
    "words", [["pkg.train", "x"], ["pkg"], ["pkg.nosuch"], ["pkg.bare"], ["pkg.sub.deep"], ["pkg.fails"], ["zipapp"]]
)
def test_packages_are_the_same(tmp_path, words):
    package = tmp_path / "pkg"
    for directory in (package, package / "sub", package / "bare"):
        directory.mkdir()
        (directory / "__init__.py").write_text(f"import sys\nprint({directory.name!r}, sys.argv)\n")
    look = (
        "import sys\nprint(__name__, __package__, __spec__.name, __file__, sys.argv, sys.path[0], sys.orig_argv[1:])\n"
    )
    (package / "helper.py").write_text("value = 5\n")
    (package / "train.py").write_text(f"from .helper import value\nfrom . import sub\n{look}print(value)\n")
    (package / "__main__.py").write_text(f"from . import helper\n{look}")
    (package / "fails.py").write_text("def fail():\n    raise ValueError('x')\nfail()\n")
    (package / "sub" / "deep.py").write_text(f"from ..helper import value\n{look}")
    assert_same(tmp_path, ["-m", *words])


@pytest.mark.parametrize("word", ["folder", "./folder", "folder/", "app.zip", "raising.zip"])
def test_directories_and_zip_files_are_the_same(tmp_path, word):
    look = "import sys, inner\nprint(__name__, __file__, sys.argv, sys.path[0], __spec__.name, inner.value)\n"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(look)
    (tmp_path / "folder" / "inner.py").write_text("value = 'inner'\n")
    for name, text in (("app.zip", look), ("raising.zip", "import inner\n1 / 0\n")):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("__main__.py", text)
            archive.writestr("inner.py", "value = 'zipped'\n")
    assert_same(tmp_path, [word, "x"])


@pytest.mark.parametrize("words", [["../script.py"], ["./link.py"], ["noext"], ["dos.py"], ["latin.py"]])
def test_paths_and_texts_are_the_same(tmp_path, words):
    below = tmp_path / "below"
    below.mkdir()
    look = "import sys\nprint(__file__, sys.argv, sys.path[0])\nundefined"
    (tmp_path / "script.py").write_text(look)
    (below / "link.py").symlink_to(tmp_path / "script.py")
    (below / "noext").write_text(look)
    (below / "dos.py").write_bytes(b"text = '''a\r\nb'''\r\nprint(repr(text))\r\nundefined\r\n")
    (below / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))\nundefined  # \xe9\n")
    assert_same(tmp_path, words, cwd=below)


def test_a_compiled_script_is_the_same(tmp_path):
    import py_compile

    (tmp_path / "script.py").write_text("print(__name__, __file__, type(__loader__))\n1 / 0\n")
    py_compile.compile(str(tmp_path / "script.py"), str(tmp_path / "other.pyc"))
    assert_same(tmp_path, ["other.pyc"])


FLAGS = [["-O"], ["-W", "error"], ["-X", "utf8=0", "-u"]]


@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_options_of_the_interpreter_hold(tmp_path, flags):
    (tmp_path / "script.py").write_text(
        "import sys, warnings\nassert len(sys.argv) == 2\n"
        "print(sys.flags, sys._xoptions, sys.warnoptions, sys.orig_argv[1:])\nwarnings.warn('w')\nprint(__debug__)\n"
    )
    assert_same(tmp_path, ["script.py", "x"], flags=flags)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="safe path came with 3.11")
@pytest.mark.parametrize("words", [["script.py"], ["-m", "script"], ["folder"]], ids=" ".join)
def test_safe_path_is_kept(tmp_path, words):
    text = "import sys\nprint(sys.path[:2] if '__file__' in dir() and 'folder' in __file__ else sys.path)\n"
    (tmp_path / "script.py").write_text(text)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(text)
    if words[0] == "-m":  # not found, which introspect says itself
        _, captured = runners(tmp_path, ["-P"])
        assert b"no module named 'script'" in outcome([*captured, *words], tmp_path)[2]
    else:
        assert_same(tmp_path, words, flags=["-P"])


def test_a_reader_that_goes_away_is_the_same(tmp_path):
    (tmp_path / "script.py").write_text("for number in range(100_000):\n    print(number)\n")

    def piped(command):
        with subprocess.Popen(
            [*command, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout.readline() == b"0\n"
            process.stdout.close()
            return process.stderr.read(), process.wait()

    expected, captured = map(piped, runners(tmp_path))
    assert b"BrokenPipeError" in expected[0]
    assert captured == expected
