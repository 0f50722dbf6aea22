"""The loss and the optimizer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from ledger import compares, draw, values_and_gradients
from torch.nn import functional as F

from lm.ops.cross_entropy import cross_entropy
from lm.parameters import Declaration
from lm.training.optimizer import OptimizerConfig
from lm.training.rules.adamw import AdamW
from lm.training.rules.muon import Muon
from lm.training.schedules.constant import Constant

B, L, D, V = 2, 50, 16, 211
TARGETS = np.random.default_rng(0).integers(0, V, (B, L))


def nats(logits):
    return F.cross_entropy(logits.flatten(0, 1), torch.tensor(TARGETS).flatten(), reduction='none').view(B, L)


@compares('cross-entropy in chunks', 'torch cross_entropy')
def _(dtype):
    ours = lambda x, e, b: cross_entropy(x, e, b, TARGETS, chunk=16)  # noqa: E731
    theirs = lambda x, e, b: nats(x @ e.T + b)  # noqa: E731
    return values_and_gradients(ours, theirs, draw(1, (B, L, D), (V, D), (V,)), dtype)


@compares('cross-entropy with capped logits and z-loss', 'torch cross_entropy, logsumexp')
def _(dtype):
    def ours(x, e):
        loss, total = cross_entropy(x, e, None, TARGETS, cap=5.0, normalizer=True, chunk=16)
        return loss + 1e-2 * total**2

    def theirs(x, e):
        logits = 5 * torch.tanh(x @ e.T / 5)
        return nats(logits) + 1e-2 * torch.logsumexp(logits, dim=-1) ** 2

    return values_and_gradients(ours, theirs, draw(2, (B, L, D), (V, D)), dtype)


try:
    import tokamax
except ImportError:
    tokamax = None
else:

    @compares('cross-entropy in chunks, the sum', 'tokamax linear_softmax_cross_entropy_loss, xla', bits=(32,))
    def _(dtype):
        x, e = (jnp.asarray(a, dtype) for a in draw(3, (B, L, D), (V, D)))
        ours = lambda x, e: cross_entropy(x, e, None, TARGETS, chunk=16).sum()  # noqa: E731
        loss = functools.partial(tokamax.linear_softmax_cross_entropy_loss, implementation='xla')
        theirs = lambda x, e: loss(x.reshape(-1, D), jnp.asarray(TARGETS.ravel()), e.T)  # noqa: E731
        for got, want in zip(
            *(jax.tree.leaves(jax.value_and_grad(f, (0, 1))(x, e)) for f in (ours, theirs)), strict=True
        ):
            yield 'loss and gradients', got, want


# optax computes the bias corrections of Adam in single precision, whatever type the parameters have.
@compares('AdamW with clipping and decay, 20 steps', 'torch AdamW, clip_grad_norm_', bits=(32,))
def _(dtype):
    matrix, gain, *gradients = draw(4, (12, 8), (8,), *[(12, 8), (8,)] * 20)
    declared = {'matrix': Declaration('matrix', ('embed', 'mlp')), 'gain': Declaration('gain', ('mlp',))}
    config = OptimizerConfig(rule=AdamW(b1=0.9, b2=0.95), schedule=Constant(), peak_learning_rate=1e-2, warmup_steps=0)
    transform = config.build(20, declared)
    ours = {'matrix': jnp.asarray(matrix, dtype), 'gain': jnp.asarray(gain, dtype)}
    state = transform.init(ours)
    theirs = [torch.tensor(x, requires_grad=True) for x in (matrix, gain)]
    groups = [{'params': [theirs[0]], 'weight_decay': 0.1}, {'params': [theirs[1]], 'weight_decay': 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for step in range(20):
        grown = [(0.1 + step % 3) * g for g in gradients[2 * step : 2 * step + 2]]
        told = {name: jnp.asarray(g, dtype) for name, g in zip(declared, grown, strict=True)}
        updates, state = transform.update(told, state, ours)
        ours = optax.apply_updates(ours, updates)
        for parameter, g in zip(theirs, grown, strict=True):
            parameter.grad = torch.tensor(g)
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        optimizer.step()
    yield 'matrix', ours['matrix'], theirs[0].detach().numpy()
    yield 'gain', ours['gain'], theirs[1].detach().numpy()


@compares("the direction of Muon's first step", 'optax.contrib.scale_by_muon')
def _(dtype):
    for shape in ((12, 20), (20, 12)):
        (g,) = (jnp.asarray(x, dtype) for x in draw(5, shape))
        transform = Muon(momentum=0.95, rms=0.2).build({'x': Declaration('matrix', ('embed', 'mlp'))})
        ours, _ = transform.update({'x': g}, transform.init({'x': g}))
        other = optax.contrib.scale_by_muon(beta=0.95, nesterov=True, eps=0.0)
        theirs, _ = other.update(g, other.init(g))
        yield f'{shape}', ours['x'] / jnp.linalg.norm(ours['x']), theirs / jnp.linalg.norm(theirs)
