"""The networks of the training experiments, written plainly.

They are drawn as torch draws them; :func:`initlib.model.initialize` or an arm of
:func:`initlib.train.train` gives them the weights that an experiment asks for.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from initlib import activations
from initlib.activations import Activation
from initlib.runtime import check_count


class Elementwise(nn.Module):
    """An activation as a module.

    Parameters
    ----------
    activation : str, torch.nn.Module or function
        As for :func:`initlib.activations.get`.
    """

    def __init__(self, activation: Activation):
        super().__init__()
        self.function = activations.get(activation)
        self.name = activation if isinstance(activation, str) else getattr(activation, "__name__", "activation")

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        """Apply the activation to each entry."""
        return self.function(u)

    def extra_repr(self) -> str:
        """The activation's name."""
        return self.name


def mlp(widths: Sequence[int], activation: Activation = "relu", *, bias: bool = True) -> nn.Sequential:
    r"""A fully connected network: an activation between its linear layers, none behind the last.

    Parameters
    ----------
    widths : sequence of int
        :math:`n_0, \dots, n_L`: inputs, hidden units, outputs.
    activation : str, torch.nn.Module or function
        As for :func:`initlib.activations.get`; layers share it.
    bias : bool
        Whether the layers have biases.

    Raises
    ------
    TypeError, ValueError
        If a width is not a positive integer, there are fewer than two, or the activation is unknown.

    Notes
    -----
    Introduced in chapter 06.

    Examples
    --------
    >>> len(mlp([196] + [100] * 15 + [10]))  # 16 linear layers, 15 activations between them
    31
    """
    widths = list(widths)
    for width in widths:
        check_count("each of widths", width)
    if len(widths) < 2:
        raise ValueError(f"widths must name at least inputs and outputs, got {widths}")
    layers = []
    for m, n in pairwise(widths):
        layers += [nn.Linear(m, n, bias=bias), Elementwise(activation)]
    return nn.Sequential(*layers[:-1])


def bottleneck(
    inputs: int,
    width: int,
    hidden: int,
    blocks: int,
    outputs: int,
    activation: Activation = "relu",
    *,
    bias: bool = True,
) -> nn.Sequential:
    """A stack of blocks width → hidden → width between a read-in and a head, without skip connections.

    Blocks expand if ``hidden`` exceeds ``width``, and are bottlenecks if it is smaller. The activation acts only
    in the middle of a block: what a block passes on is linear.

    Parameters
    ----------
    inputs, width, hidden, blocks, outputs : int
    activation : str, torch.nn.Module or function
        As for :func:`initlib.activations.get`.
    bias : bool
        Whether the layers have biases.

    Returns
    -------
    torch.nn.Sequential
        With the submodules ``read_in``, ``blocks`` (each of two linear layers with the activation between them)
        and ``head``, so that the ``overrides`` of :func:`initlib.model.initialize` can name them.

    Raises
    ------
    TypeError, ValueError
        If a size is not a positive integer, or the activation is unknown.

    Notes
    -----
    Introduced in chapter 05.
    """
    sizes = {"inputs": inputs, "width": width, "hidden": hidden, "blocks": blocks, "outputs": outputs}
    for name, size in sizes.items():
        check_count(name, size)
    parts = OrderedDict(
        read_in=nn.Linear(inputs, width, bias=bias),
        blocks=nn.Sequential(*(mlp([width, hidden, width], activation, bias=bias) for _ in range(blocks))),
        head=nn.Linear(width, outputs, bias=bias),
    )
    return nn.Sequential(parts)
