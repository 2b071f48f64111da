"""The command line: one file per command; ``train.py`` holds the four that Lightning's Trainer runs."""
