"""The cost model of Blackwell GPUs: what it is fitted to, what it scales, and that it claims no measurement."""

import blackwell_model as model
import pytest

LOOPS = {(gpu.name, head_dim): model.Loop(600, 64, 82) for gpu in model.GPUS for head_dim in (64, 128)}


def preparation(ms, copy_ms, tokens=16384):
    sizes = {"batch": 1, "heads": model.TOKENS_AND_HEADS // tokens, "tokens": tokens, "head_dim": 128}
    ours = {"kernels": "cuda", **sizes, "ms": ms, "copy_ms": copy_ms}
    theirs = {"kernels": "sageattention3", **sizes, "ms": ms / 10}
    rows = [{"phase": phase, **row} for phase in ("all", "delta_scores") for row in (ours, theirs)]
    return {"copy_bandwidth": 4e12, "rows": rows}


def test_the_published_kernel_has_its_published_speed():
    loop, share = model.PUBLISHED[128], model.fitted_share()
    assert 0 < share < 1
    for tokens in (4096, 16384):
        ms = model.attention_ms(model.RTX_5090, loop, tokens, 128, False, share)
        assert 4 * model.TOKENS_AND_HEADS * tokens * 128 / ms / 1e9 == pytest.approx(model.PUBLISHED_TOPS)


def test_every_row_and_both_ends_of_the_text_say_that_it_is_an_estimate():
    rows = model.estimates(model.GPUS, LOOPS, None)
    assert rows and all(row["estimate"] is True for row in rows)
    assert model.assumptions(LOOPS, None)[0] == "ESTIMATES. Nothing here was measured on a Blackwell GPU."
    assert model.table(rows).startswith("| estimated |")


def test_without_measured_preparation_only_its_least_time_is_given():
    for row in model.estimates(model.GPUS, LOOPS, None):
        assert row["preparation_ms"] is None and row["end_to_end_tflops"] is None and row["least_preparation_ms"] > 0
    assert "nvidia-h200-sage3.json is missing" in model.assumptions(LOOPS, None)[-1]


@pytest.mark.parametrize(("ms", "copy_ms", "bound"), [(3.0, 0.001, "issue"), (0.001, 3.0, "copy")])
def test_preparation_takes_its_instructions_or_its_bytes(ms, copy_ms, bound):
    gpu = model.RTX_5090
    expected = {
        "issue": 3 * model.H200.issues_per_second / gpu.issues_per_second,
        "copy": 3 * 4e12 / gpu.bandwidth,
    }
    found = model.preparation_ms(gpu, 16384, 128, preparation(ms, copy_ms))
    assert found == pytest.approx(2 * expected[bound])
    assert model.preparation_ms(gpu, 4096, 128, preparation(ms, copy_ms)) is None


def test_a_pass_that_rescales_less_often_is_no_slower():
    share = model.fitted_share()
    always, sometimes = model.Loop(900, 0, 82), model.Loop(836, 64, 82)
    times = [model.attention_ms(model.RTX_5090, loop, 16384, 128, False, share) for loop in (always, sometimes)]
    assert times[1] < times[0]
    assert model.grown_share(1, 16) == 1 and model.grown_share(128, 16) < model.grown_share(32, 16) < 1


def test_exponentials_bound_a_kernel_of_few_instructions():
    few, fewer = (model.clocks(model.RTX_5090, model.Loop(count, 0, 82), 64, 128) for count in (500, 400))
    assert few == fewer


@pytest.mark.audit
def test_instructions_are_those_of_this_build():
    if reason := model.nvfp4_unsupported((12, 0), tuple(map(int, model.triton.__version__.split(".")[:2]))):
        pytest.skip(reason)
    loop = model.loop_of(model.compiled(64, (12, 0)).main_loop)
    assert 400 < loop.least < 700 and loop.rescaling >= 32 and loop.special == 82
