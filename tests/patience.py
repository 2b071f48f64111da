"""How long a test waits for another process: until it surely hangs, since a loaded machine is slow and not wrong."""

HANGS_S = 1800
