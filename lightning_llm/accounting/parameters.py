"""How many parameters a model has, by part, and how each count comes about."""

from lightning_llm.accounting.symbolic import Count
from lightning_llm.model.config import BUILT_IN_MLPS, ModelConfig


def parameters_by_part(config: ModelConfig) -> dict[str, int]:
    """The number of parameters of embeddings, attention, MLP, norms and head, all layers together.

    A tied head has no parameters of its own but its bias.

    Raises:
        ValueError: The vocabulary is not known, or the MLP is the user's own class.
    """
    return {part: sum(terms.values()) for part, terms in parameter_terms(config).items()}


def parameter_terms(config: ModelConfig) -> dict[str, dict[str, int]]:
    """The same, term by term: for each part the products that add up to it, written out, and their values.

    The letters are those of ``docs/accounting.md``: V vocabulary, h hidden, i intermediate, H heads, K key and value
    heads, d width of a head, P positions, L layers.
    """
    if config.vocab_size is None:
        raise ValueError("vocab_size is null: give the number of token ids (--vocab-size)")
    if config.mlp not in BUILT_IN_MLPS:
        raise ValueError(f"mlp {config.mlp!r} is a class of its own: its parameters cannot be counted from the config")
    assert config.num_key_value_heads is not None
    assert config.head_dim is not None
    assert config.intermediate_size is not None
    vocab, hidden = Count(config.vocab_size, "V"), Count(config.hidden_size, "h")
    layers, wide = Count(config.num_hidden_layers, "L"), Count(config.intermediate_size, "i")
    heads, kv_heads = Count(config.num_attention_heads, "H"), Count(config.num_key_value_heads, "K")
    head_dim, positions = Count(config.head_dim, "d"), Count(config.max_position_embeddings, "P")
    vectors = 2 if config.norm == "layernorm" else 1  # weight and bias
    terms = {
        "embeddings": [vocab * hidden, *([positions * hidden] if config.position == "learned" else [])],
        "attention": [
            layers * hidden * heads * head_dim * 2,  # q and o
            layers * hidden * kv_heads * head_dim * 2,  # k and v
            *(
                [layers * heads * head_dim, layers * kv_heads * head_dim * 2, layers * hidden]
                if config.attention_bias
                else []
            ),
        ],
        "mlp": [
            layers * hidden * wide * (3 if config.is_gated else 2),
            *([layers * wide * (2 if config.is_gated else 1), layers * hidden] if config.mlp_bias else []),
        ],
        "norms": [
            layers * hidden * (2 * vectors),
            hidden * vectors,
            *([layers * head_dim * 2] if config.qk_norm else []),
        ],
        "head": [
            *([] if config.tie_word_embeddings else [vocab * hidden]),
            *([vocab] if config.lm_head_bias else []),
        ],
    }
    return {part: {count.formula: int(count) for count in counts} for part, counts in terms.items()}


def hidden_matrix_parameters(config: ModelConfig) -> int:
    """Parameters of the matrices of attention and MLP: the group ``hidden_matrices`` of ``optim.param_groups``."""
    assert config.num_key_value_heads is not None
    assert config.head_dim is not None
    assert config.intermediate_size is not None
    attention = 2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
    mlp = (3 if config.is_gated else 2) * config.intermediate_size
    return config.num_hidden_layers * config.hidden_size * (attention + mlp)
