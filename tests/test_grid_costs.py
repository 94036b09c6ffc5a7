"""Check which calls of a grid a table of costs learns, and at what cost."""

import json

import pytest
import routing

from sage_hf.bench.fit_costs import Measured, extended
from sage_hf.bench.grid_costs import measured_on_grid
from sage_kernels import costs
from sage_kernels.costs import Table
from sage_kernels.curves import Curve, Sizes

SIZES = {"batch": 1, "q_heads": 24, "kv_heads": 24, "q_len": 1000, "kv_len": 1000, "head_dim": 128}


def row(mask="none", direction="forward", recipe="exact", kernel="sdpa", **values):
    phases = {"recipe": recipe, "kernel": kernel, "quantizer": "quantizer", "backward": "backward"}
    others = {"cudnn": 0.03, "sdpa_fa2": 0.04, "sdpa_efficient": 0.05, "sdpa_math": 0.9, "fa3": 0.02}
    found = {"mask": mask, "direction": direction, "ours_ms": 0.01, "others_ms": others}
    return SIZES | phases | found | values


def runners(one):
    return {found.runner: found.us for found in measured_on_grid([one])}


def curve(runner="cudnn", head_dim=128, **values):
    return Curve(
        *(runner, head_dim, "none", False, 128, 264, True), launch=8, token=0.01, item=1.5, tile=0.3, score=0, **values
    )


def test_a_row_tells_the_time_of_every_runner_that_had_the_call():
    assert runners(row()) == {"cudnn": 30.0, "flash": 40.0, "efficient": 50.0, "fa3": 20.0}
    assert runners(row(kernel="exact_forward"))["exact_forward"] == 10.0
    assert runners(row(recipe="sage2", kernel="k"))["sage2 by k, quantizer"] == 10.0


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        ("lengths", {"cudnn", "efficient", "fa3_padded"}),
        ("lower_right", {"flash", "fa3"}),
        ("keys", set()),
        ("window", set()),
    ],
)
def test_times_that_hang_on_what_a_mask_hides_are_left_out(mask, names):
    assert set(runners(row(mask))) == names


def test_beside_lengths_flash_attention_3_takes_one_more_launch_unless_it_divides_keys():
    assert 20.0 < runners(row("lengths"))["fa3_padded"] < 25.0
    assert runners(row("lengths", kernel="fa3_padded"))["fa3_padded"] == 10.0
    assert "fa3_padded" not in runners(row("lengths", q_len=1))


def test_training_has_runners_of_its_own():
    found = runners(row(direction="forward_backward", recipe="sage_bwd", kernel="k"))
    low_bit = costs.training_runner("sage_bwd", "k", "quantizer", "backward")
    assert found[low_bit] == 10.0 and found[f"cudnn{costs.TRAINING}"] == 30.0
    assert not runners(row(direction="forward_backward"))


def test_a_row_without_times_tells_nothing():
    assert not list(measured_on_grid([{"mask": "none", "unavailable": "no memory"}]))


def test_a_table_knows_what_it_learnt_and_keeps_the_rest():
    known, learnt = Sizes(1, 8, 8, 500, 500, 128), Sizes(**SIZES)
    table = extended(Table("a GPU", (9, 0), {}, (curve(),)), [Measured("cudnn", "none", False, known, 77.0)])
    table = extended(table, [Measured("cudnn", "none", False, learnt, 55.0)])
    table = extended(table, [Measured("cudnn", "none", False, learnt, 66.0)])
    (found,) = table.curves
    assert found.us(known) == pytest.approx(77.0) and found.us(learnt) == pytest.approx(66.0)
    assert len(found.measured) == 2


@pytest.mark.parametrize(("slower", "drift"), [(1.05, 1.05), (1.5, 1.0)])
def test_what_a_run_has_not_measured_is_as_much_slower_there_as_the_rest(slower, drift):
    sizes = Sizes(**SIZES)
    measured = [Measured(name, "none", False, sizes, us) for name, us in (("cudnn", 40.0), ("flash", 60.0))]
    table = extended(Table("a GPU", (9, 0), {}, (curve(), curve("flash"))), measured)
    table = extended(table, [Measured("cudnn", "none", False, sizes, 40.0 * slower)])
    found = {name: table.curve(name, "none", False, 128).us(sizes) for name in ("cudnn", "flash")}
    assert found == {"cudnn": pytest.approx(40.0 * slower), "flash": pytest.approx(60.0 * drift)}


def test_a_head_dim_that_a_table_lacks_gets_the_next_larger_ones_formula():
    sizes = Sizes(1, 24, 24, 1000, 1000, 72)
    table = Table("a GPU", (9, 0), {}, (curve(), curve(head_dim=64)))
    measured = [Measured("cudnn", "none", False, sizes, 99.0), Measured("another", "none", False, sizes, 1.0)]
    table = extended(table, measured)
    assert [found.head_dim for found in table.curves] == [64, 72, 128]
    assert table.curve("cudnn", "none", False, 72).us(sizes) == pytest.approx(99.0)


def test_the_script_extends_a_table_by_a_grid(monkeypatch, tmp_path, capsys):
    grid, table = tmp_path / "grid.json", tmp_path / "table.json"
    grid.write_text(json.dumps({"rows": [row()]}))
    Table("a GPU", (9, 0), {}, (curve(),)).write(table)
    monkeypatch.setattr("sys.argv", ["routing.py", "--grid", str(grid), "--table", str(table)])
    routing.main()
    (found,) = costs.read_table(table).curves
    assert found.us(Sizes(**SIZES)) == pytest.approx(30.0, rel=1e-4)
    monkeypatch.setattr("sys.argv", ["routing.py", "--grid", str(grid)])
    with pytest.raises(SystemExit):
        routing.main()
    assert "--table" in capsys.readouterr().err
