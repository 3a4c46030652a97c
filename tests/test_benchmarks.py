"""The benchmark at a small size: its three methods sample the same networks, and it reports what it measured."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).parents[1] / "benchmarks" / "propagation.py"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setenv("INITLIB_DEVICE", "cpu")
    spec = importlib.util.spec_from_file_location("propagation", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "apart", lambda job: module.measure(*job))
    return module


@pytest.mark.parametrize("normalize", [None, "scale_and_bias", "batch"])
def test_all_methods_sample_the_same_networks(bench, normalize):
    results = [bench.measure(method, 40, 5, 8, normalize, 300) for method in bench.METHODS]
    for one in results[:2]:
        assert bench.disagreement(one, results[2]) < 6
        assert one["forward"].shape == one["backward"].shape == (300, 5)
    off = {**results[0], "backward": results[0]["backward"] * np.exp(0.3 * np.arange(5))}
    assert bench.disagreement(off, results[2]) > 6


def test_report_has_every_row_and_is_written(bench, monkeypatch, tmp_path, capsys):
    output = tmp_path / "results.json"
    arguments = [
        "--width",
        "30",
        "--depth",
        "4",
        "--samples",
        "5",
        "--networks",
        "3",
        "--few",
        "2",
        "--widths",
        "30",
        "60",
    ]
    monkeypatch.setattr(sys, "argv", ["propagation.py", *arguments, "--output", str(output)])
    bench.main()
    shown = capsys.readouterr().out
    report = json.loads(output.read_text(encoding="utf-8"))
    assert [(row["setting"], row["method"]) for row in report["experiment"]] == [
        (setting, method) for setting in bench.SETTINGS for method in bench.METHODS
    ]
    for row in report["experiment"]:
        assert row["seconds"] > 0
        assert row["memory"] > 1e7
        assert f"{row['seconds']:.3f}" in shown
    assert [row["width"] for row in report["growth"]] == [30, 60]
    assert all(rate > 0 for rate in report["rates"]["5"].values())
