"""Lag figures against NumPy on the single values."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchrl_llm_async.data.lags import lag_figures

histograms = st.dictionaries(st.integers(0, 12), st.integers(1, 200), min_size=1)


@given(histograms)
def test_as_numpy_finds_them(histogram):
    values = np.repeat(list(histogram), list(histogram.values()))
    figures = lag_figures("x", histogram)
    assert figures["lag_x_max"] == values.max()
    np.testing.assert_allclose(figures["lag_x_mean"], values.mean())
    for percentile in (10, 50, 90):
        wanted = np.percentile(values, percentile, method="inverted_cdf")
        assert figures[f"lag_x_p{percentile}"] == wanted
