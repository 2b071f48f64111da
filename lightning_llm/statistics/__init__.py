"""Statistics of paired comparisons: estimates, looks, verdicts. numpy and scipy only."""
