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

from initlib.drawn import ERRORS
from initlib.fans import Fans
from initlib.follow import RECTIFIERS, SATURATED, Entropy

#: Factor of a second moment, first layer to last, that is too much: between the 14 halvings that trained and the 30
#: that did not in He's experiment (chapter 06).
FACTOR = 2.0**22

#: Factor of a second moment in one layer that is too much: 16 times that of He's scheme, the largest of the book.
LAYER_FACTOR = 32.0

#: Least share of the sample variance in the second moment. At 5 % the mean of a unit is 4.4 standard deviations, and
#: half of all units see one sign only (3 standard deviations; chapter 08).
SHARE = 0.05

#: Samples below which the share of the sample variance, and of dead units, says little.
SAMPLES = 8

#: Largest share of dead units: with symmetric weights a unit is negative for all samples at most half of the time.
DEAD = 0.5

#: Largest share of saturated pairs. For unit pre-activations tanh has 3 %, hardtanh 32 %; tanh has 14 % in the chaotic
#: phase of variance 4 (chapter 11).
SATURATION = 0.4

#: Rectified layers with torch's default weights that are many: each divides the signal by 6 and 6 ** 9 > FACTOR.
DEFAULTS = math.ceil(math.log(FACTOR) / math.log(6))

#: Nats by which a cross-entropy may exceed log(classes): six times the excess 1/2 of logits of unit variance.
EXCESS = 3.0

#: How far from the largest number of its type a pre-activation must stay: room for what training adds.
HEADROOM = 16.0

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
        Number of the chapter that explains it.

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
        return f"{self.kind.capitalize()}. {self.text} {self.remedy} (Chapter {self.chapter}.)"


#: The kinds of finding, causes before symptoms, and the chapter that explains each.
CHAPTERS: dict[str, str] = {
    "half precision": "02",
    "not finite": "02",
    "equal units": "01",
    "reused random numbers": "04",
    "initialisation without effect": "15",
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
    "not called": "04",
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

_ONE = Fans(1, 1)
_FIX_SCALE = "Use a variance of gain² / fan-in with the gain of the activation"


@dataclass
class Row:
    r"""What was measured of one call of a layer; NaN where nothing could be.

    Attributes
    ----------
    name : str
        Name of the layer, with the number of the call from the second one on.
    units, samples : int
        Units of the layer, and samples of each.
    forward, mean_squared, variance : float
        Second moment of the pre-activations, and its two parts.
    entering, predicted : float
        Second moment of what enters the layer, and what the weights make of it on average.
    largest : float
        Largest absolute value of the pre-activations.
    backward : float
        Second moment of the gradient at the pre-activations.
    dtype : torch.dtype
        Of the pre-activations.
    fans : Fans
    weight, weight_gradient : float
        Second moment of the weights, and of their gradients.
    scheme : str
        The scheme that fits the weights best, ``"none"`` if none fits.
    fits : tuple of str
        All that fit within the sampling error.
    trained : bool
        Whether the weights ask for a gradient.
    reached : bool
        Whether a gradient reaches the pre-activations.
    twins : int
        Units that have a twin: equal weights, bias and gradient.
    activation : str
        The activation that acts on the pre-activations, as torch calls it; empty if none was seen.
    normalised : bool
        Whether a normalisation layer acts on them first.
    dead, saturated : float
        Share of units that a rectifier makes zero for all samples, and of unit-sample pairs where a bounded activation
        has lost its slope.

    Notes
    -----
    Introduced in chapter 16.
    """

    name: str
    units: int = 0
    samples: int = 0
    forward: float = math.nan
    mean_squared: float = math.nan
    variance: float = math.nan
    entering: float = math.nan
    predicted: float = math.nan
    largest: float = math.nan
    backward: float = math.nan
    dtype: torch.dtype = torch.float32
    fans: Fans = _ONE
    weight: float = math.nan
    weight_gradient: float = math.nan
    scheme: str = "none"
    fits: tuple[str, ...] = ()
    trained: bool = True
    reached: bool = True
    twins: int = 0
    activation: str = ""
    normalised: bool = False
    dead: float = math.nan
    saturated: float = math.nan


@dataclass
class Facts:
    """What was measured of a model besides the calls of its layers.

    Attributes
    ----------
    not_called : list of str
        Layers that were not called.
    copies : list of tuple of str
        Groups of weights that hold the same random numbers, up to a factor.
    packed : list of (str, str)
        Weights of several matrices that are drawn as one, and how.
    lost : list of (str, str)
        Layers whose initialisation had no effect, and how one sees it.
    tied : dict of str to str
        Layers whose weight is that of an embedding, and the embedding.
    entropies : list of Entropy
        Cross-entropies that were computed.
    alike : float
        Share of the sample variance in what enters the first layer.

    Notes
    -----
    Introduced in chapter 16.
    """

    not_called: list[str] = field(default_factory=list)
    copies: list[tuple[str, ...]] = field(default_factory=list)
    packed: list[tuple[str, str]] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    entropies: list[Entropy] = field(default_factory=list)
    alike: float = math.nan


def name_schemes(rows: Sequence[Row]) -> None:
    """Name the scheme of each row: of those that fit, the one that fits most rows, then the best.

    Parameters
    ----------
    rows : sequence of Row
        ``scheme`` is set from ``fits``.

    Notes
    -----
    Few weights fit several schemes; a model seldom mixes them. Introduced in chapter 16.
    """
    votes = Counter(name for row in rows for name in row.fits)
    for row in rows:
        known = [name for name in row.fits if not name.endswith("fan-out")]
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
    facts = facts or Facts()
    found = [finding for rule in RULES for finding in rule(rows, facts)]
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
    below = [
        row for row in halves if row.trained and row.reached and math.sqrt(row.backward) < torch.finfo(row.dtype).tiny
    ]
    if below and any(row.backward > 0 for row in rows):
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
            where = "enters" if not math.isfinite(row.entering) else "leaves"
            yield _finding(
                "not finite",
                [row.name],
                f"Layer {row.name!r} is the first with infinite or undefined numbers; one already {where} it.",
                "Look at the batch if they enter, and at the weights and their scale if they do not.",
            )
            return
    for row in reversed(rows):
        if row.reached and not math.isfinite(row.backward):
            yield _finding(
                "not finite",
                [row.name],
                f"The gradient at layer {row.name!r}, seen from the loss, is the first that is infinite or undefined.",
                "Look for a division, a root or a logarithm at zero behind this layer.",
            )
            return


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
            "Seed once before the whole model, and initialise layers anew after copying them.",
        )


def without_effect(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """Initialisations that a parametrisation has thrown away. Introduced in chapter 16."""
    names = [name for name, _ in facts.lost]
    if names:
        yield _finding(
            "initialisation without effect",
            names,
            f"The weight of {_layers(names)} is computed from other parameters: {facts.lost[0][1]}.",
            "Initialise first and parametrise (weight norm, spectral norm) afterwards.",
        )


def packed_matrices(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """Matrices that are stored as one and were drawn as one. Introduced in chapter 16."""
    packed = list(facts.packed)
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
    """Weights scaled by the fan-out where the others, or the signal, ask for the fan-in. Introduced in chapter 16."""
    plain = [row for row in rows if not row.normalised and max(row.fans) >= 2 * min(row.fans)]
    swapped = [row for row in plain if row.fits and all(name.endswith("fan-out") for name in row.fits)]
    usual = [row for row in plain if row.scheme in ("he", "lecun") and row not in swapped]
    if len(usual) <= len(swapped):  # all layers count the fan-out, as He did: only the ends may then be too loud
        swapped = [row for row in swapped if row.fans.n_in * row.weight > LAYER_FACTOR]
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
            "Look whether the weight is transposed, or count the same fan in all layers.",
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
    """Many rectified layers as torch draws them. Introduced in chapter 16."""
    names = [
        row.name
        for row in rows
        if row.scheme == "torch default" and row.activation in RECTIFIERS and not row.normalised
    ]
    if len(names) >= DEFAULTS:
        known = {row.name: row for row in rows}
        first, last = known[names[0]], known[names[-1]]
        yield _finding(
            "torch's default",
            names,
            f"{len(names)} rectified layers have torch's default weights, of variance 1/3 / fan-in: each divides the "
            f"part of the signal that depends on the sample by about 6. Its variance falls from {first.variance:.2g} "
            f"to {last.variance:.2g}.",
            "Initialise with He's variance, 2 / fan-in.",
        )


def loss_at_start(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """A cross-entropy far above that of a guess. Introduced in chapter 16."""
    for value, classes, error in facts.entropies:
        guess = math.log(classes)
        if value - guess > EXCESS + ERRORS * error:
            last = rows[-1]
            tied = facts.tied.get(last.name)
            yield _finding(
                "loss at start",
                [last.name],
                f"The cross-entropy is {value:.3g}; to guess among {classes} classes costs {guess:.3g}. The logits "
                f"have second moment {last.forward:.2g}."
                + (f" The head {last.name!r} shares its weight with the embedding {tied!r}." if tied else ""),
                "Scale the last layer so that logits start at size 1 or less.",
            )
            return


def no_gradient(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """Layers that ask for a gradient and that none reaches. Introduced in chapter 16."""
    names = [row.name for row in rows if row.trained and not row.reached]
    if names:
        yield _finding(
            "no gradient",
            names,
            f"No gradient reaches {_layers(names)}: the loss does not depend on what leaves them.",
            "Look for detach, no_grad, or an output that the loss leaves out.",
        )


def _trend(rows: Sequence[Row], values: Sequence[float]) -> tuple[float, float, Row, Row] | None:
    """Change of the logarithm over the layers by a straight line, the same in standard deviations, and its ends."""
    kept = [(row, math.log(value)) for row, value in zip(rows, values, strict=True) if 0 < value < math.inf]
    if len(kept) < 2:
        return None
    logs = np.array([log for _, log in kept])
    slope = np.polyfit(np.arange(len(logs)), logs, 1)[0]
    change = slope * (len(logs) - 1)
    # Of a rectified layer of n units: the logarithm drifts by -5/(2n), with a variance of 5/n (chapter 06).
    spread = sum(5 / row.units for row, _ in kept)
    return change, (change + spread / 2) / math.sqrt(spread), kept[0][0], kept[-1][0]


def exploding_or_vanishing(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """Second moments that grow or fall with depth, forward or backward. Introduced in chapter 16."""
    texts: dict[str, list[str]] = {"exploding": [], "vanishing": []}
    layers: dict[str, list[str]] = {"exploding": [], "vanishing": []}
    backward_only = {"exploding": True, "vanishing": True}
    for direction in ("forward", "backward"):
        ordered = rows if direction == "forward" else list(reversed(rows))
        trend = _trend(ordered, [getattr(row, direction) for row in ordered])
        if trend is None:
            continue
        change, deviations, first, last = trend
        if abs(change) <= math.log(FACTOR) or abs(deviations) <= ERRORS:
            continue
        kind = "exploding" if change > 0 else "vanishing"
        what = "pre-activations" if direction == "forward" else "gradient on its way back"
        texts[kind].append(
            f"The second moment of the {what} {'grows' if change > 0 else 'falls'} from "
            f"{getattr(first, direction):.2g} at {first.name!r} to {getattr(last, direction):.2g} at {last.name!r}."
        )
        layers[kind] += [name for name in (first.name, last.name) if name not in layers[kind]]
        backward_only[kind] &= direction == "backward"
    if not texts["exploding"]:
        yield from _loud_layer(rows, facts)
    normalised = sum(row.normalised for row in rows) > len(rows) / 2
    for kind, sentences in texts.items():
        if sentences:
            chapter = "" if not backward_only[kind] else "09" if normalised and kind == "exploding" else "04"
            remedy = f"{_FIX_SCALE}."
            if backward_only[kind] and normalised:
                remedy = "Use fewer normalised layers, or skip connections around them."
            yield _finding(kind, layers[kind], " ".join(sentences), remedy, chapter)


def _loud_layer(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """A single layer that multiplies the signal, where nothing behind it divides again."""
    loud = [
        row
        for row in rows
        if row.fans.n_in * row.weight > LAYER_FACTOR and not row.normalised and row.activation not in SATURATED
    ]
    if any(loss_at_start(rows, facts)):
        loud = [row for row in loud if row is not rows[-1]]
    if loud:
        row = max(loud, key=lambda each: each.fans.n_in * each.weight)
        tied = facts.tied.get(row.name)
        yield _finding(
            "exploding",
            [each.name for each in loud],
            f"Layer {row.name!r} multiplies the second moment by {row.fans.n_in * row.weight:.2g}: its "
            f"{row.fans.n_in:g} inputs meet weights of variance {row.weight:.2g}."
            + (f" It shares them with the embedding {tied!r}." if tied else ""),
            f"{_FIX_SCALE}.",
            "14" if tied else "02",
        )


def dead_units(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """Rectified units that are zero for every sample, more than chance can explain. Introduced in chapter 16."""
    dead = [
        row
        for row in rows
        if row.samples >= SAMPLES and row.dead > DEAD + ERRORS * math.sqrt(DEAD * (1 - DEAD) / row.units)
    ]
    if dead:
        worst = max(dead, key=lambda row: row.dead)
        yield _finding(
            "dead units",
            [row.name for row in dead],
            f"{worst.dead:.0%} of the units behind layer {worst.name!r} are zero for every sample; symmetric weights "
            "leave at most half of them so.",
            "Look for negative biases, or weights whose mean is not zero.",
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
            f"{_FIX_SCALE}, and bring the inputs to size 1.",
        )


def samples_alike(rows: Sequence[Row], facts: Facts) -> Iterator[Finding]:
    """Layers that give nearly the same for all samples. Introduced in chapter 16."""

    def share(row: Row) -> float:  # T samples have, on average, (T - 1)/T of the variance
        return row.variance / row.forward * row.samples / (row.samples - 1)

    judged = [row for row in rows if row.samples >= SAMPLES and 0 < row.forward < math.inf]
    alike = [row for row in judged if share(row) < SHARE]
    if len(alike) >= 2:
        least = min(alike, key=share)
        text = (
            f"At layer {least.name!r} the samples differ by {share(least):.1%} of the second moment "
            f"({share(judged[0]):.1%} at the first layer); the rest is the same for all of them."
        )
        if facts.alike < 2 * SHARE:
            text += f" What enters the network has a share of only {facts.alike:.1%}."
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
)
