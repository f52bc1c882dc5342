"""Which problem is begun next, and where among the problems a resumed run goes on.

Owns the environment that poses them and the order in which they are taken. When one is begun is
:mod:`.rollouts`' affair, how long its answers will be :mod:`.lengths`'.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from tensordict import TensorDictBase
from torch import nn
from torchrl._utils import logger as torchrl_logger
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_llm_async.checkpoint.tree import Tree
from torchrl_llm_async.collectors.conversation import Conversation
from torchrl_llm_async.collectors.env_pool import EnvPool, OutOfTimeError, StuckThreadsError
from torchrl_llm_async.collectors.state import pack_problem, unpack_problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Problems:
    """The problems of one environment, as its resets pose them.

    An environment with a state of its own, by PyTorch's ``get_extra_state`` and
    ``set_extra_state``, is put back where it was when a run resumes; of a transformed one that is
    the base environment's, its transforms begin afresh. Any other is reset as often as it had been,
    and must then pose the problem it had posed last.

    Args:
        env_pool: makes the environment, seeded.
        tokenizer: the policy's tokenizer.
        window: problems that are drawn at once and taken longest first; 1 for their own order.
        expected_length: of a problem's answers.
        on_failure: told of a problem that could not be drawn; another is drawn, unless it raises.
        state: what :meth:`state` gave, to go on from there.
    """

    def __init__(
        self,
        env_pool: EnvPool,
        tokenizer: PreTrainedTokenizerBase,
        *,
        window: int,
        expected_length: Callable[[Conversation], float],
        on_failure: Callable[[Exception], None],
        state: Tree = None,
    ):
        self._env_pool = env_pool
        self._tokenizer = tokenizer
        self._window = window
        self._expected_length = expected_length
        self._on_failure = on_failure
        self._env: EnvBase | None = None
        self._ready: list[Conversation] = []  # the next one last
        self._drawn: list[Conversation] = []  # of the next window
        self._resets = 0
        self._last = ""  # digest of what the last reset posed
        self._env_state: Tree = None
        self._resumed = state

    async def open(self) -> None:
        """Makes the environment, and goes on where the run resumed stood.

        Raises:
            RuntimeError: the environment does not pose the same problems again.
            ValueError: the tokenizer is another one.
        """
        env = await self._env_pool.make()
        state = self._resumed
        if state is not None:
            if state["env"] is not None:
                _base(env).set_extra_state(state["env"])
            else:
                await self._reset_as_often_as_before(env, state)
            self._ready = [unpack_problem(problem, self._tokenizer) for problem in state["ready"]]
            self._drawn = [unpack_problem(problem, self._tokenizer) for problem in state["drawn"]]
            self._resets, self._last = state["resets"], state["last"]
        self._env, self._env_state = env, env_state(env)

    async def _reset_as_often_as_before(self, env: EnvBase, state: Tree) -> None:
        posed = ""
        for _ in range(state["resets"]):
            try:
                posed = _digest(await self._env_pool.reset(env))
            except (OutOfTimeError, StuckThreadsError):
                raise
            except Exception as error:  # As it failed then.
                torchrl_logger.debug(f"a problem could not be drawn once more: {error!r}")
        if posed != state["last"]:
            raise RuntimeError(
                f"after {state['resets']} resets the environment poses another problem than it did "
                "in the run that is resumed, though it has the same seed; make its problems depend "
                "on set_seed() alone, or give it (if it is transformed, its base environment) "
                "get_extra_state() and set_extra_state()"
            )

    async def next(self) -> Conversation:
        """The next problem in their order or, by windows, the longest first."""
        if self._ready:
            return self._ready.pop()
        while len(self._drawn) < self._window:
            self._drawn.append(await self._draw())
        self._ready = sorted(self._drawn, key=self._expected_length)
        self._drawn = []
        return self._ready.pop()

    def put_back(self, problem: Conversation) -> None:
        """It could not be begun, and is the next one again."""
        self._ready.append(problem)

    async def _draw(self) -> Conversation:
        while True:
            try:
                observation = await self._env_pool.reset(self._env)
            except (OutOfTimeError, StuckThreadsError):
                raise  # The environment that knows the position among the problems hangs.
            except Exception as error:  # An environment may raise anything.
                failure = error
            else:
                self._last = _digest(observation)
                failure = None
            self._resets += 1
            self._env_state = env_state(self._env)
            if failure is None:
                try:
                    return Conversation(self._tokenizer, observation)
                except Exception as error:  # So may a chat template.
                    failure = error
            torchrl_logger.warning(f"a problem could not be drawn: {failure!r}")
            self._on_failure(failure)

    def state(self) -> Tree:
        """The position, and the problems drawn and not begun."""
        if self._env is None:
            return self._resumed
        return {
            "ready": [pack_problem(problem) for problem in self._ready],
            "drawn": [pack_problem(problem) for problem in self._drawn],
            "resets": self._resets,
            "last": self._last,
            "env": self._env_state,
        }

    def close(self) -> None:
        """Gives the environment back to its pool."""
        if self._env is not None:
            self._env_pool.give_back(self._env)


def env_state(env: EnvBase) -> Tree:
    """The environment's own state, or None if it has none."""
    base = _base(env)
    has_one = type(base).get_extra_state is not nn.Module.get_extra_state
    # A copy: the next reset, in its thread, may change what it is made of.
    return copy.deepcopy(base.get_extra_state()) if has_one else None


def _base(env: EnvBase) -> EnvBase:
    # torchrl 0.14's TransformedEnv passes on its transforms' state_dict() only.
    return env.base_env if isinstance(env, TransformedEnv) else env


def _digest(observation: TensorDictBase) -> str:
    """Of what is asked, in whichever form."""
    prompts = [observation.get((mode, "prompt"), None) for mode in ("history", "tokens", "text")]
    texts = [str(p.tolist() if hasattr(p, "tolist") else p) for p in prompts if p is not None]
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()
