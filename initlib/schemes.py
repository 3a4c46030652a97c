r"""Initialisation schemes: one family, variance = gain² / average fan, and a distribution.

A scheme is used in three ways:

- ``scheme(weight)`` fills a tensor in place, as the functions of ``torch.nn.init`` do;
- ``scheme.variance(n_in, n_out)`` is the number, for a prediction;
- ``initialize(model, scheme)`` (:mod:`initlib.model`) goes over a whole model.
"""

import dataclasses
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real

import torch
from torch import nn

from initlib.fans import Fans, average, fans
from initlib.runtime import check_positive
from initlib.tables import Table

#: Standard deviation of a standard normal that is cut at ±2: 0.87962566.
TRUNCATION = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))

DISTRIBUTIONS = ("normal", "uniform", "truncated_normal")


@dataclass(frozen=True)
class Initializer(ABC):
    """What every scheme can do: fill a weight in place, and say which variance that gives.

    Attributes
    ----------
    name : str
    use : str
        What it is for, in a few words.
    chapter : str
        The chapter that derives it, as in ``06``.
    """

    name: str
    use: str = field(default="", kw_only=True, repr=False, compare=False)
    chapter: str = field(default="", kw_only=True, repr=False, compare=False)

    def __call__(
        self,
        weight: torch.Tensor,
        *,
        generator: torch.Generator | None = None,
        groups: int = 1,
        stride: int | Sequence[int] = 1,
        transposed: bool = False,
    ) -> torch.Tensor:
        """Fill ``weight`` in place, without recording gradients, and return it.

        Parameters
        ----------
        weight : torch.Tensor
            Weight of a linear layer, (out, in), or of a convolution, (out, in/groups, \\*kernel),
            of any floating-point dtype, on any device.
        generator : torch.Generator, optional
            Source of the random numbers, on the device of ``weight``; torch's global one if
            left out.
        groups, stride, transposed
            Geometry, as in :func:`initlib.fans.fans`.

        Raises
        ------
        TypeError
            If ``weight`` is not a floating-point tensor.
        ValueError
            If its shape has no fans, or if its dtype cannot hold the scheme's scale. Nothing
            has been changed then.

        Warns
        -----
        UserWarning
            If ``weight`` is empty: there is nothing to fill.
        """
        if not isinstance(weight, torch.Tensor):
            raise TypeError(f"weight must be a tensor, got {type(weight).__name__}")
        connections = self.connections(weight, groups=groups, stride=stride, transposed=transposed)
        return self.fill_(weight, connections, generator=generator)

    @abstractmethod
    def variance(self, n_in: float, n_out: float) -> float:
        """Variance of one weight of a layer with these fans."""

    def connections(self, layer: nn.Module | torch.Tensor, **geometry) -> Fans:
        """The fans that this scheme counts for a layer: those of :func:`initlib.fans.fans`."""
        return fans(layer, **geometry)

    def fill_(
        self, weight: torch.Tensor, connections: Fans, *, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """Fill a weight of any shape in place, as that of a layer with these connections.

        The call for a stack of matrices (networks, n_out, n_in). Errors as for a call.
        """
        self.check(weight, connections, generator)
        if weight.numel() == 0:
            warnings.warn(
                f"{self.name}: weight of shape {tuple(weight.shape)} is empty, nothing to fill",
                UserWarning,
                stacklevel=3,
            )
            return weight
        with torch.no_grad():
            if weight.dtype in (torch.float32, torch.float64):
                self._draw_(weight, connections, generator)
            else:  # draw in single precision, then round once
                exact = torch.empty_like(weight, dtype=torch.float32)
                self._draw_(exact, connections, generator)
                weight.copy_(exact)
        return weight

    def fill_bias_(self, layer: nn.Module, *, generator: torch.Generator | None = None) -> str:
        """Set the bias of a layer and say to what: to zero."""
        with torch.no_grad():
            layer.bias.zero_()
        return "zero"

    def check(self, weight: torch.Tensor, connections: Fans, generator: torch.Generator | None = None) -> None:
        """Raise the errors of a call without making it."""
        if not weight.is_floating_point():
            raise TypeError(f"weight must have a floating-point dtype, got {weight.dtype}")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator, got {generator!r}")
        if generator is not None and generator.device.type != weight.device.type:
            raise ValueError(
                f"generator must be on the device of weight, {weight.device}, got one on {generator.device}"
            )
        scale = self._scale(connections) if weight.numel() else 0
        limits = torch.finfo(weight.dtype)
        if scale and not limits.tiny <= scale <= limits.max / 10:
            raise ValueError(
                f"{self.name} gives weights of size {scale:.3g} for {connections}, which the "
                f"weight's dtype {weight.dtype} cannot hold: allowed is {limits.tiny:.3g} to "
                f"{limits.max / 10:.3g}"
            )

    def _scale(self, connections: Fans) -> float:
        return math.sqrt(self.variance(*connections))

    @abstractmethod
    def _draw_(self, weight: torch.Tensor, connections: Fans, generator: torch.Generator | None) -> None:
        """Fill a non-empty float32 or float64 tensor in place."""

    def replace(self, **changes) -> "Initializer":
        """A copy with some attributes changed, say ``he_normal.replace(average="fan_out")``."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Scheme(Initializer):
    r"""Independent weights of mean zero and variance :math:`\sigma_w^2 = g^2 / \bar n`.

    Parameters
    ----------
    name : str
    gain : float
        :math:`g`, positive: 1 for a linear layer, :math:`\sqrt2` behind a rectifier.
    average : str
        :math:`\bar n`, one of :data:`initlib.fans.AVERAGES`.
    distribution : str
        ``normal``; ``uniform``, on :math:`\pm\sqrt3\,\sigma_w`; or ``truncated_normal``, a normal
        of standard deviation :math:`\sigma_w/0.87962566` cut at twice that, which leaves
        variance :math:`\sigma_w^2`.
    source : str
        Citation key of the bibliography.

    Raises
    ------
    TypeError, ValueError
        If the gain is not a number, or not positive and finite; ValueError also if a name is unknown.

    Notes
    -----
    Introduced in chapter 03; the averages in chapters 04 and 05, the gains in 06 and 07.

    Examples
    --------
    >>> glorot_normal.variance(150, 50)
    0.01
    """

    gain: float = 1.0
    average: str = "fan_in"
    distribution: str = "normal"
    source: str = ""

    def __post_init__(self):
        check_positive("gain", self.gain)
        average(1, 1, self.average)
        if self.distribution not in DISTRIBUTIONS:
            raise ValueError(f"distribution must be one of {', '.join(DISTRIBUTIONS)}, got {self.distribution!r}")

    def variance(self, n_in: float, n_out: float) -> float:
        r"""Variance of one weight, :math:`\sigma_w^2 = g^2/\bar n`.

        Parameters
        ----------
        n_in, n_out : float
            Fan-in and fan-out of the layer, positive.

        Raises
        ------
        ValueError
            If a fan is not positive.
        """
        _check_fans(n_in, n_out)
        return self.gain**2 / average(n_in, n_out, self.average)

    def std(self, n_in: float, n_out: float) -> float:
        r"""Standard deviation of one weight, :math:`\sigma_w`; errors as for the variance."""
        return math.sqrt(self.variance(n_in, n_out))

    def bound(self, n_in: float, n_out: float) -> float:
        r"""Largest absolute value of a weight; errors as for the variance.

        :math:`\sqrt3\,\sigma_w` for a uniform, :math:`2\sigma_w/0.87962566` for a truncated normal,
        infinite for a normal.
        """
        widths = {"normal": math.inf, "uniform": math.sqrt(3), "truncated_normal": 2 / TRUNCATION}
        return widths[self.distribution] * self.std(n_in, n_out)

    def _draw_(self, weight, connections, generator):
        std, bound = self.std(*connections), self.bound(*connections)
        if self.distribution == "normal":
            weight.normal_(0, std, generator=generator)
        elif self.distribution == "uniform":
            weight.uniform_(-bound, bound, generator=generator)
        else:
            cut = std / TRUNCATION
            nn.init.trunc_normal_(weight, 0.0, cut, -2 * cut, 2 * cut, generator=generator)


@dataclass(frozen=True)
class Constant(Initializer):
    """Every weight is ``value``: zeros, and the constant 0.5 of chapter 01."""

    value: float = 0.0

    def __post_init__(self):
        if isinstance(self.value, bool) or not isinstance(self.value, Real):
            raise TypeError(f"value must be a number, got {self.value!r}")
        if not math.isfinite(self.value):
            raise ValueError(f"value must be finite, got {self.value!r}")

    def variance(self, n_in: float, n_out: float) -> float:
        """Zero: the weights do not differ from each other."""
        return 0.0

    def _scale(self, connections):
        return abs(self.value)

    def _draw_(self, weight, connections, generator):
        weight.fill_(self.value)


@dataclass(frozen=True)
class Orthogonal(Initializer):
    r"""A Haar-distributed orthogonal matrix times a gain.

    Of the matrix (out, in · kernel), the rows or the columns, whichever are fewer, are
    orthonormal. An entry has variance :math:`g^2/\max(\text{rows}, \text{columns})`; entries are uncorrelated
    and not independent.

    Notes
    -----
    Source: :cite:p:`saxe2014exact`. Introduced in chapter 03, used in chapter 12.
    """

    gain: float = 1.0
    source: str = "saxe2014exact"

    def __post_init__(self):
        check_positive("gain", self.gain)

    def variance(self, n_in: float, n_out: float) -> float:
        r"""Variance of one entry of a linear layer's matrix, :math:`g^2/\max(m, n)`."""
        _check_fans(n_in, n_out)
        return self.gain**2 / max(n_in, n_out)

    def connections(self, layer, **geometry):
        """Columns and rows of the matrix that is made orthogonal."""
        fans(layer, **geometry)
        weight = layer.weight if isinstance(layer, nn.Module) else layer
        return Fans(math.prod(weight.shape[1:]), weight.shape[0])

    def _draw_(self, weight, connections, generator):
        columns, rows = connections
        long, short = max(rows, columns), min(rows, columns)
        stack = weight.numel() // (rows * columns)
        gaussian = torch.empty(stack, long, short, dtype=weight.dtype, device=weight.device)
        q, r = torch.linalg.qr(gaussian.normal_(generator=generator))
        # The factorisation fixes signs by convention; undoing that gives Haar measure.
        q = self.gain * q * torch.diagonal(r, dim1=-2, dim2=-1).sign().unsqueeze(-2)
        weight.copy_((q if rows >= columns else q.mT).reshape(weight.shape))


@dataclass(frozen=True)
class TorchDefault(Initializer):
    r"""What torch's linear layers and convolutions draw when nobody asks.

    Weight and bias are uniform on :math:`\pm1/\sqrt f`, of variance :math:`1/(3f)`, whatever the
    activation. torch writes it as ``kaiming_uniform_(weight, a=sqrt(5))``: it is neither He's scheme nor
    LeCun's. The :math:`f` is torch's own count, second dimension of the weight times kernel:
    the fan-in, except for transposed convolutions. Embeddings are standard normal. From the
    same random state it draws the numbers of ``layer.reset_parameters()``, in single precision
    to the bit and in double precision to within rounding.

    Notes
    -----
    Introduced in chapter 02, explained in chapter 03.
    """

    source: str = "pytorch"

    def variance(self, n_in: float, n_out: float) -> float:
        r"""Variance of a weight, :math:`1/(3 n_\mathrm{in})`, with the fan-in as :meth:`connections` counts it."""
        _check_fans(n_in, n_out)
        return 1 / (3 * n_in)

    def connections(self, layer, **geometry):
        """Fans as torch counts them; for an embedding, which torch draws from N(0, 1), a fan-in of 1/3."""
        counted = fans(layer, **geometry)
        if isinstance(layer, nn.Embedding):  # variance 1/(3 * 1/3) = 1
            return counted._replace(n_in=1 / 3)
        weight = layer.weight if isinstance(layer, nn.Module) else layer
        kernel = math.prod(weight.shape[2:])
        return Fans(weight.shape[1] * kernel, weight.shape[0] * kernel)

    def fill_bias_(self, layer, *, generator=None):
        """Draw the bias of a layer as torch does, and say so."""
        connections = self.connections(layer)
        if connections.n_in == 0:
            return super().fill_bias_(layer)
        self.fill_(layer.bias, connections, generator=generator)
        return self.name

    def _draw_(self, weight, connections, generator):
        if connections.n_in < 1:  # an embedding
            weight.normal_(generator=generator)
        else:
            bound = 1 / math.sqrt(connections.n_in)
            weight.uniform_(-bound, bound, generator=generator)


def _check_fans(n_in: float, n_out: float) -> None:
    if not (n_in > 0 and n_out > 0):
        raise ValueError(f"n_in and n_out must be positive, got {n_in!r} and {n_out!r}")


zeros = Constant("zeros", use="biases, and the last layer of a network or a branch; never all weights", chapter="01")
orthogonal = Orthogonal(
    "orthogonal",
    use="deep networks that are linear or nearly so: keeps every length, where the layer does not lose dimensions",
    chapter="12",
)
torch_default = TorchDefault(
    "torch_default", use="what a layer has when nobody asks: a third of the variance that keeps a signal", chapter="03"
)

lecun_normal = Scheme(
    "lecun_normal",
    source="lecun1998efficient",
    use="linear layers: keeps the signal; the start for any activation, with its gain",
    chapter="03",
)
lecun_uniform = lecun_normal.replace(name="lecun_uniform", distribution="uniform")
lecun_truncated = lecun_normal.replace(name="lecun_truncated", distribution="truncated_normal")

glorot_normal = Scheme(
    "glorot_normal",
    average="arithmetic",
    source="glorot2010understanding",
    use="linear layers: a truce between signal and gradient, which keeps both where the fans are equal",
    chapter="04",
)
glorot_uniform = glorot_normal.replace(name="glorot_uniform", distribution="uniform")
glorot_truncated = glorot_normal.replace(name="glorot_truncated", distribution="truncated_normal")

geometric_normal = Scheme(
    "geometric_normal",
    average="geometric",
    source="su2021fans",
    use="stacks of linear layers whose width goes up and down: where it returns, so do signal and gradient",
    chapter="05",
)
geometric_uniform = geometric_normal.replace(name="geometric_uniform", distribution="uniform")

contraharmonic_normal = geometric_normal.replace(
    name="contraharmonic_normal",
    average="contraharmonic",
    use="for comparison: the smallest squared error of signal and gradient together, in one layer",
)
contraharmonic_uniform = contraharmonic_normal.replace(name="contraharmonic_uniform", distribution="uniform")

he_normal = Scheme(
    "he_normal",
    gain=math.sqrt(2),
    source="he2015delving",
    use="layers between rectifiers: makes up for the half that a rectifier cuts off",
    chapter="06",
)
he_uniform = he_normal.replace(name="he_uniform", distribution="uniform")
he_truncated = he_normal.replace(name="he_truncated", distribution="truncated_normal")

#: Every named scheme.
SCHEMES: dict[str, Initializer] = {
    each.name: each
    for each in (
        zeros,
        lecun_normal,
        lecun_uniform,
        lecun_truncated,
        glorot_normal,
        glorot_uniform,
        glorot_truncated,
        geometric_normal,
        geometric_uniform,
        contraharmonic_normal,
        contraharmonic_uniform,
        he_normal,
        he_uniform,
        he_truncated,
        orthogonal,
        torch_default,
    )
}


def constant(value: float) -> Constant:
    """The scheme that sets every weight to ``value``. Introduced in chapter 01."""
    return Constant(f"constant {value:g}" if isinstance(value, Real) else "constant", value)


def get(scheme: str | Initializer) -> Initializer:
    """The scheme of that name; a scheme is passed through.

    Raises
    ------
    ValueError, TypeError
        If no scheme has that name, or ``scheme`` is neither a name nor a scheme.

    Notes
    -----
    Introduced in chapter 03.
    """
    if isinstance(scheme, Initializer):
        return scheme
    if not isinstance(scheme, str):
        raise TypeError(f"scheme must be a name or a scheme, got {type(scheme).__name__}")
    if scheme not in SCHEMES:
        raise ValueError(f"scheme must be one of {', '.join(SCHEMES)}, got {scheme!r}")
    return SCHEMES[scheme]


_FORMULAS = {
    "fan_in": "{g} / m",
    "fan_out": "{g} / n",
    "arithmetic": "{two_g} / (m + n)",
    "geometric": "{g} / √(mn)",
    "contraharmonic": "{g} · (m + n) / (m² + n²)",
    "harmonic": "{g} · (m + n) / (2mn)",
}


def _row(scheme: Initializer, n_in: int, n_out: int) -> tuple[str, str, str, float, float]:
    """Name, formula of the variance, distribution, standard deviation and largest absolute value."""
    std = math.sqrt(scheme.variance(n_in, n_out))
    if isinstance(scheme, Scheme):
        squared = scheme.gain**2
        formula = _FORMULAS[scheme.average].format(g=f"{squared:.4g}", two_g=f"{2 * squared:.4g}")
        formula = formula.removeprefix("1 · ")
        drawn = scheme.distribution.replace("_", " ")
        return scheme.name, formula, drawn, std, scheme.bound(n_in, n_out)
    if isinstance(scheme, Orthogonal):
        return scheme.name, f"{scheme.gain**2:.4g} / max(m, n)", "orthogonal", std, scheme.gain
    if isinstance(scheme, TorchDefault):
        return scheme.name, "1 / (3m)", "uniform", std, math.sqrt(3) * std
    return scheme.name, "0", "constant", std, abs(scheme.value)


def table(n_in: int = 256, n_out: int = 1024) -> Table:
    """Every named scheme: its formula, and its numbers for a layer of ``n_in`` to ``n_out`` units.

    ``std`` is the standard deviation of a weight, ``largest`` a bound on its absolute value.

    Introduced in chapter 04.
    """
    headers = ("scheme", "variance", "drawn", f"std at m={n_in}, n={n_out}", "largest")
    return Table(headers, [_row(scheme, n_in, n_out) for scheme in SCHEMES.values()])
