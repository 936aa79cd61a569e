"""Rotations: Hadamard matrices, row form, means, and what is refused."""

import pytest
import torch

from residualquant import KVQuantConfig, decode, encode, preset
from residualquant.rotation import Rotation, rotation_for
from residualquant.rotation.hadamard import hadamard_matrix


def random_rotation(head_dim, heads=None, means=None):
    shape = (head_dim, head_dim) if heads is None else (heads, head_dim, head_dim)
    generator = torch.Generator().manual_seed(head_dim)
    return Rotation(torch.linalg.qr(torch.randn(shape, generator=generator)).Q, means)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_hadamard_matrix(head_dim):
    matrix = hadamard_matrix(head_dim).double()
    assert torch.allclose(matrix.abs(), torch.full_like(matrix, head_dim**-0.5), atol=1e-8)
    assert (matrix.mT @ matrix - torch.eye(head_dim)).abs().max() < 1e-6


def test_hadamard_spreads_an_outlier():
    x = torch.zeros(1, 128)
    x[0, 7] = 16.0
    rotated = rotation_for(preset("INT2 g=32", rotation="hadamard"), 128).rotate(x)
    assert torch.allclose(rotated.abs(), torch.full_like(rotated, 16 / 128**0.5))


def test_sylvester_and_paley_forms():
    signs = (hadamard_matrix(128) * 128**0.5).round().int()
    expected = [[1 - 2 * (bin(i & j).count("1") % 2) for j in range(128)] for i in range(128)]
    assert signs.tolist() == expected
    signs = (hadamard_matrix(96) * 96**0.5).round().int()
    assert torch.equal(signs[:8, :8], (hadamard_matrix(64) * 8).round().int()[:8, :8])
    assert torch.equal(signs, torch.kron(signs[::8, ::8], signs[:8, :8]))


@pytest.mark.parametrize("head_dim", [32, 80, 512])
def test_no_hadamard_matrix(head_dim):
    with pytest.raises(ValueError, match=str(head_dim)):
        hadamard_matrix(head_dim)


def test_row_form_per_head():
    rotation = random_rotation(64, heads=3)
    x = torch.randn(4, 5, 3, 64)
    z = rotation.rotate(x)
    for head in range(3):
        assert torch.allclose(z[..., head, :], x[..., head, :] @ rotation.matrix[head], atol=1e-5)
    assert torch.allclose(rotation.unrotate(z), x, atol=1e-5)
    assert (rotation.head_dim, rotation.heads, random_rotation(64).heads) == (64, 3, None)


def test_a_rotation_must_be_orthogonal_and_square():
    with pytest.raises(ValueError, match="orthogonal"):
        Rotation(torch.eye(64) * 1.01)
    with pytest.raises(ValueError, match="orthogonal"):
        Rotation(torch.full((64, 64), float("nan")))
    with pytest.raises(ValueError, match=r"\[64, 32\]"):
        Rotation(torch.zeros(64, 32))
    with pytest.raises(ValueError, match=r"got \[4, 32\]"):
        Rotation(torch.eye(64), torch.zeros(4, 32))
    with pytest.raises(ValueError, match=r"\['L', 2, 64\], got \[4, 64\]"):
        Rotation(torch.eye(64).expand(2, 64, 64), torch.zeros(4, 64))


def test_half_precision_matrices_pass():
    assert Rotation(hadamard_matrix(128).half()).head_dim == 128


def test_rotation_for():
    assert rotation_for(KVQuantConfig(), 128) is None
    assert rotation_for(preset("BF16", rotation="hadamard"), 128) is None
    hadamard = preset("INT2 g=32", rotation="hadamard")
    assert rotation_for(hadamard, 128) is rotation_for(hadamard, 128)
    for name in ("oscar", "optr_h"):
        with pytest.raises(ValueError, match=name):
            rotation_for(preset("INT2 g=32", rotation=name), 128)
        with pytest.raises(ValueError, match=name):
            encode(torch.zeros(4, 2, 64), preset("INT2 g=32", rotation=name))


def test_codec_refuses_rotations_that_do_not_fit():
    cfg, x = preset("INT2 g=32", rotation="oscar"), torch.randn(4, 5, 3, 64)
    with pytest.raises(ValueError, match='rotation="none"'):
        encode(x, preset("INT2 g=32"), random_rotation(64))
    with pytest.raises(ValueError, match=r"\[128, 128\] does not fit"):
        encode(x, cfg, random_rotation(128))
    with pytest.raises(ValueError, match=r"\[2, 64, 64\] does not fit"):
        encode(x, cfg, random_rotation(64, heads=2))
    with pytest.raises(ValueError, match="means of 3 loops"):
        encode(x, cfg, random_rotation(64, means=torch.zeros(3, 64)))


def test_a_bare_matrix_is_a_rotation():
    cfg, x = preset("INT2/4 g=32", rotation="hadamard"), torch.randn(4, 5, 128)
    assert torch.equal(decode(encode(x, cfg, hadamard_matrix(128))), decode(encode(x, cfg)))


@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("with_means", [False, True])
def test_calibrated_rotations_code_in_their_basis(heads, with_means):
    torch.manual_seed(0)
    plain, cfg = KVQuantConfig(bits=(8, 8, 8, 8)), KVQuantConfig(bits=(8, 8, 8, 8), rotation="optr_h")
    means = torch.randn(4, 64) if heads is None else torch.randn(4, heads, 64)
    rotation = random_rotation(64, heads, means if with_means else None)
    x = torch.randn(4, 7, 3, 64).bfloat16()
    packed = encode(x, cfg, rotation)
    assert packed.rotation is rotation
    error = (decode(packed) - x.float()).square().mean()
    assert error < 1.5 * (decode(encode(x, plain)) - x.float()).square().mean() + 1e-4
    assert torch.allclose(rotation.unrotate(decode(packed, "rotated")), decode(packed), atol=1e-5)


def test_means_are_subtracted_before_coding():
    """What the means hold costs the anchor no code range."""
    means = torch.zeros(4, 64)
    means[3] = torch.linspace(-3, 3, 64)
    x = torch.randn(4, 50, 64) * 0.1 + means[3]
    cfg = preset("INT2/4 g=32", rotation="optr_h")
    errors = []
    for rotation in (Rotation(torch.eye(64), means), Rotation(torch.eye(64))):
        errors.append((decode(encode(x, cfg, rotation)) - x)[3].square().mean())
    assert errors[0] < 0.1 * errors[1]
