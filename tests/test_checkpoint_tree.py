"""State as JSON and safetensors: exact, and refused where it is something else."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from full_disk import full_disk
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_llm_async.checkpoint import load_tree, save_tree

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.tuples(
        st.sampled_from([torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16]),
        st.lists(st.integers(0, 3), max_size=3),
    ).map(lambda drawn: (torch.rand(drawn[1]) * 9).to(drawn[0])),
)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=20,
)


def assert_equal(left, right) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and left.shape == right.shape
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    else:
        assert left == right


@settings(max_examples=200, deadline=None, derandomize=True)
@given(tree=trees)
def test_what_is_read_is_what_was_written(tree, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("tree") / "state"
    save_tree(path, tree)
    assert_equal(load_tree(path), tree)


def test_arrays_become_tensors_and_tuples_lists(tmp_path: Path) -> None:
    arrays = [np.arange(6, dtype=np.int64).reshape(2, 3).T, np.array(3.5), np.array([], dtype=bool)]
    save_tree(tmp_path / "s", {"arrays": arrays, "pair": (1, 2), "odd": [math.inf, -math.inf]})
    tree = load_tree(tmp_path / "s")
    for array, tensor in zip(arrays, tree["arrays"], strict=True):
        assert tensor.shape == array.shape and tensor.tolist() == array.tolist()
    assert tree["pair"] == [1, 2] and tree["odd"] == [math.inf, -math.inf]


def test_what_is_read_is_not_the_file(tmp_path: Path) -> None:
    save_tree(tmp_path / "s", [torch.zeros(2), torch.zeros(2)])
    first, second = load_tree(tmp_path / "s")
    first.fill_(7)
    assert second.tolist() == [0, 0] and load_tree(tmp_path / "s")[0].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": [1, {"b": {2}}]}, r"state\.a\[1\]\.b is a set \(\{2\}\)"),
        ({"a": {3: 1}}, r"state\.a has the key 3"),
        ([{"__tensor__": 1}], r"state\[0\] has the key '__tensor__'"),
        ([np.float32(1)], r"state\[0\] is a float32"),
        ({"a": np.array(["text"])}, r"state\.a is an array of '<U4'"),
        ({"a": np.arange(2, dtype=">i4")}, r"state\.a is an array of '>i4'"),
    ],
)
def test_what_is_no_tree_is_refused_by_its_place(tree, message, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=message):
        save_tree(tmp_path / "state", tree)


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_torn_files_are_refused(suffix: str, tmp_path: Path) -> None:
    save_tree(tmp_path / "s", {"rows": [torch.arange(100)]})
    file = tmp_path / f"s{suffix}"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match="torn, or not of one state"):
        load_tree(tmp_path / "s")


def test_files_of_two_states_are_refused(tmp_path: Path) -> None:
    save_tree(tmp_path / "s", [torch.arange(100)])
    document = json.loads((tmp_path / "s.json").read_text())
    save_tree(tmp_path / "s", [torch.arange(3)])
    (tmp_path / "s.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match="not of one state"):
        load_tree(tmp_path / "s")
    with pytest.raises(FileNotFoundError):
        load_tree(tmp_path / "none")


@pytest.mark.parametrize(
    "entry",
    [
        ["int64", 0, -1],
        ["int64", 2, -1, -2],
        ["int64", -1, 1],
        ["int64", 3, 2],
        ["int64", 0, 10**30],
        ["int64", 0.0, 1],
        ["int64"],
        ["float32", 0, 1],
        5,
    ],
)
def test_tensors_that_are_not_there_are_refused(entry, tmp_path: Path) -> None:
    save_tree(tmp_path / "s", [torch.arange(4)])
    (tmp_path / "s.json").write_text(json.dumps([{"__tensor__": entry}]))
    with pytest.raises(ValueError, match="torn, or not of one state"):
        load_tree(tmp_path / "s")


def test_a_full_disk_is_an_os_error(tmp_path: Path) -> None:
    with full_disk(1_000), pytest.raises(OSError, match="can't be written"):
        save_tree(tmp_path / "s", [torch.zeros(10_000)])
