"""Environments over reasoning-gym: specs, splits, scores, state."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.envs.utils import check_env_specs

from torchrl_llm_async.envs import ReasoningGymEnv, WrittenSumsEnv
from torchrl_llm_async.envs.reasoning_gym import _is_heldout


def answer(env: ReasoningGymEnv, problem: TensorDict, response: str) -> TensorDict:
    return env.step(problem.clone().set(("text", "response"), response))["next"]


@pytest.mark.parametrize(
    "name", ["basic_arithmetic", "word_sorting", "leg_counting", "family_relationships", "gcd"]
)
def test_any_data_set_by_name(name):
    env = ReasoningGymEnv(name, seed=11)
    for _ in range(3):
        problem = env.reset()
        entry = env._dataset[int(problem["problem"])]
        assert problem["text", "prompt"] == entry["question"]
        right = answer(env, problem, entry["answer"])
        assert right["reward"].tolist() == [1.0]
        assert right["done"].all() and right["terminated"].all()
        assert answer(env, problem, f"It is <answer>{entry['answer']}</answer>.")["reward"] == 1.0
        assert answer(env, problem, "no idea")["reward"] < 1.0
        assert answer(env, problem, "  ")["reward"] == 0.0


@pytest.mark.parametrize("env", [ReasoningGymEnv("gcd"), WrittenSumsEnv("heldout")])
def test_specs(env):
    check_env_specs(env)


def test_unknown_data_set_names_close_ones():
    with pytest.raises(ValueError, match=r"'chain_sums'.*'chain_sum'"):
        ReasoningGymEnv("chain_sums")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"split": "test"}, "split='test'.*'heldout'"),
        ({"heldout_fraction": 1.0}, "heldout_fraction=1.0"),
        ({"dataset_kwargs": {"terms": 3}}, "'terms': 3.*'chain_sum'"),
        ({"dataset_kwargs": {"min_terms": 9}}, "'min_terms': 9.*'chain_sum'"),
    ],
)
def test_wrong_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        ReasoningGymEnv("chain_sum", **kwargs)


def test_empty_split_is_an_error():
    with pytest.raises(RuntimeError, match="no problem in its 'heldout' split among 3"):
        ReasoningGymEnv(
            "chain_sum", dataset_kwargs={"size": 3}, split="heldout", heldout_fraction=1e-6
        ).reset()


@pytest.mark.inv7
def test_failing_verifier_is_no_reward():
    env = ReasoningGymEnv("prime_factorization")
    with pytest.raises(RuntimeError, match="verifier of 'prime_factorization' failed"):
        answer(env, env.reset(), "two times three")


def test_finite_data_set_starts_over():
    env = ReasoningGymEnv("gcd", dataset_kwargs={"size": 20}, heldout_fraction=0.1)
    seen = [int(env.reset()["problem"]) for _ in range(40)]
    distinct = len(set(seen))
    assert distinct <= 20 and seen[distinct] == seen[0]


def test_state_dict_round_trip():
    env = WrittenSumsEnv(seed=5)
    for _ in range(7):
        env.reset()
    state = env.state_dict()
    expected = [env.reset()["text", "prompt"] for _ in range(5)]
    other = WrittenSumsEnv(seed=0)
    other.load_state_dict(state)
    assert [other.reset()["text", "prompt"] for _ in range(5)] == expected
    assert expected != [WrittenSumsEnv(seed=0).reset()["text", "prompt"] for _ in range(5)]


def test_set_seed_and_start():
    env = WrittenSumsEnv(seed=5)
    first = env.reset()
    env.set_seed(6)
    assert env.reset()["text", "prompt"] != first["text", "prompt"]
    env.set_seed(5)
    assert env.reset()["text", "prompt"] == first["text", "prompt"]
    later = WrittenSumsEnv(seed=5, start=int(first["problem"]) + 1)
    assert later.reset()["problem"] > first["problem"]


def test_pickled_environment_goes_on():
    env = WrittenSumsEnv(seed=5)
    env.reset()
    copy = pickle.loads(pickle.dumps(env))
    assert copy.reset()["text", "prompt"] == env.reset()["text", "prompt"]


def test_copies_of_a_reset_are_stepped_independently():
    env = WrittenSumsEnv()
    problem = env.reset()
    env.reset()
    right = str(eval(problem["text", "prompt"].rstrip("=")))
    rewards = [
        answer(e, problem, response)["reward"].item()
        for e in (env, WrittenSumsEnv())
        for response in (right, "0+", right)
    ]
    assert rewards == [1.0, 0.0, 1.0] * 2


@given(st.lists(st.integers(0, 99), min_size=2, max_size=5), st.randoms())
@settings(max_examples=200, deadline=None)
def test_split_ignores_the_order_of_operands(terms, rng):
    question = "State the final answer to the following arithmetic problem: {} ="
    permuted = rng.sample(terms, len(terms))
    first, second = (question.format(" + ".join(map(str, x))) for x in (terms, permuted))
    assert _is_heldout(first, 0.2) == _is_heldout(second, 0.2)


def test_training_and_heldout_problems_are_disjoint_across_seeds():
    def operands(split, seed, n):
        env = WrittenSumsEnv(split, seed=seed)
        prompts = [env.format_prompt(env.next_problem()[1]) for _ in range(n)]
        return {tuple(sorted(prompt[:-1].split("+"))) for prompt in prompts}

    train = operands("train", 0, 2000) | operands("train", 10**9, 2000)
    heldout = operands("heldout", 0, 400) | operands("heldout", 77, 400)
    assert not train & heldout
    # Sums of two one-digit numbers are few, so a leak would show there at once.
    assert any(len(x) == 2 and all(len(n) == 1 for n in x) for x in heldout)


def test_written_sums_lengths_and_operators():
    env = WrittenSumsEnv()
    sizes = {n: 0 for n in range(2, 6)}
    for _ in range(2000):
        prompt = env.format_prompt(env.next_problem()[1])
        terms = prompt.rstrip("=").split("+")
        assert all(0 <= int(term) <= 99 for term in terms)
        sizes[len(terms)] += 1
    assert all(420 < count < 580 for count in sizes.values()), sizes


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("102", "102"),
        ("46+56=102", "102"),
        ("46+56+7=102+7=109", "109"),
        ("", None),
        ("46+56=", None),
        ("46+=102", None),
        ("46=46", None),
        ("102\n", None),
        ("102=", None),
        ("-3", None),
    ],
)
def test_written_answer(response, expected):
    assert WrittenSumsEnv().extract_answer(response) == expected


def test_reset_and_step_are_cheap():
    from torch.utils.benchmark import Timer

    env = WrittenSumsEnv()
    problem = env.reset().set(("text", "response"), "12")
    step = Timer("env.step(problem)", globals={"env": env, "problem": problem}).timeit(200)
    assert step.median < 2e-3
    assert torch.equal(problem["problem"], env.step(problem)["next", "problem"])
