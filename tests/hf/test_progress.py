"""A progress bar within a denoising step."""

import io
import sys
from functools import partial

import pytest

from sage_hf.app import progress
from tests.helpers import tiny_pipelines as tiny


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, stream, after=0.0, layers=tiny.LAYERS):
    """Return the text that a call of the denoiser shows."""
    monkeypatch.setattr(progress, "SHOWN_AFTER_SECONDS", after)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "tqdm", partial(progress.tqdm, mininterval=0, miniters=1))
    model = tiny.transformer(layers)
    with progress.layer_progress(model):
        model(**tiny.transformer_inputs())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return stream.getvalue()


def test_the_bar_moves_with_every_attention_layer(monkeypatch):
    text = shown(monkeypatch, Terminal())
    assert "attention layers" in text
    assert all(f"{layer}/{tiny.LAYERS}" in text for layer in range(tiny.LAYERS + 1))


def test_a_call_that_takes_no_time_shows_no_bar(monkeypatch):
    assert shown(monkeypatch, Terminal(), after=60.0) == ""


def test_what_is_no_terminal_stays_clean(monkeypatch):
    assert shown(monkeypatch, io.StringIO()) == ""


def test_a_call_that_fails_leaves_neither_bar_nor_hook(monkeypatch):
    monkeypatch.setattr(progress, "SHOWN_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    model = tiny.transformer(1)
    bars = len(progress.tqdm._instances)
    with pytest.raises(KeyboardInterrupt), progress.layer_progress(model):
        hook = model.transformer_blocks[0].attn1.register_forward_hook(
            lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        model(**tiny.transformer_inputs())
    hook.remove()
    assert len(progress.tqdm._instances) == bars
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
