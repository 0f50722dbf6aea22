#!/usr/bin/env bash
# A model is converted to a hybrid by the study's script: layers chosen by recall, both stages, text and needles. The same
# command again trains nothing, and the student generates.
# slow: two stages and four measurements
source "$(dirname "$0")/words.sh"

write_text texts
write_experiment tiny.gin texts tokens
for folder in train validation held_out; do
  mkdir -p "own/$folder"
  cat texts/*/* >"own/$folder/a.txt" 2>/dev/null || cat texts/* >"own/$folder/a.txt"
done
export LM=lm LENGTH=64 FULL=1 WINDOW=16 CHOICE_TOKENS=512 ALIGN_STEPS=10 DISTILL_STEPS=10 SAMPLES=1
convert=("$root/configs/papers/study/distill/real_teacher.sh" "$PWD/teacher" "$PWD/own" "$PWD/out")

step 'a teacher'
expect lm prepare --gin_file tiny.gin --processes 1
expect lm train --gin_file tiny.gin --run_dir teacher

step 'its conversion'
expect "${convert[@]}"
shows '| right, nats |' out/student
is_there out/align/pattern.gin out/student/checkpoints/10

step 'the same command again'
records out/student >before
expect "${convert[@]}"
equal "$(records out/student)" "$(cat before)"

step 'the student writes'
expect lm generate --run_dir out/student --prompt 'def ' --max_tokens 4
