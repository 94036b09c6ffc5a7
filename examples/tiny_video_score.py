"""Generate the held-out prompts with one attention recipe, and count the attributes recognised in the pixels."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import CogVideoXPipeline
from diffusers.utils import export_to_gif
from PIL import Image
from shapes import Pair, Scene, attribute_matches, held_out_pairs, held_out_scenes, read_clips, read_pairs
from torch import Tensor
from tqdm.auto import tqdm

SCORE_SEED = 1000


def demo_scenes() -> list[Scene | Pair]:
    """Return a held-out scene and a held-out pair, for samples of a run and prompts of a demo."""
    return [Scene("red", "circle", "left"), Pair(Scene("red", "circle", "left"), Scene("green", "square", "up"))]


def save_gif(clips: Tensor, path: Path) -> None:
    """Write clips (B, F, 3, H, W) in [0, 1] side by side into one gif."""
    frames = (clips.float().clamp(0, 1) * 255).round().byte().permute(1, 3, 0, 4, 2).flatten(2, 3)
    export_to_gif([Image.fromarray(frame) for frame in frames.cpu().numpy()], str(path.with_suffix(".gif")), fps=8)


def recognise(clips: Tensor, scenes: Sequence[Scene] | Sequence[Pair]) -> dict:
    """Return the number of clips that are right in each attribute, and under "misread" the readings of wrong clips.

    Args:
        clips: (B, F, 3, H, W) in [0, 1].
        scenes: the scene or pair that each clip should show; all scenes or all pairs.
    """
    readings = (read_pairs if isinstance(scenes[0], Pair) else read_clips)(clips)
    matches = attribute_matches(readings, scenes)
    right = [all(columns) for columns in zip(*matches.values(), strict=True)]
    misread = {scene.caption(): list(read) for scene, read, ok in zip(scenes, readings, right, strict=True) if not ok}
    return {**{name: sum(hits) for name, hits in matches.items()}, "misread": misread}


def update_json(path: Path, key: str, value: dict) -> None:
    """Set one key of a JSON file, which need not exist yet."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content[key] = value
    path.write_text(json.dumps(content, indent=1) + "\n")


def generate(
    pipe: CogVideoXPipeline,
    scenes: Sequence[Scene | Pair],
    *,
    guidance_scale: float,
    num_inference_steps: int = 20,
    batch_size: int = 4,
) -> Tensor:
    """Render the scenes' captions, each from its own seed, so that a recipe changes only the arithmetic.

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


def score(
    folder: Path,
    recipe: str,
    *,
    guidance_scale: float | None = None,
    save: bool = False,
    samples: Path | None = None,
) -> dict:
    """Generate 48 held-out scenes and 48 held-out pairs with one attention recipe, and count the clips that are right.

    Args:
        folder: a pipeline's folder, with generation.json.
        recipe: "exact" (diffusers' own attention) or a recipe of sage_hf, emulated if it does not run natively.
        guidance_scale: default: the value in generation.json.
        save: also write the result into ``<folder>/scores.json``.
        samples: a folder for the clips, eight to a gif.

    Returns:
        The number of prompts of each kind, the guidance scale, and the result of :func:`recognise` for the scenes and,
        under "pairs", for the pairs.
    """
    pipe = CogVideoXPipeline.from_pretrained(folder).to("cuda" if torch.cuda.is_available() else "cpu")
    pipe.set_progress_bar_config(disable=True)
    if recipe != "exact":
        from sage_hf import SageAttnProcessor

        pipe.transformer.set_attn_processor(SageAttnProcessor(recipe=recipe, fallback="emulate"))
    defaults = json.loads((folder / "generation.json").read_text())
    guidance_scale = defaults["guidance_scale"] if guidance_scale is None else guidance_scale
    entry = {"prompts": len(held_out_scenes()), "guidance_scale": guidance_scale}
    for kind, scenes in (("scenes", held_out_scenes()), ("pairs", held_out_pairs())):
        started = time.perf_counter()
        clips = generate(
            pipe, scenes, guidance_scale=guidance_scale, num_inference_steps=defaults["num_inference_steps"]
        )
        seconds = time.perf_counter() - started
        found = recognise(clips, scenes)
        print(f"recipe {recipe}, guidance scale {guidance_scale:g}: {len(scenes)} held-out {kind} in {seconds:.0f} s")
        for name in (*Scene._fields, "colour and direction"):
            print(f"  {name:<20} {found[name]:>3} / {len(scenes)}")
        for caption, reading in found["misread"].items():
            print(f"  {caption}: read as {reading}")
        entry |= {"pairs": found} if kind == "pairs" else found
        if samples:
            samples.mkdir(parents=True, exist_ok=True)
            for first in range(0, len(scenes), 8):
                save_gif(clips[first : first + 8], samples / f"{recipe}_{kind}_{first:02d}")
    if save:
        update_json(folder / "scores.json", recipe, entry)
    return entry
