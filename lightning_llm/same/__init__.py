"""``same``: the settings of a training step that are compared, and how each of them is run."""
