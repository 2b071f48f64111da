import numpy as np
import pytest
from hypothesis import settings

from lightning_llm.data.corpora import open_corpus
from lightning_llm.data.token_store import TokenStore
from lightning_llm.data.token_store_writer import TokenStoreWriter
from lightning_llm.data.tokenizers import Tokenizer

settings.register_profile("no clock", deadline=None)  # a busy machine is no fault
settings.load_profile("no clock")


@pytest.fixture
def make_store(tmp_path):
    """Writes a store of given ids; each split's default is 0, 1, 2, … so that a token tells its own position."""

    def make(train=1000, val=100, test=None, *, vocab_size=None, name="store"):
        ids = {
            split: np.arange(n) if isinstance(n, int) else np.asarray(n)
            for split, n in (("train", train), ("val", val))
        }
        if test is not None:
            ids["test"] = np.arange(test)
        vocab_size = vocab_size or max(int(each.max()) for each in ids.values()) + 1
        tokenizer, source = Tokenizer.train_byte().to_str(), {"inputs": ["made up"], "fingerprint": "0"}
        with TokenStoreWriter(tmp_path / name, vocab_size=vocab_size, tokenizer=tokenizer, source=source) as writer:
            for split, each in ids.items():
                writer.write(split, each, text_bytes=2 * len(each), documents=1)
        return TokenStore.open(tmp_path / name)

    return make


def fault(call):
    """The one line of a ``ValueError``."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - each caller looks at the message
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def texts(*inputs, **options):
    """The documents of a corpus."""
    corpus = open_corpus([str(given) for given in inputs], **options)
    return ["".join(document.pieces()) for document in corpus.documents()]


def text_of(store, split):
    return Tokenizer.from_file(store.tokenizer_file).decode(store.tokens(split))
