#!/usr/bin/env bash
# Train, kill, resume, evaluate, export, import: the loss is the same at each station.
source "$(dirname "$0")/words.sh"

write_text texts
write_experiment tiny.gin texts "the tokens"
more=(--set train.steps=120)

step prepare
expect lm prepare --gin_file tiny.gin --processes 1

step 'train without interruption'
expect lm train --gin_file tiny.gin "${more[@]}" --run_dir "my runs/whole"
shows 'done: 120 steps'

step 'train, and stop it in three ways'
interrupt KILL runs/stopped 15 lm train --gin_file tiny.gin "${more[@]}" --run_dir runs/stopped
interrupt INT runs/stopped 35 lm train --gin_file tiny.gin "${more[@]}" --run_dir runs/stopped
equal "$code" 42
shows 'run the same command again'
interrupt TERM runs/stopped 75 lm train --gin_file tiny.gin "${more[@]}" --run_dir runs/stopped
equal "$code" 42
expect lm inspect runs/stopped
shows 'not finished' 'resumed'

step 'resume it to the end'
expect lm train --gin_file tiny.gin "${more[@]}" --run_dir runs/stopped
shows 'resumed from step' 'done: 120 steps'
equal "$(records runs/stopped)" "$(records 'my runs/whole')"

step evaluate
expect lm evaluate --run_dir "my runs/whole" --json
loss=$(figure loss)
expect lm evaluate --run_dir runs/stopped --json
equal "$(figure loss)" "$loss"

step export
expect lm export --run_dir runs/stopped --out "exports/the model"
is_there "exports/the model/model.safetensors"

step 'stop an export at its proof, and run it again'
proven=(lm export --run_dir runs/stopped --out exports/proven --prove)
begin "${proven[@]}"
until_there exports/proven/model.safetensors
stop INT
equal "$code" 130
shows 'interrupted'
is_gone exports/proven/model.safetensors
expect "${proven[@]}"
is_there exports/proven/model.safetensors

step 'import, and measure the same loss'
expect lm import "exports/the model" --run_dir runs/imported
refuse 2 lm evaluate --run_dir runs/imported # an import knows no data
shows '--set data.path='
expect lm evaluate --run_dir runs/imported --set "data.path=the tokens" --json
equal "$(figure loss)" "$loss"
