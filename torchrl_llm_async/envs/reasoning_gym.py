"""Problems of reasoning-gym as one-turn TorchRL environments.

Owns which problem comes next, how it is put to the model, how the answer is read, and the split
into training and held-out problems. The problems and the verdict on an answer are reasoning-gym's.
Knows nothing of tokens: prompts and responses are text, and the collector does the rest.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import re
from typing import Any, Literal

import reasoning_gym
import torch
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer as extract_tagged_answer
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase

_SPLITS = ("train", "heldout")
_MAX_SKIPPED = 100_000


@functools.lru_cache(maxsize=1024)
def _entry(dataset: Any, index: int) -> dict[str, Any]:
    """Problem `index`; cached, since every trajectory of a group asks for the same one."""
    return dataset[index]


def _is_heldout(question: str, fraction: float) -> bool:
    """Whether a question is held out: a hash of its words, whatever their order."""
    words = " ".join(sorted(question.split()))
    digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


class ReasoningGymEnv(EnvBase):
    """A reasoning-gym data set as an environment of one question and one answer.

    ``reset()`` gives the next problem of the split: ``("text", "prompt")`` (str) and ``"problem"``
    (int64, shape ``()``, its index in the data set). ``step()`` reads ``("text", "response")``
    (str) and ``"problem"``, and gives ``("next", "reward")`` (float32, shape ``(1,)``: the data
    set's own score between 0 and 1, or 0 if no answer can be read) with ``done`` and
    ``terminated`` True. The problem travels in the tensordict, so any number of copies of one
    ``reset()`` can be stepped, in any order, also by another instance of the same environment.

    The split is decided by a hash of the question's words regardless of their order: no held-out
    problem is seen in training, not even with its operands permuted, whatever the seeds.

    Subclasses may override :meth:`format_prompt`, :meth:`extract_answer` and :meth:`keeps`.

    Args:
        dataset: name of a reasoning-gym data set, e.g. ``"chain_sum"``.
        dataset_kwargs: its configuration. ``size`` (10,000 unless given) is the number of problems
            to draw from; after the last one the first comes again.
        split: ``"train"`` or ``"heldout"``.
        heldout_fraction: share of the problems that is held out, between 0 and 1.
        seed: seed of the data set, an int. Problem i of one seed is problem i - 1 of the next in
            most data sets, so seeds of environments that shall differ should lie far apart.
        start: index of the first problem to consider.

    Raises:
        ValueError: the data set does not exist, its configuration is wrong, or the split has
            another name.

    Examples:
        >>> env = ReasoningGymEnv("basic_arithmetic", seed=1)
        >>> problem = env.reset()
        >>> problem["text", "prompt"]
        'Calculate ( 56 + -33 ) - 84.'
        >>> env.step(problem.set(("text", "response"), "-61"))["next", "reward"]
        tensor([1.])
    """

    def __init__(
        self,
        dataset: str,
        *,
        dataset_kwargs: dict[str, Any] | None = None,
        split: Literal["train", "heldout"] = "train",
        heldout_fraction: float = 0.2,
        seed: int = 0,
        start: int = 0,
    ) -> None:
        super().__init__(batch_size=torch.Size(()))
        if dataset not in DATASETS:
            close = difflib.get_close_matches(dataset, DATASETS, n=3, cutoff=0.5)
            hint = f"did you mean {', '.join(map(repr, close))}?" if close else "see reasoning-gym."
            raise ValueError(f"dataset={dataset!r} is none of reasoning-gym's data sets; {hint}")
        if split not in _SPLITS:
            raise ValueError(f"split={split!r}: must be one of {_SPLITS}.")
        if not 0 < heldout_fraction < 1:
            raise ValueError(f"heldout_fraction={heldout_fraction!r}: must lie between 0 and 1.")
        self.dataset_name = dataset
        self.split = split
        self.heldout_fraction = heldout_fraction
        self._kwargs = {"size": 10_000, **(dataset_kwargs or {})}
        self._start = start
        self._set_seed(seed)
        self.observation_spec = Composite(
            {
                ("text", "prompt"): NonTensor(shape=(), example_data="text"),
                "problem": Unbounded(shape=(), dtype=torch.int64),
            }
        )
        self.full_action_spec = Composite(
            {("text", "response"): NonTensor(shape=(), example_data="text")}
        )
        self.reward_spec = Unbounded(shape=(1,))

    def format_prompt(self, entry: dict[str, Any]) -> str:
        """The text put to the model for a reasoning-gym entry (by default its question)."""
        return entry["question"]

    def extract_answer(self, response: str) -> str | None:
        """The answer in a response, or None if it has none.

        By default what the last ``<answer>...</answer>`` encloses, or else the whole response.
        """
        return extract_tagged_answer(response) or response.strip() or None

    def keeps(self, entry: dict[str, Any]) -> bool:
        """Whether a problem belongs to the task (by default all do)."""
        return True

    def next_problem(self) -> tuple[int, dict[str, Any]]:
        """Moves on to the next problem of the split; its index and its reasoning-gym entry.

        Raises:
            RuntimeError: none of the next 100,000 problems (or of the whole data set) is kept.
        """
        size = len(self._dataset)
        for _ in range(min(size, _MAX_SKIPPED)):
            index = self._position % size
            self._position = index + 1
            entry = _entry(self._dataset, index)
            if not self.keeps(entry):
                continue
            heldout = _is_heldout(entry["question"], self.heldout_fraction)
            if heldout == (self.split == "heldout"):
                return index, entry
        raise RuntimeError(
            f"{self.dataset_name!r} has no problem in its {self.split!r} split among "
            f"{min(size, _MAX_SKIPPED)}: raise dataset_kwargs['size'] or change heldout_fraction."
        )

    def score(self, problem: int, response: str) -> float:
        """The data set's score, 0 to 1, of a response to problem `problem`.

        Raises:
            RuntimeError: the data set's verifier failed on the answer. This is no reward of 0:
                :meth:`extract_answer` should return None where the verifier cannot read an answer.
        """
        answer = self.extract_answer(response)
        if answer is None:
            return 0.0
        try:
            return float(self._dataset.score_answer(answer, _entry(self._dataset, problem)))
        except Exception as error:
            raise RuntimeError(
                f"the verifier of {self.dataset_name!r} failed on answer {answer!r} to problem "
                f"{problem}; override extract_answer to return None for such answers."
            ) from error

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        index, entry = self.next_problem()
        out = TensorDict({"problem": torch.tensor(index)})
        return out.set(("text", "prompt"), self.format_prompt(entry))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        problem = tensordict["problem"]
        reward = self.score(int(problem), tensordict["text", "response"])
        out = TensorDict(
            {
                "problem": problem,
                "reward": torch.tensor([reward]),
                "done": torch.ones(1, dtype=torch.bool),
                "terminated": torch.ones(1, dtype=torch.bool),
            }
        )
        return out.set(("text", "prompt"), tensordict["text", "prompt"])

    def _set_seed(self, seed: int | None) -> None:
        """Draws the problems of `seed` from the start; None keeps the present seed."""
        if seed is not None:
            self._seed = seed
        try:
            self._dataset = reasoning_gym.create_dataset(
                self.dataset_name, **self._kwargs, seed=self._seed
            )
        except (TypeError, AssertionError) as error:
            raise ValueError(
                f"dataset_kwargs={self._kwargs} do not fit data set {self.dataset_name!r}: {error}"
            ) from error
        self._position = self._start

    def get_extra_state(self) -> dict[str, int]:
        """The entry of ``state_dict()`` that says which problem comes next."""
        return {"seed": self._seed, "position": self._position}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Continues where the environment of ``state_dict()`` stood."""
        if state["seed"] != self._seed:
            self._set_seed(state["seed"])
        self._position = state["position"]


class WrittenSumsEnv(ReasoningGymEnv):
    """Sums of 2 to 5 numbers, of one or two digits each, the steps written out.

    The prompt is ``"12+34+56="``; the expected answer restates what is left to add after each
    addition, ``"46+56=102"``, so answers have 1 to 33 characters. The problems are those of
    reasoning-gym's ``chain_sum`` that hold no minus, each number of terms equally often. Only the
    last number counts for the reward.

    Args:
        split: ``"train"`` or ``"heldout"``.
        max_terms: most numbers in a sum, at least 2.
        seed: as in :class:`ReasoningGymEnv`.
        start: as in :class:`ReasoningGymEnv`.

    Examples:
        >>> env = WrittenSumsEnv(seed=3)
        >>> problem = env.reset()
        >>> problem["text", "prompt"]
        '5+9+7='
        >>> env.step(problem.set(("text", "response"), "14+7=21"))["next", "reward"]
        tensor([1.])
        >>> env.extract_answer("46+56=102"), env.extract_answer("46+=")
        ('102', None)
    """

    _well_formed = re.compile(r"(?:\d+(?:\+\d+)+=)*(\d+)")

    def __init__(
        self,
        split: Literal["train", "heldout"] = "train",
        *,
        max_terms: int = 5,
        seed: int = 0,
        start: int = 0,
    ) -> None:
        super().__init__(
            "chain_sum",
            dataset_kwargs={
                "min_terms": 2,
                "max_terms": max_terms,
                "min_digits": 1,
                "max_digits": 2,
                "size": 2**31,
            },
            split=split,
            seed=seed,
            start=start,
        )
        self._max_terms = max_terms

    def keeps(self, entry: dict[str, Any]) -> bool:
        """Keeps sums without a minus, as many of each length.

        A chain of n numbers is free of minus signs once in 2**(n - 1), so of the shorter ones only
        those at every 2**(max_terms - n)-th index are taken.
        """
        metadata = entry["metadata"]
        stride = 2 ** (self._max_terms - metadata["num_terms"])
        return metadata["source_index"] % stride == 0 and "-" not in metadata["expression"]

    def format_prompt(self, entry: dict[str, Any]) -> str:
        """The bare sum, e.g. ``"12+34+56="``."""
        return entry["metadata"]["expression"].replace(" ", "") + "="

    def extract_answer(self, response: str) -> str | None:
        """The number after the last ``=`` of a well-formed answer, or None."""
        match = self._well_formed.fullmatch(response)
        return match[1] if match else None

    def score(self, problem: int, response: str) -> float:
        """1 for the right sum, else 0.

        chain_sum gives partial credit to any number that has the right one somewhere in it, which
        would teach to write more digits.
        """
        return float(super().score(problem, response) == 1)
