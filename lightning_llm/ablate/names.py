"""Names of the variants that an experiment has besides its own, and of the file that marks its folder.

The baseline counts as a variant.

``baseline-again`` is the first seed of the baseline once more: its bits must repeat, and how far they do is a *replay*.
``null`` is the baseline with other initial values of some part: only chance differs, so its spread is the noise. Not
every program can make one; that of ``fit`` is ``ablate.fit.null_variant``.
"""

BASELINE = "baseline"
AGAIN = "baseline-again"
NULL = "null"
PLAN = "plan.json"  # in the folder of an experiment
STREAM = "stream.json"  # in the folder of a stream, whose ideas are experiments below it
NEGATED = "-"  # before the name of a metric of which higher is better
ADOPTED, REJECTED, STOPPED = VERDICTS = ("adopted", "rejected", "stopped")  # on ideas


def titled(name: str) -> str:
    """The name of a variant within a sentence."""
    return f"the {name}" if name == BASELINE else name
