"""Fixtures that several test modules use."""

import pytest
import torch
from torch import nn

from initlib import generator, initialize


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
