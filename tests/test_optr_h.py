"""OptR-H: its quantiser and recoding against the codec's, its losses by the formula, and what a fit promises."""

from dataclasses import replace

import pytest
import torch
from test_oscar import random_states

from residualquant.affine import dequantize, quantize
from residualquant.config import KVQuantConfig, preset
from residualquant.residual import decode, encode
from residualquant.rotation import Rotation
from residualquant.rotation.hadamard import hadamard_matrix
from residualquant.rotation.optr_h import (
    OptRHSettings,
    centres_of,
    fit_optr_h,
    gram_of,
    hadamard_start,
    key_loss,
    losses_of,
    optimise,
    storable,
    value_loss,
)
from residualquant.rotation.recoding import fixed_means, recode, straight_through
from residualquant.rotation.states import attend, batch

QUICK = OptRHSettings(steps=6, check_every=3, queries=8)
CONFIGS = [
    preset("INT2/4 g=32", rotation="optr_h"),
    preset("INT2 g=16", rotation="optr_h", reference="direct"),
    preset("INT2/4 g=32", rotation="optr_h", reference="first", coefficient="unit"),
    preset("INT2/4 g=16", rotation="optr_h", reference="previous"),
    preset("INT2/4 g=32", rotation="optr_h", reference="next", coefficient="norm_ratio"),
    KVQuantConfig(bits=(3, 0, 16, 8), rotation="optr_h"),
]
NAMES = [f"{c.label} {c.reference} {c.coefficient}" for c in CONFIGS]


def turned(dim, heads=2, seed=0):
    """A rotation that is not Hadamard's, as it would be stored."""
    angles = 0.1 * torch.randn(heads, dim, dim, generator=torch.Generator().manual_seed(seed))
    return storable(hadamard_matrix(dim) @ torch.linalg.matrix_exp(angles - angles.mT))


def random_gram(heads=2, per_head=2, dim=64, hidden=48):
    weight = torch.randn(hidden, heads * per_head * dim, generator=torch.Generator().manual_seed(9))
    return weight, gram_of(weight, heads, dim)


# ---------------------------------------------------------------------------------------------------- quantiser


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 300.0])
def test_the_differentiable_quantiser_has_the_codecs_values(bits, scale):
    x = scale * torch.randn(50, 96, generator=torch.Generator().manual_seed(bits))
    x[0], x[1, :32], x[2] = 0, 2.5, scale * 1e4
    for group_size in (16, 32):
        for clip in (0.9, 0.6) if bits == 2 else (0.9,):
            expected = dequantize(*quantize(x, bits, group_size, clip))
            assert torch.equal(straight_through(x, bits, group_size, clip), expected)


@pytest.mark.parametrize("bits, clip", [(1, 0.6), (2, 0.9), (2, 1.0), (3, 0.97), (4, 1.0)])
def test_the_straight_through_gradient(bits, clip):
    """That of the formula with every rounding replaced by the identity, at the values that were stored."""
    generator = torch.Generator().manual_seed(bits)
    x = torch.randn(20, 64, generator=generator).requires_grad_()
    weights = torch.randn(20, 64, generator=generator)
    (straight_through(x, bits, 16, clip) * weights).sum().backward()
    given = x.grad.clone()

    x.grad, levels = None, 2**bits - 1
    stored_scale, stored_offset = quantize(x.detach(), bits, 16, clip)[1].float().split(1, -1)
    groups = x.unflatten(-1, (-1, 16))
    lo, hi = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    width = (hi - lo) * clip
    scale = width / levels + (stored_scale - width / levels).detach()
    offset = (lo + hi - width) / 2 + (stored_offset - (lo + hi - width) / 2).detach()
    place = (groups - offset) / scale
    code = (place + ((place - 0.5).ceil() - place).detach()).clamp(0, levels)
    ((offset + scale * code).flatten(-2) * weights).sum().backward()
    assert torch.allclose(given, x.grad, atol=1e-5)


def test_a_group_without_range_has_a_finite_gradient():
    x = torch.zeros(2, 32).requires_grad_()
    straight_through(x, 2, 32).sum().backward()
    assert torch.allclose(x.grad, torch.ones_like(x))  # the offset follows


# ----------------------------------------------------------------------------------------------------- recoding


@pytest.mark.parametrize("cfg", CONFIGS, ids=NAMES)
@pytest.mark.parametrize("dim", [96, 128])
def test_recoding_is_what_the_codec_gives_back(cfg, dim):
    k = random_states(dim, tokens=40).k.squeeze(2)
    matrix = turned(dim)
    centres = fixed_means([k], cfg, matrix.float())
    means = (centres.unsqueeze(2) @ matrix.float()).squeeze(2)
    given = recode(k, cfg, matrix.float(), centres) @ matrix.float()
    packed = encode(k.transpose(1, 2), cfg, Rotation(matrix, means))
    expected = decode(packed, space="rotated").transpose(1, 2)
    # a code or FP8 value next to a half may round either way in another order of sums; all else is the same
    assert ((given - expected).abs() > 2e-3 * expected.abs().max()).float().mean() < 5e-2
    # without a change of basis there is no other order: bit for bit
    identity = torch.eye(dim).expand(2, -1, -1)
    expected = decode(encode(k.transpose(1, 2), cfg, Rotation(identity, centres))).transpose(1, 2)
    assert torch.equal(recode(k, cfg, identity, centres), expected)


@pytest.mark.parametrize("cfg", CONFIGS, ids=NAMES)
def test_means_are_those_of_what_is_quantised(cfg):
    """Over texts of other lengths too, and exactly zero after they were subtracted."""
    texts = [random_states(tokens=t, seed=t).k.squeeze(2) + 0.5 for t in (10, 31)]
    matrix = turned(64).float()
    centres = fixed_means(texts, cfg, matrix)
    rebuilt = [recode(k, cfg, matrix, centres) for k in texts]
    for loop in range(4):
        left = []
        for k, values in zip(texts, rebuilt):
            own, reference = k[loop].float(), cfg.reference_of(loop)
            if reference is not None:
                other = values[reference]
                alpha = {
                    "ls": (own * other).sum(-1) / other.square().sum(-1),
                    "norm_ratio": own.norm(dim=-1) / other.norm(dim=-1),
                    "unit": torch.ones(own.shape[:-1]),
                }[cfg.coefficient]
                own = own - alpha.bfloat16().float()[..., None] * other
            left.append(own - centres[loop][:, None])
        assert torch.cat(left, 1).mean(1).abs().max() < 2e-3


def test_no_gradient_through_references():
    """Only the anchor's own codes move with the rotation that the residual loops read it in."""
    cfg, k = CONFIGS[0], random_states().k.squeeze(2)
    matrix = turned(64).float().requires_grad_()
    recode(k, cfg, matrix)[:3].sum().backward()
    through_residuals = matrix.grad.clone()
    matrix.grad = None
    frozen = recode(k, cfg, matrix.detach())[3]
    alpha = (k[:3].float() * frozen).sum(-1, keepdim=True) / frozen.square().sum(-1, keepdim=True)
    prediction = alpha.bfloat16().float() * frozen
    (straight_through((k[:3].float() - prediction) @ matrix, 2, 32) @ matrix.mT + prediction).sum().backward()
    assert torch.allclose(through_residuals, matrix.grad, rtol=1e-3, atol=1e-2)


# ------------------------------------------------------------------------------------------------------- losses


def test_losses_by_the_formula():
    states, (weight, gram) = random_states(tokens=20, queries=5), random_gram()
    generator = torch.Generator().manual_seed(3)
    k = states.k.float() + 0.3 * torch.randn(states.k.shape, generator=generator)
    v = states.v.float() + 0.3 * torch.randn(states.v.shape, generator=generator)
    key, value = torch.zeros(2, 2)
    for loop in range(4):
        for head in range(4):
            kv, slice_ = head // 2, weight[:, 64 * head : 64 * head + 64].T
            for n in range(5):
                seen = slice(0, 16 + n)
                q = states.q[loop, kv, 0, head % 2, n].float()
                true = (states.k[loop, kv, 0, seen].float() @ q / 8).softmax(0)
                read = (k[loop, kv, 0, seen] @ q / 8).softmax(0)
                error = (read - true) @ states.v[loop, kv, 0, seen].float() @ slice_
                key[kv] += ((true * (true / read).log()).sum() + error.square().sum() / 48) / 40
                error = read @ (v - states.v.float())[loop, kv, 0, seen] @ slice_
                value[kv] += error.square().sum() / 48 / 40
    assert torch.allclose(key_loss(states, gram, k).squeeze(1), key, rtol=1e-3)
    assert torch.allclose(value_loss(states, gram, v, states.log_weights(k).exp()).squeeze(1), value, rtol=1e-3)
    assert key_loss(states, gram, states.k.float()).abs().max() < 1e-5


def test_attention_does_not_change_with_the_rotation_when_nothing_is_quantised():
    """In FP64, scores, weights and output, per head, query heads in groups."""
    states = random_states(tokens=30)
    angles = torch.randn(2, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix = hadamard_matrix(64).double() @ torch.linalg.matrix_exp(angles - angles.mT)
    left, _, right = torch.linalg.svd(matrix)
    rotation = left @ right
    k, v = states.k.double(), states.v.double()
    weights = states.log_weights(k).exp()
    per_head = rotation[:, None]
    rotated = replace(states, q=states.q.double() @ per_head[:, None]).log_weights(k @ per_head).exp()
    assert torch.allclose(rotated, weights, rtol=0, atol=1e-12)
    out = attend(rotated, v @ per_head) @ rotation.mT[:, None, None]
    assert torch.allclose(out, attend(weights, v), rtol=0, atol=1e-11)
    raw = KVQuantConfig(bits=(16,) * 4, rotation="optr_h")
    k = states.k.squeeze(2)
    assert torch.equal(recode(k, raw, turned(64).float()), k.float())


# --------------------------------------------------------------------------------------------------------- fits


@pytest.mark.parametrize("cfg", CONFIGS, ids=NAMES)
@pytest.mark.parametrize("dim", [96, 128])
def test_a_fit_is_orthogonal_deterministic_and_never_worse_than_hadamard(cfg, dim):
    """On the held-out texts, per head, query heads in groups of two."""
    _, gram = random_gram(dim=dim)
    fit, held = ([random_states(dim, tokens=30 + s, seed=s) for s in range(n, n + 4)] for n in (0, 10))
    pair = fit_optr_h(fit, held, gram, cfg, QUICK)
    again = fit_optr_h(fit, held, gram, cfg, QUICK)
    for one, other in zip(pair, again):
        assert torch.equal(one.matrix, other.matrix) and torch.equal(one.after, other.after)
        assert Rotation(one.matrix, one.means).heads == 2 and one.matrix.dtype == torch.float16
        assert (one.after <= one.before).all() and (one.after < one.before).eq(one.step > 0).all()
    key, value = pair
    assert key.means.shape == (4, 2, dim) and key.means.dtype == torch.float32 and value.means is None
    # what the fit says of itself, taken again
    of_key, read_weights, of_value = losses_of(gram, cfg)
    with torch.no_grad():
        texts = batch([s.last(QUICK.queries) for s in held])
        again = of_key(texts, key.matrix.float(), centres_of(key)).mean(1)
        assert torch.allclose(again, key.after, rtol=0.1)
        again = of_value((texts, read_weights(texts, key)), value.matrix.float(), None).mean(1)
        assert torch.allclose(again, value.after, rtol=0.1)


def test_a_fit_learns_where_something_can_be_learnt():
    """Values in a few directions: turning these onto one group's channels is far better than spreading them."""
    generator = torch.Generator().manual_seed(1)
    basis = torch.randn(2, 6, 64, generator=generator)
    _, gram = random_gram()

    def low_rank(seed):
        states = random_states(seed=seed)
        v = torch.randn(4, 2, 24, 6, generator=generator) @ basis + 0.02 * torch.randn(4, 2, 24, 64)
        return replace(states, v=v.bfloat16().unsqueeze(2))

    torch.manual_seed(0)
    fit, held = ([low_rank(s) for s in range(n, n + 4)] for n in (0, 10))
    cfg = preset("INT2 g=32", rotation="optr_h", reference="direct")
    _, value = fit_optr_h(fit, held, gram, cfg, OptRHSettings(steps=30, check_every=10))
    assert (value.after < 0.8 * value.before).all() and (value.step > 0).all()


def test_each_head_keeps_its_best_and_the_start_when_nothing_is_better():
    """Fitting pulls both heads away from Hadamard; the held-out text likes that for the second head only."""
    start = hadamard_start(2, 64, "cpu")

    def loss(text, matrix, centres):
        alike = (matrix * start).sum((-2, -1)).unsqueeze(1) / 64
        return alike if text == 0 else alike * torch.tensor([[-1.0], [1.0]])

    def fit(steps):
        settings = OptRHSettings(steps=steps, check_every=2)
        near = storable(start + 0.01 * torch.randn(64, 64)).float()
        return optimise(near, loss, lambda indices: indices[0], 1, [1], lambda matrix: None, settings)

    torch.manual_seed(0)
    found = fit(6)
    assert found.step.tolist() == [0, 6]
    assert found.after[0] == found.before[0] and found.after[1] < found.before[1] - 0.01
    none = fit(0)
    assert torch.equal(none.before, none.after) and none.step.tolist() == [0, 0]


def test_bad_arguments():
    for change in ({"batch": 0}, {"queries": 0}, {"check_every": 0}, {"steps": -1}, {"learning_rate": 0.0}):
        with pytest.raises(ValueError, match="got"):
            OptRHSettings(**change)
    states, (_, gram) = [random_states()], random_gram()
    with pytest.raises(ValueError, match="got 1 and 0"):
        fit_optr_h(states, [], gram, CONFIGS[0])
