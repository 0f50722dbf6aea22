"""The tokens before and behind a text: imports take them from the checkpoint, and exports keep them."""

import base64
import io
import json

import numpy as np
import pytest
import sentencepiece
import tokenizers
from safetensors.numpy import load_file, save_file
from test_exchange import write_llama

import lm
from lm.cli import main
from lm.data.tokenizers import TokenizerConfig, load
from lm.inference.loaded_run import LoadedRun
from lm.interop.checkpoints import open_checkpoint

TEXT = 'a test of <s>tokens</s>'
FORMATS = ['safetensors', 'huggingface', 'native']


def bytes_of_text(special=(), ordinary=(), begin=None) -> str:
    """Returns a tokenizer.json of single bytes, behind special and ordinary tokens in this order."""
    names = [*special, *ordinary, *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({name: i for i, name in enumerate(names)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(list(special))
    made.add_tokens([tokenizers.AddedToken(name, special=False, normalized=False) for name in ordinary])
    if begin:
        template, ids = f'{begin} $A', [(begin, names.index(begin))]
        made.post_processor = tokenizers.processors.TemplateProcessing(template, special_tokens=ids)
    return made.to_str()


def sentencepiece_model() -> bytes:
    """Returns a model like Llama 2's: <unk> is 0, <s> 1 and </s> 2."""
    file, texts = io.BytesIO(), (f'the quick brown fox {i} jumps' for i in range(300))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts, model_writer=file, vocab_size=300, model_type='bpe', byte_fallback=True, unk_id=0,
        bos_id=1, eos_id=2, pad_id=-1, minloglevel=2,
    )  # fmt: skip
    return file.getvalue()


def imported(folder, run='run') -> LoadedRun:
    """Imports a checkpoint and opens the run."""
    assert main(['import', str(folder), '--run_dir', str(folder.parent / run)]) == 0
    return lm.load(str(folder.parent / run))


def marks(run) -> tuple[int, int]:
    """Returns the tokens before and behind a text."""
    return run.begin_id, run.tokenizer.eod_id


def write_checkpoint(folder, files, **config):
    """Writes a checkpoint with the contents of further files."""
    write_llama(folder, **config)
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


GEMMA = bytes_of_text(['<pad>', '<eos>', '<bos>'], ['<s>', '</s>'], begin='<bos>')
LLAMA3 = bytes_of_text(['<|begin_of_text|>', '<|end_of_text|>', '<|eot_id|>'], begin='<|begin_of_text|>')
ODD = bytes_of_text(['<bos>', '<stop>'], begin='<bos>')
TWO = bytes_of_text(['<|endoftext|>', '<bos>', '</s>'], begin='<bos>')
CHECKPOINTS = {
    'gemma': ({'tokenizer.json': GEMMA}, {'eos_token_id': [1, 106], 'bos_token_id': 2}, (2, 1)),
    'llama3': ({'tokenizer.json': LLAMA3}, {'eos_token_id': [2, 1], 'bos_token_id': 0}, (0, 1)),
    'odd': ({'tokenizer.json': ODD}, {'eos_token_id': [1], 'bos_token_id': 0}, (0, 1)),
    'two': ({'tokenizer.json': TWO}, {'eos_token_id': 2, 'bos_token_id': 1}, (1, 2)),
    'llama2': ({'tokenizer.model': sentencepiece_model()}, {'eos_token_id': 2, 'bos_token_id': 1}, (1, 2)),
}
"""Name → the files of a tokenizer, entries of config.json, and the tokens before and behind a text."""


@pytest.mark.parametrize('name', CHECKPOINTS)
def test_exports_and_their_imports_score_a_text_like_the_run(name, tmp_path):
    files, config, expected = CHECKPOINTS[name]
    write_checkpoint(tmp_path / 'checkpoint', files, **config)
    run = imported(tmp_path / 'checkpoint')
    assert marks(run) == expected
    nats = run.score(TEXT).nats
    for kind in FORMATS:
        out = tmp_path / kind
        assert main(['export', '--run_dir', str(tmp_path / 'run'), '--format', kind, '--out', str(out)]) == 0
        if kind != 'safetensors':
            written = json.loads((out / 'config.json').read_text())
            assert (written['bos_token_id'], written['eos_token_id']) == expected
        again = imported(out, f'again_{kind}')
        assert marks(again) == expected, kind
        np.testing.assert_array_equal(again.score(TEXT).nats, nats)
    # Files of transformers have no header of ours, and their config.json says both tokens.
    (file,) = (tmp_path / 'huggingface').glob('*.safetensors')
    save_file(load_file(file), file, {'format': 'pt'})
    assert marks(imported(tmp_path / 'huggingface', 'saved')) == expected


@pytest.mark.parametrize('name', ['gemma', 'odd', 'two'])
@pytest.mark.parametrize('place', ['checkpoint', 'checkpoint/tokenizer.json', 'run', 'run/tokenizer.json'])
def test_data_are_prepared_with_the_end_of_the_checkpoint(name, place, tmp_path):
    """Names of Gemma's HTML tokens end no document, and a name that is not usual ends one."""
    files, config, (_, end) = CHECKPOINTS[name]
    write_checkpoint(tmp_path / 'checkpoint', files, **config)
    imported(tmp_path / 'checkpoint')
    tokenizer = load(tmp_path / place)
    assert tokenizer.eod_id == end
    assert end not in tokenizer.encode('<eos><stop></s><|endoftext|>')
    assert load(tmp_path / place, TokenizerConfig(end_of_document='a')).piece(tokenizer.eod_id) != 'a'


def write_texts(folder, run, *texts) -> str:
    """Prepares texts as both splits with the tokenizer of a run. Returns the folder of the store."""
    for split in ('train', 'validation'):
        (folder / f'{split}.jsonl').write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts))
    settings = [f"jsonl.path = '{folder}'", f"tokenizer.model_path = '{run}'", f"data.path = '{folder}/data'"]
    flags = [argument for setting in settings for argument in ('--gin_param', setting)]
    assert main(['prepare', '--processes', '1', '--gin_file', 'data/jsonl.gin', *flags]) == 0
    return str(folder / 'data')


def test_a_split_is_scored_like_its_texts_and_says_what_stands_before_them(tmp_path):
    files, config, (begin, _) = CHECKPOINTS['llama3']
    write_checkpoint(tmp_path / 'checkpoint', files, **config)
    imported(tmp_path / 'checkpoint')
    texts = TEXT, 'another text', 'b'
    data = [f"data.path = '{write_texts(tmp_path, tmp_path / 'run', *texts)}'", 'data.mask_documents = True']
    run = lm.load(str(tmp_path / 'run'), data)
    expected = sum(run.score(text).nats.sum() for text in texts)
    found = lm.evaluate(run, context_length=run.splits.tokens('validation'))
    assert found['sum_nats'] == pytest.approx(expected, rel=1e-5)
    stated = found['conditioning']
    assert (stated['before_texts'], stated['before_windows']) == ('begin', 'begin')
    assert (stated['token_id'], stated['token']) == (begin, '<|begin_of_text|>')
    # The end-of-document token in its place gives other losses.
    without = lm.load(str(tmp_path / 'run'), [*data, f'data.begin_id = {run.tokenizer.eod_id}'])
    other = lm.evaluate(without, context_length=run.splits.tokens('validation'))
    assert abs(other['sum_nats'] - expected) > 0.01 * expected
    assert other['conditioning']['before_texts'] == 'end of document'


def test_exports_of_a_run_that_was_trained_here_have_one_token_for_both(reference_run, tmp_path):
    run_dir = str(reference_run[0])
    assert main(['export', '--run_dir', run_dir, '--format', 'huggingface', '--out', str(tmp_path / 'out')]) == 0
    run, again = lm.load(run_dir), imported(tmp_path / 'out')
    assert marks(run) == marks(again) == (1, 1)
    np.testing.assert_array_equal(run.score(TEXT).nats, again.score(TEXT).nats)
    assert 'begin_id' not in json.loads((tmp_path / 'run' / 'run.json').read_text())


def rank_file() -> bytes:
    """Returns as many ranks as Llama 3 has."""
    pieces = [bytes([i]) for i in range(256)] + [i.to_bytes(3, 'big') for i in range(256, 128_000)]
    return b''.join(base64.b64encode(piece) + b' %d\n' % i for i, piece in enumerate(pieces))


@pytest.mark.parametrize('adds', [None, True, False])
def test_config_json_says_the_beginning_where_the_tokenizer_does_not(adds, tmp_path):
    said = {} if adds is None else {'tokenizer_config.json': json.dumps({'add_bos_token': adds})}
    ids = {'vocab_size': 128_256, 'eos_token_id': [128_009, 128_001], 'bos_token_id': 128_000}
    write_checkpoint(tmp_path / 'llama2', CHECKPOINTS['llama2'][0] | said, eos_token_id=2, bos_token_id=1)
    write_checkpoint(tmp_path / 'llama3', {'tokenizer.model': rank_file()} | said, **ids)
    for name, begin, end in (('llama2', 1, 2), ('llama3', 128_000, 128_001)):
        (found,) = open_checkpoint(tmp_path / name).find_tokenizers()
        assert (found.begin_id, found.tokenizer.eod_id) == (None if adds is False else begin, end)


@pytest.mark.parametrize('gone', [False, True])
def test_a_tokenizer_that_comes_later_takes_the_tokens_of_the_checkpoint(gone, tmp_path):
    write_checkpoint(tmp_path / 'odd', {}, eos_token_id=1, bos_token_id=0)
    run = str(tmp_path / 'run')
    assert main(['import', str(tmp_path / 'odd'), '--run_dir', run]) == 0
    if gone:
        (tmp_path / 'odd').rename(tmp_path / 'moved')
    (tmp_path / 'tokenizer.json').write_text(ODD)
    assert main(['import', '--run_dir', run, '--tokenizer', str(tmp_path / 'tokenizer.json')]) == 0
    assert marks(lm.load(run)) == (0, 1)
    write_checkpoint(tmp_path / 'other', {}, eos_token_id=1, bos_token_id=0)
    command = ['import', str(tmp_path / 'other'), '--run_dir', str(tmp_path / 'at_once')]
    assert main([*command, '--tokenizer', str(tmp_path / 'tokenizer.json')]) == 0
    assert marks(lm.load(str(tmp_path / 'at_once'))) == (0, 1)


def test_earlier_imports_and_exports_load_as_before(tmp_path):
    """Their run.json names neither token, and their files of weights have no header for them."""
    write_checkpoint(tmp_path / 'llama', {'tokenizer.json': bytes_of_text(['</s>'])}, eos_token_id=0)
    run = imported(tmp_path / 'llama')
    info = json.loads((tmp_path / 'run' / 'run.json').read_text())
    assert info.pop('end_id') == 0
    (tmp_path / 'run' / 'run.json').write_text(json.dumps(info))
    assert marks(lm.load(str(tmp_path / 'run'))) == marks(run) == (0, 0)
    assert main(['export', '--run_dir', str(tmp_path / 'run'), '--out', str(tmp_path / 'out')]) == 0
    (file,) = (tmp_path / 'out').glob('*.safetensors')
    save_file(load_file(file), file, {'step': '0'})
    assert marks(imported(tmp_path / 'out', 'again')) == (0, 0)


@pytest.mark.parametrize(('file', 'content', 'said'), [
    ('config.json', '{"model_type": "llama"}', "config.json: lacks 'num_hidden_layers'; fetch it again"),
    ('config.json', '{"model_type": ["llama"]}', "model_type = ['llama']: can be imported are"),
    ('model.safetensors.index.json', '[]', 'model.safetensors.index.json: is damaged; fetch it again'),
    ('model.safetensors.index.json', '{"weight_map": {"a": 1}}', 'index.json: is damaged; fetch it again'),
])  # fmt: skip
def test_damaged_files_are_named_in_one_line(file, content, said, tmp_path, capsys):
    write_checkpoint(tmp_path / 'llama', {file: content})
    assert main(['import', str(tmp_path / 'llama'), '--run_dir', str(tmp_path / 'run')]) in (2, 44)
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count('\n') == 1
