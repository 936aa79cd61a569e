"""OSCAR: rotations from the covariance of what the quantisation error meets (Sec. 2.2, App. G).

A key's error meets the queries, a value's error the attention weights. Per KV head, in FP64, summed over the loops of
the group and all calibration queries (those of all query heads that share the KV head)::

    C_K = Q^T Q / Nq        C_V = (S Z_V)^T (S Z_V) / Nq        C = B Lambda B^T        T = B H P

S is the causal softmax of the original Q and K; Z_V is what V's quantiser is given: V itself for direct coding and for
the anchor, else the residual from the reference as it is rebuilt without rotation. H spreads every direction over all
channels, and P deals channels out so that the groups of the quantiser are alike.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from residualquant.config import KVQuantConfig
from residualquant.rotation.hadamard import hadamard_matrix
from residualquant.rotation.recoding import quantisation_targets
from residualquant.rotation.states import States, attend


def reversal(head_dim: int) -> Tensor:
    """The place of each channel under P (App. G): [D] int64.

    Bit reversal for powers of two; for 96, which is 12 x 8, the digits change places: 8a + b goes to 12b + a.

    Raises:
        ValueError: a head size that is neither.
    """
    if head_dim == 96:
        return torch.arange(96).view(8, 12).T.flatten()
    bits = head_dim.bit_length() - 1
    if head_dim != 2**bits:
        raise ValueError(f"bit reversal needs a head_dim of 96 or a power of two, got {head_dim!r}")
    return torch.tensor([int(f"{i:0{bits}b}"[::-1] or "0", 2) for i in range(head_dim)])


def rotation_of_covariance(covariance: Tensor) -> Tensor:
    """``T = B H P`` of covariances [..., D, D]: [..., D, D] fp64.

    Eigenvalues ascend, and each eigenvector's largest component is positive, so that the result is unique.
    """
    dim = covariance.shape[-1]
    basis = torch.linalg.eigh(covariance.double()).eigenvectors
    largest = basis.gather(-2, basis.abs().argmax(-2, keepdim=True))
    spread = (basis * largest.sign()) @ hadamard_matrix(dim).to(basis)
    place = reversal(dim).to(basis.device)
    return torch.empty_like(spread).index_copy_(-1, place, spread)


@torch.no_grad()
def fit_oscar(texts: Iterable[States], cfg: KVQuantConfig) -> tuple[Tensor, Tensor]:
    """The rotations of K and V of any heads, each [H, D, D] fp64.

    Args:
        texts: the heads' states, with all their queries.
        cfg: how K and V are coded; decides what V's residuals are.

    Raises:
        ValueError: no text.
    """
    keys = values = None
    count = 0
    for states in texts:
        there = (states.query_weight > 0).unsqueeze(-1)
        queries = states.q.double().transpose(0, 1).flatten(1, 4)  # [H, L X G n, D], padding is 0
        weights = states.log_weights(states.k.double()).exp()
        seen = attend(weights, quantisation_targets(states.v, cfg).double()) * there
        seen = seen.transpose(0, 1).flatten(1, 4)
        key, value = queries.mT @ queries, seen.mT @ seen
        keys, values = (key, value) if keys is None else (keys + key, values + value)
        count += states.q.shape[0] * states.q.shape[3] * sum(states.lengths)
    if keys is None:
        raise ValueError("OSCAR needs at least one text, got 0")
    return rotation_of_covariance(keys / count), rotation_of_covariance(values / count)
