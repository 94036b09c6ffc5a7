"""Metrics of the distance between a low-bit result and the exact result, for tensors and videos.

Each function takes the exact result first and computes in float64.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class TensorErrors:
    """Errors of an attention output O' against the exact output O.

    Attributes:
        cosine: ⟨O, O'⟩ / (|O|·|O'|) over all elements.
        rel_l1: Σ|O − O'| / Σ|O|.
        rmse: sqrt(mean((O − O')²)).
        scale: the α for which α·O is closest to O' (least squares); cosine does not depend on α.
        max_abs: max |O − O'|.
        worst_head_rel_l1: the largest rel_l1 of a single head of a single sample.
    """

    cosine: float
    rel_l1: float
    rmse: float
    scale: float
    max_abs: float
    worst_head_rel_l1: float

    def to_dict(self) -> dict[str, float]:
        """Return the errors by name."""
        return asdict(self)


class ErrorSums:
    """Running sums from which TensorErrors over many calls are computed, without keeping the tensors."""

    def __init__(self) -> None:
        self._count = 0
        self._dot = self._exact_squared = self._other_squared = 0.0
        self._abs_difference = self._abs_exact = self._squared_difference = 0.0
        self._max_abs = self._worst_head = 0.0

    def add(self, exact: Tensor, other: Tensor) -> None:
        """Add the outputs of one call, exact and other: (B, H, N, D), any dtype.

        Raises:
            ValueError: the shapes differ or are not (B, H, N, D).
        """
        if exact.shape != other.shape or exact.ndim != 4:
            raise ValueError(f"expected two outputs (B, H, N, D), got {tuple(exact.shape)} and {tuple(other.shape)}")
        self._count += exact.numel()
        for exact_head, other_head in zip(exact.flatten(0, 1), other.flatten(0, 1), strict=True):
            a, b = exact_head.double(), other_head.double()
            difference = (a - b).abs()
            abs_difference, abs_exact = difference.sum().item(), a.abs().sum().item()
            self._dot += (a * b).sum().item()
            self._exact_squared += a.square().sum().item()
            self._other_squared += b.square().sum().item()
            self._abs_difference += abs_difference
            self._abs_exact += abs_exact
            self._squared_difference += difference.square().sum().item()
            if difference.numel():
                self._max_abs = _nan_max(self._max_abs, difference.max().item())
            self._worst_head = _nan_max(self._worst_head, _ratio(abs_difference, abs_exact))

    def errors(self) -> TensorErrors:
        """Return the errors over all outputs added so far.

        Raises:
            ValueError: nothing was added.
        """
        if not self._count:
            raise ValueError("no elements to compare")
        norms = math.sqrt(self._exact_squared) * math.sqrt(self._other_squared)
        equal = self._squared_difference == 0
        return TensorErrors(
            cosine=1.0 if equal else self._dot / norms if norms else 0.0,
            rel_l1=_ratio(self._abs_difference, self._abs_exact),
            rmse=math.sqrt(self._squared_difference / self._count),
            scale=1.0 if equal else _ratio(self._dot, self._exact_squared),
            max_abs=self._max_abs,
            worst_head_rel_l1=self._worst_head,
        )


def tensor_errors(exact: Tensor, other: Tensor) -> TensorErrors:
    """Return the errors of `other` against `exact`, both (B, H, N, D).

    Raises:
        ValueError: the shapes differ, are not (B, H, N, D), or have no element.
    """
    sums = ErrorSums()
    sums.add(exact, other)
    return sums.errors()


def psnr(exact: np.ndarray, other: np.ndarray, data_range: float = 1.0) -> float:
    """Return the peak signal-to-noise ratio in dB of two videos of the same shape; inf if they are equal.

    Raises:
        ValueError: the shapes differ.
    """
    exact, other = _same_shape(exact, other)
    mean_squared_error = float(np.mean(np.square(exact - other)))
    return math.inf if mean_squared_error == 0 else 10 * math.log10(data_range**2 / mean_squared_error)


def ssim(exact: np.ndarray, other: np.ndarray, data_range: float = 1.0) -> float:
    """Return the structural similarity of two videos (frames, height, width, channels), averaged over all windows.

    The definition is from Wang et al. 2004: Gaussian windows of 11×11 with σ = 1.5, K1 = 0.01, K2 = 0.03. Only windows
    inside the frame count.

    Raises:
        ValueError: the shapes differ, are not (F, H, W, C), or a frame is smaller than the window.
    """
    exact, other = _same_shape(exact, other)
    size, sigma = 11, 1.5
    if exact.ndim != 4 or min(exact.shape[1:3]) < size:
        raise ValueError(f"SSIM needs videos (frames, height, width, channels) of at least 11×11, got {exact.shape}")
    weights = np.exp(-np.square(np.arange(size) - size // 2) / (2 * sigma**2))
    weights /= weights.sum()

    def blur(video: np.ndarray) -> np.ndarray:
        for axis in (1, 2):
            video = np.lib.stride_tricks.sliding_window_view(video, size, axis=axis) @ weights
        return video

    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    total = 0.0
    for a, b in zip(exact[:, None], other[:, None], strict=True):
        mean_a, mean_b = blur(a), blur(b)
        variance_a, variance_b = blur(a * a) - mean_a**2, blur(b * b) - mean_b**2
        covariance = blur(a * b) - mean_a * mean_b
        similarity = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
        similarity /= (mean_a**2 + mean_b**2 + c1) * (variance_a + variance_b + c2)
        total += float(similarity.mean())
    return total / len(exact)


def _same_shape(exact: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if exact.shape != other.shape or not exact.size:
        raise ValueError(f"expected two videos of one shape, got {exact.shape} and {other.shape}")
    return exact.astype(np.float64), other.astype(np.float64)


def _ratio(numerator: float, denominator: float) -> float:
    if denominator:
        return numerator / denominator
    return 0.0 if numerator == 0 else math.inf


def _nan_max(a: float, b: float) -> float:
    return b if math.isnan(b) or b > a else a
