r"""How many inputs reach one output, how many outputs one input reaches, and their averages.

Every scheme of the book divides by a number of connections. Forward, an output is a sum over
the inputs that reach it (:math:`n_{\mathrm{in}}`, the fan-in); backward, the gradient of an input is a
sum over the outputs that it reaches (:math:`n_{\mathrm{out}}`, the fan-out).
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
SUPPORTED = (nn.Linear, nn.Embedding, *_CONVOLUTIONS, *_TRANSPOSED)


class Fans(NamedTuple):
    """Connections of a layer: inputs that reach one output, outputs that one input reaches.

    Averages over positions, hence not always whole numbers: with stride 2 and a kernel of 3
    an input of a convolution reaches 3/2 outputs a channel. Introduced in chapter 03.
    """

    n_in: float
    n_out: float


def fans(
    layer: nn.Module | torch.Tensor,
    *,
    groups: int = 1,
    stride: int | Sequence[int] = 1,
    transposed: bool = False,
) -> Fans:
    r"""Fan-in and fan-out of a layer, or of a bare weight.

    With :math:`C` channels, kernel volume :math:`K`, stride volume :math:`S` and :math:`G` groups:

    ====================================  =================================  ==================================
    layer (shape of its weight)           :math:`n_\mathrm{in}`              :math:`n_\mathrm{out}`
    ====================================  =================================  ==================================
    Linear (out, in)                      in                                 out
    Conv (out, in/G, \*kernel)            :math:`C_\mathrm{in}K/G`           :math:`C_\mathrm{out}K/(GS)`
    ConvTranspose (in, out/G, \*kernel)   :math:`C_\mathrm{in}K/(GS)`        :math:`C_\mathrm{out}K/G`
    Embedding (words, size)               1                                  size
    ====================================  =================================  ==================================

    An embedding looks one row up: one input, the word that is there, reaches each output.

    Parameters
    ----------
    layer : torch.nn.Module or torch.Tensor
        ``nn.Linear``, ``nn.Embedding``, ``nn.Conv1d/2d/3d``, ``nn.ConvTranspose1d/2d/3d`` (and
        subclasses), or a weight of two dimensions (a linear layer) or three to five (a
        convolution).
    groups, stride
        For a bare convolution weight; a module brings its own.
    transposed : bool
        For a bare weight: the first dimension counts inputs, as in a transposed convolution or
        in a matrix that is used as ``x @ W``. torch's linear layers store (out, in).

    Raises
    ------
    TypeError
        If ``layer`` is neither of the layers above nor a tensor.
    ValueError
        If a weight has fewer than two or more than five dimensions, is not yet materialised,
        or does not fit ``groups`` or ``stride``.

    Notes
    -----
    Dilation spreads the connections out and leaves their number alone. At a zero-padded border
    fewer inputs reach an output than in the interior, which is what is counted here: a 3 x 3
    kernel with padding 1 on an 8 x 8 image has (22/24)^2 = 84 % of these connections.
    ``torch.nn.init`` counts the second dimension of a weight times its kernel as fan-in and the
    first times the kernel as fan-out, whatever groups and stride are. That is another fan-out
    for convolutions with groups or stride, and for transposed convolutions it swaps the two.

    Introduced in chapter 03.

    Examples
    --------
    >>> fans(nn.Conv2d(16, 32, 3, stride=2, groups=4))
    Fans(n_in=36, n_out=18)
    """
    if not isinstance(layer, (torch.Tensor, *SUPPORTED)):
        names = ", ".join(kind.__name__ for kind in SUPPORTED)
        raise TypeError(f"layer must be a weight tensor or one of {names}, got {type(layer).__name__}")
    if isinstance(layer, torch.Tensor):
        return _fans_of_weight(layer, groups, stride, transposed)
    if groups != 1 or stride != 1 or transposed:
        raise ValueError(f"groups, stride and transposed describe a bare weight; {type(layer).__name__} brings its own")
    if isinstance(layer, nn.Embedding):
        return Fans(1, layer.embedding_dim)
    if isinstance(layer, nn.Linear):
        return _fans_of_weight(layer.weight, 1, 1, False)
    return _fans_of_weight(layer.weight, layer.groups, layer.stride, isinstance(layer, _TRANSPOSED))


def _fans_of_weight(weight: torch.Tensor, groups: int, stride: int | Sequence[int], transposed: bool) -> Fans:
    if torch.nn.parameter.is_lazy(weight):
        raise ValueError("layer has no shape yet (it is lazy): run one forward pass first")
    shape = tuple(weight.shape)
    if not 2 <= len(shape) <= 5:
        raise ValueError(
            f"a weight must have 2 dimensions (linear) or 3 to 5 (convolution), got shape {shape}; "
            "biases and gains have no fans"
        )
    kernel = shape[2:]
    strides = tuple(stride) if isinstance(stride, Sequence) else (stride,) * len(kernel)
    if len(strides) != len(kernel) or not all(_is_count(s) for s in strides):
        raise ValueError(f"stride must be a positive integer or {len(kernel)} of them, got {stride!r}")
    if not kernel and stride != 1:
        raise ValueError(f"stride must be 1 for a linear weight, got {stride!r}")
    if not _is_count(groups) or shape[0] % groups:
        raise ValueError(
            f"groups must be a positive divisor of the weight's first dimension {shape[0]}, got {groups!r}"
        )
    if not kernel and groups != 1:
        raise ValueError(f"groups must be 1 for a linear weight, got {groups}")
    volume = math.prod(kernel)
    first = shape[0] // groups * volume  # per group: inputs if transposed, else outputs
    second = shape[1] * volume
    strided = math.prod(strides)
    if transposed:
        return Fans(_whole(first / strided), _whole(second))
    return Fans(_whole(second), _whole(first / strided))


def _is_count(value) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value > 0


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number


#: The averages of fan-in and fan-out that a scheme can divide by, by name.
AVERAGES: dict[str, Callable] = {
    "fan_in": lambda n_in, n_out: n_in,
    "fan_out": lambda n_in, n_out: n_out,
    "arithmetic": lambda n_in, n_out: (n_in + n_out) / 2,
    "geometric": lambda n_in, n_out: (n_in * n_out) ** 0.5,
    "contraharmonic": lambda n_in, n_out: (n_in**2 + n_out**2) / (n_in + n_out),
    "harmonic": lambda n_in, n_out: 2 * n_in * n_out / (n_in + n_out),
}


def average(n_in, n_out, kind: str):
    r"""The average of two fans that a scheme divides by.

    ==================  =================================================================
    ``kind``            value
    ==================  =================================================================
    ``fan_in``          :math:`m`
    ``fan_out``         :math:`n`
    ``arithmetic``      :math:`(m+n)/2`
    ``geometric``       :math:`\sqrt{mn}`
    ``contraharmonic``  :math:`(m^2+n^2)/(m+n)`; Su's "quadratic" one :cite:p:`su2021fans`, not a root mean square
    ``harmonic``        :math:`2mn/(m+n)`
    ==================  =================================================================

    Parameters
    ----------
    n_in, n_out : float or numpy.ndarray
        Fan-in :math:`m` and fan-out :math:`n`, positive.
    kind : str
        A key of ``AVERAGES``.

    Raises
    ------
    ValueError
        If ``kind`` is not one of the above, or a fan is not positive.

    Notes
    -----
    Introduced in chapter 04 (arithmetic) and chapter 05 (the others).
    """
    if not isinstance(kind, str) or kind not in AVERAGES:
        raise ValueError(f"average must be one of {', '.join(AVERAGES)}, got {kind!r}")
    if not (np.greater(n_in, 0).all() and np.greater(n_out, 0).all()):
        raise ValueError(f"n_in and n_out must be positive, got {n_in!r} and {n_out!r}")
    return AVERAGES[kind](n_in, n_out)
