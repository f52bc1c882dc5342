"""State as JSON and safetensors: plain values, and as many small tensors as it takes.

Owns the format of the two files that a tree becomes. It knows no class beside tensors and arrays:
whoever has a state turns it into dictionaries and lists first. Loading executes nothing, and
neither atomicity nor durability is its affair (:mod:`.store`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

Tree: TypeAlias = Any  # None, bool, int, float, str, array, tensor, list or dict[str, Tree]

_TENSOR = "__tensor__"


def save_tree(path: Path, tree: Tree) -> None:
    """Writes a tree as ``<path>.json`` and ``<path>.safetensors``.

    All tensors of a type are one flat tensor there, and the JSON file says where in it each of them
    begins: a header for every small tensor would cost more than its data.

    Args:
        path: without the suffixes.
        tree: None, bool, int, float, str, numpy array or tensor, or a list, tuple or dictionary
            with string keys of these. Floats may be infinite or NaN.

    Raises:
        TypeError: something else is in it; the message says where.
        OSError: the disk is full or gone.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "state"
        >>> save_tree(path, {"step": 3, "rows": [torch.arange(2), torch.arange(3)]})
        >>> load_tree(path)
        {'step': 3, 'rows': [tensor([0, 1]), tensor([0, 1, 2])]}
    """
    arenas: dict[torch.dtype, list[torch.Tensor]] = {}
    sizes: dict[torch.dtype, int] = {}

    def encode(node: Tree, place: str) -> Any:
        if isinstance(node, np.ndarray):
            node = _as_tensor(node, place)
        if isinstance(node, torch.Tensor):
            dtype = node.dtype
            begin = sizes.get(dtype, 0)
            arenas.setdefault(dtype, []).append(node.detach().reshape(-1))
            sizes[dtype] = begin + node.numel()
            return {_TENSOR: [_name(dtype), begin, *node.shape]}
        if node is None or type(node) in (bool, int, float, str):
            return node
        if isinstance(node, list | tuple):
            return [encode(value, f"{place}[{index}]") for index, value in enumerate(node)]
        if isinstance(node, dict):
            for key in node:
                if not isinstance(key, str) or key == _TENSOR:
                    raise TypeError(f"{place} has the key {key!r}; keys must be other strings")
            return {key: encode(value, f"{place}.{key}") for key, value in node.items()}
        raise TypeError(
            f"{place} is a {type(node).__qualname__} ({node!r:.80}); a state is made of None, "
            "bool, int, float, str, arrays, tensors, lists and dictionaries"
        )

    text = json.dumps(encode(tree, path.name))
    flat = {_name(dtype): torch.cat(parts) for dtype, parts in arenas.items()}
    write_tensors(path.with_name(path.name + ".safetensors"), flat)
    path.with_name(path.name + ".json").write_text(text, encoding="utf-8")


def write_tensors(
    file: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Writes a safetensors file; other threads go on meanwhile.

    Raises:
        OSError: the disk is full or gone. safetensors 0.8 has an error of its own for it.
    """
    try:
        save_file(dict(tensors), file, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"{file} can't be written ({error}); has the disk room?") from error


def load_tree(path: Path) -> Tree:
    """Reads what :func:`save_tree` wrote; every array is a tensor of its own then.

    Raises:
        FileNotFoundError: there is no such tree.
        ValueError: the files are torn, or do not belong together.
    """
    try:
        flat = load_file(path.with_name(path.name + ".safetensors"))

        def decode(node: dict[str, Any]) -> Tree:
            if _TENSOR not in node:
                return node
            name, begin, *shape = node[_TENSOR]
            end = begin + math.prod(shape)
            if not 0 <= begin <= end <= len(flat[name]) or min(shape, default=0) < 0:
                raise ValueError(f"{name}[{begin}:{end}] of {len(flat[name])} is asked for")
            return flat[name][begin:end].reshape(shape).clone()

        text = path.with_name(path.name + ".json").read_text(encoding="utf-8")
        return json.loads(text, object_hook=decode)
    except FileNotFoundError:
        raise
    except (SafetensorError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"{path}.json and .safetensors can't be read ({type(error).__name__}: {error}); they "
            "are torn, or not of one state"
        ) from error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _as_tensor(array: np.ndarray, place: str) -> torch.Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{place} is an array of {array.dtype.str!r}, which torch has not; give numbers or "
            "bools in the machine's byte order"
        ) from error
