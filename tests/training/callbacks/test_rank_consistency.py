"""Ranks that do not run the same."""

import torch
import torch.distributed as dist

from lightning_llm.runs.code import package_digest
from lightning_llm.training.callbacks.rank_consistency import RankConsistencyCheck, differences_of, gather


def facts(**changes):
    return {"option data.seed": 1, "code of lightning_llm": "abc", "host": "a", **changes}


def test_the_same_on_another_host_is_no_difference():
    assert differences_of([facts(), facts(host="b")]) == []


def test_each_process_that_differs_is_named_with_both_values():
    lines = differences_of([facts(), facts(), facts(**{"option data.seed": 2, "host": "c"}), facts(extra="x")])
    assert lines == [
        "process 2 on c: option data.seed is 2 there and 1 in process 0",
        "process 3 on a: extra is x there and None in process 0",
    ]


def test_many_differences_are_counted():
    many = {f"option {n}": n for n in range(7)}
    (line,) = differences_of([facts(), facts(**many)])
    assert line.endswith("and 4 more")


def test_what_is_compared():
    class Data:
        def state_dict(self):
            return {"store": "0123"}

    found = RankConsistencyCheck({"model": {"loss_chunks": 4}}).facts(Data())
    assert found["option model.loss_chunks"] == 4
    assert found["data"] == "0123"
    assert found["code of lightning_llm"] == package_digest()
    assert found["version of torch"] == torch.__version__


def gather_in(rank):
    everything = gather({"rank": rank, "text": "é" * (rank * 100)}, dist.group.WORLD)
    assert everything == [{"rank": 0, "text": ""}, {"rank": 1, "text": "é" * 100}]


def test_facts_of_all_processes_in_their_order(two_processes):
    two_processes(gather_in)
