"""The ways to choose an implementation, what is saved of the choice, and models that ignore it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sage_hf import record
from sage_hf.names import NAMES
from sage_hf.transformers import attention_layers, register, unsupported
from sage_hf.transformers.layers import refusal
from tests.helpers import model_zoo
from tests.helpers.forks import Forks
from tests.helpers.tiny_transformers import MODELS, SERVED, calls_interface, run

LLAMA, CLIP = MODELS["llama"], MODELS["clip"]


def recipes(model: nn.Module) -> dict[str, str]:
    """Return the recipe that the layers of each of the model's parts are asked for."""
    run(model, **(CLIP if "Clip" in type(model).__name__ or hasattr(model, "vision_model") else LLAMA).inputs())
    return {
        name.split(".")[0]: plan.request.recipe
        for name, layer in attention_layers(model).items()
        for plan in record.last_plans(layer)
    }


def test_every_recipe_and_fallback_has_a_name_with_attention_and_mask() -> None:
    assert set(NAMES) == {
        "sage_exact",
        *(
            f"{recipe}{end}"
            for recipe in ("sage1", "sage2", "sage3", "sage3_paper", "sage_bwd", "sage_bwd_int8")
            for end in ("", "_native", "_emulate", "_error")
        ),
    }
    for name in NAMES:
        assert name in ALL_ATTENTION_FUNCTIONS.valid_keys()
        assert name in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()
        assert "flash" not in name
        assert "sdpa" not in name


def test_registering_again_changes_nothing() -> None:
    check = transformers.PreTrainedModel.get_correct_attn_implementation
    register()
    assert transformers.PreTrainedModel.get_correct_attn_implementation is check


@pytest.mark.audit
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("sage_hf", "transformers.modeling_utils"),
        ("sage_hf.transformers.masks", "transformers.modeling_utils"),
        ("transformers.modeling_utils", "sage_hf"),
    ],
)
def test_import_order_does_not_matter_and_sage_hf_imports_no_transformers(
    first: str, second: str, forks: Forks
) -> None:
    code = f"""
import sys, importlib
importlib.import_module({first!r})
assert ("transformers" in sys.modules) == {first!r}.startswith("transformers")
importlib.import_module({second!r})
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
assert "sage3" in ALL_ATTENTION_FUNCTIONS.valid_keys() and "sage3" in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()
"""
    forks.run(code)


@pytest.mark.audit
def test_a_transformers_with_moved_internals_still_imports(forks: Forks) -> None:
    output = forks.run("""
import logging
logging.basicConfig(format="%(message)s", force=True, level=logging.WARNING, stream=__import__("sys").stdout)
from sage_kernels.runtime.import_hook import when_imported
when_imported("transformers.modeling_utils", lambda module: delattr(module, "AttentionInterface"), "")
import sage_hf
import transformers.modeling_utils
config = transformers.LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, vocab_size=9,
                                  num_attention_heads=2)
transformers.LlamaModel(config)
""")
    assert output.count("siblings will not work: transformers.modeling_utils is not as expected: AttributeError") == 1


def test_from_config_from_pretrained_and_set_attn_implementation_switch(tmp_path: Path) -> None:
    model = LLAMA.build("sage3")
    assert recipes(model) == {"model": "sage3"}
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sage2")
    assert recipes(loaded) == {"model": "sage2"}
    loaded.set_attn_implementation("sage1")
    assert recipes(loaded) == {"model": "sage1"}
    loaded.set_attn_implementation("sdpa")
    assert torch.equal(run(loaded, **LLAMA.inputs()), run(LLAMA.build("sdpa"), **LLAMA.inputs()))


def test_nothing_is_written_to_the_saved_config(tmp_path: Path) -> None:
    for tiny in (LLAMA, CLIP):
        tiny.build("sage3").save_pretrained(tmp_path / "ours")
        tiny.build("eager").save_pretrained(tmp_path / "eager")
        ours, eager = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "eager"))
        assert ours == eager
        reloaded = type(tiny.build("eager")).from_pretrained(tmp_path / "ours")
        assert reloaded.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("how", ["from_config", "from_pretrained", "set_attn_implementation"])
def test_nested_dictionaries_switch_a_part(how: str, tmp_path: Path) -> None:
    choice = {"text_config": "sage3", "vision_config": "sage_exact", "": "sdpa"}
    if how == "from_config":
        model = transformers.CLIPModel._from_config(CLIP.make_config(), attn_implementation=choice)
    elif how == "from_pretrained":
        CLIP.build("eager").save_pretrained(tmp_path)
        model = transformers.CLIPModel.from_pretrained(tmp_path, attn_implementation=choice)
    else:
        model = CLIP.build("eager")
        model.set_attn_implementation(choice)
    assert recipes(model.eval()) == {"text_model": "sage3", "vision_model": "exact"}


def test_fallback_error_refuses_on_this_device_and_emulate_runs() -> None:
    from sage_kernels.dispatch.plan import KernelUnavailableError

    with pytest.raises(KernelUnavailableError):
        run(LLAMA.build("sage3_error"), **LLAMA.inputs())
    model = LLAMA.build("sage3_emulate")
    run(model, input_ids=LLAMA.inputs()["input_ids"][:, :20])
    assert {record.last_plans(layer)[0].numerics for layer in attention_layers(model).values()} == {"emulated"}


IGNORING = ["bloom", "gpt_neo", "falcon", "longt5"]
"""Types that do not look up attention functions, or not for all of their attention."""


@pytest.mark.parametrize("name", IGNORING)
def test_an_unsupported_model_warns_once_and_runs_by_default(name: str, hf_log: pytest.LogCaptureFixture) -> None:
    inputs = MODELS["t5" if name == "longt5" else "llama"].inputs("right" if name == "longt5" else "left")
    expected = run(model_zoo.build(name, None), **inputs)
    assert "cannot run" not in hf_log.text
    model = model_zoo.build(name, "sage3")
    messages = [record.message for record in hf_log.records if "cannot run" in record.message]
    assert len(messages) == 1
    assert messages[0].startswith(f'{type(model).__name__} cannot run attn_implementation="sage3" and runs "')
    assert torch.equal(run(model, **inputs), expected)
    assert attention_layers(model) == {}
    assert messages[0].endswith(unsupported(model))


def test_a_model_that_expects_a_kernel_to_pick_keys_runs_as_it_would_by_default(
    hf_log: pytest.LogCaptureFixture,
) -> None:
    if "deepseek_v32" not in model_zoo.NAMES:
        pytest.skip("this transformers has no DeepSeek V3.2")
    reason = "Attention hands indices="
    expected = run(model_zoo.build("deepseek_v32", None), **LLAMA.inputs())
    model = model_zoo.build("deepseek_v32", "sage3")
    assert reason in hf_log.text
    assert torch.equal(run(model, **LLAMA.inputs()), expected)
    assert reason in str(unsupported(model))


def test_the_part_next_to_one_that_picks_keys_is_not_refused() -> None:
    modeling = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    assert "MiniMaxM3VLAttention hands block_indices=" in str(refusal(modeling.MiniMaxM3VLTextModel))
    assert refusal(modeling.MiniMaxM3VLVisionModel) is None


def test_a_model_that_cannot_run_ours_is_warned_of_when_loaded(
    tmp_path: Path, hf_log: pytest.LogCaptureFixture
) -> None:
    model_zoo.build("bloom", "eager").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sage3")
    assert "BloomForCausalLM cannot run" in hf_log.text
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["bloom", "longt5"])
def test_a_model_that_cannot_run_ours_is_warned_of_when_switched(name: str, hf_log: pytest.LogCaptureFixture) -> None:
    model = model_zoo.build(name, "eager")
    model.set_attn_implementation("sage3")
    assert any(record.levelname == "WARNING" and type(model).__name__ in record.message for record in hf_log.records)
    assert model.config._attn_implementation == "eager"


def test_other_implementations_and_served_models_are_not_warned_of(hf_log: pytest.LogCaptureFixture) -> None:
    model_zoo.build("bloom", "eager")
    for tiny in SERVED:
        tiny.build("sage3")
    assert "cannot run" not in hf_log.text


def test_unsupported_says_why() -> None:
    assert unsupported(LLAMA.build("eager")) is None
    assert unsupported(model_zoo.build("bloom", "eager")) == (
        "transformers.models.bloom.modeling_bloom does not use transformers' attention interface"
    )
    assert unsupported(model_zoo.build("gpt_neo", "eager")).endswith("chooses among attention classes of its own")
    if calls_interface(MODELS["t5"]):  # then LongT5 does for its decoder, and not for its encoder
        assert unsupported(model_zoo.build("longt5", "eager")).endswith(
            "supports no attention implementation but its own"
        )
    assert unsupported(nn.Linear(2, 2)) == "Linear is not a transformers model"


def test_a_part_that_cannot_run_ours_does_not_keep_the_other_from_it() -> None:
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        MODELS["vit"].make_config(),
        transformers.TrOCRConfig(vocab_size=97, d_model=64, decoder_layers=1, decoder_attention_heads=4),
    )
    model = transformers.VisionEncoderDecoderModel._from_config(config, attn_implementation="sage3")
    assert len(attention_layers(model)) == 2
    assert all(name.startswith("encoder.") for name in attention_layers(model))
    assert unsupported(model) is None
    assert (model.encoder.config._attn_implementation, model.decoder.config._attn_implementation) == ("sage3", "eager")


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("gemma2", "sage3"),
        *(
            pytest.param(*case, marks=pytest.mark.audit)
            for case in (("llama", "sage3"), ("llama", "sage_exact"), ("mistral", "sage3"))
        ),
    ],
)
def test_a_forward_compiles_into_one_graph(name: str, implementation: str, no_recent_keys: None) -> None:
    """Compiled, causality is a mask, for transformers cannot tell from tensors whether sequences are packed."""
    tiny = MODELS[name]
    model, inputs = tiny.build(implementation), tiny.inputs()
    plain = run(model, **inputs, use_cache=False)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    output = run(compiled, **inputs, use_cache=False)
    assert (output - plain).abs().max() <= 1e-4 * plain.abs().max()


@pytest.mark.parametrize("padding", ["left", pytest.param("right", marks=pytest.mark.audit)])
def test_a_compiled_model_attends_to_padded_batches_as_the_model_does(padding: str) -> None:
    """Causality is said apart from the padding, so both have the latest keys of a row in 16 bits."""
    tiny = MODELS["llama"]
    model, inputs = tiny.build("sage3"), tiny.inputs(padding)
    plain = run(model, **inputs, use_cache=False)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    difference = (run(compiled, **inputs, use_cache=False) - plain)[inputs["attention_mask"].bool()]
    assert difference.abs().max() <= 1e-4 * plain.abs().max()
