"""Trees of a git repository: nothing of the user's changes, a folder has what he has, and a run leaves no traces."""

import hashlib
import os
import shutil
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightning_llm.ablate import trees
from lightning_llm.ablate.trees import WORKING_TREE, Repository, Trees, link_signature, remove_folder
from tests.patience import HANGS_S

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


# ---- the user's repository


def test_a_snapshot_is_what_a_commit_of_all_files_would_be(his, ours, tmp_path):
    commit(his, {"deep/old.py": "", "deeper/x/y": "", "conflict": "1"})
    git(his, "checkout", "--quiet", "-b", "other", "HEAD~1")
    commit(his, {"conflict": "2"})
    with pytest.raises(subprocess.CalledProcessError):
        git(his, "merge", "main")
    git(his, "rm", "--quiet", "--cached", "src/model.py")
    put(his, {"staged.py": "1", "train.py": "lr = 3\n", "src/old.py": None, "new": "file", os.fsdecode(b"\xff"): "new"})
    git(his, "add", "staged.py")
    put(his, {"staged.py": "2", "intended.py": "x"})
    git(his, "add", "--intent-to-add", "intended.py")
    (his / "src" / "model.py").chmod(0o755)
    his.joinpath("train.py").touch()
    put(his, {"run.sh": None, "run.sh/inside": "a file became a folder", "with blank": None})
    (his / "with blank").symlink_to("src")
    shutil.rmtree(his / "deep")
    (his / "deep").symlink_to("src")
    shutil.rmtree(his / "deeper")
    put(his, {"deeper": "a folder became a file", "link": None})
    git(his, "init", "--quiet", "embedded")
    commit(his / "embedded", {"file": ""})
    hook = his / ".git" / "hooks" / "post-index-change"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path / 'hook-ran'}\n")
    hook.chmod(0o755)
    trees = ours()
    tree = trees.snapshot()
    assert not (tmp_path / "hook-ran").exists()
    copy = tmp_path / "copy"
    shutil.copytree(his, copy, symlinks=True)
    git(copy, "-c", "core.hooksPath=/dev/null", "add", "--all")
    assert tree == git(copy, "write-tree")
    assert trees.snapshot() == tree
    assert Trees.read(tmp_path / "trees").snapshot() == tree


def test_a_change_that_leaves_size_and_time_is_in_the_snapshot(his, ours):
    """Git compares the file's time with that of the index, which a copy of the index must therefore have."""
    status = his.joinpath("train.py").stat()
    put(his, {"train.py": "lr = 9\n"})
    for path in ("train.py", ".git/index"):
        os.utime(his / path, ns=(status.st_mtime_ns, status.st_mtime_ns))
    git(his, "config", "core.trustctime", "false")
    git(his, "config", "core.checkStat", "minimal")
    trees = ours()
    assert trees.changed_files(trees.tree_of("HEAD"), trees.snapshot()) == ["train.py"]


@pytest.mark.parametrize("mark", ["--assume-unchanged", "--skip-worktree"])
def test_changes_of_files_that_git_does_not_look_at_are_in_the_snapshot(his, ours, mark):
    git(his, "update-index", mark, "train.py")
    put(his, {"train.py": "lr = 4\n"})
    trees = ours()
    assert trees.changed_files(trees.tree_of("HEAD"), trees.snapshot()) == ["train.py"]


def test_excluded_folders_are_not_in_the_snapshot(his, ours, tmp_path):
    put(his, {"runs/a": "", "experiments/lr/plan.json": "", "out/ignored": "", "src/new.py": ""})
    excluded = [his / "runs", his / "experiments" / "lr", his / "out", tmp_path, his / "missing"]
    trees = ours(excluded=excluded)
    assert trees.changed_files(trees.tree_of("HEAD"), trees.snapshot()) == ["src/new.py"]


def worktree(his, tmp_path):
    git(his, "worktree", "add", "--quiet", "--detach", str(tmp_path / "linked"))
    return tmp_path / "linked"


def shallow(his, tmp_path):
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{his}", str(tmp_path / "shallow"))
    return tmp_path / "shallow"


def borrowing(his, tmp_path):
    git(tmp_path, "clone", "--quiet", "--shared", str(his), str(tmp_path / "bor:row\\ing"))
    return tmp_path / "bor:row\\ing"


def sparse(his, tmp_path):
    git(his, "sparse-checkout", "set", "--cone", "--sparse-index", "src/data")
    assert not (his / "link" / "x").exists()
    return his


def split_index(his, tmp_path):
    git(his, "update-index", "--split-index", "--untracked-cache")
    return his


def sha256(his, tmp_path):
    shutil.copytree(his, tmp_path / "sha256", symlinks=True, ignore=shutil.ignore_patterns(".git"))
    git(tmp_path, "init", "--quiet", "--object-format=sha256", "sha256")
    commit(tmp_path / "sha256", {})
    return tmp_path / "sha256"


@pytest.mark.parametrize("place", [worktree, shallow, borrowing, sparse, split_index, sha256])
def test_repositories_of_all_kinds(his, ours, tmp_path, place):
    folder = place(his, tmp_path)
    put(folder, {"train.py": "lr = 5\n", "src/new.py": "new", "other/new.py": "new"})
    trees = ours(folder / "src")
    assert trees.repository == Repository(folder, Path(git(folder, "rev-parse", "--absolute-git-dir")), "src")
    new = trees.snapshot()
    assert trees.changed_files(trees.tree_of("HEAD"), new) == ["other/new.py", "src/new.py", "train.py"]
    trees.checkout(new, tmp_path / "tree")
    ignored = (".bin", ".git")
    expected = {path: facts for path, facts in files_of(folder).items() if not path.endswith(ignored)}
    made = files_of(tmp_path / "tree")
    assert made.items() >= expected.items()
    assert "train.py" in expected
    assert sorted(made) == sorted(git(tmp_path / "tree", "ls-files", "-z").split("\0")[:-1])


def test_line_ends_are_those_of_the_user(his, ours, tmp_path):
    git(his, "config", "core.autocrlf", "true")
    put(his, {"new.py": "a\r\nb\r\n", ".git/info/attributes": "*.raw -text\n", "a.raw": "a\nb\n"})
    trees = ours()
    tree = trees.snapshot()
    assert git(tmp_path / "trees" / "store", "show", f"{tree}:new.py") == "a\nb"
    trees.checkout(tree, tmp_path / "tree")
    assert (tmp_path / "tree" / "new.py").read_bytes() == b"a\r\nb\r\n"
    assert (tmp_path / "tree" / "a.raw").read_bytes() == b"a\nb\n"


def test_filters_do_not_run(his, ours, tmp_path):
    for name in ("clean", "smudge", "process"):
        git(his, "config", "--global", f"filter.strip.{name}", f"touch {tmp_path / 'filter-ran'}; cat")
    git(his, "config", "filter.strip.required", "true")
    put(his, {".gitattributes": "*.ipynb filter=strip\n", "a.ipynb": "output"})
    trees = ours()
    tree = trees.snapshot()
    trees.checkout(tree, tmp_path / "tree")
    assert (tmp_path / "tree" / "a.ipynb").read_text() == "output"
    assert not (tmp_path / "filter-ran").exists()
    assert "the git filter strip does not run" in "\n".join(found(trees, trees.tree_of("HEAD"), tree).notes)


def test_large_new_files_are_not_copied(his, ours, monkeypatch):
    monkeypatch.setattr(trees, "MOST_UNTRACKED", 2 * 2**20)
    put(his, {"ckpt.pt": b"0" * 2**20, "b.pt": b"0" * (2**20 + 1), "ignored.bin": b"0" * 2**22})
    store = ours()
    with pytest.raises(ValueError, match=r"^untracked files have 2.00 MiB, .*: add b\.pt to \.gitignore$"):
        store.snapshot()
    put(his, {".git/info/exclude": "*.pt\n"})
    ours().snapshot()


@pytest.mark.parametrize(
    "revision", ["HEAD~9", "--since=2020-01-01", "", "HEAD:train.py", "HEAD^{tree}", "a\0b", "HEAD~1..HEAD"]
)
def test_what_is_no_revision_is_one_line(ours, revision):
    with pytest.raises(ValueError, match=r"^'.*' is not a revision of the repository .*: give a commit.*$"):
        ours().tree_of(revision)


def test_revisions(his, ours):
    git(his, "tag", "-a", "-m", "an annotated one", "v1", "HEAD~1")
    git(his, "checkout", "--quiet", "--detach")
    trees = ours()
    assert trees.commit_of("v1") == git(his, "rev-parse", "HEAD~1")
    assert trees.tree_of("v1") == git(his, "rev-parse", "HEAD~1:")
    assert trees.tree_of("HEAD") == trees.snapshot() == git(his, "rev-parse", "HEAD:")


def nothing(folder):
    folder.mkdir()


def bare(folder):
    git(folder.parent, "init", "--quiet", "--bare", str(folder))


def without_commit(folder):
    git(folder.parent, "init", "--quiet", str(folder))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nothing, "is in no git repository"),
        (bare, "is in a bare repository"),
        (without_commit, "has no commit: commit"),
    ],
)
def test_a_folder_without_a_repository_is_one_line(tmp_path, make, message):
    make(tmp_path / "folder")
    with pytest.raises(ValueError, match=f"^[^\n]*{message}[^\n]*$"):
        Repository.of(tmp_path / "folder")


def test_git_that_is_missing_or_that_distrusts_the_owner_is_one_line(his, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setattr(trees, "_KEPT", trees.re.compile("GIT_(CONFIG|TEST)_.*"))
    with pytest.raises(ValueError, match=r"another user\. Run git config --global --add safe\.directory [^\n]*$"):
        Repository.of(his)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"^git is not installed, or not on PATH[^\n]*$"):
        Repository.of(his)


def test_a_store_whose_repository_is_gone_is_one_line(his, tmp_path):
    Trees.make(Repository.of(his), tmp_path / "trees", [])
    his.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"^.*/his is no longer the git repository of .*$"):
        Trees.read(tmp_path / "trees")


def test_a_kill_in_the_middle_of_a_snapshot_changes_nothing(his, ours, tmp_path):
    put(his, {f"new-{number}": os.urandom(2**16) for number in range(200)})
    trees = ours()
    script = (
        "import sys, pathlib\nfrom lightning_llm.ablate.trees import Trees\n"
        "trees = Trees.read(pathlib.Path(sys.argv[1]))\nprint('begins', flush=True)\nprint(trees.snapshot())"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "trees")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout.readline() == b"begins\n"
        written = tmp_path / "trees" / "store" / "objects"
        while process.poll() is None and len(list(written.iterdir())) < 20:  # the middle: some objects are written
            pass
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(HANGS_S) == -signal.SIGKILL
    tree = trees.snapshot()
    assert len(trees.changed_files(trees.tree_of("HEAD"), tree)) == 200
    trees.checkout(tree, tmp_path / "tree")


# ---- two trees


def found(trees, old, new, has_setup=False, command=("python", "train.py"), new_name=WORKING_TREE):
    return trees.problems(old, new, old_name="HEAD", new_name=new_name, has_setup=has_setup, command=command)


def test_a_patch_takes_the_old_tree_to_the_new_one_and_back(his, ours, tmp_path):
    git(his, "config", "--global", "diff.noprefix", "true")
    git(his, "config", "--global", "diff.external", "false")
    changes = {"train.py": "lr = ä\n", "new/a\tb": bytes(range(256)), os.fsdecode(b"\xe4.txt"): b"latin \xe4\n"}
    put(his, {**changes, "run.sh": None, "src/model.py": b"width = \xff\n"})
    (his / "src" / "old.py").chmod(0o755)
    trees = ours()
    old, new = trees.tree_of("HEAD"), trees.snapshot()
    assert trees.changed_files(old, new) == [
        *sorted([*changes, "run.sh", "src/model.py", "src/old.py"], key=os.fsencode)
    ]
    assert "6 files changed" in trees.stat(old, new)
    assert "train.py" in trees.stat(old, new)
    (tmp_path / "patch").write_bytes(trees.patch(old, new))
    trees.checkout(old, tmp_path / "tree")
    before = files_of(tmp_path / "tree")
    trees.checkout(new, tmp_path / "new")
    git(tmp_path / "tree", "apply", "--index", str(tmp_path / "patch"))
    assert files_of(tmp_path / "tree") == files_of(tmp_path / "new") != before
    git(tmp_path / "tree", "apply", "--index", "-R", str(tmp_path / "patch"))
    assert files_of(tmp_path / "tree") == before


@pytest.mark.parametrize(
    ("files", "options", "errors", "notes"),
    [
        ({}, {}, ["the working tree has no difference from HEAD"], []),
        ({"a.py": ""}, {}, [], []),
        ({"k/a.cu": "", "b.PYX": "", "c.py": ""}, {}, ["compiled sources (b.PYX, k/a.cu): give --setup"], []),
        ({"k/a.cu": ""}, {"has_setup": True}, [], []),
        ({"uv.lock": "", "requirements-dev.txt": "", "a.py": ""}, {}, [], ["dev.txt, uv.lock is not installed"]),
        ({"a.py": "open('{root}/x')", "b.py": "'{root}-2'"}, {}, [], ["change of a.py contains {root}, so"]),
        ({"a.py": ""}, {"command": ["sh", "-c", "cd {root};x"]}, ["names {root}, so both sides would"], []),
        ({"a.py": ""}, {"command": ["--f={root}/src/model.py"]}, ["write {{tree}}/src/model.py instead"], []),
        ({"a.py": ""}, {"command": ["{root}/venv/python", "{root}/data.bin", "{root}-2/src", "{{tree}}/src"]}, [], []),
    ],
)  # fmt: skip
def test_problems_of_a_difference(his, ours, files, options, errors, notes):
    put(his, {name: content.format(root=his) for name, content in files.items()})
    command = [word.format(root=his) for word in options.get("command", ["python", "train.py"])]
    trees = ours()
    problems = found(trees, trees.tree_of("HEAD"), trees.snapshot(), **{**options, "command": command})
    for lines, expected in ((problems.errors, errors), (problems.notes, notes)):
        assert len(lines) == len(expected)
        for line, text in zip(lines, expected, strict=True):
            assert text.format(root=his) in line
            assert "\n" not in line


def test_a_folder_that_one_side_lacks_is_an_error(his, ours):
    put(his, {"src/new/a.py": ""})
    trees = ours(his / "src" / "new")
    (line,) = found(trees, trees.tree_of("HEAD"), trees.snapshot()).errors
    assert line.startswith("src/new is a path that is not in the tree of HEAD")


def test_files_that_a_partial_clone_lacks_are_an_error(his, ours, tmp_path):
    git(his, "config", "uploadpack.allowFilter", "true")
    git(tmp_path, "clone", "--quiet", "--filter=blob:none", f"file://{his}", "partial")
    trees = ours(tmp_path / "partial")
    old, new = trees.tree_of("HEAD~1"), trees.snapshot()
    assert trees.changed_files(old, new) == ["link", "outside", "run.sh", "train.py"]
    (line,) = found(trees, old, new).errors
    assert line.startswith("a partial clone lacks files of HEAD (train.py): run git archive HEAD > /dev/null")


# ---- files of git-lfs, submodules


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


def test_files_of_git_lfs_have_their_content_and_are_no_difference(his, ours, tmp_path):
    content = os.urandom(5000)
    with_lfs(his, content)
    put(his, {"train.py": "lr = 6\n"})
    trees = ours()
    old, new = trees.tree_of("HEAD"), trees.snapshot()
    assert trees.changed_files(old, new) == ["train.py"]
    folder = tmp_path / "tree"
    trees.checkout(new, folder)
    assert (folder / "a.npy").read_bytes() == content
    assert trees.leftovers(folder) == ([], [])
    put(folder, {"a.npy": b"from a run"})
    assert trees.clean(folder, tmp_path / "into").restored == ["a.npy"]
    assert (folder / "a.npy").read_bytes() == content
    assert trees.leftovers(folder) == ([], [])
    errors = found(trees, old, new).errors
    assert [line.partition(":")[0] for line in errors] == [
        f"{side} has pointers of git-lfs in place of files (old.npy)" for side in ("HEAD", WORKING_TREE)
    ]
    assert all("git lfs pull" in line for line in errors)


def test_a_changed_file_of_git_lfs_is_a_difference(his, ours, tmp_path):
    with_lfs(his, b"1234")
    put(his, {"a.npy": b"1235"})
    trees = ours()
    new = trees.snapshot()
    assert trees.changed_files(trees.tree_of("HEAD"), new) == ["a.npy"]
    trees.checkout(new, tmp_path / "tree")
    assert (tmp_path / "tree" / "a.npy").read_bytes() == b"1235"


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


def test_submodules_are_taken_from_the_users_clones(with_submodule, ours, tmp_path):
    shutil.rmtree(tmp_path / "outer")
    trees = ours()
    old, new = trees.tree_of("HEAD"), trees.snapshot()
    assert trees.changed_files(old, new) == ["third party"]
    assert found(trees, old, new) == ([], [])
    for tree, text in ((old, b"1"), (new, b"2")):
        folder = tmp_path / tree
        trees.checkout(tree, folder)
        made = files_of(folder)
        assert made["third party/outer.py"] == (text, False)
        assert made["third party/deep/inner.py"] == (b"1", False)
        put(folder, {"third party/outer.py": "3", "third party/deep/new": ""})
        assert trees.leftovers(folder) == (["third party/outer.py"], ["third party/deep/new"])
        trees.clean(folder, tmp_path / "into")
        assert files_of(folder) == made


def changed_inside(his):
    put(his / "third party", {"outer.py": "3", "__pycache__/outer.pyc": ""})


def changed_deep_inside(his):
    put(his / "third party" / "deep", {"new": ""})


def removed(his):
    git(his, "submodule", "deinit", "--force", "--all")
    shutil.rmtree(his / ".git" / "modules")


def without_folder(his):
    shutil.rmtree(his / "third party")


def with_a_filter(his):
    """Git is not sure whether the files have changed, and would ask the filter."""
    for path, name in {"third party": "outer.py", "third party/deep": "inner.py"}.items():
        git_dir = Path(git(his / path, "rev-parse", "--absolute-git-dir"))
        put(git_dir, {"info/attributes": "*.py filter=strip\n"})
        git(his / path, "config", "filter.strip.clean", f"touch {his.parent / 'filter-ran'}; cat")
        (his / path / name).touch()


def not_fetched(his):
    git(his, "update-index", "--cacheinfo", f"160000,{'1' * 40},third party")
    git(his, "commit", "--quiet", "-m", "a submodule of the future")


@pytest.mark.parametrize(
    ("change", "errors", "notes"),
    [
        (
            changed_inside,
            ["submodule third party has changes (third party/outer.py): commit in the submodule first"],
            [],
        ),
        (
            changed_deep_inside,
            ["submodule third party has changes (third party/deep/new): commit in the submodule first"],
            [],
        ),
        (without_folder, [], ["submodule third party/deep is not initialized: the trees do not have its folder"]),
        (with_a_filter, [], []),
        (removed, [], ["submodule third party is not initialized: the trees do not have its folder"]),
        (not_fetched, ["submodule third party of HEAD: its clone does not have commit 111111111111, run git"], []),
    ],
)
def test_submodules_that_cannot_be_taken(with_submodule, ours, change, errors, notes):
    change(with_submodule)
    put(with_submodule, {"train.py": "lr = 7\n"})
    trees = ours()
    problems = found(trees, trees.tree_of("HEAD"), trees.snapshot())
    assert [line[: len(text)] for line, text in zip(problems.errors, errors, strict=True)] == errors
    assert problems.notes == notes
    assert not (with_submodule.parent / "filter-ran").exists()


# ---- folders


def test_a_folder_is_a_repository_of_its_own(his, ours, tmp_path):
    trees = ours()
    folder = his.parent / "trees" / "a"
    trees.checkout(trees.tree_of("HEAD"), folder, ["data.bin"])
    assert git(folder, "status", "--porcelain") == ""
    assert git(folder, "rev-parse", "HEAD") != git(his, "rev-parse", "HEAD")
    git(folder, "rm", "--quiet", "-r", "src")
    git(folder, "commit", "--quiet", "--message=by a run")
    assert trees.leftovers(folder).changed == ["src/model.py", "src/old.py"]
    assert trees.clean(folder, tmp_path / "into") == (None, [], ["src/model.py", "src/old.py"], [])
    assert trees.leftovers(folder) == ([], [])
    with pytest.raises(ValueError, match=r"^.*/trees/a exists already: remove it first$"):
        trees.checkout(trees.tree_of("HEAD"), folder)


def test_trees_in_the_users_folder_are_not_seen_by_his_git(his):
    trees = Trees.make(Repository.of(his), his / "experiment" / "trees", [])
    tree = trees.snapshot()
    trees.checkout(tree, his / "experiment" / "trees" / "a")
    assert trees.snapshot() == tree == trees.tree_of("HEAD")
    assert git(his, "status", "--porcelain") == ""


def test_a_checkout_that_fails_leaves_nothing(his, ours, tmp_path, monkeypatch):
    trees = ours()
    monkeypatch.setattr(trees, "_link", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trees.checkout(trees.tree_of("HEAD"), tmp_path / "made" / "tree", ["data.bin"])
    assert list((tmp_path / "made").iterdir()) == []


def test_folders_are_made_at_the_same_time(ours, tmp_path):
    tree = ours().tree_of("HEAD")
    folders = [tmp_path / f"tree-{number}" for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda folder: Trees.read(tmp_path / "trees").checkout(tree, folder), folders))
    assert all(files_of(folder) == files_of(folders[0]) for folder in folders)


def test_links_lead_to_the_users_files(his, ours, tmp_path):
    (his / "elsewhere.bin").symlink_to(tmp_path)
    trees = ours()
    folder = tmp_path / "tree"
    links = ["data.bin", "src/data/", str(his / "elsewhere.bin"), "data.bin"]
    trees.checkout(trees.tree_of("HEAD"), folder, links)
    assert [os.readlink(folder / link) for link in ("data.bin", "src/data", "elsewhere.bin")] == [
        str(his / link) for link in ("data.bin", "src/data", "elsewhere.bin")
    ]
    assert trees.leftovers(folder) == ([], [])
    before = link_signature(folder, links[:2])
    assert list(before) == ["data.bin", "src/data/a.bin", "src/data/b.bin"]
    assert before == link_signature(his, links[:2])
    os.utime(his / "src/data/b.bin", ns=(1, 1))
    after = link_signature(folder, links[:2])
    assert {name for name in before if before[name] != after[name]} == {"src/data/b.bin"}
    (folder / "data.bin").unlink()
    put(folder, {"data.bin": "of a run"})
    (folder / "src" / "data").unlink()
    assert trees.leftovers(folder) == (["data.bin", "src/data"], [])
    assert trees.clean(folder, tmp_path / "into")[1:] == ([], ["data.bin", "src/data"], [])
    assert (tmp_path / "into" / "data.bin").read_text() == "of a run"
    assert (folder / "data.bin").read_text() == "data"
    assert (folder / "src" / "data" / "a.bin").read_text() == "a"


def test_a_signature_has_a_limit(his, monkeypatch):
    monkeypatch.setattr(trees, "MOST_SIGNED", 1)
    assert list(link_signature(his, ["src/data", "data.bin"])) == ["src/data/a.bin"]


@pytest.mark.parametrize(
    ("links", "message"),
    [
        (["missing.bin"], r"but .*/his/missing.bin does not exist"),
        (["../gitconfig"], "expected a path in .*/his, relative to it"),
        (["src/../../gitconfig"], "expected a path in"),
        (["/etc"], "expected a path in"),
        (["."], "expected a path in"),
        ([".git/config"], "expected a path in"),
        (["train.py"], r"but the tree has train\.py: link only files that git ignores"),
        (["src"], r"but the tree has src/model\.py, src/old\.py: link only"),
        (["to-src/data"], "but to-src is a link or a file: link to-src itself"),
        (["src/data/a.bin", "src/data"], "but --link src/data has it already"),
    ],
)
def test_what_cannot_be_linked_is_one_line(his, ours, tmp_path, links, message):
    (his / "to-src").symlink_to("src")
    trees = ours()
    with pytest.raises(ValueError, match=f"^--link got '[^\n]*{message}[^\n]*$"):
        trees.checkout(trees.tree_of("HEAD"), tmp_path / "tree", links)
    assert not (tmp_path / "tree").exists()


def test_a_run_leaves_no_traces(his, ours, tmp_path):
    trees = ours()
    folder, into = tmp_path / "tree", tmp_path / "run" / "files"
    trees.checkout(trees.tree_of("HEAD"), folder, ["data.bin"])
    setup = {"build/a.o": "a", "src/fast.so": "", "src/old.py": "generated\n"}
    put(folder, setup)
    (folder / "build" / "empty").mkdir()
    kept = trees.accept(folder)
    assert kept == ["build/a.o", "build/empty/", "src/fast.so"]
    before = content_of(folder, [".git"])
    precious = tmp_path / "precious"
    put(precious, {"file": "precious"})

    put(folder, {"ckpt.pt": "1", "ignored.bin": "2", "out/deep/log": "3", "build/b.o": "4", "train.py": "lr = 2\n"})
    put(folder, {"src/__pycache__/model.pyc": "", "__pycache__/train.pyc": "", "src/old.py": "again", '"quoted"': None})
    (folder / "run.sh").chmod(0o644)
    (folder / "train.py").touch()
    (folder / "out" / "precious").symlink_to(precious)
    (folder / "pkg").symlink_to(precious)
    os.mkfifo(folder / "fifo")
    os.mkfifo(folder / "out" / "deep" / "fifo")
    (folder / "empty").mkdir()
    (folder / "link").unlink()
    (folder / "link").mkdir()
    put(folder, {"link/inside": "5", "src/model.py": None})
    (folder / "src" / "model.py").symlink_to(precious / "file")
    (folder / "out" / "deep").chmod(0o555)

    changed = ['"quoted"', "link", "run.sh", "src/model.py", "src/old.py"]
    new = [
        "build/b.o",
        "ckpt.pt",
        "empty/",
        "fifo",
        "ignored.bin",
        "out/deep/fifo",
        "out/deep/log",
        "out/precious",
        "pkg",
    ]
    left = trees.leftovers(folder)
    assert left.changed == changed
    assert sorted(set(left.new) - set(kept)) == new
    done = trees.clean(folder, into, kept)
    moved = ["build/b.o", "ckpt.pt", "empty", "ignored.bin", "out", "pkg"]
    assert done == (into, moved, changed, ["fifo", "out/deep/fifo"])
    assert content_of(precious) == {"file": (stat.S_IFREG | 0o644, b"precious")}
    after = content_of(folder, [".git"])
    assert {path: facts for path, facts in after.items() if "__pycache__" not in path} == before
    assert "__pycache__/train.pyc" not in after  # of a folder with a restored file
    assert files_of(into) == {
        **{"ckpt.pt": (b"1", False), "ignored.bin": (b"2", False), "out/deep/log": (b"3", False)},
        **{"build/b.o": (b"4", False), "link/inside": (b"5", False), "src/old.py": (b"again", False)},
        **{"out/precious": (str(precious), False), "pkg": (str(precious), False)},
        **{"src/model.py": (str(precious / "file"), False), "run.sh": (b"#!/bin/sh\n", False)},
    }
    assert set(trees.leftovers(folder).new) == set(kept)

    put(folder, {"ckpt.pt": "the next run"})
    assert trees.clean(folder, into, kept).into == into.with_name("files.1")
    assert trees.clean(folder, into, kept).into is None


def test_a_tracked_folder_that_becomes_a_link_is_not_followed(ours, tmp_path):
    trees = ours()
    folder, precious = tmp_path / "tree", tmp_path / "precious"
    trees.checkout(trees.tree_of("HEAD"), folder)
    put(precious, {"old.py": "precious", "deep/x": ""})
    (precious / "deep").chmod(0o500)
    before = content_of(precious)
    shutil.rmtree(folder / "src")
    (folder / "src").symlink_to(precious)
    trees.leftovers(folder)
    trees.clean(folder, tmp_path / "into")
    assert content_of(precious) == before
    assert os.readlink(tmp_path / "into" / "src") == str(precious)
    assert (folder / "src" / "model.py").read_text() == "width = 8\n"
    assert not (folder / "src").is_symlink()


@pytest.mark.usefixtures("obeying_permissions")
def test_folders_without_permissions_are_cleaned_and_removed(ours, tmp_path):
    trees = ours()
    folder = tmp_path / "tree"
    trees.checkout(trees.tree_of("HEAD"), folder)
    put(folder, {"new/deep/a": "", "src/model.py": "x"})
    for name, mode in {"new/deep": 0o000, "new": 0o555, "src": 0o000, ".": 0o500}.items():
        (folder / name).chmod(mode)
    assert trees.leftovers(folder) == (["src/model.py"], ["new/deep/a"])
    put(folder, {"more/a": ""})
    for name, mode in {"new/deep": 0o000, "new": 0o555, "src": 0o000, "more": 0o000, ".": 0o500}.items():
        (folder / name).chmod(mode)
    assert trees.clean(folder, tmp_path / "into").moved == ["more", "new"]
    assert trees.leftovers(folder) == ([], [])
    (folder / "src").chmod(0o000)
    remove_folder(folder)
    assert not folder.exists()
