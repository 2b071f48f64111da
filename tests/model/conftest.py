import sys
import types

import pytest

from lightning_llm.model.attention import CausalSelfAttention
from tests.model.made import BadBias, BadRotation, Distance, LosesItsShape, NoContext, TwoWords


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch):
    module = types.ModuleType("elsewhere")
    for kind in (TwoWords, NoContext, LosesItsShape, BadRotation, BadBias, Distance, CausalSelfAttention):
        setattr(module, kind.__name__, kind)
    module.number = 3
    monkeypatch.setitem(sys.modules, "elsewhere", module)
