"""GPT-2."""

from typing import ClassVar

from lm.attention.options import LayerOptions
from lm.files import AnyPath
from lm.interop.families.base import Family, Tensors, drop_tied_head
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig


class Gpt2(Family):
    """Layer normalization, learned positions, biases, and feed-forward layers without gates."""

    model_types = ('gpt2',)
    ACTIVATIONS: ClassVar = {'gelu_new': 'gelu', 'gelu_pytorch_tanh': 'gelu', 'silu': 'silu', 'swish': 'silu'}
    MASKS = ('.attn.bias', '.attn.masked_bias')
    """Endings of the tensors in old files that are no weights."""

    def differences(self, config: Hyperparameters) -> list[str]:
        activation = config.text('activation_function', 'gelu_new')
        found = {
            f'activation_function = {activation!r}': activation not in self.ACTIVATIONS,
            'attention that is not scaled': not config.flag('scale_attn_weights', True),
            'attention that is scaled by the layer': config.flag('scale_attn_by_inverse_layer_idx'),
            'attention to an encoder': config.flag('add_cross_attention'),
            'quantized weights': config.get('quantization_config') is not None,
        }
        return [what for what, differs in found.items() if differs]

    def context_length(self, config: Hyperparameters) -> int | None:
        return config.find_integer('n_positions')

    def model(self, folder: AnyPath, config: Hyperparameters, allow_imports: bool = False) -> ModelConfig:
        width, heads = config.integer('n_embd'), config.integer('n_head')
        return ModelConfig(
            vocab_size=config.integer('vocab_size'),
            n_layers=config.integer('n_layer'),
            d_model=width,
            layer=LayerOptions(n_heads=heads, head_dim=width // heads, rotary_base=None),
            hidden_dim=config.find_integer('n_inner') or 4 * width,
            activation=self.ACTIVATIONS[config.text('activation_function', 'gelu_new')],
            norm_epsilon=config.number('layer_norm_epsilon', 1e-5),
            gated=False,
            biases=True,
            embedding_scale=1.0,
            sinusoids=False,
            learned_positions=config.integer('n_positions'),
            tied=config.flag('tie_word_embeddings', True),
        )

    def tensors(self, theirs: Tensors, config: Hyperparameters, model: ModelConfig) -> Tensors:
        for name in [name for name in theirs if name.endswith(self.MASKS)]:
            del theirs[name]
        # The files of the first GPT-2 have 'wte.weight', newer files 'transformer.wte.weight'.
        begin = 'transformer.' if 'transformer.wte.weight' in theirs else ''
        if model.tied:
            drop_tied_head(theirs, f'{begin}wte.weight')
        take = lambda name: theirs.pop(begin + name)  # noqa: E731
        ours = {
            'embedding.weight': take('wte.weight'),
            'positions.weight': take('wpe.weight'),
            'final_norm.weight': take('ln_f.weight'),
            'final_norm.bias': take('ln_f.bias'),
        }
        if not model.tied:
            ours['head.weight'] = theirs.pop('lm_head.weight')
        maps = {'qkv': 'attn.c_attn', 'attention_out': 'attn.c_proj', 'glu_in': 'mlp.c_fc', 'glu_out': 'mlp.c_proj'}
        for i in range(model.n_layers):
            for our, their in maps.items():  # GPT-2 matrices have inputs first
                ours[f'layers.{i}.{our}.weight'] = take(f'h.{i}.{their}.weight').T
                ours[f'layers.{i}.{our}.bias'] = take(f'h.{i}.{their}.bias')
            for our, their in {'attention_norm': 'ln_1', 'glu_norm': 'ln_2'}.items():
                for part in ('weight', 'bias'):
                    ours[f'layers.{i}.{our}.{part}'] = take(f'h.{i}.{their}.{part}')
        return ours
