"""Draw the picture of the opening page and the README: `make cover` writes _static/cover.png.

Second moment of the pre-activations, layer by layer, in rectified networks of 50 layers: predicted (lines) by
q_l = q_0 · mσ² · (mσ²/2)^(l-1), measured (points) in networks drawn at random, up to where float32 ends.
"""

import math
from pathlib import Path

import numpy as np
import torch

from initlib import Scheme, check, figures, propagate, schemes

WIDTH, DEPTH, NETWORKS, SAMPLES = 256, 50, 20, 16
ARMS = {
    "N(0, 1)": Scheme("unscaled", gain=math.sqrt(WIDTH)),
    "He's std + 25 %": schemes.he_normal.replace(gain=1.25 * math.sqrt(2)),
    "He: 2/m": schemes.he_normal,
    "Glorot": schemes.glorot_normal,
    "torch's default": schemes.torch_default,
    "N(0, 0.01²)": Scheme("small", gain=0.01 * math.sqrt(WIDTH)),
}


def predicted(scheme):
    """Second moment of the pre-activations of layers 1 to DEPTH for inputs of second moment one."""
    factor = WIDTH * scheme.variance(WIDTH, WIDTH)
    return factor * (factor / 2) ** np.arange(DEPTH)


def draw(path):
    """Measure, check the early layers against the prediction, and write the picture."""
    figures.use_style()
    fig, ax = figures.subplots(height=4.2, width=6.4)
    layers = np.arange(1, DEPTH + 1)
    smallest, largest = torch.finfo(torch.float32).smallest_normal * 2.0**-23, torch.finfo(torch.float32).max
    for number, (label, scheme) in enumerate(ARMS.items()):
        trace = propagate([WIDTH] * (DEPTH + 1), scheme, torch.relu, networks=NETWORKS, samples=SAMPLES, seed=number)
        theory = predicted(scheme)
        check(label, trace.forward[:, 1:6] / theory[:5], 1.0, resolution=0.5)
        color = figures.COLORS[number]
        figures.theory(ax, layers, theory, color=color)
        measured = trace.forward[:, 1:]
        alive = np.isfinite(measured).all(0) & (measured > 0).all(0)
        shown = alive & (layers % 3 == 1)
        figures.measured(ax, layers[shown], measured[:, shown], color=color, marker=figures.MARKERS[number])
        ax.annotate(label, (DEPTH, min(max(theory[-1], 1e-102), 1e87)), xytext=(6, 0), textcoords="offset points",
                    color="0.15", va="center", annotation_clip=False, fontsize="medium")  # fmt: skip
    for limit, where, text in ((largest**2, "top", "float32 overflows"), (smallest**2, "bottom", "float32 is zero")):
        edge = 1e92 if where == "top" else 1e-108
        ax.axhspan(min(limit, edge), max(limit, edge), color="0.85", zorder=0)
        ax.text(1.5, math.sqrt(limit) * math.sqrt(edge), text, va="center", fontsize="small", color="0.25")
    ax.set(yscale="log", ylim=(1e-108, 1e92), xlim=(0, DEPTH + 0.5), xlabel="layer")
    ax.set(ylabel="second moment of the signal, $q_l$")
    ax.set_yticks([1e-90, 1e-60, 1e-30, 1, 1e30, 1e60])
    fig.savefig(path)


if __name__ == "__main__":
    draw(Path(__file__).parent.parent / "_static" / "cover.png")
