"""Does the work of a notebook in thirty lines: loads a run, scores a text, and plots the loss by position.

python scripts/notebook.py runs/quickstart README.md loss.png       needs the extra [report] for the picture
"""

import pathlib
import sys

import matplotlib
import numpy as np

import lm

matplotlib.use('Agg')
from matplotlib import pyplot as plt

run_dir, text_file, picture = sys.argv[1:4]
run = lm.load(run_dir)
print(f'step {run.step} of {run.directory.path.name}: {run.experiment.model.n_layers} layers')

scores = run.score(pathlib.Path(text_file).read_text(encoding='utf-8'))
print(f'{len(scores.tokens)} tokens, {scores.nats.mean():.4f} nats each, {scores.bits_per_byte:.4f} bits per byte')
worst = np.argsort(scores.nats)[-5:][::-1]
print('least expected:', [(run.tokenizer.decode([scores.tokens[i]]), round(float(scores.nats[i]), 2)) for i in worst])

result = lm.evaluate(run, batch_size=8)
print(f'{result["split"]}: perplexity {result["perplexity"]:.3f} per token')
buckets = result['loss_by_position']
plt.plot([b['start'] + 1 for b in buckets], [b['loss'] for b in buckets], marker='o')
plt.xscale('log')
plt.xlabel('position in the context')
plt.ylabel('nats per token')
plt.savefig(picture)

print(lm.generate(run, 'def main(', max_tokens=40, temperature=0.8))
