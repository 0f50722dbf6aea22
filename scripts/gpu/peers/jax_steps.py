"""The worker of JAX: steps of `lm`, and a minimal step of the same model written by hand.

B batch, L length, D width, H heads, C head size, F width of a feed-forward layer, V vocabulary, N layers.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lm.bench.candidates import candidates, change_context
from lm.compilation.memory import keep_freed_memory, program_memory
from lm.hardware import Target
from lm.ops.cross_entropy import xla as cross_entropy
from lm.plan import plan_step
from lm.pod.mesh import batch_sharding
from lm.training.program import lower_step
from scripts.gpu.peers.turns import Batch, Column, describe, read_clock, serve

Params = dict[str, Any]


class LmStep:
    """The step of `lm train`. It is traced here, compiled by `compile`, and gets a state at the first `run`."""

    def __init__(self, column: Column, batch: Batch):
        (found,) = candidates([column.attention], [column.gin_file], column.gin_params).values()
        target = Target.of_devices(jax.devices())
        found = change_context(found, batch.context, batch.tokens, column.microbatch_tokens, target)
        self.column, self.plan = column, plan_step(found, target)
        self.mesh = self.plan.mesh.arrange(jax.devices())
        self.parameters, self.microbatches = self.plan.parameters, found.train.microbatches
        with change_logit_bytes(column.logit_bytes):
            self.lowered = lower_step(self.plan.program, self.mesh)
        self._state = self._batch = None

    def compile(self) -> Any:
        with jax.set_mesh(self.mesh):
            self.compiled = self.lowered.compile(compiler_options=dict(self.column.compiler_options))
        return self.compiled

    def run(self, steps: int) -> jax.Array:
        """Runs the steps; returns the loss of the last one. Without a state it makes one first."""
        if self._state is None:
            self.start()
        state, self._state = self._state, None  # donated: gone, if the step fails
        for _ in range(steps):
            state, metrics = self.compiled(state, self._batch)
        self._state = state
        return jax.block_until_ready(metrics['loss'])

    def start(self, state: Any = None) -> None:
        """Takes a state, or makes one, and draws random tokens."""
        program, vocabulary = self.plan.program, self.plan.experiment.model.vocab_size

        def draw() -> jax.Array:
            tokens = jax.random.randint(jax.random.key(1), program.batch_shape, 0, vocabulary)
            return tokens.astype(program.batch_dtype)

        with jax.set_mesh(self.mesh):
            self._state = program.init_state(program.place_state(self.mesh), 0) if state is None else state
            if self._batch is None:
                self._batch = jax.jit(draw, out_shardings=batch_sharding(self.mesh, axis=1))()

    def take_state(self) -> Any:
        """Gives the state away."""
        state, self._state = self._state, None
        return state


@contextlib.contextmanager
def change_logit_bytes(size: int | None) -> Iterator[None]:
    """Programs that are traced inside may hold so many bytes of logits at a time."""
    before = dict(cross_entropy.LOGIT_BYTES)
    if size is not None:
        cross_entropy.LOGIT_BYTES.update(gpu=size, cpu=size)
    try:
        yield
    finally:
        cross_entropy.LOGIT_BYTES.update(before)


class StepByHand:
    """The model of `lm` in few lines: a Python loop over layers, nothing recomputed, logits whole per microbatch."""

    def __init__(self, column: Column, batch: Batch):
        assert column.shape is not None
        self.column, self.shape = column, column.shape
        rows = batch.rows(column.microbatch_tokens)
        self.microbatches = batch.tokens // batch.context // rows
        self._batch_shape = (self.microbatches, rows, batch.context + 1)
        self._dtype = jnp.bfloat16 if jax.default_backend() == 'gpu' else jnp.float32
        self._attention = 'cudnn' if jax.default_backend() == 'gpu' else 'xla'
        mask = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)  # noqa: E731
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(7e-4, b1=0.95, b2=0.98, weight_decay=0.1, mask=mask)
        )
        abstract = jax.eval_shape(self._init)
        self.parameters = sum(x.size for x in jax.tree.leaves(abstract[0]))
        tokens = jax.ShapeDtypeStruct(self._batch_shape, jnp.int32)
        self.lowered = jax.jit(self._step, donate_argnums=(0, 1)).lower(*abstract, tokens)
        self._state = self._batch = None

    def compile(self) -> Any:
        self.compiled = self.lowered.compile(compiler_options=dict(self.column.compiler_options))
        return self.compiled

    def run(self, steps: int) -> jax.Array:
        """Runs the steps; returns the loss of the last one."""
        if self._state is None:
            self._state = jax.jit(self._init)()
            self._batch = jax.random.randint(jax.random.key(1), self._batch_shape, 0, self.shape.vocabulary)
        params, moments = self._state
        for _ in range(steps):
            params, moments, loss = self.compiled(params, moments, self._batch)
        self._state = params, moments
        return jax.block_until_ready(loss)

    def _init(self) -> tuple[Params, Any]:
        shape, keys = self.shape, iter(jax.random.split(jax.random.key(0), 1 + 4 * self.shape.layers))

        def matrix(n_in: int, n_out: int) -> jax.Array:
            return jax.random.normal(next(keys), (n_in, n_out)) * n_in**-0.5

        def norm() -> Params:
            return {'gain': jnp.ones(shape.width), 'bias': jnp.zeros(shape.width)}

        inner = shape.heads * shape.head_dim
        params: Params = {
            'embedding': jax.random.normal(next(keys), (shape.vocabulary, shape.width)) * shape.width**-0.5,
            'norm': norm(),
            'layers': [
                {
                    'norm': norm(),
                    'qkv': matrix(shape.width, 3 * inner),
                    'out': matrix(inner, shape.width),
                    'glu_norm': norm(),
                    'glu_in': matrix(shape.width, 2 * shape.hidden),
                    'glu_out': matrix(shape.hidden, shape.width),
                }
                for _ in range(shape.layers)
            ],
        }
        return params, self._optimizer.init(params)

    def _step(self, params: Params, moments: Any, tokens_AxBxL: jax.Array) -> tuple[Params, Any, jax.Array]:
        def accumulate(total, tokens_BxL):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(self._loss)(params, tokens_BxL)), None

        if self.microbatches == 1:
            loss, gradients = jax.value_and_grad(self._loss)(params, tokens_AxBxL[0])
        else:
            zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
            total, _ = jax.lax.scan(accumulate, zero, tokens_AxBxL)
            loss, gradients = jax.tree.map(lambda x: x / self.microbatches, total)
        updates, moments = self._optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    def _loss(self, params: Params, tokens_BxL: jax.Array) -> jax.Array:
        inputs_BxL, targets_BxL = tokens_BxL[:, :-1], tokens_BxL[:, 1:]
        width, head_dim, dtype = self.shape.width, self.shape.head_dim, self._dtype
        embedding_VxD = params['embedding'].astype(dtype)
        waves_LxD = _angles(inputs_BxL.shape[1], width)
        x_BxLxD = embedding_VxD[inputs_BxL] * width**0.5
        x_BxLxD += jnp.concatenate([jnp.sin(waves_LxD), jnp.cos(waves_LxD)], axis=-1).astype(dtype)
        angles_Lx1xC = _angles(inputs_BxL.shape[1], head_dim)[:, None]
        for layer in params['layers']:
            qkv_BxLxN = _norm(x_BxLxD, layer['norm']) @ layer['qkv'].astype(dtype)
            q, k, v = (x.reshape(*x.shape[:2], self.shape.heads, head_dim) for x in jnp.split(qkv_BxLxN, 3, axis=-1))
            q, k = _rotate(q, angles_Lx1xC), _rotate(k, angles_Lx1xC)
            y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self._attention)
            x_BxLxD += y.reshape(*y.shape[:2], -1) @ layer['out'].astype(dtype)
            products_BxLxF = _norm(x_BxLxD, layer['glu_norm']) @ layer['glu_in'].astype(dtype)
            value_BxLxF, gate_BxLxF = jnp.split(products_BxLxF, 2, axis=-1)
            x_BxLxD += (value_BxLxF * jax.nn.gelu(gate_BxLxF)) @ layer['glu_out'].astype(dtype)
        x_BxLxD = _norm(x_BxLxD, params['norm'])
        logits = jnp.einsum('bld,vd->blv', x_BxLxD, embedding_VxD, preferred_element_type=jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets_BxL).mean()


def _angles(length: int, width: int) -> jax.Array:
    frequencies = 10_000.0 ** (-jnp.arange(0, width, 2) / width)
    return jnp.arange(length)[:, None] * frequencies


def _rotate(x_BxLxHxC: jax.Array, angles_Lx1xP: jax.Array) -> jax.Array:
    a, b = jnp.split(x_BxLxHxC, 2, axis=-1)
    cos, sin = jnp.cos(angles_Lx1xP), jnp.sin(angles_Lx1xP)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BxLxHxC.dtype)


def _norm(x_BxLxD: jax.Array, params: Params) -> jax.Array:
    x = x_BxLxD.astype(jnp.float32)
    centred = x - x.mean(-1, keepdims=True)
    normed = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return (normed * params['gain'] + params['bias']).astype(x_BxLxD.dtype)


KINDS = {'lm': LmStep, 'by_hand': StepByHand}


@dataclasses.dataclass(frozen=True)
class Built:
    """A compiled step, or the error that it met, and the figures of its program."""

    step: Any
    facts: dict[str, Any]


def build_all(columns: Sequence[Column], batch: Batch) -> dict[str, Built]:
    """Traces the steps one by one, and compiles them side by side."""

    def compile_one(step: Any) -> dict[str, Any]:
        begun = time.perf_counter()
        memory = program_memory(step.compile())
        return {
            'compile_seconds': time.perf_counter() - begun,
            'parameters': step.parameters,
            'microbatches': step.microbatches,
            'peak_gib': memory and memory.peak / 2**30,
        }

    found: dict[str, Built] = {}
    with ThreadPoolExecutor(8) as pool:
        compiling = {}
        for column in columns:
            try:
                step = KINDS[column.kind](column, batch)
            except Exception as error:
                found[column.name] = Built(None, {'error': describe(error)})
                continue
            compiling[column.name] = step, pool.submit(compile_one, step)
        for name, (step, future) in compiling.items():
            try:
                found[name] = Built(step, future.result())
            except Exception as error:
                found[name] = Built(None, {'error': describe(error)})
    return found


def main() -> None:
    keep_freed_memory()  # as `lm train` does
    steps: dict[str, Any] = {}

    def build(columns: list[dict[str, Any]], batch: dict[str, int], run: bool) -> dict[str, Any]:
        found = build_all([Column.read(one) for one in columns], Batch(**batch))
        steps.update({name: built.step for name, built in found.items()})
        return {name: built.facts for name, built in found.items()}

    def measure(name: str, n: int) -> dict[str, Any]:
        loss = float(steps[name].run(1))
        begun = read_clock(jax.default_backend())
        steps[name].run(n)
        return {'seconds': (read_clock(jax.default_backend()) - begun) / n, 'loss': loss}

    def machine() -> dict[str, Any]:
        return {'device': jax.devices()[0].device_kind, 'jax': jax.__version__}

    serve({'build': build, 'measure': measure, 'machine': machine})


if __name__ == '__main__':
    main()
