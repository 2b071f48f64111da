"""The command line, a thin layer: ``commands.py`` lists the commands, ``train.py`` has those of Lightning's Trainer."""
