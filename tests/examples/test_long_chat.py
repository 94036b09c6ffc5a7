"""The example of a long chat prints what each cache holds, and how fast its tokens come."""

import re

import long_chat

from tests.helpers.cached_models import hands_on


@hands_on
def test_fewer_bits_take_less_memory_and_explain_says_which_kernel_decoded(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["long_chat.py", "--tokens", "700", "--new", "3"])
    long_chat.main()
    printed = capsys.readouterr().out
    caches = re.findall(r"^(\w+) +cache +([\d.]+) MiB, +([\d.]+) tokens a second$", printed, re.MULTILINE)
    assert [name for name, *_ in caches] == ["default", "int8", "int4"]
    default, int8, int4 = (float(size) for _, size, _ in caches)
    assert int4 < int8 < default
    assert all(float(speed) > 0 for *_, speed in caches)
    assert "KV cache" in printed and "reference" in printed
