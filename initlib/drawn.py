r"""How a weight was drawn, told from its entries.

A weight of many entries gives its own variance away to within the sampling error, and with it the scheme that drew
it; and it shows what was drawn once and used twice, drawn as one matrix and used as several, or drawn in vain.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from initlib.fans import Fans
from initlib.runtime import double, mean_square

#: Standard errors by which a number must be off before it counts: about once in 16,000 by chance.
ERRORS = 4.0

# How many leading entries of two weights are compared, and how parallel they must be to come from one seed.
_LEADING, _PARALLEL = 64, 1 - 1e-5

# How many entries of a weight tell its kurtosis, and so the sampling error of its variance; how many of its columns
# tell whether it is orthogonal: 28 pairs of random columns are never all orthogonal within 1e-4.
_PART, _COLUMNS = 2**14, 8


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
        """Relative standard error of the second moment, for independent entries; not below rounding.

        A few entries do not tell their kurtosis: it counts as if a hundred normal ones had been seen besides.
        """
        kurtosis = self.fourth / self.second**2 if self.second > 0 else 1.0
        kurtosis = (self.count * kurtosis + 100 * 3) / (self.count + 100)
        return max(math.sqrt(max(kurtosis - 1, 0) / self.count), self.eps)

    def off(self, variance: float) -> float:
        """How many standard errors the second moment is from a variance.

        The cube root of the ratio is compared, which is close to normal also for few entries (Wilson and Hilferty,
        1931); the ratio itself is skewed.
        """
        spread = self.error() ** 2 / 9
        return abs((self.second / variance) ** (1 / 3) - 1 + spread) / math.sqrt(spread)


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


def weigh(weight: Tensor) -> Weights:
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
    return Weights(len(w), mean, second, fourth, least, most, _orthogonal(weight.detach().flatten(1), eps), eps)


def _orthogonal(matrix: Tensor, eps: float) -> bool:
    """Whether the first columns of a matrix, or rows if these are fewer, are orthogonal and of equal length."""
    columns = double((matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT)[:, :_COLUMNS])
    if columns.shape[1] < 2:
        return False
    gram = columns.mT @ columns
    length = gram.diagonal().mean()
    off = (gram - length * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)).abs().max()
    return bool(off < max(1e-4, eps) * length)


def twins(layer: nn.Module, weight: Tensor, gradient: Tensor) -> int:
    """Units whose weights, bias and gradient are those of another one.

    Notes
    -----
    Introduced in chapter 16.
    """
    if getattr(layer, "transposed", False):
        if layer.groups > 1:  # the units of a group share rows of the weight
            return 0
        weight, gradient = weight.transpose(0, 1), gradient.transpose(0, 1)
    rows, slopes = weight.detach().flatten(1), gradient.flatten(1)
    # Equal rows agree in any of their columns, so also in what a vector makes of a few, and are neighbours when sorted.
    part = rows[:, :: max(1, rows.shape[1] // _COLUMNS)]
    keys, order = (part @ torch.arange(part.shape[1], device=part.device).cos().to(part)).sort()
    close = (keys.diff().abs() <= 1e-7 * part.norm()).nonzero().flatten()
    if not len(close):
        return 0
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


def lost(layer: nn.Module, written: Tensor | None, used: Tensor, default: float) -> str:
    """How one sees that a layer was initialised in vain; empty if one does not.

    Parameters
    ----------
    layer : torch.nn.Module
    written : Tensor or None
        What the attribute ``weight`` held before the call, where it is no parameter: weight norm, spectral norm and
        pruning of the older kind compute it anew at each call.
    used : Tensor
        The weight that the call used.
    default : float
        Variance of torch's default for this layer.

    Notes
    -----
    Introduced in chapter 16.
    """
    if written is not None and written.shape == used.shape:
        one, other = double(written.detach()).flatten(), double(used.detach()).flatten()
        # A norm changes the length, a few steps of training change little: only another draw has another direction.
        if one @ other < 0.5 * one.norm() * other.norm():
            return "what was written into it is thrown away at the next call"
    own = dict(layer.named_parameters(recurse=False))
    length, direction = own.get("weight_g"), own.get("weight_v")
    if parametrize.is_parametrized(layer, "weight"):
        own = dict(layer.parametrizations.weight.named_parameters(recurse=False))
        length, direction = own.get("original0"), own.get("original1")  # weight norm of the newer kind
    if length is None or direction is None or not 1 < length.numel() == len(direction):
        return ""
    drawn = weigh(direction)
    is_default = drawn.off(default) < ERRORS and max(drawn.most, -drawn.least) <= 1.001 * math.sqrt(3 * default)
    if drawn.second > 0 and not is_default and abs(mean_square(used) / default - 1) < 0.1:
        return "its direction was drawn anew, its length is still that of torch's default"
    return ""


def packed(model: nn.Module) -> list[tuple[str, str, bool]]:
    """Weights of attention and recurrent layers that hold several matrices and are drawn as one.

    With the name of each come how one sees it, and whether torch's default is the same.

    Notes
    -----
    Introduced in chapter 16.
    """
    found = []
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        attention = isinstance(module, nn.MultiheadAttention)
        if attention:
            parts = {"in_proj_weight": 3}
        elif isinstance(module, nn.RNNBase | nn.RNNCellBase):
            keys = [key for key in own if key.startswith(("weight_ih", "weight_hh"))]
            hidden = module.hidden_size
            parts = {key: own[key].shape[0] // hidden for key in keys}
        else:
            continue
        for key, k in parts.items():
            weight = own.get(key)
            if weight is None or k < 2:
                continue
            rows, m = weight.shape
            n = rows // k
            entries = weigh(weight)
            apart = f"for {k} matrices of {n} × {m}"
            where, one, of_torch = f"{name}.{key}".lstrip("."), 2 / (m + rows), 1 / (3 * n)  # torch draws cells so
            if entries.orthogonal and rows > m:
                found.append((where, f"its {m} columns are orthogonal as a whole, {apart}", False))
            elif entries.second > 0 and entries.off(one) < ERRORS <= min(map(entries.off, (2 / (m + n), of_torch))):
                found.append((where, f"variance {entries.second:.2g} = 2 / ({m} + {rows}), {apart}", attention))
    return found


def copies(model: nn.Module) -> list[tuple[str, ...]]:
    """Groups of trained weights whose leading entries are the same random numbers, up to a factor.

    Notes
    -----
    Introduced in chapter 16.
    """
    heads: dict[object, list[tuple[str, nn.Parameter, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or parameter.numel() < 8 or not parameter.is_floating_point():
            continue
        head = double(parameter.detach().flatten()[:_LEADING]).cpu()
        if len(head.unique()) < 0.9 * len(head) or not head.isfinite().all():
            continue  # not random numbers: zeros, the identity
        head = head - head.mean()
        key = _LEADING if len(head) == _LEADING else tuple(parameter.shape)
        heads.setdefault(key, []).append((name, parameter, head / head.norm()))
    groups = []
    for members in heads.values():
        stacked = torch.stack([head for _, _, head in members])
        parallel = (stacked @ stacked.mT).abs() > _PARALLEL
        done: set[int] = set()
        for k, alike in enumerate(parallel.tolist()):
            group = [j for j, same in enumerate(alike) if same and j not in done]
            # A copy that does not learn is meant: a teacher, a target.
            learn = {members[j][1].data_ptr() for j in group if members[j][1].requires_grad}
            if k not in done and len(learn) > 1:
                groups.append(tuple(members[j][0] for j in group))
            done.update(group)
    return groups
