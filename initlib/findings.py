r"""What a table of measured layers says about an initialisation, in plain language.

Each rule is a function of measured numbers, and speaks only where a number is beyond what chance or a sound network
gives. Several rules may see one cause; then the cause is named and its symptoms are not repeated.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy import stats

from initlib import activations
from initlib.drawn import ERRORS
from initlib.fans import Fans
from initlib.follow import RECTIFIERS, SATURATED, Entropy

#: Factor of a second moment, first layer to last, that is too much: between the 14 halvings that trained and the 30
#: that did not in He's experiment (chapter 06).
FACTOR = 2.0**22

#: Second moment, and factor of it in one layer, that are too much: 16 times those of He's scheme, the largest of the
#: book.
LAYER_FACTOR = 32.0

#: Least share of the sample variance in the second moment. At 5 % the mean of a unit is 4.4 standard deviations, and
#: half of all units see one sign only (3 standard deviations; chapter 08).
SHARE = 0.05

#: Samples below which the share of the sample variance, and of dead units, says little.
SAMPLES = 8

#: Largest share of dead units: with symmetric weights a unit is negative for all samples at most half of the time.
DEAD = 0.5

#: Chance below which something is not left to chance: that of more than :data:`initlib.drawn.ERRORS` standard errors.
CHANCE = 2 * stats.norm.sf(ERRORS)

#: Largest share of saturated pairs. For unit pre-activations tanh has 3 %, hardtanh 32 %; tanh has 14 % in the chaotic
#: phase of variance 4 (chapter 11).
SATURATION = 0.4

#: Rectified layers with torch's default weights that are many: each divides the signal by 6 and 6 ** 9 > FACTOR.
DEFAULTS = math.ceil(math.log(FACTOR) / math.log(6))

#: Share of the sample variance that torch's default must leave at the end: between the 3e-6 of nine rectified layers of
#: 64 units and the 2e-5 of eight. Of sigmoid layers four leave 8e-7 and three 4e-5; in 300 steps, at the best of the
#: rates 0.1, 0.5 and 2, SGD took their cross-entropy on the digits from 2.3 to 2.2 and to 1.4 (one seed).
FADED = 1e-5

#: Nats by which a cross-entropy may exceed log(classes): six times the excess 1/2 of logits of unit variance.
EXCESS = 3.0

#: How far from the largest number of its type a pre-activation must stay: room for what training adds.
HEADROOM = 16.0

#: Schemes that nobody has without asking.
CHOSEN = frozenset(["he", "lecun", "glorot", "orthogonal", "he fan-out", "lecun fan-out"])

#: Names of a linear layer in which query, key and value are packed.
PACKED = re.compile(r"qkv|in_proj|c_attn|query_key_value", re.IGNORECASE)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or likely to be.

    Attributes
    ----------
    kind : str
        A key of :data:`CHAPTERS`.
    layers : tuple of str
        Where.
    text : str
        What was measured, with numbers.
    remedy : str
        What to do, in one sentence.
    chapter : str
        Number of the chapter that explains it, as in its file name: ``"04"``, ``"08b"``.

    Notes
    -----
    Introduced in chapter 16.
    """

    kind: str
    layers: tuple[str, ...]
    text: str
    remedy: str
    chapter: str

    def __str__(self) -> str:
        return f"{self.kind.capitalize()}. {self.text} {self.remedy} (Chapter {self.chapter.lstrip('0')}.)"


#: The kinds of finding, causes before symptoms, and the chapter that explains each.
CHAPTERS: dict[str, str] = {
    "half precision": "02",
    "not finite": "02",
    "equal units": "01",
    "reused random numbers": "04",
    "initialisation without effect": "16",
    "packed matrices": "14",
    "wrong fan": "03",
    "wrong gain": "07",
    "torch's default": "06",
    "loss at start": "14",
    "no gradient": "04",
    "dead units": "06",
    "saturated units": "02",
    "exploding": "02",
    "vanishing": "02",
    "samples alike": "08",
    "not called": "16",
    "not registered": "16",
}

#: Symptoms that a cause explains.
EXPLAINS: dict[str, tuple[str, ...]] = {
    "half precision": ("not finite", "loss at start", "no gradient", "exploding", "vanishing"),
    "not finite": ("loss at start", "no gradient", "exploding", "vanishing", "dead units", "samples alike"),
    "equal units": ("torch's default", "loss at start", "exploding", "vanishing", "dead units", "samples alike"),
    "wrong fan": ("loss at start", "exploding", "vanishing"),
    "wrong gain": ("vanishing", "samples alike"),
    "torch's default": ("vanishing", "samples alike"),
    "dead units": ("vanishing", "samples alike"),
    "saturated units": ("exploding",),
}

_HE = 'He\'s variance, 2 / fan-in: initialize(model, "he_normal")'

_AT_ZERO = "Look for a division, a root or a logarithm at zero behind this layer."

_UNDONE = (
    " Weights that are computed from other parameters may undo it: under weight norm initialise first; a spectral norm "
    "sets the scale itself, so multiply what leaves the layer by a constant."
)

_QUIETER_TABLE = "Divide {} {}, or make all embeddings smaller alike, not only the shared one."

#: Activations whose values have a mean that no gain takes away: the samples come closer in every layer.
ONE_SIDED = frozenset(["sigmoid", "hardsigmoid", "softplus", "logsigmoid"])

#: Activations whose gain holds a second moment that is unstable: deviations grow (chapter 07).
GATES = frozenset(["gelu", "silu", "mish"])


@dataclass
class Row:
    """What was measured of one call of a layer; NaN where nothing could be. Introduced in chapter 16."""

    name: str  #: of the layer, with the number of the call from the second one on
    kind: str = "Linear"  #: of the layer, as torch names it
    units: int = 0
    samples: int = 0  #: of each unit
    dtype: torch.dtype = torch.float32  #: of the pre-activations
    fans: Fans = Fans(1, 1)  # noqa: RUF009 (a named tuple cannot change)
    forward: float = math.nan  #: second moment of the pre-activations
    mean_squared: float = math.nan  #: its part from the sample means
    variance: float = math.nan  #: its part from the sample variances
    largest: float = math.nan  #: largest absolute value of the pre-activations
    entering: float = math.nan  #: second moment of what enters the layer
    predicted: float = math.nan  #: what the weights make of that on average
    backward: float = math.nan  #: second moment of the gradient at the pre-activations
    reached: bool = True  #: whether a gradient came
    weight: float = math.nan  #: second moment of the weights
    weight_gradient: float = math.nan  #: second moment of their gradients
    trained: bool = True  #: whether the weights ask for a gradient
    twins: int = 0  #: units that have a twin: equal weights, bias and gradient
    fits: tuple[str, ...] = ()  #: schemes that fit the weights within the sampling error, the best first
    scheme: str = "none"  #: the one of them that :func:`name_schemes` chose
    tied: str = ""  #: the embedding that has the same weight, if one has
    parametrised: bool = False  #: whether the weight is computed from other parameters
    lost: str = ""  #: how one sees that its initialisation had no effect
    activation: str = ""  #: that acts on the pre-activations, as torch calls it; empty if none was seen
    normalised: bool = False  #: whether a normalisation layer acts on them first
    closed: bool = False  #: whether it is attention or a recurrent layer of torch, of which only the output is seen
    dead: float = math.nan  #: share of units that a rectifier makes zero for all samples
    saturated: float = math.nan  #: share of unit-sample pairs where a bounded activation has lost its slope


@dataclass
class Facts:
    """What was measured of a model besides the calls of its layers. Introduced in chapter 16."""

    not_called: list[str] = field(default_factory=list)  #: layers that were not called
    copies: list[tuple[str, ...]] = field(default_factory=list)  #: weights with the same numbers, up to a factor
    #: Weights of several matrices that are drawn as one, how, and whether torch itself draws them so.
    packed: list[tuple[str, str, bool]] = field(default_factory=list)
    entropies: list[Entropy] = field(default_factory=list)  #: cross-entropies that were computed
    alike: float = math.nan  #: share of the sample variance in what enters the first layer
    loss: float | None = None  #: its value, if one was given
    #: Shapes of trained weights of layers that run and are not the model's.
    strangers: list[tuple[int, ...]] = field(default_factory=list)


def name_schemes(rows: Sequence[Row]) -> None:
    """Name the scheme of each row: of those that fit, the one that fits most rows, then the best.

    Parameters
    ----------
    rows : sequence of Row
        ``scheme`` is set from ``fits``.

    Notes
    -----
    A small weight fits several schemes by chance, and He's variance by the fan-out is LeCun's by the fan-in where a
    layer doubles the units; but a model seldom mixes schemes. Introduced in chapter 16.
    """
    votes = Counter(name for row in rows for name in row.fits)
    for row in rows:
        known = [name for name in row.fits if name != "selu 3/4" or row.activation == "selu"]
        row.scheme = max(known, key=lambda name: votes[name], default="none")


def judge(rows: Sequence[Row], facts: Facts | None = None) -> tuple[Finding, ...]:
    """What is wrong with a measured model, causes before symptoms; empty if nothing was found.

    Parameters
    ----------
    rows : sequence of Row
        The calls of its layers, in their order.
    facts : Facts, optional

    Notes
    -----
    Introduced in chapter 16.
    """
    rows = [row for row in rows if row.units and row.samples]
    plain = [row for row in rows if not row.closed]
    facts = facts or Facts()
    found = [finding for rule in RULES for finding in rule(rows if rule in FOR_ALL else plain, facts)]
    kinds = {finding.kind for finding in found}
    explained = {symptom for kind in kinds for symptom in EXPLAINS.get(kind, ())}
    order = list(CHAPTERS)
    return tuple(
        sorted((each for each in found if each.kind not in explained), key=lambda each: order.index(each.kind))
    )


def _finding(kind: str, layers: Sequence[str], text: str, remedy: str, chapter: str = "") -> Finding:
    return Finding(kind, tuple(layers), text, remedy, chapter or CHAPTERS[kind])


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _layers(names: Sequence[str]) -> str:
    return f"layer{'s' * (len(names) > 1)} {_names(names)}"


def _fix_scale(rows: Sequence[Row], wrong: Sequence[Row] | None = None) -> str:
    """What to do about the scale of layers, in front of the activation that most rows have."""
    wrong = rows if wrong is None else wrong
    votes = Counter(row.activation for row in rows if row.activation)
    name = max(votes, key=votes.get, default="")
    if name in RECTIFIERS:
        if sum(row.scheme.startswith("he") for row in wrong) > len(wrong) / 2:
            return "He's variance is there already: normalise, or scale each residual branch by 1/√branches."
        undone = _UNDONE if any(row.parametrised for row in wrong) else ""
        return f"Initialise with {_HE}.{undone}"
    if name in ONE_SIDED:
        return f"No gain of {name} helps in many layers, as its values have a mean: use tanh or ReLU, or normalise."
    if name not in activations.ACTIVATIONS:
        return "Use a variance of gain² / fan-in, with the gain from activations.gain(activation); it is 1 without one."
    call = f"activations.gain({name!r})² = {activations.gain(name) ** 2:.3g}"
    more = ", and normalise where layers are many" if name in GATES else ""
    return f"Use a variance of gain² / fan-in, {call}{more}."


def half_precision(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """Pre-activations near the end of a half-precision range, or gradients below it. Introduced in chapter 16."""
    halves = [row for row in rows if row.dtype in (torch.float16, torch.bfloat16)]
    for row in halves:
        limits = torch.finfo(row.dtype)
        if not row.largest <= limits.max / HEADROOM:
            yield _finding(
                "half precision",
                [row.name],
                f"The largest pre-activation of layer {row.name!r} is {row.largest:.2g}, and {_name(row.dtype)} ends "
                f"at {limits.max:.2g}.",
                "Initialise at a smaller scale, or compute in bfloat16 or float32.",
            )
            return
    # A gradient of exactly zero may be meant: behind it, a head may start at zero.
    below = [row for row in halves if row.trained and 0 < math.sqrt(row.backward) < torch.finfo(row.dtype).tiny]
    if below:
        row = min(below, key=lambda each: each.backward)
        limits = torch.finfo(row.dtype)
        yield _finding(
            "half precision",
            [each.name for each in below],
            f"The gradient at {_layers([each.name for each in below])} has size {math.sqrt(row.backward):.1g}, and "
            f"below {limits.tiny:.1g} {_name(row.dtype)} loses digits until nothing is left.",
            "Multiply the loss by a constant and divide the gradients by it (loss scaling), or use bfloat16.",
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def not_finite(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """The first layer with numbers that are not finite. Introduced in chapter 16."""
    for row in rows:
        if not math.isfinite(row.forward):
            where = "arise in it" if math.isfinite(row.entering) else "enter it already"
            yield _finding(
                "not finite",
                [row.name],
                f"Layer {row.name!r} is the first with infinite or undefined numbers; they {where}.",
                "Look at the batch if they enter, and at the weights and their scale if they do not.",
            )
            return
    for row in reversed(rows):
        if row.reached and not math.isfinite(row.backward):
            yield _finding(
                "not finite",
                [row.name],
                f"The gradient at layer {row.name!r}, seen from the loss, is the first that is infinite or undefined.",
                _AT_ZERO,
            )
            return
    if facts.loss is not None and not math.isfinite(facts.loss):
        text = f"The loss is {facts.loss:g}, though all that leaves the layers is finite."
        yield _finding("not finite", [], text, _AT_ZERO.replace("this layer", "the last layer"))


def equal_units(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """Units that have the same weights and get the same gradient. Introduced in chapter 16."""
    twins = [row for row in rows if row.trained and row.units > 1 and 2 * row.twins >= row.units]
    # Outputs for classes that the batch lacks are equal without harm, and so are zeros at the end of a branch.
    moved = [row for row in twins if row.weight_gradient > 0 and row.weight > 0 and row is not rows[-1]]
    if not moved and not all(row.weight == 0 for row in rows):
        return
    chosen = moved or twins
    if not chosen:
        return
    names = [row.name for row in chosen]
    if moved:
        row = chosen[0]
        text = (
            f"In {_layers(names)} units have the same weights, bias and gradient as others ({row.twins} of {row.units} "
            f"in {row.name!r}): they will stay copies of each other."
        )
    else:
        text = "All weights are zero: no weight of a hidden layer can learn to differ from its neighbours."
    yield _finding("equal units", names, text, "Draw the weights at random; biases may be zero.")


def reused_numbers(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """Weights that hold the same random numbers. Introduced in chapter 16."""
    if facts.copies:
        group, more = facts.copies[0], len(facts.copies) - 1
        yield _finding(
            "reused random numbers",
            [name for group in facts.copies for name in group],
            f"Weights {_names(group)} are not one parameter but hold the same random numbers, up to a factor"
            + (f"; so do those of {more} more groups." if more else "."),
            "Seed once before the whole model, and initialise layers anew after copying them. What is meant as a copy "
            "(a teacher, an average) may stay.",
        )


def without_effect(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """Initialisations that a parametrisation has thrown away. Introduced in chapter 16."""
    lost = {row.name: row.lost for row in rows if row.lost}
    # Who draws all layers of a kind anew, and finds some as torch drew them, has written into a copy of their weights.
    plain = [row for row in rows if not row.parametrised]
    anew = {row.kind for row in plain if row.scheme in CHOSEN}
    anew -= {row.kind for row in plain if row.scheme == "torch default"}
    for row in rows:
        if row.parametrised and row.kind in anew and row.scheme == "torch default":
            lost.setdefault(row.name, "it has torch's default scale, and the other layers of its kind have not")
    if lost:
        yield _finding(
            "initialisation without effect",
            list(lost),
            f"The weight of {_layers(list(lost))} is computed from other parameters: {next(iter(lost.values()))}.",
            "Initialise first and parametrise (weight norm) afterwards.",
        )


def packed_matrices(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """Matrices that are stored as one and were drawn as one. Introduced in chapter 16.

    So does torch itself in its attention, at half of Glorot's variance and without harm: only who chose a scheme for
    other layers is told that these have another one.
    """
    chosen = any(row.scheme in CHOSEN for row in rows)
    packed = [(name, how) for name, how, of_torch in facts.packed if chosen or not of_torch]
    for row in rows:
        m, n = row.fans
        if PACKED.search(row.name) and n == 3 * m and row.fits and row.scheme == "glorot":
            packed.append((row.name, f"variance {row.weight:.2g} = 2 / ({m} + {n}), for three matrices of {m} × {m}"))
    if packed:
        names = [name for name, _ in packed]
        yield _finding(
            "packed matrices",
            names,
            f"Weight {_names(names)} holds several matrices and is drawn as one: {packed[0][1]}.",
            "Initialise each matrix by its own fans.",
        )


def wrong_fan(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """Weights scaled by the fan-out where the others, or the signal, ask for the fan-in. Introduced in chapter 16.

    The fan-out throughout a model is as good as the fan-in: a layer that is too loud follows one that is too quiet,
    and end to end only the first and the last width remain (chapter 5). Then only a loud last layer counts.
    """
    plain = [row for row in rows if not row.normalised and max(row.fans) >= 2 * min(row.fans)]
    swapped = [row for row in plain if row.fits and all(name.endswith("fan-out") for name in row.fits)]
    gains = {name.split()[0] for row in swapped for name in row.fits}
    usual = [row for row in plain if any(gain in row.fits and f"{gain} fan-out" not in row.fits for gain in gains)]
    if len(usual) <= len(swapped):
        swapped = [row for row in swapped if row is rows[-1] and row.fans.n_in * row.weight > LAYER_FACTOR]
    if swapped:
        row = swapped[0]
        m, n = row.fans
        gain = 2 if row.fits[0].startswith("he") else 1
        names = [each.name for each in swapped]
        yield _finding(
            "wrong fan",
            names,
            f"Layer {row.name!r} has fan-in {m:g} and fan-out {n:g}, and its weights have variance {row.weight:.2g}, "
            f"{gain} / fan-out where {gain} / fan-in keeps the signal: off by a factor {row.weight * m / gain:.2g}."
            + (f" So in {len(names)} layers." if len(names) > 1 else ""),
            "Look whether the weight is transposed, or count the fan-in.",
        )


def wrong_gain(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """SELU with the gain 3/4 of ``torch.nn.init.calculate_gain``. Introduced in chapter 16."""
    names = [row.name for row in rows if row.activation == "selu" and row.scheme == "selu 3/4"]
    if names:
        yield _finding(
            "wrong gain",
            names,
            f"The weights of {_layers(names)} have variance (3/4)² / fan-in in front of SELU.",
            "Use gain 1: SELU keeps the second moment 1 with variance 1 / fan-in.",
        )


def torch_default(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """Layers as torch draws them, through which the samples become alike. Introduced in chapter 16.

    Few such layers train. The signal fades faster than the biases, which are the same for all samples: rectified layers
    are counted, and behind any other activation what has come through to the end.
    """
    default = [row for row in rows if row.scheme == "torch default" and not row.normalised]
    rectified = [row for row in default if row.activation in RECTIFIERS]
    # Skip connections carry the signal past the layers: then it has not fallen. Two layers are left to chance.
    if len(rectified) >= DEFAULTS and rectified[0].variance >= 6 ** (DEFAULTS - 3) * rectified[-1].variance:
        names = [row.name for row in rectified]
        text = (
            f"{len(rectified)} rectified layers have torch's default weights, of variance 1/3 / fan-in: each divides "
            "the part of the signal that depends on the sample by about 6. Its variance falls from "
            f"{rectified[0].variance:.2g} to {rectified[-1].variance:.2g}."
        )
        remedy = f"Initialise with {_HE}."
    else:
        judged = _judged(rows)
        end = _end(judged)
        entering = 1.0 if math.isnan(facts.alike) else facts.alike
        faded = end is not None and 0 < _share(end) < FADED * entering and any(row is end for row in default)
        if not (faded and len(default) > len(rows) / 2):
            return
        names = [row.name for row in default]
        text = (
            f"{len(default)} layers have torch's default weights, of variance 1/3 / fan-in. At layer {end.name!r} the "
            f"samples differ by {_share(end):.1g} of the second moment ({_share(judged[0]):.2g} at the first layer); "
            "the rest is the same for all of them."
        )
        remedy = _fix_scale(rows, default)
    if any(row.parametrised for row in default):
        remedy += (
            " If you did: these weights are computed from other parameters, and what was written into them afterwards "
            "is thrown away; initialise before you parametrise (weight norm)."
        )
    yield _finding("torch's default", names, text, remedy)


def loss_at_start(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """A cross-entropy far above that of a guess. Introduced in chapter 16."""
    for entropy in facts.entropies:
        guess = math.log(entropy.classes)
        if entropy.value - guess > EXCESS + ERRORS * entropy.error:
            head = entropy.source
            yield _finding(
                "loss at start",
                [head.name] if head else [],
                f"The cross-entropy is {entropy.value:.3g}; to guess among {entropy.classes} classes costs {guess:.3g}."
                + (f" The logits have second moment {entropy.second:.2g}." if entropy.second >= 0 else "")
                + (f" The head {head.name!r} shares its weight with {head.tied!r}." if head and head.tied else ""),
                _quieter(entropy, head),
            )
            return


def _quieter(entropy: Entropy, head: Row | None) -> str:
    """How to bring the logits to size 1."""
    by = f"by {math.sqrt(entropy.second):.2g}" if entropy.second > 1 else "so that they start at size 1 or less"
    if head and head.tied:
        return _QUIETER_TABLE.format("the logits", by)
    return f"Divide the logits {by}, or the weights of the last layer."


def no_gradient(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """Layers that ask for a gradient and that none reaches. Introduced in chapter 16."""
    # Its weight may learn all the same: from another call, or from the last state of a recurrent layer.
    names = [row.name for row in rows if row.trained and not row.reached and not row.weight_gradient >= 0]
    if names:
        yield _finding(
            "no gradient",
            names,
            f"No gradient reaches what leaves {_layers(names)}, though the weights ask for one.",
            "Look for detach, no_grad, or an output that the loss leaves out.",
        )
    stuck = [row.name for row in rows if row.trained and row.weight == row.entering == row.weight_gradient == 0]
    if stuck and not all(row.weight == 0 for row in rows):  # of which `equal_units` speaks
        yield _finding(
            "no gradient",
            stuck,
            f"The weights of {_layers(stuck)} are zero, and so is all that enters: neither they nor the zero weights "
            "before them get a gradient, and that will stay so.",
            "Let one zero layer follow a random one: at the end of a branch, or of the network.",
        )


@dataclass
class _Trend:
    """How a second moment changes from layer to layer: its ends, and the change of its logarithm along a line."""

    direction: str
    first: Row
    last: Row
    size: float  #: at the first of the two
    end: float
    summed: bool  #: whether sizes are those of the sum over positions, in units of the fewest
    change: float

    def __str__(self) -> str:
        what = "pre-activations" if self.direction == "forward" else "gradient on its way back"
        what += ", times the number of positions," * self.summed
        return (
            f"The second moment of the {what} {'grows' if self.change > 0 else 'falls'} from {self.size:.2g} at "
            f"{self.first.name!r} to {self.end:.2g} at {self.last.name!r}."
        )


def _trend(rows: Sequence[Row], direction: str) -> _Trend | None:
    """The trend over the layers if it is too much, and more than chance."""
    # What the last layer does to a gradient is a matter of how many outputs there are, and common to all the others.
    ordered = rows if direction == "forward" else list(reversed(rows[:-1]))
    kept = [row for row in ordered if 0 < getattr(row, direction) < math.inf]
    if len(kept) < 2:
        return None
    sizes = np.array([getattr(row, direction) for row in kept])
    positions = np.array([row.samples for row in kept])
    summed = direction == "backward" and len(set(positions)) > 1
    if summed:  # a mean over positions, or a stride, shares a gradient out among them
        sizes = sizes * positions / positions.min()
    logs = np.log(sizes)
    change = np.polyfit(np.arange(len(logs)), logs, 1)[0] * (len(logs) - 1)
    # Of a rectified layer of n units: the logarithm drifts by -5/(2n), with a variance of 5/n (chapter 6).
    spread = sum(5 / row.units for row in kept)
    if abs(change) <= math.log(FACTOR) or abs(change + spread / 2) <= ERRORS * math.sqrt(spread):
        return None
    return _Trend(direction, kept[0], kept[-1], sizes[0], sizes[-1], summed, change)


def exploding_or_vanishing(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """Second moments that grow or fall with depth, forward or backward. Introduced in chapter 16."""
    trends = [trend for direction in ("forward", "backward") if (trend := _trend(rows, direction))]
    normalised = sum(row.normalised for row in rows) > len(rows) / 2
    for kind in ("exploding", "vanishing"):
        chosen = [trend for trend in trends if (trend.change > 0) == (kind == "exploding")]
        if not chosen:
            if kind == "exploding":
                yield from _loud_layer(rows, facts)
            continue
        names = dict.fromkeys(row.name for trend in chosen for row in (trend.first, trend.last))
        chapter, remedy = "", _fix_scale(rows)
        if all(trend.direction == "backward" for trend in chosen):
            chapter = "04"
            if normalised and kind == "exploding":
                chapter, remedy = "09", "Use fewer normalised layers, or skip connections around them."
        yield _finding(kind, list(names), " ".join(map(str, chosen)), remedy, chapter)


def _loud_layer(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """A single layer that multiplies the signal and is loud then, where nothing behind it divides again."""
    loud = [row for row in rows if min(row.fans.n_in * row.weight, row.forward) > LAYER_FACTOR]
    loud = [row for row in loud if not row.normalised and row.activation not in {*SATURATED, "sin", "cos"}]
    if any(loss_at_start(rows, facts)):
        loud = [row for row in loud if row is not rows[-1]]
    if loud:
        row = max(loud, key=lambda each: each.fans.n_in * each.weight)
        yield _finding(
            "exploding",
            [each.name for each in loud],
            f"Layer {row.name!r} multiplies the second moment by {row.fans.n_in * row.weight:.2g}: its "
            f"{row.fans.n_in:g} inputs meet weights of variance {row.weight:.2g}."
            + (f" It shares them with the embedding {row.tied!r}." if row.tied else ""),
            _QUIETER_TABLE.format("what leaves it", f"by {math.sqrt(row.fans.n_in * row.weight):.2g}")
            if row.tied
            else _fix_scale(rows, loud),
            "14" if row.tied else "02",
        )


def dead_units(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """Rectified units that are zero for every sample, more than chance can explain. Introduced in chapter 16."""
    judged = [row for row in rows if row.samples >= SAMPLES and row.dead >= 0]

    def beyond_chance(chosen: Sequence[Row]) -> bool:
        count, units = sum(row.dead * row.units for row in chosen), sum(row.units for row in chosen)
        return stats.binom.sf(round(count) - 1, units, DEAD) < CHANCE

    many = [row for row in judged if row.dead > DEAD]
    dead = [row for row in many if beyond_chance([row])]
    if many and not dead and beyond_chance(judged):  # layers too narrow to tell one by one
        dead = many
    if dead:
        worst = max(dead, key=lambda row: row.dead)
        yield _finding(
            "dead units",
            [row.name for row in dead],
            f"{worst.dead:.0%} of the units behind layer {worst.name!r} are zero for every sample; with symmetric "
            "weights at most half of them are, on average.",
            "Look for negative biases, weights whose mean is not zero, or layers of a few units."
            if worst.forward > 0
            else "All that leaves it is exactly zero: look for weights, or a batch, of zeros.",
        )


def saturated_units(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """Bounded activations where they have lost their slope. Introduced in chapter 16."""
    flat = [row for row in rows if row.saturated > SATURATION]
    if flat:
        worst = max(flat, key=lambda row: row.saturated)
        yield _finding(
            "saturated units",
            [row.name for row in flat],
            f"Behind layer {worst.name!r} {worst.saturated:.0%} of the values of {worst.activation} have less than "
            f"5 % of its slope; the pre-activations have second moment {worst.forward:.2g}.",
            f"{_fix_scale(rows)} Bring the inputs to size 1.",
        )


def _share(row: Row) -> float:
    """Share of the sample variance in the second moment: T samples have, on average, (T - 1)/T of the variance."""
    return row.variance / row.forward * row.samples / (row.samples - 1)


def _judged(rows: Sequence[Row]) -> list[Row]:
    """The rows whose share of the sample variance says something."""
    return [row for row in rows if row.samples >= SAMPLES and 0 < row.forward < math.inf]


def _end(judged: Sequence[Row]) -> Row | None:
    """The last row with more than a few units: in few, the share is a matter of chance."""
    return next((row for row in reversed(judged) if row.units > 3), None)


def samples_alike(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """Layers that give nearly the same for all samples. Introduced in chapter 16."""
    every = judged = _judged(rows)
    end = _end(judged)
    from_the_start = facts.alike < 2 * SHARE
    if not from_the_start:  # torch's default biases stay as its signal fades: `torch_default` knows when that counts
        judged = [row for row in judged if row.scheme != "torch default"]
    alike = [row for row in judged if _share(row) < SHARE]
    # In a side branch behind a pooling samples are alike without harm: it must reach the end, where few units scatter.
    distinct = {row.name.split(" (")[0] for row in alike}
    if len(distinct) >= 2 and any(
        row is end and _share(row) < SHARE * (1 + math.sqrt(8 / row.units)) for row in judged
    ):
        least = min(alike, key=_share)
        text = (
            f"At layer {least.name!r} the samples differ by {_share(least):.2g} of the second moment "
            f"({_share(every[0]):.2g} at the first layer); the rest is the same for all of them."
        )
        if from_the_start:
            text += f" What enters the first layer has a share of only {facts.alike:.2g}."
            remedy = "Give different samples, and subtract the mean of the data."
        else:
            remedy = "Normalise over the batch, use a data-dependent scale and bias, skip connections or fewer layers."
        yield _finding("samples alike", [row.name for row in alike], text, remedy)


def not_called(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """Layers that the model has and does not call. Introduced in chapter 16."""
    if facts.not_called:
        yield _finding(
            "not called",
            facts.not_called,
            f"The model has {_layers(facts.not_called)}, and did not call what it has.",
            "Remove what is not needed, or give a batch that uses it.",
        )


def not_registered(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """Trained weights of layers that run but are not the model's. Introduced in chapter 16."""
    if facts.strangers:
        shown = ", ".join(map(str, facts.strangers[:3]))
        more = f" and {len(facts.strangers) - 3} more" if len(facts.strangers) > 3 else ""
        yield _finding(
            "not registered",
            [],
            f"Layers run whose weights are not among the parameters of the model, of shape {shown}{more}: no optimiser "
            "gets them.",
            "Hold layers in nn.ModuleList or nn.ModuleDict, not in a list or a dict.",
        )


#: The rules, each a function of the rows and the facts.
RULES: tuple[Callable[[Sequence[Row], Facts], Iterator[Finding]], ...] = (
    half_precision,
    not_finite,
    equal_units,
    reused_numbers,
    without_effect,
    packed_matrices,
    wrong_fan,
    wrong_gain,
    torch_default,
    loss_at_start,
    no_gradient,
    exploding_or_vanishing,
    dead_units,
    saturated_units,
    samples_alike,
    not_called,
    not_registered,
)

#: The rules that also hold for attention and recurrent layers of torch, of which no pre-activation is seen.
FOR_ALL = (half_precision, not_finite, no_gradient, not_registered)
