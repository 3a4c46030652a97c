"""Models that are initialised well, and models that are not: name, and what probe is to be given, by seed."""

import itertools
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from initlib import constant, generator, initialize, nets, schemes

CLASSES = 10


def normal(*shape, n=0):
    return torch.randn(*shape, generator=generator(1000 + n))


def integers(high, *shape, n=0):
    return torch.randint(high, shape, generator=generator(2000 + n))


def drawn(model, scheme="he_normal", n=0, **options):
    initialize(model, scheme, generator=generator(n), **options)
    return model


def with_std(model, std, n=0):
    """Normal weights of one standard deviation in all layers, and no biases."""
    g = generator(n)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, 0, std, generator=g)
            nn.init.zeros_(layer.bias)
    return model


def cross_entropy(classes, n=0):
    def loss(output):
        scores = output.flatten(0, -2)
        return F.cross_entropy(scores, integers(classes, len(scores), n=n + 500))

    return loss


def linears(model):
    return [layer for layer in model.modules() if isinstance(layer, nn.Linear)]


class ResNet(nn.Module):
    """Blocks of two convolutions with a skip connection, rectified behind the sum; functional activations."""

    def __init__(self, width=16, blocks=4, norm=True):
        super().__init__()

        def normalise():
            return nn.BatchNorm2d(width) if norm else nn.Identity()

        def conv(m):
            return nn.Conv2d(m, width, 3, padding=1, bias=False)

        self.stem, self.norm = conv(3), normalise()
        self.first = nn.ModuleList(conv(width) for _ in range(blocks))
        self.second = nn.ModuleList(conv(width) for _ in range(blocks))
        self.norms = nn.ModuleList(normalise() for _ in range(2 * blocks))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images):
        x = F.relu(self.norm(self.stem(images)))
        for k, (first, second) in enumerate(zip(self.first, self.second, strict=True)):
            branch = F.relu(self.norms[2 * k](first(x)))
            x = F.relu(x + self.norms[2 * k + 1](second(branch)))
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    """An LSTM and a head."""

    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(20, 64, 2, batch_first=True)
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        return self.head(self.cells(x)[0])


def encoder(n=0, apart=True):
    """torch's own Transformer layers, pre-norm; query, key and value drawn apart or, as torch does, as one matrix."""
    layers = [nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True) for _ in range(3)]
    model = drawn(nn.Sequential(*layers, nn.Linear(64, CLASSES)), "lecun_normal", n)
    g = generator(n + 100)
    for layer in layers:
        weight = layer.self_attn.in_proj_weight
        if apart:
            nn.init.normal_(weight, 0, 64**-0.5, generator=g)
        else:
            nn.init.xavier_uniform_(weight, generator=g)
    return model


def mlp(widths, scheme="he_normal", n=0, activation="relu", **options):
    return drawn(nets.mlp(widths, activation), scheme, n, **options)


def normalised(depth, n=0):
    parts = [part for _ in range(depth) for part in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())]
    return drawn(nn.Sequential(*parts, nn.Linear(64, CLASSES)), "he_normal", n)


def fixup(n):
    """The last layer of each branch and the head are zero."""
    model = drawn(ResNet(norm=False), "he_normal", n)
    for layer in (*model.second, model.head):
        nn.init.zeros_(layer.weight)
    return model


def frozen(n):
    model = mlp([64] * 5 + [CLASSES], n=n)
    for layer in linears(model)[:2]:
        layer.requires_grad_(False)
    return model


def weight_norm_behind(n):
    """Initialised first, parametrised afterwards."""
    model = mlp([64] * 5 + [CLASSES], n=n)
    for layer in linears(model):
        parametrizations.weight_norm(layer)
    return model


def tied(n, loud):
    """A Transformer whose head is the table of its tokens, drawn by torch or by the fans of the head."""
    model = nets.transformer(50, 16, 64, 2, tied=True)
    overrides = {"head": None} if loud else {}
    nn.init.normal_(model.token.weight, generator=generator(n + 50))
    return drawn(model, "lecun_normal", n, overrides=overrides)


class Gated(nn.Module):
    """Normalised convolutions with gates for their channels, which see the mean of the image (squeeze and excite)."""

    def __init__(self, width=64, blocks=3):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.Linear(width, CLASSES)
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(blocks + 1))
        self.squeeze = nn.ModuleList(nn.Conv2d(width, 2, 1) for _ in range(blocks))
        self.excite = nn.ModuleList(nn.Conv2d(2, width, 1) for _ in range(blocks))

    def forward(self, images):
        x = F.silu(self.norms[-1](self.stem(images)))
        for conv, norm, squeeze, excite in zip(self.convs, self.norms, self.squeeze, self.excite, strict=False):
            y = F.silu(norm(conv(x)))
            x = x + y * torch.sigmoid(excite(F.silu(squeeze(y.mean((2, 3), keepdim=True)))))
        return self.head(x.mean((2, 3)))


class Radiance(nn.Module):
    """Eight rectified layers, the fifth of which sees the input again (NeRF)."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(m, 128) for m in (63, 128, 128, 128, 128, 191, 128, 128))
        self.head = nn.Linear(128, 4)

    def forward(self, x):
        h = x
        for k, layer in enumerate(self.body):
            h = F.relu(layer(torch.cat([x, h], -1) if k == 5 else h))
        return self.head(h)


def sigmoid_images(n):
    """Four sigmoid convolutions as torch draws them, and a pooling."""
    widths = ((3, 16), (16, 32), (32, 64), (64, 64))
    parts = [part for m, k in widths for part in (nn.Conv2d(m, k, 3, 2, padding=1), nn.Sigmoid())]
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))
    return drawn(model, "torch_default", n)


def vgg(n):
    """torchvision's start: convolutions by He's fan-out, linear layers of standard deviation 0.01 for 4096 inputs."""
    widths, parts = (3, 16, 32, 64, 64), []
    for m, k in itertools.pairwise(widths):
        parts += [nn.Conv2d(m, k, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2)]
    model = drawn(nn.Sequential(*parts, nn.Flatten(), *nets.mlp([64, 128, 128, CLASSES])), FAN_OUT, n)
    return with_std(model, 0.01 * (4096 / 128) ** 0.5, n + 1)


def generative(n):
    """DCGAN's generator: standard deviation 0.02 throughout, normalised, tanh at the end."""
    parts = [nn.ConvTranspose2d(50, 64, 4, bias=False)]
    for m, k in ((64, 32), (32, 16)):
        parts += [nn.BatchNorm2d(m), nn.ReLU(True), nn.ConvTranspose2d(m, k, 4, 2, 1, bias=False)]
    model = nn.Sequential(*parts, nn.BatchNorm2d(16), nn.ReLU(True), nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh())
    g = generator(n)
    for layer in model:
        if isinstance(layer, nn.ConvTranspose2d):
            nn.init.normal_(layer.weight, 0, 0.02, generator=g)
    return model


def language(n):
    """GPT-2's start: standard deviation 0.02, less at the end of a branch; the head is the table of tokens."""
    model, g = nets.transformer(200, 16, 64, 4, tied=True), generator(n)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            end = name.endswith(("down.weight", "out.weight"))
            nn.init.normal_(parameter, 0, 0.02 / (8**0.5 if end else 1), generator=g)
    return model


class Listed(nn.Module):
    """Hidden layers in a Python list, where nobody finds them."""

    def __init__(self, n):
        super().__init__()
        g = generator(n)
        self.hidden, self.head = [nn.Linear(64, 64) for _ in range(4)], nn.Linear(64, 10)
        for layer in self.hidden:
            initialize(layer, "he_normal", generator=g)
        initialize(self, "lecun_normal", generator=g)

    def forward(self, x):
        for layer in self.hidden:
            x = layer(x).relu()
        return self.head(x)


def spectral(n, how):
    model = drawn(nets.mlp([64, 128, 128, CLASSES]), "he_normal", n)
    for layer in linears(model):
        if how == "new":
            parametrizations.spectral_norm(layer)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                nn.utils.spectral_norm(layer)
    return model


def half_with_zero_head(n):
    model = mlp([64] * 4 + [CLASSES], n=n).half()
    nn.init.zeros_(model[-1].weight)
    return model


def low_rank(n):
    """Frozen layers with an update of rank 4 beside each, which starts at zero (LoRA)."""

    class Update(nn.Module):
        def __init__(self, rows, columns):
            super().__init__()
            self.down = nn.Parameter(torch.randn(4, columns, generator=g) / columns**0.5)
            self.up = nn.Parameter(torch.zeros(rows, 4))

        def forward(self, weight):
            return weight + self.up @ self.down

    model, g = mlp([64] * 4 + [CLASSES], n=n), generator(n + 1)
    for layer in linears(model):
        layer.weight.requires_grad_(False)
        parametrize.register_parametrization(layer, "weight", Update(*layer.weight.shape))
    return model


FAN_OUT = schemes.he_normal.replace(average="fan_out")

HEALTHY = {
    "mlp_he": lambda n: (mlp([64] * 5 + [CLASSES], n=n), normal(64, 64, n=n), None),
    "mlp_he_deep": lambda n: (
        mlp([196] + [100] * 15 + [CLASSES], n=n), normal(128, 196, n=n), cross_entropy(CLASSES, n)
    ),
    "mlp_he_uniform": lambda n: (mlp([784] + [256] * 6 + [CLASSES], "he_uniform", n), normal(64, 784, n=n), None),
    "mlp_he_fan_out": lambda n: (
        mlp([64, 256, 64, 256, 64, CLASSES], FAN_OUT, n, overrides={"8": "lecun_normal"}), normal(64, 64, n=n), None
    ),
    "mlp_shallow_default": lambda n: (mlp([64, 128, 128, 10], "torch_default", n), normal(64, 64, n=n), None),
    "tanh_lecun": lambda n: (mlp([100] * 20 + [10], "lecun_normal", n, "tanh"), normal(64, 100, n=n), None),
    "tanh_glorot": lambda n: (
        mlp([100] * 20 + [10], "glorot_uniform", n, "tanh"), normal(64, 100, n=n), cross_entropy(CLASSES, n)
    ),
    "tanh_orthogonal": lambda n: (mlp([100] * 20 + [10], "orthogonal", n, "tanh"), normal(64, 100, n=n), None),
    "hardtanh": lambda n: (mlp([100] * 10 + [10], "lecun_normal", n, "hardtanh"), normal(64, 100, n=n), None),
    "selu": lambda n: (mlp([100] * 30 + [10], "lecun_normal", n, "selu"), normal(64, 100, n=n), None),
    "gelu": lambda n: (mlp([100] * 8 + [10], "he_normal", n, "gelu"), normal(64, 100, n=n), None),
    "resnet": lambda n: (drawn(ResNet(), "he_normal", n), normal(8, 3, 16, 16, n=n), cross_entropy(CLASSES, n)),
    "resnet_default": lambda n: (drawn(ResNet(blocks=6), "torch_default", n), normal(8, 3, 16, 16, n=n), None),
    "resnet_fan_out": lambda n: (drawn(ResNet(blocks=6), FAN_OUT, n), normal(8, 3, 16, 16, n=n), None),
    "resnet_without_norm": lambda n: (drawn(ResNet(norm=False), "he_normal", n), normal(8, 3, 16, 16, n=n), None),
    "resnet_fixup": lambda n: (fixup(n), normal(8, 3, 16, 16, n=n), cross_entropy(CLASSES, n)),
    "all_conv": lambda n: (
        drawn(nets.all_conv(3, 10), "he_normal", n), normal(4, 3, 32, 32, n=n), cross_entropy(CLASSES, n)
    ),
    "unet": lambda n: (drawn(nets.unet(1, 2), "he_normal", n), normal(4, 1, 32, 32, n=n), None),
    "unet_normalised": lambda n: (
        drawn(nets.unet(1, 2, normalize=True), "he_normal", n), normal(4, 1, 32, 32, n=n), None
    ),
    "transformer": lambda n: (
        drawn(nets.transformer(50, 16, 64, 4), "lecun_normal", n), integers(50, 8, 16, n=n), cross_entropy(50, n)
    ),
    "transformer_post": lambda n: (
        drawn(nets.transformer(50, 16, 64, 4, norm="post"), "lecun_normal", n), integers(50, 8, 16, n=n), None
    ),
    "transformer_tied": lambda n: (tied(n, loud=False), integers(50, 8, 16, n=n), cross_entropy(50, n)),
    "transformer_of_torch": lambda n: (encoder(n), normal(8, 16, 64, n=n), None),
    "recurrent": lambda n: (Recurrent(), normal(16, 10, 20, n=n), None),
    "frozen": lambda n: (frozen(n), normal(64, 64, n=n), None),
    "weight_norm": lambda n: (weight_norm_behind(n), normal(64, 64, n=n), None),
    "vgg": lambda n: (vgg(n), normal(4, 3, 16, 16, n=n), cross_entropy(CLASSES, n)),
    "gated": lambda n: (
        drawn(Gated(), FAN_OUT, n, overrides={"head": "torch_default"}), normal(8, 3, 8, 8, n=n),
        cross_entropy(CLASSES, n),
    ),
    "generative": lambda n: (generative(n), normal(8, 50, 1, 1, n=n), None),
    "language": lambda n: (language(n), integers(200, 8, 16, n=n), cross_entropy(200, n)),
    "unet_default": lambda n: (drawn(nets.unet(1, 2), "torch_default", n), normal(4, 1, 32, 32, n=n), None),
    "radiance_default": lambda n: (drawn(Radiance(), "torch_default", n), normal(256, 63, n=n), None),
    "mlp_default": lambda n: (
        mlp([64] + [128] * 6 + [CLASSES], "torch_default", n), normal(64, 64, n=n), cross_entropy(CLASSES, n)
    ),
    "tanh_default": lambda n: (mlp([2, 20, 20, 20, 1], "torch_default", n, "tanh"), normal(99, 2, n=n) / 4 + 0.5, None),
    "sigmoid_default": lambda n: (mlp([64] * 3 + [10], "torch_default", n, "sigmoid"), normal(64, 64, n=n), None),
    "silu_default": lambda n: (mlp([64] * 4 + [10], "torch_default", n, "silu"), normal(64, 64, n=n), None),
    "mlp_glorot": lambda n: (mlp([64] + [128] * 8 + [CLASSES], "glorot_uniform", n), normal(64, 64, n=n), None),
    "attention_of_torch": lambda n: (
        drawn(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), "torch_default", n),
        normal(8, 16, 64, n=n), None,
    ),
    "spectral_norm": lambda n: (spectral(n, "new"), normal(64, 64, n=n), None),
    "spectral_norm_old": lambda n: (spectral(n, "old"), normal(64, 64, n=n), None),
    "low_rank": lambda n: (low_rank(n), normal(64, 64, n=n), None),
    "half_with_zero_head": lambda n: (half_with_zero_head(n), normal(64, 64, n=n).half(), None),
    "half": lambda n: (mlp([64] * 5 + [10], n=n).half(), normal(64, 64, n=n).half(), None),
}  # fmt: skip


def with_bias(n, value):
    model = mlp([100] * 5 + [CLASSES], n=n)
    for layer in linears(model):
        nn.init.constant_(layer.bias, value)
    return model


def transposed(n):
    model = mlp([64, 256, 64, 256, 64, CLASSES], n=n)
    nn.init.kaiming_normal_(linears(model)[1].weight.detach().T, generator=generator(n + 1))
    return model


def refilled(n, how):
    """He's scheme on layers that have been parametrised before: in vain."""
    model = mlp([64] * 4 + [CLASSES], "torch_default", n)
    g = generator(n + 1)
    for k, layer in enumerate(linears(model)):
        weight = layer.weight
        if how == "old":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                nn.utils.weight_norm(layer)
            weight = layer.weight.detach()
        elif how == "direction":
            parametrizations.weight_norm(layer)
            weight = layer.parametrizations.weight.original1
        elif how == "new" and k in (0, 2):
            parametrizations.weight_norm(layer)
            weight = layer.weight.detach()
        nn.init.kaiming_normal_(weight, generator=g)
    return model


def normed_first(n):
    """Weight norm on every layer, and He's scheme afterwards: in vain, and every layer has torch's default."""
    model = mlp([100] * 12 + [10], "torch_default", n)
    for layer in linears(model):
        parametrizations.weight_norm(layer)
        nn.init.kaiming_normal_(layer.weight.detach(), generator=generator(n))
    return model


def reseeded(n, widths):
    model = nets.mlp(widths)
    for layer in linears(model):
        nn.init.kaiming_normal_(layer.weight, generator=generator(n))
        nn.init.zeros_(layer.bias)
    return model


def glorot_lstm(n):
    model, g = Recurrent(), generator(n)
    for parameter in model.cells.parameters():
        if parameter.ndim > 1:
            nn.init.xavier_uniform_(parameter, generator=g)
    return model


def orthogonal_lstm(n):
    model, g = Recurrent(), generator(n)
    nn.init.orthogonal_(model.cells.weight_hh_l0, generator=g)
    return model


def unused(n):
    model = mlp([64] * 4 + [CLASSES], n=n)
    model[1].extra = nn.Linear(3, 3)
    return model


def poisoned(n):
    model = mlp([64] * 4 + [CLASSES], n=n)
    with torch.no_grad():
        model[4].weight[3, 3] = float("nan")
    return model


class Detached(nn.Sequential):
    """The lower half gets no gradient."""

    def forward(self, x):
        return self[4](self[3](self[2](self[1](self[0](x)).detach())))


def deep(depth, scheme, n):
    return mlp([128] * depth + [CLASSES], scheme, n)


# Behind the slash: which of several examples of a kind.
BROKEN = {
    "vanishing/std": lambda n: (with_std(nets.mlp([128] * 10 + [10]), 0.01, n), normal(64, 128, n=n), None),
    "vanishing/glorot": lambda n: (deep(30, "glorot_normal", n), normal(64, 128, n=n), None),
    "vanishing/sigmoid": lambda n: (
        mlp([128] * 10 + [10], "glorot_normal", n, "sigmoid"), normal(64, 128, n=n), None
    ),
    "exploding/deep": lambda n: (with_std(nets.mlp([128] * 8 + [10]), 0.5, n), normal(64, 128, n=n), None),
    "exploding/shallow": lambda n: (with_std(nets.mlp([64] * 3 + [10]), 1.0, n), normal(64, 64, n=n), None),
    "exploding/residual": lambda n: (
        drawn(ResNet(norm=False, blocks=30), "he_normal", n), normal(4, 3, 8, 8, n=n), None
    ),
    "exploding/normalised": lambda n: (normalised(70, n), normal(64, 64, n=n), None),
    "exploding/tied": lambda n: (tied(n, loud=True), integers(50, 8, 16, n=n), None),
    "samples alike/data": lambda n: (mlp([100] * 5 + [10], n=n), normal(64, 100, n=n) + 10, None),
    "samples alike/depth": lambda n: (mlp([1000] * 40 + [10], n=n), normal(16, 1000, n=n) + 1, None),
    "dead units/bias": lambda n: (with_bias(n, -4.0), normal(64, 100, n=n), None),
    "dead units/narrow": lambda n: (
        (lambda model: ([nn.init.constant_(conv.bias, -6.0) for conv in model[::2]], model)[1])(
            drawn(nn.Sequential(*[p for m in (3, 8, 8) for p in (nn.Conv2d(m, 8, 3), nn.ReLU())]), "he_normal", n)
        ),
        normal(4, 3, 12, 12, n=n), None,
    ),
    "saturated units/std": lambda n: (
        with_std(nets.mlp([100] * 6 + [10], "tanh"), 1.0, n), normal(64, 100, n=n), None
    ),
    "packed matrices/attention": lambda n: (encoder(n, apart=False), normal(8, 16, 64, n=n), None),
    "packed matrices/lstm": lambda n: (glorot_lstm(n), normal(16, 10, 20, n=n), None),
    "packed matrices/orthogonal": lambda n: (orthogonal_lstm(n), normal(16, 10, 20, n=n), None),
    "wrong fan/transposed": lambda n: (transposed(n), normal(64, 64, n=n), None),
    "torch's default/deep": lambda n: (
        mlp([100] * 12 + [10], "torch_default", n), normal(64, 100, n=n), cross_entropy(CLASSES, n)
    ),
    "torch's default/sigmoid": lambda n: (sigmoid_images(n), normal(32, 3, 32, 32, n=n), None),
    "torch's default/silu": lambda n: (
        mlp([64] * 13 + [10], "torch_default", n, "silu"), normal(64, 64, n=n), cross_entropy(CLASSES, n)
    ),
    "torch's default/weight norm": lambda n: (normed_first(n), normal(64, 100, n=n), None),
    "wrong gain/selu": lambda n: (
        mlp([100] * 30 + [10], schemes.lecun_normal.replace(gain=0.75), n, "selu"), normal(64, 100, n=n), None
    ),
    "initialisation without effect/old": lambda n: (refilled(n, "old"), normal(64, 64, n=n), None),
    "initialisation without effect/new": lambda n: (refilled(n, "new"), normal(64, 64, n=n), None),
    "initialisation without effect/direction": lambda n: (refilled(n, "direction"), normal(64, 64, n=n), None),
    "reused random numbers/layers": lambda n: (reseeded(n, [64] * 4 + [10]), normal(64, 64, n=n), None),
    "reused random numbers/shapes": lambda n: (reseeded(n, [64, 100, 80, 10]), normal(64, 64, n=n), None),
    "reused random numbers/copies": lambda n: (
        nn.TransformerEncoder(encoder(n)[0], 3, enable_nested_tensor=False), normal(8, 16, 64, n=n), None
    ),
    "equal units/constant": lambda n: (drawn(nets.mlp([64] * 4 + [10]), constant(0.05)), normal(64, 64, n=n), None),
    "equal units/zero": lambda n: (drawn(nets.mlp([64] * 4 + [10]), "zeros"), normal(64, 64, n=n), None),
    "equal units/sigmoid": lambda n: (
        drawn(nets.mlp([64] * 4 + [10], "sigmoid"), "zeros"), normal(64, 64, n=n), cross_entropy(CLASSES, n)
    ),
    "not registered/list": lambda n: (Listed(n), normal(64, 64, n=n), None),
    "half precision/overflow": lambda n: (
        with_std(nets.mlp([128] * 6 + [10]), 0.6, n).half(), normal(64, 128, n=n).half(), None
    ),
    "half precision/underflow": lambda n: (
        deep(6, "he_normal", n).half(), normal(64, 128, n=n).half(), lambda output: 1e-4 * output.float().mean()
    ),
    "loss at start/tied": lambda n: (tied(n, loud=True), integers(50, 8, 16, n=n), cross_entropy(50, n)),
    "loss at start/head": lambda n: (
        (lambda model: (nn.init.normal_(model[-1].weight, generator=generator(n + 1)), model)[1])(
            mlp([128] * 4 + [10], n=n)
        ),
        normal(64, 128, n=n), cross_entropy(CLASSES, n),
    ),
    "not called/extra": lambda n: (unused(n), normal(64, 64, n=n), None),
    "not finite/weight": lambda n: (poisoned(n), normal(64, 64, n=n), None),
    "no gradient/detached": lambda n: (
        drawn(Detached(*nets.mlp([64] * 3 + [10])), "he_normal", n), normal(64, 64, n=n), None
    ),
}  # fmt: skip
