"""The ideas of a stream as the command line describes them, for each program: options of ``fit``, or a command."""

import abc
import argparse
import dataclasses
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from lightning_llm.ablate.command.program import OPTIONS, TREE
from lightning_llm.ablate.command.spec import COMMAND_LINE, STORE, Command, Tree
from lightning_llm.ablate.experiment import Experiment, experiment_of
from lightning_llm.ablate.matching import Flops, Tokens
from lightning_llm.ablate.names import BASELINE
from lightning_llm.ablate.options import flat_options, folder_name, varied
from lightning_llm.ablate.plan import DIFFS, Plan, file_hash
from lightning_llm.ablate.planning import Draft
from lightning_llm.ablate.stream import Asked, Stream, StreamRecord, Verdict, begin, experiment_of_idea, settings
from lightning_llm.ablate.trees.store import Trees
from lightning_llm.cli import ablate_run
from lightning_llm.cli.ablate_variants import command_in
from lightning_llm.io.config_file import config_path, read_config
from lightning_llm.io.shell import shell_path

if TYPE_CHECKING:
    from lightning_llm.ablate.fit.variant import Variant

TREE_NAME = 12  # digits of a tree's hash in the name of an idea


class First(NamedTuple):
    """The beginning of a new stream.

    Attributes:
        record: Of ``stream.json``.
        base: The baseline, as ``first.yaml`` holds it.
        draft: The first idea as it was read; ``None``: it is read once the stream is there.
    """

    record: StreamRecord
    base: Mapping[str, Any]
    draft: Draft | None


class Ideas(abc.ABC):
    """Reads the ideas of a stream for the program whose runs it compares.

    Args:
        options: Of the command ``ablate try``.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    @property
    @abc.abstractmethod
    def is_given(self) -> bool:
        """Whether the command describes an idea; else it continues one that was interrupted."""

    @abc.abstractmethod
    def asked(self) -> Asked:
        """The beginning of a stream, as this command describes it."""

    @abc.abstractmethod
    def first(self) -> First:
        """Read the first idea of a new stream.

        Raises:
            ValueError: It, or its baseline, cannot run.
        """

    @abc.abstractmethod
    def experiment(self, stream: Stream) -> Experiment:
        """The next idea of a stream."""

    @abc.abstractmethod
    def draft(self, stream: Stream, experiment: Experiment) -> Draft:
        """An idea, read and compared with its baseline as it is now.

        Raises:
            ValueError: It cannot run, or what all runs of the stream share has changed.
        """

    @abc.abstractmethod
    def refuse_changed(self, stream: Stream) -> None:
        """Refuse what makes new runs no pairs with those before.

        Raises:
            ValueError: Something has changed.
        """

    def known(self, stream: Stream, experiment: Experiment) -> Verdict | None:
        """The verdict that the journal has of an idea; ``None``: none that answers this command."""
        return None

    def is_last(self, stream: Stream) -> bool:
        """Whether the last verdict is the answer to this command, which may have been killed before it said so."""
        last = stream.verdicts[-1]
        _, changes = self.described
        return (last.options, last.match, last.because) == (changes, self.match, self._options.because)

    @property
    def described(self) -> tuple[str, dict[str, Any]]:
        """The name of an idea of options, and what it changes."""
        ((name, changes),) = varied(self._options.vary).items()
        return folder_name(name), flat_options(changes)

    @property
    @abc.abstractmethod
    def match(self) -> str:
        """The rule that makes both equal."""

    def _idea(
        self, stream: Stream, name: str, changes: Mapping[str, Any], base: Mapping[str, Any] | None = None
    ) -> Experiment:
        options = self._options
        again, because = options.again, options.because
        return experiment_of_idea(stream, name, changes, match=self.match, because=because, again=again, base=base)


class FitIdeas(Ideas):
    """Ideas that change options of ``fit``."""

    @property
    def is_given(self) -> bool:
        """Whether there is a ``--vary``."""
        return bool(self._options.vary)

    @property
    def match(self) -> str:
        """``--match``, by default equal FLOPs."""
        return self._options.match or Flops.name

    def asked(self) -> Asked:
        """Configs of the baseline with their hashes, and arguments of ``fit``."""
        files = {file: file_hash(Path(config_path(file))) for file in self._options.baseline or ()}
        arguments: list[str] = []
        for argument in self._options.of_fit:
            arguments += [argument] if argument.startswith("--") else [f"{arguments.pop()}={argument}"]
        return Asked(baseline=files, options=sorted(arguments))

    def first(self) -> First:
        """Read the first idea before there is a folder, so that a mistake leaves none."""
        options = self._options
        if options.give_up or not options.vary or not options.baseline:
            advice = "give --baseline CONFIG and --vary OPTION=VALUE to begin it, or --command TEXT"
            raise ValueError(f"{options.stream} holds no idea yet: {advice}")
        fields = settings(options.alpha, options.minimal_gain, options.workers, is_thorough=options.thorough)
        asked = self.asked()
        from lightning_llm.cli import ablate_fit

        ablate_run.print_notes(ablate_fit.trust_baseline(options.baseline))
        base = ablate_fit.read_variant(BASELINE, options.baseline, options.of_fit)
        record = StreamRecord(asked=asked, environment=ablate_fit.environment(base), **fields)
        with tempfile.TemporaryDirectory() as folder:
            begin(Path(folder), record, base.options)
            stream = Stream.read(Path(folder))
            experiment = self.experiment(stream)
            ablate_run.print_notes([f"checking the baseline and {', '.join(experiment.variants)}"])
            draft = ablate_run.draft_of(experiment, quiet=True)
            self._refuse_changed(stream, draft.baseline)
        ablate_run.print_notes(draft.notes)
        return First(record, base.options, draft)

    def experiment(self, stream: Stream) -> Experiment:
        """The next idea, on the config of the baseline as it is now."""
        return self._idea(stream, *self.described)

    def draft(self, stream: Stream, experiment: Experiment) -> Draft:
        """An idea, read by ``fit``'s parser."""
        draft = ablate_run.draft_of(experiment)
        self._refuse_changed(stream, draft.baseline)
        return draft

    def refuse_changed(self, stream: Stream) -> None:
        """Refuse another environment, or other code of adopted ideas."""
        from lightning_llm.cli import ablate_fit

        self._refuse_changed(stream, ablate_fit.read_variant(BASELINE, [str(stream.baseline())], []))

    @staticmethod
    def _refuse_changed(stream: Stream, base: "Variant") -> None:
        from lightning_llm.cli import ablate_fit

        stream.refuse_changed(ablate_fit.environment(base), ablate_fit.own_code(base))


class CommandIdeas(Ideas):
    """Ideas that change options of a command, or the code of a repository.

    Args:
        options: Of the command ``ablate try``.
        command: That the stream began with; ``None``: it begins.
        is_free: Whether no idea waits for its verdict.
    """

    def __init__(self, options: argparse.Namespace, command: Command | None, *, is_free: bool = True) -> None:
        super().__init__(options)
        self._command = command
        self._is_free = is_free

    @property
    def match(self) -> str:
        """A command runs as it says."""
        return self._options.match or Tokens.name

    @property
    def is_given(self) -> bool:
        """Whether there is a ``--vary``; in a stream of trees, the working tree, once no other idea waits."""
        return self._is_free if self._command is not None and self._command.trees else bool(self._options.vary)

    def asked(self) -> Asked:
        """The command; its own folder is that of the first call."""
        if not command_in(self._options):
            return Asked()
        command, metric = self._read()
        return Asked(command=command, metric=metric)

    def _read(self) -> tuple[Command, str]:
        """The command and its metric, as the options give them."""
        options = self._options
        given = command_in(options) | ({"metric": options.metric} if options.metric else {})
        if unsuitable := next((key for key in ("revisions", "unchanged") if key in given), None):
            option = {"unchanged": "null"}.get(unsuitable, unsuitable)
            raise ValueError(f"--{option} is for ablate run: an idea of a stream is a --vary, or the working tree")
        if "command" not in given:
            if self._command is None or "against" not in given or len(given) > 1:
                raise ValueError(f"--{next(iter(given)).replace('_', '-')} needs --command, which says what trains")
            revision = self._command.trees[BASELINE].revision if self._command.trees else ""
            if given["against"] != revision:
                advice = "the baseline of a stream is what it has adopted: leave --against out"
                raise ValueError(f"--against {given['against']} is not what the stream began with: {advice}")
            return self._command, ""
        variants: dict[str, Any] = {} if "against" in given else {"variants": {"idea": {}}}
        experiment = experiment_of({**variants, **given}, COMMAND_LINE, "try")
        assert experiment.command is not None
        return experiment.command, experiment.metric

    def first(self) -> First:
        """The command, and the first baseline: a revision, or no options."""
        from lightning_llm.ablate.command import planning

        options = self._options
        if options.baseline or options.of_fit:
            given = "--baseline" if options.baseline else options.of_fit[0]
            raise ValueError(f"{given} is for fit, and --command is in place of fit: give one of them")
        command, metric = self._read()
        if bool(options.vary) == bool(command.trees):
            both = "both" if options.vary else "neither"
            advice = "an idea is --vary OPTION=VALUE, or with --against REV the code of the working tree"
            raise ValueError(f"{options.stream}: {both} of --vary and --against: {advice}")
        fields = settings(options.alpha, options.minimal_gain, options.workers, is_thorough=options.thorough)
        base: dict[str, Any] = {OPTIONS: {}}
        if command.trees:
            baseline = planning.first_tree(command, options.stream)
            command = replace(command, trees={BASELINE: baseline})
            base[TREE] = baseline.hash
        self._command = command
        asked = Asked(command=command, metric=metric)
        return First(StreamRecord(asked=asked, environment=planning.environment(command), **fields), base, None)

    def experiment(self, stream: Stream) -> Experiment:
        """The next idea, on the options and the tree of the baseline as it is now."""
        from lightning_llm.ablate.command import planning

        command = stream.record.asked.command
        assert command is not None
        base = read_config(stream.baseline())
        if command.trees:
            trees = {BASELINE: Tree(hash=base[TREE], revision=command.trees[BASELINE].revision)}
            own = planning.working_tree(command, stream.out)
            name = own.hash[:TREE_NAME]
            changes = dict[str, Any]()
            command = replace(command, trees={**trees, name: own})
        else:
            name, changes = self.described
        keys = {"command": command.text, "metric": stream.record.asked.metric, "options": base[OPTIONS]}
        idea = self._idea(stream, name, changes, planning.keys_of(command, keys))
        return replace(idea, command=replace(command, store=planning.STORE_OF_IDEA))

    def draft(self, stream: Stream, experiment: Experiment) -> Draft:
        """An idea whose revisions were compared."""
        from lightning_llm.ablate.command import planning

        self.refuse_changed(stream)
        draft = planning.draft_of(experiment, stream.out)
        ablate_run.print_notes(draft.notes)
        return dataclasses.replace(draft, is_reused=True)

    def refuse_changed(self, stream: Stream) -> None:
        """Refuse another device."""
        from lightning_llm.ablate.command import planning

        command = stream.record.asked.command
        assert command is not None
        stream.refuse_changed(planning.environment(command), {})
        if stream.unfinished is not None and command.trees:
            idea = f"{stream.unfinished.name} has no verdict yet, and is continued as it was"
            ablate_run.print_notes([f"{idea}: edits since then are not looked at; --give-up ends it"])

    def known(self, stream: Stream, experiment: Experiment) -> Verdict | None:
        """The verdict of the same tree on the same baseline, if it has one."""
        trees = [] if experiment.command is None else list(experiment.command.trees.values())
        if not trees:
            return None
        base, own = (tree.hash for tree in trees)
        if base == own:
            problem = "has no difference from the baseline of the stream"
            raise ValueError(f"the working tree {problem}: change a file, then give the same command")
        since = stream.adopted[-1].place if stream.adopted else 0  # before, the baseline was another one
        same = [verdict for verdict in stream.verdicts[since:] if verdict.name == own[:TREE_NAME]]
        return same[-1] if same else None


def ideas_of(options: argparse.Namespace, stream: Stream | None) -> Ideas:
    """The reader of the ideas of a stream.

    Args:
        options: Of the command ``ablate try``.
        stream: ``None``: it begins.
    """
    if stream is not None:
        command = stream.record.asked.command
        return (
            FitIdeas(options) if command is None else CommandIdeas(options, command, is_free=stream.unfinished is None)
        )
    return CommandIdeas(options, None) if command_in(options) else FitIdeas(options)


def patch_of(stream: Stream, verdict: Verdict) -> Path | None:
    """The file with the diff of an idea; ``None``: it changes no code."""
    path = stream.folder(verdict) / DIFFS / f"{verdict.name}.patch"
    return path.resolve() if path.is_file() else None


def patch_lines(stream: Stream, patch: Path | None, verdict: Verdict) -> list[str]:
    """Lines about the diff of an idea, and what takes it back if it was not adopted.

    Files that only the idea has stay: they may be the user's, and were there before.
    """
    command = Plan.read(stream.folder(verdict)).experiment.command
    if patch is None or command is None:
        return []
    lines = [f"Its diff: {patch}"]
    if verdict.is_adopted:
        return lines
    trees = Trees.read(stream.out / STORE)
    added = trees.added_files(command.trees[BASELINE].hash, command.trees[verdict.name].hash)
    kept = "".join(f"{shlex.quote(f'--exclude={path}')} " for path in added)
    lines.append(f"To take it back: git -C {shell_path(trees.repository.root)} apply -R {kept}{shell_path(patch)}")
    if added:
        lines.append(f"That keeps its new files ({', '.join(added[:5])}): delete those that belong to the idea.")
    return lines
