import pytest
import torch
from torch import nn

from lightning_llm import ModelConfig, Transformer
from lightning_llm.optim import AdamW, check_coverage, param_groups


class Model(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed_tokens = nn.Embedding(7, 4)
        self.conv = nn.Conv1d(4, 4, 3)
        self.proj = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 7)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight


def named(model, groups):
    names = {param: name for name, param in model.named_parameters()}
    return {group["name"]: [names[param] for param in group["params"]] for group in groups}


def test_groups_by_kind():
    model = Model()
    groups = param_groups(model, weight_decay=0.3)
    assert named(model, groups) == {
        "hidden_matrices": ["proj.weight"],
        "matrices": ["conv.weight", "lm_head.weight"],
        "embeddings": ["embed_tokens.weight"],
        "vectors": ["conv.bias", "proj.bias", "norm.weight", "norm.bias", "lm_head.bias"],
    }
    assert [group["weight_decay"] for group in groups] == [0.3, 0.3, 0.0, 0.0]


def test_embeddings_decay_by_option():
    groups = param_groups(Model(), weight_decay=0.3, decay_embeddings=True)
    assert [group["weight_decay"] for group in groups] == [0.3, 0.3, 0.3, 0.0]


def test_tied_weight_is_one_embedding():
    model = Model(tied=True)
    groups = named(model, param_groups(model))
    assert groups["embeddings"] == ["embed_tokens.weight"]
    assert groups["matrices"] == ["conv.weight"]
    assert sum(map(len, groups.values())) == len(list(model.parameters()))


def test_frozen_parameters_and_empty_groups_are_left_out():
    model = Model().requires_grad_(False)
    model.proj.weight.requires_grad_(True)
    assert named(model, param_groups(model)) == {"hidden_matrices": ["proj.weight"]}
    with pytest.raises(ValueError, match="Model has no trainable parameters: nothing to optimize"):
        param_groups(Model().requires_grad_(False))


def test_heads_of_other_names():
    model = Model()
    groups = named(model, param_groups(model, heads=("proj",)))
    assert groups["matrices"] == ["conv.weight", "proj.weight"]
    assert groups["hidden_matrices"] == ["lm_head.weight"]


@pytest.mark.parametrize("outer", [False, True])
def test_groups_of_the_transformer(outer):
    config = ModelConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, position="learned", norm="layernorm"
    )
    model = nn.ModuleDict({"model": Transformer(config)}) if outer else Transformer(config)
    groups = named(model, param_groups(model))
    last = {kind: sorted({".".join(name.split(".")[-2:-1]) for name in names}) for kind, names in groups.items()}
    assert last == {
        "hidden_matrices": ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"],
        "matrices": ["lm_head"],
        "embeddings": ["embed_positions", "embed_tokens"],
        "vectors": ["input_layernorm", "norm", "post_attention_layernorm"],
    }
    assert len(groups["hidden_matrices"]) == 14


@pytest.mark.parametrize(
    ("make", "decay"),
    [
        (lambda groups: AdamW(groups), 0.1),
        (lambda groups: torch.optim.AdamW(groups), 0.01),
        (lambda groups: torch.optim.SGD(groups, weight_decay=0.5), 0.5),
    ],
)
def test_without_a_decay_of_the_groups_the_optimisers_own_holds(make, decay):
    optimizer = make(param_groups(Model()))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [decay, decay, 0.0, 0.0]


def test_groups_by_hand_are_checked():
    model = Model()
    everything = list(model.parameters())
    check_coverage(model, [{"params": everything[:3]}, {"params": everything[3:]}])
    message = r"^in no parameter group: lm_head\.bias; in more than one parameter group: norm\.bias$"
    with pytest.raises(ValueError, match=message):
        check_coverage(model, [{"params": everything[:-1]}, {"params": [model.norm.bias]}])
