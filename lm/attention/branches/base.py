"""The base of parts of residual branches: a configuration that a gin file names, and the module that it builds.

    model.branch = @layer_scale()        the template of `docs/templates/branch`

Adding one means adding one file. Only the format 'safetensors' of `lm export` holds it; the others refuse it by name.
"""

import abc

from flax import nnx

from lm.config.configurable import Configurable


class BranchPart(Configurable, abc.ABC):
    """Base of the configurations: what attention and the feed-forward layer add passes such a part first."""

    @abc.abstractmethod
    def build(self, width: int, rngs: nnx.Rngs) -> nnx.Module:
        """Returns the module of one branch of one layer, which maps [..., width] to an array of the same shape.

        Its parameters are declared (`lm.parameters.declare`).
        """
