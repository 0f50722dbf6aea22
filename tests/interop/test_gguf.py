"""GGUF files: weights, metadata and tokenizers, and the tokenizers that go along with an import."""

import io
import json
import sys

import gguf
import jax
import numpy as np
import pytest
import sentencepiece
import tiny
import tokenizers
from safetensors.numpy import save_file
from test_exchange import llama_config, write_llama

import lm
from lm.cli import main
from lm.data.tokenizers import from_bytes, load
from lm.errors import ConfigError, MismatchError
from lm.interop.checkpoints import open_checkpoint
from lm.interop.families import FAMILIES
from lm.interop.gguf.architectures import describe
from lm.interop.gguf.file import GgufFile
from lm.interop.gguf.tokenizer import SPLITS, make_byte_level, make_sentencepiece
from lm.interop.hyperparameters import Hyperparameters

NAMES = {
    'model.embed_tokens': 'token_embd', 'model.norm': 'output_norm', 'lm_head': 'output',
    'input_layernorm': 'attn_norm', 'self_attn.q_proj': 'attn_q', 'self_attn.k_proj': 'attn_k',
    'self_attn.v_proj': 'attn_v', 'self_attn.o_proj': 'attn_output', 'post_attention_layernorm': 'ffn_norm',
    'mlp.up_proj': 'ffn_up', 'mlp.gate_proj': 'ffn_gate', 'mlp.down_proj': 'ffn_down',
}  # fmt: skip
TEXTS = ['The whale is 1851 metres, they said.', ' a  b\n\n\tc é 😀 <|end|> ▁x', 'It’s 12345 of it', '']


def interleave(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Returns the rows of a matrix as llama.cpp orders them: the two halves of each head alternate."""
    order = [head + i // 2 + (i % 2) * (len(tensor) // heads // 2)
             for head in range(0, len(tensor), len(tensor) // heads) for i in range(len(tensor) // heads)]  # fmt: skip
    return tensor[order]


def byte_level(text: str) -> tuple[bytes, list[str], list[str]]:
    """Trains a tokenizer that splits digits, as SmolLM does; returns its tokenizer.json, pieces and merges."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    digits, plain = tokenizers.pre_tokenizers.Digits(True), tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, plain])
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    options = {'special_tokens': ['<|endoftext|>', '<|end|>'], 'initial_alphabet': alphabet, 'show_progress': False}
    made.train_from_iterator([text], tokenizers.trainers.BpeTrainer(vocab_size=400, **options))
    model = json.loads(made.to_str())['model']
    return (
        made.to_str().encode(),
        sorted(model['vocab'], key=model['vocab'].get),
        [' '.join(m) for m in model['merges']],
    )


def write_gguf(path, tensors, kind=gguf.GGMLQuantizationType.F32, pre='smollm', changes=(), text='the whale ' * 99):
    """Writes the tensors of `write_llama` as a GGUF file with a byte-level tokenizer; returns its tokenizer.json."""
    config, (tokenizer, pieces, merges) = llama_config(), byte_level(text)
    writer = gguf.GGUFWriter(path, 'llama')
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(config['hidden_size'])
    writer.add_feed_forward_length(config['intermediate_size'])
    writer.add_head_count(config['num_attention_heads'])
    writer.add_head_count_kv(config['num_key_value_heads'])
    writer.add_key_length(config['head_dim'])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(config['rope_theta'])
    writer.add_tokenizer_model('gpt2')
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(pieces)
    writer.add_token_types([3, 3] + [1] * (len(pieces) - 2))
    writer.add_token_merges(merges)
    writer.add_eos_token_id(1)
    for name, value in changes:
        writer.add_uint32(name, value)
    for name, tensor in tensors.items():
        stem = name.removesuffix('.weight')
        layer, part = stem.removeprefix('model.layers.').split('.', 1) if 'layers' in stem else ('', stem)
        if part in ('self_attn.q_proj', 'self_attn.k_proj'):
            tensor = interleave(tensor, 2 if 'q_proj' in part else 1)
        written = f'blk.{layer}.{NAMES[part]}.weight' if layer else f'{NAMES[part]}.weight'
        fits = tensor.ndim == 2 and tensor.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        quantized = kind if fits else gguf.GGMLQuantizationType.F32
        writer.add_tensor(written, gguf.quants.quantize(tensor, quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tokenizer


def test_a_gguf_file_is_imported_like_the_folder_that_it_was_made_of(tmp_path, tokens, capsys):
    tensors = write_llama(tmp_path / 'llama', max_position_embeddings=256)
    model = write_gguf(tmp_path / 'model.gguf', tensors)
    (tmp_path / 'llama' / 'tokenizer.json').write_bytes(model)
    runs = []
    for source in ('llama', 'model.gguf'):
        runs.append(str(tmp_path / f'run of {source}'))
        assert main(['import', str(tmp_path / source), '--run_dir', runs[-1]]) == 0
    printed = capsys.readouterr()
    assert 'model.gguf: all tensors become float32 (21 of F32)' in printed.out
    assert 'no tokenizer' not in printed.err
    folder, file = map(lm.load, runs)
    jax.tree.map(np.testing.assert_array_equal, folder.weights, file.weights)
    assert file.experiment == folder.experiment
    for text in TEXTS:
        assert file.tokenizer.encode(text).tolist() == folder.tokenizer.encode(text).tolist()
        assert file.tokenizer.decode(file.tokenizer.encode(text)) == text
    # The run is complete: it writes and scores at once, and it is a tokenizer for new data.
    assert lm.generate(file, 'the', max_tokens=4, temperature=0) == lm.generate(
        folder, 'the', max_tokens=4, temperature=0
    )
    np.testing.assert_array_equal(file.score('the whale').nats, folder.score('the whale').nats)
    assert load(runs[1]).sha256 == file.tokenizer.sha256
    with pytest.raises(ConfigError, match=r"data.path = '': this run has a tokenizer and no data"):
        lm.evaluate(file)


@pytest.mark.parametrize('kind', ['Q8_0', 'Q4_0', 'BF16'])
def test_quantized_weights_become_what_gguf_says(kind, tmp_path):
    tensors = write_llama(tmp_path / 'llama')
    kind = gguf.GGMLQuantizationType[kind]
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.shape[-1] == 32}
    write_gguf(tmp_path / 'model.gguf', tensors, kind)
    found = GgufFile(tmp_path / 'model.gguf').read_tensors()
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        fits = tensor.ndim == 2 and tensor.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        quantized = kind if fits else gguf.GGMLQuantizationType.F32
        expected = gguf.quants.dequantize(gguf.quants.quantize(tensor, quantized), quantized)
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], expected)


@pytest.mark.parametrize(
    ('changes', 'said', 'code'),
    [
        ([('llama.expert_count', 8)], 'a llama model that no model here equals: it has expert_count', 2),
        ([('split.count', 3)], 'is one of 3 parts; join them', 2),
        ([('llama.rope.dimension_count', 8)], 'rotary positions on a part of a head', 2),
    ],
)
def test_what_differs_is_refused_by_name(changes, said, code, tmp_path, capsys):
    write_gguf(tmp_path / 'model.gguf', write_llama(tmp_path / 'llama'), changes=changes)
    assert main(['import', str(tmp_path / 'model.gguf'), '--run_dir', str(tmp_path / 'run')]) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / 'run').exists()


def test_damaged_files_and_a_missing_package_are_one_line(tmp_path, capsys, monkeypatch):
    path = tmp_path / 'model.gguf'
    path.write_bytes(b'GGUF' + bytes(100))
    assert main(['import', str(path), '--run_dir', str(tmp_path / 'run')]) == 44
    assert 'is no GGUF file, or a damaged one' in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, 'gguf', None)
    assert main(['import', str(path), '--run_dir', str(tmp_path / 'run')]) == 2
    assert "needs gguf; pip install -e '.[gguf]'" in capsys.readouterr().err


def test_an_import_without_a_tokenizer_says_so_and_is_completed_later(tmp_path, capsys, caplog):
    tensors, run = write_llama(tmp_path / 'llama'), str(tmp_path / 'run')
    model = write_gguf(tmp_path / 'model.gguf', tensors, pre='unheard-of')
    assert main(['import', str(tmp_path / 'model.gguf'), '--run_dir', run]) == 0
    assert "tokenizer.ggml.pre = 'unheard-of' is not known" in caplog.text
    assert f'lm import --run_dir {run} --tokenizer tokenizer.json' in caplog.text
    assert main(['generate', '--run_dir', run, '--prompt', 'the']) == 2
    assert 'this import has no tokenizer; add it' in capsys.readouterr().err
    assert main(['import', '--run_dir', run]) == 2
    assert 'DIR: name a checkpoint' in capsys.readouterr().err
    # A tokenizer with more tokens than the model is refused.
    larger = tokenizers.ByteLevelBPETokenizer()
    larger.train_from_iterator([f'{i:x}{i**3:o}' for i in range(999)], 600, show_progress=False)
    larger.add_special_tokens(['</s>'])
    for content, said, code in ((larger.to_str().encode(), 'and the model 400 tokens', 44), (model, 'written', 0)):
        (tmp_path / 'tokenizer.json').write_bytes(content)
        assert main(['import', '--run_dir', run, '--tokenizer', str(tmp_path / 'tokenizer.json')]) == code
        printed = capsys.readouterr()
        assert said in printed.out + printed.err
    assert main(['import', '--run_dir', run, '--tokenizer', str(tmp_path / 'tokenizer.json')]) == 2
    assert 'has tokenizer.json already' in capsys.readouterr().err
    assert lm.load(run).tokenizer.model == model


def test_the_tokenizer_of_an_import_prepares_data(tmp_path, capsys):
    write_llama(tmp_path / 'llama')
    (tmp_path / 'llama' / 'tokenizer.json').write_bytes(byte_level('the whale ' * 99)[0])
    run, store = str(tmp_path / 'run'), str(tmp_path / 'store')
    assert main(['import', str(tmp_path / 'llama'), '--run_dir', run]) == 0
    text = tiny.write_text(tmp_path / 'text', 3000)
    bindings = {
        'prepare.source': '@text_files()', 'text_files.path': str(text), 'prepare.tokenizer': '@tokenizer()',
        'tokenizer.model_path': run, 'data.path': store,
    }  # fmt: skip
    assert main(['prepare', *tiny.params(bindings), '--processes', '1']) == 0
    capsys.readouterr()
    data = ['--set', f'data.path={store}', '--set', 'evaluate.context_length=64']
    assert main(['evaluate', '--run_dir', run, '--json', *data]) == 0
    assert json.loads(capsys.readouterr().out)['tokens'] > 1000


def test_a_token_that_stands_before_every_text_comes_along(tmp_path):
    """Llama 3 and Gemma need it. A run that is trained here has none."""
    write_llama(tmp_path / 'llama')
    made = tokenizers.Tokenizer.from_str(byte_level('the whale ' * 99)[0].decode())
    made.post_processor = tokenizers.processors.TemplateProcessing('<|end|> $A', special_tokens=[('<|end|>', 1)])
    (tmp_path / 'llama' / 'tokenizer.json').write_text(made.to_str())
    assert main(['import', str(tmp_path / 'llama'), '--run_dir', str(tmp_path / 'run')]) == 0
    run = lm.load(str(tmp_path / 'run'))
    assert (run.begin_id, run.tokenizer.eod_id) == (1, 0)
    ids = run.tokenizer.encode('the whale')
    (row,) = run.scorer.score_rows([np.array([1, *ids, 0])])
    np.testing.assert_array_equal(run.score('the whale').nats, row.nats)


def test_a_sentencepiece_tokenizer_is_written_again():
    text = 'the old man and the sea, a whale of a tale: 1851 years é ago ' * 20
    for prefix in (True, False):
        file = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text.split('\n')), model_writer=file, vocab_size=300, model_type='bpe',
            byte_fallback=True, add_dummy_prefix=prefix, normalization_rule_name='identity', bos_id=2, unk_id=0,
            eos_id=1, remove_extra_whitespaces=False, user_defined_symbols=['<tool>', '▁▁', '▁▁▁'], minloglevel=2,
        )  # fmt: skip
        made = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
        pieces = range(made.vocab_size())
        kinds = [2 if made.is_unknown(i) else 3 if made.is_control(i) else 6 if made.is_byte(i) else 1 for i in pieces]
        own = {made.piece_to_id(piece) for piece in ('<tool>', '▁▁', '▁▁▁')}
        kinds = [4 if i in own else kind for i, kind in enumerate(kinds)]
        names = [made.id_to_piece(i) for i in pieces]  # llama.cpp writes the spaces of user-defined pieces as they are
        names = [name.replace('▁', ' ') if i in own else name for i, name in enumerate(names)]
        metadata = {
            'model': 'llama', 'tokens': names, 'add_space_prefix': prefix,
            'scores': [made.get_score(i) for i in pieces], 'token_type': kinds, 'eos_token_id': 1, 'bos_token_id': 2,
            'unknown_token_id': 0,
        }  # fmt: skip
        again = sentencepiece.SentencePieceProcessor(model_proto=make_sentencepiece(Hyperparameters(metadata)))
        assert (again.eos_id(), again.bos_id(), again.unk_id(), again.pad_id()) == (1, 2, 0, -1)
        for one in (*TEXTS, text, 'a <tool> the  sea', '   the man\n  the    sea'):
            assert again.encode(one) == made.encode(one)
            assert again.decode(made.encode(one)) == made.decode(made.encode(one))
        assert from_bytes(make_sentencepiece(Hyperparameters(metadata))).eod_id == 1


@pytest.mark.parametrize('pre', ['gpt-2', 'smollm', 'llama-bpe', 'qwen2', 'gpt-4o'])
def test_text_is_split_as_the_file_says(pre):
    _, pieces, merges = byte_level(' '.join(TEXTS) * 50)
    metadata = {'model': 'gpt2', 'pre': pre, 'tokens': pieces, 'merges': merges, 'token_type': [3, 3, *[1] * 398]}
    metadata['token_type'] = metadata['token_type'][: len(pieces)]
    made = from_bytes(json.dumps(make_byte_level(Hyperparameters(metadata))).encode())
    for text in TEXTS:
        assert made.decode(made.encode(text)) == text
    joined = {'gpt-2': 5, 'smollm': 1, 'llama-bpe': 3, 'qwen2': 1, 'gpt-4o': 3}[pre]
    split = tokenizers.Tokenizer.from_str(made.model.decode()).pre_tokenizer.pre_tokenize_str('12345')
    assert len(split[0][0]) == joined
    assert set(SPLITS) >= {pre}


def test_gains_and_settings_of_gemma_are_restored():
    metadata = {
        'block_count': 12, 'context_length': 64, 'embedding_length': 64, 'feed_forward_length': 8,
        'attention.head_count': 2, 'attention.head_count_kv': 1, 'attention.key_length': 16, 'rope.freq_base': 1e6,
        'attention.value_length': 16, 'attention.layer_norm_rms_epsilon': 1e-6, 'attention.sliding_window': 32,
    }  # fmt: skip
    config, unknown = describe('gemma3', Hyperparameters(metadata), 100, True)
    assert unknown == []
    assert FAMILIES['gemma3_text'].layer_types(config)[4:7] == [
        'sliding_attention',
        'full_attention',
        'sliding_attention',
    ]
    assert config['query_pre_attn_scalar'] == 16
    assert FAMILIES['gemma3_text'].rotary(config, 'sliding_attention').base == 10_000.0
    more = {'expert_count': 2, 'pooling_type': 0}
    assert describe('gemma3', Hyperparameters(metadata | more), 100, True)[1] == ['expert_count']


def test_the_factors_of_llama_3_1_are_read(tmp_path):
    """transformers writes the scaling as numbers, and llama.cpp as one factor per rotary pair."""
    from lm.interop.gguf.file import _scaling_of

    scaling = {'factor': 32.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
    frequencies = 500_000.0 ** (-np.arange(32) / 32)
    factors = []
    for wavelength in 2 * np.pi / frequencies:  # Llama's own code, as a condition for each pair
        smooth = (8192 / wavelength - 1) / 3
        middle = 1 / ((1 - smooth) / 32 + smooth)
        factors.append(1.0 if wavelength < 8192 / 4 else 32.0 if wavelength > 8192 else middle)
    found = _scaling_of(np.array(factors), 500_000.0)
    assert found == scaling | {'rope_type': 'llama3', 'original_max_position_embeddings': 8192}
    assert _scaling_of(np.array(factors) + 0.1, 500_000.0)['rope_type'] == 'rope_freqs'


def test_a_folder_without_the_usual_end_of_document_takes_it_from_its_config(tmp_path):
    tensors = write_llama(tmp_path / 'llama', eos_token_id=7)
    assert tensors
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(['the whale'], 300, show_progress=False)
    (tmp_path / 'llama' / 'tokenizer.json').write_text(made.to_str())
    (found,) = open_checkpoint(tmp_path / 'llama').find_tokenizers()
    assert found.tokenizer.eod_id == 7
    assert main(['import', str(tmp_path / 'llama'), '--run_dir', str(tmp_path / 'run')]) == 0
    assert lm.load(str(tmp_path / 'run')).tokenizer.eod_id == 7
    save_file({}, tmp_path / 'empty')
    with pytest.raises(MismatchError, match='is no GGUF file'):
        open_checkpoint(tmp_path / 'empty')


def test_data_with_another_tokenizer_are_refused_after_a_completed_import(tmp_path, tokens):
    """The checkpoint does not know its tokenizer, but the run does."""
    write_llama(tmp_path / 'llama')
    run, data = str(tmp_path / 'run'), [f"data.path = '{tokens}'"]
    assert main(['import', str(tmp_path / 'llama'), '--run_dir', run]) == 0
    assert lm.load(run, data).step == 0
    (tmp_path / 'tokenizer.json').write_bytes(byte_level('the whale ' * 99)[0])
    assert main(['import', '--run_dir', run, '--tokenizer', str(tmp_path / 'tokenizer.json')]) == 0
    assert lm.load(run).step == 0
    with pytest.raises(MismatchError, match='has another tokenizer than the data; prepare them with'):
        lm.load(run, data)
