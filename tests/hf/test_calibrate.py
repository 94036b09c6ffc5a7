"""Calibration stays within its budget, remembers its measurements, and writes a configuration and a report."""

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import CogVideoXDPMScheduler
from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0
from PIL import Image
from transformers import LlamaForCausalLM

import sage_hf
from sage_hf.app import calibrate as module
from sage_hf.app import html_report, mix, subjects
from sage_hf.app.calibrate import Measurements, bound, calibrate
from sage_hf.app.cli import main
from sage_hf.config import LayerRule, SageConfig, StepRule
from sage_hf.diffusers import attention_layers
from sage_hf.sparse.config import Sparse
from sage_kernels.dispatch.request import Request
from tests.helpers import tiny_pipelines as tiny

SETTINGS = {"num_inference_steps": 3, "height": 64, "width": 64, "num_frames": 9, "guidance_scale": 1.0}
TINY_VIDEO = Path(__file__).parents[2] / "examples" / "tiny_video"
PROMPTS = ("a red ball", "a blue ball")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A pipeline, its calibration, and the file of what was measured."""
    path = tmp_path_factory.mktemp("calibration") / "measured.json"
    pipe = tiny.cogvideox(num_layers=2)
    budget = 0.6 * calibrate(pipe, PROMPTS[:1], math.inf, measurements=path, **SETTINGS).alone
    return pipe, calibrate(pipe, PROMPTS[:1], budget, held_out=PROMPTS[1:], measurements=path, **SETTINGS), path


def render(pipe, prompt: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return pipe(prompt, generator=generator, output_type="latent", **SETTINGS).frames


def test_the_pipelines_output_error_is_within_the_budget(measured):
    pipe, calibration, _ = measured
    for prompt, error in zip(PROMPTS, (*calibration.errors, *calibration.held_out), strict=True):
        exact = render(pipe, prompt)
        with sage_hf.apply(pipe, calibration.config):
            low = render(pipe, prompt)
        assert error == pytest.approx(float((low - exact).norm() / exact.norm()), rel=1e-4)
    assert max(calibration.errors) <= calibration.budget < calibration.alone
    assert 0 < calibration.shares["sage3"] < 1 and sum(calibration.shares.values()) == pytest.approx(1)


def test_a_mix_says_in_its_configuration_what_runs_in_each_layer_and_step(measured):
    _, calibration, _ = measured
    steps = np.repeat(np.arange(len(calibration.ranges)), calibration.lengths)
    for row, layer in enumerate(calibration.layers):
        for step in range(3):
            recipe = calibration.recipes[calibration.cells[row, steps[step]]]
            assert calibration.config.resolve(layer, step, 3) == recipe


def test_calibration_leaves_the_model_as_it_was(measured):
    pipe, _, _ = measured
    own = tiny.cogvideox(num_layers=2)
    assert not pipe.transformer._forward_hooks and not pipe.transformer._forward_pre_hooks
    kinds = [[type(layer.processor) for layer in attention_layers(one.transformer).values()] for one in (pipe, own)]
    assert kinds[0] == kinds[1]


def test_what_was_measured_is_not_measured_again(measured, monkeypatch):
    pipe, calibration, path = measured

    def fail(*args):
        raise AssertionError("measured again")

    monkeypatch.setattr(subjects.PipelineSubject, "loss", fail)
    monkeypatch.setattr(subjects.PipelineSubject, "layer_losses", fail)
    again = calibrate(pipe, PROMPTS[:1], calibration.budget, held_out=PROMPTS[1:], measurements=path, **SETTINGS)
    assert again.config == calibration.config and again.errors == calibration.errors


@pytest.mark.parametrize(
    "change", ["architecture", "scheduler", "seed", "settings", "weights", "weights of other parts"]
)
def test_measurements_of_another_model_or_of_other_settings_are_refused(measured, change):
    pipe, _, path = measured
    settings, options = dict(SETTINGS), {}
    if change == "architecture":
        pipe = tiny.cogvideox(num_layers=1)
    elif change == "weights":
        pipe = tiny.cogvideox(num_layers=2)
        with torch.no_grad():
            next(pipe.transformer.parameters()).mul_(2)
    elif change == "weights of other parts":
        pipe = tiny.cogvideox(num_layers=2)
        with torch.no_grad():
            next(pipe.text_encoder.parameters()).mul_(2)
    elif change == "scheduler":
        pipe = tiny.cogvideox(num_layers=2)
        pipe.scheduler = CogVideoXDPMScheduler.from_config(pipe.scheduler.config)
    elif change == "seed":
        options["seed"] = 1
    else:
        settings["guidance_scale"] = 2.0
    with pytest.raises(ValueError, match=f"other {change} "):
        calibrate(pipe, PROMPTS[:1], measurements=path, **options, **settings)


def test_a_calibrated_configuration_is_refused_by_another_architecture(measured, tmp_path):
    _, calibration, _ = measured
    calibration.config.save(tmp_path / "calibrated.json")
    assert SageConfig.from_file(tmp_path / "calibrated.json") == calibration.config
    for other in (tiny.cogvideox(num_layers=3), tiny.llama()):
        with pytest.raises(ValueError, match=r"made for CogVideoXTransformer3DModel \(2 layers\)"):
            sage_hf.apply(other, tmp_path / "calibrated.json")


def test_a_file_that_holds_no_measurements_is_refused(tmp_path):
    (tmp_path / "file.json").write_text("[]")
    with pytest.raises(ValueError, match=r"file\.json holds no measurements"):
        Measurements({}, tmp_path / "file.json")


def test_a_language_model_stays_within_its_budget_with_sensitive_layers_exact():
    model = tiny.llama()
    tokens = [torch.randint(32, (80,), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    loose = calibrate(model, tokens[:1], math.inf)
    assert loose.config.recipe == "sage3" and not loose.config.layers and loose.shares["sage3"] == 1
    kept = calibrate(model, tokens[:1], math.inf, keep_sensitive=1)
    worst = loose.layers[int(np.argmax(loose.cell_errors[:, 0]))]
    assert kept.config.layers == (LayerRule(worst, "exact"),)
    tight = calibrate(model, tokens[:1], loose.alone / 3, held_out=tokens[1:])
    assert tight.errors[0] <= loose.alone / 3 and len(tight.held_out) == 1
    with torch.no_grad():
        exact = model(tokens[0][None]).logits[0, :-1].log_softmax(-1)
        with sage_hf.apply(model, tight.config):
            low = model(tokens[0][None]).logits[0, :-1].log_softmax(-1)
    assert tight.errors[0] == pytest.approx(float((exact.exp() * (exact - low)).sum(-1).mean()), rel=1e-3, abs=1e-7)


def test_the_kv_cache_with_fewest_bits_that_leaves_half_of_the_budget_is_chosen():
    model = tiny.llama(head_dim=64)
    tokens = [torch.randint(32, (250,), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    caches = ("int4", "int8")
    loose = calibrate(model, tokens, math.inf, recipes=("sage2",), kv_caches=caches)
    assert loose.config.kv_cache == "int4" and loose.config.recipe == "sage2"
    losses = {
        one: max(calibrate(model, tokens, math.inf, recipes=("sage2",), kv_caches=[one]).errors) for one in caches
    }
    assert losses["int8"] < losses["int4"]
    between = calibrate(model, tokens, losses["int8"] + losses["int4"], recipes=("sage2",), kv_caches=caches)
    assert between.config.kv_cache == "int8" and max(between.errors) <= between.budget
    assert "KV cache in int8" in between.summary()
    assert SageConfig.from_json(between.config.to_json()) == between.config
    assert calibrate(model, tokens, losses["int8"], recipes=("sage2",), kv_caches=caches).config.kv_cache is None
    with sage_hf.apply(model, between.config):
        assert model.generate.format == "int8"


def test_the_first_kept_share_that_leaves_half_of_the_budget_is_chosen(measured):
    pipe, _, _ = measured
    few, most = Sparse(keep=0.1, from_tokens=0), Sparse(keep=0.999, from_tokens=0)
    errors = {
        one: calibrate(pipe, PROMPTS[:1], math.inf, recipes=("sage2",), sparse=[one], **SETTINGS).errors[0]
        for one in (few, most)
    }
    assert errors[most] < errors[few]
    budget = (errors[few] ** 2 + errors[most] ** 2) ** 0.5
    found = calibrate(pipe, PROMPTS[:1], budget, recipes=("sage2",), sparse=[few, most], **SETTINGS)
    assert found.config.sparse == most and max(found.errors) <= budget and "sparse: " in found.summary()
    with pytest.raises(ValueError, match="no KV cache"):
        calibrate(pipe, PROMPTS[:1], kv_caches=["int4"], **SETTINGS)


def test_an_impossible_budget_leaves_the_model_exact():
    model = tiny.llama()
    tokens = torch.arange(32).repeat(3)
    found = calibrate(model, [tokens], 1e-30)
    assert found.shares["exact"] == 1 and found.errors == (0.0,)


@pytest.mark.parametrize("count", [2, 4])
def test_no_mix_is_chosen_whose_output_is_not_finite_on_a_prompt(monkeypatch, count):
    model = tiny.llama()
    tokens = [torch.arange(32).roll(i).repeat(3) for i in range(count)]
    loss = subjects.LanguageSubject.loss

    def overflow(self, prompt, config):
        low = config.recipe != "exact" and prompt is tokens[-1]
        return math.nan if low else loss(self, prompt, config)

    monkeypatch.setattr(subjects.LanguageSubject, "loss", overflow)
    found = calibrate(model, tokens, 1.0)
    assert found.config.recipe == "exact" and found.errors[-1] < 1.0 and found.alone == math.inf
    held_out = calibrate(model, tokens[:-1], 1.0, held_out=tokens)
    assert held_out.config.recipe == "sage3" and max(held_out.held_out) == math.inf


def test_senseless_arguments_are_refused():
    model, tokens = tiny.llama(), [torch.arange(32)]
    for arguments, message in (
        ({"prompts": []}, "0 prompts"),
        ({"budget": 0}, "budget above 0"),
        ({"recipes": ()}, "different low-bit recipes"),
        ({"recipes": ("sage2", "exact")}, "different low-bit recipes"),
        ({"recipes": ("sage9",)}, "sage9"),
        ({"prompts": "a red ball"}, "one text"),
        ({"held_out": "a red ball"}, "one text"),
        ({"prompts": [tokens[0][None]]}, r"a tensor \(1, 32\) torch.int64"),
        ({"held_out": [tokens[0][:1]]}, "two tokens or more"),
        ({"prompts": [tokens[0].tolist()]}, "got list"),
        ({"prompts": [tokens[0].float()]}, "float32"),
    ):
        with pytest.raises(ValueError, match=message):
            calibrate(model, **{"prompts": tokens, **arguments})
    with pytest.raises(ValueError, match="prompts are texts, got list"):
        calibrate(tiny.cogvideox(num_layers=1), [["a", "b"]], **SETTINGS)
    with pytest.raises(TypeError, match="for a denoiser, pass its pipeline"):
        calibrate(tiny.transformer(), ["a"])
    with sage_hf.apply(model, "sage2"), pytest.raises(ValueError, match="switched already"):
        calibrate(model, tokens)
    model.set_attn_implementation("sage2")  # no exact attention to compare with
    with pytest.raises(ValueError, match="switched already"):
        calibrate(model, tokens)


@pytest.mark.parametrize(
    ("steps", "bounds"),
    [
        (1, [0, 1]),
        (2, [0, 1, 2]),
        (4, [0, 1, 2, 3, 4]),
        (20, [0, 1, 5, 10, 14, 19, 20]),
        (50, [0, 1, 13, 25, 37, 49, 50]),
    ],
)
def test_first_and_last_step_are_ranges_of_their_own(steps, bounds):
    ranges = mix.step_ranges(steps, 6)
    assert [span.start for span in ranges] + [ranges[-1].stop] == bounds


def cases(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Losses and costs of 3 layers, 3 ranges and 3 recipes, the last of which is exact."""
    generator = np.random.default_rng(seed)
    losses = np.sort(generator.lognormal(size=(3, 3, 3)) ** 2, axis=2)[..., ::-1].copy()
    losses[..., -1] = 0
    return losses, np.sort(generator.uniform(1, 4, (3, 3, 3)), axis=2)


@pytest.mark.parametrize("seed", range(4))
def test_a_mix_is_within_its_limit_and_at_most_a_quarter_slower_than_the_best(seed):
    losses, costs = cases(seed)
    choices = [None, 0, 1, 2]
    every = [
        mix.Mix(rows, columns)
        for rows in np.array(np.meshgrid(*[choices] * 3)).T.reshape(-1, 3).tolist()
        for columns in np.array(np.meshgrid(*[range(3)] * 3)).T.reshape(-1, 3).tolist()
    ]
    for share in (0.05, 0.3, 0.7):
        limit = share * losses[..., 0].sum()
        found = mix.fastest_mix(losses, costs, limit)
        best = min(one.total(costs) for one in every if one.total(losses) <= limit)
        assert found.total(losses) <= limit and found.total(costs) <= 1.25 * best


def test_without_a_limit_the_fastest_recipe_runs_everywhere_and_kept_layers_stay():
    losses, costs = cases(0)
    assert (mix.fastest_mix(losses, costs, math.inf).cells() == 0).all()
    cells = mix.fastest_mix(losses, costs, math.inf, (None, 2, None)).cells()
    assert (cells[1] == 2).all() and (cells[[0, 2]] == 0).all()


def test_neighbouring_ranges_become_one_rule_and_the_last_one_counts_from_the_end():
    ranges = mix.step_ranges(20, 6)
    found = mix.Mix((None, 2), (1, 1, 0, 0, 0, 1)).config(("sage3", "sage2", "exact"), ("a", "b"), ranges)
    assert found == SageConfig(
        "sage3", layers=(LayerRule("b", "exact"),), steps=(StepRule(0, 5, "sage2"), StepRule(-1, None, "sage2"))
    )


def test_losses_of_the_fastest_recipe_add_up_to_the_measured_one():
    losses = module._spread(np.array([[[1.0, 0.1, 0], [4, 1, 0]], [[3, 0.2, 0], [0, 0, 0]]]), [1.0, 3.0], 8.0)
    assert losses[..., 0].tolist() == [[0.5, 6.0], [1.5, 0.0]] and losses[0, 1, 1] == 1.5


def test_a_few_prompts_that_differ_say_what_to_expect_of_others():
    assert bound([1.0, 2.0, 3.0]) == 3.0 and bound([2.0] * 4) == 2.0
    assert bound([1.0, 2.0, 4.0, 8.0]) > 8.0


def test_time_is_by_the_table_of_costs_only_where_it_has_the_very_recipe():
    request = Request("sage2", "cuda", (9, 0), torch.bfloat16, 1, 32, 32, 8192, 8192, 64, 64, "none", False, False)
    low, exact = (subjects.call_us(replace(request, recipe=name, aligned=True)) for name in ("sage2", "exact"))
    assert 100 < low < exact < 1e5
    assert subjects.call_us(replace(request, recipe="sage3")) is None  # runs sage2 there
    assert subjects.call_us(replace(request, device_type="cpu", capability=None, dtype=torch.float32)) is None


def test_the_demo_has_38_db_and_three_quarters_in_fp4_within_its_budget():
    config = SageConfig.from_file(TINY_VIDEO / "calibrated.json")
    result = json.loads((TINY_VIDEO / "calibration.json").read_text())
    defaults = json.loads((TINY_VIDEO / "generation.json").read_text())
    steps = defaults["num_inference_steps"]
    layers = [f"transformer_blocks.{layer}.attn1" for layer in range(6)]
    recipes = [config.resolve(layer, step, steps) for layer in layers for step in range(steps)]
    assert recipes.count("sage3") / len(recipes) == result["shares"]["sage3"] >= 0.75
    assert {clip["prompt"]: clip["psnr"] >= 38 for clip in result["clips"]} == dict.fromkeys(defaults["prompts"], True)
    assert max(*result["errors"].values(), *result["held_out"].values()) <= result["budget"]
    prompts = (TINY_VIDEO / "prompts.txt").read_text().splitlines()
    assert prompts == [*result["errors"], *result["held_out"]]


class Page(HTMLParser):
    """Tags that are open, and the sources and texts of a page."""

    VOID = frozenset({"meta", "img", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.sources, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def parse(text: str) -> Page:
    page = Page(text)
    assert not page.open and all(source.startswith("data:") for source in page.sources)
    assert "prefers-color-scheme: dark" in text and not re.search(r"https?://", text)
    return page


def test_the_page_of_a_calibration_holds_its_numbers_and_loads_nothing(measured):
    _, calibration, _ = measured
    page = parse(html_report.calibration_page(calibration, {"torch": "<2>"}))
    for text in (*calibration.layers, *calibration.ranges, f"{calibration.errors[0]:.4f}", "torch <2>", "order sage3"):
        assert text in page.text


@pytest.mark.audit
def test_chromium_draws_the_page_in_light_and_in_dark(measured, tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    (tmp_path / "page.html").write_text(html_report.calibration_page(measured[1], {}))
    papers = []
    for scheme in (1, 0):  # light, dark
        picture = tmp_path / f"{scheme}.png"
        options = ["--headless", "--no-sandbox", f"--blink-settings=preferredColorScheme={scheme}"]
        options += ["--window-size=900,1400", f"--screenshot={picture}", (tmp_path / "page.html").as_uri()]
        subprocess.run([browser, *options], check=True, capture_output=True, timeout=300)
        pixels = np.asarray(Image.open(picture).convert("RGB")).astype(int)
        papers.append(int(pixels[0, 0].sum()))
        assert (pixels[..., 0] - pixels[..., 2] > 100).sum() > 1000  # the heat map's colour
    assert papers[0] > 3 * 250 and papers[1] < 3 * 40


def test_calibrate_and_compare_write_files_and_pages(tmp_path, capsys):
    tiny.cogvideox(num_layers=1).save_pretrained(tmp_path / "pipe")
    (tmp_path / "prompts.txt").write_text("a red ball\n\na blue ball\n", encoding="utf-8-sig")
    common = ["--pretrained", tmp_path / "pipe", "--steps", 2, "--height", 64, "--width", 64, "--frames", 9]
    common += ["--guidance-scale", 1, "--device", "cpu", "--html", tmp_path / "page.html"]
    arguments = [*common, "--prompts", tmp_path / "prompts.txt", "--held-out", 1, "--output", tmp_path / "c.json"]
    assert main(["calibrate", *map(str, arguments), "--budget", "0.5"]) == 0
    assert "on 1 other prompts" in capsys.readouterr().out
    assert "step 1" in parse((tmp_path / "page.html").read_text()).text
    assert json.loads((tmp_path / "c.measurements.json").read_text())["facts"]["seed"] == 0
    assert '"a red ball | ' in (tmp_path / "c.measurements.json").read_text()
    arguments = [*common, "--prompt", "a <red> ball", "--config", tmp_path / "c.json", "--output", tmp_path / "out"]
    assert main(["compare", *map(str, arguments)]) == 0
    page = parse((tmp_path / "page.html").read_text())
    assert "a <red> ball" in page.text and "step 1" in page.text
    assert [source[:22] for source in page.sources] == ["data:video/mp4;base64,"] * 2
    assert main(["calibrate", *map(str, [*common[:2], "--prompts", tmp_path / "none.txt"])]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_a_text_calibrates_a_language_model(tmp_path, capsys):
    tiny.llama().save_pretrained(tmp_path / "llama")
    tiny.tokenizer().save_pretrained(tmp_path / "llama")
    (tmp_path / "text.txt").write_text("a red ball rolls " * 40)
    arguments = ["--pretrained", tmp_path / "llama", "--text", tmp_path / "text.txt", "--output", tmp_path / "c.json"]
    assert main(["calibrate", *map(str, arguments), "--device", "cpu"]) == 0
    assert SageConfig.from_file(tmp_path / "c.json").architecture == "LlamaForCausalLM (2 layers)"
    assert "KL divergence" in capsys.readouterr().out


def test_a_last_window_without_a_token_to_predict_through_a_kv_cache_adds_no_loss():
    config = tiny.llama().config
    config.head_dim = 64
    model = LlamaForCausalLM(config).eval()
    windows = [torch.randint(32, (40,)), torch.tensor([1, 2])]
    calibration = sage_hf.calibrate(model, windows, budget=10.0, recipes=("sage2",), kv_caches=("int8",))
    assert calibration.config.kv_cache == "int8"
    assert calibration.errors[0] > 0 and calibration.errors[1] == 0


def test_any_difference_of_a_layers_weights_is_noticed():
    layer = torch.nn.Linear(100, 100, bias=False)
    before = subjects.fingerprint(layer)
    with torch.no_grad():
        layer.weight[60:] += 1.0
    assert subjects.fingerprint(layer) != before


def test_an_adapters_scale_tells_weights_apart():
    peft = pytest.importorskip("peft")
    model = tiny.transformer(num_layers=1)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"]), adapter_name="style")
    found = [subjects.fingerprint(model)]
    for scale in (0.5, 2.0):
        model.set_adapters("style", scale)
        found.append(subjects.fingerprint(model))
    model.disable_adapters()
    found.append(subjects.fingerprint(model))
    assert len(set(found)) == 4
    model.enable_adapters()
    model.set_adapters("style", 0.5)
    assert subjects.fingerprint(model) == found[1]


def test_what_scales_outputs_tells_models_apart():
    pipe = tiny.image_pipeline()
    found = [subjects.fingerprint(pipe.unet)]
    pipe.enable_freeu(0.9, 0.2, 1.2, 1.4)
    found.append(subjects.fingerprint(pipe.unet))
    pipe.disable_freeu()
    assert subjects.fingerprint(pipe.unet) == found[0]
    adapter = IPAdapterAttnProcessor2_0(64, 32, num_tokens=(4,), scale=1.0)
    pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn2.set_processor(adapter)
    for scale in (1.0, 0.5, [0.5, 1.0]):
        adapter.scale = [scale]
        found.append(subjects.fingerprint(pipe.unet))
    assert len(set(found)) == 5


def test_any_difference_of_pipeline_inputs_is_noticed():
    pipe, found = tiny.image_pipeline(), set()
    for place in (4000, 5000):
        latents = torch.zeros(10_000)
        latents[place] = 1.0
        image = Image.fromarray(latents.view(100, 100).numpy())
        for value in (latents, image, [latents], {"image": image}, latents.half()):
            facts = subjects.PipelineSubject(pipe, {"given": value}, seed=0, count=1).describe()
            assert facts == subjects.PipelineSubject(pipe, {"given": value}, seed=0, count=1).describe()
            found.add(facts["settings"]["given"])
    assert len(found) == 10


def test_a_faster_mix_is_sought_within_the_budget():
    weights = np.arange(1.0, 9.0)
    names = tuple(f"layer{row}" for row in range(len(weights)))

    class Stepwise:
        """Loses thrice what single layers say as soon as they lose more than 8 together."""

        def loss(self, prompt, config):
            total = sum(w for w, name in zip(weights, names, strict=True) if config.resolve(name) == "sage3")
            return (3 if total > 8 else 1) * total

    losses = np.stack([weights, 0 * weights], -1)[:, None]
    costs = np.broadcast_to([1.0, 2.0], losses.shape)
    measured = module._Measured(names, (None,), losses, costs, False, (weights.sum(),))
    chosen, config, found = module._choose_mix(
        *(Stepwise(), ["text"], ("sage3", "exact"), Measurements({}, None), measured),
        limit=12.0,
        keep_sensitive=0,
        extra=SageConfig("exact"),
        spent=0.0,
    )
    # It aims at 12, then at 3.6, then between them.
    assert found == [6.0] and [config.resolve(name) for name in names].count("sage3") == 3
    assert chosen.total(losses) == 6.0
