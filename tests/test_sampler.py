"""A token drawn from logits is the one llm.c draws."""

import math

import numpy as np
import pytest

from llmc.sampler import sample_softmax


def walked(logits, coin):
    """The definition, one float32 addition at a time."""
    weights = np.exp(logits, dtype=np.float32)
    threshold = np.float32(float(coin) * sum(map(float, weights)))
    total = np.float32(0)
    for token, weight in enumerate(weights):
        total = np.float32(total + weight)
        if threshold < total:
            return token
    return len(logits) - 1


@pytest.mark.parametrize("V,shift", [(1, 0), (7, 0), (997, 0), (50257, 0), (997, -80), (997, 70)])
def test_draws_repeat_the_sequential_float32_walk(V, shift):
    r = np.random.default_rng(V)
    logits = (r.standard_normal(V) * 4 + shift).astype(np.float32)
    for coin in (0.0, 1 / 2**24, 0.3, 0.5, 0.999, 1 - 1 / 2**24):
        assert sample_softmax(logits, coin) == walked(logits, coin)


@pytest.mark.parametrize("shift", [0, 5])
def test_coins_beside_every_border_are_rounded_as_llm_c_rounds_them(shift):
    """A threshold in more bits, a sum in fewer or logits that are shifted first draw some of these tokens' neighbours."""
    logits = (np.random.default_rng(1).standard_normal(61) * 2 + shift).astype(np.float32)
    weights = np.exp(logits, dtype=np.float32)
    for border in np.cumsum(weights, dtype=np.float32)[:-1] / weights.sum(dtype=np.float64):
        for steps in range(-4, 5):
            coin = (round(border * 2**24) + steps) / 2**24
            assert sample_softmax(logits, coin) == walked(logits, coin)


def test_a_coin_on_the_border_belongs_to_the_next_token():
    """coin < cdf is strict: two equal tokens share at exactly one half."""
    logits = np.zeros(2, np.float32)
    assert [sample_softmax(logits, coin) for coin in (0.0, 0.5 - 1 / 2**24, 0.5, 1 - 1 / 2**24)] == [0, 0, 1, 1]


def test_a_token_without_probability_is_never_drawn():
    logits = np.array([-math.inf, 0, -math.inf, 0, -math.inf], np.float32)
    assert {sample_softmax(logits, coin) for coin in np.linspace(0, 1 - 1 / 2**24, 99)} == {1, 3}


@pytest.mark.parametrize("shift", (-1000, 1000))
def test_logits_beyond_float32_exp_keep_their_probabilities(shift, recwarn):
    """llm.c would say the last token; GPT-2's own logits lie far from 0."""
    logits = np.array([0, 1, 2, -50], np.float32)
    for coin in (0.0, 0.1, 0.2, 0.5, 0.99):
        assert sample_softmax(logits + np.float32(shift), coin) == sample_softmax(logits, coin)
    assert not recwarn


@pytest.mark.parametrize("diverged", [math.nan, math.inf])
def test_a_diverged_model_draws_the_last_token_without_a_warning(recwarn, diverged):
    assert sample_softmax(np.full(5, diverged, np.float32), 0.5) == 4
    assert not recwarn


@pytest.mark.parametrize("temperature", [0.25, 0.5, 2.0])
def test_a_temperature_divides_the_logits(temperature):
    """Frequencies are the probabilities to the power of its inverse; however large the logits are."""
    p = np.array([1, 2, 3, 4]) ** (1 / temperature)
    for shift in (0, 300, -300, -26):  # the last has exponentials of a few bits, once it is divided by 0.25
        logits = np.log(np.array([1, 2, 3, 4], np.float32)) + np.float32(shift)
        drawn = np.bincount([sample_softmax(logits, coin, temperature) for coin in np.arange(1000) / 1000], minlength=4)
        assert np.abs(drawn - 1000 * p / p.sum()).max() <= 2


def test_temperature_0_takes_the_likeliest_token_and_a_tiny_one_does_too():
    logits = np.random.default_rng(0).standard_normal(997).astype(np.float32)
    for coin in (0.0, 0.5, 1 - 1 / 2**24):
        assert sample_softmax(logits, coin, 0.0) == sample_softmax(logits, coin, 1e-30) == logits.argmax()


def test_frequencies_follow_the_softmax():
    logits = np.log(np.array([1, 2, 3, 4], np.float32))
    drawn = np.bincount([sample_softmax(logits, coin) for coin in np.arange(1000) / 1000], minlength=4)
    assert np.abs(drawn - [100, 200, 300, 400]).max() <= 1
