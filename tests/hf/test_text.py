"""Text for terminals that know no more than ASCII, or Windows' code page."""

import io
import sys

import pytest
import torch

import sage_hf
from sage_hf.app.cli import main
from sage_hf.explain import Explanation, LayerRow
from sage_hf.text import allow_any_text, to_ascii
from tests.helpers import tiny_pipelines as tiny


def stream(encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)


def test_what_ascii_lacks_is_spelled_out():
    assert to_ascii("2×3 → 16…256 – ü") == "2x3 -> 16...256 - \\xfc"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_an_explanation_and_a_table_of_errors_print_on_any_stream(encoding):
    model = tiny.llama()
    with sage_hf.apply(model, "sage3"), sage_hf.record_layer_errors(model) as recorder:
        model(torch.arange(20)[None])
        print(sage_hf.explain(model), recorder, file=stream(encoding))
    print(sage_hf.explain(model), file=stream(encoding))
    rows = (LayerRow("blöcke.0", "sage3", "exact", reason="head_dim outside 16…256"),)
    assert "bl\\xf6cke.0" in str(Explanation(rows)) and "16...256" in str(Explanation(rows))


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize("command", [["env"], ["explain", "--pretrained", "examples/tiny_video", "--device", "cpu"]])
def test_commands_print_on_any_stream(monkeypatch, encoding, command):
    output = stream(encoding)
    monkeypatch.setattr(sys, "stdout", output)
    assert main(command) == 0
    assert b"sage3" in output.buffer.getvalue()


def test_text_of_the_user_prints_on_any_stream_once_that_is_allowed():
    output = stream("ascii")
    with pytest.raises(UnicodeEncodeError):
        output.write("パンダ")
    allow_any_text(output)
    output.write("パンダ → 1")
    assert output.buffer.getvalue().endswith(b"\\u30c0 -> 1")
