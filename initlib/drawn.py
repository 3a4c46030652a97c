r"""How a weight was drawn, told from its entries.

A weight of many entries gives its own variance away to within the sampling error, and with it the scheme that drew
it; and it shows what was drawn once and used twice, drawn as one matrix and used as several, or drawn in vain.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from initlib import runtime, schemes
from initlib.fans import Fans, fans
from initlib.runtime import double, mean_square

#: Standard errors by which a number must be off before it counts: about once in 16,000 by chance.
ERRORS = 4.0

# How many leading entries of two weights are compared, and how parallel they must be to come from one seed.
_LEADING, _PARALLEL = 64, 1 - 1e-5

# How many entries of a weight tell its kurtosis, and so the sampling error of its variance.
_PART = 2**14


@dataclass(frozen=True)
class Weights:
    """Moments of the entries of a weight.

    Attributes
    ----------
    count : int
    mean, second, fourth : float
        Means of the entries, of their squares and of their fourth powers.
    least, most : float
        Smallest and largest entry.
    orthogonal : bool
        Whether rows or columns, whichever are fewer, are orthogonal and of equal length.
    eps : float
        Relative rounding error of an entry.

    Notes
    -----
    Introduced in chapter 16.
    """

    count: int
    mean: float
    second: float
    fourth: float
    least: float
    most: float
    orthogonal: bool = False
    eps: float = 1e-6

    def error(self) -> float:
        """Relative standard error of the second moment, for independent entries; not below rounding."""
        kurtosis = self.fourth / self.second**2 if self.second > 0 else 1.0
        return max(math.sqrt(max(kurtosis - 1, 0) / self.count), self.eps)

    def off(self, variance: float) -> float:
        """How many standard errors the second moment is from a variance."""
        return abs(self.second / variance - 1) / self.error()


def schemes_of(weights: Weights, counts: Fans, of_torch: Fans | None = None) -> tuple[str, ...]:
    """The schemes that fit a weight within its sampling error, the best first; none if empty.

    Parameters
    ----------
    weights : Weights
    counts : Fans
        Connections of the layer.
    of_torch : Fans, optional
        What torch counts instead, where that differs.

    Notes
    -----
    ``"zero"`` and ``"constant"`` are told by the entries, ``"orthogonal"`` by its rows, ``"torch default"`` also by its
    bound. Of several schemes with the same variance the first is named.

    Introduced in chapter 16.

    Examples
    --------
    >>> schemes_of(Weights(10_000, 0.0, 0.0201, 3 * 0.0201**2, -0.6, 0.6), Fans(100, 100))
    ('he', 'he fan-out')
    """
    if not weights.count or not (math.isfinite(weights.second) and min(counts) > 0):
        return ()
    if weights.second == 0:
        return ("zero",)
    largest = max(-weights.least, weights.most)
    if weights.most - weights.least <= 4 * weights.eps * largest:
        return ("constant",)
    if weights.orthogonal:
        return ("orthogonal",)
    if abs(weights.mean) > ERRORS * math.sqrt(weights.second / weights.count):
        return ()
    m, n = counts
    m_torch, n_torch = of_torch or counts
    candidates = [
        ("he", 2 / m),
        ("lecun", 1 / m),
        ("glorot", 2 / (m + n)),
        ("torch default", 1 / (3 * m_torch)),
        ("he", 2 / m_torch),
        ("glorot", 2 / (m_torch + n_torch)),
        ("selu 3/4", 9 / 16 / m),
        ("he fan-out", 2 / n),
        ("lecun fan-out", 1 / n),
        ("he fan-out", 2 / n_torch),
    ]
    if largest > (1 + 4 * weights.eps) / math.sqrt(m_torch):
        candidates.pop(3)
    found = sorted((weights.off(variance), k, name) for k, (name, variance) in enumerate(candidates))
    return tuple(dict.fromkeys(name for off, _, name in found if off < ERRORS))


def weigh(weight: Tensor, generator: torch.Generator) -> Weights:
    """Moments of the entries of a weight; the fourth from a part of them, for the sampling error alone.

    Notes
    -----
    Introduced in chapter 16.
    """
    w = weight.detach().flatten()
    if not len(w):
        return Weights(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    part = double(w[:_PART])
    second, of_part = mean_square(w), part.square().mean().item()
    fourth = part.square().square().mean().item() * (second / of_part) ** 2 if of_part else 0.0
    eps = max(torch.finfo(weight.dtype).eps, 1e-6)
    least, most = (each.item() for each in w.aminmax())
    mean = w.mean(dtype=torch.promote_types(w.dtype, torch.float32)).item()
    return Weights(len(w), mean, second, fourth, least, most, _orthogonal(weight.flatten(1), eps, generator), eps)


def _project(matrix: Tensor, generator: torch.Generator, count: int = 4) -> tuple[Tensor, Tensor]:
    """Random vectors, and what a matrix makes of them, in single precision at least."""
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    vectors = torch.randn(matrix.shape[1], count, generator=generator, dtype=matrix.dtype).to(matrix.device)
    return vectors, matrix @ vectors


def _orthogonal(matrix: Tensor, eps: float, generator: torch.Generator) -> bool:
    """Whether the shorter side of a matrix keeps lengths up to one factor: tried on four random vectors."""
    matrix = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT
    if matrix.shape[1] < 2:
        return False
    vectors, images = _project(matrix.detach(), generator)
    lengths = images.norm(dim=0) / vectors.norm(dim=0)
    return bool(lengths.min() > 0 and lengths.max() / lengths.min() - 1 < max(1e-4, eps / 2))


def twins(layer: nn.Module, weight: Tensor, gradient: Tensor, generator: torch.Generator) -> int:
    """Units whose weights, bias and gradient are those of another one.

    Notes
    -----
    Introduced in chapter 16.
    """
    if getattr(layer, "transposed", False):
        if layer.groups > 1:
            return 0
        weight, gradient = weight.transpose(0, 1), gradient.transpose(0, 1)
    rows, slopes = weight.detach().flatten(1), gradient.flatten(1)
    keys, order = _project(rows, generator, 1)[1].flatten().sort()
    close = (keys.diff().abs() <= 1e-5 * rows.norm(dim=1).max()).nonzero().flatten()  # worth a closer look
    one, other = order[close], order[close + 1]
    # Equal units differ by rounding alone, in the gradient more than in the weights.
    same = _equal(rows[one], rows[other], 1e-6) & _equal(slopes[one], slopes[other], 1e-3)
    if layer.bias is not None:
        bias = layer.bias.detach()[:, None]
        same &= _equal(bias[one], bias[other], 1e-6)
    return len(torch.cat([one[same], other[same]]).unique())


def _equal(one: Tensor, other: Tensor, tolerance: float) -> Tensor:
    """Which rows are equal within rounding."""
    return (one - other).norm(dim=1) <= tolerance * torch.maximum(one.norm(dim=1), other.norm(dim=1))


def lost(model: nn.Module, chosen: Mapping[str, nn.Module]) -> list[tuple[str, str]]:
    """Layers where a weight was filled that is computed anew from others at each call.

    Notes
    -----
    Introduced in chapter 16.
    """
    found = []
    for name, module in chosen.items():
        for hook in module._forward_pre_hooks.values():
            plain = vars(module).get(getattr(hook, "name", ""))
            if isinstance(plain, Tensor) and hasattr(hook, "compute_weight"):
                steps = {"do_power_iteration": False} if hasattr(hook, "n_power_iterations") else {}
                with torch.no_grad():
                    computed = double(hook.compute_weight(module, **steps))
                    off = (double(plain) - computed).norm() / computed.norm()
                if off > 0.5:  # more than what a few steps of training leave behind
                    found.append((name, "what was written into it is thrown away at the next call"))
        g, v = _length_and_direction(module)
        if v is not None and g.numel() > 1:
            counts, of_torch = fans(module), schemes.torch_default.connections(module)
            fits = schemes_of(weigh(v, runtime.generator()), counts, of_torch)
            second = double(g.detach()).square().sum().item() / v.numel()  # of the weight that is used
            if fits and fits[0] != "torch default" and abs(3 * of_torch.n_in * second - 1) < 0.1:
                found.append((name, f"its direction was drawn by {fits[0]}'s scheme, its length is torch's default"))
    return list(dict(found).items())


def _length_and_direction(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """The parameters of weight norm over the first dimension, if a module has them."""
    own = module._parameters
    if "weight_g" in own and "weight_v" in own:
        g, v = own["weight_g"], own["weight_v"]
    else:
        parts = getattr(getattr(module, "parametrizations", None), "weight", None)
        if parts is None or type(parts[0]).__name__ != "_WeightNorm":
            return None, None
        g, v = parts.original0, parts.original1
    return (g, v) if g.numel() == len(v) else (None, None)


def packed(model: nn.Module) -> list[tuple[str, str]]:
    """Weights of attention and recurrent layers that hold several matrices and are drawn as one.

    Notes
    -----
    Introduced in chapter 16.
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            parts = {"in_proj_weight": 3}
        elif isinstance(module, nn.RNNBase | nn.RNNCellBase):
            keys = [key for key in module._parameters if key.startswith(("weight_ih", "weight_hh"))]
            hidden = module.hidden_size
            parts = {key: module._parameters[key].shape[0] // hidden for key in keys}
        else:
            continue
        for key, k in parts.items():
            weight = module._parameters.get(key)
            if weight is None or k < 2:
                continue
            rows, m = weight.shape
            n = rows // k
            entries = weigh(weight, runtime.generator())
            apart = f"for {k} matrices of {n} × {m}"
            where, one, of_torch = f"{name}.{key}".lstrip("."), 2 / (m + rows), 1 / (3 * n)  # torch draws cells so
            if entries.orthogonal and rows > m:
                found.append((where, f"its {m} columns are orthogonal as a whole, {apart}"))
            elif entries.second > 0 and entries.off(one) < ERRORS <= min(map(entries.off, (2 / (m + n), of_torch))):
                found.append((where, f"variance {entries.second:.2g} = 2 / ({m} + {rows}), {apart}"))
    return found


def copies(model: nn.Module) -> list[tuple[str, ...]]:
    """Groups of weights whose leading entries are the same random numbers, up to a factor.

    Notes
    -----
    Introduced in chapter 16.
    """
    heads: dict[object, list[tuple[str, int, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or parameter.numel() < 8 or not parameter.is_floating_point():
            continue
        head = double(parameter.detach().flatten()[:_LEADING]).cpu()
        if len(head.unique()) < 0.9 * len(head) or not head.isfinite().all():
            continue  # not random numbers: zeros, the identity
        head = head - head.mean()
        key = _LEADING if len(head) == _LEADING else tuple(parameter.shape)
        heads.setdefault(key, []).append((name, parameter.data_ptr(), head / head.norm()))
    groups = []
    for members in heads.values():
        stacked = torch.stack([head for _, _, head in members])
        parallel = (stacked @ stacked.mT).abs() > _PARALLEL
        done: set[int] = set()
        for k, alike in enumerate(parallel.tolist()):
            group = [j for j, same in enumerate(alike) if same and j not in done]
            if k not in done and len({members[j][1] for j in group}) > 1:
                groups.append(tuple(members[j][0] for j in group))
            done.update(group)
    return groups
