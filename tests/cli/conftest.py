import pytest
import yaml


@pytest.fixture
def write_config(tmp_path):
    """``write_config(section={…}, …)`` writes a config and returns its path."""

    def write(name="config.yaml", **sections):
        path = tmp_path / name
        path.write_text(yaml.safe_dump(sections), encoding="utf-8")
        return str(path)

    return write
