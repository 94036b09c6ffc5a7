"""The family of models that docs/adding.md adds is served."""

import re
from pathlib import Path

import torch

from sage_hf.diffusers import SageAttnProcessor
from sage_hf.diffusers.families import FAMILIES
from tests.helpers.families import Family, images, run

ADDING = (Path(__file__).parents[3] / "docs/adding.md").read_text()
PACKAGE = "sage_hf.diffusers.families"


def test_the_family_that_the_page_adds_equals_the_original_to_the_bit(monkeypatch):
    (block,) = re.findall(r"```python\n# sage_hf/diffusers/families/aura_flow\.py\n(.*?)```", ADDING, re.DOTALL)
    source, case = re.split(r"\n+# tests/helpers/families/images.py[^\n]*\n", block)
    monkeypatch.setitem(FAMILIES, "AuraFlowAttnProcessor2_0", None)
    del FAMILIES["AuraFlowAttnProcessor2_0"]  # until the test ends
    exec(source, {"__name__": f"{PACKAGE}.aura_flow", "__package__": PACKAGE})
    ((family,),) = (eval(f"({case})", dict(vars(images))),)

    assert isinstance(family, Family)
    model, inputs = family.build(torch.float32), family.make_inputs(torch.float32)
    expected = run(model, inputs)
    model.set_attn_processor(SageAttnProcessor("exact"))
    assert torch.equal(run(model, inputs), expected)
    model.set_attn_processor(SageAttnProcessor("sage3", "emulate"))
    assert not torch.equal(run(model, inputs), expected)
