"""Generate the held-out prompts with one attention recipe, and count what the scorer recognises in the pixels."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import CogVideoXPipeline
from shapes import Scene, attribute_matches, held_out_scenes, read_clips
from torch import Tensor
from tqdm.auto import tqdm

SCORE_SEED = 1000


def demo_scenes() -> list[Scene]:
    """Return four held-out scenes that differ in most attributes, for samples of a run and prompts of a demo."""
    return held_out_scenes()[::15]


def update_json(path: Path, key: str, value: dict) -> None:
    """Set one key of a JSON file, which need not exist yet."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content[key] = value
    path.write_text(json.dumps(content, indent=1) + "\n")


def generate(
    pipe: CogVideoXPipeline,
    scenes: Sequence[Scene],
    *,
    guidance_scale: float,
    num_inference_steps: int = 20,
    batch_size: int = 4,
) -> Tensor:
    """Render the scenes' captions, each from its own seed, so that a recipe changes nothing but the arithmetic.

    Returns:
        Clips (B, F, 3, H, W) float32 in [0, 1] on the CPU.
    """
    clips = []
    for first in tqdm(range(0, len(scenes), batch_size), desc="clips", unit="batch", leave=False):
        part = scenes[first : first + batch_size]
        video = pipe(
            [scene.caption() for scene in part],
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            max_sequence_length=pipe.transformer.config.max_text_seq_length,
            generator=[torch.Generator().manual_seed(SCORE_SEED + first + i) for i in range(len(part))],
            output_type="pt",
        ).frames
        clips.append(video.float().cpu())
    return torch.cat(clips)


def score(folder: Path, recipe: str, *, guidance_scale: float | None = None, save: bool = False) -> dict:
    """Generate the 48 held-out prompts with one attention recipe, and print how many clips show what was asked for.

    Args:
        folder: a pipeline's folder, with generation.json.
        recipe: "exact" (diffusers' own attention) or a recipe of sage_hf, emulated if it does not run natively.
        guidance_scale: default: that of generation.json.
        save: also write the result into ``<folder>/scores.json``.

    Returns:
        The number of prompts, how many clips are right in each attribute, and what was recognised in the others.
    """
    pipe = CogVideoXPipeline.from_pretrained(folder).to("cuda" if torch.cuda.is_available() else "cpu")
    pipe.set_progress_bar_config(disable=True)
    if recipe != "exact":
        from sage_hf import SageAttnProcessor

        pipe.transformer.set_attn_processor(SageAttnProcessor(recipe=recipe, fallback="emulate"))
    defaults = json.loads((folder / "generation.json").read_text())
    guidance_scale = defaults["guidance_scale"] if guidance_scale is None else guidance_scale
    scenes = held_out_scenes()
    started = time.perf_counter()
    clips = generate(pipe, scenes, guidance_scale=guidance_scale, num_inference_steps=defaults["num_inference_steps"])
    seconds = time.perf_counter() - started

    readings = read_clips(clips)
    entry = {"prompts": len(scenes), "guidance_scale": guidance_scale}
    entry |= {name: sum(right) for name, right in attribute_matches(readings, scenes).items()}
    pairs = zip(scenes, readings, strict=True)
    entry["misread"] = {scene.caption(): list(reading) for scene, reading in pairs if scene != reading}
    print(f"recipe {recipe}, guidance scale {guidance_scale:g}: {len(scenes)} held-out prompts in {seconds:.0f} s")
    for name in (*Scene._fields, "colour and direction"):
        print(f"  {name:<20} {entry[name]:>3} / {len(scenes)}")
    for caption, reading in entry["misread"].items():
        print(f"  {caption}: read as {reading}")
    if save:
        update_json(folder / "scores.json", recipe, entry)
    return entry
