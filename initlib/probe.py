r"""One look into any model: how large its signals and gradients are, layer by layer, and what its initialisation says.

The batch goes forward once and a gradient comes back once. At each linear layer and convolution the moments of the
book are read off; :mod:`initlib.findings` judges them.
"""

import dataclasses
import html
import math
import textwrap
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn
from torch.nn import functional as F

from initlib import drawn, figures, runtime, schemes
from initlib.fans import SUPPORTED, Fans, fans
from initlib.findings import Facts, Finding, Row, judge, name_schemes
from initlib.follow import RECTIFIERS, SATURATED, WRITTEN_OUT, Follow, Path
from initlib.layers import CLOSED, KINDS, Batch, Call, run, select, watch
from initlib.runtime import double, mean_square
from initlib.tables import Table

_CONVOLVE = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


@dataclass(frozen=True, repr=False, eq=False)
class Probe(Table):
    r"""What :func:`probe` measured, a row for each call of a layer; prints as a table with its findings.

    All arrays have shape (calls,); NaN where nothing could be measured. A layer is a linear layer or a convolution, and
    :math:`u` its pre-activations. Of torch's attention and recurrent layers only what leaves them is seen: there it
    takes the place of :math:`u`, at each step of a sequence, and nothing is predicted. The weights are those of the
    last layer of attention, and all matrices of a recurrent layer.

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
    unseen : tuple of str
        Matrices and kernels of no embedding and of no layer that has a row. Of torch's attention only the last layer
        has one: the weights of query, key and value are here.

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
    unseen: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = self._notes()
        parts += [f"! {finding}" for finding in self.findings] or ["Nothing found."]
        return "\n\n".join([super().__str__(), *(textwrap.fill(part, 100, subsequent_indent="  ") for part in parts)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [f"<li>{html.escape(str(finding))}</li>" for finding in self.findings]
        shown = f'<ul class="il-findings">{"".join(parts)}</ul>' if parts else "<p>Nothing found.</p>"
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self._notes())
        return super()._repr_html_() + notes + shown

    def _notes(self) -> list[str]:
        """The loss, and what has no row."""
        notes = [] if math.isnan(self.loss) else [f"Loss at the start: {self.loss:.4g}."]
        if self.unseen:
            more = f" and {len(self.unseen) - 3} more" if len(self.unseen) > 3 else ""
            held = f"{', '.join(self.unseen[:3])}{more}"
            notes.append(f"Not measured, as no layer that has a row holds them: {held}.")
        return notes

    def to_dict(self) -> dict[str, object]:
        """Columns and findings as lists, numbers and strings."""
        columns = {name: list(getattr(self, name)) for name in ("names", "scheme", "activation")}
        numbers = {name: [float(value) for value in getattr(self, name)] for name in _NUMBERS}
        found = [dataclasses.asdict(finding) for finding in self.findings]
        return columns | numbers | {"loss": self.loss, "findings": found, "unseen": list(self.unseen)}

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
        Any model with linear layers or convolutions, or attention or recurrent layers of torch, in the mode in which
        it is to be looked at.
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
        If ``model``, ``batch``, ``layers`` or ``seed`` is not as described, or ``loss`` is not callable or gives no
        tensor.
    ValueError
        If the model has no such layer or calls none of them, is lazy, or the batch is empty; if the model returns no
        real tensor and no loss is given; if the loss is not a scalar, or depends on nothing that can be learnt.

    Notes
    -----
    The model runs forward once and backward once. Parameters, gradients, buffers, modes, hooks, other attributes of
    the modules, the tensors of the batch and the global random state are afterwards what they were, also if something
    raises; :func:`initlib.layers.preserved` says how deep. What leaves a frozen layer asks for a gradient meanwhile.

    The fan-out throughout a model is no finding: it is as good as the fan-in, end to end, and ``scheme`` says which
    one fits. A measurement costs about a millisecond a layer, or up to three times a plain pass forward and back if
    that is more.

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
    runtime.seed(seed)
    kinds = (*KINDS, *CLOSED)
    chosen = select(model, layers, kinds)
    measured = _Measurement(model)
    watched = watch(model, measured.note, layers=layers, kinds=kinds)
    with torch.inference_mode(False), torch.enable_grad(), watched:
        facts = Facts(packed=drawn.packed(model), copies=drawn.copies(model))
        with measured.follow:
            output = run(model, batch)
            if not measured.rows:
                raise ValueError("model calls none of its layers " + ", ".join(map(repr, chosen)))
            if not any(row.samples for row in measured.rows):
                raise ValueError(f"batch gives layer {measured.rows[0].name!r} no sample, and no other layer")
            facts.strangers = _strangers(model, measured.follow)
            measured.open = False  # a layer that is called again on the way back, by a checkpoint, has its row
            value, roots, seeds = _roots(output, loss, seed)
        del output
        measured.weigh()
        measured.pull_back(roots, seeds)
    name_schemes(measured.rows)
    silent = {name: layer for name, layer in chosen.items() if layer not in measured.called}
    used = [x for x in silent.values() if measured.follow.used.intersection(map(id, x.parameters()))]
    facts.not_called = [name for name, layer in silent.items() if layer not in used]
    facts.entropies, facts.alike = measured.follow.entropies, measured.alike
    facts.loss = None if loss is None else value
    return _table(measured.rows, judge(measured.rows, facts), value, _unseen(model, used))


def _strangers(model: nn.Module, follow: Follow) -> list[tuple[int, ...]]:
    """Shapes of the trained weights of linear layers and convolutions that ran and are not the model's."""
    own = {id(parameter) for parameter in model.parameters()}
    return [tuple(each.shape) for key, each in follow.own.items() if key not in own and each.requires_grad]


def _unseen(model: nn.Module, used: Sequence[nn.Module]) -> tuple[str, ...]:
    """Parameters with two dimensions or more of no layer or embedding, or of a layer that is used without a call."""
    known = (*SUPPORTED, nn.EmbeddingBag, nn.RNNBase, nn.RNNCellBase)
    layers = [module for module in model.modules() if isinstance(module, known)]
    seen = {id(p) for layer in layers if layer not in used for p in layer.parameters()}
    return tuple(
        name for name, p in model.named_parameters() if id(p) not in seen and sum(size > 1 for size in p.shape) > 1
    )


class _Measurement:
    """Collects the rows while a model runs forward and back."""

    def __init__(self, model: nn.Module):
        self.rows: list[Row] = []
        self.called: set[nn.Module] = set()
        self.follow = Follow(self._activation, self._normalised)
        self.open = True
        self.alike = math.nan
        self._weights: list[tuple[Row, nn.Module, Tensor]] = []
        self._cells: list[tuple[Row, nn.Module, list[Tensor]]] = []  # recurrent layers and their matrices
        self._leaves: list[Tensor] = []  # what leaves frozen layers below which nothing is learnt
        self._embeddings: dict[int, str] = {}  # by the identity of their weight
        self._written: dict[nn.Module, Tensor] = {}  # the weights that are attributes, and computed anew at each call
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                self._embeddings |= {id(weight): name for weight in module.parameters()}
            if isinstance(vars(module).get("weight"), Tensor):
                self._written[module] = module.weight

    def note(self, call: Call) -> Tensor | None:
        """The moments of one call; the gradient is read when it comes."""
        with self.follow.paused():
            u, leaf = call.output, None
            if isinstance(u, Tensor) and u.is_floating_point() and not u.requires_grad and torch.is_grad_enabled():
                leaf = u.detach().requires_grad_()
                u = leaf.clone()  # a leaf must not be changed in place
            if self.open:
                row = self._measure(call)
                self.rows.append(row)
                self.called.add(call.module)
                if leaf is not None:
                    self._leaves.append(leaf)
                if u.requires_grad:
                    u.register_hook(lambda gradient: self._gradient(row, gradient))
                self.follow.track(u, row, call.unit)
            return None if leaf is None else u

    def _measure(self, call: Call) -> Row:
        """What can be read off a call alone; the weight is looked at afterwards."""
        u, layer = call.output, call.module
        kind = next((kind for kind in KINDS if isinstance(layer, kind)), type(layer))
        row = Row(call.label, kind=kind.__name__, closed=isinstance(layer, CLOSED), reached=False)
        # Not layer.weight: a parametrisation would compute it anew, and may change with each time.
        weight = self.follow.weights.get(u) if isinstance(u, Tensor) else None
        if isinstance(layer, nn.MultiheadAttention):  # what leaves it is what its last layer makes
            self._weights.append((row, layer.out_proj, layer.out_proj.weight))
            self.called.add(layer.out_proj)
        elif row.closed:
            self._cells.append((row, layer, [each for each in layer.parameters() if each.ndim == 2]))
        else:
            self._weights.append((row, layer, layer.weight if weight is None else weight))
        row.samples = call.samples if isinstance(u, Tensor) else 0
        if isinstance(u, Tensor) and (u.shape[call.unit] == 0 or not row.samples):  # an expert that got no token
            return row
        mean, variance = call.moments()
        u = u.detach()
        row.units, row.dtype = len(mean), u.dtype
        row.mean_squared, row.variance = mean.square().mean().item(), variance.mean().item()
        row.forward = row.mean_squared + row.variance
        row.largest = max(abs(each.item()) for each in u.aminmax())
        x = call.args[0] if call.args else call.kwargs.get("input")
        if isinstance(x, Tensor) and x.is_floating_point() and x.numel() and x.layout is torch.strided:
            x = x.detach()
            row.entering = mean_square(x)
            if weight is not None and not row.closed:
                row.predicted = _reach(layer, weight, x, u, row.entering)  # for weights of variance 1, so far
            if not self.rows:
                _, spread = call._replace(output=x).moments()
                self.alike = spread.mean().item() / row.entering if row.entering else math.nan
        return row

    def weigh(self) -> None:
        """What the weight of each row says."""
        for row, layer, weight in self._weights:
            row.trained, row.tied = weight.requires_grad, self._embeddings.get(id(weight), "")
            row.parametrised = "weight" not in dict(layer.named_parameters(recurse=False))
            if not row.units:
                continue
            names = () if isinstance(layer, nn.Linear) else ("groups", "stride", "transposed")
            geometry = {name: getattr(layer, name) for name in names}
            row.fans, of_torch = fans(weight, **geometry), schemes.torch_default.connections(weight, **geometry)
            found = drawn.weigh(weight)
            row.weight, row.fits = found.second, drawn.schemes_of(found, row.fans, of_torch)
            row.predicted = found.second * row.predicted + (0.0 if layer.bias is None else mean_square(layer.bias))
            if row.parametrised and of_torch.n_in:
                row.lost = drawn.lost(layer, self._written.get(layer), weight, 1 / (3 * of_torch.n_in))
        for row, layer, matrices in self._cells:
            row.trained = any(each.requires_grad for each in matrices)
            row.weight = _mean_square(matrices)
            # torch draws all of them as if each had as many inputs as there are hidden units.
            fits = [drawn.schemes_of(drawn.weigh(each), Fans(*[layer.hidden_size] * 2)) for each in matrices]
            row.fits = ("torch default",) if all("torch default" in each for each in fits) else ()

    def _normalised(self, path: Path) -> None:
        path.source.normalised = True

    def _activation(self, path: Path, name: str, u: Tensor) -> None:
        row = path.source
        written_out = WRITTEN_OUT.get(row.activation) == name
        if (row.activation and not written_out) or not u.numel():
            return
        row.activation = name
        if written_out:
            row.saturated = math.nan
        u = u.detach()
        if name in RECTIFIERS and path.unit is not None:
            off = (u <= 0).movedim(path.unit, 0).reshape(row.units, -1)
            row.dead = off.all(1).double().mean().item()
        elif name in SATURATED:
            row.saturated = (u.abs() > SATURATED[name]).double().mean().item()

    def _gradient(self, row: Row, gradient: Tensor) -> None:
        if not gradient.numel():
            return
        row.reached = True
        row.backward = mean_square(gradient)

    def pull_back(self, roots: Sequence[Tensor], seeds: Sequence[Tensor | None]) -> None:
        """Send the gradient back, and read that of each weight."""
        weights = [weight for _, _, weight in self._weights] + [each for _, _, many in self._cells for each in many]
        wanted = {id(weight): weight for weight in weights if weight.requires_grad}
        inputs = [*wanted.values(), *self._leaves]
        if not (roots and inputs):
            return
        found = torch.autograd.grad(roots, inputs, seeds, allow_unused=True)
        gradients = dict(zip(wanted, found, strict=False))
        for row, layer, weight in self._weights:
            gradient = gradients.get(id(weight))
            if gradient is not None and row.units:
                row.weight_gradient = mean_square(gradient)
                row.twins = drawn.twins(layer, weight, gradient)
        for row, _, matrices in self._cells:
            reached = [gradients[id(each)] for each in matrices if gradients.get(id(each)) is not None]
            if reached:
                row.weight_gradient = _mean_square(reached)


def _table(rows: Sequence[Row], findings: tuple[Finding, ...], loss: float, unseen: tuple[str, ...]) -> Probe:
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
        unseen=unseen,
        **numbers,
    )


def _mean_square(matrices: Sequence[Tensor]) -> float:
    """Mean of the squares of all entries."""
    return sum(mean_square(each) * each.numel() for each in matrices) / sum(each.numel() for each in matrices)


def _cell(value: object) -> object:
    """A string as it is; a number with three digits; nothing for NaN."""
    if isinstance(value, str):
        return value
    return None if math.isnan(value) else float(f"{value:.3g}")


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(below > 0, above / below, np.nan)


def _reach(layer: nn.Module, weight: Tensor, x: Tensor, u: Tensor, entering: float) -> float:
    """Sum of the squares of the inputs that reach one output, averaged over the outputs and the batch.

    NaN if the layer does something else than its kind: a subclass may pad, crop or slice.
    """
    if isinstance(layer, nn.Linear):
        return x.shape[-1] * entering if x.shape[-1] == weight.shape[1] else math.nan
    d = len(layer.kernel_size)
    if x.shape[-1 - d] != layer.in_channels:
        return math.nan
    squares = double(x).square()
    squares = squares.sum(-1 - d) if x.ndim == d + 1 else squares.sum(1).mean(0)  # over channels, and the batch
    squares = squares[None, None] / layer.groups
    ones = squares.new_ones(1, 1, *layer.kernel_size)
    options = {"stride": layer.stride, "dilation": layer.dilation}
    if layer.transposed:
        plain = _TRANSPOSED[d - 1](squares, ones, padding=layer.padding, **options)
        more = [size - had for size, had in zip(u.shape[-d:], plain.shape[-d:], strict=True)]
        if not all(0 <= extra < max(steps) for extra, *steps in zip(more, layer.stride, layer.dilation, strict=True)):
            return math.nan
        return _TRANSPOSED[d - 1](squares, ones, padding=layer.padding, output_padding=more, **options).mean().item()
    # Private, as torch says nowhere else what "same" comes to on either side.
    ends = layer._reversed_padding_repeated_twice
    padded = [size + ends[2 * k] + ends[2 * k + 1] for k, size in zip(range(d)[::-1], x.shape[-d:], strict=True)]
    steps = zip(padded, layer.kernel_size, layer.dilation, layer.stride, strict=True)
    if [(size - dilation * (k - 1) - 1) // stride + 1 for size, k, dilation, stride in steps] != list(u.shape[-d:]):
        return math.nan
    padding = layer.padding
    if layer.padding_mode != "zeros":
        squares, padding = F.pad(squares, ends, mode=layer.padding_mode), 0
    return _CONVOLVE[d - 1](squares, ones, padding=padding, **options).mean().item()


def _real(output: object) -> Iterator[Tensor]:
    """The real tensors in what a model returns: itself, or in containers and the attributes of its parts; each once."""
    seen, waiting = {}, [output]  # the dictionary keeps what was seen alive, so that no identity comes twice
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, nn.Module | nn.Parameter):
            continue
        seen[id(each)] = each
        if isinstance(each, Tensor):
            if each.is_floating_point() and each.numel():
                yield each
            continue
        if isinstance(each, Mapping):
            each = each.values()
        elif not isinstance(each, list | tuple | set | frozenset | deque):
            slots = [name for kind in type(each).__mro__ for name in vars(kind).get("__slots__", ())]
            each = [*getattr(each, "__dict__", {}).values(), *(getattr(each, name, None) for name in slots)]
        waiting.extend(reversed(list(each)))


def _roots(
    output: object, loss: Callable[[object], Tensor] | None, seed: int
) -> tuple[float, list[Tensor], list[Tensor | None]]:
    """Value of the loss, and the tensors that the gradient starts from with the gradient at each."""
    if loss is None:
        tensors = list(_real(output))
        if not tensors:
            what = output.dtype if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"model returns no real tensor, got {what}: give a loss")
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
