"""A command line parser that answers a mistake in one line."""

import argparse
from typing import NoReturn

USER_ERROR = 2


class OneLineParser(argparse.ArgumentParser):
    """``argparse`` without the whole usage in front of each error. Options are not abbreviated."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """One line, and status 2."""
        self.exit(USER_ERROR, f"{self.prog}: error: {message}; {self.prog} --help explains\n")
