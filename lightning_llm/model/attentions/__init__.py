"""Attention from recent papers, a file for each; all derive from, or call, what is in ``model/attention.py``."""
