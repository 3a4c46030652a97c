"""What every test starts from, and fixtures that several test modules use."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from initlib import generator, initialize, seed


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Seed the global random states, so that a test draws the same each time and INITLIB_SEED shifts that too.

    A hook and not a fixture: fixtures of a whole module draw before those of a test.
    """
    number = seed(9000)
    torch.manual_seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002 (what a user's code may draw from)
    random.seed(number)


@pytest.fixture
def mixed():
    """A convolutional network with all that a measurement could disturb."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Flatten(), nn.Linear(16, 5)
    )
    initialize(model, "he_normal", generator=generator(3))
    model(torch.randn(2, 3, 4, 4, generator=generator(1))).square().sum().backward()
    model[5].bias.requires_grad_(False)
    return model
