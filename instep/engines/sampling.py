"""How a token is drawn from logits: the part of generation that every engine shares. numpy only.

Each row is drawn by inverse cumulative distribution from one uniform number, and the uniforms of a row are a
Philox stream keyed by (seed, prompt key, sample index), position by position. A result therefore depends neither
on which rows share a batch nor on the engine, beyond the rounding of its logits.
"""

from __future__ import annotations

import numpy as np

from instep.engines.base import Sampling

BLOCK = 256  # the cumulative sum is taken over blocks of the vocabulary, then inside one block


def uniforms(seed: int, key: int, sample: int, count: int) -> np.ndarray:
    """float64 [count] in [0, 1): one for each position of the completion `sample` of the prompt `key`.

    Fewer positions give the same first numbers. (Philox: Salmon et al., SC 2011.)
    """
    bits = np.random.Philox(
        key=np.array([seed, key], np.uint64), counter=np.array([0, 0, 0, sample], np.uint64)
    )
    return np.random.Generator(bits).random(count)


def _restrict(probability: np.ndarray, sampling: Sampling) -> None:
    """Set to zero, in place, what top_k, then top_p, then min_p leave out. probability float32 [B, V], sum 1.

    top_k keeps the k most likely tokens; top_p the smallest set of most likely ones whose probability reaches
    top_p (of what top_k left); min_p those at least min_p times as likely as the most likely one. Ties with the
    last token kept are kept.
    """
    vocabulary = probability.shape[1]
    if 0 < sampling.top_k < vocabulary:
        floor = np.partition(probability, vocabulary - sampling.top_k, axis=1)[:, vocabulary - sampling.top_k]
        probability[probability < floor[:, None]] = 0.0
    if sampling.top_p < 1.0:
        for row in probability:
            kept = np.flatnonzero(row)
            ordered = np.sort(row[kept])[::-1]
            total = np.cumsum(ordered, dtype=np.float64)
            last = int(np.searchsorted(total, sampling.top_p * total[-1]))
            row[row < ordered[min(last, len(ordered) - 1)]] = 0.0
    if sampling.min_p > 0.0:
        probability[probability < sampling.min_p * probability.max(1, keepdims=True)] = 0.0


def draw(logits: np.ndarray, uniform: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token a row. logits float32 [B, V], uniform float64 [B] → ids int32 [B], log-probability float32 [B].

    The log-probability is of the distribution that was drawn from: at the temperature, renormalised over the
    tokens that top_k, top_p and min_p kept. At temperature 0 the most likely token is taken (the first of
    equals), and its log-probability is that at temperature 1.
    """
    rows = np.arange(len(logits))
    greedy = sampling.temperature == 0.0
    scaled = logits - logits.max(1, keepdims=True)
    if not greedy and sampling.temperature != 1.0:
        scaled /= np.float32(sampling.temperature)
    probability = np.exp(scaled)
    if greedy:
        ids = logits.argmax(1)
        return ids.astype(np.int32), (
            scaled[rows, ids] - np.log(probability.sum(1, dtype=np.float64))
        ).astype(np.float32)
    if sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0:
        probability /= probability.sum(1, keepdims=True)
        _restrict(probability, sampling)
    padded = (
        np.pad(probability, ((0, 0), (0, -logits.shape[1] % BLOCK)))
        if logits.shape[1] % BLOCK
        else probability
    )
    blocks = padded.reshape(len(logits), -1, BLOCK)
    reached = np.cumsum(blocks.sum(2), axis=1, dtype=np.float64)  # float32 is exact enough inside a block
    total = reached[:, -1]
    target = uniform * total
    block = np.minimum((reached <= target[:, None]).sum(1), reached.shape[1] - 1)
    before = np.where(block > 0, reached[rows, block - 1], 0.0)
    inside = np.cumsum(blocks[rows, block], axis=1, dtype=np.float64)
    place = (inside <= (target - before)[:, None]).sum(1)
    ids = block * BLOCK + np.minimum(place, BLOCK - 1)
    # Rounding at a block's very end may point at a token of probability 0: take the most likely one then.
    empty = padded[rows, ids] == 0.0
    ids[empty] = padded[empty].argmax(1)
    logprob = np.log(padded[rows, ids].astype(np.float64) / total)
    return ids.astype(np.int32), logprob.astype(np.float32)
