"""The code that README.md and the opening page show runs as it stands."""

from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from markdown_it import MarkdownIt
from torch import nn

from initlib import nets

ROOT = Path(__file__).resolve().parent.parent


def python(page):
    """The blocks of Python in a page."""
    tokens = MarkdownIt().parse((ROOT / page).read_text(encoding="utf-8"))
    return [token.content for token in tokens if token.type == "fence" and token.info == "python"]


@pytest.mark.parametrize("page", ["README.md", "intro.md"])
def test_the_code_of_a_page_runs(page, capsys):
    yours = {"model": nets.mlp([784, 256, 10]), "x": torch.zeros(32, 784), "y": torch.arange(32) % 10}
    blocks = python(page)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), dict(yours))
        assert capsys.readouterr().out.strip()
    plt.close("all")


def test_the_readme_probes_a_model_of_the_reader_s_own_in_five_lines(capsys):
    block = next(block for block in python("README.md") if "import probe" in block)
    assert len([line for line in block.splitlines() if line.strip()]) <= 5
    model = nn.Sequential(*[part for _ in range(12) for part in (nn.Linear(100, 100), nn.ReLU())], nn.Linear(100, 10))
    x = torch.randn(64, 100, generator=torch.Generator().manual_seed(1))
    yours = {"model": model, "x": x, "y": torch.arange(64) % 10}
    exec(compile(block, "README.md", "exec"), yours)
    assert yours["found"].findings[0].kind == "torch's default"
    assert "He's variance" in capsys.readouterr().out
    plt.close("all")
