"""What the fuzzer found interesting, read again: an answer or one sentence, as on the day it was found."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz_reader import seeds, try_one
from store_attacks import answer, build

FOUND = sorted((Path(__file__).parents[1] / "stores" / "fuzzed").iterdir())


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzzed") / "run"
    return path, build(path)


def test_what_the_fuzzer_starts_from_changes_nothing(store):
    path, files = store
    before = answer(path)
    for seed in seeds(files):
        assert try_one(path, files, seed) is None
    assert answer(path) == before


@pytest.mark.parametrize("found", FOUND, ids=lambda file: file.name)
def test_what_the_fuzzer_found_once_ends_in_a_sentence(store, found):
    path, files = store
    assert try_one(path, files, found.read_bytes()) is None
