"""Benches: each file measures one thing and yields rows; ``harness`` writes, tabulates and draws them."""
