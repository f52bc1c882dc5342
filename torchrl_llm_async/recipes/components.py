"""Whether what a YAML gives a ``_component_`` is what that class or function takes.

Owns the look at signatures and types; knows nothing of what the values mean.
"""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable
from types import UnionType
from typing import Any, Literal

import torch
from omegaconf import DictConfig
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _get_component_from_path

from torchrl_llm_async.objectives import AsyncLLMLoss
from torchrl_llm_async.recipes.collection import COLLECTOR_KEYS

# What the recipe passes itself: positional arguments, then keywords.
_SUPPLIED: dict[str, tuple[int, tuple[str, ...]]] = {
    "loss": (1, ()),
    "optimizer": (1, ()),
    "lr_scheduler": (1, ("num_training_steps",)),
    "collector": (0, tuple(COLLECTOR_KEYS)),
}


class ConfigError(ValueError):
    """A configuration that can't run; the message is one line for a person."""


def check_component(key: str, node: DictConfig) -> None:
    """Raises ``ConfigError`` unless it can be imported and called with what ``node`` gives it."""
    path = node["_component_"]
    try:
        component = _get_component_from_path(path)
    except (InstantiationError, ValueError, ImportError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{key}._component_ is {path!r}, which can't be imported ({reason}); give the dotted "
            "path of a class or function"
        ) from None
    check_arguments(key, component, node)


def check_arguments(key: str, component: Callable, node: DictConfig) -> None:
    """Raises ``ConfigError`` unless it can be called with what ``node`` and the recipe give it."""
    signature = inspect.signature(component)
    names, hints, open_ended = _arguments(component)
    positional, keywords = _SUPPLIED.get(key, (0, ()))
    name = getattr(component, "__name__", str(component))
    for argument, value in node.items():
        if argument == "_component_":
            continue
        if argument in keywords:
            instead = COLLECTOR_KEYS.get(argument) if key == "collector" else None
            hint = f"use the top-level key {instead} instead" if instead else "remove it"
            raise ConfigError(
                f"{key}.{argument} is {value!r}, but the recipe passes {argument} itself; {hint}"
            )
        if argument not in names and not open_ended:
            close = difflib.get_close_matches(argument, names, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"it takes {', '.join(names)}"
            raise ConfigError(
                f"{key}.{argument} is {value!r}, but {name} has no such argument; {hint}"
            )
        expected = hints.get(argument, Any)
        if not _fits(value, expected):
            raise ConfigError(
                f"{key}.{argument} is {value!r}; {name} wants {_describe(expected)} there"
            )
    given = {str(argument): None for argument in node if argument != "_component_"}
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(keywords), **given)
    except TypeError as error:
        raise ConfigError(
            f"{key}: {name} can't be called with what the config and the recipe give it "
            f"({error}); correct the arguments under '{key}:'"
        ) from None


def _arguments(component: Callable) -> tuple[list[str], dict[str, Any], bool]:
    """Names and types of its arguments, and whether it takes any others.

    A loss that hands keywords on takes those of its base, too.
    """
    layers = [component]
    if inspect.isclass(component) and issubclass(component, AsyncLLMLoss):
        layers += [cls.__init__ for cls in component.__mro__ if "__init__" in vars(cls)][1:]
    names: list[str] = []
    hints: dict[str, Any] = {}
    for layer in layers:
        parameters = inspect.signature(layer).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        names += [n for n, p in parameters.items() if n != "self" and p.kind is not p.VAR_KEYWORD]
        try:
            typed = typing.get_type_hints(layer.__init__ if inspect.isclass(layer) else layer)
        except (NameError, AttributeError):  # Imported under TYPE_CHECKING: types unknown here.
            typed = {}
        hints = typed | hints
        if not open_ended:
            break
    return names, hints, open_ended


def _fits(value: Any, expected: Any) -> bool:
    """Whether a YAML value can be an argument of that type; True if the type does not tell."""
    origin = typing.get_origin(expected)
    if origin in (typing.Union, UnionType):
        return any(_fits(value, option) for option in typing.get_args(expected))
    if origin is Literal:
        return value in typing.get_args(expected)
    if expected is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if expected in (bool, str, type(None), torch.Tensor):
        return isinstance(value, expected)
    return True


def _describe(expected: Any) -> str:
    if typing.get_origin(expected) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(expected)))
    return getattr(expected, "__name__", str(expected))
