"""Table 1 and Figure 3 from states alone: the definitions restated, and what is kept, read back and made again."""

import pandas as pd
import pytest
import torch
from test_plots import keep_analyses, tiny_model

from residualquant import decode, encode
from residualquant.config import KVQuantConfig, preset
from residualquant.errors import ResidualQuantError
from residualquant.repro import analyses, paths, tables
from residualquant.repro.profiles import Profile

TINY = Profile("tiny", {"ouro": {"words": 1, "algebra": 1}}, texts=2)


def states(loops=4, layers=2, heads=2, tokens=5, dim=128):
    torch.manual_seed(0)
    last = torch.randn(layers, heads, tokens, dim)
    return torch.stack([last + (loops - 1 - r) * 0.3 * torch.randn_like(last) for r in range(loops)]).bfloat16()


def test_nmse_is_the_error_over_the_energy_of_all_tokens_layers_heads_and_channels():
    k = states()
    found = analyses.nmse_of(k)
    for reference in ("first", "last"):
        config = preset("INT2 g=32", reference=reference, coefficient="unit")
        back = torch.stack([decode(encode(k[:, n].transpose(1, 2).contiguous(), config)) for n in range(2)], 1)
        error = (back.transpose(2, 3) - k.float()).pow(2).sum(dim=(1, 2, 3, 4))
        for r in range(4):
            energy = float((k[r].float() ** 2).sum())
            assert found[f"{reference}_{r + 1}"] == pytest.approx(float(error[r]) / energy, rel=1e-4)
        loops = [found[f"{reference}_{r}"] for r in (1, 2, 3, 4)]
        assert found[f"{reference}_avg"] == pytest.approx(sum(loops) / 4)
    assert analyses.nmse_of(torch.zeros(4, 1, 1, 2, 32))["last_avg"] == 0


def test_prediction_errors_are_those_of_the_coded_last_loop():
    k, v = states(), 2 * states()
    found = analyses.states_of(k, v)
    assert found["k_2"] == pytest.approx(float(k[1].float().norm(dim=-1).mean()))
    assert found["v_3"] == pytest.approx(2 * float(k[2].float().norm(dim=-1).mean()))
    for bits in (2, 4):
        coded = decode(encode(k[3:].flatten(1, 2).contiguous(), KVQuantConfig(bits=(bits,), reference="direct")))
        anchor, x = coded.reshape(k[3].shape).double(), k[0].double()
        alpha = (x * anchor).sum(-1, keepdim=True) / (anchor * anchor).sum(-1, keepdim=True)
        for name, factor in (("unit", 1.0), ("ls", alpha.bfloat16().double())):
            error = float(((x - factor * anchor) ** 2).sum(-1).mean())
            assert found[f"int{bits}_{name}_1"] == pytest.approx(error, rel=1e-4)
        assert found[f"int{bits}_ls_1"] < found[f"int{bits}_unit_1"]


def test_problems_are_measured_once_and_again_when_the_model_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    monkeypatch.setattr("residualquant.evals.texts.training_texts", lambda model, task, n, *rest: [[3, 4, 5]] * n)
    model, loads = tiny_model(total_ut_steps=4), []
    monkeypatch.setattr("residualquant.models.load_model", lambda name, device=None: loads.append(name) or model)
    first = tables.table("table1", TINY, compute=True)
    assert list(first.n) == [2] * 10 and loads == ["mini-ouro-maths"]
    assert first.paper_nmse_x1000.tolist()[:2] == [179.39, 44.88]
    file = paths.data_dir("tiny") / "table1_problems.csv"
    assert len(file.read_text().splitlines()) == 3
    monkeypatch.setattr("residualquant.repro.analyses.nmse_of", None)  # nothing is measured again
    assert tables.table("table1", TINY, compute=True).equals(first)
    assert tables.table("table1", TINY).equals(first)
    model.weights_hash = "other"
    with pytest.raises(TypeError):
        tables.table("table1", TINY, compute=True)


def test_rotations_are_compared_on_kept_errors_and_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    with pytest.raises(ResidualQuantError, match=r"rotation_errors.csv is missing: `make reproduce PROFILE=tiny`"):
        tables.table("rotations", TINY)
    model, asked = tiny_model(total_ut_steps=4), []
    monkeypatch.setattr("residualquant.models.load_model", lambda name, device=None: model)
    monkeypatch.setattr(
        "residualquant.rotation.calibration.calibrated_many", lambda m, configs, *rest: [c.rotation for c in configs]
    )

    def errors(model, task, configs, rotations, sizes, n):
        asked.append((task, [c.rotation for c in configs], rotations, n))
        first = sizes.fit + sizes.holdout
        about = {"model": "m", "config": "INT2/4 g=32", "reference": "last", "loop_group": 1, "n": n}
        about["split"] = f"training problems {first} to {first + n - 1} of algebra"
        values = {"hadamard": (4.0, 2.0), "oscar": (2.0, 8.0), "optr_h": (1.0, 1.0)}
        return pd.DataFrame(
            about | {"rotation": rotation, "layer": 1, "of": "K", "head": head + 1, "error": value}
            for rotation, both in values.items()
            for head, value in enumerate(both)
        )

    monkeypatch.setattr("residualquant.rotation.measure.rotation_errors", errors)
    made = tables.table("rotations", TINY, compute=True).set_index(["rotation", "against"])
    assert asked == [("algebra", ["hadamard", "oscar", "optr_h"], {1: "oscar", 2: "optr_h"}, 2)]
    assert made.loc["optr_h", "hadamard"].mean_ratio == round(2 / 6, 4) and made.loc["optr_h", "oscar"].lower_pct == 100
    assert made.loc["oscar", "hadamard"].lower_pct == 50 and set(made.heads) == {2}
    assert tables.table("rotations", TINY, compute=True).equals(made.reset_index()) and len(asked) == 1
    model.weights_hash = "other"
    tables.table("rotations", TINY, compute=True)
    assert len(asked) == 2
    (paths.data_dir("tiny") / "rotation_errors.csv").write_text("")
    tables.table("rotations", TINY, compute=True)
    assert len(asked) == 3


def test_what_is_missing_or_damaged_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    with pytest.raises(ResidualQuantError, match=r"figure3_problems.csv is missing: `make reproduce PROFILE=tiny`"):
        tables.table("figure3_right", TINY)
    paths.write_atomic(paths.data_dir("tiny") / "figure3_problems.csv", "a,b\n1,2\n")
    with pytest.raises(ResidualQuantError, match=r"figure3_problems\.csv is damaged"):
        tables.table("figure3_middle", TINY)


def test_figure3_says_what_least_squares_takes_off(tmp_path, monkeypatch):
    monkeypatch.setenv("RESIDUALQUANT_HOME", str(tmp_path))
    keep_analyses(paths.data_dir("tiny"))
    right = tables.table("figure3_right", TINY)
    assert len(right) == 12 and set(right.paper_max_reduced_pct) == {24.3}
    assert right.set_index("coefficient").loc["ls"].reduced_pct.tolist() == pytest.approx([100 / 3] * 6, abs=1e-3)
    middle = tables.table("figure3_middle", TINY)
    assert middle.groupby("kind").loop.apply(list).to_dict() == {"K": [1, 2, 3, 4], "V": [1, 2, 3, 4]}
