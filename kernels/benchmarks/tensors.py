"""Q, K and V to measure on: drawn ones, and the activations of trained models."""

from __future__ import annotations

import json
from pathlib import Path

import torch

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def gaussian(batch: int, heads: int, tokens: int, head_dim: int, seed: int = 0) -> Triple:
    """Independent standard normal Q, K, V, float32 (batch, heads, tokens, head_dim)."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(batch, heads, tokens, head_dim, generator=generator) for _ in range(3))
    return query, key, value


def dit_like(batch: int, heads: int, tokens: int, head_dim: int, seed: int = 0) -> Triple:
    """Q, K, V with what makes a diffusion transformer's hard to quantise, float32 (batch, heads, tokens, head_dim).

    Neighbouring tokens are correlated (a moving average over 16), every 16th channel of Q and K is 6 times louder, K
    has a bias per channel of 3 times its deviation, V one of half its deviation.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def correlated() -> torch.Tensor:
        average = draw(batch, heads, tokens + 15, head_dim).unfold(2, 16, 1).mean(-1) * 4
        return 0.8 * average + 0.6 * draw(batch, heads, tokens, head_dim)

    loudness = torch.ones(head_dim)
    loudness[::16] = 6.0
    loudness *= (head_dim / loudness.square().sum()).sqrt()
    query = (correlated() + draw(1, heads, 1, head_dim)) * loudness
    key = (correlated() + 3 * draw(1, heads, 1, head_dim)) * loudness
    return query, key, correlated() + 0.5 * draw(1, heads, 1, head_dim)


def video_activations(
    folder: str | Path, prompt: str, steps: int, at_steps: tuple[int, ...], seed: int = 0
) -> list[Triple]:
    """Q, K, V of every attention layer of a CogVideoX pipeline, at some denoising steps of one exact generation.

    Args:
        folder: pipeline folder or id with generation settings in generation.json.
        prompt: what to generate.
        steps: number of denoising steps.
        at_steps: the steps whose tensors to keep.
        seed: of the initial noise.
    """
    from diffusers import CogVideoXPipeline

    from sage_hf import SageAttnProcessor, record

    settings = json.loads((Path(folder) / "generation.json").read_text())
    pipe = CogVideoXPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    pipe.transformer.set_attn_processor(SageAttnProcessor("exact"))
    kept: list[Triple] = []
    step = 0

    def keep(call: record.AttentionCall) -> None:
        if step in at_steps:
            kept.append((call.query.clone(), call.key.clone(), call.value.clone()))

    def advance(pipe: object, index: int, timestep: object, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        nonlocal step
        step = index + 1
        return state

    with record.observe(keep), torch.no_grad():
        pipe(
            prompt,
            num_frames=settings["num_frames"],
            height=settings["height"],
            width=settings["width"],
            guidance_scale=settings["guidance_scale"],
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(seed),
            callback_on_step_end=advance,
            output_type="latent",
        )
    return kept


def text_activations(model: str, text: str) -> list[Triple]:
    """Q, K, V of every attention layer of a transformers text encoder reading `text` (cut at 512 tokens)."""
    from transformers import AutoModel, AutoTokenizer

    from sage_hf import record

    tokens = AutoTokenizer.from_pretrained(model)(text, truncation=True, max_length=512, return_tensors="pt")
    encoder = AutoModel.from_pretrained(model, attn_implementation="sage_exact").eval()
    kept: list[Triple] = []
    with record.observe(lambda call: kept.append((call.query, call.key, call.value))), torch.no_grad():
        encoder(**tokens)
    return kept
