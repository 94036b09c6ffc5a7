"""The video experiment learns what it asks for, compares like with like, resumes, and reports what it measured."""

import json
import shutil
from pathlib import Path

import finetune_tiny_video
import pytest
import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXPipeline, CogVideoXTransformer3DModel
from finetune_tiny_video import Task, as_asked, use_recipe
from shapes import Scene, draw_clips, held_out_scenes, read_clips, train_scenes
from tiny_video_parts import build_scheduler, build_text_encoder, build_tokenizer, build_transformer, build_vae
from train_tiny_video import DEFAULT_FOLDER, encode, to_model_range

from tests.helpers.tiny_video import SIZE

pytestmark = pytest.mark.audit

STEPS, POINTS, PROMPTS = 40, 2, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A small pipeline of random weights."""
    path = tmp_path_factory.mktemp("pipeline") / "tiny"
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    parts = (build_text_encoder(SIZE, len(tokenizer)), build_vae(SIZE), build_transformer(SIZE), build_scheduler())
    CogVideoXPipeline(tokenizer, *parts).save_pretrained(path)
    defaults = {"num_frames": SIZE.num_frames, "height": SIZE.clip_size, "num_inference_steps": 2}
    (path / "generation.json").write_text(json.dumps({**defaults, "guidance_scale": 1.0}))
    return path


def run(command: str, folder: Path, base: Path, *options: str) -> dict:
    folders = ["--folder", str(folder), "--run-dir", str(base / "runs"), "--output", str(base / "results")]
    sizes = ["--steps", str(STEPS), "--points", str(POINTS), "--prompts", str(PROMPTS), "--pool", "80"]
    finetune_tiny_video.main([command, *folders, *sizes, "--batch-size", "16", "--lr", "0.003", *options])
    return json.loads((base / "results" / "tiny_video.json").read_text())


@pytest.fixture(scope="module")
def everything(folder, tmp_path_factory) -> tuple[Path, dict]:
    """The folder and the result of both commands, for exact and INT8 attention with two seeds."""
    base = tmp_path_factory.mktemp("video")
    return base, run("all", folder, base, "--recipes", "exact", "sage_bwd", "--seeds", "0", "1")


def test_the_held_out_loss_decreases_with_every_recipe_and_seed(everything):
    runs = everything[1]["finetune"]["runs"]
    assert [(run["settings"]["recipe"], run["settings"]["seed"]) for run in runs] == [
        ("exact", 0),
        ("sage_bwd", 0),
        ("exact", 1),
        ("sage_bwd", 1),
    ]
    for run in runs:
        first, *_, last = (row["held_out_loss"] for row in run["curve"])
        assert last < 0.9 * first, run["settings"]


def test_every_run_has_its_curve_kernels_speed_and_origin(everything):
    for run in everything[1]["finetune"]["runs"]:
        assert [row["step"] for row in run["curve"]] == [0, STEPS // 2, STEPS]
        assert all(row[name] > 0 for row in run["curve"][1:] for name in ("train_loss", "largest_gradient_norm"))
        assert run["kernels"] and all(one.startswith(("PyTorch", "sage_bwd")) for one in run["kernels"])
        assert run["tokens_per_second"] > 0 and run["facts"]["packages"]["diffusers"]


def test_recipes_begin_with_the_same_weights_and_part(everything):
    curves = {
        (run["settings"]["recipe"], run["settings"]["seed"]): run["curve"] for run in everything[1]["finetune"]["runs"]
    }
    for seed in (0, 1):
        assert curves["exact", seed][0] == curves["sage_bwd", seed][0]
        exact, low_bit = (
            (everything[0] / "runs" / f"{recipe}-{seed}" / "diffusion_pytorch_model.safetensors").read_bytes()
            for recipe in ("exact", "sage_bwd")
        )
        assert exact != low_bit
    assert everything[1]["finetune"]["comparison"]["sage_bwd"]["within_seed_noise"] in (True, False)


def test_every_model_is_evaluated_with_every_recipe(everything):
    rows = everything[1]["evaluate"]["rows"]
    assert [row["trained_with"] for row in rows] == ["not fine-tuned", "exact", "sage_bwd"]
    for row in rows:
        assert len(row["seeds"]) == (1 if row["trained_with"] == "not fine-tuned" else 2)
        for measured in row["seeds"]:
            assert list(measured) == ["exact", "sage_bwd", "sage2", "sage3"]
            assert measured["exact"]["velocity_rel_l1"] == measured["exact"]["clips_rel_l1"] == 0
            # FP4 errs more than INT8.
            assert 0 < measured["sage_bwd"]["velocity_rel_l1"] < measured["sage3"]["velocity_rel_l1"] < 1
            for recipe, one in measured.items():
                assert one["prompts"] == PROMPTS and one["held_out_loss"] > 0
                assert all(0 <= one["all"] <= one[name] <= PROMPTS for name in Scene._fields)
                assert all(kernel.startswith(("PyTorch", recipe)) for kernel in one["kernels"])


def test_the_evaluated_loss_equals_the_final_training_loss(everything):
    final = [run["curve"][-1]["held_out_loss"] for run in everything[1]["finetune"]["runs"]]
    rows = {row["trained_with"]: row["seeds"] for row in everything[1]["evaluate"]["rows"]}
    loaded = [rows[recipe][seed]["exact"]["held_out_loss"] for seed in (0, 1) for recipe in ("exact", "sage_bwd")]
    # JSON holds six digits.
    assert loaded == pytest.approx(final, rel=2e-5)


def test_a_run_that_is_kept_is_not_repeated_nor_mixed_with_others(everything, folder, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("trained again")

    monkeypatch.setattr(finetune_tiny_video, "train", fail)
    again = run("finetune", folder, everything[0], "--recipes", "exact", "sage_bwd", "--seeds", "0", "1")
    assert again == everything[1]
    with pytest.raises(SystemExit, match="made with another steps"):
        run("finetune", folder, everything[0], "--recipes", "exact", "--seeds", "0", "--steps", "5")
    other = tmp_path / folder.name
    shutil.copytree(folder, other)
    CogVideoXTransformer3DModel.from_pretrained(other / "transformer").half().save_pretrained(other / "transformer")
    with pytest.raises(SystemExit, match="made with another base"):
        run("finetune", other, everything[0], "--recipes", "exact", "--seeds", "0")


def test_clips_run_backwards_and_are_scored_as_such():
    scenes = held_out_scenes()[::6]
    clips = draw_clips(scenes, generator=torch.Generator().manual_seed(0))
    assert read_clips(clips.flip(1)) == [as_asked(scene) for scene in scenes]


def test_latents_encode_the_backward_clips(folder):
    pipe = CogVideoXPipeline.from_pretrained(folder)
    scenes = train_scenes()[:3]
    latents = encode(pipe.vae, SIZE, scenes, 5, backwards=True)
    generator = torch.Generator().manual_seed(5)
    clips = draw_clips(scenes, generator=generator, num_frames=SIZE.num_frames, size=SIZE.clip_size)
    with torch.no_grad():
        expected, forwards = (
            pipe.vae.encode(to_model_range(c)).latent_dist.mode().transpose(1, 2) * pipe.vae.config.scaling_factor
            for c in (clips.flip(1), clips)
        )
    assert torch.equal(latents, expected) and not torch.equal(latents, forwards)


def test_a_batch_asks_for_the_velocity_of_the_clip_that_its_caption_names(folder):
    pipe = CogVideoXPipeline.from_pretrained(folder)
    task = Task(pipe, SIZE, 80, torch.device("cpu"))
    batch = task.draw(32, seed=7)
    again = task.draw(32, seed=7)
    assert all(torch.equal(one, other) for one, other in zip(batch, again, strict=True))
    # v-prediction: clean = a · noisy − s · velocity with a² + s² = 1.
    a = task.scheduler.alphas_cumprod[batch.timesteps].sqrt().view(-1, 1, 1, 1, 1)
    clean = a * batch.noisy - (1 - a.square()).sqrt() * batch.velocity
    distance = (clean[:, None] - task.latents[None]).flatten(2).abs().amax(2)
    assert (distance.amin(1) < 1e-4).all()
    dropped = 0
    for text, number in zip(batch.text, task.scene_numbers[distance.argmin(1)].tolist(), strict=True):
        is_empty = torch.equal(text, task.captions[-1, 0])
        dropped += is_empty
        assert is_empty or any(torch.equal(text, caption) for caption in task.captions[number])
    assert 0 < dropped < 16


def test_exact_is_diffusers_own_attention(folder):
    transformer = CogVideoXTransformer3DModel.from_pretrained(folder / "transformer")
    before = {name: type(processor) for name, processor in transformer.attn_processors.items()}
    use_recipe(transformer, "sage_bwd")
    assert all(processor.recipe == "sage_bwd" for processor in transformer.attn_processors.values())
    use_recipe(transformer, "exact")
    assert {name: type(processor) for name, processor in transformer.attn_processors.items()} == before


def test_the_shipped_autoencoder_keeps_backward_clips_readable():
    vae = AutoencoderKLCogVideoX.from_pretrained(DEFAULT_FOLDER / "vae")
    scenes = held_out_scenes()[::24]
    clips = draw_clips(scenes, generator=torch.Generator().manual_seed(0)).flip(1)
    with torch.no_grad():
        decoded = vae.decode(vae.encode(to_model_range(clips)).latent_dist.mode()).sample
    readings = read_clips(((decoded.transpose(1, 2) + 1) / 2).clamp(0, 1))
    asked = [as_asked(scene) for scene in scenes]
    assert [(r.colour, r.direction) for r in readings] == [(s.colour, s.direction) for s in asked]
