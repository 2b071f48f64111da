#!/bin/sh
# Try twenty diffs of examples/any_program/train.py one after another, from the top of a clone. The first line of each
# file is its reason. What is adopted stays in the working tree. The same command continues.
#   sh examples/streams/diffs.sh runs/diffs
for patch in examples/streams/diffs/*.patch; do
  # a patch that is applied already was adopted, or its idea was interrupted
  git apply -C1 "$patch" || git apply -C1 -R --check "$patch" || continue
  lightning-llm ablate try "$1" --read "val loss {number}" --against HEAD --because "$(head -n 1 "$patch")" \
    --command "python examples/any_program/train.py --seed={seed} --max_iters=200 --eval_interval=200"
  case $? in
    0 | 2) ;; # adopted, now or before
    3) git apply -C1 -R "$patch" ;;
    *) exit ;; # a run failed, or Ctrl-C: the idea has no verdict yet
  esac
done
lightning-llm ablate report "$1"
