from lightning_llm.training.callbacks.memory_advice import Saving, cheapest


def test_the_cheapest_come_first_one_of_each_option():
    savings = [
        Saving("a 1", 10, 0.1, ""),
        Saving("a 2", 100, 0.1, ""),
        Saving("b 1", 5, 0.0, ""),
        Saving("c 1", 9, 0, ""),
    ]
    assert [saving.setting for saving in cheapest(savings)] == ["c 1", "b 1", "a 2"]
