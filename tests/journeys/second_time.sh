#!/usr/bin/env bash
# The same commands a second time, and somewhat other ones: each error names the way on, and the way works.
source "$(dirname "$0")/words.sh"

write_text texts
write_experiment tiny.gin texts "the tokens"
expect lm prepare --gin_file tiny.gin --processes 1

step 'prepare into the same folder, and then otherwise'
expect lm prepare --gin_file tiny.gin --processes 1
refuse 2 lm prepare --gin_file tiny.gin --processes 1 --set tokenizer.vocab_size=350
shows 'tokenizer.vocab_size'

step 'a second run into the folder of the first one'
expect lm train --gin_file tiny.gin --run_dir "my runs/first"
before=$(records "my runs/first")
refuse 44 lm train --gin_file tiny.gin --run_dir "my runs/first" --set model.n_layers=1
shows 'model.n_layers was 2, now 1' 'a new --run_dir'
expect lm train --run_dir "my runs/first" # the same run, which is complete
equal "$(records "my runs/first")" "$before"

step 'resume with other batches'
refuse 44 lm train --run_dir "my runs/first" --set train.tokens_per_step=512
shows 'train.tokens_per_step was 256, now 512'
expect lm train --run_dir "my runs/first" --set train.microbatches=2 --set evaluate.batch_size=8
equal "$(records "my runs/first")" "$before"

step 'train for more steps'
refuse 44 lm train --run_dir "my runs/first" --set train.steps=60
run_remedy
shows 'resumed from step 40' 'done: 60 steps'
expect lm inspect "my runs/first-60"
shows 'finished, step 60 of 60' 'branch of'

step 'read a run while it trains'
begin lm train --gin_file tiny.gin --set train.steps=100000 --run_dir runs/long
until_step runs/long 30
expect lm evaluate --run_dir runs/long
shows 'perplexity'
expect lm inspect runs/long
shows 'not finished'
refuse 2 lm train --gin_file tiny.gin --set train.steps=100000 --run_dir runs/long
shows 'trains in it'
stop INT
equal "$code" 42

step 'export twice into the same folder'
expect lm export --run_dir "my runs/first" --out "exports/the model"
refuse 2 lm export --run_dir "my runs/first" --out "exports/the model"
shows 'name a new or empty folder'

step 'generate from an export'
refuse 2 lm generate --run_dir "exports/the model" --prompt def
run_remedy
expect lm generate --run_dir runs/the-model --prompt def --max_tokens 4

step 'train on from an import'
refuse 2 lm train --run_dir runs/the-model --gin_file tiny.gin
shows 'train.init_from' 'NEW'
expect lm train --run_dir runs/tuned --gin_file tiny.gin --gin_file runs/the-model/model.gin \
  --gin_param "train.init_from = 'runs/the-model'"
shows 'arrays taken from runs/the-model' 'done: 40 steps'
