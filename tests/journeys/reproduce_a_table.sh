#!/usr/bin/env bash
# A table of a paper in small: two rows, then half of the runs are lost, and the same command makes the same table.
source "$(dirname "$0")/words.sh"

write_text texts
command=(lm reproduce polysketchformer/table_2 --scale tiny --rows 1-2 --columns 1 --text texts --no_pictures
  --set model.n_layers=1 --set model.vocab_size=400 --set tokenizer.vocab_size=400 --set train.steps=4
  --set train.tokens_per_step=256 --set optimizer.warmup_steps=1 --set train.eval_tokens=1024)

step 'its price'
expect "${command[@]}" --price
shows 'total of 2 of 2 runs' 'prepared in under a minute'
is_gone runs

step 'the table'
expect "${command[@]}"
shows '13.57 / ' '13.84 / ' 'may rank otherwise'
runs=runs/reproduce/polysketchformer/table_2/tiny
cp $runs/table/table.csv first.csv

step 'half of the runs are lost'
rm -r $runs/exact_polynomial-deg-2_512_seed-0 $runs/table
expect "${command[@]}"
equal "$(cat $runs/table/table.csv)" "$(cat first.csv)"
shows 'exact_softmax-using-flashattention_512_seed-0  [done]'
is_there $runs/table/report.md $runs/table/report.html
