"""Instruct models: the files beside their weights, special tokens in prompts, and conversations as training data."""

import json

import numpy as np
import pytest
from test_exchange import write_llama

import lm
from lm.cli import main
from lm.data.chat_template import ChatTemplate
from lm.data.sources.conversations import read_messages
from lm.data.store import TokenStore
from lm.data.tokenizers import load
from lm.data.tokenizers.companions import find_template
from lm.errors import ConfigError
from lm.training.objectives.next_token import next_answer

TEMPLATE = (
    '{{ bos_token }}{% for m in messages %}<|start|>{{ m["role"] }}\n'
    '{% if m["role"] == "assistant" %}{% generation %}{{ m["content"] }}<|stop|>\n{% endgeneration %}'
    '{% else %}{{ m["content"] }}<|stop|>\n{% endif %}{% endfor %}'
    '{% if add_generation_prompt %}<|start|>assistant\n{% endif %}'
)
MESSAGES = [
    {'role': 'user', 'content': 'hello <|stop|>?'},
    {'role': 'assistant', 'content': 'the whale'},
    {'role': 'user', 'content': 'and?'},
    {'role': 'assistant', 'content': 'the ship'},
]
SPECIAL = ['<|endoftext|>', '<|begin|>', '<|stop|>', '<|start|>']
FILES = {
    'tokenizer_config.json': json.dumps(
        {'bos_token': {'content': '<|begin|>'}, 'eos_token': '<|stop|>', 'chat_template': TEMPLATE}, indent=3
    ),
    'special_tokens_map.json': '{ "eos_token":"<|stop|>"}',
    'generation_config.json': '{"eos_token_id": [2, 0],\n "temperature": 0.6}',
}


@pytest.fixture(scope='module')
def instruct(tmp_path_factory):
    """Returns a folder with an Instruct model, and the run of its import."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp('instruct')
    write_llama(folder / 'in', eos_token_id=2, bos_token_id=1)
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(['user the whale and assistant the ship'] * 9, trainer)
    made.save(str(folder / 'in' / 'tokenizer.json'))
    for name, text in FILES.items():
        (folder / 'in' / name).write_text(text)
    assert main(['import', str(folder / 'in'), '--run_dir', str(folder / 'run')]) == 0
    return folder


@pytest.mark.parametrize('kind', ['native', 'safetensors'])
def test_the_files_beside_the_weights_come_back_byte_for_byte(kind, instruct, tmp_path):
    assert main(['export', '--run_dir', str(instruct / 'run'), '--format', kind, '--out', str(tmp_path / 'out')]) == 0
    for name in (*FILES, 'tokenizer.json'):
        assert (tmp_path / 'out' / name).read_bytes() == (instruct / 'in' / name).read_bytes()
    assert main(['import', str(tmp_path / 'out'), '--run_dir', str(tmp_path / 'again')]) == 0
    assert lm.load(str(tmp_path / 'again')).companions == lm.load(str(instruct / 'run')).companions


def test_texts_end_with_each_token_of_the_generation_config(instruct):
    run = lm.load(str(instruct / 'run'))
    assert set(run.end_ids) == {0, 2}
    assert run.end_ids[0] == run.tokenizer.eod_id


def test_a_list_of_ends_in_the_config_alone_is_kept(tmp_path):
    write_llama(tmp_path / 'in', eos_token_id=[5, 7])
    assert main(['import', str(tmp_path / 'in'), '--run_dir', str(tmp_path / 'run')]) == 0
    found = json.loads((tmp_path / 'run' / 'checkpoint_files' / 'generation_config.json').read_text())
    assert found == {'eos_token_id': [5, 7]}


def test_names_of_special_tokens_are_text_unless_asked(instruct):
    tokenizer, text = load(instruct / 'run'), 'a<|stop|> <|start|>'
    assert not set(tokenizer.encode(text)) & set(tokenizer.special_ids)
    ids = tokenizer.encode_marked(text)
    assert [i for i in ids if i in tokenizer.special_ids] == [2, 3]
    assert tokenizer.decode(ids) == 'a '


def test_any_tokenizer_encodes_special_tokens(tokens):
    tokenizer = TokenStore.open(str(tokens)).tokenizer()
    end = tokenizer.piece(tokenizer.eod_id)
    ids = tokenizer.encode_marked(f'ab{end}c{end}')
    plain = [tokenizer.encode(part).tolist() for part in ('ab', 'c')]
    assert ids.tolist() == [*plain[0], tokenizer.eod_id, *plain[1], tokenizer.eod_id]
    assert tokenizer.encode_marked('').tolist() == []


def test_conversations_in_all_forms_are_the_same_messages():
    turns = [{'from': 'human', 'value': 'a'}, {'from': 'gpt', 'value': 'b'}]
    expected = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]
    assert read_messages({'conversations': turns}) == read_messages({'messages': expected}) == expected
    assert read_messages({'instruction': 'a', 'input': '', 'output': 'b'}) == expected
    assert read_messages({'instruction': 'a', 'input': 'x', 'output': 'b'})[0]['content'] == 'a\n\nx'
    for wrong in ([], {}, {'messages': []}, {'messages': [{'role': 'user'}]}, {'messages': ['a']}):
        with pytest.raises(ValueError, match=r'no |none of |without'):
            read_messages(wrong)


def test_answers_are_found_in_the_text_of_the_template(instruct):
    pytest.importorskip('jinja2')
    chat = ChatTemplate.read(str(instruct / 'run'), 'x')
    text, spans = chat.find_answers(MESSAGES)
    assert text.startswith('<|begin|><|start|>user\nhello')
    assert [text[a:b] for a, b in spans] == ['the whale<|stop|>\n', 'the ship<|stop|>\n']
    with pytest.raises(ValueError, match='no answer'):
        chat.find_answers(MESSAGES[:1])
    for text in ('{{ raise_exception("no tools") }}', '{{ messages[9].content.x }}'):
        with pytest.raises(ValueError, match='the chat template refuses it'):
            ChatTemplate(text, {}, 'here').render(MESSAGES)
    with pytest.raises(ConfigError, match='is no chat template'):
        ChatTemplate('{% for', {}, 'here')


def test_the_default_one_of_several_templates_counts(tmp_path):
    several = [{'name': 'tool_use', 'template': 'a'}, {'name': 'default', 'template': 'b'}]
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps({'chat_template': several}))
    assert find_template(tmp_path) == 'b'
    (tmp_path / 'chat_template.jinja').write_text('c')
    assert find_template(tmp_path) == 'c'


@pytest.fixture(scope='module')
def conversations(instruct):
    """Returns a token store of conversations, one of which is no conversation."""
    pytest.importorskip('jinja2')
    rows = [{'messages': MESSAGES}] * 20 + [{'text': 'x'}]
    for split in ('train', 'validation'):
        (instruct / f'{split}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    settings = {
        'prepare.source': '@conversations()', 'conversations.path': instruct, 'prepare.tokenizer': '@tokenizer()',
        'tokenizer.model_path': instruct / 'run', 'data.path': instruct / 'store',
    }  # fmt: skip
    flags = [word for name, value in settings.items() for word in ('--set', f'{name}={value}')]
    for more in ([], ['--prove', '1']):
        assert main(['prepare', '--processes', '1', *flags, *more]) == 0
    return TokenStore.open(str(instruct / 'store'))


def test_a_store_of_conversations_says_what_is_predicted(conversations):
    tokenizer, length = conversations.tokenizer(), int(conversations.document_ends('train', 0, 1)[0])
    assert conversations.documents('train') == 20
    ids, marked = (read('train', [0], length)[0] for read in (conversations.read_many, conversations.read_marked))
    np.testing.assert_array_equal(np.where(marked < 0, ~marked, marked), ids)
    assert tokenizer.decode(ids[marked >= 0]) == 'the whale\nthe ship\n'
    assert [i for i in ids if i in tokenizer.special_ids] == [1, 3, 2, 2, 3, 2, 3, 2, 3, 2, tokenizer.eod_id]
    conversations.verify('train')
    inputs, targets, counted = next_answer(marked[None])
    np.testing.assert_array_equal(inputs[0], ids[:-1])
    np.testing.assert_array_equal(targets[0], ids[1:])
    assert tokenizer.decode(np.asarray(targets)[np.asarray(counted)]) == 'the whale\nthe ship\n'


@pytest.mark.slow
def test_training_from_an_import_learns_answers_alone(conversations, instruct, tmp_path):
    run = instruct / 'run'
    settings = {
        'train.init_from': f'{run}', 'data.path': conversations.path, 'train.steps': 8, 'train.context_length': 32,
        'train.tokens_per_step': 256, 'train.log_every': 1, 'optimizer.peak_learning_rate': 0.01,
        'optimizer.warmup_steps': 1, 'train.eval_every': None, 'train.tensorboard': False,
    }  # fmt: skip
    flags = [word for name, value in settings.items() for word in ('--set', f'{name}={value}')]
    gin = ['--gin_file', str(run / 'config.gin')]
    assert main(['train', '--run_dir', str(tmp_path / 'tuned'), *gin, *flags]) == 0
    losses = [json.loads(line).get('loss') for line in (tmp_path / 'tuned' / 'metrics.jsonl').read_text().splitlines()]
    losses = [loss for loss in losses if loss is not None]
    assert losses[-1] < losses[0] - 1
    assert lm.load(str(tmp_path / 'tuned')).companions == lm.load(str(run)).companions
