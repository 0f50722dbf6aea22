"""The arrays that the model keeps of the tokens that were read. B batch."""

from typing import Any


class LmCache:
    """The arrays that layers keep: `layers` has a dict for each, name → array with the batch first."""

    is_compileable = False

    def __init__(self, n_layers):
        self.layers = [{} for _ in range(n_layers)]
        self.is_linear = [True] * n_layers  # transformers cuts no inputs then; `prepare_inputs_for_generation` does
        self.length = 0
        self.counts_Bx1: Any = 0
        """The tokens that were read of a row, and how many of each row are no padding."""

    def get_seq_length(self, *_):
        return self.length

    def reorder_cache(self, rows):
        """Takes other rows of the batch, as beam search asks."""
        self._change(lambda x: x.index_select(0, rows.to(x.device)))

    def batch_select_indices(self, indices):
        """Keeps some rows of the batch."""
        self._change(lambda x: x[indices])

    def batch_repeat_interleave(self, repeats):
        """Repeats each row of the batch."""
        self._change(lambda x: x.repeat_interleave(repeats, dim=0))

    def _change(self, function):
        self.layers = [{name: function(x) for name, x in layer.items()} for layer in self.layers]
        if self.length:
            self.counts_Bx1 = function(self.counts_Bx1)
