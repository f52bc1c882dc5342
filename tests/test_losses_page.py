"""docs/losses.md says what is so: every option with its default, and examples that run."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from torchtune.config._utils import _get_component_from_path

from torchrl_llm_async import objectives

PAGE = (Path(__file__).parents[1] / "docs" / "losses.md").read_text()
DESCRIBED = [
    "GroupAdvantage",
    "DecoupledPPOLoss",
    "CriticPPOLoss",
    "OnlineDPOLoss",
    "ProximalRLOOLoss",
    "BestOfNLoss",
    "TrajectoryBalanceLoss",
]


def options(name: str) -> dict[str, object]:
    """The options of a class, but for its networks and the keys it reads, with their defaults."""
    parameters = inspect.signature(getattr(objectives, name)).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        and not parameter.name.endswith(("_key", "_network"))
    }


@pytest.mark.parametrize("name", DESCRIBED)
def test_the_table_of_a_loss_has_every_option_with_its_default(name):
    (section,) = re.findall(rf"^## (?:.*: )?`{name}`\n(.*?)(?=^## )", PAGE, re.M | re.S)
    rows = re.findall(r"^\| `(\w+)` \| (?:`(.+?)`|required)", section, re.M)
    described = {
        option: ast.literal_eval(default) if default else inspect.Parameter.empty
        for option, default in rows
    }
    assert described == options(name)


def test_every_loss_is_described():
    losses = {name for name in objectives.__all__ if name.endswith("Loss")} - {"AsyncLLMLoss"}
    assert losses | {"GroupAdvantage"} == set(DESCRIBED)
    (table,) = re.findall(r"^## Which one\n(.*?)^What is", PAGE, re.M | re.S)
    kept_together = {
        cells[1].strip(" `"): cells[4].strip()
        for line in table.splitlines()
        if len(cells := line.split("|")) == 7 and "Loss`" in line
    }
    assert kept_together == {name: getattr(objectives, name).packing_unit for name in losses}


def test_the_example_and_the_configs():
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    module: dict = {}
    exec(example, module)
    assert module["figures"]["ratio_by_lag/1"] > 0 and module["normalizer"] == 14
    configs = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    assert len(configs) == 3
    for config in configs:
        for key, component in OmegaConf.create(config).items():
            arguments = dict(component)
            make = _get_component_from_path(arguments.pop("_component_"))
            make(*([module["actor"]] if key == "loss" else []), **arguments)
