"""OSCAR: its statistics by the formula, orthogonal and unique bases, the deal of channels, what V's target is."""

import pytest
import torch

from residualquant.config import KVQuantConfig, preset
from residualquant.residual import decode, encode
from residualquant.rotation import Rotation
from residualquant.rotation.hadamard import hadamard_matrix
from residualquant.rotation.oscar import fit_oscar, reversal, rotation_of_covariance
from residualquant.rotation.recoding import quantisation_targets
from residualquant.rotation.states import States, batch


def random_states(dim=64, heads=2, per_head=2, tokens=24, loops=4, seed=0, queries=None):
    """Loops that resemble each other, and channels that do not."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(0.5, -1, dim)[torch.randperm(dim, generator=generator)]

    def draw(count):
        shared = torch.randn(1, count, tokens, dim, generator=generator)
        return ((shared + 0.5 * torch.randn(loops, count, tokens, dim, generator=generator)) * spread).bfloat16()

    q = draw(heads * per_head)[:, :, -(queries or tokens) :].unflatten(1, (heads, per_head))
    return States(q.unsqueeze(2), draw(heads).unsqueeze(2), draw(heads).unsqueeze(2), (tokens,))


def test_reversal():
    assert reversal(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    assert reversal(128)[[1, 2, 64, 127]].tolist() == [64, 32, 1, 127]
    place = reversal(96).tolist()
    assert all(place[8 * a + b] == 12 * b + a for a in range(12) for b in range(8))
    for dim in (64, 96, 128, 256):
        assert sorted(reversal(dim).tolist()) == list(range(dim))
    with pytest.raises(ValueError, match="80"):
        reversal(80)


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_a_covariance_gives_one_orthogonal_rotation(dim):
    x = torch.randn(3, 200, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(dim))
    covariance = x.mT @ x
    rotation = rotation_of_covariance(covariance)
    assert rotation.dtype == torch.float64
    assert (rotation.mT @ rotation - torch.eye(dim)).abs().max() < 1e-6
    # undo P and H: what remains are eigenvectors, in ascending order, largest component positive
    basis = rotation[..., reversal(dim)] @ hadamard_matrix(dim).double().mT
    values = (basis.mT @ covariance @ basis).diagonal(dim1=-2, dim2=-1)
    assert (values.diff() > -1e-3).all()
    assert torch.allclose(values, torch.linalg.eigvalsh(covariance), rtol=1e-4)
    assert (basis.gather(-2, basis.abs().argmax(-2, keepdim=True)) > 0).all()
    # every channel has the same share of the covariance: that is what H is for
    spread = (rotation.mT @ covariance @ rotation).diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(spread, spread.mean(-1, keepdim=True).expand_as(spread), rtol=1e-4)


@pytest.mark.parametrize("cfg", [preset("INT2 g=32", reference="direct"), preset("INT2/4 g=32")])
def test_statistics_by_the_formula(cfg):
    """Summed over loops, texts and the query heads of a KV head, one query at a time."""
    texts = [random_states(seed=s, tokens=t) for s, t in ((0, 9), (1, 14))]
    keys, values = torch.zeros(2, 2, 64, 64, dtype=torch.float64)
    count = 0
    for states in texts:
        targets = quantisation_targets(states.v, cfg).double()
        for loop in range(4):
            for head in range(4):
                kv = head // 2
                for at, q in enumerate(states.q[loop, kv, 0, head % 2].double()):
                    scores = states.k[loop, kv, 0, : at + 1].double() @ q / 8
                    seen = scores.softmax(0) @ targets[loop, kv, 0, : at + 1]
                    keys[kv] += torch.outer(q, q)
                    values[kv] += torch.outer(seen, seen)
                    count += 1
    count /= 2  # queries per KV head
    for parts in (texts, [batch(texts)]):  # one by one, or padded to one length
        key, value = fit_oscar(parts, cfg)
        assert torch.allclose(key, rotation_of_covariance(keys / count), atol=1e-7)
        assert torch.allclose(value, rotation_of_covariance(values / count), atol=1e-7)


def test_targets_of_v():
    v = random_states().v
    direct = preset("INT2/4 g=32", reference="direct", rotation="oscar")
    assert torch.equal(quantisation_targets(v, direct), v.float())
    last = preset("INT2/4 g=32", rotation="oscar")
    targets = quantisation_targets(v, last)
    assert torch.equal(targets[3], v[3].float())
    packed = encode(v, preset("INT2/4 g=32"))
    anchor = decode(packed)[3]
    for loop in range(3):
        expected = v[loop].float() - packed.loops[loop].alpha.float() * anchor
        assert torch.allclose(targets[loop], expected, atol=1e-6)
    chained = quantisation_targets(v, KVQuantConfig(bits=(4, 2, 2, 2), reference="previous"))
    assert torch.equal(chained[0], v[0].float()) and not torch.equal(chained[2], targets[2])


def test_deterministic_and_usable_as_stored():
    texts = [random_states(dim=96, seed=s) for s in range(2)]
    cfg = preset("INT2/4 g=32", rotation="oscar")
    first, second = fit_oscar(texts, cfg), fit_oscar(texts, cfg)
    for a, b in zip(first, second):
        assert torch.equal(a, b)
        assert Rotation(a.half()).heads == 2
    with pytest.raises(ValueError, match="got 0"):
        fit_oscar([], cfg)
