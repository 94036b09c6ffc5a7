"""Q, K, V and dO for measurements: random tensors, and the activations and gradients of trained models."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from diffusers import CogVideoXPipeline

    from sage_hf.record import AttentionCall

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Inputs(NamedTuple):
    """Arguments of one attention call; tensors (batch, heads, tokens, head_dim)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    is_causal: bool = False
    causal_offset: int = 0
    scale: float | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Return the arguments that are not tensors, by name."""
        return {name: getattr(self, name) for name in ("is_causal", "causal_offset", "scale")}

    def to(self, dtype: torch.dtype) -> Inputs:
        """Return the same call in another dtype."""
        return self._replace(query=self.query.to(dtype), key=self.key.to(dtype), value=self.value.to(dtype))


class Sample(NamedTuple):
    """Inputs of one attention call and the gradient of its output: float32 (batch, heads, tokens, head_dim)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output_gradient: torch.Tensor
    is_causal: bool = False
    scale: float | None = None


def parse_arguments(description: str | None) -> argparse.Namespace:
    """Return the arguments of a study of errors on these tensors."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--video", help="CogVideoX pipeline folder whose tensors to measure on")
    parser.add_argument("--text", help="model of transformers, folder or id, whose tensors to measure on")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the drawn tensors")
    parser.add_argument("--output", type=Path, help="where to write the table as JSON")
    return parser.parse_args()


def gaussian(batch: int, heads: int, tokens: int, head_dim: int, seed: int = 0) -> Triple:
    """Draw independent standard normal Q, K, V, float32 (batch, heads, tokens, head_dim)."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(batch, heads, tokens, head_dim, generator=generator) for _ in range(3))
    return query, key, value


def dit_like(batch: int, heads: int, tokens: int, head_dim: int, seed: int = 0) -> Triple:
    """Draw Q, K, V as hard to quantise as in a diffusion transformer, float32 (batch, heads, tokens, head_dim).

    Neighbouring tokens are correlated (a moving average over 16), every 16th channel of Q and K is 6 times as large,
    and each channel has a bias: in K of 3 times the standard deviation, in V of half of it.
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


def video_activations(folder: str | Path, prompt: str, steps: int, at_steps: tuple[int, ...]) -> list[Triple]:
    """Return Q, K, V of every attention layer of a CogVideoX pipeline, at some denoising steps of one exact generation.

    Args:
        folder: pipeline folder or id with generation settings in generation.json.
        prompt: the prompt to generate.
        steps: number of denoising steps.
        at_steps: the steps whose tensors are kept.
    """
    from sage_hf import record

    triples: list[Triple] = []
    now = 0

    def enter(step: int, inputs: dict[str, Any]) -> None:
        nonlocal now
        now = step

    def keep(call: AttentionCall) -> None:
        if now in at_steps:
            triples.append((call.query.clone(), call.key.clone(), call.value.clone()))

    with record.observe(keep):
        _denoise(_exact_pipeline(folder), folder, prompt, steps, enter)
    return triples


def video_gradients(folder: str | Path, prompt: str, steps: int, at_steps: tuple[int, ...]) -> list[Sample]:
    """Return Q, K, V and dO of every attention layer, at some steps; arguments as in `video_activations`.

    dO is the gradient that each layer receives from a Gaussian gradient of the denoiser's output.
    """
    pipe = _exact_pipeline(folder)
    inputs: list[dict[str, Any]] = []

    def keep(step: int, arguments: dict[str, Any]) -> None:
        if step in at_steps:
            inputs.append(arguments)

    _denoise(pipe, folder, prompt, steps, keep)
    generator = torch.Generator().manual_seed(0)
    samples: list[Sample] = []
    for arguments in inputs:
        samples += _record_layers(
            lambda arguments=arguments: pipe.transformer(**arguments)[0],
            lambda output: (output * torch.randn(output.shape, generator=generator)).sum(),
        )
    return samples


def _exact_pipeline(folder: str | Path) -> CogVideoXPipeline:
    """Load the pipeline with exact attention through sage_hf, which records the calls."""
    from diffusers import CogVideoXPipeline

    from sage_hf import SageAttnProcessor

    pipe = CogVideoXPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    pipe.transformer.set_attn_processor(SageAttnProcessor("exact"))
    return pipe


def _denoise(
    pipe: CogVideoXPipeline,
    folder: str | Path,
    prompt: str,
    steps: int,
    at_step: Callable[[int, dict[str, Any]], None],
) -> None:
    """Generate once; call `at_step` with each step's number and the denoiser's arguments before the step."""
    settings = json.loads((Path(folder) / "generation.json").read_text())
    step = 0

    def enter(transformer: torch.nn.Module, positional: tuple[()], arguments: dict[str, Any]) -> None:
        nonlocal step
        at_step(step, arguments)
        step += 1

    handle = pipe.transformer.register_forward_pre_hook(enter, with_kwargs=True)
    try:
        pipe(
            prompt,
            num_frames=settings["num_frames"],
            height=settings["height"],
            width=settings["width"],
            guidance_scale=settings["guidance_scale"],
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        )
    finally:
        handle.remove()


def _record_layers(forward: Callable[[], torch.Tensor], loss: Callable[[torch.Tensor], torch.Tensor]) -> list[Sample]:
    """Return Q, K, V and dO of every attention call of `forward`; `loss` maps its result to a scalar.

    Raises:
        ValueError: a call has a mask.
    """
    from sage_hf import record

    calls: list[AttentionCall] = []
    with record.observe(calls.append), torch.enable_grad():
        gradients = torch.autograd.grad(loss(forward()), [call.output for call in calls])
    if any(call.attn_mask is not None for call in calls):
        raise ValueError("attention with masks is not measured here: give a batch without padding")
    return [
        Sample(*(x.detach() for x in (call.query, call.key, call.value, gradient)), call.is_causal, call.scale)
        for call, gradient in zip(calls, gradients, strict=True)
    ]


def text_activations(model: str, text: str) -> list[Triple]:
    """Return Q, K, V of every attention layer of a transformers text encoder for `text`, cut at 512 tokens."""
    from transformers import AutoModel, AutoTokenizer

    from sage_hf import record

    tokens = AutoTokenizer.from_pretrained(model)(text, truncation=True, max_length=512, return_tensors="pt")
    encoder = AutoModel.from_pretrained(model, attn_implementation="sage_exact").eval()
    triples: list[Triple] = []
    with record.observe(lambda call: triples.append((call.query, call.key, call.value))), torch.no_grad():
        encoder(**tokens)
    return triples


def text_gradients(model: str, text: str) -> list[Sample]:
    """Return Q, K, V and dO of every attention layer of a causal language model that learns `text`, cut at 1024 tokens.

    Args:
        model: transformers folder or id; a vocabulary of 256 tokens means bytes, without a tokenizer.
        text: the text whose loss gives the gradients.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    import sage_hf  # noqa: F401 (registers "sage_exact")

    if AutoConfig.from_pretrained(model).vocab_size == 256:
        tokens = torch.tensor([list(text.encode()[:1024])])
    else:
        tokens = AutoTokenizer.from_pretrained(model)(text, truncation=True, max_length=1024, return_tensors="pt")
        tokens = tokens["input_ids"]
    learner = AutoModelForCausalLM.from_pretrained(model, attn_implementation="sage_exact", dtype=torch.float32).eval()
    return _record_layers(lambda: learner(tokens, labels=tokens, use_cache=False).loss, lambda loss: loss)
