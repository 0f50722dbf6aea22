"""An export with the programs that train models of `transformers`: Trainer, peft and trl; needs PyTorch:
`scripts/test.sh -m interop`."""

import numpy as np
import pytest
import shapes
from mechanisms_list import MECHANISMS, QUICK

from lm.interop.formats import FORMATS

pytestmark = pytest.mark.interop
torch = pytest.importorskip('torch', reason='needs PyTorch: scripts/test.sh -m interop')
transformers = pytest.importorskip('transformers', reason='needs transformers: scripts/test.sh -m interop')
FORMS = [*QUICK, 'polysketch gate', 'window_linear', 'retention', 'llops']


@pytest.fixture(params=FORMS)
def model(request, tmp_path):
    return load(request.param, tmp_path)


@pytest.fixture
def softmax(tmp_path):
    return load('softmax', tmp_path)


@pytest.fixture
def ids():
    return torch.tensor(np.random.default_rng(2).integers(1, 97, (16, 12)))


def load(form, folder, **changes):
    """Returns the model of an export with random weights."""
    config = shapes.experiment(MECHANISMS[form], n_layers=2, **changes)
    FORMATS['huggingface'].write(shapes.run_of(config, shapes.random_weights(config)), folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


def train(model, ids, folder, batch, accumulated, **options):
    """Trains for some steps; returns what was logged of the first."""
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulated, report_to=[],
        use_cpu=True, logging_steps=1, save_strategy='no', disable_tqdm=True, max_grad_norm=1e9, seed=1,
        **{'max_steps': 1, 'learning_rate': 0.0, **options},
    )  # fmt: skip
    data = [{'input_ids': row, 'labels': row} for row in ids]
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    return trainer.state.log_history


def test_accumulation_changes_neither_loss_nor_gradient(softmax, ids, tmp_path):
    logs = [train(softmax, ids, tmp_path / 'out', *sizes)[0] for sizes in ((8, 1), (2, 4), (1, 8))]
    for name in ('loss', 'grad_norm'):
        np.testing.assert_allclose([log[name] for log in logs], logs[0][name], rtol=1e-6)


def test_an_adapter_learns(model, ids, tmp_path):
    peft = pytest.importorskip('peft', reason='needs peft: scripts/test.sh -m interop')
    before = {name: x.clone() for name, x in model.state_dict().items()}
    config = peft.LoraConfig(r=4, target_modules='all-linear', task_type='CAUSAL_LM')
    adapted = peft.get_peft_model(model, config)
    log = train(adapted, ids[:4], tmp_path / 'out', 4, 1, max_steps=8, learning_rate=0.03)
    losses = [line['loss'] for line in log if 'loss' in line]
    assert losses[-1] < losses[0]
    merged = adapted.merge_and_unload()
    assert merged.state_dict().keys() == before.keys()
    trained = [name for name, x in merged.state_dict().items() if not torch.equal(x, before[name])]
    assert trained
    assert not [name for name in trained if name.startswith(('embedding', 'head'))]


def test_trl_tunes_an_export(softmax, ids, tmp_path):
    trl = pytest.importorskip('trl', reason='needs trl: scripts/test.sh -m interop')
    datasets = pytest.importorskip('datasets', reason='needs datasets: scripts/test.sh -m interop')
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f'w{i}': i for i in range(97)}, unk_token='w0'))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token='w1', pad_token='w2')
    rows = [' '.join(f'w{i}' for i in row[: 5 + n % 7].tolist()) for n, row in enumerate(ids)]  # rows of many lengths
    config = trl.SFTConfig(
        str(tmp_path / 'out'), max_steps=4, per_device_train_batch_size=4, learning_rate=0.01, report_to=[],
        use_cpu=True, logging_steps=1, save_strategy='no', disable_tqdm=True, bf16=False, gradient_checkpointing=True,
    )  # fmt: skip
    data = datasets.Dataset.from_dict({'text': rows})
    trainer = trl.SFTTrainer(softmax, args=config, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    losses = [line['loss'] for line in trainer.state.log_history if 'loss' in line]
    assert losses[-1] < losses[0]


def test_inputs_and_outputs_of_all_classes(model, ids):
    mask = torch.ones_like(ids[:2])
    mask[1, 5:] = 0  # padding on the right
    with torch.no_grad():
        whole = model(ids[:2], output_hidden_states=True)
        assert [tuple(x.shape) for x in whole.hidden_states] == [(2, 12, 32)] * 3
        torch.testing.assert_close(model.head(whole.hidden_states[-1]), whole.logits)
        same = {'rtol': 0, 'atol': 2e-5 * float(whole.logits.abs().max())}
        torch.testing.assert_close(model(ids[:2], logits_to_keep=3).logits, whole.logits[:, -3:], **same)
        kept = torch.tensor([1, 4])
        torch.testing.assert_close(model(ids[:2], logits_to_keep=kept).logits, whole.logits[:, kept], **same)
        embedded = model(inputs_embeds=model.embedding(ids[:2]))
        torch.testing.assert_close(embedded.logits, whole.logits, **same)
        padded = model(ids[:2], attention_mask=mask).logits
        torch.testing.assert_close(padded[0], whole.logits[0], **same)
        torch.testing.assert_close(padded[1, :5], whole.logits[1, :5], **same)
        assert isinstance(model(ids, return_dict=False), tuple)
        assert model(ids, return_dict=None).logits is not None
        written = model.generate(ids[:2, :6], max_new_tokens=4, do_sample=False)
        again = model.generate(inputs_embeds=model.embedding(ids[:2, :6]), max_new_tokens=4, do_sample=False)
        assert again.tolist() == written[:, 6:].tolist()
    for wrong, said in (
        ({'no_such_input': 1}, 'no_such_input: this model has no such input'),
        ({'position_ids': torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2]])}, 'a row has several texts'),
        ({'attention_mask': torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1]])}, 'padding inside its text'),
    ):
        with pytest.raises(ValueError, match=said):
            model(ids[:1], **wrong)


def test_recomputed_activations_give_the_same_gradients(model, ids):
    def gradients():
        model.zero_grad()
        model(ids[:2], labels=ids[:2]).loss.backward()
        return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}

    model.train()
    plain = gradients()
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(gradients(), plain)
    assert plain.keys() >= {'embedding.weight', 'layers.0.qkv.weight'}


@pytest.mark.parametrize('form', ['softmax', 'gated_linear', 'polysketch learned local'])
def test_a_compiled_model_computes_the_same(form, ids, tmp_path):
    """The program has no break, so that its whole graph is compiled."""
    model = load(form, tmp_path)
    compiled = torch.compile(model, backend='aot_eager', fullgraph=True)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        torch.testing.assert_close(compiled(ids, attention_mask=mask).logits, expected, rtol=1e-4, atol=1e-4)
