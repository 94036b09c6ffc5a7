"""The grid of calls, its timing together with others, what is made of its rows; and the phases of our calls."""

import contextlib
import json
import math
import os
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import run
import torch
import torch.nn.functional as F

from sage_hf.app.cli import main
from sage_hf.bench import cases, grid, grid_tables, measure_grid, measure_phases, plots, providers, results, tables
from sage_hf.bench.cases import BenchCase, draw
from sage_hf.bench.grid import CASES, MOST_OPERATIONS
from sage_hf.bench.measure_grid import measure_case, sizes
from sage_hf.bench.measure_phases import WHOLE, phases
from sage_hf.bench.prewarm import call_in_processes
from sage_hf.bench.providers import PreparedCall, Provider
from sage_hf.bench.timing import KernelRun, TimedCall
from sage_hf.tune import tune
from sage_hf.tune.tune import unseen_points
from sage_kernels.dispatch.plan import KernelUnavailableError

CPU = torch.device("cpu")
FACTS = {"gpu": "NVIDIA H200", "capability": "9.0", "torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0"}
FACTS |= {"cudnn": 91900, "packages": {}, "commit": "0" * 40, "date": "2026-01-01"}
FORWARD = [case for case in CASES if not case.training]
TRAINING = [case for case in CASES if case.training]


class Event:
    """A mark at a given time."""

    def __init__(self, at: float) -> None:
        self.at = at

    def elapsed_time(self, later: "Event") -> float:
        return later.at - self.at


class FakeStream:
    """Takes the time of each provider from a table, in place of a GPU."""

    device = CPU

    def __init__(self, times: dict[str, float] | None = None) -> None:
        self.times, self.replayed, self.latest, self.running = times or {}, [], 0.0, ""

    def once_ms(self, call):
        call()
        return self.latest

    def prepare(self, call, context):
        call()
        self.replayed.append(self.running)
        timed = TimedCall(call, context, calls=2, host_times=[7.0])
        timed.marks.append((Event(0.0), Event(2 * self.times.get(self.running, 1.0))))
        return timed

    def take_host_times(self, timed):
        pass

    replay = take_host_times


def tiny(case: BenchCase) -> BenchCase:
    """The case's kind and mask, at sizes for a CPU."""
    group = 2 if case.q_heads != case.kv_heads else 1
    q_len = 1 if case.q_len == 1 else 90 if case.q_len != case.kv_len else 150
    return replace(case, batch=2, q_heads=2 * group, kv_heads=2, q_len=q_len, kv_len=150, head_dim=64)


def row(case: BenchCase, ours_ms: float = 1.0, **values) -> dict:
    found = {"ours_ms": ours_ms, "best_ms": 1.0, "best": "cudnn", "ours_host_us": 40.0, "best_host_us": 20.0}
    return sizes(case) | found | {"recipe": "sage2", "kernel": "k", "reason": "", "rel_l1": 0.01} | values


def test_the_grid_has_every_kind_of_call_in_every_size():
    assert len(FORWARD) >= 300 and len(TRAINING) >= 60 and len(set(CASES)) == len(CASES)
    assert {case.mask for case in FORWARD} == set(cases.MaskName.__args__) - {"causal_lengths"}
    head_dims = {case.head_dim for case in FORWARD}
    assert min(head_dims) == 32 and max(head_dims) == 256 and len(head_dims) > 12
    assert min(case.q_len for case in FORWARD) == 1 and max(case.kv_len for case in FORWARD) == 131072
    cross = [case for case in FORWARD if case.name == "cross-attention"]
    assert {77, 512} <= {case.kv_len for case in cross} and all(77 <= case.kv_len <= 512 for case in cross)
    assert sum(case.q_heads != case.kv_heads for case in FORWARD) > 30
    assert min(Counter(case.name for case in CASES).values()) >= 5


def test_every_point_is_a_call_that_fits_a_gpu():
    for case in CASES:
        sizes = (case.batch, case.kv_heads, case.q_len, case.head_dim)
        assert min(sizes) >= 1 and case.q_heads % case.kv_heads == 0, case
        operations = case.dense_operations * (cases.BACKWARD if case.training else 1)
        assert operations <= MOST_OPERATIONS or case.batch * case.q_heads == 1, case
        bytes_of_a_score = {"none": 0, "causal": 0, "lengths": 0, "keys": 0, "bias": 2 * case.q_heads}
        assert bytes_of_a_score.get(case.mask, 1) * case.q_len * case.kv_len <= 2**30, case
        assert case.mask != "lower_right" or case.q_len < case.kv_len, case


def test_masks_say_what_their_names_say(monkeypatch):
    monkeypatch.setattr(cases, "WINDOW", 20)
    monkeypatch.setattr(cases, "DOCUMENT", 40)
    base = BenchCase("any", 3, 2, 2, 150, 150, 16)
    masks = {name: draw(replace(base, mask=name), CPU) for name in cases.MaskName.__args__}
    assert masks["none"].mask is None and masks["causal"].mask is None and masks["causal"].case.upper_left
    lengths = masks["lengths"]
    assert torch.equal(lengths.mask.sum(-1).flatten(), lengths.lengths) and lengths.mask[:, 0, 0, 0].all()
    keys = masks["keys"].mask[:, 0, 0]
    assert keys[:, 0].all() and keys[:, -1].all() and not keys.all(-1).any() and masks["keys"].lengths is None
    distance = torch.arange(150)[:, None] - torch.arange(150)
    assert torch.equal(masks["window"].mask[0, 0], distance.abs() <= 20)
    documents = torch.arange(150) // 40
    assert torch.equal(masks["documents"].mask[0, 0], documents[:, None] == documents)
    assert masks["bias"].mask.shape == (1, 2, 150, 150) and masks["bias"].mask.dtype == torch.bfloat16
    chunk = draw(replace(base, q_len=90, mask="lower_right"), CPU)
    query, key, value = chunk.query, chunk.key, chunk.value
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=chunk.lower_right)
    assert torch.equal(expected, F.scaled_dot_product_attention(query, key, value, attn_mask=chunk.mask))
    again = draw(replace(base, mask="keys"), CPU)
    assert torch.equal(again.query, masks["keys"].query) and torch.equal(again.mask, masks["keys"].mask)


@pytest.mark.parametrize("case", {(case.name, case.mask, case.training): case for case in CASES}.values(), ids=str)
def test_ours_and_pytorchs_backends_compute_the_same_at_every_kind_of_call(case, monkeypatch):
    stream = FakeStream({"sdpa_math": 0.5, "sdpa_fa2": 0.75})
    told_apart(stream, monkeypatch)
    found = measure_case(tiny(case), stream)
    assert found["rel_l1"] < 0.03 and found["ours_ms"] == 1.0 and found["ours_host_us"] == 7.0
    assert found["best"] == found["pytorch"] == "sdpa_math" and found["best_ms"] == 0.5
    assert found["others_ms"]["sdpa_math"] == 0.5 and "fa3" not in found["others_ms"]
    assert (found["recipe"], found["kernel"]) == (
        ("exact", "sdpa") if case.q_len == 1 else ("sage_bwd" if case.training else "sage2", "reference")
    )
    assert json.loads(json.dumps(found)) == found


def told_apart(stream: FakeStream, monkeypatch) -> None:
    """Let the stream know whose call it prepares."""
    made = measure_grid.grid_call

    def grid_call(provider, inputs):
        call = made(provider, inputs)

        def run():
            stream.running = provider.name
            return call()

        return run

    monkeypatch.setattr(measure_grid, "grid_call", grid_call)


def provider(name: str, ms: float = 0.0, error: str = "") -> Provider:
    def prepare(inputs):
        def call():
            if error:
                raise RuntimeError(f"{error}\nmore")
            stream.latest = ms
            return torch.ones_like(inputs.query)

        return PreparedCall(call)

    stream = provider.stream
    return Provider(name, name, prepare)


def test_failures_are_reported_and_hopeless_providers_are_not_measured(monkeypatch):
    stream = provider.stream = FakeStream({"good": 10.0, "fair": 12.0})
    monkeypatch.setattr(measure_grid, "watch", lambda ran: _Watch(ran))
    told_apart(stream, monkeypatch)
    case = tiny(FORWARD[0])

    def measured(*providers):
        monkeypatch.setattr(measure_grid, "GRID_PROVIDERS", providers)
        return measure_case(case, stream)

    ours = provider("sage_hf:ours", 1.0)
    others = (
        provider("broken", error="refused"),
        provider("good", 10.0),
        provider("fair", 15.0),
        provider("bad", 25.0),
    )
    found = measured(ours, *others)
    # Ours does not make the others hopeless, and what takes less than a millisecond is measured in any case.
    assert (
        stream.replayed == ["sage_hf:ours", "good", "fair"] and found["best"] == "good" and "unavailable" not in found
    )
    stream.replayed.clear()
    measured(ours, provider("a", 0.1), provider("b", 0.9))
    assert stream.replayed == ["sage_hf:ours", "a", "b"]
    assert measured(ours, provider("broken", error="refused"))["unavailable"] == "broken: RuntimeError: refused"
    failed = measured(provider("sage_hf:ours", error="no kernel"), provider("good", 1.0))
    assert failed["unavailable"] == "sage_hf:ours: RuntimeError: no kernel" and "ours_ms" not in failed


class _Watch:
    def __init__(self, ran):
        ran.append({"recipe": "sage2", "kernel": "k", "reason": ""})

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def test_rows_are_written_when_a_kernel_takes_the_gpu_away(monkeypatch):
    class Broken(FakeStream):
        def __init__(self, device):
            super().__init__()
            self.points = 0

        def entered(self):
            return contextlib.nullcontext(self)

        def synchronize(self):
            self.points += 1
            if self.points == 2:
                raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    written = []
    monkeypatch.setattr(measure_grid, "TimingStream", Broken)
    monkeypatch.setattr(measure_grid, "warm", lambda cases: None)
    monkeypatch.setattr(measure_grid, "facts", lambda device: FACTS)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    points = [tiny(case) for case in FORWARD[:3]]
    with pytest.raises(RuntimeError, match=f"failed at {points[1].name}, {points[1]}; --resume times the"):
        measure_grid.run(CPU, points, progress=lambda line: None, write=written.append)
    first, second = written[-1]["rows"]
    assert first["ours_ms"] == 1.0 and "illegal memory access" in second["unavailable"]


def test_the_summary_counts_shares_and_means():
    first, second, third = FORWARD[0], next(case for case in FORWARD if case.kv_len >= 4096), FORWARD[-1]
    first, second, third = (replace(case, name="a") for case in (first, second, third))
    rows = [row(first, 2.0), row(second, 0.5), row(replace(third, name="b"), recipe="exact", ours_host_us=90.0)]
    result = {**FACTS, "rows": [*rows, sizes(TRAINING[0]) | {"unavailable": "ours: no"}]}
    header, cells = grid_tables.summary(result)
    assert len(header) == len(cells[0]) and [line[0] for line in cells] == ["a", "b", "all"]
    assert cells[0][1:7] == ["2", "2", "50%", "1.00", "0.50", "2.00"] and cells[0][7] == "100%"
    assert cells[1][2] == "0" and cells[1][7] == "0%"
    assert cells[2][3] == "67%" and cells[2][5] == "0.50"
    assert grid_tables.worst(result)[1][0][5] == "0.50"
    assert f"{TRAINING[0].name}, {TRAINING[0]}: ours: no" in grid_tables.text(result)
    assert "NVIDIA H200" in grid_tables.markdown(result)
    assert grid_tables.summary({**FACTS, "rows": []})[1] == [["all", "0", "0", "–", "nan", "–", "–", "–"]]


def test_the_heat_map_shows_means_by_tokens_and_kind(tmp_path):
    case = replace(FORWARD[0], q_len=3000, kv_len=100)
    result = {**FACTS, "rows": [row(case, 0.5), row(replace(case, q_len=3001), 2.0), row(replace(case, q_len=1), 0.25)]}
    kinds, columns, speeds = grid_tables.cells(result)
    assert kinds == [case.name] and columns[0] == "1–" and columns[-1] == "32k+"
    assert speeds[0][columns.index("2k–")] == pytest.approx(1.0) and speeds[0][0] == 4.0
    assert sum(math.isnan(speed) for speed in speeds[0]) == len(columns) - 2
    picture = plots.plot_grid(result, tmp_path / "grid.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_rows_of_other_calls_stay_if_all_facts_are_the_same(tmp_path):
    path = tmp_path / "rows.json"
    now = {**FACTS, "date": "now"}
    assert results.earlier_rows(path, now) == []
    results.write(path, {**FACTS, "date": "before", "rows": [row(CASES[1]), row(CASES[0], 3.0)]})
    earlier = results.earlier_rows(path, now)
    order = [grid_tables.key(sizes(case)) for case in CASES]
    merged = results.merged([row(CASES[2]), row(CASES[1], 2.0)], earlier, grid_tables.key, order)
    assert [one["ours_ms"] for one in merged] == [3.0, 2.0, 1.0]
    assert results.earlier_rows(path, {**now, "commit": "1" * 40}) == results.earlier_rows(path, now, "others") == []


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which some rows are measured at once; returns the calls asked for."""
    asked = []

    def measure(device, cases, progress, write):
        asked.append(cases)
        write({**FACTS, "rows": [row(case, ms) for case, ms in zip(cases, (0.5, 1.05, 2.0), strict=False)]})

    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(results, "facts", lambda device: FACTS)
    monkeypatch.setattr(measure_grid, "run", measure)
    return asked


def test_the_command_times_what_is_asked_for_and_resumes(gpu, tmp_path, capsys):
    arguments = ["bench", "--grid", "--shapes", "window", "documents", "--output", str(tmp_path)]
    assert main(arguments) == 0 and main([*arguments, "--resume"]) == 0
    chosen = [case for case in CASES if case.name in ("window", "documents")]
    assert gpu == [chosen, chosen[3:]]
    path = tmp_path / "nvidia-h200-grid.json"
    assert len(json.loads(path.read_text())["rows"]) == 6 and path.with_suffix(".png").exists()
    assert "ours is faster by" in capsys.readouterr().out
    assert main(["bench", "--grid", "--training", "--output", str(tmp_path)]) == 0 and gpu[2] == TRAINING
    assert main(["bench", "--grid", "--only", "causal, .*×192,", "--output", str(tmp_path)]) == 0
    assert gpu[3] and {(case.name, case.head_dim) for case in gpu[3]} == {("causal", 192)}


def test_unseen_calls_are_scored_for_each_table_of_costs(gpu, monkeypatch, tmp_path, capsys):
    for table in ("shipped", "tuned"):
        monkeypatch.setattr(run, "table_in_use", lambda device, table=table: table)
        run.main(["--unseen", "5", "--calls", "30", "--output", str(tmp_path)])
    assert gpu[0] == gpu[1] and len(gpu[0]) == 30 and gpu[0] != unseen_points(30, 6)
    assert "of `sage-hf tune`" in capsys.readouterr().out
    result = json.loads((tmp_path / "nvidia-h200-unseen.json").read_text())
    assert len(result["rows"]) == 6
    assert {(one["seed"], one["table"]) for one in result["rows"]} == {(5, "shipped"), (5, "tuned")}
    header, cells = grid_tables.unseen([result])
    assert [line[:2] for line in cells] == [["NVIDIA H200", "that ships"], ["NVIDIA H200", "of `sage-hf tune`"]]
    assert [line[2:] for line in cells] == [["3", "3", "33%", "67%", "33%, 67%", "0.98", "0.50"]] * 2
    assert len(header) == 9
    assert "drawn by seed 5" in grid_tables.unseen_markdown([result])


def test_no_unseen_call_is_among_those_that_tune_measures(monkeypatch):
    drawn = grid.drawn(20, 3)
    assert unseen_points(20, 3) == drawn == grid.drawn(20, 3) != grid.drawn(20, 4)
    monkeypatch.setattr(tune, "points", lambda: drawn[:1])
    assert unseen_points(20, 3) == drawn[1:]


def test_the_command_refuses_what_does_not_fit_together(monkeypatch, capsys):
    def refused(*argv):
        assert main(["bench", *argv]) == 2
        return capsys.readouterr().err

    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert "needs a CUDA device" in refused("--grid") and "needs a CUDA device" in refused("--phases")
    assert "unknown nothing; choose from: self-attention; " in refused("--grid", "--shapes", "nothing")
    assert "--grid takes no --providers" in refused("--grid", "--providers", "cudnn")
    assert "a benchmark of shapes takes no --resume" in refused("--resume")
    assert "no call of the grid contains that" in refused("--grid", "--only", "nothing")
    assert "--phases takes no --training" in refused("--phases", "--training")
    with pytest.raises(SystemExit):
        main(["bench", "--grid", "--phases"])


def test_a_phase_counts_from_the_end_of_the_one_before():
    call = [
        KernelRun("statistics", 10.0, 14.0),
        KernelRun("quantize", 11.0, 20.0),
        KernelRun("int8_forward", 19.0, 50.0),
    ]
    later = [KernelRun(one.kernel, one.start + 100, one.end + 102) for one in call]
    found = phases([call, call, later])
    assert list(found) == ["statistics", "quantize", "attention", WHOLE]
    assert [ms for ms, _ in found.values()] == pytest.approx([4e-3, 6e-3, 30e-3, 40e-3])
    assert found["attention"][1] == ["int8_forward"]
    gap = [KernelRun("key_statistics", 0.0, 1.0), KernelRun("value_statistics", 3.0, 5.0)]
    assert [ms for ms, _ in phases([gap]).values()] == pytest.approx([3e-3, 5e-3])


def test_calls_in_other_processes_run_once_and_may_fail(tmp_path):
    folders = [tmp_path / name for name in ("a", "b", "a")]  # The last one is there already.
    call_in_processes(os.mkdir, folders)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_the_shares_of_a_copy_are_those_of_the_bytes_of_a_phase(monkeypatch):
    case = BenchCase.square("small", (1, 2, 2, 100, 64))
    spans = [[KernelRun("statistics", 0.0, 10.0), KernelRun("quantize", 10.0, 30.0)]]
    found = {"operands of sage2": (lambda: None, 200_000)}
    monkeypatch.setattr(measure_phases, "quantizers", lambda inputs, recipes: found)
    monkeypatch.setattr(measure_phases, "profiled", lambda call: spans)
    rows = measure_phases.measure_case(case, CPU, 1e10)
    shares = {one["phase"]: one for one in rows if one["what"] == "operands of sage2"}
    read = 2 * 2 * 100 * 64 * 2  # K and V
    assert [shares[phase]["bytes"] for phase in ("statistics", "quantize", WHOLE)] == [read, 200_000 - read, 200_000]
    assert shares["statistics"]["copy_share"] == pytest.approx(read / 10e-6 / 1e10)
    assert {one["what"] for one in rows} == {"sage1", "sage2", "sage3", "operands of sage2"}
    assert all("copy_share" not in one for one in rows if one["what"] == "sage2")
    result = {**FACTS, "copy_bandwidth": 1e10, "rows": [*rows, {"shape": "x", "what": "all", "unavailable": "E: no"}]}
    share = f"{shares['quantize']['copy_share']:.0%}"
    assert "x, all: E: no" in tables.phases_text(result) and share in tables.phases_text(result)
    line = next(line for line in tables.phases_markdown(result).splitlines() if "operands of sage2" in line)
    assert line.startswith("| 1×2×100×64 | operands of sage2 | 0.0100 | 0.0200 | – | 0.0300 | ") and share in line


def test_a_recipe_without_a_kernel_is_quantised_by_its_own_quantiser(monkeypatch):
    """On Hopper a long call of `sage3` runs by `sage2`, whose quantiser knows no NVFP4."""

    def select(request, fallback="native"):
        if request.recipe == "sage3" and fallback == "error":
            raise KernelUnavailableError("sage3")
        return SimpleNamespace(quantizer="int8_quantize_hopper")

    def quantizer(name):
        return SimpleNamespace(quantize=lambda call: SimpleNamespace(codes=call.key.new_zeros(len(name))))

    monkeypatch.setattr(providers, "select", select)
    monkeypatch.setattr(providers, "_quantizer", quantizer)
    inputs = draw(BenchCase.square("small", (1, 2, 2, 100, 64)), CPU)
    found = {
        name: len(quantize().codes) for name, (quantize, _) in providers.quantizers(inputs, ("sage1", "sage3")).items()
    }
    names = {"operands of sage1, Hopper": "int8_quantize_hopper", "operands of sage3": "nvfp4_quantize"}
    assert found == {what: len(name) for what, name in names.items()}
