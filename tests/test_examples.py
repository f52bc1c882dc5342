"""The examples in all docstrings of the package run, and give what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import torchrl_llm_async

MODULES = [
    module.name
    for module in pkgutil.walk_packages(torchrl_llm_async.__path__, "torchrl_llm_async.")
    # It changes the process that imports it: it is vLLM's worker.
    if module.name != "torchrl_llm_async.engines.vllm_worker"
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])  # some read assets/
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_examples_are_found():
    finder = doctest.DocTestFinder()
    modules = map(importlib.import_module, MODULES)
    with_examples = [
        module for module in modules if any(test.examples for test in finder.find(module))
    ]
    assert len(with_examples) >= 35
