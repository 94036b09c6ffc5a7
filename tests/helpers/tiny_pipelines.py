"""Tiny pipelines with random weights, built from configs: real diffusers and transformers classes, no download."""

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLCogVideoX,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLMochi,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    DDIMScheduler,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    MochiPipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from tests.helpers.families import family

LAYERS = 3
TEXT = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def transformer(num_layers: int = LAYERS) -> CogVideoXTransformer3DModel:
    torch.manual_seed(0)
    return CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=16,
        num_layers=num_layers,
        sample_width=8,
        sample_height=8,
        sample_frames=9,
        max_text_seq_length=226,
    ).eval()


def transformer_inputs(timestep: float = 500.0, batch: int = 1) -> dict:
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(batch, 3, 4, 8, 8, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 226, 16, generator=generator),
        "timestep": torch.full((batch,), timestep),
    }


def tokenizer(longest: int | None = None) -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", "a", "red", "blue", "ball", "rolls"])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=longest, **tokens)


def t5() -> T5EncoderModel:
    config = T5Config(vocab_size=8, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0)
    return T5EncoderModel(config).eval()


def cogvideox(num_layers: int = LAYERS) -> CogVideoXPipeline:
    """64×64 pixels, 9 frames; 2 heads of 32; 226 text and 48 video tokens."""
    torch.manual_seed(0)
    vae = AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=4,
        sample_height=64,
        sample_width=64,
    ).eval()
    pipe = CogVideoXPipeline(tokenizer(), t5(), vae, transformer(num_layers), CogVideoXDDIMScheduler())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def hunyuan_video() -> HunyuanVideoPipeline:
    """32×32 pixels, 9 frames, with the prompt template {"template": "{}", "crop_start": 0}; VAE compression 8×8×4."""
    torch.manual_seed(0)
    vae = AutoencoderKLHunyuanVideo(
        latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=2,
    ).eval()
    llama = LlamaModel(LlamaConfig(**TEXT | {"num_hidden_layers": 3})).eval()
    clip = CLIPTextModel(CLIPTextConfig(**TEXT | {"hidden_size": 8}, projection_dim=8, eos_token_id=1)).eval()
    scheduler, denoiser = FlowMatchEulerDiscreteScheduler(shift=7.0), family("hunyuan-video").build()
    pipe = HunyuanVideoPipeline(llama, tokenizer(13), denoiser, vae, scheduler, clip, tokenizer(13))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def mochi() -> MochiPipeline:
    """32×32 pixels, 7 frames; VAE compression 8×8×6."""
    torch.manual_seed(0)
    vae = AutoencoderKLMochi(
        latent_channels=4,
        out_channels=3,
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        latents_mean=(0.0,) * 4,
        latents_std=(1.0,) * 4,
    ).eval()
    pipe = MochiPipeline(rising_scheduler(), vae, t5(), tokenizer(13), family("mochi").build())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def image_autoencoder() -> AutoencoderKL:
    """Make latents of an eighth of the image's height and width."""
    return AutoencoderKL(
        block_out_channels=(8,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=4,
    ).eval()


def image_pipeline() -> StableDiffusionPipeline:
    """Stable Diffusion of 64×64 pixels."""
    torch.manual_seed(0)
    text = CLIPTextConfig(**TEXT, max_position_embeddings=16, eos_token_id=1)
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32,),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        cross_attention_dim=16,
        attention_head_dim=2,
        norm_num_groups=8,
    )
    vae = image_autoencoder()
    pipe = StableDiffusionPipeline(
        vae, CLIPTextModel(text).eval(), tokenizer(16), unet.eval(), DDIMScheduler(), None, None, None, False
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def latents(pipe: DiffusionPipeline, steps: int = 2, **settings) -> torch.Tensor:
    """Return the latents that the pipeline makes of a prompt."""
    generator = torch.Generator().manual_seed(0)
    settings = {"height": 64, "width": 64, "num_frames": 9, "guidance_scale": 3.0, **settings}
    return pipe("a red ball", num_inference_steps=steps, generator=generator, output_type="latent", **settings).frames


def rising_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Mochi's: timesteps go up from 0."""
    return FlowMatchEulerDiscreteScheduler(invert_sigmas=True)


def llama(head_dim: int = 32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config).eval()
