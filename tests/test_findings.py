"""What is wrong is found and named first; what is well is not complained of; each rule knows its limit."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from zoo import BROKEN, HEALTHY, ResNet, drawn, encoder, integers, linears, mlp, normal, tied, with_std

from initlib import activations, findings, generator, initialize, nets, probe, schemes
from initlib.drawn import Weights, schemes_of, weigh
from initlib.fans import Fans
from initlib.findings import CHAPTERS, EXPLAINS, RULES, Facts, Finding, Row, judge, name_schemes
from initlib.follow import SATURATED, Entropy


def kinds(found):
    return [finding.kind for finding in found]


# --- the zoo ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(2))
@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in_a_model_that_is_well_initialised(name, n):
    assert probe(*HEALTHY[name](n)).findings == ()


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_found_first_and_explained(name):
    found = probe(*BROKEN[name](0)).findings
    assert kinds(found)[:1] == [name.split("/")[0]]
    if name.split("/")[0] != "vanishing":  # which also makes samples alike
        assert len(found) == 1
    text = str(found[0])
    assert text.startswith(found[0].kind.capitalize())
    assert text.endswith(f"(Chapter {found[0].chapter.lstrip('0')}.)")
    assert bool(found[0].layers) == (found[0].kind != "not registered")
    assert not {"nan", "None", "tensor("} & set(text.split())


def test_every_kind_of_finding_is_in_the_zoo_and_every_rule_is_used():
    assert {name.split("/")[0] for name in BROKEN} == set(CHAPTERS)
    assert len(RULES) == len(set(RULES)) >= 14
    for kind, symptoms in EXPLAINS.items():
        assert {kind, *symptoms} <= set(CHAPTERS)


def test_batch_normalisation_is_blamed_for_gradients_that_it_makes_explode():
    assert probe(*BROKEN["exploding/normalised"](0)).findings[0].chapter == "09"


def test_mean_of_the_data_is_blamed_when_samples_are_alike_from_the_start():
    (found,) = probe(*BROKEN["samples alike/data"](0)).findings
    assert "What enters the first layer" in found.text
    assert "mean of the data" in found.remedy
    (found,) = probe(*BROKEN["samples alike/depth"](0)).findings
    assert "What enters the first layer" not in found.text


def test_pooled_standard_deviation_of_one_hides_nothing():
    from initlib.calibrate import lsuv

    model, x = nets.mlp([200] * 8 + [10]), normal(64, 200) + 8
    lsuv(model, x, generator=generator(1))
    found = probe(model, x)
    np.testing.assert_allclose(found.forward[:-1], 1, rtol=0.2)
    assert kinds(found.findings) == ["samples alike"]


def test_first_layer_that_is_not_finite_is_named():
    (found,) = probe(*BROKEN["not finite/weight"](0)).findings
    assert found.layers == ("4",)
    assert "arise in it" in found.text
    model, x = mlp([8, 8, 8]), normal(16, 8)
    x[3, 3] = float("inf")
    (found,) = probe(model, x).findings
    assert found.layers == ("0",)
    assert "enter it already" in found.text
    (found,) = probe(model, normal(16, 8), lambda output: (output - output.detach()).sqrt().sum()).findings
    assert found.layers == ("2",)
    assert "gradient" in found.text


def test_unscaled_residual_branches_are_named_by_their_growth():
    for blocks, expected in ((4, []), (30, ["exploding"])):
        model = drawn(ResNet(norm=False, blocks=blocks))
        assert kinds(probe(model, normal(4, 3, 8, 8)).findings) == expected


def test_scaling_that_did_not_reach_its_layers_shows_in_the_weights():
    model, tokens = nets.transformer(50, 16, 64, 4), integers(50, 8, 16)
    small = schemes.lecun_normal.replace(gain=1 / math.sqrt(8))
    for pattern, scaled in (("blocks.*.down", True), ("blocks.3.down", False)):
        drawn(model, "lecun_normal", overrides={pattern: small})
        found = probe(model, tokens, layers="*.down")
        np.testing.assert_allclose(found.weight[:3] * 16, 1 / math.sqrt(8) if scaled else 1, rtol=0.05)
        assert found.scheme[:3] == (("none",) if scaled else ("lecun",)) * 3


def test_fan_out_in_all_layers_is_as_good_as_fan_in():
    model = mlp([64, 256, 64, 256, 64, 10], schemes.he_normal.replace(average="fan_out"))
    assert probe(model, normal(64, 64)).findings == ()


def test_loud_head_behind_a_fan_out_count_is_named():
    model = mlp([64, 512, 512, 4], schemes.he_normal.replace(average="fan_out"))
    (found,) = probe(model, normal(64, 64)).findings
    assert (found.kind, found.layers) == ("wrong fan", ("4",))


def test_normalised_layers_may_have_any_scale():
    model, x = drawn(ResNet(), "he_normal"), normal(8, 3, 16, 16)
    for conv in (model.stem, *model.first, *model.second):
        nn.init.normal_(conv.weight, std=3, generator=generator(4))
    assert "exploding" not in kinds(probe(model, x).findings)
    model = drawn(ResNet(norm=False), "he_normal")
    nn.init.normal_(model.first[1].weight, std=3, generator=generator(4))
    assert "exploding" in kinds(probe(model, x).findings)


def test_packed_linear_layer_is_known_by_its_name():
    class Attention(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.add_module(name, nn.Linear(64, 192, bias=False))
            self.out = nn.Linear(192, 8)
            self.name = name

        def forward(self, x):
            return self.out(getattr(self, self.name)(x))

    for name, expected in (("qkv", ["packed matrices"]), ("c_attn", ["packed matrices"]), ("up", [])):
        model = Attention(name)
        drawn(model, "lecun_normal", overrides={name: "glorot_uniform"})
        assert kinds(probe(model, normal(64, 64)).findings) == expected


def test_small_default_cells_of_torch_are_not_taken_for_glorot():
    class Net(nn.Module):
        def __init__(self, inputs, hidden):
            super().__init__()
            self.cells, self.head = nn.GRU(inputs, hidden, batch_first=True), nn.Linear(hidden, 3)

        def forward(self, x):
            return self.head(self.cells(x)[0])

    for inputs, hidden in ((64, 64), (128, 64), (32, 64), (8, 16)):
        assert probe(Net(inputs, hidden), normal(8, 5, inputs)).findings == ()


def test_deterministic_weights_are_not_reused_random_numbers():
    model = mlp([32] * 5)
    for layer in linears(model)[1:3]:
        nn.init.eye_(layer.weight)
    assert "reused random numbers" not in kinds(probe(model, normal(64, 32)).findings)


def test_weights_that_share_their_mean_are_not_reused_random_numbers():
    model, g = mlp([32] * 5), generator(1)
    for layer in linears(model):
        nn.init.normal_(layer.weight, 0.05, 1e-5, generator=g)
    assert "reused random numbers" not in kinds(probe(model, normal(64, 32)).findings)


def test_tied_weights_are_one_weight():
    assert probe(tied(0, loud=False), integers(50, 8, 16)).findings == ()


def test_copies_of_a_trained_layer_that_went_apart_are_not_complained_of():
    model = mlp([32] * 5)
    linears(model)[1].load_state_dict(linears(model)[2].state_dict())
    assert kinds(probe(model, normal(64, 32)).findings) == ["reused random numbers"]
    with torch.no_grad():
        linears(model)[1].weight.add_(0.05 * normal(32, 32))
    assert probe(model, normal(64, 32)).findings == ()


def test_copies_of_a_layer_are_named_as_torch_itself_does_not():
    """Its documentation recommends to initialise them anew."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    for count, expected in ((1, []), (2, ["reused random numbers"])):
        model = nn.TransformerEncoder(layer, count, enable_nested_tensor=False)
        assert kinds(probe(model, normal(8, 16, 64)).findings) == expected


def test_attention_drawn_matrix_by_matrix_is_fine():
    assert probe(encoder(), normal(8, 16, 64)).findings == ()
    assert kinds(probe(encoder(apart=False), normal(8, 16, 64)).findings) == ["packed matrices"]


def test_random_biases_alone_break_symmetry():
    model, x = mlp([16, 32, 4], "he_normal"), normal(64, 16)
    nn.init.constant_(model[0].weight, 0.1)
    assert kinds(probe(model, x).findings) == []  # the head is random: units get different gradients
    nn.init.constant_(model[2].weight, 0.1)
    assert kinds(probe(model, x).findings) == ["equal units"]
    nn.init.normal_(model[0].bias, generator=generator(1))
    assert "equal units" not in kinds(probe(model, x).findings)


def test_zero_head_is_harmless():
    model = mlp([64] * 4 + [10])
    nn.init.zeros_(model[-1].weight)
    assert probe(model, normal(64, 64)).findings == ()


# --- the rules on numbers ---------------------------------------------------------------------


def sound(k=0, **changes):
    """A row as He's scheme gives it."""
    row = Row(
        f"l{k}", units=256, samples=64, forward=2.0, mean_squared=0.5, variance=1.5, entering=1.0, predicted=2.0,
        largest=8.0, backward=0.1, fans=Fans(256, 256), weight=2 / 256, weight_gradient=1.0, fits=("he",),
        activation="relu", dead=0.1,
    )  # fmt: skip
    return dataclasses.replace(row, **changes)


def judged(rows, **facts):
    rows = [dataclasses.replace(row) for row in rows]
    name_schemes(rows)
    return kinds(judge(rows, Facts(**facts)))


ROWS = [sound(k) for k in range(12)]


def changed(which=None, **changes):
    """Sound rows, with something changed in one of them or in all."""
    return [dataclasses.replace(row, **changes) if which in (None, k) else row for k, row in enumerate(ROWS)]


def test_sound_rows_give_nothing():
    assert judged(ROWS) == []
    assert judge([]) == ()


def series(first, factor):
    return [first * factor**k for k in range(len(ROWS))]


@pytest.mark.parametrize(
    ("direction", "limit"), [("forward", 4.0), ("backward", 2**2.2)]
)  # eleven steps, ten without the head: 2 ** 22
@pytest.mark.parametrize(("share", "expected"), [(0.0, ""), (0.97, ""), (1.03, "up"), (-0.97, ""), (-1.03, "down")])
def test_trend_counts_from_the_factor_on(direction, limit, share, expected):
    factor = limit**share
    rows = [
        dataclasses.replace(row, **{direction: value}, **({"variance": value} if direction == "forward" else {}))
        for row, value in zip(ROWS, series(1.0, factor), strict=True)
    ]
    # On its way back a gradient that grows with the layer's number vanishes.
    names = {"": [], "up": ["exploding"], "down": ["vanishing"]}[expected]
    if direction == "backward" and names:
        names = ["vanishing" if expected == "up" else "exploding"]
    assert judged(rows) == names


def test_chance_in_a_narrow_network_is_allowed_for():
    rows = [dataclasses.replace(row, forward=v, variance=v) for row, v in zip(ROWS, series(1.0, 1 / 4.5), strict=True)]
    assert judged(rows) == ["vanishing"]
    assert judged([dataclasses.replace(row, units=4) for row in rows]) == []


def test_one_loud_layer_is_named_unless_something_divides_again():
    loud = {"weight": 33 / 256, "fits": (), "forward": 33.0}
    assert judged(changed(5, **loud)) == ["exploding"]
    assert judged(changed(5, weight=31 / 256, fits=(), forward=33.0)) == []
    assert judged(changed(5, **loud, normalised=True)) == []
    assert judged(changed(5, **loud, activation="tanh")) == []
    assert judged(changed(5, **(loud | {"forward": 31.0}))) == []  # it makes a small signal large again
    assert judged(changed(11, **loud), entropies=[Entropy(9.0, 10, 0.1)]) == ["loss at start"]


def test_share_of_the_sample_variance_has_a_limit():
    share = findings.SHARE * 63 / 64
    for factor, expected in ((1.05, []), (0.95, ["samples alike"])):
        assert judged(changed(variance=2.0 * share * factor)) == expected
    assert judged(changed(variance=0.0, samples=findings.SAMPLES - 1)) == []
    assert judged(changed(7, variance=0.0)) == []  # one layer alone
    rows = [sound(k, variance=0.0 if k in (3, 4) else 1.5) for k in range(12)]
    assert judged(rows) == []  # a side branch
    assert judged([*rows[:10], *changed(variance=0.0)[10:]]) == ["samples alike"]
    assert judged([*rows, sound(12, units=1, variance=0.0)]) == []  # one unit, whose mean is large by chance
    assert judged([*changed(variance=0.0), sound(12, units=1)]) == ["samples alike"]
    for units, expected in ((8, ["samples alike"]), (64, [])):  # a head of few units scatters
        assert judged([*changed(variance=0.0), sound(12, units=units, variance=3 * share)]) == expected
    rows = [sound(k, variance=0.0, fits=("torch default",), activation="tanh") for k in range(12)]
    assert judged(rows) == []  # biases remain
    assert judged(rows, alike=0.01) == ["samples alike"]


def test_dead_units_count_where_chance_cannot_explain_them():
    limit = 0.5 + 4 * math.sqrt(0.25 / 256)
    assert judged(changed(4, dead=limit + 0.01)) == ["dead units"]
    assert judged(changed(4, dead=limit - 0.01)) == []
    assert judged(changed(4, dead=0.75, units=16)) == []
    assert judged(changed(4, dead=1.0, units=13)) == []
    assert judged(changed(4, dead=1.0, units=14)) == ["dead units"]
    assert judged(changed(dead=1.0, units=2)) == ["dead units"]  # 24 units, two a layer
    assert judged(changed(dead=1.0, units=1)) == []
    assert judged(changed(4, dead=1.0, samples=2)) == []


def test_saturation_has_a_limit():
    assert judged(changed(4, saturated=findings.SATURATION + 0.01, activation="tanh")) == ["saturated units"]
    assert judged(changed(saturated=findings.SATURATION - 0.01, activation="tanh")) == []


def test_default_layers_count_when_they_are_many():
    assert findings.DEFAULTS == 9

    def rows(count, factor, **changes):
        default = {"fits": ("torch default",), "weight": 1 / 768, **changes}
        few = {"samples": findings.SAMPLES - 1}  # too few to say that they are alike
        return [sound(k, variance=factor**-k, **few, **(default if k < count else {})) for k in range(12)]

    assert judged(rows(8, 6)) == []
    assert judged(rows(9, 6)) == judged(rows(12, 5)) == ["torch's default"]
    assert judged(rows(12, 2)) == []  # skip connections carry the signal past the layers
    assert judged(rows(12, 6, normalised=True)) == []
    assert judged(rows(12, 6, activation="")) == []


def test_default_layers_count_behind_any_activation_when_nothing_comes_through():
    def rows(factor, **changes):
        faded = {"variance": 2.0 * findings.FADED * 63 / 64 * factor}
        default = {"fits": ("torch default",), "activation": "silu", "weight": 1 / 768}
        return [sound(k, **(default | (faded if k > 8 else {}) | changes)) for k in range(12)]

    assert judged(rows(0.9)) == ["torch's default"]
    assert judged(rows(1.1)) == []
    assert judged(rows(0.9, normalised=True)) == []
    assert judged(rows(0.9), alike=0.5) == []  # half of what is missing was missing from the start
    assert judged(rows(0.4), alike=0.5) == ["torch's default"]
    assert judged(rows(0.9, fits=("lecun",))) == ["samples alike"]
    assert judged([sound(k) for k in range(11)] + rows(0.9)[-1:]) == []  # one such layer


def remedies(found):
    return " ".join(finding.remedy for finding in found.findings)


def test_remedy_names_the_call_or_the_number():
    for name, activation in (("sigmoid", "tanh or ReLU"), ("silu", "activations.gain('silu')² = ")):
        assert activation in remedies(probe(*BROKEN[f"torch's default/{name}"](0)))
    he = 'initialize(model, "he_normal")'
    for name in ("torch's default/deep", "vanishing/std", "exploding/shallow"):
        assert he in remedies(probe(*BROKEN[name](0))), name
    found = probe(*BROKEN["exploding/tied"](0))
    assert f"Divide what leaves it by {8 * found.weight[-1]:.2g}, or make" in remedies(found)  # it has 64 inputs
    for name in findings.GATES:
        points = activations.fixed_points(name, gain=activations.gain(name))
        point = min(points, key=lambda each: abs(each.q - 1))
        assert point.kind == "unstable"
    assert he not in remedies(probe(*BROKEN["exploding/residual"](0)))  # it has He's variance
    assert f"{activations.gain('tanh') ** 2:.3g}" in remedies(probe(*BROKEN["saturated units/std"](0)))


def test_remedies_do_what_they_say():
    model, x, loss = BROKEN["torch's default/deep"](0)
    initialize(model, "he_normal", generator=generator(1))
    assert probe(model, x, loss).findings == ()
    model, x, loss = BROKEN["loss at start/head"](0)
    found = probe(model, x, loss)
    size = found.forward[-1] ** 0.5
    assert f"Divide the logits by {size:.2g}, or the weights" in remedies(found)
    with torch.no_grad():
        model[-1].weight.div_(size)
    assert probe(model, x, loss).findings == ()
    model, x, loss = BROKEN["loss at start/tied"](0)
    assert "make all embeddings smaller" in remedies(probe(model, x, loss))
    with torch.no_grad():
        for table in (model.token, model.place):
            table.weight.div_(8)
    assert probe(model, x, loss).findings == ()


def test_who_initialised_in_vain_is_told_so():
    assert "thrown away" in remedies(probe(*BROKEN["torch's default/weight norm"](0)))
    assert "thrown away" not in remedies(probe(*BROKEN["torch's default/deep"](0)))


def test_fan_out_counts_among_fan_ins():
    swapped = {"fans": Fans(256, 64), "weight": 2 / 64, "fits": ("he fan-out",)}
    usual = {"fans": Fans(64, 256), "weight": 2 / 64, "fits": ("he",)}
    rows = [sound(k, **(swapped if k == 3 else usual)) for k in range(6)]
    assert judged(rows) == ["wrong fan"]
    assert judged([dataclasses.replace(row, fits=("he", "he fan-out")) for row in rows]) == []
    assert judged([dataclasses.replace(row, normalised=True) for row in rows]) == []
    assert judged([sound(k, **swapped) for k in range(6)]) == []
    small = [dataclasses.replace(row, fits=("he", "he fan-out")) for row in rows[:3]]
    assert judged([*small, rows[3], sound(4)]) == []  # weights too few to tell the two apart are no witness either
    # He's fan-out is LeCun's fan-in where a layer doubles the units: no witness against the others.
    doubling = {"fans": Fans(64, 128), "weight": 2 / 128, "fits": ("lecun", "he fan-out")}
    first = {"fans": Fans(27, 144), "weight": 2 / 144, "fits": ("he fan-out",)}
    assert judged([sound(0, **first), *(sound(k, **doubling) for k in range(1, 5))]) == []


def test_loss_is_compared_with_a_guess_and_its_error():
    guess = math.log(10)
    for value, error, expected in ((2.9, 0.0, []), (3.1, 0.0, ["loss at start"]), (3.1, 0.1, []), (-9.0, 0.0, [])):
        assert judged(ROWS, entropies=[Entropy(guess + value, 10, error)]) == expected


def test_half_precision_has_two_ends():
    half = {"dtype": torch.float16}
    assert judged(changed(**half)) == []
    assert judged(changed(5, **half, largest=65504 / 15)) == ["half precision"]
    assert judged(changed(5, **half, largest=math.inf, forward=math.inf)) == ["half precision"]
    assert judged(changed(5, **half, backward=1e-10)) == ["half precision"]
    assert judged(changed(5, **half, backward=0.0)) == []  # a head may start at zero
    assert judged(changed(dtype=torch.bfloat16, largest=65504.0, backward=1e-10)) == []


def test_layers_without_a_gradient_count_if_they_want_one():
    lost = {"reached": False, "backward": math.nan, "weight_gradient": math.nan}
    assert judged(changed(0, **lost)) == ["no gradient"]
    assert judged(changed(0, **lost, trained=False)) == []


def test_equal_units_count_when_they_are_half_and_move_together():
    assert judged(changed(3, twins=128)) == ["equal units"]
    assert judged(changed(3, twins=126)) == []
    assert judged(changed(3, twins=256, weight_gradient=0.0)) == []
    assert judged(changed(3, twins=256, trained=False)) == []
    assert judged(changed(11, twins=256)) == []  # outputs for classes that the batch lacks
    assert judged(changed(twins=256, weight=0.0, weight_gradient=0.0, forward=0.0, fits=("zero",))) == ["equal units"]


def test_facts_become_findings():
    assert judged(ROWS, not_called=["a", "b"]) == ["not called"]
    assert judged(ROWS, copies=[("a", "b"), ("c", "d")]) == ["reused random numbers"]
    assert judged(changed(4, lost="why")) == ["initialisation without effect"]
    assert judged(ROWS, packed=[("a", "why", False)]) == ["packed matrices"]
    text = judge(ROWS, Facts(not_called=list("abcde")))[0].text
    assert "'a', 'b', 'c' and 2 more" in text


def test_parametrised_layer_left_as_torch_drew_it_counts_among_layers_of_its_kind():
    left = {"parametrised": True, "fits": ("torch default",), "weight": 1 / 768}
    assert judged(changed(4, **left)) == ["initialisation without effect"]
    assert judged(changed(4, **left, kind="Conv2d")) == []
    assert judged([*changed(4, **left), sound(12, fits=("torch default",))]) == []
    assert judged(changed(4, **(left | {"parametrised": False}))) == []


def test_packed_matrices_count_where_others_were_drawn_on_purpose():
    default = changed(fits=("torch default",), activation="")
    for rows, of_torch, expected in ((ROWS, True, 1), (ROWS, False, 1), (default, True, 0), (default, False, 1)):
        assert judged(rows, packed=[("a", "why", of_torch)]) == ["packed matrices"] * expected


def test_cause_comes_before_symptoms_and_replaces_those_it_explains():
    rows = changed(0, forward=math.nan)
    assert judged(rows, entropies=[Entropy(99.0, 10, 0.0)], not_called=["a"]) == ["not finite", "not called"]


def test_rows_without_units_or_samples_are_passed_over():
    assert judged([*ROWS, Row("empty"), sound(13, samples=0, forward=math.nan)]) == []


def test_finding_reads_as_a_paragraph():
    for chapter, number in (("06", "6"), ("08b", "8b"), ("10", "10")):
        finding = Finding("dead units", ("a",), "Text.", "Remedy.", chapter)
        assert str(finding) == f"Dead units. Text. Remedy. (Chapter {number}.)"


# --- schemes ----------------------------------------------------------------------------------


def weights(variance, count=10_000, **changes):
    root = math.sqrt(variance)
    values = {"mean": 0.0, "second": variance, "fourth": 3 * variance**2, "least": -4 * root, "most": 4 * root}
    return Weights(count, **(values | changes))


@pytest.mark.parametrize(
    ("variance", "name"),
    [(2 / 100, "he"), (1 / 100, "lecun"), (2 / 500, "glorot"), (2 / 400, "he fan-out"), (1 / 400, "lecun fan-out")],
)
def test_scheme_fits_within_four_standard_errors(variance, name):
    error = math.sqrt(2 / 10_000)
    assert schemes_of(weights(variance), Fans(100, 400))[:1] == (name,)
    assert name in schemes_of(weights(variance * (1 + 3.9 * error)), Fans(100, 400))
    assert name not in schemes_of(weights(variance * (1 + 4.1 * error)), Fans(100, 400))
    assert schemes_of(weights(variance, mean=5 * math.sqrt(variance / 10_000)), Fans(100, 400)) == ()


def test_few_entries_fit_the_scheme_that_drew_them():
    missed = 0
    for k, count in enumerate((8, 16, 64)):
        draws = torch.randn(500, count, generator=generator(k))
        missed += sum("lecun" not in schemes_of(weigh(draw[None]), Fans(1, 3)) for draw in draws)
    assert missed <= 3  # about once in ten thousand


def test_default_is_also_told_by_its_bound():
    default = {"least": -0.1, "most": 0.1, "fourth": 1.8 / 300**2}
    assert schemes_of(weights(1 / 300, **default), Fans(100, 100)) == ("torch default",)
    assert schemes_of(weights(1 / 300, **(default | {"most": 0.11})), Fans(100, 100)) == ()


def test_strange_weights_fit_nothing_or_say_what_they_are():
    assert schemes_of(weights(0.0), Fans(100, 100)) == ("zero",)
    assert schemes_of(weights(1e-4, mean=0.01, least=0.01, most=0.01), Fans(100, 100)) == ("constant",)
    assert schemes_of(weights(1 / 100, orthogonal=True), Fans(100, 100)) == ("orthogonal",)
    assert schemes_of(weights(math.nan), Fans(100, 100)) == ()
    assert schemes_of(weights(1.0, count=0), Fans(0, 100)) == ()


def test_few_weights_take_the_scheme_of_the_many():
    several = [("he",), ("he",), ("glorot", "he"), (), ("he fan-out",), ("selu 3/4",)]
    rows = [sound(k, fits=fits) for k, fits in enumerate(several)]
    name_schemes(rows)
    assert [row.scheme for row in rows] == ["he", "he", "he", "none", "he fan-out", "none"]
    rows[5].activation = "selu"
    name_schemes(rows)
    assert rows[5].scheme == "selu 3/4"


def test_constants_are_those_that_the_book_derives():
    # Half of the units have a mean of more than three standard deviations at this share.
    from scipy import stats

    ratio = math.sqrt((1 - findings.SHARE) / findings.SHARE)
    assert 2 * stats.norm.sf(3 / ratio) == pytest.approx(0.5, abs=0.02)
    # Saturated pairs: hardtanh of unit pre-activations has a share of 32 %, tanh at three times their size 47 %.
    assert 2 * stats.norm.sf(SATURATED["hardtanh"]) < findings.SATURATION < 2 * stats.norm.sf(SATURATED["tanh"] / 3)
    # A cross-entropy of normal logits of unit variance exceeds that of a guess by 1/2.
    logits = torch.randn(20_000, 50, generator=generator(1)).double()
    excess = (logits.logsumexp(1) - logits[:, 0]).mean().item() - math.log(50)
    assert excess == pytest.approx(0.5, abs=0.05)
    assert pytest.approx(6 * 0.5) == findings.EXCESS


def test_broken_models_are_found_because_of_what_is_broken():
    """The same model with the one thing mended gives nothing."""
    x = normal(64, 128)
    assert kinds(probe(with_std(nets.mlp([128] * 10 + [10]), 0.01), x).findings) == ["vanishing"]
    assert probe(with_std(nets.mlp([128] * 10 + [10]), math.sqrt(2 / 128)), x).findings == ()


# --- sound models that look unusual, and causes that look like others ---------------------------


def he(model, n):
    return drawn(model, "he_normal", n)


@pytest.mark.parametrize("size", [16, 32])
def test_a_mean_over_an_image_makes_no_gradient_vanish(size):
    convolutions = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU()]
    for _ in range(2):
        convolutions += [nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)]
    model, x = he(nn.Sequential(*convolutions, *head), 1), normal(8, 3, size, size)
    found = probe(model, x + normal(8, 3, 1, 1))  # images with means of their own
    assert found.backward[0] < 1e-3 * found.backward[-1]
    assert found.findings == ()


def test_positions_are_named_where_a_gradient_is_summed_over_them():
    quiet = [part for _ in range(8) for part in (nn.Conv1d(16, 16, 1), nn.ReLU())]
    more = copy.deepcopy(quiet)
    model = he(
        nn.Sequential(*quiet, nn.AvgPool1d(2), *more, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 4)), 1
    )
    with torch.no_grad():
        for layer in [each for each in model if isinstance(each, nn.Conv1d)]:
            layer.weight.mul_(0.5)
    text = str(next(each for each in probe(model, normal(32, 16, 8)).findings if each.kind == "vanishing"))
    assert "gradient on its way back, times the number of positions, falls" in text


def test_sines_may_be_fed_with_large_numbers():
    class Fourier(nn.Module):
        def __init__(self):
            super().__init__()
            self.waves, self.net = nn.Linear(2, 128), mlp([128, 64, 64, 1])

        def forward(self, x):
            return self.net(torch.sin(self.waves(x)))

    model = drawn(Fourier(), "he_normal")
    nn.init.normal_(model.waves.weight, std=10, generator=generator(2))
    assert "exploding" not in kinds(probe(model, normal(64, 2)).findings)


def test_a_teacher_is_meant_as_a_copy_and_two_students_are_not():
    class Pair(nn.Module):
        def __init__(self, learns):
            super().__init__()
            self.student = drawn(mlp([16, 32, 8]))
            self.teacher = copy.deepcopy(self.student).requires_grad_(learns)

        def forward(self, x):
            return self.student(x) - self.teacher(x + 1)

    assert probe(Pair(False), normal(64, 16)).findings == ()
    (found,) = probe(Pair(True), normal(64, 16)).findings
    assert found.kind == "reused random numbers"
    assert "a teacher" in found.remedy


def test_a_first_call_without_gradient_is_none_of_a_layer_that_learns_in_the_second():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = drawn(mlp([8, 32, 8]))

        def forward(self, x):
            with torch.no_grad():
                guess = self.net(x)
            return self.net(x + guess)

    found = probe(Twice(), normal(64, 8))
    assert len(found.names) == 4
    assert "no gradient" not in kinds(found.findings)


def test_calls_of_one_layer_are_one_layer_where_samples_are_alike():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = drawn(mlp([16, 64, 64]))
            self.head = drawn(nn.Linear(64, 4))
            nn.init.constant_(self.head.bias, -math.log(99))
            with torch.no_grad():
                self.head.weight.mul_(0.1)

        def forward(self, x):
            h = self.body(x).relu()
            return self.head(h), self.head(h / 2), self.head(h / 4)

    assert "samples alike" not in kinds(probe(Head(), normal(64, 16)).findings)


@pytest.mark.parametrize("activation", ["gelu", "tanh", "relu"])
def test_zero_weights_behind_zero_weights_are_found(activation):
    model = drawn(nets.mlp([16, 32, 32, 32, 4], activation))
    for layer in (model[2], model[4]):
        nn.init.zeros_(layer.weight)
    found = {each.kind: each for each in probe(model, normal(64, 16)).findings}
    assert found["no gradient"].layers == ("4",)
    assert "that will stay so" in found["no gradient"].text
    if activation == "relu":
        assert "exactly zero" in found["dead units"].remedy


def test_zero_weights_at_the_end_of_a_branch_are_fine():
    model = drawn(mlp([16, 32, 32, 4]))
    nn.init.zeros_(model[-1].weight)
    assert "no gradient" not in kinds(probe(model, normal(64, 16)).findings)


@pytest.mark.parametrize("loss", [lambda output: output.relu().log().mean(), lambda output: output.sum() * math.nan])
def test_a_loss_that_is_not_finite_is_found(loss):
    found = probe(drawn(mlp([16, 32, 4])), normal(64, 16), loss).findings
    assert found[0].kind == "not finite"
    assert "loss" in found[0].text or "gradient" in found[0].text


def test_layers_that_nobody_registered_are_found_but_not_those_of_a_loss_or_of_a_frozen_teacher():
    (found,) = probe(*BROKEN["not registered/list"](0)).findings
    assert "(64, 64), (64, 64), (64, 64) and 1 more" in found.text
    other = drawn(mlp([4, 8, 4]))
    assert probe(drawn(mlp([16, 32, 4])), normal(64, 16), lambda output: other(output).square().mean()).findings == ()

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.teacher = drawn(mlp([16, 32, 4])), [drawn(mlp([16, 8, 4]), n=5).requires_grad_(False)]

        def forward(self, x):
            return self.net(x) - self.teacher[0](x)

    assert probe(Hidden(), normal(64, 16)).findings == ()


def test_spectral_norm_sets_the_scale_and_the_remedy_says_so():
    model = nets.mlp([64] + [64] * 30 + [10])
    initialize(model, "he_normal", generator=generator(3))
    for k in range(0, len(model) - 1, 2):
        parametrizations.spectral_norm(model[k])
    found = next(each for each in probe(model, normal(64, 64)).findings if each.kind == "vanishing")
    assert "spectral norm sets the scale itself" in found.remedy
