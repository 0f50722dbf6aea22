#!/usr/bin/env bash
# Prepare, train, move the folders, evaluate: from other places and with other names, and each error names the way on.
source "$(dirname "$0")/words.sh"

write_text texts
write_experiment tiny.gin texts "the tokens"

step 'prepare and train'
expect lm prepare --gin_file tiny.gin --processes 1
expect lm train --gin_file tiny.gin --run_dir "my runs/first"
expect lm evaluate --run_dir "my runs/first" --json
loss=$(figure loss)

step 'evaluate after the tokens have moved'
mkdir disk
mv "the tokens" disk/tokens
refuse 44 lm evaluate --run_dir "my runs/first"
shows "the tokens" "--set data.path="
expect lm evaluate --run_dir "my runs/first" --set data.path=disk/tokens --json
equal "$(figure loss)" "$loss"

step 'evaluate a run that was copied to another place'
cp -R "my runs" disk/copies
mv "my runs" "old runs"
expect lm evaluate --run_dir disk/copies/first --set data.path=disk/tokens --json
equal "$(figure loss)" "$loss"
expect lm generate --run_dir disk/copies/first --set data.path=disk/tokens --prompt 'def ' --max_tokens 8
expect lm inspect disk/copies/first
shows 'finished, step 40 of 40'

step 'evaluate from another working folder'
mkdir elsewhere
cd elsewhere
refuse 44 lm evaluate --run_dir ../disk/copies/first
shows "--set data.path="
expect lm evaluate --run_dir ../disk/copies/first --set data.path=../disk/tokens --json
equal "$(figure loss)" "$loss"

step 'go on with the training there'
refuse 2 lm train --run_dir ../disk/copies/first
shows "write \"$(cd .. && pwd)/disk/copies/first\""
copied=$(cd ../disk/copies/first && pwd)
refuse 44 lm train --run_dir "$copied"
shows "--set data.path="
expect lm train --run_dir "$copied" --set data.path=../disk/tokens
shows 'resumed from step 40'
