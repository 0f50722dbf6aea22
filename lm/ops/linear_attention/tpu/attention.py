"""Causal linear attention on TPUs: fused Pallas kernels, forward and backward.

Supports φ(x) = x ⊗ x (polysketch), quadratic series (Taylor), features as they are, and feature maps φ(x) = f(W x, x)
(Performer, LLoPS), each with or without an exact polynomial kernel inside each block, with or without decay and
denominators. Expansions, packed by symmetry,
and the maps' features are formed in VMEM; sums over earlier keys stay there across the blocks of a sequence, and the
forward kernel leaves a rounded copy per block for the backward sweep, unless there are so many features that the sums
are better formed again. Inside the kernels everything is feature by token
([N, F, L], N = batch · heads).

Static cycles per token and head are measured by `lm.bench.kernels`.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from lm.ops import platform
from lm.ops.linear_attention.tpu.backward import backward
from lm.ops.linear_attention.tpu.features import TpuPlan
from lm.ops.linear_attention.tpu.fold import sums_before
from lm.ops.linear_attention.tpu.forward import forward
from lm.ops.linear_attention.tpu.maps import operand
from lm.ops.linear_attention.types import LOCAL_BLOCK, PLAIN, SQUARE, Options, PolynomialKernel, ProductMap, State
from lm.ops.residuals import saved
from lm.ops.tpu import LANES, ROWS, by_head, by_token, padded_rows
from lm.ops.tpu.decay import block_sums, of_heads

WIDE = 1024
"""Features of a map beyond which more than two heads a grid step gain nothing and take long to compile."""
DEGREES = (1, 2, 4, 8, 16)


def linear_attention(
    q_BxLxHxE: jax.Array,
    k_BxLxKxE: jax.Array,
    v_BxLxKxD: jax.Array,
    q_parameters,
    k_parameters,
    q_local_BxLxHxC: jax.Array | None,
    k_local_BxLxKxC: jax.Array | None,
    initial_state: State | None,
    log_decay_BxLxK: jax.Array | None = None,
    *,
    options: Options,
    with_state: bool,
) -> tuple[jax.Array, None]:
    """Arguments as in `lm.ops.linear_attention`; calls that `unsupported` refuses are wrong here."""
    arrays = [log_decay_BxLxK, q_BxLxHxE, k_BxLxKxE, v_BxLxKxD]
    if options.local is not None:
        arrays += [q_local_BxLxHxC, k_local_BxLxKxC]
    parameters = None if options.feature_map is None else (q_parameters, k_parameters)
    function = platform.per_device(functools.partial(_by_head, options), split=(False,) + (True,) * len(arrays))
    return function(parameters, *arrays), None


def unsupported(
    q,
    k,
    v,
    q_parameters,
    k_parameters,
    q_local,
    k_local,
    initial_state,
    log_decay=None,
    *,
    options,
    with_state=False,
    part=False,
) -> str | None:
    """Why the kernels cannot compute this call, or None; `part`: for a part of a window."""
    if platform.target_platform() != 'tpu':
        return 'needs a TPU'
    if not options.causal or not (options.normalize or log_decay is not None):
        return 'is causal and normalised only'
    if log_decay is not None and options.feature_map is not None:
        return 'has no decay with a feature map'
    if initial_state is not None or with_state:
        return 'takes no state in and gives none out'
    if reason := _unsupported_map(options, q, k, q_parameters, k_parameters):
        return reason
    if options.powers != PLAIN and not _quadratic(options.powers):
        return f'takes powers {PLAIN} or (c0, c1, c2) ≥ 0 with c2 above 0, not {options.powers}'
    if options.denominator_bias < 0:
        return f'takes no negative denominator_bias, {options.denominator_bias}'
    if options.local is not None:
        if options.window is not None:
            return 'takes exact blocks, not a window'
        if not isinstance(options.local, PolynomialKernel) or options.local.degree not in DEGREES:
            return f'takes a polynomial of degree {DEGREES} as exact kernel'
        block = options.block or LOCAL_BLOCK
        if block % LANES and (part or q.shape[1] > block):
            return f'takes blocks that are multiples of {LANES}, not {block}'
    # What a map is given may be more precise than its features are.
    dtypes = {a.dtype for a in (v, *([] if options.local is None else [q_local, k_local]))}
    dtypes |= {a.dtype for a in (q, k) if options.feature_map is None or a.dtype != jnp.float32}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype('bfloat16'), jnp.dtype('float32')}:
        return f'takes arrays that are all bfloat16 or all float32, not {", ".join(sorted(map(str, dtypes)))}'
    if reason := platform.uneven_batch(q.shape[0]):
        return reason
    sizes = _sizes(q, v, None if options.local is None else q_local)
    made = made_by(options.feature_map, q, q_parameters)
    plan = plan_for(options, q.shape[1], 1, *sizes, *made, log_decay is not None, part)
    # On v4 the operand made of the sums over later queries counts too (r = 96, heads of 128: 17 MiB); on v5e r = 128
    # compiles with 1.1 times the estimate as it is.
    small = plan.squared and plan.vmem_limit_bytes is None
    operand = sizes[3] * math.prod(plan.state_shape(sizes[0], sizes[1])) if small else 0
    if 1.1 * (vmem_estimate(plan, *sizes) + operand) > platform.vmem()[0]:
        return f'would not fit its VMEM with {plan.features or q.shape[-1]} features and blocks of {plan.block}'
    return None


def _unsupported_map(options: Options, q, k, q_parameters, k_parameters) -> str | None:
    feature_map = options.feature_map
    if feature_map is None:
        return None
    if not isinstance(feature_map, ProductMap) or jax.eval_shape(feature_map.matrix, q_parameters) is None:
        return f'does not compute the feature map {feature_map}'
    if options.powers != PLAIN:
        return f'takes a feature map with powers {PLAIN} only, not {options.powers}'
    sizes = {made_by(feature_map, a, parameters) for a, parameters in ((q, q_parameters), (k, k_parameters))}
    if any(size % ROWS for made in sizes for size in made) or len(sizes) > 1:
        return f'takes multiples of {ROWS} features, as many of keys as of queries'
    return None


def made_by(feature_map: ProductMap | None, x, parameters) -> tuple[int, int]:
    """Features that the map makes and rows of its matrix, for `plan_for`; 0 without a map."""
    if feature_map is None:
        return 0, 0
    x = jax.ShapeDtypeStruct((1, 1, 1, x.shape[-1]), x.dtype)
    matrix = jax.eval_shape(feature_map.matrix, parameters)
    features = jax.eval_shape(lambda parameters, x: feature_map(parameters, x, False), parameters, x)
    return features.shape[-1], matrix.shape[0]


def _quadratic(powers: tuple[float, ...]) -> bool:
    return len(powers) == 3 and min(powers) >= 0 and powers[2] > 0


def _sizes(q, v, q_local) -> tuple[int, int, int, int]:
    """Rows of x, of v and of what the exact kernel compares (0 without), as padded; bytes a number."""
    compared = 0 if q_local is None else padded_rows(q_local.shape[-1])
    return padded_rows(q.shape[-1]), padded_rows(v.shape[-1]), compared, v.dtype.itemsize


def _by_head(options: Options, parameters, log_decay_BxLxK, q_BxLxHxE, k_BxLxKxE, v_BxLxKxD, *local) -> jax.Array:
    if local and q_BxLxHxE.shape[1] <= (options.block or LOCAL_BLOCK):
        (q_BxLxHxE, k_BxLxKxE), local = local, ()
        options, parameters = dataclasses.replace(options, feature_map=None), None
    plan, maps, x, y, v, *local = arranged(
        options, parameters, log_decay_BxLxK, q_BxLxHxE, k_BxLxKxE, v_BxLxKxD, *local, part=False
    )
    return by_head(attend(plan, x, y, v, maps, *local), q_BxLxHxE, v_BxLxKxD.shape[-1])


def arranged(options: Options, parameters, log_decay_BxLxK, q_BxLxHxE, k_BxLxKxE, v_BxLxKxD, *local, part: bool):
    """The plan, and what `attend` takes: the map's matrices, x, y, v and the local arrays.

    `part`: whether the tokens are a part of a window, with sums over keys before it.
    """
    batch, length, heads, _ = q_BxLxHxE.shape
    sizes = _sizes(q_BxLxHxE, v_BxLxKxD, *local[:1] or (None,))
    made = made_by(options.feature_map, q_BxLxHxE, None if parameters is None else parameters[0])
    plan = plan_for(options, length, batch * heads, *sizes, *made, log_decay_BxLxK is not None, part)
    padded = -(-length // plan.block) * plan.block

    maps = ()
    if parameters is not None:
        matrices = (options.feature_map.matrix(each).astype(jnp.float32) for each in parameters)
        maps = tuple(jnp.pad(w, ((0, 0), (0, sizes[0] - w.shape[1]))) for w in matrices)
    # Zero tokens after the last are exact whatever their features: no earlier query sees them, and the gradients of
    # their own outputs are 0. So are zero features.
    x, y, v, *local = (by_token(a, padded, heads) for a in (q_BxLxHxE, k_BxLxKxE, v_BxLxKxD, *local))
    if log_decay_BxLxK is not None:
        local.append(block_sums(of_heads(log_decay_BxLxK, padded, heads), plan.block))
    return plan, maps, x, y, v, *local


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(plan: TpuPlan, x, y, v: jax.Array, maps: tuple[jax.Array, ...], *local: jax.Array) -> jax.Array:
    """The kernels on arrays that lie feature by token: x, y [N, F, L], v [N, D, L], local a, b [N, C, L] → [N, D, L].

    With plan.decay the last of `local` are the running sums c [N, 1, L] float32.

    F, C and D are multiples of 16, L of plan.block, N of plan.heads. With plan.feature_map x and y are what it is
    given, and `maps` its matrices for either, [R, F] float32.
    """
    return forward(plan, False, x, y, v, operands(maps, x, y, v), *local)[0]


def operands(maps, x, y, v):
    """The matrices of a map as the kernels read them."""
    return tuple(operand(w, a.dtype, v.dtype) for w, a in zip(maps, (x, y), strict=bool(maps)))


def _attend_forward(plan, x, y, v, maps, *local):
    read = operands(maps, x, y, v)
    o, inverse, *sums = map(saved, forward(plan, not plan.sums_again, x, y, v, read, *local))
    return o, ((x, y, v, *local), read, maps, o, inverse, sums)


def _attend_backward(plan, residuals, do):
    inputs, read, maps, o, inverse, sums = residuals
    if plan.sums_again:
        sums = sums_before(plan, *inputs[1:3], read[1])
    (dx, dy, dv, *dlocal), dmaps = backward(plan, read, inputs, o, do, inverse, sums)
    return dx, dy, dv, of_maps(maps, dmaps), *dlocal


def of_maps(maps, dmaps):
    """The gradients of the matrices from those of each step's heads."""
    return tuple(d.sum(0) for d in dmaps) if dmaps else tuple(jnp.zeros_like(w) for w in maps)


attend.defvjp(_attend_forward, _attend_backward)


def plan_for(
    options: Options,
    length: int,
    n: int,
    features: int,
    head_dim: int,
    compared: int,
    itemsize: int,
    made: int = 0,
    projection_rows: int = 0,
    decay: bool = False,
    part: bool = False,
) -> TpuPlan:
    """How `n` heads of `length` tokens are computed.

    Args:
        options: of the call.
        length: tokens.
        n: heads of all sequences.
        features: rows of x, padded.
        head_dim: rows of v, padded.
        compared: rows of the exact kernel's own arrays, padded; 0 without.
        itemsize: bytes of a number of v.
        made: features that the feature map makes of x; 0 without one.
        projection_rows: rows of its matrix.
        decay: whether there are log factors.
        part: whether the tokens are a part of a window, with sums over keys before it.
    """
    squared = _quadratic(options.powers)
    local = options.local
    if local is None:
        # The block does not matter to the result. Wider ones save fewer sums and shorter ones compute less.
        wanted = 512 if squared and features > 32 else 256
        wanted = LANES if made > WIDE and itemsize == 4 else wanted
        degree, scale = 2 if squared else 1, 1.0
    else:
        wanted = options.block or LOCAL_BLOCK
        degree, scale = local.degree, local.scale
    block = -(-min(wanted, length) // LANES) * LANES
    tile = next(size for size in (256, LANES) if block % size == 0)
    available, limit = platform.vmem()
    plan = TpuPlan(
        block=block,
        tile=tile,
        heads=1,
        squared=squared,
        exact_local=compared > 0,
        degree=degree,
        scale=scale,
        denominator_bias=options.denominator_bias,
        # In a single block of exact weights the features have no part.
        series=options.powers if squared and options.powers != SQUARE and (local is None or compared) else (),
        feature_map=options.feature_map,
        features=made,
        projection_rows=projection_rows,
        single_block=length <= block and not part,
        normalize=options.normalize,
        decay=decay,
        part=length if part else 0,
        # The sums of so many features are several times as large as all else that a layer keeps.
        sums_again=made > WIDE and length > block and not part,
        joined=head_dim % platform.matrix_side() > 0,
        # Static cycles: r = 32 in blocks of 1,024 takes 5 % less of them on v6e, and on v5e 3 % more.
        columns=(made or 256) if platform.matrix_side() == 256 else 0,
        bfloat16_vectors=platform.matrix_side() == 256,
        vmem_limit_bytes=limit,
    )
    margin = 1.2 if made else 1.4  # features are most of what there is, and their size is known
    for heads in (4, 3, 2) if made <= WIDE else (2,):
        wider = dataclasses.replace(plan, heads=heads)
        if n % heads == 0 and margin * vmem_estimate(wider, features, head_dim, compared, itemsize) <= available:
            return wider
    return plan


def vmem_estimate(plan: TpuPlan, features: int, head_dim: int, compared: int, itemsize: int) -> int:
    """Bytes of VMEM that the backward kernel, the larger one, takes: about what the compiler reports."""
    rows_of_x, features = features, plan.features or features
    state = math.prod(plan.state_shape(features, head_dim))
    rows = 4 * rows_of_x + 5 * head_dim + 4 * compared
    blocks = 2 * itemsize * (rows * plan.block + state + (3 * features**2 if plan.squared else 0))
    sums = (12 if plan.part else 4) * (state + math.prod(plan.moment_shape(features)))
    expansion = 2 * plan.state_shape(features, head_dim)[1] * plan.block
    if plan.squared and itemsize == 4 and plan.vmem_limit_bytes is None:
        # What v4 spills of float32 expansions: 9.1 MiB at r = 32 in blocks of 1,024, 14.5 at 64 in blocks of 512.
        expansion += 6 * plan.heads * expansion
    weights = (12 if plan.decay else 8) * plan.block * plan.tile + 2 * LANES * plan.block * plan.decay
    maps = 0
    if plan.feature_map is not None:
        # Of each head, features, their gradients, products; W in two buffers for queries and keys, and its gradients
        # likewise. Products of float32 numbers are of bfloat16 parts, which take as much again.
        maps = (itemsize // 2) * ((6 + 2 * itemsize) * features + 8 * plan.projection_rows) * plan.block * plan.heads
        maps += (4 * itemsize + 16 * plan.feature_map.learns) * plan.projection_rows * max(2 * rows_of_x, LANES)
    return plan.heads * (blocks + sums) + expansion + weights + maps
