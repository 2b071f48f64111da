#!/bin/sh
# Try the ideas of a file one after another: a reason, a tab, and an option on each line. The same command continues.
#   sh examples/streams/run.sh runs/parts examples/streams/parts.tsv
while IFS="$(printf '\t')" read -r because idea; do
  lightning-llm ablate try "$1" --baseline configs/shakespeare-char.yaml --data.corpus stdlib --size 100k \
    --trainer.max_steps 250 --trainer.limit_val_batches 40 --vary "$idea" --because "$because"
  case $? in
    0 | 2 | 3) ;; # decided, now or before
    *) exit ;; # a run failed, or Ctrl-C: the idea has no verdict yet
  esac
done < "$2"
lightning-llm ablate report "$1"
