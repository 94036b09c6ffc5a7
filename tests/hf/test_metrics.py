"""Errors of outputs, SSIM and PSNR agree with their formulas."""

import math

import numpy as np
import pytest
import torch

from sage_hf.metrics import ErrorSums, psnr, ssim, tensor_errors


def outputs(seed: int = 0, shape: tuple = (2, 3, 8, 5)) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(shape, generator=generator, dtype=torch.float64)
    return exact, exact + 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)


def test_scale_shows_the_uniform_error_that_cosine_hides():
    exact, _ = outputs()
    errors = tensor_errors(exact, 0.5 * exact)
    assert errors.cosine == pytest.approx(1.0, abs=1e-15)
    assert errors.scale == pytest.approx(0.5, rel=1e-15)


def test_worst_head_shows_the_one_head_that_is_wrong():
    exact, _ = outputs()
    other = exact.clone()
    other[1, 2] = 0
    errors = tensor_errors(exact, other)
    assert errors.worst_head_rel_l1 == 1.0
    assert errors.rel_l1 < 0.5


def test_errors_match_errors_computed_by_hand():
    exact, other = torch.tensor([1.0, -2.0, 3.0, -4.0]), torch.tensor([1.5, -2.0, 2.0, -4.0])
    errors = tensor_errors(exact.view(1, 1, 2, 2), other.view(1, 1, 2, 2))
    assert errors.rel_l1 == 1.5 / 10 and errors.max_abs == 1.0
    frames = np.zeros((1, 2, 2, 3))
    assert psnr(frames, frames + 0.1) == pytest.approx(20.0, abs=1e-9)


def test_equal_outputs_have_no_error():
    for exact in (outputs()[0], torch.zeros(1, 1, 2, 2)):
        errors = tensor_errors(exact, exact.clone())
        assert (errors.cosine, errors.rel_l1, errors.rmse, errors.scale, errors.max_abs) == (1, 0, 0, 1, 0)
        assert errors.worst_head_rel_l1 == 0


def test_zero_output_and_nan_are_never_taken_for_agreement():
    exact, _ = outputs()
    assert tensor_errors(exact, torch.zeros_like(exact)).cosine == 0
    assert tensor_errors(torch.zeros_like(exact), exact).rel_l1 == math.inf
    broken = exact.clone()
    broken[0, 0, 0, 0] = math.nan
    assert all(math.isnan(value) for value in tensor_errors(exact, broken).to_dict().values())


def test_sums_over_calls_equal_one_call_with_everything():
    pairs = [outputs(seed) for seed in range(3)]
    sums = ErrorSums()
    for exact, other in pairs:
        sums.add(exact, other)
    whole = tensor_errors(torch.cat([exact for exact, _ in pairs]), torch.cat([other for _, other in pairs]))
    assert sums.errors().to_dict() == pytest.approx(whole.to_dict(), rel=1e-12)


def test_low_precision_outputs_are_compared_in_float64():
    exact, _ = outputs()
    errors = tensor_errors(exact, exact.bfloat16())
    assert 0 < errors.rmse < 2**-8 * exact.abs().max()


def test_outputs_that_do_not_fit_are_refused():
    exact, _ = outputs()
    with pytest.raises(ValueError, match=r"\(2, 3, 8, 5\) and \(2, 3, 8\)"):
        tensor_errors(exact, exact[..., 0])
    with pytest.raises(ValueError, match="no elements"):
        tensor_errors(exact[:0], exact[:0])


def videos() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    video = np.cumsum(random.normal(size=(2, 24, 20, 3)), axis=1)
    video = (video - video.min()) / np.ptp(video)
    return video, (video + 0.05 * random.normal(size=video.shape)).clip(0, 1)


def test_ssim_is_its_formula_window_by_window():
    video, other = videos()
    grid = np.arange(11) - 5
    window = np.exp(-(grid[:, None] ** 2 + grid**2) / (2 * 1.5**2))
    window /= window.sum()
    values = []
    for frame in range(2):
        for channel in range(3):
            for y in range(24 - 10):
                for x in range(20 - 10):
                    a = video[frame, y : y + 11, x : x + 11, channel]
                    b = other[frame, y : y + 11, x : x + 11, channel]
                    mean_a, mean_b = (window * a).sum(), (window * b).sum()
                    variance_a, variance_b = (window * (a - mean_a) ** 2).sum(), (window * (b - mean_b) ** 2).sum()
                    covariance = (window * (a - mean_a) * (b - mean_b)).sum()
                    luminance = (2 * mean_a * mean_b + 1e-4) / (mean_a**2 + mean_b**2 + 1e-4)
                    values.append(luminance * (2 * covariance + 9e-4) / (variance_a + variance_b + 9e-4))
    assert ssim(video, other) == pytest.approx(np.mean(values), abs=1e-9)


def test_ssim_of_equal_videos_is_one_and_does_not_depend_on_the_unit():
    video, other = videos()
    assert ssim(video, video) == 1.0
    assert ssim(255 * video, 255 * other, data_range=255) == pytest.approx(ssim(video, other), rel=1e-9)


def test_videos_that_do_not_fit_are_refused():
    video, _ = videos()
    with pytest.raises(ValueError, match="one shape"):
        psnr(video, video[:1])
    with pytest.raises(ValueError, match="at least 11×11"):
        ssim(video[:, :8], video[:, :8])
