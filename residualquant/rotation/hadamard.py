"""Normalised Hadamard matrices for the head sizes of looped models."""

from __future__ import annotations

import torch
from torch import Tensor

HEAD_DIMS = (64, 96, 128, 256)


def hadamard_matrix(head_dim: int) -> Tensor:
    """The orthogonal matrix of entries ``+-1/sqrt(D)`` (Sec. 2.2): [D, D] fp32.

    Sylvester's form for powers of two.  96 has none, so it is ``H_12 (x) H_8`` with Paley's matrix of order 12.

    Raises:
        ValueError: a head size other than 64, 96, 128, 256.
    """
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"Hadamard rotation needs a head_dim of {', '.join(map(str, HEAD_DIMS))}, got {head_dim!r}")
    signs = torch.kron(_paley_12(), _sylvester(8)) if head_dim == 96 else _sylvester(head_dim)
    return (signs / head_dim**0.5).float()


def _sylvester(order: int) -> Tensor:
    """+-1 matrix of a power of two: H_2n = [[H_n, H_n], [H_n, -H_n]]."""
    signs = torch.ones(1, 1, dtype=torch.float64)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while signs.shape[0] < order:
        signs = torch.kron(step, signs)
    return signs


def _paley_12() -> Tensor:
    """+-1 matrix of order 12 by Paley's first construction over the field of 11 elements."""
    squares = {i * i % 11 for i in range(1, 11)}
    signs = torch.eye(12, dtype=torch.float64)
    signs[0, 1:] = 1
    signs[1:, 0] = -1
    for row in range(11):
        for column in range(11):
            if row != column:
                signs[row + 1, column + 1] = 1 if (row - column) % 11 in squares else -1
    return signs
