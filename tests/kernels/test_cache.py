"""The line that says that GPU kernels are compiled: once, and only while they are."""

import logging
import threading

import pytest

from sage_kernels.runtime import cache_folder


@pytest.fixture(autouse=True)
def nothing_announced(monkeypatch):
    monkeypatch.setattr(cache_folder, "_announced", threading.Event())


def test_compilation_is_announced_once_while_the_call_waits(monkeypatch, caplog):
    monkeypatch.setattr(cache_folder, "PATIENCE", 0.01)
    for _ in range(2):
        with cache_folder.announcing_if_slow():
            assert cache_folder._announced.wait(10)
        cache_folder.announce_compilation()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "compiling GPU kernels" in caplog.text and str(cache_folder.cache_folder()) in caplog.text


def test_what_is_read_from_a_cache_announces_nothing(caplog):
    with cache_folder.announcing_if_slow():
        pass
    assert not caplog.records and not cache_folder._announced.is_set()
