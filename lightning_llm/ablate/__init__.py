"""Controlled comparisons: paired runs of a baseline and its variants, and what their differences say."""
