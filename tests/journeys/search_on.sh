#!/usr/bin/env bash
# Prepare too little text, prepare it again, search, meet refused trials, ask for more trials.
source "$(dirname "$0")/words.sh"

write_text texts
write_experiment tiny.gin texts tokens

step 'a file whose held-out share is empty, and another share'
for i in 1 2 3 4 5 6 7 8 9 10; do
  text=$(for _ in $(seq 30); do printf 'word%s again some text ' "$i"; done)
  printf '{"text": "%s"}\n' "$text" >>ten.jsonl
done
of_ten=(lm prepare --gin_file data/jsonl.gin --processes 1 --set jsonl.path=ten.jsonl --set data.path=ten
  --set tokenizer.vocab_size=300)
refuse 2 "${of_ten[@]}"
shows 'jsonl.validation_fraction = 0.05' "no document is left to the split 'validation'"
expect "${of_ten[@]}" --set jsonl.validation_fraction=0.5

step 'a search that meets refused trials'
expect lm prepare --gin_file tiny.gin --processes 1
echo 'optimizer.warmup_steps = integers(1, 5)' >space.gin # of four steps, 4 and 5 are refused
search=(lm sweep --search random --seed 5 --run_dir searched --gin_file tiny.gin --set train.steps=4
  --sweep_file space.gin)
expect "${search[@]}" --trials 3
shows 'failed (2)' 'the best is'

step 'more trials'
expect "${search[@]}" --trials 4
shows 'the best is'
expect lm sweep --status --run_dir searched
shows 'trial-0003'
