"""Formats of `lm export`, one class each."""

import ast
import dataclasses
import json
import pathlib
import re
import sys
from collections.abc import Collection
from typing import Any, ClassVar

import numpy as np

from lm.attention import Attention
from lm.attention.formulas.base import FORMULAS
from lm.attention.options import MODEL, LayerOptions
from lm.config.configurable import list_values
from lm.config.text import dump
from lm.data.tokenizers import FILE_NAMES
from lm.data.tokenizers.companions import COMPANIONS, GENERATION_CONFIG
from lm.errors import ConfigError, writing
from lm.inference.loaded_run import LoadedRun
from lm.interop.card import CARD
from lm.interop.names import to_tensors
from lm.interop.proof import FILE as PROOF
from lm.interop.tensors import WeightFiles, is_weights
from lm.model import ModelConfig
from lm.model.options import RotaryOptions
from lm.model.positions import rotary_frequencies

MODEL_TYPE = 'lm_tpu'
"""The `model_type` in config.json."""
BEGIN, END = 'begin_id', 'end_id'
"""The names in the header of the weights of the tokens around a text."""
CONFIG, TRANSFORMERS_CONFIG = 'config.gin', 'config.json'
MODEL_SOURCE, ATTENTION_SOURCE = 'modeling_lm.py', 'attention_lm.py'
"""The model for transformers: a file beside this one, and all that it imports in one file."""
ROOT, MODEL_FILE = pathlib.Path(__file__).parents[2], pathlib.Path(__file__).parent / MODEL_SOURCE
ATTENTION_HEADER = '"""The attention of a model, as its formula reads, for PyTorch. Written by `lm export`."""'
OWN = r'from (lm(?:\.\w+)+)'
"""The beginning of a line that imports a module of `lm`."""
SHIPPED = ('lm.attention.formulas', 'lm.ops.formulas')
"""The beginnings of names of modules that formulas may import: exports repeat them."""
NAMES = {CONFIG, TRANSFORMERS_CONFIG, MODEL_SOURCE, ATTENTION_SOURCE, CARD, PROOF, *FILE_NAMES, *COMPANIONS}
"""The names of the files that an export has beside its weights."""
FIELDS = {
    **{'vocab_size': 'vocab_size', 'n_layers': 'num_hidden_layers', 'd_model': 'hidden_size'},
    **{'n_heads': 'num_attention_heads', 'head_dim': 'head_dim', 'norm': 'norm', 'norm_epsilon': 'norm_epsilon'},
    **{'norm_placement': 'norm_placement', 'activation': 'activation', 'gated': 'gated', 'biases': 'biases'},
    **{'qkv_biases': 'qkv_biases', 'embedding_scale': 'embedding_scale', 'sinusoids': 'sinusoids'},
    **{
        'learned_positions': 'learned_positions',
        'rotary_base': 'rotary_base',
        'tied': 'tied',
        'logit_cap': 'logit_cap',
    },
}
"""Field of `ModelConfig` → key of config.json."""
OTHER_FIELDS = {'base_width', 'layer', 'hidden_dim', 'attention', 'feed_forward', 'dtype', 'remat', 'unroll'}
"""Fields that config.json holds in another form, or that do not change the results."""
LAYER_OPTIONS = {
    *('n_heads', 'n_kv_heads', 'n_value_heads', 'head_dim', 'value_dim', 'latent_rank', 'shared_key_dim'),
    *('rotary_base', 'rotary_fraction', 'rotary_scaling', 'key_offset', 'convolution', 'qk_norm', 'qk_norm_span'),
    *('output_norm', 'output_gate', 'output_gate_form', 'output_gate_inputs', 'output_gate_rank'),
}
"""The options of layers that `describe_layer` writes. All others are refused."""


class Safetensors:
    """The format of `model.safetensors` with names by `lm.interop.names`, config.gin and the tokenizer.

    `lm import` reads it back.
    """

    name: ClassVar[str] = 'safetensors'

    def check(self, model: ModelConfig) -> None:
        """Raises ConfigError for a model that this format cannot hold."""

    def find_imports(self, model: ModelConfig) -> str:
        """Returns a line of Python that programs need before they load the files, beside `import transformers`."""
        return ''

    def write(self, run: LoadedRun, folder: pathlib.Path, weights: WeightFiles = WeightFiles()) -> None:  # noqa: B008
        facts = {'step': str(run.step), 'tokenizer': run.store.fingerprints.get('tokenizer', '')}
        weights.write(folder, self.tensors(run), facts | describe_marks(run))
        files = {CONFIG: dump(run.experiment).encode()}
        if run.experiment.data.task is None:
            files[run.tokenizer.file_name] = run.tokenizer.model
        for name, contents in (files | self.others(run, weights.dtype) | run.companions).items():
            with writing(folder / name):
                (folder / name).write_bytes(contents)

    def tensors(self, run: LoadedRun) -> dict[str, Any]:
        """Returns the tensors by their names in the file; they are read when they are asked for."""
        return to_tensors(run.weights)

    def others(self, run: LoadedRun, dtype: str) -> dict[str, bytes]:
        """Returns file name → contents of further files; `dtype` is the type of the weights."""
        return {}


class TransformersFormat(Safetensors):
    """Writes the same files, with config.json and the model in PyTorch; transformers loads it with trust_remote_code =
    True."""

    name = 'huggingface'

    def check(self, model: ModelConfig) -> None:
        for field in dataclasses.fields(model):
            if field.name not in FIELDS.keys() | OTHER_FIELDS and getattr(model, field.name) != field.default:
                raise _refuse(f'model.{field.name}', getattr(model, field.name))
        for attention in model.pattern:
            _check_layer(attention, model)
            attention.portable(model.resolve(attention).dims)  # it refuses options that have no formula
        for name in sorted({attention.gin_name for attention in model.pattern}):
            _check_formula(name)

    def others(self, run: LoadedRun, dtype: str) -> dict[str, bytes]:
        texts = {
            MODEL_SOURCE: re.sub(OWN, f'from .{ATTENTION_SOURCE.removesuffix(".py")}', MODEL_FILE.read_text()),
            ATTENTION_SOURCE: attention_source({attention.gin_name for attention in run.experiment.model.pattern}),
            TRANSFORMERS_CONFIG: json.dumps(describe(run) | {'torch_dtype': dtype}, indent=2) + '\n',
        }
        return {name: text.encode() for name, text in texts.items()} | describe_generation(run)


def is_exported(name: str) -> bool:
    """Tells whether an export may have a file of this name."""
    return name in NAMES or is_weights(name)


FORMATS = {format.name: format for format in (Safetensors(), TransformersFormat())}


def describe(run: LoadedRun) -> dict[str, Any]:
    """Returns the contents of config.json."""
    model, train = run.experiment.model, run.experiment.train
    values = list_values(model)
    return {
        'model_type': MODEL_TYPE,
        'architectures': ['LmForCausalLM'],
        'auto_map': {'AutoConfig': 'modeling_lm.LmConfig', 'AutoModelForCausalLM': 'modeling_lm.LmForCausalLM'},
        **{theirs: values[ours] for ours, theirs in FIELDS.items()},
        'num_key_value_heads': model.resolve(model.pattern[0]).dims.n_kv_heads,
        'intermediate_size': model.glu_dim,
        'attention': [
            {'name': attention.gin_name, **attention.portable(model.resolve(attention).dims)}
            for attention in model.pattern
        ],
        'layers': [describe_layer(model, i) for i in range(len(model.pattern))],
        'max_position_embeddings': train.context_length,
        **name_marks(run),
        'use_cache': True,
        'settings': dump(run.experiment),
    }


def describe_generation(run: LoadedRun) -> dict[str, bytes]:
    """Returns generation_config.json by its name, where a model has more tokens than its tokenizer.

    Tokens without a meaning are then never written, as with `lm generate`.
    """
    if run.experiment.data.task or run.tokenizer.vocab_size >= run.experiment.model.vocab_size:
        return {}
    ids = list(range(run.tokenizer.vocab_size, run.experiment.model.vocab_size))
    return {GENERATION_CONFIG: (json.dumps(name_marks(run) | {'suppress_tokens': ids}) + '\n').encode()}


def name_marks(run: LoadedRun) -> dict[str, int | None]:
    """Returns the tokens before and behind a text under the names of transformers; None for a task."""
    is_task = run.experiment.data.task is not None
    begin, end = (None, None) if is_task else (run.begin_id, run.tokenizer.eod_id)
    return {'bos_token_id': begin, 'eos_token_id': end}


def describe_marks(run: LoadedRun) -> dict[str, str]:
    """Returns the tokens around a text for the header of the weights, all that a run says of them.

    A class of `transformers` has a rule of its own for them, so config.json is not enough.
    """
    begin, end = name_marks(run).values()
    facts = {END: end, BEGIN: None if begin == end else begin}
    return {name: str(value) for name, value in facts.items() if value is not None}


def _check_layer(attention: Attention, model: ModelConfig) -> None:
    """Raises ConfigError for an option of layers that the model for transformers does not have."""
    layer = model.resolve(attention)
    for field in dataclasses.fields(LayerOptions):
        if field.name not in LAYER_OPTIONS and (value := getattr(layer, field.name)) != field.default:
            owner = 'model' if getattr(attention, field.name) == MODEL else attention.gin_name
            raise _refuse(f'{owner}.{field.name}', value)


def _refuse(name: str, value: object) -> ConfigError:
    return ConfigError(
        f'{name} = {value!r}: the model for transformers has no such option; export with --format safetensors'
    )


def describe_layer(model: ModelConfig, layer: int) -> dict[str, object]:
    """Returns what a layer does around its mechanism, for config.json."""
    options = model.resolve(model.layers[layer])
    dims, rank = options.dims, options.latent_rank
    gate = {'form': options.output_gate_form, 'inputs': options.gate_inputs, 'rank': options.output_gate_rank}
    return {
        'num_attention_heads': dims.n_heads,
        'num_key_value_heads': dims.n_kv_heads,
        'projected_heads': [options.heads.queries, options.heads.keys, options.heads.values],
        'head_dim': dims.head_dim,
        'value_dim': dims.value_size,
        'latent': None if rank is None else {'rank': rank, 'shared': options.shared_key_dim},
        'rotary': None if options.rotary is None else describe_rotation(options.rotary),
        'key_offset': options.key_offset,
        'convolution': options.convolution,
        'qk_norm': options.norm_span,
        'output_norm': options.output_norm,
        'output_gate': gate if options.output_gate else None,
        'inputs': options.projections,
        'units': model.find_feed_forward(layer).portable(model.feed_forward_shape),
    }


def describe_rotation(rotary: RotaryOptions) -> dict[str, object]:
    """Returns base and amplitude of rotary positions, and the frequencies where the base alone does not say them."""
    frequencies, amplitude = None, 1.0
    if rotary.scaling is not None or rotary.fraction != 1:
        turned = rotary_frequencies(rotary.head_dim, rotary.base, rotary.fraction, rotary.scaling)
        frequencies = np.pad(turned, (0, rotary.head_dim // 2 - len(turned))).tolist()
        amplitude = 1.0 if rotary.scaling is None else rotary.scaling.amplitude
    return {'base': rotary.base, 'frequencies': frequencies, 'amplitude': amplitude}


def _check_formula(name: str) -> None:
    """Raises ConfigError if a mechanism has no formula, or one in a module that an export cannot repeat."""
    if name not in FORMULAS:
        raise ConfigError(
            f'model.attention: the model for transformers does not know @{name}(), for no imported module has its '
            'formula; import that in the module of the mechanism, or export with --format safetensors'
        )
    module = FORMULAS[name].__module__
    imported = re.findall(rf'^ *{OWN}\b', find_source(module).read_text(), re.MULTILINE)
    if others := [other for other in imported if not other.startswith(SHIPPED)]:
        raise ConfigError(
            f'model.attention: the formula of @{name}() is in {module}, which imports {others[0]}; move it to a module '
            f'that imports only {SHIPPED[0]} of lm, or export with --format safetensors'
        )


def find_source(module: str) -> pathlib.Path:
    """Returns the file of a module of this package, or of a user's that is imported."""
    own = ROOT / f'{module.replace(".", "/")}.py'
    return own if own.exists() else pathlib.Path(sys.modules[module].__file__ or '')


def attention_source(mechanisms: Collection[str]) -> str:
    """Returns one module with the formulas of the mechanisms and the parts of the model.

    It imports PyTorch and transformers alone.
    """
    texts: dict[str, str] = {}
    others: dict[str, None] = {}

    def add(module: str) -> None:
        """Adds a module behind the modules of `lm` that it imports."""
        text = find_source(module).read_text()
        lines = text.splitlines(keepends=True)
        for node in ast.parse(text).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                lines[node.lineno - 1 : node.end_lineno] = [''] * len(lines[node.lineno - 1 : node.end_lineno])
                others.update({} if add_own(ast.unparse(node)) else {ast.unparse(node): None})
        texts[module] = re.sub(r'\n{4,}', '\n\n\n', ''.join(lines).strip())

    def add_own(line: str) -> bool:
        """Adds the module of `lm` from which a line imports; returns False if there is none."""
        if (found := re.match(OWN, line)) and found[1] not in texts:
            add(found[1])
        return bool(found)

    for line in MODEL_FILE.read_text().splitlines():
        add_own(line)
    for name in sorted(mechanisms):
        if (module := FORMULAS[name].__module__) not in texts:
            add(module)
    head = '\n'.join([ATTENTION_HEADER, '', *others])
    return '\n\n\n'.join([head, *texts.values()]) + '\n'
