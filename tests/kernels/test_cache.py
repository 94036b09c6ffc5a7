"""The line that says that GPU kernels are compiled: once, and only while they are."""

import logging
import threading

import pytest

from sage_kernels import cache


@pytest.fixture(autouse=True)
def nothing_announced(monkeypatch):
    monkeypatch.setattr(cache, "_announced", threading.Event())


def test_compilation_is_announced_once_while_the_call_waits(monkeypatch, caplog):
    monkeypatch.setattr(cache, "PATIENCE", 0.01)
    for _ in range(2):
        with cache.announcing_if_slow():
            assert cache._announced.wait(10)
        cache.announce_compilation()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "compiling GPU kernels" in caplog.text and str(cache.cache_folder()) in caplog.text


def test_what_is_read_from_a_cache_announces_nothing(caplog):
    with cache.announcing_if_slow():
        pass
    assert not caplog.records and not cache._announced.is_set()
