"""The peers: how each computes an operation of `scripts.peers.operations`, with the same arguments.

Packages are installed by whoever measures. Nothing of them is copied here. A module of the command's flag `--adapter`
has more of these classes.
"""

import ast
import functools
import importlib.metadata
import importlib.util
import pathlib
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

Compute = Callable[..., jax.Array]


class Peer:
    """A package with kernels.

    Attributes:
        name: in tables.
        package: the distribution that a registry has.
        differs: operation → how its work differs from ours; an operation that is missing here is equal work.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    differs: ClassVar[dict[str, str]] = {}

    @property
    def version(self) -> str:
        """The installed version. Raises PackageNotFoundError."""
        return importlib.metadata.version(self.package)

    def operations(self) -> dict[str, Compute]:
        """Returns operation → function of the arguments of `Operation.inputs`. Imports the package."""
        raise NotImplementedError


class Jax(Peer):
    name, package = 'JAX splash', 'jax'

    def operations(self) -> dict[str, Compute]:
        from lm.ops.exact_attention import softmax_attention

        return {'softmax': functools.partial(softmax_attention, implementation='splash')}


class Tokamax(Peer):
    """Its Kimi delta attention wants heads first."""

    name, package = 'tokamax', 'tokamax'
    differs: ClassVar = {'kda': 'no product of factors is guarded against overflow: their range is left to the caller'}

    def operations(self) -> dict[str, Compute]:
        from tokamax import config
        from tokamax._src.ops.kda.api import IMPLEMENTATIONS, kimi_delta_attention

        def kda(q, k, v, log_decay, beta):
            if not IMPLEMENTATIONS['mosaic_tpu'].supported_on(jax.devices()[0]):
                raise NotImplementedError(f'refuses {jax.devices()[0].device_kind}')
            q, k, v, log_decay = (x.transpose(2, 0, 1, 3) for x in (q, k, v, log_decay))
            named = dict(use_qk_l2norm=True, implementation='mosaic')
            with config.cross_compile(True):  # it has no devices to ask
                o_HxBxLxD, _ = kimi_delta_attention(q, k, v, log_decay, beta.transpose(2, 0, 1), **named)
            return o_HxBxLxD.transpose(1, 2, 0, 3)

        return {'kda': kda}


class DeltanetTpu(Peer):
    """It broadcasts a factor per head to all channels."""

    name, package = 'deltanet-tpu', 'deltanet-tpu'
    differs: ClassVar = {
        'delta': 'it computes with a factor per channel',
        'gated_linear': 'it computes with a factor per channel and solves an empty system',
        'channel_linear': 'it solves an empty system',
    }

    def operations(self) -> dict[str, Compute]:
        import deltanet_tpu as package

        return {
            'gated_linear': package.chunk_gla,
            'channel_linear': package.chunk_gla,
            'delta': functools.partial(package.chunk_gdn, qk_l2norm=True),
            'kda': functools.partial(package.chunk_kda, qk_l2norm=True),
        }


class MaxText(Peer):
    """Its gated delta rule is a function of JAX without kernels. The rest of its file needs all of MaxText."""

    name, package = 'MaxText', 'maxtext'

    def operations(self) -> dict[str, Compute]:
        rule = load_functions('maxtext/models/qwen3.py', 'maxtext', ['jax_chunk_gated_delta_rule'])
        norm = load_functions('maxtext/layers/normalizations.py', 'maxtext', ['l2norm'])
        rule.update(norm)

        def delta(q, k, v, log_decay, beta):
            return rule['jax_chunk_gated_delta_rule'](q, k, v, log_decay, beta, use_qk_norm_in_gdn=True)[0]

        return {'delta': delta}


class FlyWheel(Peer):
    """Its softmax attention wants heads first."""

    name, package = 'FlyWheel', 'flywheel-tpu'

    def operations(self) -> dict[str, Compute]:
        from flywheel_tpu.flash_attn_interface import flash_attn_func

        def softmax(q, k, v):
            o_BxHxLxD: Any = flash_attn_func(*(x.swapaxes(1, 2) for x in (q, k, v)), causal=True)
            return o_BxHxLxD.swapaxes(1, 2)

        return {'softmax': softmax}


def load_functions(file: str, package: str, names: list[str]) -> dict[str, Any]:
    """Runs single functions of an installed package's file, without the other imports of the file.

    Returns the namespace. It has jax, jnp, lax and the array types under their usual names.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ImportError(package)
    path = pathlib.Path(spec.origin).parent.parent / file
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    space: dict[str, Any] = dict(jax=jax, jnp=jnp, lax=jax.lax, Array=jax.Array, cast=lambda kind, x: x, Any=Any)
    exec(compile(tree, str(path), 'exec'), space)
    return space


PEERS: tuple[type[Peer], ...] = (Jax, Tokamax, DeltanetTpu, MaxText, FlyWheel)
