import pytest
import torch
from torch import nn

from lightning_llm import ModelConfig, Transformer
from lightning_llm.optim import AdamW, GroupRule, MuonAdamW, apply_group_factors, check_coverage, param_groups


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


RULES = [
    GroupRule(pattern="lm_head.bias", lr_factor=3.0),
    GroupRule(pattern="lm_head", lr_factor=0.5, weight_decay_factor=2.0),
    GroupRule(pattern="embed_*", lr_factor=0.1, weight_decay_factor=1.0),
    GroupRule(pattern="vectors", weight_decay_factor=0.0),
]


@pytest.mark.parametrize("outer", [False, True])
def test_a_rule_is_for_names_modules_and_groups_and_the_first_applies(outer):
    model = nn.ModuleDict({"transformer": Model()}) if outer else Model()
    found = {
        name: [each.removeprefix("transformer.") for each in names]
        for name, names in named(model, param_groups(model, rules=RULES)).items()
    }
    assert found == {
        "hidden_matrices": ["proj.weight"],
        "matrices": ["conv.weight"],
        "matrices:lm_head": ["lm_head.weight"],
        "embeddings:embed_*": ["embed_tokens.weight"],
        "vectors:vectors": ["conv.bias", "proj.bias", "norm.weight", "norm.bias"],
        "vectors:lm_head.bias": ["lm_head.bias"],
    }


@pytest.mark.parametrize(
    "make",
    [
        lambda groups: AdamW(groups, lr=0.2, weight_decay=0.4),
        lambda groups: torch.optim.SGD(groups, lr=0.2, weight_decay=0.4),
    ],
)
def test_factors_multiply_what_any_optimizer_has_filled_in(make):
    factors = {"proj.weight": 0.5, "lm_head.weight": 0.25, "*.bias": 1.0}
    optimizer = apply_group_factors(make(param_groups(Model(), rules=RULES, lr_factors=factors)))
    assert {group["name"]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups} == {
        "hidden_matrices:proj.weight": (0.1, 0.8),  # what a step takes off, lr times decay, is that without the factor
        "matrices": (0.2, 0.4),
        "matrices:lm_head:lm_head.weight": (0.025, 3.2),
        "embeddings:embed_*": (pytest.approx(0.02), 0.4),  # which do not decay without the rule
        "vectors:vectors": (0.2, 0.0),
        "vectors:vectors:*.bias": (0.2, 0.0),
        "vectors:lm_head.bias:*.bias": (pytest.approx(0.6), 0.0),
    }


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ["embd_*"],
            r"^pattern 'embd_\*' matches no trainable parameter, such as embed_tokens\.weight in group",
        ),
        (["embed*", "embed_tokens"], "^pattern 'embed_tokens' decides nothing: patterns before it match all that it"),
        (["norm", "norm"], "^pattern 'norm' decides nothing"),
    ],
)
def test_a_pattern_that_decides_nothing_is_an_error(patterns, message):
    with pytest.raises(ValueError, match=message):
        param_groups(Model(), rules=[GroupRule(pattern=pattern, lr_factor=2.0) for pattern in patterns])


def test_a_rule_checks_itself_and_names_what_the_optimizer_lacks():
    with pytest.raises(ValueError, match=r"^pattern must be a name.* got ''; lr_factor must be a number of at least 0"):
        GroupRule(pattern="", lr_factor=-1.0)
    with pytest.raises(ValueError, match=r"^Rprop has no weight_decay that a group could multiply"):
        apply_group_factors(
            torch.optim.Rprop(param_groups(Model(), rules=[GroupRule(pattern="proj", weight_decay_factor=2.0)]))
        )


def test_a_tied_weight_has_both_names():
    model = Model(tied=True)
    assert "embeddings:lm_head" in named(model, param_groups(model, rules=[GroupRule(pattern="lm_head")]))


def test_divided_hidden_matrices_stay_with_muon():
    groups = param_groups(nn.Sequential(nn.Linear(3, 4)), rules=[GroupRule(pattern="0", lr_factor=0.5)])
    algorithms = {group["name"]: group["algorithm"] for group in apply_group_factors(MuonAdamW(groups)).param_groups}
    assert algorithms == {"hidden_matrices:0": "muon", "vectors:0": "adamw"}
