"""The scripts choose for their process what runs where no kernel is native; the process of the tests outlives them."""

import pytest

import sage_hf
from sage_hf.attention import default_fallback


@pytest.fixture(autouse=True, scope="module")
def the_default_fallback_is_put_back():
    before = default_fallback()
    yield
    sage_hf.set_default_fallback(before)
