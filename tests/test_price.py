"""The benchmark of what the remedies cost: what it measures, and beside what."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pages
import price
import pytest
import torch

import sage_kernels


def test_it_measures_the_shapes_of_the_page():
    shapes = [(row["recipe"], row["shape"]) for row in pages.read_result("nvidia-h200-remedies")["rows"]]
    assert [(case.recipe, case.shape) for case in price.CASES] == shapes


def test_another_checkout_s_package_runs_beside_ours(tmp_path, monkeypatch):
    name = price.copied(Path(sage_kernels.__file__).parents[1], tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    query, key, value = torch.randn(3, 1, 2, 200, 64, generator=torch.Generator().manual_seed(0))
    case = price.Case("sage2", 1, 2, 200, 64)
    ours, theirs = (price.caller(package, case)(query, key, value) for package in (price.PACKAGE, name))
    assert torch.equal(ours[0], theirs[0])
    assert Path(importlib.import_module(name).__file__).is_relative_to(tmp_path)
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)


@pytest.mark.parametrize("recipe", ["sage1", "sage2"])
def test_without_remedies_no_key_is_heavy_and_no_channel_rotated(recipe, monkeypatch):
    recipes = importlib.import_module("sage_kernels.spec.recipe").RECIPES
    monkeypatch.setattr("sage_kernels.spec.recipe.RECIPES", dict(recipes))
    query, key, value = torch.randn(3, 1, 2, 200, 64, generator=torch.Generator().manual_seed(0))
    case = price.Case(recipe, 1, 2, 200, 64)
    with_remedies, without = (price.caller(price.PACKAGE, case, on)(query, key, value)[0] for on in (True, False))
    assert not torch.equal(with_remedies, without)
    assert not torch.equal(without, price.caller(price.PACKAGE, replace(case, recipe="exact"))(query, key, value)[0])


def test_calls_are_captured_elsewhere_and_in_another_order_each_time(monkeypatch):
    sizes, order = [], []
    monkeypatch.setattr(torch, "empty", lambda size, **_: sizes.append(size))
    monkeypatch.setattr(price, "captured", lambda call: call() or call.func.__name__)
    monkeypatch.setattr(
        price, "medians", lambda graphs: [{"one": 1.0, "two": 2.0}[name] + len(sizes) for name in graphs]
    )

    def one(x):
        order.append(("one", x))

    def two(x):
        order.append(("two", x))

    times = price.placed_medians([one, two], lambda: (len(sizes),))
    assert times == [[base + number for number in range(1, price.PLACEMENTS + 1)] for base in (1.0, 2.0)]
    assert len(set(sizes)) == price.PLACEMENTS
    assert order[:4] == [("one", 1), ("two", 1), ("two", 2), ("one", 2)]
