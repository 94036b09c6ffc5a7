"""Layers of a model on two GPUs: each computes on its own, whichever is the current one."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sage_hf
from sage_kernels.dispatch import select


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("recipe", ["sage_exact", "sage2", "sage1"])
@pytest.mark.parametrize("padded", [False, True])
def test_layers_on_two_gpus_compute_what_one_computes(
    recipe: str, padded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(select, "_routing", False)  # or a call as short as this might be exact
    config = LlamaConfig(
        vocab_size=97, hidden_size=512, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, head_dim=128
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    tokens = torch.randint(97, (1, 2048), device="cuda:0")
    attention_mask = torch.arange(2048, device="cuda:0")[None] >= 300 * padded
    outputs = []
    for split in (False, True):
        devices = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0}
        devices |= dict.fromkeys(("model.layers.1", "model.norm", "lm_head"), int(split))
        model = LlamaForCausalLM.from_pretrained(
            tmp_path, attn_implementation=recipe, dtype=torch.bfloat16, device_map=devices
        )
        with torch.no_grad():
            for _ in range(4):  # later calls repeat what the first ones prepared
                outputs.append(model(tokens, attention_mask=attention_mask).logits[:, 300:].cpu())
        ran = [row.recipe for row in sage_hf.explain(model).rows]
        assert ran == [recipe.removeprefix("sage_")] * 2
    assert all(torch.equal(output, outputs[0]) for output in outputs)
