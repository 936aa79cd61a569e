"""A published slice of Ouro-1.4B's KV states: the authors' own codes, and the figures published for them.

The trace is not part of this project; these tests skip where it is absent.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from residualquant import KVQuantConfig, decode, encode, preset
from residualquant.inspect import inspect_trace


@pytest.fixture(scope="module")
def trace(test_data):
    path = test_data / "golden" / "ouro_kv_trace.npz"
    if not path.is_file():
        pytest.skip("no golden trace in RESIDUALQUANT_TEST_DATA")
    return {name: torch.from_numpy(array) for name, array in np.load(path).items()}


def nmse(x, cfg):
    return ((decode(encode(x, cfg)) - x).square().sum() / x.square().sum()).item()


def test_the_published_codes(trace):
    cfg = preset("INT2 g=16", reference="direct")
    codes = encode(trace["k"], cfg).unpacked_codes(0)
    published = trace["k_loop1_direct_int2_g16_codes"]
    assert published.numel() == 3072
    assert (codes == published).sum() == 3072


def test_the_published_error_and_coefficient(trace):
    packed = encode(trace["k"], preset("INT2 g=16", rounding="bf16"))
    rmse = (decode(packed)[0] - trace["k"][0]).square().mean().sqrt().item()
    assert f"{rmse:.6f}" == "0.235440"
    assert f"{packed.loops[0].alpha.float().mean().item():.6f}" == "0.801432"


NMSE = [  # configuration, NMSE of K, NMSE of V
    (preset("INT2 g=32", reference="direct", rounding="bf16"), 0.2202, 0.1398),
    (preset("INT2 g=16", reference="direct", rounding="bf16"), 0.1373, 0.0920),
    (preset("INT2/4 g=32", rounding="bf16"), 0.0148, 0.0421),
    (preset("INT2/4 g=32", rotation="hadamard"), 0.0142, 0.0419),
    (preset("INT2/4 g=32", reference="first", rounding="bf16"), 0.0232, 0.0621),
    (KVQuantConfig(bits=(3, 2, 1, 4), rotation="hadamard"), 0.0121, 0.0403),
    (KVQuantConfig(bits=(4, 2, 0, 4), rotation="hadamard"), 0.0160, 0.0550),
    (KVQuantConfig(bits=(3, 3, 2, 4), rotation="hadamard"), 0.0052, 0.0139),
]


@pytest.mark.parametrize(("cfg", "key", "value"), NMSE, ids=[f"{c.label} {c.reference} {c.rotation}" for c, *_ in NMSE])
def test_nmse_over_the_loops(trace, cfg, key, value):
    assert nmse(trace["k"], cfg) == pytest.approx(key, rel=0.01)
    assert nmse(trace["v"], cfg) == pytest.approx(value, rel=0.01)


ENERGIES = {"K": (0.2233, 0.1022, 0.0371), "V": (0.6770, 0.3662, 0.1580)}


def test_energy_not_explained_by_the_last_loop(trace):
    """A raw last loop and residuals of no bits leave exactly the energy that least squares cannot explain."""
    cfg = KVQuantConfig(bits=(0, 0, 0, 16))
    for name, energies in ENERGIES.items():
        x = trace[name.lower()]
        residual = (decode(encode(x, cfg)) - x)[:3].square().sum((1, 2)) / x[:3].square().sum((1, 2))
        assert residual.tolist() == pytest.approx(energies, rel=0.01)


def test_inspection_finds_the_same_energies_and_errors(trace):
    k, v = (trace[name][:, None, None] for name in "kv")  # one layer, one head
    text = SimpleNamespace(q=k[..., -1:, :], k=k, v=v)
    ideal = inspect_trace([text], KVQuantConfig(bits=(0, 0, 0, 16)))
    coded = inspect_trace([text], preset("INT2/4 g=32", rounding="bf16"))
    for name, energies in ENERGIES.items():
        assert ideal[ideal.of == name].residual_energy[:3].tolist() == pytest.approx(energies, rel=0.01)
        states = trace[name.lower()].square().sum((1, 2))
        pooled = (coded[coded.of == name].nmse.to_numpy() * states.numpy()).sum() / states.sum().item()
        assert pooled == pytest.approx({"K": 0.0148, "V": 0.0421}[name], rel=0.01)
