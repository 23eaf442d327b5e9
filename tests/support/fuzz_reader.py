"""A coverage-guided fuzzer on the reader: atheris steers the bytes of one file of a store towards code not yet reached.

What the fuzzer makes takes the place of one file; in half of the tries every check (CRC, chain, check line) is made
right again over it, so that the bytes reach the code behind the checks. Any answer and any `StoreError` of one sentence
will do; anything else is a finding, which atheris writes to a file. Findings become files in `tests/stores/fuzzed/`,
which the tests read again for ever.

With atheris installed (it keeps some memory of each run, of which the limit has to know):
python tests/support/fuzz_reader.py CORPUS -keep_seed=1 -len_control=0 -max_total_time=1800 -timeout=60 \\
    -rss_limit_mb=8192 -malloc_limit_mb=1024
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path


def put(files, data):
    """The files of a store with one replaced, as two control bytes say: which one, and whether to forge the checks."""
    from store_attacks import forged

    names = sorted(files)
    changed = {**files, names[data[0] % len(names)]: bytes(data[2:])}
    return forged(changed) if data[1] & 1 else changed


def seeds(files):
    """Inputs that leave each file as it is: where the fuzzer starts from."""
    return [bytes([place, forge]) + files[name] for place, name in enumerate(sorted(files)) for forge in (0, 1)]


def try_one(path, files, data):
    """What is wrong with the reader's answer to one input; None if nothing."""
    from store_attacks import _overwrite, forged_problem

    from introspect_cli.errors import StoreError
    from introspect_cli.store.read.verify import verify_run

    if len(data) < 2:
        return None
    changed = put(files, data)
    touched = [name for name in files if changed[name] != files[name]]
    try:
        for name in touched:
            _overwrite(path / name, changed[name])
        problem = forged_problem(path)
        try:
            verify_run(path)
        except StoreError as error:
            problem = problem or (None if "\n" not in str(error) else "the error is not one sentence")
    finally:
        for name in touched:
            _overwrite(path / name, files[name])
    return problem


def main():
    import atheris

    with atheris.instrument_imports(include=["introspect_cli.store"]):
        import introspect_cli.store.read.run
        import introspect_cli.store.read.verify  # noqa: F401 - imported to be instrumented
    from store_attacks import build

    scratch = tempfile.TemporaryDirectory()  # lives until libFuzzer ends the process
    path = Path(scratch.name) / "run"
    files = build(path)
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        corpus = Path(sys.argv[1])
        corpus.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(seeds(files)):
            (corpus / f"seed{number}").write_bytes(seed)

    def one(data):
        problem = try_one(path, files, data)
        if problem is not None:
            raise AssertionError(problem)

    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
