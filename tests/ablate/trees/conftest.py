"""A user's repository with unusual files, whose bytes no test may change, and the store that reads it."""

import hashlib
import os
import stat
import subprocess
from pathlib import Path

import pytest

from lightning_llm.ablate.trees.problems import WORKING_TREE, problems
from lightning_llm.ablate.trees.repository import Repository
from lightning_llm.ablate.trees.store import Trees

IDENTITY = {f"GIT_{role}_{part}": f"{part}@x" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
UNUSUAL = ["with blank", "new\nline", os.fsdecode(b"latin-\xe4"), '"quoted"', ":(top)magic", "-option", "ünïcode"]


@pytest.fixture(autouse=True)
def _user(tmp_path, monkeypatch):
    """His configuration; and variables of a git hook, which must not reach git."""
    (tmp_path / "gitconfig").write_text('[protocol "file"]\n\tallow = always\n[init]\n\tdefaultBranch = main\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))


def git(folder, *words):
    kept = {name: value for name, value in os.environ.items() if name.startswith("GIT_CONFIG") or name[:3] != "GIT"}
    command = ["git", "-c", "protocol.file.allow=always", "-C", str(folder), *words]
    done = subprocess.run(command, env={**kept, **IDENTITY}, capture_output=True, check=True)
    return os.fsdecode(done.stdout).removesuffix("\n")


def put(folder, files):
    """Files by name; a content of None deletes."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


def commit(folder, files, message="more"):
    put(folder, files)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", message)


def content_of(folder, without=()):
    """Type, permissions and content of everything below a folder."""
    found = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if os.path.relpath(os.path.join(parent, name), folder) not in without]
        for name in (*folders, *names):
            path = Path(parent, name)
            status = path.lstat()
            content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
            found[os.path.relpath(path, folder)] = (status.st_mode, content)
    return found


def files_of(folder):
    """Content of the files and links of a folder, without its ``.git``, and whether a file is executable."""
    return {
        path: (content, bool(mode & stat.S_IXUSR and not stat.S_ISLNK(mode)))
        for path, (mode, content) in content_of(folder, [".git"]).items()
        if not stat.S_ISDIR(mode)
    }


@pytest.fixture
def his(tmp_path):
    """The user's repository: two commits, a hook and a filter that would write, and a file that is ignored."""
    root = tmp_path / "his"
    root.mkdir()
    git(root, "init", "--quiet")
    files = {"train.py": "lr = 1\n", "src/model.py": "width = 8\n", "src/old.py": "", ".gitignore": "*.bin\nout/\n"}
    commit(root, {**files, **dict.fromkeys(UNUSUAL, "text"), "run.sh": "#!/bin/sh\n"}, "first")
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("src/model.py")
    (root / "outside").symlink_to("/nowhere")
    commit(root, {"train.py": "lr = 2\n"}, "second")
    put(root, {"data.bin": "data", "src/data/a.bin": "a", "src/data/b.bin": "b"})
    return root


@pytest.fixture
def ours(his, tmp_path):
    """``ours(folder)``: the trees for a user who stands there. At the end, all of his files have the same bytes."""
    before = {}

    def make(folder=his, excluded=()):
        top = Path(git(folder, "rev-parse", "--show-toplevel"))
        before.update({top: content_of(top), his: content_of(his)})
        return Trees.make(Repository.of(folder), tmp_path / "trees", excluded)

    yield make
    for root, content in before.items():
        assert content_of(root) == content


def found(trees, old, new, has_setup=False, command=("python", "train.py"), new_name=WORKING_TREE):
    return problems(trees, old, new, old_name="HEAD", new_name=new_name, has_setup=has_setup, command=command)


def pointer(content):
    digest = hashlib.sha256(content).hexdigest()
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(content)}\n".encode()


def with_lfs(his, content, is_stored=True):
    """A file as git-lfs has it: git has the pointer, the user the content."""
    git(his, "config", "--global", "filter.lfs.clean", "false")
    git(his, "config", "--global", "filter.lfs.required", "true")
    git(his, "config", "filter.lfs.clean", "cat")
    commit(his, {".gitattributes": "*.npy filter=lfs\n", "a.npy": pointer(content), "old.npy": pointer(b"not fetched")})
    if is_stored:
        digest = hashlib.sha256(content).hexdigest()
        put(his, {f".git/lfs/objects/{digest[:2]}/{digest[2:4]}/{digest}": content, "a.npy": content})
    git(his, "config", "--unset", "filter.lfs.clean")


@pytest.fixture
def with_submodule(his, tmp_path):
    """The user's repository with a submodule that has a submodule."""
    for name in ("inner", "outer"):
        (tmp_path / name).mkdir()
        git(tmp_path / name, "init", "--quiet")
        commit(tmp_path / name, {f"{name}.py": "1"})
    git(tmp_path / "outer", "submodule", "--quiet", "add", str(tmp_path / "inner"), "deep")
    commit(tmp_path / "outer", {})
    git(his, "submodule", "--quiet", "add", str(tmp_path / "outer"), "third party")
    git(his, "submodule", "--quiet", "update", "--init", "--recursive")
    commit(his, {})
    commit(his / "third party", {"outer.py": "2"})
    return his
