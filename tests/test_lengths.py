"""The length predictor against least squares by NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_llm_async.collectors.lengths import LengthPredictor

groups = st.lists(
    st.tuples(st.integers(1, 5000), st.floats(1, 5000)),
    min_size=2,
    max_size=40,
    unique_by=lambda group: group[0],
)


@given(groups, st.integers(1, 5000))
def test_unseen_problems_lie_on_the_least_squares_line(seen, prompt_tokens):
    predictor = LengthPredictor()
    for x, y in seen:
        predictor.learn(f"problem {x}", x, y)
    slope, intercept = np.polyfit(*np.array(seen, dtype=np.float64).T, deg=1)
    wanted = slope * prompt_tokens + intercept
    assert predictor.expect("unseen", prompt_tokens) == pytest.approx(wanted, rel=1e-6, abs=1e-3)


def test_a_problem_seen_before_takes_what_it_took():
    predictor = LengthPredictor()
    assert predictor.expect("a", 5) == 0.0
    predictor.learn("a", 5, 70.0)
    assert predictor.expect("b", 99) == 70.0  # one point: no slope
    predictor.learn("a", 5, 30.0)
    assert predictor.expect("a", 5) == 30.0


def test_the_line_outlives_the_process():
    predictor, again = LengthPredictor(), LengthPredictor()
    for x, y in ((10, 20.0), (20, 40.0), (30, 70.0)):
        predictor.learn(f"problem {x}", x, y)
    again.restore(predictor.state())
    assert again.expect("new", 25) == predictor.expect("new", 25) > 0
    for one in (predictor, again):
        one.learn("problem 40", 40, 10.0)
    assert again.expect("new", 25) == predictor.expect("new", 25)
