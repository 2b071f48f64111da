"""The user's repository, found from a folder in it."""

from dataclasses import dataclass
from pathlib import Path

from lightning_llm.ablate.trees.git import GitError, git, text_of
from lightning_llm.io.untrusted import printable


@dataclass(frozen=True)
class Repository:
    """The user's repository.

    Attributes:
        root: The top of its working tree.
        git_dir: Its ``.git``; in a linked worktree, the folder that the ``.git`` file names.
        prefix: The folder below ``root`` where the user stands; empty: he stands in ``root``.
    """

    root: Path
    git_dir: Path
    prefix: str

    @classmethod
    def of(cls, folder: Path) -> "Repository":
        """The repository that a folder is in.

        Raises:
            ValueError: There is none that can be used: no git, no working tree, no commit, or another owner.
        """
        folder = folder.absolute()
        try:
            if text_of(git(folder, "rev-parse", "--is-inside-work-tree")) != "true":
                raise ValueError(f"{folder} is in a bare repository or in .git: go to a folder with its files")
        except GitError as error:
            if "dubious ownership" in str(error):
                advice = f"git config --global --add safe.directory {folder.resolve()}"
                raise ValueError(f"{folder} is in a repository of another user. Run {advice}") from None
            if "not a git repository" in str(error):
                raise ValueError(f"{folder} is in no git repository: go to a checkout of one") from None
            raise
        paths = [text_of(git(folder, "rev-parse", word)) for word in ("--show-toplevel", "--absolute-git-dir")]
        prefix = text_of(git(folder, "rev-parse", "--show-prefix")).removesuffix("/")
        try:
            "\n".join([*paths, prefix]).encode()
        except UnicodeEncodeError:
            raise ValueError(f"the path of {printable(paths[0])} is not UTF-8: rename the folder") from None
        try:
            git(folder, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
        except GitError:
            raise ValueError(f"the repository {paths[0]} has no commit: commit the baseline first") from None
        return cls(Path(paths[0]), Path(paths[1]), prefix)
