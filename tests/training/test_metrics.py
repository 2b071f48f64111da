"""The names of metrics: none means two things, and reading them costs no torch."""

import subprocess
import sys

from lightning_llm.training import metrics


def test_each_name_is_another():
    names = [value for name, value in vars(metrics).items() if name.isupper() and isinstance(value, str)]
    assert len(names) > 15
    assert len(set(names)) == len(names)


def test_they_cost_no_torch():
    words = "import sys, lightning_llm.training.metrics; sys.exit('torch' in sys.modules or 'lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], check=False).returncode == 0
