"""`lm generate`: batches equal single prompts, sampling follows its probabilities, text comes in parts, states stay
small."""

import functools
import io
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
import tiny
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import lm
from lm import model as model_lib
from lm.attention.polysketch import Polysketch
from lm.attention.recurrent.delta import Delta
from lm.attention.softmax import Softmax
from lm.cli import main
from lm.commands.generate import read_prompts
from lm.data.store import TokenStore
from lm.data.tokenizers.sentencepiece import SentencePiece
from lm.errors import ConfigError
from lm.inference import decoding
from lm.inference.continuation import Continuation, Stops, TextStream, decode_after, show_text
from lm.inference.decoding import (
    FORCED,
    PIECE,
    Sampling,
    TokenWriter,
    cut_prompt,
    generate_tokens,
    pays_to_separate,
    state_bytes,
)
from lm.inference.loaded_run import LoadedRun
from lm.model.transformer import separate_layers, separate_state

GREEDY = Sampling(temperature=0)
NONE = Stops()


def small(attention) -> model_lib.Transformer:
    config = model_lib.ModelConfig(
        vocab_size=50, n_layers=1, d_model=32, n_heads=2, head_dim=16, hidden_dim=32, attention=attention
    )
    return model_lib.build(config, 0)


def continued(model, prompts: list[list[int]], n: int, sampling: Sampling = GREEDY, seed: int = 0) -> np.ndarray:
    """Returns the prompts with their continuations, [B, …], as `generate` gives them."""
    parts = list(generate_tokens(model, [np.array(p) for p in prompts], n, sampling, seed))
    return np.concatenate([np.array([p[:1] for p in prompts]), *parts], axis=1)


def test_ids_without_text_are_never_drawn(model):
    """A vocabulary is often larger than the tokenizer's; such ids have no text."""
    for sampling in (GREEDY, Sampling(temperature=100.0), Sampling(temperature=100.0, top_k=40)):
        *_, tokens = generate_tokens(model, [np.array([1, 2])], 64, sampling, 0, pieces=10)
        assert tokens.max() < 10
    whole, all_of_them = (list(generate_tokens(model, [np.array([1])], 8, Sampling(), 0, n)) for n in (None, 50))
    assert np.concatenate(whole, axis=1).tolist() == np.concatenate(all_of_them, axis=1).tolist()


@pytest.fixture(scope='module')
def model():
    return small(Polysketch(sketch='learned', sketch_size=8, block=8))


def test_greedy_text_is_the_most_probable_next_token_of_the_parallel_form(model):
    row = continued(model, [[3, 1, 4, 1, 5]], 30)[0]
    assert row[:5].tolist() == [3, 1, 4, 1, 5]
    logits = model(jnp.asarray(row[None, :-1]))[0]
    assert row[5:].tolist() == logits.argmax(-1)[4:].tolist()


def test_prompts_of_a_batch_do_not_change_one_another(model):
    prompts = [[3, 1, 4], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4], [6]]
    together = continued(model, prompts, 12)
    for prompt, row in zip(prompts, together, strict=True):
        alone = continued(model, [prompt], 12)[0]
        assert row[: len(alone)].tolist() == alone.tolist()


def test_a_prompt_is_read_in_pieces(monkeypatch):
    """One size of pieces is compiled; the end of the prompt is read token by token."""
    model = small(Polysketch(sketch_size=8, block=8, gate=True))
    prompts = [list(range(1, 38)), list(range(3, 33))]
    expected = continued(model, prompts, 12)
    lengths, extend = [], model_lib.Transformer.extend
    monkeypatch.setattr('lm.inference.decoding.PIECE', 8)
    monkeypatch.setattr(model_lib.Transformer, 'extend', lambda *a: (lengths.append(a[2].shape[1]), extend(*a))[1])
    assert continued(model, prompts, 12).tolist() == expected.tolist()
    assert lengths == [8, 1]


@pytest.mark.parametrize('length', [1, 2, 13, 16, 37, 500, 1000, 9999])
def test_the_end_of_a_prompt_that_is_read_by_itself_is_short(length):
    pieces = cut_prompt(length)
    assert 0 <= length - sum(pieces) < FORCED
    assert all(0 < n <= PIECE and n >> max(0, n.bit_length() - 3) << max(0, n.bit_length() - 3) == n for n in pieces)


def test_calls_of_similar_lengths_share_programs(model, monkeypatch):
    """A second call, and one of another prompt and other lengths, traces nothing."""
    decoder, rng, traced, extend = TokenWriter(model), np.random.default_rng(0), [], model_lib.Transformer.extend
    monkeypatch.setattr(model_lib.Transformer, 'extend', lambda *a: (traced.append(a), extend(*a))[1])
    for length, new in ((20, 30), (20, 30), (21, 24)):
        assert list(generate_tokens(decoder, [rng.integers(0, 50, length)], new, GREEDY, 0))
        assert len(traced) == 2


def test_the_seed_decides_the_sample(model):
    first, again, other = (continued(model, [[1, 2]], 40, Sampling(), seed).tolist() for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_the_state_of_linear_attention_does_not_grow():
    linear, exact = small(Polysketch(sketch_size=8, block=8)), small(Softmax())
    assert state_bytes(linear, 100_000) == state_bytes(linear, 1000)
    assert state_bytes(exact, 100_000) > 90 * state_bytes(exact, 1000)


LOGITS = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))


def frequencies(sampling: Sampling, n: int = 4000) -> np.ndarray:
    draw = jax.jit(jax.vmap(lambda key: sampling(LOGITS, key)[0]))
    return np.bincount(draw(jax.random.split(jax.random.key(0), n)), minlength=4) / n


@pytest.mark.parametrize(
    ('sampling', 'expected'),
    [
        (Sampling(), [0.4, 0.3, 0.2, 0.1]),
        (Sampling(top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(top_p=0.8), [4 / 9, 3 / 9, 2 / 9, 0]),
        (Sampling(temperature=0.5), np.square([0.4, 0.3, 0.2, 0.1]) / 0.3),
        (GREEDY, [1, 0, 0, 0]),
    ],
)
def test_sampling_follows_its_distribution(sampling, expected):
    assert frequencies(sampling) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize('wrong', [{'temperature': -1}, {'top_k': 0}, {'top_p': 0}, {'top_p': 1.1}])
def test_wrong_sampling_is_named(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)


def streamed(tokenizer: SentencePiece, ids: list[int], cuts: list[int]) -> str:
    stream, start, text = TextStream(tokenizer.decode), 0, ''
    for end in [*sorted(min(c, len(ids)) for c in cuts), len(ids)]:
        text += stream(ids[start:end])
        start = end
    return text + stream([], last=True)


@pytest.mark.parametrize(
    ('text', 'stops', 'found'),
    [
        ('xabcd', ('b', 'abc'), (2, 'b')),
        ('xab', ('abc', 'b'), (2, 'b')),
        ('xabcd', ('abc', 'cd'), (1, 'abc')),
        ('xabcd', ('ab', 'a'), (1, 'a')),
        ('xabcd', ('z',), None),
    ],
)
def test_the_first_complete_stop_counts(text, stops, found):
    """So a text that comes in parts ends where the whole text does."""
    assert Stops(stops).find_text(text) == found


@settings(max_examples=200)
@given(
    prompt=st.text('abc', max_size=4),
    text=st.text('abc', min_size=1, max_size=12),
    stops=st.lists(st.text('abc', min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 16), max_size=4),
)
def test_a_continuation_in_parts_ends_at_the_first_stop(prompt, text, stops, cuts):
    """The shown text never has to be taken back, and stops inside the prompt do not count."""
    ids = [0, *(ord(letter) - 96 for letter in prompt + text)]
    made = Continuation(lambda ids: ''.join(chr(96 + i) for i in ids), ids[: 1 + len(prompt)], 12, Stops(tuple(stops)))
    edges = [1, *sorted(1 + min(cut, len(ids) - 1) for cut in cuts), len(ids)]
    shown = [made.add(ids[start:end]) for start, end in itertools.pairwise(edges)]
    ends = {at + len(stop): at for stop in stops for at in range(len(text)) if text.startswith(stop, at)}
    wanted = text
    if ends:
        first = min(ends)
        wanted = text[: first - max(len(stop) for stop in stops if text[:first].endswith(stop))]
    assert made.text == wanted
    assert made.tokens == len(wanted)
    assert (made.stop is not None) == bool(ends)
    assert made.text.startswith(''.join(shown))
    assert ''.join(shown) == made.text or not made.ended


@settings(max_examples=200)
@given(
    words=st.lists(st.sampled_from(['the ', ' sea', 'é', '漢字', '🐋', '\n', '  ', 'x']), max_size=30),
    cuts=st.lists(st.integers(0, 120), max_size=20),
)
def test_text_in_parts_is_the_whole_text(tokens, words, cuts):
    tokenizer = TokenStore.open(str(tokens)).tokenizer()
    ids = tokenizer.encode(''.join(words)).tolist()
    assert streamed(tokenizer, ids, cuts) == ''.join(words)


def test_the_text_of_a_tokenizer_that_marks_the_beginning_of_words_is_whole():
    model = io.BytesIO()
    sentences = ['the old man and the sea', 'call me some years ago', 'a whale of a time'] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, vocab_size=30, minloglevel=2
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())

    class Fake:
        decode = staticmethod(lambda ids: processor.decode(list(ids)))

    ids = processor.encode('the old whale and a man')
    for cuts in ([], list(range(len(ids))), [3, 4, 9]):
        assert streamed(Fake(), ids, cuts) == 'the old whale and a man'


def test_the_end_of_a_document_is_shown(tokens):
    tokenizer = TokenStore.open(str(tokens)).tokenizer()
    ids = tokenizer.encode_documents(['the end', 'é'])[0].tolist()
    assert show_text(tokenizer, ids) == 'the end</s>é</s>'
    stream = TextStream(functools.partial(show_text, tokenizer))
    assert ''.join(stream([token]) for token in ids) + stream([], last=True) == 'the end</s>é</s>'
    assert show_text(tokenizer, []) == ''


def test_broken_bytes_are_shown_after_a_while(tokens):
    tokenizer = TokenStore.open(str(tokens)).tokenizer()
    broken = next(i for i in range(300) if tokenizer.piece(i) == '<0xE6>')
    stream = TextStream(tokenizer.decode)
    assert stream([broken] * TextStream.LONGEST) == ''
    assert '\ufffd' in stream([broken])


def test_the_command_reports_speed_and_size_of_the_state(reference_run):
    run = str(reference_run[0])
    done = tiny.lm('generate', '--run_dir', run, '--prompt', 'The', '--max_tokens', '40', '--temperature', '0')
    assert done.returncode == 0, done.stderr
    again = tiny.lm('generate', '--run_dir', run, '--prompt', 'The', '--max_tokens', '40', '--temperature', '0')
    assert done.stdout.startswith('The')
    assert done.stdout == again.stdout
    assert re.search(r'\[[\d.]+ tokens/s after the first; decoding state [\d,]+ bytes per sequence\]', done.stderr)


def test_a_batch_of_prompts_from_a_file(reference_run, tmp_path):
    (tmp_path / 'prompts.txt').write_text('The sea\nA\n')
    flags = ['--prompt_file', str(tmp_path / 'prompts.txt'), '--max_tokens', '5']
    done = tiny.lm('generate', '--run_dir', str(reference_run[0]), *flags)
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split('-' * 20 + '\n')
    assert [part[:1] for part in parts] == ['', 'T', 'A']


def test_prompts_stop_at_named_tokens_and_become_json(reference_run, capsys):
    """Each prompt stops by itself, and the command ends when all have ended."""
    run = str(reference_run[0])
    flags = ['generate', '--run_dir', run, '--prompt', 'The', '--prompt', 'import sys', '--temperature', '0', '--json']
    assert main([*flags, '--max_tokens', '12']) == 0
    whole = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one['prompt'], one['tokens'], one['stop']) for one in whole] == [
        ('The', 12, None),
        ('import sys', 12, None),
    ]
    loaded = lm.load(run)
    prompt = np.concatenate([[loaded.begin_id], loaded.tokenizer.encode('The')])
    with jax.set_mesh(loaded.mesh):
        parts = list(generate_tokens(loaded.model, [prompt], 12, GREEDY, 0, loaded.tokenizer.vocab_size))
    name = loaded.tokenizer.piece(int(np.concatenate(parts, axis=1)[0, len(prompt) + 2]))
    assert main([*flags, '--max_tokens', '12', '--stop', name]) == 0
    stopped = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert stopped[0]['stop'] == name
    assert stopped[0]['tokens'] < 12
    for short, long in zip(stopped, whole, strict=True):
        assert long['text'].startswith(short['text'])
    text = whole[0]['text'][1:4]
    assert main([*flags, '--max_tokens', '12', '--stop', text]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[0])
    assert found['stop'] == text
    assert found['text'] == whole[0]['text'].partition(text)[0]


class Letters:
    """A tokenizer of letters."""

    eod_id = 0
    vocab_size = 26
    encode = staticmethod(lambda text: np.array([ord(letter) - 97 for letter in text], np.int32))
    piece = staticmethod(lambda index: '</s>')
    decode = staticmethod(lambda ids: ''.join(chr(97 + i) for i in ids if i))


@pytest.fixture
def letters(model) -> LoadedRun:
    """Returns a run in memory whose tokenizer is `Letters`."""
    run = LoadedRun(None, None, None, jax.make_mesh((1,), ('data',)), None, None, 0)  # pyright: ignore
    run.__dict__.update(tokenizer=Letters, begin_id=0, model=model, companions={})
    return run


def test_prompts_are_texts_or_token_ids(letters):
    """Lists of token ids, and empty ones, count as arrays."""
    prompts = ['bc', np.array([1, 2]), [1, 2], np.array([1, 2], np.uint64), []]
    texts = lm.generate(letters, prompts, max_tokens=3, temperature=0)
    assert texts == [texts[0]] * 4 + [lm.generate(letters, '', max_tokens=3, temperature=0)]


@pytest.mark.parametrize(
    ('prompts', 'named'),
    [
        (np.array([5, 6]), 'prompts: np.int64(5)'),
        ([5, 6], 'prompts: 5'),
        ([np.array([5.7])], 'prompts: array([5.7])'),
        ([np.array([True])], 'prompts: array([ True])'),
        (['a', [[1, 2], [3]]], 'prompts: [[1, 2], [3]]'),
        ([np.zeros((2, 200))], 'prompts: array([[0., 0.'),
        ([None], 'prompts: None'),
        (7, 'prompts = 7'),
    ],
)
def test_other_prompts_are_refused_in_one_line(letters, prompts, named):
    with pytest.raises(ConfigError, match=re.escape(named)) as error:
        lm.generate(letters, prompts)
    assert str(error.value).endswith('token ids, such as [np.array([5, 6])]')
    assert '\n' not in str(error.value)


def continue_all(tokenizer, prompts, parts, max_tokens, stops=NONE) -> list[Continuation]:
    made = [Continuation(tokenizer.decode, prompt, max_tokens, stops) for prompt in prompts]
    for part in parts:
        for one, tokens in zip(made, part, strict=True):
            one.add(tokens)
    return made


def test_continuations_end_by_themselves():
    prompts = [np.array([0, 1, 2]), np.array([0, 3])]
    parts = [np.array([[1, 2], [3, 4]]), np.array([[5], [9]]), np.array([[6, 9, 7], [5, 9, 5]])]
    stops = Stops(ids={9: 'j'})
    for read, ended in enumerate([[False, False], [False, True], [True, True]]):
        made = continue_all(Letters, prompts, parts[: read + 1], 3, stops)
        assert [one.ended for one in made] == ended
    assert [(one.before, one.text, one.tokens, one.stop) for one in made] == [('bc', 'fg', 2, 'j'), ('d', 'e', 1, 'j')]
    plain = continue_all(Letters, prompts, [np.array([[1, 2, 5], [3, 4, 5]])], 1)
    assert [(one.text, one.stop, one.ended) for one in plain] == [('f', None, True), ('e', None, True)]


class Words:
    """A tokenizer that drops the space before the first word, as many imported ones do."""

    eod_id = -1
    vocab_size = 50

    def decode(self, ids):
        return ' '.join(f'w{i}' for i in ids)

    def piece(self, i):
        return f'▁w{i}'


def test_a_continuation_keeps_the_space_before_its_first_word():
    parts = [np.array([[1, 2], [3, 4]]), np.array([[5, 6, 7], [8, 9, 9]])]
    made = continue_all(Words(), [np.array([0, 1, 2]), np.array([0])], parts, 3)
    assert [(one.before, one.text) for one in made] == [('w1 w2', ' w5 w6 w7'), ('', 'w3 w4 w8')]
    assert decode_after(Words().decode, np.array([4]), np.array([], np.int64)) == ''


def test_a_stop_is_a_text_or_the_name_of_a_token():
    stops = Stops.find(Words(), ['▁w7', 'w8 w9'])
    assert stops == Stops(('▁w7', 'w8 w9'), {7: '▁w7'})
    found = []
    for row in ([1, 2, 7, 3], [1, 8, 9, 3], [1, 8, 3, 9]):
        made = continue_all(Words(), [np.array([0])], [np.array([row])], 4, stops)[0]
        found.append((made.text, made.tokens, made.stop))
    assert found == [('w1 w2', 2, '▁w7'), ('w1 ', 2, 'w8 w9'), ('w1 w8 w3 w9', 4, None)]
    with pytest.raises(ConfigError, match=r"^--stop '': must hold a character"):
        Stops.find(Words(), [''])


def test_each_token_of_a_slow_model_is_shown_when_it_is_there(model, monkeypatch):
    """The chunks do not change the text."""
    expected = continued(model, [[1, 2], [3]], 20, Sampling(), 3)
    monkeypatch.setattr('lm.inference.decoding.SLOW', 1)
    assert continued(model, [[1, 2], [3]], 20, Sampling(), 3).tolist() == expected[:, :22].tolist()
    parts = list(generate_tokens(model, [np.array([1, 2])], 20, Sampling(), 3))
    assert [part.shape[1] for part in parts] == [2] + [1] * 19


@pytest.fixture(scope='module')
def deep():
    """A model of five layers: two repeats of two mechanisms, and a cut one."""
    config = model_lib.ModelConfig(
        vocab_size=50,
        n_layers=5,
        d_model=32,
        n_heads=2,
        head_dim=16,
        hidden_dim=32,
        attention=(Softmax(window=6), Delta()),
        convolution=3,
    )
    return model_lib.build(config, 0)


def test_a_model_of_separate_layers_is_the_same_model_without_a_copy(deep):
    apart = separate_layers(deep)
    kernels = [block.glu_in.kernel[...] for block in apart.blocks]
    assert len(kernels) == 5
    starts = [block.glu_in.kernel[...].unsafe_buffer_pointer() for block in deep.blocks]
    for layer, kernel in enumerate(kernels):
        stack, place = deep.config.find_layer(layer)
        assert kernel.unsafe_buffer_pointer() == starts[stack] + place * kernel.nbytes, 'the weights are copied'
    tokens = jax.random.randint(jax.random.key(0), (2, 24), 0, 50)
    expected = nnx.jit(type(deep).__call__)(deep, tokens)
    graph, weights = nnx.split(apart)

    @jax.jit
    def decode(weights, state, tokens):
        def step(state, token_and_position):
            token_B, position = token_and_position
            state, logits = nnx.merge(graph, weights).decode_step(state, token_B[:, None], position)
            return state, logits[:, 0]

        return jax.lax.scan(step, state, (tokens.T, jnp.arange(24)))[1].swapaxes(0, 1)

    found = decode(weights, separate_state(deep.config, deep.init_state(2, 24)), tokens)
    assert jnp.abs(found - expected).max() < 1e-5 * jnp.abs(expected).max()


def test_decoding_of_separate_layers_has_no_loop_and_gives_the_same_tokens(deep, monkeypatch):
    prompts = [[3, 1, 4, 1, 5], [9, 2]]
    assert not pays_to_separate(deep, 1000)
    expected = continued(deep, prompts, 30)
    made = []
    monkeypatch.setattr(decoding, 'separate_layers', lambda model: made.append(separate_layers(model)) or made[-1])
    monkeypatch.setattr(decoding, 'UNROLLED', 0.0)
    assert pays_to_separate(deep, 1)
    assert continued(deep, prompts, 30).tolist() == expected.tolist()
    assert [len(model.blocks) for model in made] == [5]

    def has_loop(model):
        graph, weights = nnx.split(model)
        state, token = model.init_state(1, 32), jnp.zeros((1, 1), jnp.int32)

        def step(weights, state):
            return nnx.merge(graph, weights).decode_step(state, token, jnp.int32(3))

        return ' while(' in jax.jit(step).lower(weights, state).compile().as_text()

    assert has_loop(deep)
    assert not has_loop(made[0])
    monkeypatch.setattr(decoding, 'target_platform', lambda: 'tpu')
    assert not pays_to_separate(deep, 1)


def test_a_whole_file_is_one_prompt(tmp_path):
    text = tmp_path / 'text'
    text.write_text('two\nlines\n')
    assert read_prompts(text_file=str(text)) == ['two\nlines\n']
    assert read_prompts(['one', 'two']) == ['one', 'two']
    text.write_bytes(b'two\r\nlines\rhere\r\n')
    assert read_prompts(text_file=str(text)) == ['two\r\nlines\rhere\r\n'], 'as lm prepare would read it'
    for name in ('text_file', 'prompt_file'):
        text.write_bytes(b'\xef\xbb\xbfone\xef\xbb\xbf')
        assert read_prompts(**{name: str(text)}) == ['one\ufeff'], 'without the mark of the byte order'
    with pytest.raises(ConfigError, match='--prompt and --text_file: give one of them'):
        read_prompts('a', text_file=str(text))
    with pytest.raises(ConfigError, match=r'--text_file .*: no such file'):
        read_prompts(text_file=str(tmp_path / 'none'))


def test_a_line_of_a_file_is_one_prompt(tmp_path):
    path = tmp_path / 'prompts'
    path.write_text('one\u2028with\x0c breaks\n\ntwo\n', encoding='utf-8')
    assert read_prompts(prompt_file=str(path)) == ['one\u2028with\x0c breaks', '', 'two']
    path.write_bytes(b'one\r\n\r\ntwo\r\n')
    assert read_prompts(prompt_file=str(path)) == ['one', '', 'two']
    path.write_bytes(b'caf\xe9\n')
    with pytest.raises(ConfigError, match='is not text in UTF-8'):
        read_prompts(prompt_file=str(path))
    with pytest.raises(ConfigError, match='--prompt: is not text in UTF-8'):
        read_prompts('caf\udce9')
    with pytest.raises(ConfigError, match='--temperature nan'):
        Sampling(temperature=float('nan'))
