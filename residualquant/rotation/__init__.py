"""Changes of basis before coding (Sec. 3.3): row form ``Z = X T`` with an orthogonal ``T``.

A rotation is shared by all loops of a group, one per layer, K or V, and (calibrated ones) KV head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from residualquant.config import KVQuantConfig

ORTHOGONALITY_TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class Rotation:
    """One orthogonal matrix per head (or one for all), and the fixed means that OptR-H subtracts.

    Products are summed in FP64 and rounded once to FP32: matrix kernels change their order of summation with the shape,
    and in FP32 that would give a token other bits in a large batch than alone.  FP64 sums of FP32 entries and BF16
    states are exact, or so nearly exact that the order can no longer be seen after rounding.

    Attributes:
        matrix: [D, D], or [H, D, D] with one matrix per KV head; any float dtype.
        means: None, or [L, D] ([L, H, D] with a matrix per head) fp32 in the rotated space: of the anchor, and of each
            other loop's residual.

    Raises:
        ValueError: another shape, or max|T^T T - I| above 1e-3.
    """

    matrix: Tensor
    means: Tensor | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.matrix.shape)
        if len(shape) not in (2, 3) or shape[-1] != shape[-2]:
            raise ValueError(f"a rotation must have shape [D, D] or [H, D, D], got {list(shape)}")
        product = self._matrix64.mT @ self._matrix64
        deviation = (product - torch.eye(shape[-1], dtype=torch.float64, device=product.device)).abs().max().item()
        if not deviation < ORTHOGONALITY_TOLERANCE:
            raise ValueError(f"a rotation must be orthogonal within {ORTHOGONALITY_TOLERANCE}, got {deviation:.2g}")
        if self.means is not None and self.means.shape[1:] != (*shape[:-2], shape[-1]):
            raise ValueError(f"means must have shape {['L', *shape[:-2], shape[-1]]}, got {list(self.means.shape)}")

    @cached_property
    def _matrix64(self) -> Tensor:
        return self.matrix.double()

    @property
    def head_dim(self) -> int:
        """Channels per head (D)."""
        return self.matrix.shape[-1]

    @property
    def heads(self) -> int | None:
        """KV heads (H) where each has its own matrix, else None."""
        return self.matrix.shape[0] if self.matrix.dim() == 3 else None

    def to(self, device: torch.device | str) -> Rotation:
        """The same rotation with its tensors on ``device``."""
        if self.matrix.device == torch.device(device):
            return self
        return Rotation(self.matrix.to(device), None if self.means is None else self.means.to(device))

    def rotate(self, x: Tensor) -> Tensor:
        """``Z = X T``: [..., H, D] (or [..., D] with one shared matrix), any float dtype, to fp32."""
        return _multiply(x, self._matrix64)

    def unrotate(self, z: Tensor) -> Tensor:
        """``X = Z T^T``: [..., H, D] (or [..., D] with one shared matrix), any float dtype, to fp32."""
        return _multiply(z, self._matrix64.mT)


def _multiply(rows: Tensor, matrix: Tensor) -> Tensor:
    if matrix.dim() == 3:
        return torch.einsum("...hd,hde->...he", rows.double(), matrix).float()
    return (rows.double() @ matrix).float()


def rotation_for(cfg: KVQuantConfig, head_dim: int, device: torch.device | str = "cpu") -> Rotation | None:
    """The rotation that ``cfg`` names, if it needs no calibration: None for "none", Hadamard for "hadamard".

    Raises:
        ValueError: a calibrated rotation, or a head size without a Hadamard matrix.
    """
    if cfg.rotation == "none" or cfg.is_off:
        return None
    if cfg.rotation == "hadamard":
        return _hadamard_rotation(head_dim, torch.device(device))
    raise ValueError(f"rotation={cfg.rotation!r} is calibrated: give its Rotation, of one layer and K or V")


@lru_cache(maxsize=16)
def _hadamard_rotation(head_dim: int, device: torch.device) -> Rotation:
    from residualquant.rotation.hadamard import hadamard_matrix

    return Rotation(hadamard_matrix(head_dim).to(device))
