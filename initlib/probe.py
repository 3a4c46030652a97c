r"""One look into any model: how large its signals and gradients are, layer by layer, and what its initialisation says.

The batch goes forward once and a gradient comes back once. At each linear layer and convolution the moments of the
book are read off; :mod:`initlib.findings` judges them.
"""

import dataclasses
import html
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn
from torch.nn import functional as F

from initlib import figures, runtime, schemes
from initlib.fans import fans
from initlib.findings import Facts, Finding, Row, Weights, judge, name_schemes, schemes_of
from initlib.follow import RECTIFIERS, SATURATED, Follow, Path
from initlib.layers import Batch, Call, run, select, watch
from initlib.runtime import double, norm
from initlib.tables import Table

_CONVOLVE = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)

# How many leading entries of two weights are compared, and how parallel they must be to come from one seed.
_LEADING, _PARALLEL = 64, 1 - 1e-5

# How many entries of a weight tell its kurtosis, and so the sampling error of its variance.
_PART = 2**14


@dataclass(frozen=True, repr=False, eq=False)
class Probe(Table):
    r"""What :func:`probe` measured, a row for each call of a layer; prints as a table with its findings.

    All arrays have shape (calls,); NaN where nothing could be measured.

    Attributes
    ----------
    names : tuple of str
        The layers in the order of their calls; from the second call of a layer on, its number stands behind the name.
    forward, mean_squared, variance : arrays
        Second moment of the pre-activations, :math:`E[u^2]`, the squared sample mean and the sample variance.
    predicted : array
        What the second moment is on average for independent weights of this variance, from what enters the layer:
        :math:`m\,\sigma_w^2\,E[x^2] + E[b^2]`, borders of zeros counted.
    dead : array
        Share of units that the rectifier behind the layer makes zero for every sample.
    saturated : array
        Share of unit-sample pairs where the bounded activation behind the layer has less than 5 % of its slope.
    backward : array
        Second moment of :math:`\partial\ell/\partial u`.
    weight, weight_gradient : arrays
        Root mean square of the weights and of :math:`\partial\ell/\partial w`.
    scheme, activation : tuple of str
        The scheme of the book that fits the weights (``"none"``: none does), and the activation that follows.
    findings : tuple of Finding
        What is wrong, causes before symptoms.
    loss : float
        The value of the loss that was given; NaN for the random read-out.

    Notes
    -----
    Introduced in chapter 16.
    """

    names: tuple[str, ...] = ()
    forward: np.ndarray = None
    mean_squared: np.ndarray = None
    variance: np.ndarray = None
    predicted: np.ndarray = None
    dead: np.ndarray = None
    saturated: np.ndarray = None
    backward: np.ndarray = None
    weight: np.ndarray = None
    weight_gradient: np.ndarray = None
    scheme: tuple[str, ...] = ()
    activation: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    loss: float = math.nan

    def __str__(self) -> str:
        parts = [textwrap.fill(f"! {finding}", 100, subsequent_indent="  ") for finding in self.findings]
        return "\n\n".join([super().__str__(), *(parts or ["Nothing found."])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [f"<li>{html.escape(str(finding))}</li>" for finding in self.findings]
        shown = f'<ul class="il-findings">{"".join(parts)}</ul>' if parts else "<p>Nothing found.</p>"
        return super()._repr_html_() + shown

    def to_dict(self) -> dict[str, object]:
        """Columns and findings as lists, numbers and strings."""
        columns = {name: list(getattr(self, name)) for name in ("names", "scheme", "activation")}
        numbers = {name: [float(value) for value in getattr(self, name)] for name in _NUMBERS}
        found = [dataclasses.asdict(finding) for finding in self.findings]
        return columns | numbers | {"loss": self.loss, "findings": found}

    def to_pandas(self):
        """A ``pandas.DataFrame`` with a row a call, indexed by name.

        Raises
        ------
        ImportError
            If pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("Probe.to_pandas needs pandas: pip install pandas") from error
        columns = {name: getattr(self, name) for name in (*_NUMBERS, "scheme", "activation")}
        return pd.DataFrame(columns, index=pd.Index(self.names, name="layer"))

    def plot(self) -> Figure:
        """Second moment, sample variance and gradient by layer, one above the other."""
        fig, axes = figures.subplots(3, 1, height=7.0, width=5.0, sharex=True)
        x = np.arange(len(self.names))
        panels = {
            "second moment $E[u^2]$": self.forward,
            "sample variance": self.variance,
            r"gradient $E[(\partial\ell/\partial u)^2]$": self.backward,
        }
        for k, (ax, (label, values)) in enumerate(zip(axes, panels.items(), strict=True)):
            shown = np.where(np.isfinite(values) & (values > 0), values, np.nan)
            if k == 0:
                known = np.where(np.isfinite(self.predicted) & (self.predicted > 0), self.predicted, np.nan)
                figures.theory(ax, x, known, "predicted from what enters", color=figures.COLORS[1])
            style = {"marker": figures.MARKERS[k], "color": figures.COLORS[0], "linestyle": "none", "zorder": 3}
            ax.plot(x, shown, label="measured", **style)
            if np.isfinite(shown).any():
                ax.set_yscale("log")
                ax.set_ylim(np.nanmin(shown) / 5, np.nanmax(shown) * 5)  # a decade at least
            ax.set_ylabel(label)
        axes[0].legend()
        if len(x) <= 12:
            axes[-1].set_xticks(x, self.names, rotation=90 if max(map(len, self.names)) > 3 else 0)
        else:
            axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[-1].set_xlabel("layer, in the order of the calls")
        return fig


_NUMBERS = (
    "forward", "mean_squared", "variance", "predicted", "dead", "saturated", "backward", "weight", "weight_gradient"
)  # fmt: skip


def probe(
    model: nn.Module,
    batch: Batch,
    loss: Callable[[object], Tensor] | None = None,
    *,
    layers: str | Sequence[str] = "*",
    seed: int = 0,
) -> Probe:
    r"""Measure signal and gradient at each layer of a model, and say what is wrong with its initialisation.

    Parameters
    ----------
    model : torch.nn.Module
        Any model with linear layers or convolutions, in the mode in which it is to be looked at.
    batch : Tensor, tuple or dict
        Argument of the model, its positional arguments, or its keyword arguments.
    loss : callable, optional
        Gets what the model returns, gives a scalar. Left out: a random linear read-out of all real tensors that
        the model returns, summed over samples, with coefficients from :math:`N(0, 1)`. Then the gradients are those
        of :func:`initlib.signal.propagate`; a weight's gradient is a sum over the samples.
    layers : str or sequence of str
        Names of layers, with wildcards as in file names: all of them if left out.
    seed : int
        Number of the random read-out, see :func:`initlib.runtime.seed`.

    Returns
    -------
    Probe

    Raises
    ------
    TypeError
        If ``model``, ``batch`` or ``layers`` is not as described, or ``loss`` is not callable or gives no tensor.
    ValueError
        If the model has no such layer or calls none of them, is lazy, or the batch is empty; if the model returns no
        real tensor and no loss is given; if the loss is not a scalar, or depends on nothing that can be learnt.

    Notes
    -----
    The model runs forward once and backward once. Parameters, gradients, buffers, modes, hooks, the batch and the
    global random state are afterwards what they were, also if something raises.

    An activation is found behind a layer if only normalisation, dropout, pooling, changes of shape, or products and
    sums with numbers and parameters lie between, and if torch shows its call: not in a scripted part of a model.

    Introduced in chapter 16.

    Examples
    --------
    >>> from initlib import generator, initialize, nets
    >>> model = nets.mlp([64] * 5 + [10])
    >>> _ = initialize(model, "he_normal", generator=generator(1))
    >>> found = probe(model, torch.randn(100, 64, generator=generator(2)))
    >>> found.scheme
    ('he', 'he', 'he', 'he', 'he')
    >>> found.findings
    ()
    """
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of what the model returns, got {type(loss).__name__}")
    chosen = select(model, layers)
    facts = Facts(lost=_lost(model, chosen), packed=_packed(model), copies=_copies(model))
    measured = _Measurement(seed)
    with torch.inference_mode(False), torch.enable_grad(), watch(model, measured.note, layers=layers):
        with measured.follow:
            output = run(model, batch)
            if not measured.rows:
                raise ValueError("model calls none of its layers " + ", ".join(map(repr, chosen)))
            measured.open = False  # a layer that is called again on the way back, by a checkpoint, has its row
            value, roots, seeds = _roots(output, loss, seed)
        del output
        measured.pull_back(roots, seeds)
    name_schemes(measured.rows)
    parametrised = {name for name, module in chosen.items() if module._parameters.get("weight") is None}
    facts.lost += _left_behind(measured.rows, parametrised, {name for name, _ in facts.lost})
    called = {row.name for row in measured.rows}
    facts.not_called = [
        name for name, module in chosen.items() if name not in called and id(module.weight) not in measured.follow.used
    ]
    tables = {id(module.weight): name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    facts.tied = {name: tables[id(module.weight)] for name, module in chosen.items() if id(module.weight) in tables}
    facts.entropies = measured.follow.entropies
    facts.alike = measured.alike
    return _table(measured.rows, judge(measured.rows, facts), value)


class _Measurement:
    """Collects the rows while a model runs forward and back."""

    def __init__(self, seed: int):
        self.rows: list[Row] = []
        self.follow = Follow(self._activation, self._normalised)
        self.open = True
        self.alike = math.nan
        self._generator = runtime.generator(seed)
        self._weights: list[tuple[nn.Module, Tensor]] = []  # by row
        self._leaves: list[Tensor] = []  # what leaves frozen layers below which nothing is learnt

    def note(self, call: Call) -> Tensor | None:
        """The moments of one call; the gradient is read when it comes."""
        with torch._C.DisableTorchFunction():
            u = call.output
            replaced = None
            if isinstance(u, Tensor) and u.is_floating_point() and not u.requires_grad and torch.is_grad_enabled():
                leaf = u.detach().requires_grad_()
                u = replaced = leaf.clone()  # a leaf must not be changed in place
            if not self.open:
                return replaced
            if replaced is not None:
                self._leaves.append(leaf)
            row = self._measure(call)
            self.rows.append(row)
            if u.requires_grad:
                u.register_hook(lambda gradient: self._gradient(row, gradient))
        self.follow.track(u, row, call.unit)
        return replaced

    def _measure(self, call: Call) -> Row:
        u, layer, row = call.output, call.module, Row(call.label, reached=False)
        empty = isinstance(u, Tensor) and u.shape[call.unit] == 0
        if not empty:
            mean, variance = call.moments()
        weight = self.follow.weights.get(u)
        weight = layer.weight if weight is None else weight
        self._weights.append((layer, weight))
        row.trained = weight.requires_grad
        if empty:
            return row
        u = u.detach()
        row.units, row.samples, row.dtype = len(mean), call.samples, u.dtype
        row.mean_squared, row.variance = mean.square().mean().item(), variance.mean().item()
        row.forward = row.mean_squared + row.variance
        row.largest = max(abs(each.item()) for each in u.aminmax())
        row.fans = fans(layer)
        found = _weights(weight, self._generator)
        row.weight = found.second
        row.fits = schemes_of(found, row.fans, schemes.torch_default.connections(layer))
        x = call.args[0] if call.args else call.kwargs.get("input")
        if isinstance(x, Tensor) and x.is_floating_point() and x.numel():
            x = x.detach()
            row.entering = _mean_square(x)
            row.predicted = found.second * _reach(layer, x, u)
            if layer.bias is not None:
                row.predicted += _mean_square(layer.bias)
            if len(self.rows) == 0:
                _, spread = call._replace(output=x).moments()
                self.alike = spread.mean().item() / row.entering if row.entering else math.nan
        return row

    def _normalised(self, path: Path) -> None:
        path.source.normalised = True

    def _activation(self, path: Path, name: str, u: Tensor) -> None:
        row = path.source
        if row.activation or not u.numel():
            return
        row.activation = name
        u = u.detach()
        if name in RECTIFIERS and path.unit is not None:
            off = (u <= 0).movedim(path.unit, 0).flatten(1)
            row.dead = off.all(1).double().mean().item()
        elif name in SATURATED:
            row.saturated = (u.abs() > SATURATED[name]).double().mean().item()

    def _gradient(self, row: Row, gradient: Tensor) -> None:
        row.reached = True
        row.backward = _mean_square(gradient)

    def pull_back(self, roots: Sequence[Tensor], seeds: Sequence[Tensor | None]) -> None:
        """Send the gradient back, and read that of each weight."""
        wanted = {id(weight): weight for _, weight in self._weights if weight.requires_grad}
        inputs = [*wanted.values(), *self._leaves]
        if not (roots and inputs):
            return
        found = torch.autograd.grad(roots, inputs, seeds, allow_unused=True)
        gradients = dict(zip(wanted, found, strict=False))
        for row, (layer, weight) in zip(self.rows, self._weights, strict=True):
            gradient = gradients.get(id(weight))
            if gradient is not None and row.units:
                row.weight_gradient = _mean_square(gradient)
                row.twins = _twins(layer, weight.detach(), gradient, self._generator)


def _table(rows: Sequence[Row], findings: tuple[Finding, ...], loss: float) -> Probe:
    numbers = {name: np.array([getattr(row, name) for row in rows]) for name in _NUMBERS}
    for name in ("weight", "weight_gradient"):
        numbers[name] = np.sqrt(numbers[name])
    shown = {
        "layer": [row.name for row in rows],
        "E[u²]": numbers["forward"],
        "measured /\npredicted": _ratio(numbers["forward"], numbers["predicted"]),
        "sample\nvariance": numbers["variance"],
        "dead": numbers["dead"],
        "satu-\nrated": numbers["saturated"],
        "gradient²": numbers["backward"],
        "weight": numbers["weight"],
        "gradient\n/ weight": _ratio(numbers["weight_gradient"], numbers["weight"]),
        "scheme": [row.scheme for row in rows],
    }
    shown = {header: [_cell(value) for value in column] for header, column in shown.items()}
    shown = {header: column for header, column in shown.items() if any(value is not None for value in column)}
    return Probe(
        tuple(shown),
        [tuple(row) for row in zip(*shown.values(), strict=True)],
        names=tuple(row.name for row in rows),
        scheme=tuple(row.scheme for row in rows),
        activation=tuple(row.activation for row in rows),
        findings=findings,
        loss=loss,
        **numbers,
    )


def _cell(value: object) -> object:
    """A string as it is; a number with three digits; nothing for NaN."""
    if isinstance(value, str):
        return value
    return None if math.isnan(value) else float(f"{value:.3g}")


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(below > 0, above / below, np.nan)


def _mean_square(x: Tensor) -> float:
    """Mean of the squares of all entries, in double precision."""
    return (norm(x.detach().flatten(), 0).square() / max(x.numel(), 1)).item()


def _reach(layer: nn.Module, x: Tensor, u: Tensor) -> float:
    """Sum of the squares of the inputs that reach one output, averaged over the outputs and the batch."""
    if isinstance(layer, nn.Linear):
        return layer.in_features * _mean_square(x)
    d = len(layer.kernel_size)
    squares = double(x).square()
    squares = squares.sum(-1 - d) if x.ndim == d + 1 else squares.sum(1).mean(0)  # over channels, and the batch
    squares = squares[None, None] / layer.groups
    ones = squares.new_ones(1, 1, *layer.kernel_size)
    options = {"stride": layer.stride, "dilation": layer.dilation}
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        plain = _TRANSPOSED[d - 1](squares, ones, padding=layer.padding, **options)
        more = [size - had for size, had in zip(u.shape[-d:], plain.shape[-d:], strict=True)]
        return _TRANSPOSED[d - 1](squares, ones, padding=layer.padding, output_padding=more, **options).mean().item()
    padding = layer.padding
    if layer.padding_mode != "zeros":
        squares = F.pad(squares, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        padding = 0
    return _CONVOLVE[d - 1](squares, ones, padding=padding, **options).mean().item()


def _weights(weight: Tensor, generator: torch.Generator) -> Weights:
    """Moments of the entries of a weight; the fourth from a part of them, for the sampling error alone."""
    w = weight.detach().flatten()
    if not len(w):
        return Weights(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    part = double(w[:_PART])
    second, of_part = _mean_square(w), part.square().mean().item()
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


def _twins(layer: nn.Module, weight: Tensor, gradient: Tensor, generator: torch.Generator) -> int:
    """Units whose weights, bias and gradient are those of another one."""
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


def _real(output: object) -> Iterator[Tensor]:
    """The real tensors in what a model returns."""
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.numel():
            yield output
    elif isinstance(output, Mapping):
        for each in output.values():
            yield from _real(each)
    elif isinstance(output, list | tuple):
        for each in output:
            yield from _real(each)
    elif dataclasses.is_dataclass(output) or hasattr(output, "__dict__"):
        for each in vars(output).values():
            yield from _real(each)


def _roots(
    output: object, loss: Callable[[object], Tensor] | None, seed: int
) -> tuple[float, list[Tensor], list[Tensor | None]]:
    """Value of the loss, and the tensors that the gradient starts from with the gradient at each."""
    if loss is None:
        tensors = list({id(each): each for each in _real(output)}.values())
        if not tensors:
            raise ValueError(f"model returns no real tensor, got {type(output).__name__}: give a loss")
        generator = runtime.generator(seed)
        roots = [each for each in tensors if each.requires_grad]
        draws = [torch.randn(each.shape, generator=generator).to(each) for each in roots]
        return math.nan, roots, draws
    value = loss(output)
    if not isinstance(value, Tensor):
        raise TypeError(f"loss must give a tensor, got {type(value).__name__}")
    if value.numel() != 1 or not value.is_floating_point():
        raise ValueError(f"loss must give one real number, got shape {tuple(value.shape)} and {value.dtype}")
    if not value.requires_grad:
        raise ValueError("loss must depend on the parameters through functions that torch can differentiate")
    return value.detach().double().item(), [value.sum()], [None]


def _lost(model: nn.Module, chosen: Mapping[str, nn.Module]) -> list[tuple[str, str]]:
    """Layers where a weight was filled that is computed anew from others at each call."""
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
            with torch.no_grad():
                lengths = double(v).flatten(1).norm(dim=1) / double(g).abs().flatten()
            drawn = _weights(v, runtime.generator())
            fits = schemes_of(drawn, fans(module), schemes.torch_default.connections(module))
            if fits and fits[0] != "torch default" and abs(math.log(lengths.median().item())) > math.log(1.2):
                found.append((name, f"its direction was drawn by {fits[0]}'s scheme, and its length is another's"))
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


def _left_behind(rows: Sequence[Row], parametrised: set[str], known: set[str]) -> list[tuple[str, str]]:
    """Parametrised layers that are as torch draws them, in a model whose other layers are not."""
    plain = {row.scheme for row in rows if row.name not in parametrised}
    if not plain & {"he", "lecun", "glorot", "orthogonal"} or "torch default" in plain:
        return []
    why = "it has torch's default scale, and the other layers have not"
    names = [row.name for row in rows if row.name in parametrised and row.scheme == "torch default"]
    return [(name, why) for name in names if name not in known]


def _packed(model: nn.Module) -> list[tuple[str, str]]:
    """Weights of attention and recurrent layers that hold several matrices and are drawn as one."""
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
            drawn = _weights(weight, runtime.generator())
            apart = f"for {k} matrices of {n} × {m}"
            one, default = 2 / (m + rows), 1 / (3 * n)
            if drawn.orthogonal and rows > m:
                found.append((f"{name}.{key}".lstrip("."), f"its {m} columns are orthogonal as a whole, {apart}"))
            elif drawn.second > 0 and drawn.off(one) < 4 <= drawn.off(2 / (m + n)) and abs(one / default - 1) > 0.05:
                found.append(
                    (f"{name}.{key}".lstrip("."), f"variance {drawn.second:.2g} = 2 / ({m} + {rows}), {apart}")
                )
    return found


def _copies(model: nn.Module) -> list[tuple[str, ...]]:
    """Groups of weights whose leading entries are the same random numbers, up to a factor."""
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
