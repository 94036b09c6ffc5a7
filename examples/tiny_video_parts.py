"""The parts of the tiny CogVideoX pipeline: real diffusers and transformers classes, small sizes, random weights."""

from dataclasses import dataclass

from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXTransformer3DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from shapes import CAPTION_TEMPLATES, Pair, all_scenes
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

# The longest caption of a pair, with its end.
PROMPT_LENGTH = 16
# CogVideoXPipeline pads prompts to this many tokens unless told otherwise.
PIPELINE_PROMPT_LENGTH = 226


@dataclass(frozen=True)
class TinySize:
    """Sizes of every part of the pipeline. The defaults are the committed model's; tests train a smaller one."""

    num_frames: int = 17
    clip_size: int = 128
    latent_channels: int = 8
    vae_channels: tuple[int, int, int, int] = (16, 32, 64, 72)
    num_heads: int = 3
    num_layers: int = 6
    time_embed_dim: int = 96
    text_dim: int = 64
    text_layers: int = 4

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """Return (latent frames, channels, height, width), the transformer's input."""
        return (self.num_frames - 1) // 4 + 1, self.latent_channels, self.clip_size // 8, self.clip_size // 8


def build_vae(size: TinySize) -> AutoencoderKLCogVideoX:
    return AutoencoderKLCogVideoX(
        block_out_channels=size.vae_channels,
        latent_channels=size.latent_channels,
        layers_per_block=1,
        norm_num_groups=8,
        sample_height=size.clip_size,
        sample_width=size.clip_size,
        scaling_factor=1.0,
    )


def build_transformer(size: TinySize) -> CogVideoXTransformer3DModel:
    return CogVideoXTransformer3DModel(
        num_attention_heads=size.num_heads,
        attention_head_dim=64,
        in_channels=size.latent_channels,
        out_channels=size.latent_channels,
        time_embed_dim=size.time_embed_dim,
        text_embed_dim=size.text_dim,
        num_layers=size.num_layers,
        sample_width=size.clip_size // 8,
        sample_height=size.clip_size // 8,
        sample_frames=size.num_frames,
        max_text_seq_length=PROMPT_LENGTH,
        use_rotary_positional_embeddings=True,
    )


def rotary_embedding(size: TinySize) -> tuple[Tensor, Tensor]:
    """Return the (cos, sin) that CogVideoXPipeline passes at this size, each (video tokens, 64)."""
    grid = size.clip_size // 16
    return get_3d_rotary_pos_embed(
        embed_dim=64,
        crops_coords=((0, 0), (grid, grid)),
        grid_size=(grid, grid),
        temporal_size=size.latent_shape[0],
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a word-level tokenizer over the words of the captions; other words become <unk>."""
    # Scenes repeat themselves here: such a pair has the words of every other.
    pairs = ((template, Pair(scene, scene)) for template in CAPTION_TEMPLATES for scene in all_scenes())
    words = sorted({word for template, pair in pairs for word in pair.caption(template).split()})
    vocabulary = {word: index for index, word in enumerate(["<pad>", "</s>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=PIPELINE_PROMPT_LENGTH,
    )


def build_text_encoder(size: TinySize, vocab_size: int) -> T5EncoderModel:
    config = T5Config(
        vocab_size=vocab_size,
        d_model=size.text_dim,
        d_kv=16,
        d_ff=2 * size.text_dim,
        num_layers=size.text_layers,
        num_heads=size.text_dim // 16,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    return T5EncoderModel(config)


def build_scheduler() -> CogVideoXDDIMScheduler:
    """Build CogVideoX's scheduler: v-prediction, zero terminal SNR, trailing timesteps."""
    return CogVideoXDDIMScheduler(
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        snr_shift_scale=1.0,
        clip_sample=False,
        set_alpha_to_one=True,
    )
