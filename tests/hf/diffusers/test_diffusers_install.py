"""`import sage_hf` completes diffusers, whichever of the two is imported first, and imports nothing of it."""

from __future__ import annotations

import pytest

from sage_hf.diffusers import SageAttn3Processor
from tests.helpers.families import family

CHECK = """
from diffusers import AttentionBackendName, MochiTransformer3DModel, attention_backend
from diffusers.models.attention_processor import MochiAttention
from sage_hf import SageAttn3Processor
assert AttentionBackendName("sage3_emulate")
model = MochiTransformer3DModel(
    num_attention_heads=2, attention_head_dim=16, num_layers=1, pooled_projection_dim=8, text_embed_dim=16,
    time_embed_dim=8, max_sequence_length=4,
)
processor = SageAttn3Processor()
model.set_attn_processor(processor)
attention = model.transformer_blocks[0].attn1
assert isinstance(attention, MochiAttention) and attention.get_processor() is processor
assert model.attn_processors == {"transformer_blocks.0.attn1.processor": processor}
"""

NOT_IMPORTED = "import sage_hf, sys; assert 'diffusers' not in sys.modules and 'transformers' not in sys.modules"
TWICE = "from sage_hf.diffusers.install import install; install()"
ORDERS = {
    "sage_hf-first": f"{NOT_IMPORTED}; {TWICE}; from diffusers import MochiPipeline; install()",
    "diffusers-first": "from diffusers import MochiTransformer3DModel; import sage_hf",
    "processor-first": "from sage_hf import SageAttn3Processor",
}


@pytest.mark.audit
@pytest.mark.parametrize("first", ORDERS.values(), ids=ORDERS)
def test_diffusers_is_completed_in_every_order_of_imports(first, forks):
    forks.run(f"import warnings; warnings.simplefilter('error', ImportWarning); {first}\n{CHECK}")


@pytest.mark.audit
def test_a_diffusers_with_moved_internals_still_imports(forks):
    output = forks.run("""
import logging
logging.basicConfig(format="%(message)s", force=True, level=logging.WARNING, stream=__import__("sys").stdout)
from sage_kernels.runtime.import_hook import when_imported
when_imported("diffusers.models.attention_dispatch", lambda module: delattr(module, "_AttentionBackendRegistry"), "")
import sage_hf
from diffusers.models.attention_processor import Attention, AttnProcessor
attention = Attention(query_dim=16, heads=2, dim_head=8)
attention.set_processor(AttnProcessor())
assert attention(__import__("torch").randn(1, 3, 16)).shape == (1, 3, 16)
""")
    assert output.count("will not work: diffusers.models.attention_dispatch is not as expected") == 1


@pytest.mark.parametrize(
    "name", ["mochi", "allegro", "easyanimate", "cogview4", "lumina2", "lumina", "cosmos", "z-image"]
)
def test_models_without_the_method_get_it(name):
    model, processor = family(name).build(), SageAttn3Processor()
    originals = dict(model.attn_processors)
    assert originals
    model.set_attn_processor(dict.fromkeys(originals, processor))
    assert set(model.attn_processors.values()) == {processor}
    with pytest.raises(ValueError, match="number of"):
        model.set_attn_processor({"nowhere.processor": processor})
    model.set_attn_processor(originals)


def test_the_default_processors_take_the_place_of_ours_or_nothing_changes():
    from diffusers.models.attention_processor import AttnProcessor

    model, sage = family("unet").build(), SageAttn3Processor()
    model.set_attn_processor(sage)
    model.set_default_attn_processor()
    assert {type(processor) for processor in model.attn_processors.values()} == {AttnProcessor}

    class Unknown(AttnProcessor):
        pass

    model = family("unet").build()
    processors = dict.fromkeys(model.attn_processors, sage) | {next(iter(model.attn_processors)): Unknown()}
    model.set_attn_processor(dict(processors))
    with pytest.raises(ValueError, match="Unknown"):
        model.set_default_attn_processor()
    assert model.attn_processors == processors


def test_a_method_of_the_model_itself_goes_first():
    from diffusers import FluxTransformer2DModel, ModelMixin

    class Own(FluxTransformer2DModel):
        def set_attn_processor(self, processor):
            return "own"

    class Mixin:
        def set_attn_processor(self, processor):
            return "mixin"

    class FromMixin(ModelMixin, Mixin):
        pass

    config = family("flux").config
    assert Own(**config).set_attn_processor(None) == "own"
    assert FromMixin().set_attn_processor(None) == "mixin"
