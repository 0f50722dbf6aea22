#!/usr/bin/env bash
# A table of a paper in small: two rows. It is stopped on the way, and half of its runs are lost. The same command makes the
# same table.
source "$(dirname "$0")/words.sh"

write_text texts
command=(lm reproduce polysketchformer/table_2 --scale tiny --rows 1-2 --columns 1 --text texts --no_pictures
  --set model.n_layers=1 --set model.vocab_size=400 --set tokenizer.vocab_size=400 --set train.steps=300
  --set train.log_every=1 --set train.tokens_per_step=128 --set optimizer.warmup_steps=1 --set train.eval_tokens=1024)
runs=runs/reproduce/polysketchformer/table_2/tiny
softmax=exact_softmax-using-flashattention_512_seed-0 polynomial=exact_polynomial-deg-2_512_seed-0

step 'its price'
expect "${command[@]}" --price
shows 'total of 2 of 2 runs' 'prepared in under a minute'
is_gone runs

step 'it is stopped in the second run'
interrupt TERM $runs/$polynomial 20 "${command[@]}"
equal "$code" 42

step 'it goes on'
expect "${command[@]}"
shows "$softmax  [done]" "$polynomial  [interrupted]" '13.57 / ' '13.84 / ' 'may rank otherwise'
is_there $runs/table/report.md $runs/table/report.html
cp $runs/table/table.csv first.csv

step 'half of the runs are lost'
rm -r ${runs:?}/$polynomial $runs/table
expect "${command[@]}"
shows "$softmax  [done]" "$polynomial  [waiting]"
equal "$(cat $runs/table/table.csv)" "$(cat first.csv)"
