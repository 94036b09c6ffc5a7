"""Peaked tensors hold the weight that their names say, and the tables measure the recipes as they are shipped."""

import json
import statistics
from dataclasses import replace

import peaked
import peaked_table
import pytest
import torch
from peaked import Inputs, Loud, Sinks

from sage_hf.bench.peers import Provider
from sage_kernels.exact import sdpa
from sage_kernels.reference import forward as reference
from sage_kernels.spec.recipe import RECIPES, without_outlier_handling


def mean_mass(case: Sinks, inputs: Inputs) -> float:
    """Weight of all sinks, averaged over the rows that see them all, in float64."""
    group = inputs.query.shape[1] // inputs.key.shape[1]
    scores = inputs.query.double() @ inputs.key.double().repeat_interleave(group, 1).mT * case.head_dim**-0.5
    scores = sdpa.apply_mask(scores, None, inputs.is_causal, 0, 0, inputs.causal_offset)
    weights = scores.softmax(-1)[..., case.positions].sum(-1)
    if inputs.is_causal:
        weights = weights[..., max(0, max(case.positions) - inputs.causal_offset) :]
    return weights.mean().item()


@pytest.mark.parametrize(
    "case",
    [
        *(Sinks(mass, 2048, count) for mass in (0.5, 0.8, 0.95) for count in (1, 4)),
        *(Sinks(0.8, 1024, 4, place) for place in ("middle", "behind")),
        Sinks(0.8, 2048, causal=True),
        Sinks(0.8, 1024, place="behind", causal=True),
        Sinks(0.8, 512, count=4, q_len=512, causal=True),
        Sinks(0.5, 512, place="middle", q_len=512, causal=True),
        Sinks(0.8, 1024, q_heads=6, head_dim=64),
        Sinks(0.8, 1024, loud=10.0),
    ],
    ids=lambda case: case.name,
)
def test_the_sinks_hold_their_mass(case):
    inputs = case.draw()
    assert abs(mean_mass(case, inputs) - case.mass) < 1e-3
    # As kernels get them.
    assert abs(mean_mass(case, inputs.to(torch.bfloat16)) - case.mass) < 0.02
    assert inputs.query.shape == (1, case.q_heads, case.q_len, case.head_dim)
    assert inputs.key.shape == inputs.value.shape == (1, case.kv_heads, case.kv_len, case.head_dim)


@pytest.mark.audit
@pytest.mark.parametrize("case", [case for case in peaked.CASES if isinstance(case, Sinks)], ids=lambda case: case.name)
def test_the_sinks_of_every_case_hold_their_mass(case):
    assert abs(mean_mass(case, case.draw().to(torch.bfloat16)) - case.mass) < 0.02


def test_sinks_lie_where_they_are_said_to():
    assert Sinks(0.5, 1000).positions == [0]
    assert Sinks(0.5, 1000, 4).positions == [0, 1, 2, 3]
    assert Sinks(0.5, 1000, place="middle").positions == [500]
    assert Sinks(0.5, 1000, 4, "middle").positions == [200, 400, 600, 800]
    assert Sinks(0.5, 1000, 4, "behind").positions == [800, 801, 802, 803]


def test_a_sinks_value_is_small_and_the_others_have_a_mean():
    value = Sinks(0.8, 2048).draw().value
    assert value[:, :, 0].square().mean().sqrt() < 0.1
    assert value.mean(2).square().mean().sqrt() > 0.15


@pytest.mark.parametrize("kind", ["×10", "×40", "log-normal", "RoPE'd bias"])
def test_loud_channels_are_loud_without_their_mean_and_scores_are_not(kind):
    calls = {name: Loud(name, 2048, head_dim=64).draw() for name in (kind, "Gaussian")}
    key = calls[kind].key
    loudness = (key - key.mean(2, keepdim=True)).square().mean(2).sqrt()
    ratio = (loudness.amax(-1) / loudness.median(-1).values).mean().item()
    assert ratio == pytest.approx({"×10": 10, "×40": 40, "log-normal": 4.2, "RoPE'd bias": 14}[kind], rel=0.25)
    spread = {name: (call.query @ call.key.mT).std().item() for name, call in calls.items()}
    assert spread[kind] == pytest.approx(spread["Gaussian"], rel=0.1)


def test_every_case_has_a_name_of_its_own_and_the_same_tensors_twice():
    for cases in (peaked.CASES, peaked.SMALL_CASES):
        assert len({case.name for case in cases}) == len(cases)
    case = Sinks(0.8, 512, 4, "behind", q_heads=4)
    for first, second in zip(case.draw()[:3], case.draw()[:3], strict=True):
        assert torch.equal(first, second)


def test_the_table_has_every_recipe_as_shipped_and_without_its_remedies():
    case = Sinks(0.8, 512, causal=True)
    inputs = case.draw()
    options = {"is_causal": True, "causal_offset": 512 - peaked.QUERIES}
    truth, _ = sdpa.attention(*inputs[:3], **options)
    rows = peaked_table.run(torch.device("cpu"), [case], [])
    assert {row["provider"] for row in rows} == set(peaked_table.OURS)
    for row in rows:
        recipe = RECIPES[row["provider"]]
        recipe = recipe if row["remedies"] else without_outlier_handling(recipe)
        output, _ = reference.attention(*inputs[:3], recipe, **options)
        assert row["rel_l1"] == pytest.approx(((output - truth).abs().sum() / truth.abs().sum()).item(), rel=1e-6)
        assert row["kernel"] == "reference"
    with_remedies = {row["provider"] for row in rows if row["remedies"]}
    assert with_remedies == {
        name for name in peaked_table.OURS if without_outlier_handling(RECIPES[name]) != RECIPES[name]
    }
    assert not any("without" in name for name in RECIPES)


def test_a_recipe_without_remedies_keeps_everything_else():
    for recipe in RECIPES.values():
        plain = without_outlier_handling(recipe)
        assert without_outlier_handling(plain) == plain
        assert replace(plain, **{name: getattr(recipe, name) for name in ("rotate", *_remedies(recipe))}) == recipe
        assert plain.rotate == (recipe.rotate and recipe.qk != "int8")


def _remedies(recipe) -> set[str]:
    return {"heavy_keys", "heavy_choice", "recent_keys", "equalize"} & vars(recipe).keys()


def test_a_peer_that_is_missing_or_cannot_run_has_a_row_that_says_why(capsys):
    def absent(*call):
        raise ModuleNotFoundError("No module named 'absent'\nmore")

    peer = Provider("absent", "Absent", "kernel", absent)
    cases = [Sinks(0.8, 300), Sinks(0.8, 300, causal=True)]
    missing, refused = [
        row for row in peaked_table.run(torch.device("cpu"), cases, [peer]) if row["provider"] == "absent"
    ]
    assert missing["unavailable"] == "ModuleNotFoundError: No module named 'absent'"
    assert refused["unavailable"] == "causal attention of the last queries only"
    assert "note: absent is missing where: ModuleNotFoundError" in capsys.readouterr().err
    assert {peer.name for peer in peaked_table.PEERS} == {"sageattention1", "sageattention2", "fa3_fp8", "cudnn_fp8"}


def test_samples_of_a_batch_have_the_errors_that_they_have_alone(monkeypatch):
    cases = [Sinks(0.5, 384), Loud("×40", 384), Sinks(0.8, 384, causal=True), Sinks(0.95, 384)]
    assert [[case.name for case in group] for group in peaked_table.alike(cases)] == [
        [cases[0].name, cases[1].name, cases[3].name],
        [cases[2].name],
    ]
    together = peaked_table.run(torch.device("cpu"), cases, [])
    monkeypatch.setattr(peaked_table, "BATCH_ELEMENTS", 1)
    assert all(len(group) == 1 for group in peaked_table.alike(cases))
    alone = peaked_table.run(torch.device("cpu"), cases, [])
    assert [row["tensor"] for row in together] == [row["tensor"] for row in alone]
    for one, other in zip(together, alone, strict=True):
        assert one == {**other, "rel_l1": pytest.approx(other["rel_l1"], rel=1e-5)}


def test_a_run_that_was_cut_short_is_resumed(monkeypatch, tmp_path, capsys):
    cases, path = [Sinks(0.5, 256), Sinks(0.8, 320), Sinks(0.5, 384)], tmp_path / "cpu-peaked.json"
    monkeypatch.setattr(peaked_table, "SMALL_CASES", cases)
    attend = peaked_table.attend

    def interrupted(inputs, recipe):
        if inputs.key.shape[2] == 384:
            raise KeyboardInterrupt
        return attend(inputs, recipe)

    monkeypatch.setattr(peaked_table, "attend", interrupted)
    arguments = ["peaked_table.py", "--device", "cpu", "--output", str(tmp_path)]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(KeyboardInterrupt):
        peaked_table.main()
    first = json.loads(path.read_text())["rows"]
    assert list(dict.fromkeys(row["tensor"] for row in first)) == [case.name for case in cases[:2]]
    monkeypatch.setattr(peaked_table, "attend", attend)
    monkeypatch.setattr("sys.argv", [*arguments, "--resume"])
    capsys.readouterr()
    peaked_table.main()
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()][:1] == [cases[2].name]
    rows = json.loads(path.read_text())["rows"]
    assert rows[: len(first)] == first and rows[-1]["tensor"] == cases[2].name


def test_the_table_shows_errors_without_and_with_remedies():
    rows = [
        {"tensor": "a", "provider": "fa3_fp8", "rel_l1": 0.5},
        {"tensor": "a", "provider": "sage2", "remedies": False, "rel_l1": 0.25},
        {"tensor": "a", "provider": "sage2", "remedies": True, "rel_l1": 0.125},
        {"tensor": "b", "provider": "fa3_fp8", "unavailable": "no"},
        {"tensor": "b", "provider": "sage2", "remedies": False, "rel_l1": 0.0625},
    ]
    assert peaked_table.markdown(rows).splitlines() == [
        "| tensor | FA3 FP8 | `sage2` |",
        "|---|---|---|",
        "| a | 0.5000 | 0.2500 → 0.1250 |",
        "| b | – | 0.0625 |",
    ]


def test_the_script_writes_a_json_whose_table_it_prints_again(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peaked_table, "SMALL_CASES", [Sinks(0.5, 256)])
    monkeypatch.setattr("sys.argv", ["peaked_table.py", "--device", "cpu", "--output", str(tmp_path)])
    peaked_table.main()
    table = capsys.readouterr().out
    result = json.loads((tmp_path / "cpu-peaked.json").read_text())
    assert {"tensor", "provider", "remedies", "kernel", "rel_l1"} == set(result["rows"][0])
    monkeypatch.setattr("sys.argv", ["peaked_table.py", "--render", str(tmp_path / "cpu-peaked.json")])
    peaked_table.main()
    assert capsys.readouterr().out == table
    assert statistics.fmean(row["rel_l1"] for row in result["rows"]) < 0.5


def test_pages_show_every_kind_of_tensor_and_every_mass_and_length_at_the_front():
    shown = [case for case in peaked.CASES if case.name not in peaked.LEFT_OUT]
    sinks = [case for case in shown if isinstance(case, Sinks)]
    assert len(shown) <= 40 and {case for case in peaked.CASES if isinstance(case, Loud)} <= set(shown)
    plain = {(case.mass, case.kv_len) for case in sinks if case == Sinks(case.mass, case.kv_len)}
    assert plain == {(mass, kv_len) for mass in (0.5, 0.8, 0.95) for kv_len in (8192, 32768, 119056)}
    assert {(case.count, case.place) for case in sinks} == {
        (count, place) for count in (1, 4) for place in ("front", "middle", "behind")
    }
