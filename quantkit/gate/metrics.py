"""How far a candidate's next-token distribution lies from the baseline's: per token, then summed up.

KL(base‖cand) = Σ_v p(v) (log p(v) - log q(v)), in nats, computed in float32 over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]

LADDER = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
"""Quantiles of KL and Δp that are kept for plots."""


@dataclass(frozen=True)
class Scores:
    """Per scored token, arrays `[S]`; `cluster` is the index of its conversation.

    kl: nats. same: the two most likely tokens agree. nll_base, nll_cand: of the true next token, nats.
    dp: probability of the true next token, candidate minus baseline.
    """

    cluster: NDArray[np.int32]
    kl: Floats
    same: NDArray[np.bool_]
    nll_base: Floats
    nll_cand: Floats

    @staticmethod
    def empty(cluster: NDArray[np.int32]) -> Scores:
        """Room for the scores of `len(cluster)` tokens, NaN until set."""
        kl, base, candidate = (np.full(len(cluster), np.nan) for _ in range(3))
        return Scores(cluster, kl, np.zeros(len(cluster), bool), base, candidate)

    @property
    def dp(self) -> Floats:
        """Change of the true next token's probability."""
        return np.exp(-self.nll_cand) - np.exp(-self.nll_base)

    def where(self, chosen: NDArray[np.bool_]) -> Scores:
        """The scores of some tokens; `chosen` is a mask `[S]`."""
        return Scores(
            self.cluster[chosen], self.kl[chosen], self.same[chosen], self.nll_base[chosen], self.nll_cand[chosen]
        )


@dataclass(frozen=True)
class Summary:
    """Scores summed up. Standard errors are over conversations (cluster-robust); KL in nats."""

    tokens: int
    conversations: int
    mean_kl: float
    mean_kl_se: float
    median_kl: float
    p99_kl: float
    p999_kl: float
    max_kl: float
    same_top1: float
    same_top1_se: float
    ppl_base: float
    ppl_cand: float
    ppl_ratio: float
    ppl_ratio_se: float
    rms_dp: float
    kl_quantiles: tuple[float, ...]
    dp_quantiles: tuple[float, ...]

    def as_dict(self) -> dict[str, float | int | tuple[float, ...]]:
        """Plain data."""
        return asdict(self)


def score_rows(base: Tensor, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KL, agreement of the most likely token, and the candidate's NLL of each row.

    base: float32 log-probabilities `[R, V]` of the baseline; overwritten by their log ratios to the candidate's.
    logits: float32 `[R, V]` of the candidate. targets: int64 `[R]`.
    Returns kl float32 `[R]` (rounding below zero cut), same bool `[R]`, nll float32 `[R]`.
    """
    candidate = torch.log_softmax(logits, dim=-1)
    same = base.argmax(-1) == candidate.argmax(-1)
    nll = -candidate.gather(1, targets.unsqueeze(1)).squeeze(1)
    probability = base.exp()
    kl = probability.mul_(base.sub_(candidate)).sum(-1).clamp_min_(0.0)
    return kl, same, nll


def summarize(scores: Scores) -> Summary:
    """Means, quantiles and standard errors over all tokens of `scores`."""
    mean_kl, mean_kl_se = clustered_mean(scores.kl, scores.cluster)
    same, same_se = clustered_mean(scores.same.astype(float), scores.cluster)
    gap, gap_se = clustered_mean(scores.nll_cand - scores.nll_base, scores.cluster)
    ratio = float(np.exp(gap))
    quantiles = quantile(scores.kl, LADDER)
    return Summary(
        tokens=len(scores.kl),
        conversations=len(np.unique(scores.cluster)),
        mean_kl=mean_kl,
        mean_kl_se=mean_kl_se,
        median_kl=float(np.median(scores.kl)),
        p99_kl=float(quantile(scores.kl, 0.99)),
        p999_kl=float(quantile(scores.kl, 0.999)),
        max_kl=float(scores.kl.max()),
        same_top1=same,
        same_top1_se=same_se,
        ppl_base=float(np.exp(scores.nll_base.mean())),
        ppl_cand=float(np.exp(scores.nll_cand.mean())),
        ppl_ratio=ratio,
        ppl_ratio_se=ratio * gap_se,
        rms_dp=float(np.sqrt(np.mean(scores.dp**2))),
        kl_quantiles=tuple(map(float, quantiles)),
        dp_quantiles=tuple(map(float, np.quantile(scores.dp, LADDER))),
    )


def quantile(values: Floats, q: float | Sequence[float]) -> Floats:
    """The least of `values` `[S]` that a share q of them does not exceed, as the rules take it: a value that occurs."""
    return np.asarray(np.quantile(values, q, method="inverted_cdf"))


def clustered_mean(values: Floats, cluster: NDArray[np.int32]) -> tuple[float, float]:
    """Mean of `values` `[S]` and its standard error when tokens of one conversation depend on each other.

    The linearised variance of a ratio of cluster totals (Cochran, Sampling Techniques, 2.46):
    G/(G-1) · Σ_g (total_g - n_g · mean)² / N². 0 with a single cluster, where nothing can be said.
    """
    _, index = np.unique(cluster, return_inverse=True)
    totals = np.bincount(index, weights=values)
    sizes = np.bincount(index)
    mean = float(values.mean())
    groups = len(sizes)
    if groups < 2:
        return mean, 0.0
    spread = float(np.sum((totals - sizes * mean) ** 2))
    return mean, float(np.sqrt(spread * groups / (groups - 1)) / len(values))
