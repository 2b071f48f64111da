from torch import nn

from lightning_llm.optim import AdamW, GroupRule, param_groups
from lightning_llm.optim.base import saved_state_problems


def test_a_state_of_other_groups_does_not_fit():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    plain, divided = param_groups(model), param_groups(model, rules=[GroupRule(pattern="0", lr_factor=0.5)])
    saved = AdamW(divided).state_dict()
    assert saved_state_problems(divided, saved) == []
    (fault,) = saved_state_problems(plain, saved)
    assert "have ['hidden_matrices:0'], here []" in fault
