"""Names of the variants that every experiment has, besides its own. The baseline counts as a variant."""

BASELINE, AGAIN, NULL = "baseline", "baseline-again", "null"


def titled(name: str) -> str:
    """The name of a variant within a sentence."""
    return f"the {name}" if name == BASELINE else name
