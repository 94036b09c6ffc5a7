"""The benchmark of what FP4 attention needs before it attends: its phases, and public SageAttention3 beside it."""

import shutil

import preparation
import preparation_table
import pytest
import sageattention3
import torch


def test_a_phase_is_the_median_of_its_kernels_together():
    phases = {"sums": ("statistics",), "tokens": ("query", "key")}
    launches = [("sums", 1.0), ("tokens", 2.0), ("tokens", 3.0), ("fill", 9.0), ("sums", 2.0), ("tokens", 4.0)]
    launches += [("tokens", 7.0), ("sums", 6.0), ("tokens", 6.0), ("tokens", 5.0)]
    found = preparation.median_of_phases(launches, phases, calls=3)
    assert found == {"statistics": 2.0, "query": 4.0, "key": 5.0}
    with pytest.raises(ValueError, match="tokens was launched 5 times in 3 calls, not 2 in each"):
        preparation.median_of_phases(launches[:-1], phases, calls=3)


def checkout(folder, kernels):
    path = folder / sageattention3.FOLDER / sageattention3.KERNELS
    path.parent.mkdir(parents=True)
    path.write_text(kernels)
    return folder


def test_the_peer_s_kernels_are_taken_from_its_source_as_they_are(tmp_path):
    kernels = f"{sageattention3.FIRST_LINE} = 16;\n__global__ void scaled_fp4_quant_kernel() {{}}\n"
    folder = checkout(tmp_path, f"#include <torch/all.h>\n{kernels}{sageattention3.LINE_BEHIND}torch::Tensor) {{}}\n")
    source = sageattention3.launcher_source(folder)
    assert kernels in source and "torch" not in source


def test_what_the_peer_lacks_is_told(tmp_path, monkeypatch):
    with pytest.raises(sageattention3.Unavailable, match=r"fp4_quantization_4d\.cu is missing"):
        sageattention3.launcher_source(tmp_path)
    with pytest.raises(sageattention3.Unavailable, match=r"api\.py is missing"):
        sageattention3.load_api(tmp_path)
    with pytest.raises(sageattention3.Unavailable, match="do not lie between"):
        sageattention3.launcher_source(checkout(tmp_path / "other", "// nothing"))
    whole = checkout(tmp_path / "whole", f"{sageattention3.FIRST_LINE} = 16;\n{sageattention3.LINE_BEHIND}")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(sageattention3.Unavailable, match="nvcc is missing"):
        sageattention3.compile_quantizers(whole, tmp_path, (9, 0))


def test_the_peer_s_python_is_imported_without_its_extensions(tmp_path):
    path = tmp_path / sageattention3.FOLDER / sageattention3.API
    path.parent.mkdir(parents=True)
    path.write_text("import fp4attn_cuda\ndef triton_group_mean(q):\n    return q, q[:, :, :1]\n")
    query, key = torch.ones(1, 1, 128, 64), torch.arange(128.0)[:, None].expand(1, 1, 128, 64).clone()
    calls = sageattention3.smoothing(sageattention3.load_api(tmp_path), query, key)
    calls["smooth_key"]()
    assert key.mean() == 0
    assert calls["delta_scores"]().shape == (1, 1, 1, 128)
    path.write_text("import nothing_of_that_name")
    with pytest.raises(sageattention3.Unavailable, match="nothing_of_that_name"):
        sageattention3.load_api(tmp_path)


@pytest.mark.parametrize(("capability", "name"), [((9, 0), "90"), ((10, 0), "100a"), ((12, 1), "121a")])
def test_the_peer_is_compiled_for_the_architecture_that_its_build_names(capability, name):
    assert sageattention3.architecture_flag(capability) == f"-gencode=arch=compute_{name},code=sm_{name}"


def test_a_table_tells_a_lower_bound_and_what_does_not_run():
    sizes = {"batch": 2, "heads": 4, "tokens": 4096, "head_dim": 64}
    rows = [
        {"phase": "all", "kernels": "cuda", **sizes, "ms": 0.5, "copy_ms": 0.25},
        {"phase": "statistics", "kernels": "cuda", **sizes, "ms": 0.1},
        {"phase": "delta_scores", "kernels": "triton", **sizes, "ms": 0.125},
        {"phase": "all", "kernels": "sageattention3", **sizes, "ms": 0.75, "without": "conversion to e2m1"},
        {"phase": "delta_scores", "kernels": "sageattention3", **sizes, "unavailable": "nvcc is missing"},
    ]
    assert preparation_table.markdown({"rows": rows}).splitlines()[2:] == [
        "| 2 × 4 × 4,096 × 64 | ours, in CUDA C++ | 0.500 | 0.250 |  |",
        "| 2 × 4 × 4,096 × 64 | ours, in Triton |  |  | 0.125 |",
        "| 2 × 4 × 4,096 × 64 | public SageAttention3 | ≥ 0.750 |  | does not run |",
    ]
