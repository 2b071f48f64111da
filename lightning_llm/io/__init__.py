"""Files and terminals: atomic writing, checks of what strangers wrote, printable text. No torch."""
