"""The networks of the training experiments, written plainly.

They are drawn as torch draws them; :func:`initlib.model.initialize` or an arm of
:func:`initlib.train.train` gives them the weights that an experiment asks for.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from initlib import activations
from initlib.activations import Activation
from initlib.runtime import check_count, check_positive, check_widths


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
    layers = []
    for m, n in pairwise(check_widths(widths)):
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


def all_conv(
    channels: int,
    classes: int,
    *,
    width: int = 16,
    normalize: bool = False,
    activation: Activation = "relu",
) -> nn.Sequential:
    r"""A classifier of images made of ten convolutions, two of them strided, and an average over all positions.

    The convolutions of All-CNN-C, with one more at the end: three of ``width`` channels, the third of stride 2; then
    of :math:`2\,` ``width``: three, the third of stride 2, two more, and one of kernel 1; a head of kernel 1 to the
    classes. All other kernels are 3 × 3 with a border of zeros.

    Parameters
    ----------
    channels, classes : int
        Of the images, and of the logits.
    width : int
        Channels at full resolution: 16 trains on a CPU, the original has 96.
    normalize : bool
        Batch normalisation between each convolution and its activation; these convolutions have no biases.
    activation : str, torch.nn.Module or function
        As for :func:`initlib.activations.get`; layers share it.

    Returns
    -------
    torch.nn.Sequential
        From images (batch, channels, height, width), of any size, to logits (batch, classes). Submodules
        ``unit1`` to ``unit9``, each of ``conv``, ``norm`` if normalised and ``activation``; ``head``;
        ``pool``. What ``conv`` returns are the pre-activations; nothing acts in place.

    Raises
    ------
    TypeError, ValueError
        If a size is not a positive integer, ``normalize`` is not a boolean, or the activation is unknown.

    Notes
    -----
    Two strides take 14 × 14 pixels to 4 × 4 and 32 × 32 to 8 × 8. The original has nine convolutions: two, not
    three, of 3 × 3 behind the last stride, the first of them without a border. It drops out, which this network
    does not, and rectifies its logits.

    Source: :cite:p:`springenberg2015striving`. Introduced in chapter 08b.
    """
    for name, size in {"channels": channels, "classes": classes, "width": width}.items():
        check_count(name, size)
    _check_flag("normalize", normalize)
    plan = [(width, 1), (width, 1), (width, 2), *[(2 * width, s) for s in (1, 1, 2, 1, 1)]]
    parts, m = OrderedDict(), channels
    for k, (n, stride) in enumerate(plan, 1):
        conv = nn.Conv2d(m, n, 3, stride=stride, padding=1, bias=not normalize)
        parts[f"unit{k}"], m = _unit(conv, normalize, activation), n
    parts[f"unit{len(plan) + 1}"] = _unit(nn.Conv2d(m, m, 1, bias=not normalize), normalize, activation)
    parts["head"] = nn.Conv2d(m, classes, 1)
    parts["pool"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(parts)


class UNet(nn.Module):
    """The network that :func:`unet` builds.

    ``encoder`` and ``decoder`` hold a pair of units, ``first`` and ``second``, a level; ``bottom`` is a pair,
    ``up`` holds a unit a level, and ``head`` is the last convolution. Level 0 is that of full resolution.
    """

    def __init__(self, channels: int, outputs: int, base: int, levels: int, normalize: bool, activation: Activation):
        super().__init__()

        def pair(m: int, n: int) -> nn.Sequential:
            first, second = (nn.Conv2d(k, n, 3, padding=1, bias=not normalize) for k in (m, n))
            units = (_unit(conv, normalize, activation) for conv in (first, second))
            return nn.Sequential(OrderedDict(zip(("first", "second"), units, strict=True)))

        widths = [base * 2**level for level in range(levels + 1)]
        self.encoder = nn.ModuleList(pair(m, n) for m, n in pairwise([channels, *widths[:-1]]))
        self.bottom = pair(*widths[-2:])
        up = (nn.ConvTranspose2d(2 * n, n, 2, stride=2, bias=not normalize) for n in widths[:-1])
        self.up = nn.ModuleList(_unit(conv, normalize, activation) for conv in up)
        self.decoder = nn.ModuleList(pair(2 * n, n) for n in widths[:-1])
        self.head = nn.Conv2d(base, outputs, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of each pixel, (batch, outputs, height, width)."""
        factor = 2 ** len(self.encoder)
        if images.ndim != 4 or any(side < factor or side % factor for side in images.shape[2:]):
            raise ValueError(
                f"images must have shape (batch, channels, height, width) with sides that are multiples of {factor} "
                f"(2 ** levels), got {tuple(images.shape)}"
            )
        x, skips = images, []
        for block in self.encoder:
            skips.append(block(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for up, block, skip in reversed(list(zip(self.up, self.decoder, skips, strict=True))):
            x = block(torch.cat([skip, up(x)], 1))
        return self.head(x)


def unet(
    channels: int,
    outputs: int,
    *,
    base: int = 8,
    levels: int = 3,
    normalize: bool = False,
    activation: Activation = "relu",
) -> UNet:
    r"""A U-Net: down to coarse resolution and back up, with what was there on the way down set beside it.

    On each level down two convolutions of 3 × 3 and a maximum over squares of 2 × 2, which halves the sides while
    the channels double from ``base``; two convolutions at the bottom; on each level up a transposed convolution
    of 2 × 2, the channels of the same level on the way down beside its own, and two convolutions.
    A head of kernel 1 gives the logits. Borders are of zeros, so that each pixel has its logits.

    Parameters
    ----------
    channels, outputs : int
        Of the images, and of the logits: one output for each class.
    base : int
        Channels at full resolution: 8 trains on a CPU, the original has 64.
    levels : int
        How often the sides are halved; the original has 4. There are 5 ``levels`` + 3 layers.
    normalize : bool
        As for :func:`all_conv`, for each layer but the head.
    activation : str, torch.nn.Module or function
        As for :func:`initlib.activations.get`; layers share it.

    Returns
    -------
    UNet
        From images (batch, channels, height, width), whose sides are multiples of :math:`2^{\text{levels}}`, to
        logits (batch, outputs, height, width). Submodules ``encoder.0.first``, ``encoder.0.second``, ...,
        ``bottom.first``, ``bottom.second``, ``up.0``, ``decoder.0.first``, ``decoder.0.second``, ..., each of
        ``conv``, ``norm`` if normalised and ``activation``; ``head``.

    Raises
    ------
    TypeError, ValueError
        As for :func:`all_conv`.

    Notes
    -----
    With stride and kernel of 2 the squares that a transposed convolution writes do not overlap: each output is a
    sum over exactly ``in_channels`` inputs, at the border as well. The original pads nothing and so loses
    the border, and has no activation behind its transposed convolutions; with one, both halves of what is set side
    by side are rectified, and He's scheme keeps the second moment of both. The maximum raises it.

    Source: :cite:p:`ronneberger2015unet`. Introduced in chapter 08b.
    """
    for name, size in {"channels": channels, "outputs": outputs, "base": base, "levels": levels}.items():
        check_count(name, size)
    _check_flag("normalize", normalize)
    return UNet(channels, outputs, base, levels, normalize, activation)


class TransformerBlock(nn.Module):
    """A block of :func:`transformer`: a branch of attention, and one of two layers."""

    def __init__(self, width: int, heads: int, norm: str, skip: float, causal: bool, activation: Activation):
        super().__init__()
        self.heads, self.norm, self.skip, self.causal = heads, norm, skip, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nn.Linear(width, width, bias=False))
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.activation = Elementwise(activation)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The stream behind the block, (..., tokens, width)."""
        if self.norm == "pre":
            x = self.skip * x + self.attend(self.norm1(x))
            return self.skip * x + self.down(self.activation(self.up(self.norm2(x))))
        x = self.norm1(self.skip * x + self.attend(x))
        return self.norm2(self.skip * x + self.down(self.activation(self.up(x))))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """The branch of attention: each token's average over the values of all, or of those up to itself."""
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2) for f in (self.query, self.key, self.value))
        logits = q @ k.mT / q.shape[-1] ** 0.5
        if self.causal:
            future = torch.ones_like(logits, dtype=torch.bool).triu(1)
            logits = logits.masked_fill(future, -torch.inf)
        return self.out((logits.softmax(-1) @ v).transpose(-3, -2).flatten(-2))


class Transformer(nn.Module):
    """The network that :func:`transformer` builds."""

    def __init__(self, vocabulary: int, context: int, width: int, blocks: nn.Sequential, norm: nn.Module, tied: bool):
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks, self.norm = blocks, norm
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def stream(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the blocks leave of the embeddings, (..., tokens, width), before the last normalisation."""
        length, context = tokens.shape[-1], self.place.num_embeddings
        if not 1 <= length <= context:
            raise ValueError(f"tokens must hold 1 to {context} a sentence (the context), got {length}")
        return self.blocks(self.token(tokens) + self.place.weight[:length])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token, (..., tokens, vocabulary)."""
        return self.head(self.norm(self.stream(tokens)))


def transformer(
    vocabulary: int,
    context: int,
    width: int,
    blocks: int,
    *,
    heads: int = 4,
    norm: str = "pre",
    skip: float = 1.0,
    causal: bool = True,
    tied: bool = False,
    activation: Activation = "gelu",
) -> Transformer:
    r"""A small Transformer: embeddings, blocks of attention and of two layers, a head.

    Each block adds two branches :math:`F` to the stream :math:`x`, with :math:`\alpha` = ``skip``:

    .. math:: x \to \alpha x + F(\mathrm{LN}(x)) \text{ (pre)}, \quad x \to \mathrm{LN}(\alpha x + F(x)) \text{ (post)}.

    Parameters
    ----------
    vocabulary, context, width, blocks : int
        Kinds of token; most tokens of a sentence; entries of the stream :math:`d`; blocks.
    heads : int
        Of attention, a divisor of ``width``.
    norm : str
        ``"pre"``: what a branch reads is normalised, and the stream once before the head; ``"post"``: the stream is
        normalised behind each sum.
    skip : float
        Factor :math:`\alpha` on the stream in each sum: 1, or more than 1 in DeepNorm.
    causal : bool
        Whether a token attends to itself and those before it only.
    tied : bool
        Whether the head's weight is the table of the tokens.
    activation : str, torch.nn.Module or function
        Of the two-layer branch, as for :func:`initlib.activations.get`; its hidden layer has 4 ``width`` units.

    Returns
    -------
    Transformer
        From tokens (..., length), integers, to logits (..., length, vocabulary). Submodules ``token``, ``place``,
        ``blocks.0.query``, ``key``, ``value``, ``out``, ``up``, ``down``, ``norm1``, ``norm2``, ..., ``norm``
        and ``head``. Linear layers have no biases, nothing drops out.

    Raises
    ------
    TypeError, ValueError
        If a size is not a positive integer, ``heads`` does not divide ``width``, ``norm`` is neither of the two,
        ``skip`` is not positive, a flag is not a boolean, or the activation is unknown.

    Notes
    -----
    The three matrices of attention are separate layers, each with its own fans; the logits of attention are divided
    by the root of a head's width.

    Source: :cite:p:`vaswani2017attention`; ``skip``: :cite:p:`wang2022deepnet`. Introduced in chapter 14.
    """
    sizes = {"vocabulary": vocabulary, "context": context, "width": width, "blocks": blocks, "heads": heads}
    for name, size in sizes.items():
        check_count(name, size)
    if width % heads:
        raise ValueError(f"heads must divide width {width}, got {heads}")
    if norm not in ("pre", "post"):
        raise ValueError(f"norm must be 'pre' or 'post', got {norm!r}")
    check_positive("skip", skip)
    _check_flag("causal", causal)
    _check_flag("tied", tied)
    made = (TransformerBlock(width, heads, norm, skip, causal, activation) for _ in range(blocks))
    last = nn.LayerNorm(width) if norm == "pre" else nn.Identity()
    return Transformer(vocabulary, context, width, nn.Sequential(*made), last, tied)


def _unit(conv: nn.Module, normalize: bool, activation: Activation) -> nn.Sequential:
    """A convolution, what normalises it, and its activation."""
    parts = OrderedDict(conv=conv)
    if normalize:
        parts["norm"] = nn.BatchNorm2d(conv.out_channels)
    parts["activation"] = Elementwise(activation)
    return nn.Sequential(parts)


def _check_flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
