"""One of several processes of a language model whose heads transformers shares out: `tensor_parallel.py FOLDER`.

FOLDER has the model in `model`, and the first process writes what it computed in `computed.pt`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

import sage_hf  # noqa: F401 - which registers the recipes
from tests.helpers.tiny_transformers import MODELS

RECIPES = ("sage_exact", "sage2", "sage3_paper")


def computed(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's logits of padded sequences, and the tokens that it generates."""
    inputs = MODELS["llama"].inputs("left")
    with torch.no_grad():
        logits = model(**inputs).logits[inputs["attention_mask"].bool()]
        tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    return {"logits": logits, "tokens": tokens[:, -4:]}


def heads_here(model: LlamaForCausalLM) -> int:
    """Return how many heads of queries this process computes."""
    weight = model.model.layers[0].self_attn.q_proj.weight
    rows: int = getattr(weight, "to_local", lambda: weight)().shape[0]
    return rows // model.config.head_dim


def main(folder: Path) -> None:
    """Compute in each recipe with the weights shared out, and write."""
    found = {}
    for recipe in RECIPES:
        model = LlamaForCausalLM.from_pretrained(folder / "model", attn_implementation=recipe, tp_plan="auto")
        found[recipe] = computed(model) | {"heads": torch.tensor(heads_here(model))}
    if dist.get_rank() == 0:
        torch.save(found, folder / "computed.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
