"""Token store that the ``data.*`` options of a run mean, and whether it still matches them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_llm.data.boundaries import without_boundaries
from lightning_llm.data.corpora import NAMED_CORPORA, is_named, open_corpus
from lightning_llm.data.prepare import BUILT_IN_TOKENIZERS, DEFAULT_TOKENIZER, DEFAULT_VOCAB_SIZE, prepare_store
from lightning_llm.data.token_store import META, TokenStore, read_meta, sha256, shards_of
from lightning_llm.data.tokenizers import Tokenizer, check_bpe
from lightning_llm.io.untrusted import file_name

DEFAULT_CORPUS = "stdlib"


def find_or_prepare(
    *,
    corpus: str | None = None,
    path: str | None = None,
    store: str | None = None,
    tokenizer: str = DEFAULT_TOKENIZER,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    prepare: bool = True,
    progress: bool = False,
    log: Callable[[str], object] = lambda line: None,
) -> TokenStore:
    """The store that a run's ``data.*`` options mean; prepares a missing store if its text is given.

    A named store that exists is used as it is, unless an option that differs from its default contradicts the store's
    source. An unnamed store is in :func:`default_store`, and is made again when its text has changed. To check that,
    the text is read if ``path`` is given or ``store`` is not.

    Args:
        corpus: Name of a corpus. ``None``: ``stdlib`` if neither path nor store is given.
        path: Text: a file, folder or glob, instead of the corpus.
        store: The store's folder.
        tokenizer: As in :func:`prepare_store`, and so are ``vocab_size`` and ``progress``.
        vocab_size: Number of ids of ``bpe``.
        prepare: Whether to read the text at all. If not, the store must exist and is used as it is.
        progress: Show a bar.
        log: Called with a line before a store is prepared, and with lines on its documents and splits after it.

    Raises:
        ValueError: As :func:`prepare_store` and ``TokenStore.open``; if the store was made from something else, or a
            named store is missing and no text is given.
    """
    if tokenizer == "bpe":
        check_bpe(vocab_size)
    check_named_store(store, corpus, path)
    if path is None and corpus is not None and not is_named(corpus):
        known = ", ".join(NAMED_CORPORA)
        raise ValueError(
            f"corpus {corpus!r} is unknown: choose one of {known}, or give a file, folder or glob as data.path"
        )
    given = path if path is not None else corpus or DEFAULT_CORPUS
    out = Path(store) if store is not None else default_store([given], tokenizer, vocab_size)
    if not prepare:
        return TokenStore.open(out)
    if store is not None and out.exists():
        opened = TokenStore.open(out)
        _check_source(opened, corpus, path, tokenizer, vocab_size)
        return opened
    documents = open_corpus([given])
    if out.exists():
        opened = TokenStore.open(out)
        if opened.source.get("fingerprint") == documents.fingerprint and _has_tokenizer(opened, tokenizer):
            return opened
        log(f"The text or the tokenizer of {out} has changed since it was prepared.")
    log(f"Preparing {out} from {given} ({documents.size / 1e6:.1f} MB), tokenizer {tokenizer}.")
    try:
        options: dict[str, Any] = {"tokenizer": tokenizer, "vocab_size": vocab_size, "progress": progress}
        return prepare_store(documents, out, **options, replace=out.exists(), log=log)
    except ValueError:
        if store is None and out.exists():  # another process was faster
            return TokenStore.open(out)
        raise


def check_named_store(store: str | None, corpus: str | None, path: str | None) -> None:
    """Rejects a named store that is missing, unless its text is given too: the name may be a typo.

    Raises:
        ValueError: If the store is missing, and neither a corpus nor a path was given with it.
    """
    if store is None or Path(store).exists() or corpus is not None or path is not None:
        return
    if shards_of(Path(store)):
        TokenStore.open(store)  # raises, with what to do with the shards
    raise ValueError(
        f"data.store {store!r} does not exist: give an existing store, or the text to prepare it from, as "
        "data.path or, on the command line, as data.corpus"
    )


def default_store(inputs: Sequence[str], tokenizer: str, vocab_size: int) -> Path:
    """The folder of an unnamed store, such as ``stores/shakespeare-char`` or ``stores/stdlib-bpe-4096``.

    Paths among the inputs, and that of a ``tokenizer.json``, add eight hex digits of a hash of the absolute paths.
    """
    paths = [given for given in inputs if not is_named(given)]
    words = ["+".join(given if is_named(given) else Path(given).stem.strip("*?[]") for given in inputs)]
    if tokenizer in BUILT_IN_TOKENIZERS:
        words += [tokenizer, str(vocab_size)] if tokenizer == "bpe" else [tokenizer]
    else:
        words = [*words, "file"]
        paths = [*paths, tokenizer]
    if paths:
        words.append(sha256("\n".join(str(Path(path).expanduser().absolute()) for path in paths).encode())[:8])
    return Path("stores", file_name("-".join(words)))


def vocab_size_of_text(corpus: str | None, path: str | None, tokenizer: str) -> int | None:
    """Number of ids with ``char``, ``byte`` or a ``tokenizer.json``; ``None`` if the text may have to be downloaded.

    The options are those of :func:`find_or_prepare`; a text that is prepared is not read again.
    """
    if tokenizer != "char":
        return (Tokenizer.train_byte() if tokenizer == "byte" else Tokenizer.from_file(tokenizer)).vocab_size
    text = str(path or corpus or DEFAULT_CORPUS)
    if ((store := default_store([text], tokenizer, 0)) / META).is_file():
        return int(read_meta(store)["vocab_size"])
    if not path and text != DEFAULT_CORPUS:
        return None
    pieces = (piece for document in open_corpus([text]).documents() for piece in document.pieces())
    return Tokenizer.train_char(pieces).vocab_size


def train_tokens_of(data: Mapping[str, Any]) -> int | None:
    """Tokens of the training text of a config's ``data`` section; ``None`` if one of its stores is not there."""
    text = str(data.get("path") or data.get("corpus") or DEFAULT_CORPUS)
    tokenizer = str(data.get("tokenizer") or DEFAULT_TOKENIZER)
    ids = data.get("vocab_size") or DEFAULT_VOCAB_SIZE
    mixture = data.get("mixture")
    trained = [store for store, weight in mixture.items() if weight] if isinstance(mixture, dict) else mixture
    stores = trained or [data.get("store") or default_store([text], tokenizer, ids)]
    if data.get("raw_dtype") or not all((Path(store) / META).is_file() for store in stores):
        return None
    return sum(int(read_meta(Path(store))["splits"]["train"]["tokens"]) for store in stores)


def _check_source(store: TokenStore, corpus: str | None, path: str | None, tokenizer: str, vocab_size: int) -> None:
    made = store.source
    problems = []
    if path is not None:
        if made.get("fingerprint") != open_corpus([path]).fingerprint:
            problems.append(f"data.path {path!r}{' as it is now' if made.get('inputs') == [path] else ''}")
    elif corpus not in (None, DEFAULT_CORPUS) and made.get("inputs") != [corpus]:
        problems.append(f"data.corpus {corpus!r}")
    if tokenizer != DEFAULT_TOKENIZER and not _has_tokenizer(store, tokenizer):
        problems.append(f"data.tokenizer {tokenizer!r}")
    if vocab_size != DEFAULT_VOCAB_SIZE and made.get("tokenizer") == "bpe" and made.get("vocab_size") != vocab_size:
        problems.append(f"data.vocab_size {vocab_size}")
    if problems:
        inputs = ", ".join(made.get("inputs", []))
        raise ValueError(
            f"token store {store.path} was made from {inputs} with tokenizer {made.get('tokenizer')} of "
            f"{store.vocab_size} ids, not with {' and '.join(problems)}: drop the option, or choose another data.store"
        )


def _has_tokenizer(store: TokenStore, tokenizer: str) -> bool:
    if tokenizer in BUILT_IN_TOKENIZERS:
        return bool(store.source.get("tokenizer") == tokenizer)
    content = Tokenizer.from_file(tokenizer).to_str()
    if store.tokenizer_sha256 == sha256(content.encode()):
        return True
    # `prepare` may have been told other tokens around a text
    assert store.tokenizer_file is not None
    return without_boundaries(Tokenizer.from_file(store.tokenizer_file).to_str()) == without_boundaries(content)
