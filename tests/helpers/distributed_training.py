"""Backward passes of torchrun's `WORLD` processes, each with its sample of a batch: `distributed_training FOLDER`.

FOLDER receives the gradients, `<model>-ddp.pt` and `<model>-fsdp.pt`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard

import sage_hf
from sage_hf import record
from sage_hf.targets import find_targets
from tests.helpers import tiny_pipelines as tiny

WORLD = 2


def text() -> dict[str, torch.Tensor]:
    tokens = torch.randint(2, 32, (WORLD, 70), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, 50:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def language_loss(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**inputs).loss


def video_loss(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**inputs, return_dict=False)[0].square().mean()


# The model, the whole batch, and the loss of a batch, which is the mean of its halves'.
MODELS: dict[str, tuple[Callable, Callable, Callable]] = {
    "llama": (tiny.llama, text, language_loss),
    "cogvideox": (tiny.transformer, lambda: tiny.transformer_inputs(batch=WORLD), video_loss),
}


def gradient(model: torch.nn.Module) -> torch.Tensor:
    grads = [parameter.grad for parameter in model.parameters()]
    return torch.cat([getattr(grad, "full_tensor", lambda grad=grad: grad)().flatten() for grad in grads])


def main(folder: str) -> None:
    """One process: its sample's backward pass, as DDP and as FSDP; the first one saves the gradients."""
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == WORLD
    rank = accelerator.process_index
    for name, (build, batch, loss) in MODELS.items():
        mine = {key: tensor[rank : rank + 1] for key, tensor in batch().items()}
        for kind, distribute in (("ddp", accelerator.prepare), ("fsdp", fully_shard)):
            model = build().train()
            sage_hf.apply(model, "sage_bwd")
            (target,) = find_targets(model)
            distributed = distribute(model)
            accelerator.backward(loss(distributed, mine))
            ran = {plan.recipe for layer in target.layers.values() for plan in record.last_plans(layer)}
            assert ran == {"sage_bwd"}
            found = gradient(model)
            if accelerator.is_main_process:
                torch.save(found, f"{folder}/{name}-{kind}.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # FSDP keeps gloo's threads alive, and one that needs the interpreter after its end aborts the process
