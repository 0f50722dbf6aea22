"""A model of SmolLM2's form comes in, learns conversations by adapters, leaves merged, and is trained on by
`transformers.Trainer`; needs PyTorch: `scripts/test.sh -m interop`."""

import json

import jax
import numpy as np
import pytest

import lm
from lm.cli import main

pytestmark = pytest.mark.interop
torch = pytest.importorskip('torch', reason='needs PyTorch: scripts/test.sh -m interop')
transformers = pytest.importorskip('transformers', reason='needs transformers: scripts/test.sh -m interop')
pytest.importorskip('jinja2')

# SmolLM2-135M with an eighth of its width and a tenth of its layers.
SMOLLM2 = dict(
    hidden_size=72, intermediate_size=192, num_hidden_layers=3, num_attention_heads=9, num_key_value_heads=3,
    max_position_embeddings=128, rope_theta=100_000.0, rms_norm_eps=1e-5, tie_word_embeddings=True, vocab_size=320,
    bos_token_id=1, eos_token_id=2, pad_token_id=2,
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TURNS = [
    {'role': 'user', 'content': 'Where is the whale?'},
    {'role': 'assistant', 'content': 'The whale is below the ship.'},
]
TOKENS = np.arange(48).reshape(2, 24)
LENGTH = 64


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Returns a folder with an Instruct model in `in` and conversations in `chats`."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp('journey')
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([turn['content'] for turn in TURNS] * 9, trainer)
    marks = {'bos_token': '<|im_start|>', 'eos_token': '<|im_end|>', 'chat_template': TEMPLATE}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **marks).save_pretrained(folder / 'in')
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMOLLM2)).save_pretrained(folder / 'in')
    (folder / 'chats').mkdir()
    for split in ('train', 'validation'):
        (folder / 'chats' / f'{split}.jsonl').write_text((json.dumps({'messages': TURNS}) + '\n') * 200)
    return folder


def run(verb, *arguments, **settings) -> None:
    """Runs a command, which succeeds."""
    pairs = (f'{name.replace("__", ".")}={value}' for name, value in settings.items())
    flags = [word for pair in pairs for word in ('--set', pair)]
    assert main([verb, *map(str, arguments), *flags]) == 0


def compute_theirs(folder) -> np.ndarray:
    """Returns the logits of `TOKENS` that `transformers` computes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def compute_ours(run_dir) -> np.ndarray:
    return np.asarray(lm.load(str(run_dir)).model(TOKENS))


def assert_close(ours, theirs) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


def train_on(source, out, steps) -> list[float]:
    """Trains what lies in `source` on the conversation with Trainer, and saves it; returns the losses."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    ids = tokenizer.apply_chat_template(TURNS, return_dict=True)['input_ids']
    arguments = transformers.TrainingArguments(
        str(out), per_device_train_batch_size=4, max_steps=steps, learning_rate=1e-3, report_to=[], use_cpu=True,
        logging_steps=1, save_steps=steps, disable_tqdm=True, seed=1, lr_scheduler_type='constant',
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(source),
        args=arguments,
        train_dataset=[{'input_ids': ids, 'labels': ids}] * 64,
        processing_class=tokenizer,
        data_collator=transformers.default_data_collator,
    )
    # A checkpoint of Trainer in `out` is gone on with.
    trainer.train(resume_from_checkpoint=any(out.glob('checkpoint-*')))
    trainer.save_model(str(out / 'model'))
    return [line['loss'] for line in trainer.state.log_history if 'loss' in line]


def test_a_model_tuned_here_is_tuned_on_by_trainer(folder):
    base, tuned, merged = (folder / name for name in ('base', 'tuned', 'merged'))
    run('import', folder / 'in', '--run_dir', base, train__context_length=LENGTH, train__tokens_per_step=512)
    first = compute_ours(base)
    assert_close(first, compute_theirs(folder / 'in'))
    run(
        *('prepare', '--processes', '1'), prepare__source='@conversations()', conversations__path=folder / 'chats',
        prepare__tokenizer='@tokenizer()', tokenizer__model_path=base, prepare__cleaning='none',
        data__path=folder / 'store',
    )  # fmt: skip
    run(
        *('train', '--run_dir', tuned, '--gin_file', base / 'config.gin'), train__init_from=base,
        train__adapters='@lora()', data__path=folder / 'store', train__steps=10, optimizer__warmup_steps=1,
        optimizer__peak_learning_rate=1e-2, train__log_every=1, train__eval_every=None, train__tensorboard=False,
    )  # fmt: skip
    losses = [json.loads(line).get('loss') for line in (tuned / 'metrics.jsonl').read_text().splitlines()]
    losses = [loss for loss in losses if loss is not None]
    assert losses[-1] < losses[0]
    # Merged and out: transformers computes what the run computes, from files that it can be trained on with.
    run('export', '--run_dir', tuned, '--format', 'native', '--out', merged)
    ours, theirs = compute_ours(tuned), compute_theirs(merged)
    assert_close(ours, theirs)
    assert np.abs(ours - first).max() > 1e-3
    run('import', merged, '--run_dir', folder / 'back')
    jax.tree.map(np.testing.assert_array_equal, lm.load(str(tuned)).weights, lm.load(str(folder / 'back')).weights)
    # Trainer begins at the loss that the adapters have reached, and goes on after a stop.
    began = train_on(merged, folder / 'trained', 2)
    assert len(train_on(merged, folder / 'trained', 4)) == 4
    untuned = train_on(folder / 'in', folder / 'untuned', 1)
    assert began[0] < untuned[0]
    # In again.
    run('import', folder / 'trained' / 'model', '--run_dir', folder / 'again')
    assert_close(compute_ours(folder / 'again'), compute_theirs(folder / 'trained' / 'model'))
    assert np.abs(compute_ours(folder / 'again') - ours).max() > 1e-3
    assert 'im_end' in lm.load(str(folder / 'again')).companions['chat_template.jinja'].decode()
