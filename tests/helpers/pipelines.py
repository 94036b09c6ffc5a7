"""Tiny CogVideoX, HunyuanVideo and Mochi pipelines, built from configs: no downloads, under a second each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    LlamaConfig,
    LlamaModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from tests.helpers.families import family

_TEXT_DIM = 16  # of the toy transformers in families


def _tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character."""
    special = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {token: index for index, token in enumerate([*special, *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=max_length,
    )


def _t5() -> T5EncoderModel:
    config = T5Config(vocab_size=98, d_model=_TEXT_DIM, d_kv=8, d_ff=16, num_layers=1, num_heads=2, pad_token_id=0)
    return T5EncoderModel(config).eval()


def cogvideox_pipeline() -> diffusers.CogVideoXPipeline:
    """Text to video: 9 frames of 64×64, VAE compression 8×8×4."""
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
    )
    return diffusers.CogVideoXPipeline(
        tokenizer=_tokenizer(11),
        text_encoder=_t5(),
        vae=vae.eval(),
        transformer=family("cogvideox").build(),
        scheduler=diffusers.CogVideoXDDIMScheduler(),
    )


def hunyuan_video_pipeline() -> diffusers.HunyuanVideoPipeline:
    """Text to video: 9 frames of 32×32, VAE compression 8×8×4."""
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=2,
    )
    llama = LlamaConfig(
        vocab_size=98,
        hidden_size=_TEXT_DIM,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        pad_token_id=0,
    )
    clip = CLIPTextConfig(
        vocab_size=98,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=77,
        projection_dim=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    return diffusers.HunyuanVideoPipeline(
        text_encoder=LlamaModel(llama).eval(),
        tokenizer=_tokenizer(13),
        transformer=family("hunyuan-video").build(),
        vae=vae.eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=CLIPTextModel(clip).eval(),
        tokenizer_2=_tokenizer(13),
    )


def mochi_pipeline() -> diffusers.MochiPipeline:
    """Text to video: 7 frames of 32×32, VAE compression 8×8×6."""
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLMochi(
        latent_channels=4,
        out_channels=3,
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        latents_mean=(0.0,) * 4,
        latents_std=(1.0,) * 4,
    )
    return diffusers.MochiPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        vae=vae.eval(),
        text_encoder=_t5(),
        tokenizer=_tokenizer(13),
        transformer=family("mochi").build(),
    )


_SIZE = {"height": 32, "width": 32}

# name -> (makes the pipeline, arguments of a quick call)
PIPELINES: dict[str, tuple[Callable[[], diffusers.DiffusionPipeline], dict[str, Any]]] = {
    "cogvideox": (cogvideox_pipeline, {"height": 96, "width": 96, "num_frames": 9, "max_sequence_length": 11}),
    "hunyuan-video": (
        hunyuan_video_pipeline,
        _SIZE | {"num_frames": 9, "max_sequence_length": 13, "prompt_template": {"template": "{}", "crop_start": 0}},
    ),
    "mochi": (mochi_pipeline, _SIZE | {"num_frames": 7, "max_sequence_length": 13}),
}


def generate(pipe: diffusers.DiffusionPipeline, arguments: dict[str, Any], steps: int = 2) -> torch.Tensor:
    """Latents of one seeded clip; (batch, …) as the pipeline returns them."""
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    prompt = "a red circle"
    return pipe(
        prompt, num_inference_steps=steps, generator=generator, output_type="latent", return_dict=False, **arguments
    )[0]
