"""The forward kernel of the delta rule on TPUs.

N key heads of all sequences, G queries of each, T tokens of a grid step, E key size, D value size. Arrays in HBM are
[N, rows, tokens]. The grid walks over groups of heads and, for each, over the tokens in order, with the states in VMEM.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops.delta_rule.tpu.chunk import Chunk, Vectors
from lm.ops.delta_rule.tpu.plan import DeltaPlan
from lm.ops.tpu import dot
from lm.ops.tpu.order import Turns, side_by_side


def forward(plan: DeltaPlan, save: bool, q, k, v, beta, c, before) -> list[jax.Array]:
    """Outputs [N G, D, L] and the states after the last token [N, D, E] float32; with `save` also those before each
    chunk, [N, L / C, D, E] in the type of v.

    Args:
        plan: of L tokens, a multiple of its chunk, and N heads, of its heads.
        save: also return the states before the chunks.
        q: [N G, E, L].
        k: [N, E, L].
        v: [N, D, L].
        beta: [N, 1, L] float32.
        c: the running sums of log factors in each chunk, [N, 1, L] float32.
        before: the states before the first token, [N, D, E] float32.
    """
    n, size, length = v.shape
    outputs = [
        jax.ShapeDtypeStruct((q.shape[0], size, length), v.dtype),
        jax.ShapeDtypeStruct(before.shape, jnp.float32),
    ]
    if save:
        outputs.append(jax.ShapeDtypeStruct((n, plan.steps, *before.shape[1:]), v.dtype))
    inputs = (q, k, v, beta, c, before)
    return pl.pallas_call(
        functools.partial(_kernel, plan),
        name='delta_rule_forward',
        grid=(n // plan.heads, plan.steps),
        in_specs=[plan.queries(q), *(plan.keys(a) for a in (k, v, beta, c)), plan.whole(before)],
        out_specs=[plan.queries(outputs[0]), plan.whole(before), *(plan.state(a) for a in outputs[2:])],
        out_shape=outputs,
        scratch_shapes=[pltpu.VMEM((plan.heads, *before.shape[1:]), jnp.float32)],
        compiler_params=plan.compiler_params,
        cost_estimate=plan.cost(4 + 3 * plan.groups, inputs, outputs),
    )(*inputs)


def _kernel(plan: DeltaPlan, q, k, v, beta, c, before, o, after, *refs):
    *saved, state = refs

    @pl.when(pl.program_id(1) == 0)
    def _():
        state[...] = before[...]

    def head(n: int) -> Turns:
        chunk = Chunk(Vectors(k[n], plan.query_length and 1.0).x, v[n], beta[n], c[n], state[n])
        for states in saved:
            states[n, 0] = chunk.state
        queries = range(n * plan.groups, (n + 1) * plan.groups)
        vectors = [Vectors(q[m], plan.query_length).x for m in queries]
        products = [(dot(chunk.k, x, (0, 0)), dot(chunk.state, x, (1, 0))) for x in vectors]
        yield from chunk.solve()
        new = chunk.new.astype(chunk.dtype)
        for m, (of_query, read) in zip(queries, products, strict=True):
            inside = dot(new, chunk.weights(of_query).astype(chunk.dtype), (1, 0))
            o[m] = (chunk.since * read + inside).astype(o.dtype)
        added = dot((chunk.until * chunk.new).astype(chunk.dtype), chunk.k, (1, 1))
        state[n] = chunk.whole * state[n] + added

    side_by_side(head(n) for n in range(plan.heads))

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        after[...] = state[...]
