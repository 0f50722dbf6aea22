"""Hidden tokens, predicted from the tokens on both sides (Devlin et al. 2019, §3.1; Performer, App. C.3).

Each token is chosen with probability 15 %. Of the chosen tokens 80 % become the mask token, 10 % become a random token,
and 10 % stay. The model predicts the chosen tokens; no other position counts. The end of a document and other special
tokens are never chosen and never drawn.

The chosen positions and their replacements are a function of (masked.seed, the split, the number of the window). In
training this is the number of the example, so each epoch draws anew. In evaluations it is the position in the split, so
all models of all runs predict the same tokens.
"""

import dataclasses
import zlib

import jax
import jax.numpy as jnp

from lm.config.configurable import configurable, field
from lm.data.dataset import Store
from lm.errors import ConfigError
from lm.tasks.base import HIDDEN, Task, TaskStore
from lm.training.objectives.base import Hiding, Objective

TRAINING = 'training'
"""The name of the training split in the draw."""


@configurable('masked')
class Masked(Objective):
    """Predicts hidden tokens from the tokens on both sides (`model.causal = False`)."""

    share: float = field(default=0.15, above=0, below=1, help='of the tokens is chosen')
    mask_share: float = field(default=0.8, minimum=0, maximum=1, help='of those chosen becomes the mask token')
    random_share: float = field(
        default=0.1, minimum=0, maximum=1, help='of those chosen becomes any token; the rest stays'
    )
    mask_id: int | None = field(
        default=None, minimum=0, help="the mask token; None: the tokenizer's own, else the first id behind its pieces"
    )
    seed: int = field(default=0, minimum=0, maximum=2**31 - 1, help='which places are chosen')

    looks_ahead = True
    remedy = 'hidden tokens are told from both sides, and the model sees earlier ones alone; set model.causal = False'

    def __post_init__(self):
        if self.mask_share + self.random_share > 1:
            raise ConfigError(
                f'masked.random_share = {self.random_share}: must be at most 1 - masked.mask_share = '
                f'{1 - self.mask_share:.6g}'
            )

    def unpack(self, store: Store | None, vocab_size: int) -> 'Masking':
        return self.make_hiding(store, vocab_size, TRAINING)

    def make_hiding(self, store: Store | None, vocab_size: int, split: str) -> 'Masking':
        pieces, mask_id, special = vocab_size - 1, None, ()
        if isinstance(store, TaskStore):
            return Masking(self, split, HIDDEN, store.vocab_size, (HIDDEN,), store.task)
        if store is not None:
            tokenizer = store.tokenizer()
            pieces, mask_id, special = tokenizer.vocab_size, tokenizer.mask_id, tokenizer.special_ids
        ids = (self.mask_id, mask_id, pieces)
        mask = next(i for i in ids if i is not None)
        if mask >= vocab_size:
            raise ConfigError(
                f'model.vocab_size = {vocab_size}: must be above the mask token, {mask}; the tokenizer has {pieces} '
                f'pieces; set model.vocab_size = {mask + 1}'
            )
        special = tuple(sorted({*special, mask} & set(range(pieces))))
        if len(special) == pieces:
            raise ConfigError(
                f'train.objective = @masked(): the {pieces} pieces are all special, so none can be hidden; take '
                'another tokenizer'
            )
        return Masking(self, split, mask, pieces, special)


@dataclasses.dataclass(frozen=True)
class Masking(Hiding):
    """Hides tokens of the windows of one split.

    Attributes:
        config: the fractions and the seed.
        split: the name of the split; each split has its own draw.
        mask: the id of the mask token.
        pieces: only tokens below this id may be drawn.
        special: ids among them that are neither chosen nor drawn, in ascending order.
        task: windows are examples of this task, whose answers no token shows and none is asked for; None: of text.
    """

    config: Masked
    split: str
    mask: int
    pieces: int
    special: tuple[int, ...]
    task: Task | None = None

    def hide(self, tokens_BxL: jax.Array, numbers_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        config, length = self.config, tokens_BxL.shape[1]
        seed = jax.random.fold_in(jax.random.key(config.seed, impl='threefry2x32'), zlib.crc32(self.split.encode()))

        def draw(number):
            lots, others = jax.random.split(jax.random.fold_in(seed, number))
            others_L = jax.random.randint(others, (length,), 0, self.pieces - len(self.special))
            return jax.random.uniform(lots, (length,)), others_L

        lots_BxL, others_BxL = jax.vmap(draw)(numbers_B.astype(jnp.uint32))
        chosen_BxL = lots_BxL < config.share
        for special in self.special:
            others_BxL += others_BxL >= special
            chosen_BxL &= tokens_BxL != special
        is_mask_BxL = lots_BxL < config.share * config.mask_share
        is_other_BxL = lots_BxL < config.share * (config.mask_share + config.random_share)
        hidden_BxL = jnp.where(is_mask_BxL, self.mask, jnp.where(is_other_BxL, others_BxL, tokens_BxL))
        return jnp.where(chosen_BxL, hidden_BxL, tokens_BxL).astype(tokens_BxL.dtype), chosen_BxL

    def __call__(self, tokens_BxN: jax.Array, numbers_B: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Unpacks windows, whose last token is the first token of the next window, or examples of the task."""
        shown_BxL = tokens_BxN[:, :-1] if self.task is None else self.task.unpack_hidden(tokens_BxN)[0]
        hidden_BxL, chosen_BxL = self.hide(shown_BxL, numbers_B)
        return hidden_BxL, shown_BxL, chosen_BxL
