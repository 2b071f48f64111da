"""Names of variants within a sentence."""

from lightning_llm.ablate.names import BASELINE, titled


def test_the_baseline_has_an_article_and_a_variant_its_name():
    assert (titled(BASELINE), titled("gelu")) == ("the baseline", "gelu")
