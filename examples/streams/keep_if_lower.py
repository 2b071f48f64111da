"""Which ideas of a stream would have been kept if one pair decided, and an experiment that compares both baselines.

    python examples/streams/keep_if_lower.py runs/parts 3 > both.yaml
    lightning-llm ablate run both.yaml

Each idea is kept if one of its pairs, here the third, has a lower loss. The experiment has the stream's first baseline,
and as variants the ideas that the stream has adopted, and those that are kept so; its seeds are in no stream.
"""

import sys
from pathlib import Path
from typing import Any

import yaml

from lightning_llm.ablate.idea_runs import evidence_of
from lightning_llm.ablate.plan import Plan
from lightning_llm.ablate.results import losses_of, results_of
from lightning_llm.ablate.stream import FIRST, Stream, stop_of

FRESH = 90_000_000


def difference(plan: Plan, pair: int) -> float:
    """The difference of a pair of an idea, from 1."""
    return evidence_of(plan.experiment, stop_of(plan), losses_of(results_of(plan))).differences[pair - 1]


def experiment(out: Path, pair: int) -> dict[str, Any]:
    """The experiment of a stream, as a file has it."""
    stream = Stream.read(out)
    adopted: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    count = 0
    for verdict in stream.verdicts:
        is_lower = difference(Plan.read(stream.folder(verdict)), pair) < 0
        adopted |= verdict.options if verdict.is_adopted else {}
        kept |= verdict.options if is_lower else {}
        count += is_lower
        print(f"{verdict.place:3} {verdict.name:30} {verdict.verdict:12} {is_lower}", file=sys.stderr)
    print(f"pair {pair} is lower for {count} of {len(stream.verdicts)} ideas", file=sys.stderr)
    variants = {name: options for name, options in {"adopted": adopted, "kept_if_lower": kept}.items() if options}
    content = {"name": f"{out.name}-pair-{pair}", "baseline": str(out / FIRST), "variants": variants, "match": "flops"}
    return {**content, "looks": [8], "seeds": {"first": FRESH}}


if __name__ == "__main__":
    print(yaml.safe_dump(experiment(Path(sys.argv[1]), int(sys.argv[2])), sort_keys=False), end="")
