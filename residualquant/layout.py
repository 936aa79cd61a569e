"""Every bit and byte count of the method, and the layout of a page.  No tensors here.

Three kinds of number are kept apart: what is *stored* per token and head (capacity), what is *read* per decode step to
rebuild all loops (traffic), and how many stored loop states that means (logical reads, App. D).
"""

from __future__ import annotations

from residualquant.config import RAW_BITS, KVQuantConfig

ALPHA_BYTES = 2  # BF16
METADATA_BYTES_PER_GROUP = 2  # FP8 e4m3fn scale, then FP8 e4m3fn offset


def check_head_dim(cfg: KVQuantConfig, head_dim: int) -> None:
    """Check that heads of ``head_dim`` channels split into whole groups and whole bytes.

    Raises:
        ValueError: ``head_dim`` is not a positive multiple of 16, or not of some loop's group size.
    """
    if head_dim <= 0 or head_dim % 16:
        raise ValueError(f"head_dim must be a positive multiple of 16, got {head_dim}")
    for loop, group_size in enumerate(cfg.group_sizes):
        if group_size is not None and head_dim % group_size:
            raise ValueError(f"head_dim {head_dim} is not divisible by the group size {group_size} of loop {loop}")


def codes_bytes(cfg: KVQuantConfig, loop: int, head_dim: int) -> int:
    """Bytes of codes (or of raw BF16 values) of one token and head of ``loop``."""
    return cfg.bits[loop] * head_dim // 8


def metadata_bytes(cfg: KVQuantConfig, loop: int, head_dim: int) -> int:
    """Bytes of FP8 scales and offsets of one token and head of ``loop``."""
    group_size = cfg.group_sizes[loop]
    return 0 if group_size is None else METADATA_BYTES_PER_GROUP * head_dim // group_size


def alpha_bytes(cfg: KVQuantConfig, loop: int) -> int:
    """Bytes of the BF16 coefficient of one token and head of ``loop``."""
    return ALPHA_BYTES if cfg.stores_alpha(loop) else 0


def loop_bytes(cfg: KVQuantConfig, loop: int, head_dim: int) -> int:
    """Bytes that one token and head of ``loop`` takes, K or V (App. A.3)."""
    return codes_bytes(cfg, loop, head_dim) + metadata_bytes(cfg, loop, head_dim) + alpha_bytes(cfg, loop)


def stored_bytes(cfg: KVQuantConfig, head_dim: int) -> int:
    """Bytes that one token and head takes over all loops of the group, K or V (App. A.3)."""
    check_head_dim(cfg, head_dim)
    return sum(loop_bytes(cfg, loop, head_dim) for loop in range(cfg.loops))


def effective_bits(cfg: KVQuantConfig, head_dim: int) -> float:
    """Stored bits per value: ``mean_r(b_r + 16/g_r) + 16 (L-1) / (L D)`` (App. A.3).

    The last term counts the stored coefficients only.  Rotations, means, padding, BF16 windows and buffers are not
    part of it.
    """
    return 8 * stored_bytes(cfg, head_dim) / (cfg.loops * head_dim)


def capacity_ratio(cfg: KVQuantConfig, head_dim: int) -> float:
    """How many times more tokens fit than with a BF16 cache: 16 / b_eff."""
    return RAW_BITS / effective_bits(cfg, head_dim)


def loops_read(cfg: KVQuantConfig, loop: int) -> tuple[int, ...]:
    """The stored loops that rebuild ``loop``: itself, its reference, the reference of that one, and so on."""
    chain = [loop]
    while (reference := cfg.reference_of(chain[-1])) is not None:
        chain.append(reference)
    return tuple(chain)


def logical_reads(cfg: KVQuantConfig) -> int:
    """Stored loop states read per decode step: 2L-1 for a shared anchor, L(L+1)/2 for a chain (App. D)."""
    return sum(len(loops_read(cfg, loop)) for loop in range(cfg.loops))


def bytes_read_per_step(cfg: KVQuantConfig, head_dim: int) -> int:
    """Bytes read per decode step for all loops of one past token and head, K or V."""
    check_head_dim(cfg, head_dim)
    return sum(loop_bytes(cfg, read, head_dim) for loop in range(cfg.loops) for read in loops_read(cfg, loop))


def traffic_ratio(cfg: KVQuantConfig, head_dim: int) -> float:
    """How many times fewer bytes a decode step reads than with a BF16 cache: the ceiling of any speed-up."""
    return RAW_BITS // 8 * head_dim * cfg.loops / bytes_read_per_step(cfg, head_dim)
