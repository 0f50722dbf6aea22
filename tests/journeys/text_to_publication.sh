#!/usr/bin/env bash
# Two machines prepare while a bit of a part flips, prove the store, train with a secret, generate, publish, import.
source "$(dirname "$0")/words.sh"

write_text texts
write_experiment tiny.gin texts tokens
PLANTED=planted-$RANDOM-key

step 'two shares, between which a bit of a part flips'
prepare=(lm prepare --gin_file tiny.gin --processes 1)
expect "${prepare[@]}" --set data.path=undisturbed
expect "${prepare[@]}" --shard 0/2
python - <<'P'
import pathlib
file = sorted(pathlib.Path('tokens/parts').rglob('*.tokens'))[0]
content = bytearray(file.read_bytes())
content[len(content) // 2] ^= 1
file.write_bytes(content)
P
expect "${prepare[@]}" --shard 1/2
shows 'is damaged or gone: this shard is made again'
expect lm inspect tokens --verify
fingerprint() { python -c "import json; print(json.load(open('$1/dataset.json'))['fingerprint'])"; }
equal "$(fingerprint tokens)" "$(fingerprint undisturbed)"
expect "${prepare[@]}" --prove 1
shows 'the source is the same, and so are the tokens'

step 'a training that reports to a secret address'
expect lm train --run_dir run --gin_file tiny.gin --set train.steps=8 --set 'train.trackers=[@webhook()]' \
  --gin_param "webhook.url = 'http://127.0.0.1:9/$PLANTED'"

step 'a text that ends before another one'
expect lm generate --run_dir run --prompt 'the' --max_tokens 8 --stop $'\n\n' --json
shows '"tokens"'

step 'a folder to publish'
expect lm export --run_dir run --format safetensors --out published
expect lm report run --out report --no_pictures
equal "$(grep -rl "$PLANTED" run published report || echo none)" none
expect lm import published --run_dir imported
echo mine >notes.txt && mkdir mine && mv notes.txt mine/runs.csv
refuse 2 lm report imported --out mine --no_pictures
equal "$(cat mine/runs.csv)" mine
