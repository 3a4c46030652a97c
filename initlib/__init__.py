"""Initialisation of neural-network weights from the second moment: predicted, measured, checked.

The rooms, lower ones first; none imports a higher one:

- :mod:`initlib.runtime`: device, size and seeds of an experiment
- :mod:`initlib.tables`: tables that print and render
- :mod:`initlib.fans`: connections of a layer, and their averages
- :mod:`initlib.schemes`: variance = gain² / average fan, and the distributions
- :mod:`initlib.model`: a scheme over a whole model
- :mod:`initlib.layers`: the layers of any model, in call order, and the statistics of what leaves each
- :mod:`initlib.calibrate`: initialisation from data
- :mod:`initlib.checks`: predicted against measured, with the standard error
- :mod:`initlib.activations`: an activation as its Gaussian moments
- :mod:`initlib.pairs`: two samples in one unit, integrals over both
- :mod:`initlib.meanfield`: correlations, phases and gradients of infinitely wide networks
- :mod:`initlib.weight_free`: a layer that sees nothing of its input but the Gram matrix
- :mod:`initlib.signal`: moments of many random networks, forward and backward
- :mod:`initlib.nets`: the networks of the training experiments
- :mod:`initlib.sections`: generated sections that look like electron microscopy
- :mod:`initlib.data`: data of the training experiments
- :mod:`initlib.train`: seeds × schemes × learning rates, trained at once
- :mod:`initlib.figures`: the look of the figures
- :mod:`initlib.follow`: which activation acts on what leaves a layer
- :mod:`initlib.drawn`: how a weight was drawn, told from its entries
- :mod:`initlib.findings`: what is wrong with a measured model, in plain language
- :mod:`initlib.probe`: signal and gradient at each layer of any model
"""

from initlib import activations, calibrate, data, figures, meanfield, nets, schemes
from initlib.checks import check, check_close, check_exact, check_less, mean_and_se
from initlib.fans import Fans, average, fans
from initlib.layers import layer_moments
from initlib.model import initialize
from initlib.probe import probe
from initlib.runtime import device, generator, rng, seed, sized
from initlib.schemes import Scheme, constant
from initlib.signal import propagate
from initlib.tables import Table
from initlib.train import train, tune

__version__ = "0.1.0"

__all__ = [
    "Fans",
    "Scheme",
    "Table",
    "activations",
    "average",
    "calibrate",
    "check",
    "check_close",
    "check_exact",
    "check_less",
    "constant",
    "data",
    "device",
    "fans",
    "figures",
    "generator",
    "initialize",
    "layer_moments",
    "mean_and_se",
    "meanfield",
    "nets",
    "probe",
    "propagate",
    "rng",
    "schemes",
    "seed",
    "sized",
    "train",
    "tune",
]
