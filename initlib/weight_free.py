r"""A layer whose weights are never drawn: all it sees of its input is the Gram matrix.

For weights of entries :math:`N(0, \sigma_w^2)` and inputs :math:`X` (one row a sample) the outputs :math:`X W^\top` are
normal, independent from unit to unit, with covariance :math:`\sigma_w^2 K` between samples, where :math:`K = X X^\top`.
So they can be drawn from the :math:`T \times T` matrix :math:`K` alone, and what the weights do to a gradient later can
be drawn given what they have shown. The law is exact at every width.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from initlib import runtime
from initlib.schemes import Scheme

# Directions in which samples differ by less than a root of this, relative to their size, are beyond single precision.
_NULL = 1e-10


class WeightFree:
    r"""A layer of independent normal weights, for one pass forward and one back.

    Parameters
    ----------
    scheme : Scheme
        Of normal distribution.
    m, n : int
        Numbers of inputs and of outputs; ``m`` is greater than the number of samples :math:`T`.
    generator : torch.Generator
        On the device of the signals.

    Notes
    -----
    Signals have the shape (networks, T, units). Rows may be parallel, equal or zero. With :math:`C C^\top = K` and
    :math:`Z` of entries :math:`N(0, 1)`, forward

    .. math:: U = \sigma_w C Z.

    A gradient :math:`D` that depends on the weights through :math:`U` alone becomes, with :math:`F` of the law of
    :math:`D W'` for fresh weights :math:`W'`,

    .. math:: D W = D U^\top K^{-1} X + F\,(1 - X^\top K^{-1} X).

    Cost: of order :math:`T^2 (m + n)` operations, :math:`T (m + n)` random numbers. Source: the conditioning
    technique of Bolthausen (2014).

    Introduced in chapter 08.
    """

    def __init__(self, scheme: Scheme, m: int, n: int, generator: torch.Generator):
        self.m, self.n, self.generator = m, n, generator
        self.std = scheme.std(m, n)

    def forward(self, x: Tensor, second: Tensor) -> Tensor:
        """Outputs for inputs ``x``, whose second moments over units are ``second``, (networks, T)."""
        rows, size = _rows(x, second)
        root, self.solve = _factor(rows)
        return self._fresh(root, self.n).mul_(size)

    def backward(self, x: Tensor, second: Tensor, u: Tensor, delta: Tensor, delta_second: Tensor) -> Tensor:
        """Gradient at the inputs, given the outputs ``u`` that :meth:`forward` returned and the gradient at them."""
        x, x_size = _rows(x, second)
        delta, delta_size = _rows(delta, delta_second)
        if self.n > x.shape[1]:
            fresh = self._fresh(_factor(delta)[0], self.m)
        else:
            fresh = self.std * _product(delta, self._normal(x, self.n, self.m))
        u = u / torch.where(x_size > 0, x_size, 1)
        unexplained = _product(delta, u.mT).sub_(_product(fresh, x.mT))
        weights = self.solve(runtime.double(unexplained)).to(x.device, x.dtype)
        return fresh.add_(_product(weights, x)).mul_(delta_size)

    def _fresh(self, root: Tensor, units: int) -> Tensor:
        """What fresh weights make of signals whose Gram matrix has this root."""
        return _product(self.std * root, self._normal(root, root.shape[-1], units))

    def _normal(self, x: Tensor, rows: int, units: int) -> Tensor:
        z = torch.empty(len(x), rows, units, dtype=x.dtype, device=x.device)
        return z.normal_(generator=self.generator)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product; on a CPU NumPy's, which is twice as fast as torch's on some, and computes half of A Aᵀ."""
    if a.device.type != "cpu":
        return a @ b
    with np.errstate(over="ignore", invalid="ignore"):  # NumPy would warn of an overflow, torch does not
        return torch.from_numpy(a.numpy() @ b.numpy())


def _rows(x: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of second moment one, or zero, and the sizes that they had: signals of 1e-30 are as good as any."""
    size = second.sqrt().to(x.device, x.dtype).unsqueeze(-1)
    return x / torch.where(size > 0, size, 1), size


def _factor(rows: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A root of the Gram matrix K, and A ↦ A K⁻¹ without the directions in which no sample differs."""
    width = rows.shape[-1]
    wide = runtime.double(rows)
    gram = _product(wide, wide.mT).div_(width)
    # An overflow is reported by the sizes; here it must not stop the other networks.
    gram = torch.where(gram.isfinite().all((-2, -1), keepdim=True), gram, torch.eye(len(gram[0])).to(gram))
    lower, failed = torch.linalg.cholesky_ex(gram)
    sound = (failed == 0) & (lower.diagonal(dim1=-2, dim2=-1).square() > 10 * _NULL).all(-1)
    if sound.all():
        root = lower

        def solve(a):
            return torch.cholesky_solve(a.mT, lower).mT / width
    else:
        # Network by network, so that what one of them draws does not hang on the others.
        sound = sound[:, None, None]
        values, vectors = torch.linalg.eigh(gram)
        # The symmetric root: unlike the eigenvectors' signs it does not hang on rounding.
        exact = torch.where(values > 1e-14 * len(gram[0]), values, 0)  # below is rounding: equal samples stay equal
        root = torch.where(sound, lower, (vectors * exact.sqrt().unsqueeze(-2)) @ vectors.mT)
        kept = torch.where(values > _NULL, 1 / values, 0).unsqueeze(-2)

        def solve(a):
            plain = torch.cholesky_solve(a.mT, lower).mT
            return torch.where(sound, plain, (a @ vectors * kept) @ vectors.mT) / width

    return (math.sqrt(width) * root).to(rows.device, rows.dtype), solve
