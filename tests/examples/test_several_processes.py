"""Examples on several processes: they render what one process does, one of them writes, and all end together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import diffusers
import imageio.v3 as imageio
import numpy as np
import pytest
import torch

from sage_hf.app.cli import generate_main
from sage_hf.app.processes import Processes
from tests.helpers import example_processes

ROOT = Path(__file__).parents[2]
SETTINGS = "--no-cpu-offload --no-vae-tiling --config sage2 --fallback emulate"
SETTINGS += " --height 32 --width 32 --frames 9 --steps 2 --fps 8"
sharded = pytest.mark.skipif(not hasattr(diffusers, "ContextParallelConfig"), reason="this diffusers has none")


@pytest.fixture(scope="module")
def hunyuan_video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.helpers import tiny_pipelines as tiny

    folder = tmp_path_factory.mktemp("hunyuan-video")
    tiny.hunyuan_video().save_pretrained(folder)
    return folder


def arguments(pipeline: Path, output: Path) -> list[str]:
    return [*SETTINGS.split(), "--pretrained", str(pipeline), "--prompt", "cat", "--compare", "--output", str(output)]


def run_two(failing: int, given: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", example_processes.__name__, str(failing), "examples/generate_hunyuanvideo.py", *given]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@sharded
@pytest.mark.audit
@pytest.mark.parametrize("mode", ["--ulysses", "--ring"])
def test_two_processes_render_the_videos_of_one_which_the_first_writes(mode: str, hunyuan_video: Path, tmp_path: Path):
    one, two = tmp_path / "one", tmp_path / "two"
    assert generate_main(arguments(hunyuan_video, one), description="") == 0
    run = run_two(-1, [*arguments(hunyuan_video, two), mode, "2"])
    assert run.returncode == 0, run.stderr
    files = sorted(path.name for path in two.iterdir())
    assert files == sorted(path.name for path in one.iterdir())
    assert sorted(line for line in run.stderr.splitlines() if "wrote" in line) == sorted(
        f"wrote {two / name}" for name in files
    )
    assert run.stdout.count("PSNR") == 1
    for name in ("01-exact.mp4", "01-sage2.mp4"):
        of_one, of_two = (imageio.imread(folder / name).astype(np.int16) for folder in (one, two))
        assert np.abs(of_one - of_two).mean() < 0.5  # a rounding of the model turns a pixel's value by 1
    reports = [json.loads((folder / "report.json").read_text()) for folder in (one, two)]
    assert reports[1]["complete"] and "2 processes" in reports[1]["device"]
    ran = [[(row["layer"], row["recipe"], row["calls"]) for row in report["layers"]] for report in reports]
    assert ran[0] == ran[1]


@sharded
@pytest.mark.audit
@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_that_fails_ends_all(failing: int, hunyuan_video: Path, tmp_path: Path):
    run = run_two(failing, [*arguments(hunyuan_video, tmp_path), "--ulysses", "2"])
    assert run.returncode != 0 and "error: this process fails" in run.stderr
    report = tmp_path / "report.json"
    assert not report.exists() or not json.loads(report.read_text())["complete"]


def test_a_number_of_processes_that_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refusal(*given: str) -> str:
        assert generate_main(["--prompt", "cat", "--output", str(tmp_path), *given], description="") == 2
        return capsys.readouterr().err

    assert "torchrun --nproc-per-node 4" in refusal("--ulysses", "2", "--ring", "2")
    assert "--ring must be at least 1, got 0" in refusal("--ring", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "2 run" in refusal()
    assert not list(tmp_path.iterdir())


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    processes = Processes(ulysses=2)
    assert processes.device_of(torch.device("cuda")) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="cuda:0 is one GPU for 2 processes"):
        processes.device_of(torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="this host has 1"):
        processes.device_of(torch.device("cuda"))
