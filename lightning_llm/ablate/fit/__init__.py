"""``fit`` as the program of an experiment: how its variants are read, compared, matched, planned and run."""
