"""Fitted values and fitted biases: against numpy's least squares, and where the answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from agentcompact.fitting import fit
from agentcompact.fitting.fit import fit_bias, fit_values

LOWER, UPPER = -3.0, 3.0
SCALING = 0.5


def softmax(scores):
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def weights_of(queries, keys, bias):
    """Softmax weights (heads, m, n) in float64."""
    q, k, b = (t.double().numpy() for t in (queries, keys, bias))
    return np.stack([softmax(SCALING * q[h] @ k[h].T + b[h]) for h in range(len(q))])


def errors(queries, keys, values, bias, output):
    """Sum of squares of what is missing to the output, by head and value dimension."""
    read = weights_of(queries, keys, bias) @ values.double().numpy()
    return ((read - output.double().numpy()) ** 2).sum(axis=1)


def problem(heads=3, m=200, n=60, t=12, d=8, dv=4, spread=1.0, seed=0):
    """Return (queries, selected keys, selected values, bias, output of all n keys)."""
    g = torch.Generator().manual_seed(seed)
    queries, keys = torch.randn(heads, m, d, generator=g), spread * torch.randn(heads, n, d, generator=g)
    values = torch.randn(heads, n, dv, generator=g)
    read = weights_of(queries, keys, torch.zeros(heads, n)) @ values.double().numpy()
    output = torch.from_numpy(read).float()
    bias = 0.5 * torch.randn(heads, t, generator=g)
    return queries, keys[:, :t].contiguous(), values[:, :t].contiguous(), bias, output


@pytest.mark.parametrize("block", [1 << 20, 1])
def test_values_equal_numpy_least_squares_with_a_tiny_ridge(monkeypatch, block):
    queries, keys, values, bias, output = problem(m=600)
    monkeypatch.setattr(fit, "BLOCK_ELEMENTS", block)
    found = fit_values(queries, keys, values, bias, SCALING, output, ridge=1e-12)
    a = weights_of(queries, keys, bias)
    for h in range(3):
        expected = np.linalg.lstsq(a[h], output[h].double().numpy(), rcond=None)[0]
        assert np.abs(expected - values[h].numpy()).max() > 0.1
        np.testing.assert_allclose(found[h].numpy(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("ridge", [1e-4, 1e-2, 1.0])
def test_values_equal_the_ridge_regression_of_the_correction(ridge):
    """min |A (V + X) - Y|^2 + r |X|^2, r relative to the largest row sum, solved as stacked least squares."""
    queries, keys, values, bias, output = problem()
    found = fit_values(queries, keys, values, bias, SCALING, output, ridge=ridge)
    a = weights_of(queries, keys, bias)
    for h in range(3):
        t = a.shape[2]
        r = ridge * (a[h].T @ a[h]).sum(axis=1).max()
        v, y = values[h].double().numpy(), output[h].double().numpy()
        rows = np.vstack([a[h], math.sqrt(r) * np.eye(t)])
        expected = v + np.linalg.lstsq(rows, np.vstack([y - a[h] @ v, np.zeros_like(v)]), rcond=None)[0]
        np.testing.assert_allclose(found[h].numpy(), expected, rtol=1e-3, atol=1e-4)


def test_a_large_ridge_keeps_the_original_values():
    queries, keys, values, bias, output = problem()
    torch.testing.assert_close(fit_values(queries, keys, values, bias, SCALING, output, ridge=1e9), values)


def test_values_that_already_give_the_output_stay():
    queries, keys, values, bias, _ = problem()
    output = torch.from_numpy(weights_of(queries, keys, bias) @ values.double().numpy()).float()
    found = fit_values(queries, keys, values, bias, SCALING, output)
    torch.testing.assert_close(found, values, rtol=0, atol=2e-2)
    assert errors(queries, keys, found, bias, output).max() < 1e-8


@pytest.mark.parametrize("ridge", [1e-6, 1e-9, 1e-2])
@pytest.mark.parametrize(("m", "t"), [(200, 12), (30, 30), (8, 25), (1, 5), (40, 1)])
@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
def test_never_worse_than_the_original_values(m, t, spread, ridge):
    for seed in range(3):
        queries, keys, values, bias, output = problem(m=m, t=t, spread=spread, seed=seed)
        fitted = fit_values(queries, keys, values, bias, SCALING, output, ridge=ridge)
        before, after = (errors(queries, keys, v, bias, output) for v in (values, fitted))
        assert np.isfinite(after).all()
        assert (after <= before * (1 + 1e-4) + 1e-9).all()
        assert after.sum() < before.sum()


@pytest.mark.parametrize("gap", [0.0, 1e-7, 1e-4])
def test_duplicated_keys_give_small_values_and_are_never_worse(gap):
    g = torch.Generator().manual_seed(9)
    queries, keys, values, bias, output = problem(m=100, t=10)
    twins = keys + gap * torch.randn(keys.shape, generator=g)
    keys, values = torch.cat([keys, twins], 1), torch.cat([values, -values], 1)
    bias = torch.cat([bias, bias], 1)
    fitted = fit_values(queries, keys, values, bias, SCALING, output)
    assert torch.isfinite(fitted).all()
    assert float(fitted.abs().max()) < 1e3
    before, after = (errors(queries, keys, v, bias, output) for v in (values, fitted))
    assert (after <= before * (1 + 1e-4)).all()


def test_all_keys_equal():
    queries, keys, values, bias, output = problem(t=8)
    keys = keys[:, :1].expand_as(keys).contiguous()
    fitted = fit_values(queries, keys, values, bias, SCALING, output)
    assert float(fitted.abs().max()) < 1e3
    # One key can only read one vector: the mean output is the best there is.
    read = weights_of(queries, keys, bias) @ fitted.double().numpy()
    np.testing.assert_allclose(read, output.mean(1, keepdim=True).expand_as(output).numpy(), atol=1e-3)


def bias_problem(heads=2, m=300, n=16, d=8, seed=1, spread=0.8):
    g = torch.Generator().manual_seed(seed)
    queries, keys = torch.randn(heads, m, d, generator=g), spread * torch.randn(heads, n, d, generator=g)
    return queries, keys, 0.7 * torch.randn(heads, n, generator=g)


def mass_statistics(queries, keys, bias):
    """Log-normalizer and row maximum (heads, m) over all keys, in float64, as float32 tensors."""
    q, k, b = (t.double().numpy() for t in (queries, keys, bias))
    scores = np.stack([SCALING * q[h] @ k[h].T + b[h] for h in range(len(q))])
    top = scores.max(axis=2)
    log_normalizer = top + np.log(np.exp(scores - top[..., None]).sum(axis=2))
    return torch.from_numpy(log_normalizer).float(), torch.from_numpy(top).float()


def masses(queries, keys, bias):
    return np.exp(mass_statistics(queries, keys, bias)[0].double().numpy())


MODES = [("published", 0.02), ("converged", 2e-3)]


@pytest.mark.parametrize(("mode", "close"), MODES)
def test_all_keys_selected_leaves_the_bias(mode, close):
    queries, keys, bias = bias_problem()
    normalizer, top = mass_statistics(queries, keys, bias)
    found = fit_bias(queries, keys, bias, SCALING, normalizer, top, LOWER, UPPER, mode)
    torch.testing.assert_close(found, bias, rtol=0, atol=close)
    np.testing.assert_allclose(masses(queries, keys, found), masses(queries, keys, bias), rtol=close)


@pytest.mark.parametrize(("mode", "close"), MODES)
@pytest.mark.parametrize("copies", [2, 5])
def test_one_of_several_copies_gets_the_weight_of_all(mode, close, copies):
    queries, keys, bias = bias_problem()
    everything, all_bias = keys.repeat(1, copies, 1), bias.repeat(1, copies)
    normalizer, top = mass_statistics(queries, everything, all_bias)
    found = fit_bias(queries, keys, bias, SCALING, normalizer, top, LOWER, UPPER, mode)
    torch.testing.assert_close(found, bias + math.log(copies), rtol=0, atol=close)
    full = masses(queries, everything, all_bias)
    np.testing.assert_allclose(masses(queries, keys, found), full, rtol=close)


@pytest.mark.parametrize(("mode", "close"), MODES)
def test_copies_of_different_weights(mode, close):
    """Each key has a twin whose bias differs from key to key: the exact answer is log(e^b + e^b')."""
    queries, keys, bias = bias_problem()
    twin = bias + torch.linspace(-1.5, 1.5, bias.shape[1])
    normalizer, top = mass_statistics(queries, torch.cat([keys, keys], 1), torch.cat([bias, twin], 1))
    found = fit_bias(queries, keys, bias, SCALING, normalizer, top, LOWER, UPPER, mode)
    torch.testing.assert_close(found, torch.logaddexp(bias, twin), rtol=0, atol=2 * close)


@pytest.mark.parametrize("mode", ["published", "converged"])
def test_the_addition_is_bounded_not_the_bias(mode):
    queries, keys, bias = bias_problem()
    bias = bias + 20
    everything, all_bias = keys.repeat(1, 50, 1), bias.repeat(1, 50)
    normalizer, top = mass_statistics(queries, everything, all_bias)
    found = fit_bias(queries, keys, bias, SCALING, normalizer, top, LOWER, UPPER, mode)
    torch.testing.assert_close(found, bias + UPPER, rtol=0, atol=1e-4)  # log 50 is 3.9
    higher = fit_bias(queries, keys, bias, SCALING, normalizer, top, LOWER, 5.0, mode)
    torch.testing.assert_close(higher, bias + math.log(50), rtol=0, atol=0.02)


@pytest.mark.parametrize("mode", ["published", "converged"])
def test_duplicated_selected_keys_stay_finite_and_carry_the_mass(mode):
    queries, keys, bias = bias_problem()
    twice, both = keys.repeat(1, 2, 1), bias.repeat(1, 2)
    normalizer, top = mass_statistics(queries, keys.repeat(1, 3, 1), bias.repeat(1, 3))
    found = fit_bias(queries, twice, both, SCALING, normalizer, top, LOWER, UPPER, mode)
    assert torch.isfinite(found).all()
    full = masses(queries, keys.repeat(1, 3, 1), bias.repeat(1, 3))
    np.testing.assert_allclose(masses(queries, twice, found), full, rtol=0.02)


@pytest.mark.parametrize("block", [1 << 20, 1])
def test_bias_does_not_depend_on_the_blocks(monkeypatch, block):
    queries, keys, bias = bias_problem(m=700)
    normalizer, top = mass_statistics(queries, keys, bias)
    selected, some = keys[:, :6].contiguous(), bias[:, :6].contiguous()
    whole = fit_bias(queries, selected, some, SCALING, normalizer, top, LOWER, UPPER, "converged")
    monkeypatch.setattr(fit, "BLOCK_ELEMENTS", block)
    parts = fit_bias(queries, selected, some, SCALING, normalizer, top, LOWER, UPPER, "converged")
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-3)
    assert float((whole - some).abs().max()) > 0.1


def test_keys_far_below_every_maximum_stay_finite():
    """Columns that underflow to 0 give a singular system, and still a finite bias within the bounds."""
    queries, keys, bias = bias_problem()
    normalizer, top = mass_statistics(queries, keys, bias)
    for mode in ("published", "converged"):
        low = bias.clone()
        low[:, :3] -= 500
        found = fit_bias(queries, keys, low, SCALING, normalizer, top, LOWER, UPPER, mode)
        assert torch.isfinite(found).all()
        assert float((found - low).min()) >= LOWER - 1e-4
        assert float((found - low).max()) <= UPPER + 1e-4


def test_the_number_of_threads_survives_two_callers_at_once():
    import threading
    import time

    from agentcompact.fitting.normal_equations import one_thread

    before = torch.get_num_threads()
    entered = threading.Event()

    def first():
        with one_thread():
            entered.set()
            time.sleep(0.05)

    def second():
        entered.wait()
        with one_thread():
            time.sleep(0.1)

    try:
        torch.set_num_threads(2)
        threads = [threading.Thread(target=each) for each in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
