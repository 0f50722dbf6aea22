"""The model of `lm` in PyTorch, for `transformers`: AutoModelForCausalLM.from_pretrained(…, trust_remote_code=True).

`lm export --format huggingface` writes it beside config.json and model.safetensors; it needs only torch and
transformers. It is for comparing, evaluating, tuning and continuing texts. The attention weights of a prompt are all in
memory. Use `lm` itself for training and for long contexts.

B batch, L length, D model width, V vocabulary.
"""

import dataclasses
import math
import pathlib
import re

import torch
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput, can_return_tuple

from lm.attention.formulas.tokens import LayerTokens
from lm.interop.parts.block import NORMS, Convolution, LmBlock
from lm.interop.parts.cache import LmCache
from lm.interop.parts.mechanism import LmMechanism
from lm.interop.parts.positions import angles
from lm.interop.parts.units import LmExperts, LmRouter
from lm.ops.formulas import EPSILON

OF_THE_LOSS = {'num_items_in_batch', 'ignore_index', 'shift_labels'}
"""The inputs of `LmForCausalLM.forward` that its loss takes."""


class LmConfig(PretrainedConfig):
    """The configuration. `attention` holds a dict per mechanism of the pattern that the layers cycle over: name and
    options. `layers` holds a dict per mechanism too, with what its layers do around it."""

    model_type = 'lm_tpu'
    keys_to_ignore_at_inference = ('cache',)
    attribute_map = {'final_logit_softcapping': 'logit_cap'}  # noqa: RUF012 (transformers reads it so)

    def __init__(
        self,
        vocab_size=32_000,
        num_hidden_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
        intermediate_size=2048,
        attention=(),
        layers=(),
        norm='layer',
        norm_epsilon=EPSILON,
        norm_placement='before',
        activation='gelu',
        gated=True,
        biases=False,
        qkv_biases=False,
        embedding_scale=None,
        sinusoids=True,
        learned_positions=None,
        rotary_base=10_000.0,
        tied=True,
        logit_cap=None,
        initializer_range=0.02,
        **others,
    ):
        self.vocab_size, self.num_hidden_layers, self.hidden_size = vocab_size, num_hidden_layers, hidden_size
        self.num_attention_heads, self.num_key_value_heads = num_attention_heads, num_key_value_heads
        self.head_dim, self.intermediate_size, self.attention = head_dim, intermediate_size, list(attention)
        self.norm, self.norm_epsilon, self.norm_placement = norm, norm_epsilon, norm_placement
        self.activation, self.gated, self.biases, self.qkv_biases = activation, gated, biases, qkv_biases
        self.embedding_scale, self.sinusoids, self.learned_positions = embedding_scale, sinusoids, learned_positions
        self.rotary_base, self.layers, self.tied, self.logit_cap = rotary_base, list(layers), tied, logit_cap
        self.initializer_range = initializer_range
        super().__init__(**(others | {'tie_word_embeddings': tied}))


@dataclasses.dataclass
class LmOutput(ModelOutput):
    """The results of the model: logits [B, L, V]; hidden states [B, L, D] before the first layer and behind each, the
    last one normalized."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    cache: LmCache | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None


@dataclasses.dataclass
class LmHidden(ModelOutput):
    """The results of the model without its head: [B, L, D] behind the last normalization."""

    last_hidden_state: torch.Tensor | None = None
    cache: LmCache | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None


class LmBackbone:
    """The model without its head, for programs that compute logits themselves, such as trl. It has no weights of its
    own."""

    _tp_plan = _pp_plan = None

    def __init__(self, model):
        self.model, self.config = model, model.config

    def __call__(self, input_ids=None, **inputs):
        """Takes the inputs of `LmForCausalLM.forward` that are not of the loss, and returns `LmHidden`."""
        return self.model.compute_hidden(input_ids, **inputs)


class LmForCausalLM(PreTrainedModel, GenerationMixin):
    """Computes logits [B, L, V] of tokens [B, L].

    Rows may be padded where `attention_mask` is 0: on the left, and without a cache on the right, too. With `use_cache`
    the output has a cache, and the next call takes only the tokens after it. The cache of linear mechanisms has a
    constant size.
    """

    config_class = LmConfig
    base_model_prefix = ''
    main_input_name = 'input_ids'
    supports_gradient_checkpointing = True
    _no_split_modules = ('LmBlock',)
    _tied_weights_keys = {'head.weight': 'embedding.weight'}  # noqa: RUF012 (transformers reads it so)
    _is_stateful = True
    """A cache cannot go back to an earlier token."""

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        rows = config.learned_positions
        self.positions = nn.Embedding(rows, config.hidden_size) if rows else None
        pattern = list(zip(config.attention, config.layers, strict=True))
        blocks = (LmBlock(config, *pattern[i % len(pattern)]) for i in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(blocks)
        self.final_norm = NORMS[config.norm](config.hidden_size, eps=config.norm_epsilon)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        spread = self.config.initializer_range
        if isinstance(module, LmMechanism):
            module.initialize(spread)
        elif isinstance(module, Convolution | LmExperts | LmRouter):
            for parameter in module.parameters(recurse=False):
                nn.init.normal_(parameter, std=spread if parameter.requires_grad else 0.0)

    def save_pretrained(self, save_directory, **options):
        """Writes the model as `transformers` does, and config.gin, which `lm import` reads."""
        super().save_pretrained(save_directory, **options)
        if settings := getattr(self.config, 'settings', None):
            settings = re.sub(r'(?m)^(model.vocab_size = ).*', rf'\g<1>{self.config.vocab_size}', settings)
            (pathlib.Path(save_directory) / 'config.gin').write_text(settings)

    def get_input_embeddings(self):
        return self.embedding

    def set_input_embeddings(self, value):
        self.embedding = value

    def get_output_embeddings(self):
        return self.head

    def set_output_embeddings(self, new_embeddings):
        self.head = new_embeddings

    def _prepare_cache_for_generation(self, *_, **__):
        """Prepares nothing: the first call makes the cache."""

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *arguments, **options):
        updated = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *arguments, **options)
        return updated | ({} if outputs.cache is None else {'cache': outputs.cache})

    def prepare_inputs_for_generation(
        self, input_ids, cache=None, attention_mask=None, inputs_embeds=None, use_cache=None, position_ids=None,
        next_sequence_length=None, is_first_iteration=False, **kwargs,
    ):  # fmt: skip
        """Returns the inputs of the next call: the tokens that the cache has not. The mask says the positions.

        By the name `kwargs`, `generate` knows that it may pass on all inputs of `forward`.
        """
        given = {'cache': cache, 'attention_mask': attention_mask, 'use_cache': use_cache, **kwargs}
        read = 0 if cache is None else cache.length
        if inputs_embeds is None or read >= inputs_embeds.shape[1]:
            new = 1 if inputs_embeds is not None else input_ids.shape[1] - read
            if attention_mask is not None:
                new = attention_mask.shape[1] - read
            return given | {'input_ids': input_ids[:, input_ids.shape[1] - new :]}
        written = input_ids if input_ids.shape[1] < inputs_embeds.shape[1] else input_ids[:, inputs_embeds.shape[1] :]
        if attention_mask is not None:  # a prompt may have come as tokens, too
            new = attention_mask.shape[1] - inputs_embeds.shape[1]
            written = input_ids[:, input_ids.shape[1] - new :]
        whole = torch.cat([inputs_embeds, self.embedding(written)], dim=1)
        return given | {'inputs_embeds': whole[:, read:]}

    @can_return_tuple
    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, cache=None, inputs_embeds=None, labels=None,
        use_cache=None, output_hidden_states=None, logits_to_keep=0, past_key_values=None, **others,
    ):  # fmt: skip
        """Returns `LmOutput`, or a tuple with `return_dict=False`.

        Args:
            input_ids: tokens [B, L].
            attention_mask: 0 for padding, [B, L]; with a cache also of the tokens before.
            position_ids: the positions of the tokens, [B, L]; None: the mask says them.
            cache: the cache that a call before has returned. `past_key_values` is its other name.
            inputs_embeds: rows of the matrix of embeddings, [B, L, D], in place of `input_ids`.
            labels: tokens [B, L]; -100 has no loss. The loss shifts them, and takes the options of transformers.
            use_cache: return a cache.
            output_hidden_states: return the hidden states.
            logits_to_keep: compute logits of so many last tokens alone, or of the tokens with these indices; 0: all.

        Raises ValueError for inputs that this model cannot use.
        """
        given = {name: x for name, x in others.items() if name not in OF_THE_LOSS}
        found = self.compute_hidden(
            input_ids, attention_mask, position_ids, past_key_values if cache is None else cache, inputs_embeds,
            use_cache, output_hidden_states, **given,
        )  # fmt: skip
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        assert found.last_hidden_state is not None
        logits = self.head(found.last_hidden_state[:, kept])
        if (cap := self.config.logit_cap) is not None:
            logits = cap * torch.tanh(logits / cap)
        loss = None
        if labels is not None:
            options = {name: x for name, x in others.items() if name in OF_THE_LOSS}
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **options)
        return LmOutput(loss, logits, found.cache, found.hidden_states)

    @property
    def base_model(self):
        return LmBackbone(self)

    def compute_hidden(
        self, input_ids=None, attention_mask=None, position_ids=None, cache=None, inputs_embeds=None, use_cache=None,
        output_hidden_states=None, **others,
    ):  # fmt: skip
        """Returns `LmHidden`; inputs and errors as in `forward`."""
        if unknown := next((name for name, x in others.items() if x is not None and x is not False), None):
            raise ValueError(f'{unknown}: this model has no such input; leave it out')
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError('input_ids: give either these or inputs_embeds')
        x_BxLxD = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        recomputes = (
            self.training and torch.is_grad_enabled() and any(one.gradient_checkpointing for one in self.layers)
        )
        if cache is None and use_cache and self.is_causal and not recomputes:  # it would keep each token twice
            cache = LmCache(len(self.layers))
        mask_BxL, positions_BxL = self.read(x_BxLxD, attention_mask, position_ids, cache)
        x_BxLxD = self.locate(x_BxLxD, positions_BxL)
        shows = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states = []
        for i, layer in enumerate(self.layers):
            states += [x_BxLxD] if shows else []
            memory = None if cache is None else cache.layers[i]
            x_BxLxD = layer(x_BxLxD, LayerTokens(torch, mask_BxL, positions_BxL, memory))
        x_BxLxD = self.final_norm(x_BxLxD)
        return LmHidden(x_BxLxD, cache, (*states, x_BxLxD) if shows else None)

    @property
    def is_causal(self):
        """Later tokens are hidden in all layers."""
        return all(layer.attention.formula.causal for layer in self.layers)

    def locate(self, x_BxLxD, positions_BxL):
        """Returns embeddings with their factor and what the positions add."""
        if self.positions is not None:
            x_BxLxD = x_BxLxD + self.positions(positions_BxL)
        width, scale = self.config.hidden_size, self.config.embedding_scale
        x_BxLxD = x_BxLxD * (math.sqrt(width) if scale is None else scale)
        if self.config.sinusoids:
            angle = angles(positions_BxL, width, 10_000.0)
            x_BxLxD = x_BxLxD + torch.cat([angle.sin(), angle.cos()], dim=-1).to(x_BxLxD.dtype)
        return x_BxLxD

    def read(self, x_BxLxD, attention_mask, position_ids, cache):
        """Returns mask and positions of tokens [B, L], and counts them in the cache."""
        batch, length = x_BxLxD.shape[:2]
        mask_BxL = torch.ones(batch, length, dtype=torch.bool, device=x_BxLxD.device)
        if attention_mask is not None:
            if not torch.compiler.is_compiling():  # a program has no place for errors that depend on numbers
                check_padding(attention_mask, cache is not None)
            mask_BxL = attention_mask[:, -length:].bool()
        if position_ids is not None and not torch.compiler.is_compiling():
            check_positions(position_ids, mask_BxL)
        counts_BxL = mask_BxL.cumsum(1) + (0 if cache is None else cache.counts_Bx1)
        rows, most = self.config.learned_positions, length + (0 if cache is None else cache.length)
        if rows and most > rows:
            raise ValueError(
                f'input_ids: {most} tokens per row, and the model has learned_positions = {rows}; give shorter rows'
            )
        if cache is not None:
            cache.length, cache.counts_Bx1 = most, counts_BxL[:, -1:]
        positions_BxL = (counts_BxL - 1).clamp(min=0)
        return mask_BxL, positions_BxL if position_ids is None else position_ids.expand(batch, -1)


def check_padding(mask_BxL, has_cache):
    """Raises ValueError for padding that would change a text: inside it, or behind it where a cache goes on."""
    if mask_BxL.ndim != 2:
        raise ValueError(f'attention_mask: has {mask_BxL.ndim} axes; give one with rows and tokens')
    before, after = mask_BxL[:, :-1], mask_BxL[:, 1:]
    if has_cache and bool((before > after).any()):
        raise ValueError('attention_mask: a row has padding behind its text; pad on the left, or use no cache')
    if bool(((before < after).sum(1) + mask_BxL[:, 0] > 1).any()):
        raise ValueError('attention_mask: a row has padding inside its text; put it before or behind')


def check_positions(positions_BxL, mask_BxL):
    """Raises ValueError for positions that do not rise by one per token, as where a row has several texts."""
    text = mask_BxL[:, 1:] & mask_BxL[:, :-1]
    if bool((text & (positions_BxL[:, 1:] - positions_BxL[:, :-1] != 1)).any()):
        raise ValueError('position_ids: a row has several texts; give each text a row of its own')
