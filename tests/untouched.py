"""All of a model that a measurement must leave as it is, and the global random states."""

import random

import numpy as np
import torch


def random_states():
    """The states of torch, NumPy and Python."""
    return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()  # noqa: NPY002


def snapshot(model):
    """Values and identity of what a model holds, and its hooks."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {
        "objects": {name: id(tensor) for name, tensor in tensors.items()},
        "values": {name: tensor.detach().tolist() for name, tensor in tensors.items()},
        "gradients": {
            name: None if p.grad is None else (id(p.grad), p.grad.tolist()) for name, p in model.named_parameters()
        },
        "required": {name: p.requires_grad for name, p in model.named_parameters()},
        "modes": [module.training for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._forward_hooks_with_kwargs))
            for m in model.modules()
        ],
        "random": random_states(),
    }


def without(found, *parts):
    """A snapshot without some of its parts."""
    return {part: value for part, value in found.items() if part not in parts}
