"""What the lines of a plan say of its alternatives is what the accounting says of each of them."""

import pytest

from lightning_llm.accounting import find_device, step_memory
from lightning_llm.accounting.plan_report import decisions
from lightning_llm.accounting.planner import Planner, SearchSpace, StepChoice, configured
from lightning_llm.accounting.step_settings import StepSettings
from lightning_llm.accounting.step_time import CostModel
from lightning_llm.io.units import shown_size
from lightning_llm.model.config import ModelConfig

pytestmark = pytest.mark.usefixtures("traced_once")

CONFIG = ModelConfig(
    vocab_size=8192, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=256, mlp="swiglu"
)


def test_the_next_larger_micro_batch_needs_what_its_own_step_needs():
    """On CUDA the loss takes chunks from some size on, so that memory is far from a line between few rows and many."""
    step = StepSettings(rows=1, device="cuda", context_length=512)
    cost_model = CostModel(device=find_device("H200"))
    planner = Planner(SearchSpace(config=CONFIG, cost_model=cost_model, step=step, global_batch_size=45))
    few, chosen, larger = (StepChoice(rows, 0, "none", None, None, "ddp") for rows in (1, 3, 5))
    plan = planner.plan(chosen)
    whole = step_memory(configured(CONFIG, larger), planner.step_of(larger)).peak
    (line,) = decisions(planner, plan, {"rows": planner.plan(few)}, plan.needed)
    assert line.endswith(f"with nothing else changed 5 would need {shown_size(whole)}")
    (line,) = decisions(planner, plan, {"rows": planner.plan(few)}, whole)
    assert line.endswith("with nothing else changed 5 fits, but is not faster")
