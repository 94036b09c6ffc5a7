"""The size of a video model that trains in seconds."""

from tiny_video_parts import TinySize

SIZE = TinySize(
    num_frames=9,
    clip_size=32,
    latent_channels=4,
    vae_channels=(8, 8, 8, 16),
    num_heads=1,
    num_layers=1,
    time_embed_dim=32,
    text_dim=32,
)
