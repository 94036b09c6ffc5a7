"""Loading a pipeline: devices, incomplete checkpoints and generation.json."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from sage_hf.app.pipelines import generation_defaults, load_pipeline, pick_device
from tests.helpers import tiny_pipelines as tiny


@pytest.mark.parametrize(
    ("component", "tensor"),
    [("transformer", "transformer_blocks.1.attn1.to_q.weight"), ("vae", "decoder.conv_in.conv.bias")],
)
def test_a_checkpoint_that_lacks_a_tensor_is_refused_naming_it(tmp_path, component, tensor):
    tiny.cogvideox().save_pretrained(tmp_path)
    path = tmp_path / component / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    del tensors[tensor]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ValueError, match=f"the files of {tmp_path / component} lack {tensor};"):
        load_pipeline(tmp_path, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", "--device 'gpu' is not a device"),
        ("cpu:3", "--device cpu:3: there are 1 CPU devices here"),
        ("cuda:99", "CUDA devices here"),
        ("meta", "--device meta is not supported"),
        ("xla", "--device xla is not supported"),
    ],
)
def test_a_device_that_cannot_be_used_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        pick_device(name)


@pytest.mark.parametrize("available", [True, False])
def test_mps_is_a_device_where_it_is_available(monkeypatch, available):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: available)
    if available:
        assert pick_device("mps") == torch.device("mps")
    else:
        with pytest.raises(ValueError, match="--device mps: there are 0 MPS devices here"):
            pick_device("mps")


@pytest.mark.parametrize("name", ["cpu", "cpu:0"])
def test_the_cpu_is_always_there(name):
    assert pick_device(name).type == "cpu"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (["a red ball"], "expected an object"),
        ({"prompts": "a red ball"}, "prompts: expected a list of strings"),
        ({"prompts": ["a red ball", 3]}, "prompts: expected a list of strings"),
        ({"prompts": [" "]}, "prompts: expected a list of strings"),
        ({"fps": 0}, "fps: expected an integer of at least 1, got 0"),
        ({"fps": 7.5}, "fps: expected an integer of at least 1, got 7.5"),
        ({"fps": True}, "fps: expected an integer"),
        ({"fps": "8"}, "fps: expected an integer"),
    ],
)
def test_generation_json_is_checked_naming_file_and_key(tmp_path, content, message):
    path = tmp_path / "generation.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"{path}: {message}"):
        generation_defaults(tmp_path)


def test_generation_json_that_is_right_is_taken_as_it_is(tmp_path):
    content = {"prompts": ["a red ball"], "fps": 8, "height": 64}
    (tmp_path / "generation.json").write_text(json.dumps(content))
    assert generation_defaults(tmp_path) == content
