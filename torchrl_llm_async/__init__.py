"""Asynchronous reinforcement learning of language models, as TorchRL components.

Importing this package imports nothing heavy: the core (:mod:`.staleness`, :mod:`.data`,
:mod:`.objectives`) needs torch, tensordict and torchrl only; :mod:`.engines` needs vLLM once an
engine starts, :mod:`.modules` and :mod:`.recipes` need torchtune.
"""

__version__ = "0.1.0"
