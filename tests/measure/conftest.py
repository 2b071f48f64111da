import pytest
import torch.distributed as dist


@pytest.fixture
def one_process_mesh():
    """A device mesh of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
